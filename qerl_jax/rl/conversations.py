"""Rows of several turns: the policy's calls are read, carried out, and answered while other rows are sampled."""

import concurrent.futures
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any

from qerl_jax.config import CallFormat
from qerl_jax.data import tool_calls
from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.rewards.environments import Session, Snapshot, Toolbox, error

# Behind the result of a call that was cut at its limit.
_CUT = " ... (the rest is cut)"


@dataclasses.dataclass(frozen=True)
class Tools:
    """What the policy may call, and how.

    Attributes:
        toolbox: The tools and the environment.
        call_format: How calls are written.
        max_iterations: Most turns of a row that are answered; None for no limit.
        max_reply_tokens: Most tokens of the result of a call.
        call_pattern: See `tool_calls.parse_pattern`; then `call_format` is None.
    """

    toolbox: Toolbox
    call_format: CallFormat | None
    max_iterations: int | None = None
    max_reply_tokens: int = 256
    call_pattern: str | None = None

    def read(self, text: str) -> tuple[str, list[tool_calls.Call]]:
        """What a turn says beside its calls, and the calls."""
        if self.call_pattern is not None:
            return tool_calls.parse_pattern(text, self.call_pattern, self.toolbox.schemas)
        return tool_calls.parse(text, self.call_format)


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What was said in a row.

    Attributes:
        messages: The policy's and the tools', in order.
        calls: Calls that were answered.
        failures: How many of these were answered with an error.
        is_limited: Whether the last turn's call was not answered: for the number of turns or of tokens.
        reward: The environment's own, None where it gave none.
        public: Attributes of the environment after the row; None without one.
    """

    messages: tuple[dict[str, Any], ...]
    calls: int = 0
    failures: int = 0
    is_limited: bool = False
    reward: float | None = None
    public: dict[str, Any] | None = None

    @property
    def turns(self) -> int:
        """Turns of the policy."""
        return sum(message["role"] == "assistant" for message in self.messages)

    @property
    def snapshot(self) -> Snapshot:
        """The environment after the row, as reward functions see it."""
        return Snapshot(**(self.public or {}), _reward=self.reward)

    def transcript(self) -> str:
        """All turns as one text for people: what tools said stands behind their names in brackets."""
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

    session: Session
    begun: int = 0
    answered: int = 0
    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    calls: int = 0
    failures: int = 0
    # What is undone where an answer does not fit into the row: messages, calls and failures before it.
    before: tuple[int, int, int] = (0, 0, 0)


class Conversations:
    """The conversations of one rollout: a `TurnTaker` of the engine."""

    def __init__(self, tools: Tools, tokenizer: Tokenizer, problems: Sequence[Problem], group: int):
        """Starts nothing.

        Args:
            tools: What the policy may call.
            tokenizer: The policy's.
            problems: P of them.
            group: G; row r is of problem r // G.
        """
        self._tools, self._tokenizer = tools, tokenizer
        rows = (_columns(problem) for problem in problems for _ in range(group))
        sessions = map(tools.toolbox.session, rows)
        self._rows = [_Row(session) for session in sessions]
        # A tokenizer of transformers is not made for several threads.
        self._lock = threading.Lock()

    def __call__(self, row: int, tokens: Sequence[int]) -> concurrent.futures.Future | None:
        """Answers a turn that has ended, or ends the row: where the turn calls nothing, or was the last."""
        state, limit = self._rows[row], self._tools.max_iterations
        message, calls = self._read(tokens[state.begun :])
        if not calls or (limit is not None and state.answered >= limit):
            return None
        after_stop = tokens[-1] in self._tokenizer.stop_tokens
        return self._tools.toolbox.executor.submit(
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
        with self._lock:
            given = tool_calls.answer(self._tokenizer, answers, after_stop=after_stop)
        row.messages += [message, *answers]
        row.answered += 1
        row.begun = length + len(given)
        return given

    def ended(self, row: int, tokens: Sequence[int]) -> concurrent.futures.Future:
        """Ends a row with all its tokens; gives its `Conversation` when the environment has been asked."""
        return self._tools.toolbox.executor.submit(self._finish, self._rows[row], list(tokens))

    def _finish(self, row: _Row, tokens: list[int]) -> Conversation:
        is_limited = len(tokens) < row.begun
        if is_limited:  # the last answer did not fit
            kept, row.calls, row.failures = row.before
            row.messages = row.messages[: kept + 1]
        else:
            message, calls = self._read(tokens[row.begun :])
            is_limited = bool(calls) and tokens[-1] in self._tokenizer.stop_tokens
            row.messages.append(message)
        try:
            snapshot = row.session.finish()
        finally:
            row.session.close()
        public = {k: v for k, v in vars(snapshot).items() if k != "_reward"}
        has_environment = self._tools.toolbox.environment_name is not None
        return Conversation(
            tuple(row.messages),
            row.calls,
            row.failures,
            is_limited,
            snapshot.get_reward(),
            public if has_environment else None,
        )

    def _read(self, turn: Sequence[int]) -> tuple[dict[str, Any], list[tool_calls.Call]]:
        """The message of a turn, and its calls."""
        turn = list(turn)
        while turn and turn[-1] in self._tokenizer.stop_tokens:
            turn.pop()
        with self._lock:
            # Tags of calls may be special tokens.
            text = self._tokenizer.hf.decode(turn, clean_up_tokenization_spaces=False)
        said, calls = self._tools.read(text)
        message: dict[str, Any] = {"role": "assistant", "content": said}
        if calls:
            message["tool_calls"] = [call.to_message() for call in calls]
        return message, calls

    def _cut(self, text: str) -> str:
        """A result within its limit of tokens."""
        limit = self._tools.max_reply_tokens
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
    if tools.toolbox.environment_name is None:
        return list(problems)
    said = tools.toolbox.executor.map(tools.toolbox.observation, map(_columns, problems))
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
