r"""Judges with math-verify whether two answers are mathematically equal.

For worker processes only (`process_pool`): the imports below take seconds, and a hostile expression can keep a call
busy forever. math-verify's own time limits need the alarm signal of the main thread, so they are off, and the worker
is killed instead.
"""

import functools
import logging
import re

from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

from qerl_jax.data import answers
from qerl_jax.data.latex_form import latex_form

# Silences the warning, in every worker, that the time limits are off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# An escaped dollar sign is the currency, not a delimiter.
_DELIMITER = re.compile(r"(?<!\\)\$|(?<!\\)\\\(|(?<!\\)\\\[")


def _latex(*, anywhere: bool) -> list[LatexExtractionConfig]:
    return [
        LatexExtractionConfig(
            # "Malformed" includes valid TeX such as \frac12, which many gold answers contain. Units are removed by
            # `latex_form`: math-verify also removes single letters.
            normalization_config=NormalizationConfig(
                malformed_operators=True, nits=True, boxed="last"
            ),
            boxed_match_priority=0,
            try_extract_without_anchor=anywhere,
        )
    ]


_IN_TEXT, _ANYWHERE = _latex(anywhere=False), _latex(anywhere=True)


def is_readable(gold: str) -> bool:
    """Whether math-verify can parse a gold answer at all."""
    return len(_gold(gold)) > 0


def agrees(gold: str, completion: str) -> bool:
    r"""Whether a completion's answer equals the gold one.

    The completion's answer is in the last `<answer>` block, or anywhere in the text if there is no block. There it is
    the last `\boxed{}` (boxes joined by "and" are one answer, see `answers.last_boxes`). In a block without a box, it
    is the content of LaTeX delimiters, or the whole block. In a text without block and box, it is the LaTeX answer
    that math-verify finds ("the final answer is $7$").
    """
    block = answers.last_block(completion)
    answer = _boxed_or_found(completion, _IN_TEXT) if block is None else _answer(block)
    return _equal(_gold(gold), answer)


def same_answer(first: str, second: str) -> bool:
    """Whether two answers, as `agrees` reads them from a completion, are mathematically equal.

    Both orders are tried, since math-verify's comparison is not symmetric.
    """
    parsed = _gold(first), _gold(second)
    return _equal(*parsed) or _equal(*reversed(parsed))


def _equal(gold: list, answer: list) -> bool:
    return verify(gold, answer, timeout_seconds=None)


# The completions of a group have the same gold answer.
@functools.lru_cache(maxsize=64)
def _gold(gold: str) -> list:
    return _answer(gold)


def _answer(text: str) -> list:
    """Parses an answer: its box, else the content of its LaTeX delimiters, else all of it."""
    # The height of a matrix row (\\[...]) is not a delimiter.
    if "\\boxed" in text or _DELIMITER.search(text):
        return _boxed_or_found(text, _ANYWHERE)
    return _parsed(text)


def _boxed_or_found(text: str, config: list[LatexExtractionConfig]) -> list:
    """Parses the content of the last box, or without a box the answer that math-verify finds."""
    if "\\boxed" in text:
        return _parsed(answers.last_boxes(text) or "")
    parsed = parse(text, config, extraction_mode="first_match", parsing_timeout=None)
    # The text that math-verify found comes last. If it needs no rewriting, it has been parsed already.
    needs_rewriting = (
        parsed and isinstance(parsed[-1], str) and latex_form(parsed[-1]) != parsed[-1]
    )
    return _parsed(parsed[-1]) if needs_rewriting else parsed


def _parsed(answer: str) -> list:
    """Parses an answer without delimiters; the result is empty for an empty answer."""
    form = latex_form(answer)
    if not form:
        return []
    return parse(
        f"\\boxed{{{form}}}", _IN_TEXT, extraction_mode="first_match", parsing_timeout=None
    )
