"""Rows of several turns: the policy's calls are read, carried out, and answered while other rows are sampled."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, Self

from qerl_jax import messages
from qerl_jax.config import CallFormat, ToolsConfig
from qerl_jax.data import tool_calls
from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.rewards.environments import Session, Snapshot, Toolbox, Toolboxes, error
from qerl_jax.rewards.shared_tools import FarSession

# Added to the result of a call that was cut at its limit.
_CUT = " ... (the rest is cut)"


@dataclasses.dataclass(frozen=True)
class Tools:
    """What the policy may call, and how.

    Attributes:
        cfg: Limits of calls and answers.
        toolboxes: The tools and the environments.
        call_format: How calls are written; None if `cfg` has a pattern for them.
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
        """Tools with the limits of a config.

        Args:
            cfg: How calls are written and answered.
            tokenizer: The policy's, whose chat template says how calls are written where `cfg` does not.
            toolboxes: Tools and environments.
            log: Is warned of what cannot be killed, and of a template that shows no tools.

        Raises:
            ConfigError: For a template that asks for calls in no known form.
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
        """The tokenizer whose chat template shows a row its tools."""
        if not _has_place(tokenizer):
            return tokenizer
        return tokenizer.with_options(tools=toolbox.schemas)

    def encode(self, tokenizer: Tokenizer, problems: Sequence[Problem]) -> list[list[int]]:
        """Ids of each problem's prompt, which shows the tools that the row has.

        Raises:
            ValueError: When a row names no environment of the run, by its place; and as `Tokenizer.render`.
        """
        places: dict[Toolbox, list[int]] = {}
        for place, problem in enumerate(problems):
            try:
                places.setdefault(self.toolboxes.of(problem.columns), []).append(place)
            except ValueError as error:
                raise ValueError(f"problem {place}: {error}") from error
        ids: dict[int, list[int]] = {}
        for toolbox, chosen in places.items():
            prompts = [problems[place].prompt for place in chosen]
            ids |= zip(chosen, self.shown(tokenizer, toolbox).encode(prompts), strict=True)
        return [ids[place] for place in range(len(problems))]

    def read(
        self, text: str, schemas: Sequence[dict[str, Any]]
    ) -> tuple[str, list[tool_calls.Call]]:
        """What a turn says beside its calls, and the calls; the schemas are those of the row's tools."""
        if self.cfg.call_pattern is not None:
            return tool_calls.parse_pattern(text, self.cfg.call_pattern, schemas)
        return tool_calls.parse(text, self.call_format)


def encode(
    problems: Sequence[Problem], tokenizer: Tokenizer, tools: Tools | None = None
) -> list[list[int]]:
    """Ids of each problem's prompt, which shows the tools if there are any."""
    if tools is not None:
        return tools.encode(tokenizer, problems)
    return tokenizer.encode([problem.prompt for problem in problems])


def _has_place(tokenizer: Tokenizer) -> bool:
    return "tools" in tokenizer.chat_template


@messages.sent
@dataclasses.dataclass(frozen=True)
class Conversation:
    """The conversation of a row.

    Attributes:
        messages: Messages of the policy and of the tools, in order.
        calls: Calls that were answered.
        failures: How many of these were answered with an error.
        is_limited: Whether the last turn's call was left unanswered because the limit of turns or of tokens was
            reached.
        reward: The environment's own reward; None if it gave none.
        public: Attributes of the environment after the row; None without one.
        environment: Name of its class; None without one.
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
        """Turns of the policy."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def text(self) -> str:
        """What the policy said in its last turn."""
        return self.messages[-1]["content"]

    @property
    def snapshot(self) -> Snapshot:
        """The environment after the row, as reward functions see it."""
        return Snapshot(**(self.public or {}), _reward=self.reward, _class=self.environment)

    def transcript(self) -> str:
        """All turns as one text for people; answers of tools come after the tool's name in brackets."""
        return "\n".join(map(_line, self.messages))


def _line(message: dict[str, Any]) -> str:
    if message["role"] == "tool":
        return f"[{message['name']}] {message['content']}"
    calls = (call["function"] for call in message.get("tool_calls", ()))
    said = [message["content"]] if message["content"] else []
    told = (
        f"[call] {call['name']}({', '.join(f'{k}={v!r}' for k, v in call['arguments'].items())})"
        for call in calls
    )
    return "\n".join([*said, *told])


@dataclasses.dataclass(eq=False)
class _Row:
    """A conversation that goes on; `begun` is the number of the present turn's first token."""

    session: Session | FarSession
    begun: int = 0
    answered: int = 0
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    calls: int = 0
    failures: int = 0
    # Messages, calls and failures before the last answer; restored if that answer does not fit into the row.
    before: tuple[int, int, int] = (0, 0, 0)
    # Whether the last turn's call came after as many as are answered.
    is_limited: bool = False


class Conversations:
    """The conversations of one rollout: a `TurnTaker` of the engine."""

    def __init__(
        self,
        tools: Tools,
        tokenizer: Tokenizer,
        problems: Sequence[Problem],
        group: int,
        first_row: int = 0,
    ):
        """Starts nothing.

        Args:
            tools: What the policy may call.
            tokenizer: The policy's.
            problems: P of them.
            group: G; row r is of problem (first_row + r) // G.
            first_row: Rows of the problems that are left out, from the front.
        """
        self._tools, self._tokenizer = tools, tokenizer
        rows = [problem for problem in problems for _ in range(group)][first_row:]
        self._rows = [_Row(tools.toolboxes.session(_columns(problem))) for problem in rows]
        # The tokenizers of transformers are not safe for several threads.
        self._lock = threading.Lock()

    def __call__(self, row: int, tokens: Sequence[int]) -> concurrent.futures.Future | None:
        """Answers a turn that has ended.

        Args:
            row: Number of the row.
            tokens: All tokens of its completion so far.

        Returns:
            A future of the token ids of the reply; None, which ends the row, if the turn calls nothing or was the
            last that is answered.
        """
        state, limit = self._rows[row], self._tools.cfg.max_tool_calling_iterations
        message, calls = self._read(tokens[state.begun :], state)
        state.is_limited = bool(calls) and limit is not None and state.answered >= limit
        if not calls or state.is_limited:
            return None
        after_stop = tokens[-1] in self._tokenizer.stop_tokens
        return self._tools.toolboxes.executor.submit(
            self._answer, state, message, calls, len(tokens), after_stop
        )

    def _answer(
        self,
        row: _Row,
        message: dict[str, Any],
        calls: Sequence[tool_calls.Call],
        length: int,
        after_stop: bool,
    ) -> list[int]:
        row.before = (len(row.messages), row.calls, row.failures)
        answers = []
        for call in calls:
            if call.error is None:
                reply = row.session.call(call.name, call.arguments)
            else:
                reply = error(call.error)
            row.calls, row.failures = row.calls + 1, row.failures + reply.failed
            name = call.name or "error"
            answers.append({"role": "tool", "name": name, "content": self._cut(reply.text)})
        tokenizer = self._tools.shown(self._tokenizer, row.session.toolbox)
        with self._lock:
            given = tool_calls.answer(tokenizer, answers, after_stop=after_stop)
        row.messages += [message, *answers]
        row.answered += 1
        row.begun = length + len(given)
        return given

    def ended(self, row: int, tokens: Sequence[int]) -> concurrent.futures.Future:
        """Ends a row with all its tokens; gives its `Conversation` when the environment has been asked."""
        return self._tools.toolboxes.executor.submit(self._finish, self._rows[row], list(tokens))

    def _finish(self, row: _Row, tokens: list[int]) -> Conversation:
        if len(tokens) < row.begun:  # the last answer did not fit
            row.is_limited = True
            kept, row.calls, row.failures = row.before
            row.messages = row.messages[: kept + 1]
        else:
            message, _ = self._read(tokens[row.begun :], row)
            row.messages.append(message)
        try:
            snapshot = row.session.finish()
        finally:
            row.session.close()
        public = {k: v for k, v in vars(snapshot).items() if not k.startswith("_")}
        environment = row.session.toolbox.environment_name
        return Conversation(
            tuple(row.messages),
            row.calls,
            row.failures,
            row.is_limited,
            snapshot.get_reward(),
            None if environment is None else public,
            environment,
        )

    def _read(self, turn: Sequence[int], row: _Row) -> tuple[dict[str, Any], list[tool_calls.Call]]:
        """The message of a turn, and its calls."""
        turn = list(turn)
        while turn and turn[-1] in self._tokenizer.stop_tokens:
            turn.pop()
        with self._lock:
            # Tags of calls may be special tokens.
            text = self._tokenizer.hf.decode(turn, clean_up_tokenization_spaces=False)
        said, calls = self._tools.read(text, row.session.toolbox.schemas)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = [call.to_message() for call in calls]
        return message, calls

    def _cut(self, text: str) -> str:
        """A result within its limit of tokens."""
        limit = self._tools.cfg.max_reply_tokens
        # What a tool takes from outside may hold half a character, which no tokenizer takes.
        text = text.encode(errors="replace").decode()
        with self._lock:
            ids = self._tokenizer.hf([text], add_special_tokens=False)["input_ids"][0]
            return text if len(ids) <= limit else self._tokenizer.decode(ids[:limit]) + _CUT

    def abandon(self) -> None:
        """Ends the processes of rows that have not ended."""
        for row in self._rows:
            row.session.abandon()


def observed(tools: Tools, problems: Sequence[Problem]) -> list[Problem]:
    """Problems whose prompts end with what the environment says at the begin, as TRL puts it there.

    Raises:
        ValueError: When an environment cannot begin, or speaks to a prompt that is no chat.
    """
    said = tools.toolboxes.observations([_columns(problem) for problem in problems])
    return [_with(problem, text) for problem, text in zip(problems, said, strict=True)]


def _columns(problem: Problem) -> dict[str, Any]:
    """What an environment is reset with: the row as TRL has it."""
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
