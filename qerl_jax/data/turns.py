"""Finds out how a chat template begins and ends a turn of the assistant, by rendering turns around a marker."""

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

# render([chat], add_generation_prompt=...) returns [text], or raises a ValueError.
type Render = Callable[..., Sequence[str]]

# Words that templates write as they are.
_ASK, _MARK = "qerlask", "qerlmark"
_CALL = {"type": "function", "id": "000000000", "function": {"name": _MARK, "arguments": {}}}
# Turns in whose middle a template may write what ends other turns: after the reasoning, or between two calls.
_LONGER: tuple[dict[str, Any], ...] = (
    {"content": _MARK, "reasoning_content": _MARK, "thinking": _MARK},
    {"content": f"<think>\n{_MARK}\n</think>\n\n{_MARK}"},
    {"content": _MARK, "tool_calls": [_CALL, _CALL]},
)


def end_of_turn(
    render: Render, special: Collection[str], stops: Collection[str], whose: str
) -> tuple[str | None, list[str]]:
    """Returns the token with which a chat template ends a turn if it should stop completions, and notes to show.

    That is a special token which the template writes right after the last turn of the assistant and never inside of
    such a turn, if it is not a stop token already. Where text comes first, a stop token after it is enough. Base models
    need this: their configs often name another token, with which no turn ends, or only the text.

    Args:
        render: Renders a chat. A template that cannot render a question and an answer says nothing; one that asks for a
            system message gets it.
        special: The special tokens.
        stops: The stop tokens.
        whose: Name of the template in notes.
    """
    chat: list[dict[str, Any]] = [{"role": "user", "content": _ASK}]
    if _rendered(render, chat, add_generation_prompt=True) is None:
        chat = [{"role": "system", "content": "-"}, *chat]
    prompt, bare = (_rendered(render, chat, add_generation_prompt=x) for x in (True, False))
    if prompt is not None and _ASK not in prompt.lower():
        return None, [f"warning: {whose} drops the text of a message whose content is a text"]
    answer = lambda turn: _rendered(render, [*chat, {"role": "assistant", **turn}])
    whole = answer({"content": _MARK})
    if prompt is None or bare is None or whole is None or _MARK not in whole:
        return None, []
    notes = []
    before, tail = _written(whole, prompt)
    if prompt == bare and before.strip():
        notes.append(
            f"warning: {whose} ignores add_generation_prompt: a prompt ends without {before!r}, with which an assistant's "
            "turn begins there, so the policy must write that itself. Take a template that adds it"
        )
    token = max(filter(tail.lstrip().startswith, special), key=len, default=None)
    ends = any(stop in tail for stop in stops)
    if not tail.strip() or token in stops or (ends and token is None):
        return None, notes
    longer = [whole, *filter(None, map(answer, _LONGER))]
    if token is None or any(token in _written(text, prompt)[0] for text in longer):
        if ends:
            return None, notes
        inside = "" if token is None else f" ({token!r} is also written inside of turns)"
        notes.append(
            f"warning: {whose} ends a turn with {tail.strip()!r}, in which there is no stop token{inside}: completions may go "
            "on to their limit. Name what ends them in rollout.stop_token_ids or rollout.stop"
        )
        return None, notes
    notes.append(
        f"{whose} ends a turn with {token!r}, which no config names as an end: it is a stop token too"
    )
    return token, notes


def _rendered(
    render: Render, chat: list[dict[str, Any]], *, add_generation_prompt: bool = False
) -> str | None:
    """Returns a chat as text; None if the template refuses it."""
    try:
        return render([chat], add_generation_prompt=add_generation_prompt)[0]
    except ValueError:
        return None


def _written(text: str, prompt: str) -> tuple[str, str]:
    """Returns what a text has after the prompt, before and after its last marker."""
    before, _, after = text[len(os.path.commonprefix([prompt, text])) :].rpartition(_MARK)
    return before, after
