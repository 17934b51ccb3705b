r"""Whether two answers are the same mathematics, as math-verify sees it.

For worker processes only (`process_pool`): the imports below take seconds, and a hostile
expression can keep a call busy for ever. math-verify's own time limits need the alarm of the main
thread; here the worker is killed instead.
"""

import functools
import logging
import re

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from qerl_jax.data import answers
from qerl_jax.data.latex_form import latex_form

# At every start both log that their time limits are off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# An escaped dollar sign is a currency.
_DELIMITER = re.compile(r"(?<!\\)\$|(?<!\\)\\\(|(?<!\\)\\\[")


def _latex(*, anywhere: bool) -> list[LatexExtractionConfig]:
    return [
        LatexExtractionConfig(
            # "Malformed" includes what TeX reads well, such as \frac12; many gold answers hold it. Units
            # are taken off by `latex_form`: theirs are single letters, too.
            normalization_config=NormalizationConfig(
                malformed_operators=True, nits=True, boxed="last"
            ),
            boxed_match_priority=0,
            try_extract_without_anchor=anywhere,
        )
    ]


_IN_TEXT, _ANYWHERE = _latex(anywhere=False), _latex(anywhere=True)


def is_readable(gold: str) -> bool:
    """Whether a gold answer can be parsed at all."""
    return len(_gold(gold)) > 0


def agrees(gold: str, completion: str) -> bool:
    r"""Whether a completion's answer equals the gold one.

    The answer is the last `<answer>` block if there is one, and in it or without one the last
    `\boxed{}` (boxes joined by "and" are one answer, see `answers.last_boxes`). Without a box it is
    all of the block, or else what math-verify takes for the text's answer in LaTeX ("the final answer
    is $7$").
    """
    block = answers.last_block(completion)
    given = _boxed_or_found(completion, _IN_TEXT) if block is None else _answer(block)
    return _equal(_gold(gold), given)


def same_answer(first: str, second: str) -> bool:
    """Whether two answers, as `agrees` takes them out of a completion, are the same mathematics.

    Both orders are tried, since math-verify's comparison is not symmetric.
    """
    parsed = _gold(first), _gold(second)
    return _equal(*parsed) or _equal(*reversed(parsed))


def _equal(gold: list, given: list) -> bool:
    return verify(gold, given, timeout_seconds=None)


# The completions of a group have the same gold answer.
@functools.lru_cache(maxsize=64)
def _gold(gold: str) -> list:
    return _answer(gold)


def _answer(text: str) -> list:
    """What an answer says: its box, what its delimiters hold, or all of it."""
    # A row's height in a matrix is no delimiter.
    if "\\boxed" in text or _DELIMITER.search(text):
        return _boxed_or_found(text, _ANYWHERE)
    return _parsed(text)


def _boxed_or_found(text: str, config: list[LatexExtractionConfig]) -> list:
    """What the last box holds, or without any what math-verify finds."""
    if "\\boxed" in text:
        return _parsed(answers.last_boxes(text) or "")
    found = parse(text, config, extraction_mode="first_match", parsing_timeout=None)
    # The text that was found comes last; where it needs no rewriting it has been read already.
    needs_rewriting = found and isinstance(found[-1], str) and latex_form(found[-1]) != found[-1]
    return _parsed(found[-1]) if needs_rewriting else found


def _parsed(answer: str) -> list:
    """What math-verify makes of an answer without delimiters; empty for an empty one."""
    form = latex_form(answer)
    if not form:
        return []
    return parse(
        f"\\boxed{{{form}}}", _IN_TEXT, extraction_mode="first_match", parsing_timeout=None
    )
