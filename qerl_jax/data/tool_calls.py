"""Calls of tools as text: how a chat template shows tools, how a policy asks for one, and how it is answered."""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

from qerl_jax.checked import require
from qerl_jax.config import CallFormat
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.files import parse_json

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_BETWEEN = re.compile(r"[; \n]*")


@dataclasses.dataclass(frozen=True)
class Call:
    """A call that a policy has written.

    Attributes:
        name: Of the tool; empty where it cannot be read.
        arguments: By name.
        error: Why it cannot be read; None where it can.
    """

    name: str
    arguments: dict[str, Any]
    error: str | None = None

    def to_message(self) -> dict[str, Any]:
        """The call as chat messages have it."""
        return {"type": "function", "function": {"name": self.name, "arguments": self.arguments}}


def schema(function: Callable) -> dict[str, Any]:
    """What a chat template shows of a tool: its name, and what its docstring and annotations say.

    Args:
        function: With an annotation for each argument, and a docstring that has a line for each under
            "Args:", as transformers asks for.

    Raises:
        ValueError: Where something of that is missing; it names the function.
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
    """The format of calls that a chat template asks for.

    Raises:
        ValueError: When it asks for none that is known.
    """
    if "<tool_call>" in template and "<function=" not in template:
        return "hermes"
    if "ipython" in template and '"parameters"' in template:
        return "llama3_json"
    require(
        False,
        "tools.call_format",
        None,
        'the chat template asks for calls in no known format: say "hermes" or "llama3_json"',
    )


def parse(text: str, call_format: CallFormat) -> tuple[str, list[Call]]:
    """What a turn says beside its calls, and the calls in order.

    Args:
        text: Of the turn, special tokens included but for the one that ended it.
        call_format: "hermes": JSON of `name` and `arguments` between <tool_call> and </tool_call>, as Qwen
            and Hermes models write it; "llama3_json": the whole turn is JSON of `name` and `parameters`, or
            several separated by semicolons.
    """
    if call_format == "hermes":
        found = [_call(body.strip()) for body in _HERMES.findall(text)]
        return (_HERMES.sub("", text).strip() if found else text), found
    body = text.strip().removeprefix("<|python_tag|>").strip()
    if not (body.startswith("{") and '"name"' in body):
        return text, []
    calls, place = [], 0
    while place < len(body):
        try:
            _, end = json.JSONDecoder().raw_decode(body, place)
        except (ValueError, RecursionError):
            end = len(body)  # what is wrong with the rest, it says itself
        calls.append(_call(body[place:end]))
        place = _BETWEEN.match(body, end).end()
    return "", calls


def written(call: Call, call_format: CallFormat) -> str:
    """A call as a policy writes it."""
    field = "arguments" if call_format == "hermes" else "parameters"
    body = json.dumps({"name": call.name, field: call.arguments}, ensure_ascii=False)
    return f"<tool_call>{body}</tool_call>" if call_format == "hermes" else body


def parse_pattern(
    text: str, pattern: str, schemas: Sequence[dict[str, Any]]
) -> tuple[str, list[Call]]:
    """What a turn says beside calls in a form of one's own, and the calls in order.

    Args:
        text: Of the turn.
        pattern: A regular expression with a group `argument`, and with a group `name` unless there is one
            tool.
        schemas: Of the tools, by which the argument is named, and read as a number where it is one.
    """
    tools = {each["function"]["name"]: each["function"]["parameters"] for each in schemas}

    def call(match: re.Match) -> Call:
        found = match.groupdict()
        name = found.get("name") or next(iter(tools))
        properties = tools.get(name, {}).get("properties", {})
        if len(properties) != 1:
            return Call(
                name, {}, f"{name} is no tool of one argument; there are {', '.join(tools)}"
            )
        ((argument, shape),) = properties.items()
        # A group may take no part in a match.
        value: Any = (found["argument"] or "").strip()
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
        made = _parsed(body)
    except ValueError as error:
        return Call("", {}, f"the call is not valid JSON: {error}")
    name = made.get("name") if isinstance(made, dict) else None
    if not isinstance(name, str):
        return Call("", {}, 'the call must be an object with a "name" and its "arguments"')
    arguments = made.get("arguments", made.get("parameters", {}))
    if isinstance(arguments, str):  # some write JSON within JSON
        try:
            arguments = _parsed(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        return Call(name, {}, f'the "arguments" of {name} must be an object')
    return Call(name, arguments)


def _parsed(text: str) -> Any:
    """The value of a JSON text that a policy has written.

    Raises:
        ValueError: When it is no JSON, or escapes half a character, which no tool, log or tokenizer takes.
    """
    value = parse_json(text)
    json.dumps(value, ensure_ascii=False).encode()
    return value


def answer(
    tokenizer: Tokenizer, messages: Sequence[dict[str, str]], *, after_stop: bool
) -> list[int]:
    """Tokens that answer a turn: what the chat template writes from its end to the begin of the next turn.

    Args:
        tokenizer: The policy's.
        messages: Of the role "tool", with `name` and `content`.
        after_stop: Whether the turn ended with the token that ends turns; else that comes first.

    Raises:
        ValueError: When the template writes earlier messages in another way once there are later ones.
    """
    calls = [Call(message["name"], {}).to_message() for message in messages]
    before = [
        {"role": "user", "content": "-"},
        {"role": "assistant", "content": "", "tool_calls": calls},
    ]
    (begun,) = tokenizer.render([before], add_generation_prompt=False)
    (whole,) = tokenizer.render([[*before, *messages]])
    # Templates write a line's end behind a turn, which the policy does not.
    end = tokenizer.hf.eos_token or ""
    place = begun.rfind(end) if end else -1
    place = len(begun) if place < 0 else place + (len(end) if after_stop else 0)
    require(
        whole.startswith(begun[:place]),
        "chat template",
        begun[:place],
        "must write messages in the same way whatever follows them",
        ValueError,
    )
    return tokenizer.hf([whole[place:]], add_special_tokens=False)["input_ids"][0]
