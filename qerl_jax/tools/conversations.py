"""Multi-turn rows: the policy's tool calls are parsed, executed and answered while other rows are sampled."""

import concurrent.futures
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from qerl_jax.config import CallFormat, ToolsConfig
from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.distributed import messages
from qerl_jax.tools import tool_calls
from qerl_jax.tools.environments import Session, Snapshot, Toolbox, Toolboxes, error
from qerl_jax.tools.shared_tools import FarSession
from qerl_jax.tools.tool_calls import Call

# Appended to a tool's result that was truncated.
_CUT = " ... (the rest is cut)"


@dataclasses.dataclass(frozen=True)
class Tools:
    """The tools that the policy may call, and the format of the calls.

    Attributes:
        cfg: Limits of calls and answers.
        toolboxes: The tools and the environments.
        call_format: The format of calls; None if `cfg` has a pattern for them.
    """

    cfg: ToolsConfig
    toolboxes: Toolboxes
    call_format: CallFormat | None

    @classmethod
    def of(
        cls,
        cfg: ToolsConfig,
        tokenizer: Tokenizer,
        toolboxes: Toolboxes,
        log: Callable[[str], None] = lambda text: None,
    ) -> Self:
        """Returns the tools with the limits of a config; the chat template defines the format of calls if `cfg` does not.

        `log` is called with a warning for tools that cannot be killed, and for a template without tools.

        Raises:
            ConfigError: If the template asks for calls in an unknown format.
        """
        template = tokenizer.chat_template
        how = None if cfg.call_pattern else cfg.call_format or tool_calls.detect(template)
        if toolboxes.unimportable:
            log(
                f"warning: tools: {', '.join(toolboxes.unimportable)} can only run in this process, where a call "
                "that hangs is left behind and not killed: define them in a module or a file"
            )
        if not _has_place(tokenizer):
            log(
                "warning: tools: the chat template has no place for them, so the prompt must say what there is "
                "and how it is called"
            )
        return cls(cfg, toolboxes, how)

    def close(self) -> None:
        """Ends all processes."""
        self.toolboxes.close()

    def shown(self, tokenizer: Tokenizer, toolbox: Toolbox) -> Tokenizer:
        """Returns a tokenizer whose chat template lists the tools of the toolbox."""
        if not _has_place(tokenizer):
            return tokenizer
        return tokenizer.with_options(tools=toolbox.schemas)

    def encode(self, tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[list[int]]:
        """Returns the token ids of each problem's prompt, which lists the tools of that problem.

        Raises:
            ValueError: If a problem names an environment that the run does not have (the message has the problem's
                index); and as `Tokenizer.render`.
        """
        places: dict[Toolbox, list[int]] = {}
        for index, problem in enumerate(problems):
            try:
                places.setdefault(self.toolboxes.of(problem.columns), []).append(index)
            except ValueError as error:
                raise ValueError(f"problem {index}: {error}") from error
        ids: dict[int, list[int]] = {}
        for toolbox, chosen in places.items():
            prompts = [problems[index].prompt for index in chosen]
            ids |= zip(chosen, self.shown(tokenizer, toolbox).encode(prompts), strict=True)
        return [ids[index] for index in range(len(problems))]

    def read(self, text: str, schemas: Sequence[dict[str, Any]]) -> tuple[str, list[Call]]:
        """Splits a turn into its text without the calls, and the calls; `schemas` are those of the row's tools."""
        if self.cfg.call_pattern is not None:
            return tool_calls.parse_pattern(text, self.cfg.call_pattern, schemas)
        return tool_calls.parse(text, self.call_format)


def _has_place(tokenizer: Tokenizer) -> bool:
    return "tools" in tokenizer.chat_template


@messages.sent
@dataclasses.dataclass(frozen=True)
class Conversation:
    """The conversation of a row.

    Attributes:
        messages: Messages of the policy and of the tools, in order.
        calls: Number of calls that were answered.
        failures: Number of these that were answered with an error.
        is_limited: Whether the last turn's call was left unanswered because the limit of turns or of tokens was
            reached.
        reward: The environment's own reward; None if it gave none.
        public: Public attributes of the environment after the row; None without an environment.
        environment: Class name of the environment; None without one.
    """

    messages: tuple[dict[str, Any], ...]
    calls: int = 0
    failures: int = 0
    is_limited: bool = False
    reward: float | None = None
    public: dict[str, Any] | None = None
    environment: str | None = None

    @property
    def turns(self) -> int:
        """The number of turns of the policy."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def text(self) -> str:
        """The text of the policy's last turn."""
        return self.messages[-1]["content"]

    @property
    def snapshot(self) -> Snapshot:
        """The environment after the row, as reward functions see it."""
        return Snapshot(**(self.public or {}), _reward=self.reward, _class=self.environment)


def transcript(messages: Sequence[dict[str, Any]]) -> str:
    """Returns all turns as one readable text; an answer of a tool follows the tool's name in brackets."""
    return "\n".join(map(_line, messages))


def _line(message: dict[str, Any]) -> str:
    if message["role"] == "tool":
        return f"[{message['name']}] {message['content']}"
    lines = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        lines.append(f"[call] {name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")
    return "\n".join(lines)


@dataclasses.dataclass(eq=False)
class _Row:
    """A conversation that has not ended.

    `begun` is the index of the current turn's first token; `before` is the conversation before the last answer, which is
    restored if that answer does not fit.
    """

    session: Session | FarSession
    begun: int = 0
    answered: int = 0
    talk: Conversation = Conversation(())
    before: Conversation = Conversation(())


class Conversations:
    """The conversations of one rollout: a `TurnTaker` of the engine."""

    def __init__(self, tools: Tools, tokenizer: Tokenizer, problems: Sequence[Problem]):
        """Creates a session per row, which has one of the problems; no environment is started yet."""
        self._tools, self._tokenizer = tools, tokenizer
        self._rows = [_Row(tools.toolboxes.session(_columns(problem))) for problem in problems]
        self._is_abandoned = False
        # The tokenizers of transformers are not thread-safe.
        self._lock = threading.Lock()

    def __call__(self, row: int, tokens: Sequence[int]) -> concurrent.futures.Future | None:
        """Answers a turn that has ended, of the row with this index, given all tokens of its completion so far.

        Returns:
            A future of the token ids of the reply; None, which ends the row, if the turn has no call or as many
            turns as allowed have been answered.
        """
        state, limit = self._rows[row], self._tools.cfg.max_tool_calling_iterations
        message, calls = self._read(tokens[state.begun :], state)
        is_limited = bool(calls) and limit is not None and state.answered >= limit
        state.talk = dataclasses.replace(state.talk, is_limited=is_limited)
        if not calls or is_limited:
            return None
        submit = self._tools.toolboxes.executor.submit
        return submit(self._answer, state, message, calls, list(tokens))

    def _answer(
        self, row: _Row, message: dict[str, Any], calls: Sequence[Call], tokens: list[int]
    ) -> list[int]:
        self._require_going_on()
        answers, failures = [], 0
        for call in calls:
            if call.error is None:
                reply = row.session.call(call.name, call.arguments)
            else:
                reply = error(call.error)
            failures += reply.failed
            name = call.name or "error"
            answers.append({"role": "tool", "name": name, "content": self._cut(reply.text)})
        tokenizer = self._tools.shown(self._tokenizer, row.session.toolbox)
        after_stop = tokens[-1] in self._tokenizer.stop_tokens
        with self._lock:
            reply_ids = tool_calls.answer(tokenizer, answers, after_stop=after_stop)
        row.before, talk = row.talk, row.talk
        row.talk = dataclasses.replace(
            talk,
            messages=(*talk.messages, message, *answers),
            calls=talk.calls + len(calls),
            failures=talk.failures + failures,
        )
        row.answered, row.begun = row.answered + 1, len(tokens) + len(reply_ids)
        return reply_ids

    def ended(self, row: int, tokens: Sequence[int]) -> concurrent.futures.Future:
        """Ends a row, given all its tokens; returns a future of its `Conversation`, with the environment's reward."""
        return self._tools.toolboxes.executor.submit(self._finish, self._rows[row], list(tokens))

    def _finish(self, row: _Row, tokens: list[int]) -> Conversation:
        self._require_going_on()
        if len(tokens) < row.begun:  # the last answer did not fit
            messages = row.talk.messages[: len(row.before.messages) + 1]
            talk = dataclasses.replace(row.before, messages=messages, is_limited=True)
        else:
            message, _ = self._read(tokens[row.begun :], row)
            talk = dataclasses.replace(row.talk, messages=(*row.talk.messages, message))
        with contextlib.closing(row.session):
            snapshot = row.session.finish()
        environment = row.session.toolbox.environment_name
        public = {k: v for k, v in vars(snapshot).items() if not k.startswith("_")}
        return dataclasses.replace(
            talk,
            reward=snapshot.get_reward(),
            public=None if environment is None else public,
            environment=environment,
        )

    def _require_going_on(self) -> None:
        """Raises CancelledError if sampling has failed: a thread may come to a row before `abandon` does."""
        if self._is_abandoned:
            raise concurrent.futures.CancelledError

    def _read(self, turn: Sequence[int], row: _Row) -> tuple[dict[str, Any], list[Call]]:
        """Returns the message of a turn, and its calls."""
        turn = list(turn)
        while turn and turn[-1] in self._tokenizer.stop_tokens:
            turn.pop()
        with self._lock:
            # Tags of calls may be special tokens.
            text = self._tokenizer.hf.decode(turn, clean_up_tokenization_spaces=False)
        content, calls = self._tools.read(text, row.session.toolbox.schemas)
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [call.to_message() for call in calls]
        return message, calls

    def _cut(self, text: str) -> str:
        """Truncates a tool's result to its limit of tokens."""
        limit = self._tools.cfg.max_reply_tokens
        # A tool's text may contain lone surrogates, which tokenizers refuse.
        text = text.encode(errors="replace").decode()
        with self._lock:
            (ids,) = self._tokenizer.ids([text])
            return text if len(ids) <= limit else self._tokenizer.decode(ids[:limit]) + _CUT

    def abandon(self) -> None:
        """Ends the processes of rows that have not ended; rows that wait for a thread start none."""
        self._is_abandoned = True
        for row in self._rows:
            row.session.abandon()


def observed(tools: Tools, problems: Sequence[Problem]) -> list[Problem]:
    """Returns the problems with each environment's first observation in the prompt.

    As in TRL, it is appended to the last user message.

    Raises:
        ValueError: If an environment cannot be reset, or has an observation for a prompt that is not a chat.
    """
    observations = tools.toolboxes.observations([_columns(problem) for problem in problems])
    return [_with(problem, text) for problem, text in zip(problems, observations, strict=True)]


def _columns(problem: Problem) -> dict[str, Any]:
    """Returns the arguments of an environment's reset: the same row as in TRL."""
    return {"prompt": problem.prompt, **problem.columns}


def _with(problem: Problem, text: str | None) -> Problem:
    if text is None:
        return problem
    if isinstance(problem.prompt, str):
        raise ValueError("an environment speaks to chats: a prompt must be messages, not a text")
    messages = [dict(message) for message in problem.prompt]
    places = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if places:
        messages[places[-1]]["content"] += text
    else:
        messages.append({"role": "user", "content": text})
    return dataclasses.replace(problem, prompt=messages)
