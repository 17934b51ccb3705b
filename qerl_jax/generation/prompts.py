"""Prompts of problems as tokens, and the problems whose prompts are short enough."""

from collections.abc import Callable, Sequence

import numpy as np

from qerl_jax.data.datasets import Problem
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.system.checked import require
from qerl_jax.tools.conversations import Tools, observed


def encode(
    problems: Sequence[Problem], tokenizer: Tokenizer, tools: Tools | None = None
) -> tuple[np.ndarray, ...]:
    """Returns the tokens of each problem's prompt, int32 [tokens], which lists the tools if there are any."""
    texts = [problem.prompt for problem in problems]
    ids = tokenizer.encode(texts) if tools is None else tools.encode(tokenizer, problems)
    return tuple(np.array(tokens, np.int32) for tokens in ids)


def admit(
    problems: Sequence[Problem],
    tokenizer: Tokenizer,
    *,
    max_prompt_length: int,
    overlong: str,
    tools: Tools | None = None,
    what: str = "prompts",
    log: Callable[[str], None] | None = None,
) -> Sequence[Problem]:
    """Returns the problems whose prompts fit, so that too long ones are found before training starts.

    Args:
        problems: The problems.
        tokenizer: The policy's tokenizer.
        max_prompt_length: The most tokens of a prompt.
        overlong: "error" to refuse longer prompts, or "drop" to leave them out.
        tools: Tools that prompts list; None for no tools.
        what: Name of the problems in messages.
        log: Called with a line that says how many problems are dropped.

    Raises:
        ValueError: If there is no problem, a prompt has no tokens, a prompt is longer than
            `max_prompt_length` while `overlong` is "error", or no problem is left; also see `Tools.encode`.
    """
    require(bool(problems), "problems", len(problems), "there must be at least one")
    rows = list(problems)  # some are read or computed anew at each access
    lengths = [len(ids) for ids in encode(rows, tokenizer, tools)]
    if 0 in lengths:
        raise ValueError(
            f"prompt of problem {lengths.index(0)}: must have at least one token; got none"
        )
    pairs, field = zip(rows, lengths, strict=True), "data.max_prompt_length"
    short = [problem for problem, length in pairs if length <= max_prompt_length]
    if len(short) == len(rows):
        return problems
    longest = max(lengths)
    too_long = f"{len(rows) - len(short)} of {len(rows)} {what} are"
    rule = (
        f"{too_long} longer (problem {lengths.index(longest)} has {longest} tokens): raise it, or set "
        'data.overlong_prompts = "drop"'
    )
    require(overlong != "error", field, max_prompt_length, rule)
    require(bool(short), field, max_prompt_length, "no prompt is that short")
    if log:
        log(f"{too_long} left out: longer than {field} = {max_prompt_length}")
    return short


def with_observations(
    tools: Tools, problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt_length: int
) -> Sequence[Problem]:
    """Returns the problems with their environment's first observation in the prompt.

    Raises:
        ValueError: If an environment cannot be reset, or a prompt is then longer than `max_prompt_length`.
    """
    options = {"max_prompt_length": max_prompt_length, "overlong": "error", "tools": tools}
    what = "prompts with what the environment says"
    return admit(observed(tools, problems), tokenizer, what=what, **options)
