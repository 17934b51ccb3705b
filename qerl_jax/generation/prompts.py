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
    if tools is not None:
        ids = tools.encode(tokenizer, problems)
    else:
        ids = tokenizer.encode([problem.prompt for problem in problems])
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
    lengths = [len(ids) for ids in encode(problems, tokenizer, tools)]
    if 0 in lengths:
        raise ValueError(
            f"prompt of problem {lengths.index(0)}: must have at least one token; got none"
        )
    longest = max(lengths)
    if longest <= max_prompt_length:
        return problems
    too_long = sum(length > max_prompt_length for length in lengths)
    require(
        overlong != "error",
        "data.max_prompt_length",
        max_prompt_length,
        f"{too_long} of {len(problems)} {what} are longer (problem {lengths.index(longest)} has "
        f'{longest} tokens): raise it, or set data.overlong_prompts = "drop"',
    )
    short = [
        problem
        for problem, length in zip(problems, lengths, strict=True)
        if length <= max_prompt_length
    ]
    require(bool(short), "data.max_prompt_length", max_prompt_length, "no prompt is that short")
    if log:
        log(
            f"{too_long} of {len(problems)} {what} are left out: longer than data.max_prompt_length = "
            f"{max_prompt_length}"
        )
    return short


def with_observations(
    tools: Tools, problems: Sequence[Problem], tokenizer: Tokenizer, max_prompt_length: int
) -> Sequence[Problem]:
    """Returns the problems with their environment's first observation in the prompt.

    Raises:
        ValueError: If an environment cannot be reset, or a prompt is then longer than `max_prompt_length`.
    """
    return admit(
        observed(tools, problems),
        tokenizer,
        max_prompt_length=max_prompt_length,
        overlong="error",
        tools=tools,
        what="prompts with what the environment says",
    )
