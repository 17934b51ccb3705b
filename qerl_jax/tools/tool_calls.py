"""Tool calls as text: schemas for the chat template, parsing of a policy's calls, and the tokens of the answers."""

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from qerl_jax.config import CallFormat
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.system.checked import require
from qerl_jax.system.files import parse_json

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_BETWEEN = re.compile(r"[; \n]*")


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call that a policy has written.

    Attributes:
        name: Name of the tool; empty if it cannot be parsed.
        arguments: Arguments by name.
        error: Why the call cannot be parsed; None if it can.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None

    def to_message(self) -> dict[str, Any]:
        """Returns the call as an entry of a chat message's `tool_calls`."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def schema(function: Callable) -> dict[str, Any]:
    """Returns the JSON schema of a tool, which the chat template shows, from its docstring and annotations.

    Raises:
        ValueError: If the function lacks an annotation of an argument, or its description under "Args:", which
            `get_json_schema` of transformers needs; the error names the function.
    """
    # Without PyTorch, importing transformers prints a notice.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        name = getattr(function, "__name__", repr(function))
        raise ValueError(f"tool {name!r}: cannot be shown to the policy: {error}") from error


def detect(template: str) -> CallFormat:
    """Detects the format of tool calls that a chat template asks for.

    Raises:
        ValueError: If it asks for no known format.
    """
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "ipython" in template and '"parameters"' in template:
        return "llama3_json"
    rule = 'the chat template asks for calls in no known format: say "hermes" or "llama3_json"'
    require(False, "tools.call_format", None, rule)


def parse(text: str, call_format: CallFormat) -> tuple[str, list[Call]]:
    """Parses the tool calls of a turn.

    Args:
        text: Text of the turn, with special tokens except the one that ended it.
        call_format: "hermes": JSON with `name` and `arguments` between <tool_call> and </tool_call>, as Qwen and
            Hermes models write it; "llama3_json": the whole turn is a JSON object with `name` and `parameters`, or
            several with semicolons between.

    Returns:
        The text besides the calls, and the calls in order.
    """
    if call_format == "hermes":
        bodies = [_call(body.strip()) for body in _HERMES.findall(text)]
        return (_HERMES.sub("", text).strip() if bodies else text), bodies
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not (body.startswith("{") and '"name"' in body):
        return text, []
    calls, position = [], 0
    while position < len(body):
        try:
            _, end = json.JSONDecoder().raw_decode(body, position)
        except (ValueError, RecursionError):
            end = len(body)  # the call made of the rest has an error that says what is wrong
        calls.append(_call(body[position:end]))
        position = _BETWEEN.match(body, end).end()
    return "", calls


def written(call: Call, call_format: CallFormat) -> str:
    """Returns the text with which a policy writes a call."""
    field = "arguments" if call_format == "hermes" else "parameters"
    body = json.dumps({"name": call.name, field: call.arguments}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>" if call_format == "hermes" else body


def parse_pattern(
    text: str, pattern: str, schemas: Sequence[dict[str, Any]]
) -> tuple[str, list[Call]]:
    """Parses the tool calls of a turn in a custom format.

    Args:
        text: Text of the turn.
        pattern: A regular expression for a call, with a group `argument` and, unless there is only one tool, a group
            `name`. Tools must have one argument.
        schemas: Schemas of the tools, which give the name of the argument and whether it is a number.

    Returns:
        The text besides the calls, and the calls in order.
    """
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in schemas}

    def call(match: re.Match) -> Call:
        groups = match.groupdict()
        name = groups.get("name") or next(iter(tools))
        properties = tools.get(name, {}).get("properties", {})
        if len(properties) != 1:
            return Call(
                name, {}, f"{name} is no tool of one argument; there are {', '.join(tools)}"
            )
        ((argument, shape),) = properties.items()
        # A group that takes no part in a match is None.
        value: Any = (groups["argument"] or "").strip()
        if shape.get("type") in ("integer", "number"):
            try:
                value = _parsed(value)
            except ValueError:
                return Call(name, {}, f"{argument}: got {value!r}; must be a number")
        return Call(name, {argument: value})

    calls = [call(match) for match in re.finditer(pattern, text)]
    return (re.sub(pattern, "", text).strip() if calls else text), calls


def _call(body: str) -> Call:
    try:
        parsed = _parsed(body)
    except ValueError as error:
        return Call("", {}, f"the call is not valid JSON: {error}")
    name = parsed.get("name") if isinstance(parsed, dict) else None
    if not isinstance(name, str):
        return Call("", {}, 'the call must be an object with a "name" and its "arguments"')
    arguments = parsed.get("arguments", parsed.get("parameters", {}))
    with contextlib.suppress(ValueError):  # some models write the arguments as a JSON string
        arguments = _parsed(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        return Call(name, {}, f'the "arguments" of {name} must be an object')
    return Call(name, arguments)


def _parsed(text: str) -> Any:
    """Parses JSON that a policy has written.

    Raises:
        ValueError: If it is not JSON, or has an escape for half a surrogate pair, which cannot be encoded as UTF-8.
    """
    value = parse_json(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def answer(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], *, after_stop: bool
) -> list[int]:
    """Returns the tokens that answer a turn: what the template writes from its end to the start of the next turn.

    Args:
        tokenizer: The policy's tokenizer.
        messages: The answers: messages of role "tool", with `name` and `content`.
        after_stop: Whether the turn ended with the end-of-turn token; if not, the result begins with it.

    Raises:
        ValueError: If the template renders earlier messages differently once there are later ones.
    """
    calls = [Call(message["name"], {}).to_message() for message in messages]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    before = [{"role": "user", "content": "-"}, turn]
    (begun,) = tokenizer.render([before], add_generation_prompt=False)
    (whole,) = tokenizer.render([[*before, *messages]])
    # Templates write a newline after a turn, which the policy does not, so the turn ends at the end token.
    index, end = max(((begun.rfind(end), end) for end in tokenizer.ends), default=(-1, ""))
    index = len(begun) if index < 0 else index + (len(end) if after_stop else 0)
    begun, rule = begun[:index], "must write messages in the same way whatever follows them"
    require(whole.startswith(begun), "chat template", begun, rule, ValueError)
    return tokenizer.ids([whole[index:]])[0]
