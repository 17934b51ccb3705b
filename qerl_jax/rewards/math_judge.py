r"""Judges with math-verify whether two answers are mathematically equal.

For worker processes only (`process_pool`): the imports below take seconds, and a hostile expression can keep a call
busy forever. math-verify's own time limits need the alarm signal of the main thread, so they are off, and the worker
is killed instead.
"""

import dataclasses
import functools
import itertools
import logging
import re
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, grader, parse, verify

from qerl_jax.data import answers
from qerl_jax.data.latex_form import in_radians, latex_form

# Silences the warning, in every worker, that the time limits are off.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

# An escaped dollar sign is the currency, not a delimiter, and so is a single one.
_DELIMITER = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\\(|(?<!\\)\\\[", re.DOTALL)


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


# \boxed 5, \boxed\frac12: a box without a brace ends at a space, but not inside of braces.
_BARE_BOX = re.compile(
    r"\\boxed(?![A-Za-z])\s*(?=[^\s{}$])((?:[^\s{}$\\]|\\(?![)\]])|\{[^{}]*\})+)"
)
# Numbers whose relative difference is larger are not equal.
_TOLERANCE = sympy.Rational(1, 10**9)
_verified = functools.partial(verify, timeout_seconds=None)
_IN_TEXT, _ANYWHERE = _latex(anywhere=False), _latex(anywhere=True)


@dataclasses.dataclass(frozen=True)
class Answer:
    """An answer as text, and as math-verify parses it: expressions, and at the end a text; empty if it cannot."""

    text: str
    parsed: list[Any]


def is_readable(gold: str) -> bool:
    """Whether math-verify can parse a gold answer at all."""
    return len(_gold(gold).parsed) > 0


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
    pair = _gold(first), _gold(second)
    return _equal(*pair) or _equal(*reversed(pair))


def _equal(gold: Answer, answer: Answer) -> bool:
    if _verified(gold.parsed, answer.parsed):
        return True
    # 30 degrees are pi/6. They are also 30, since many gold answers leave out the sign.
    angles = in_radians(gold.text), in_radians(answer.text)
    if any(angles) and not all(angles):
        texts = [angle or other.text for angle, other in zip(angles, (gold, answer), strict=True)]
        return _verified(*map(_parsed, texts))
    # x > 3 is the interval from 3 on.
    sets = [_solutions(side.parsed) for side in (gold, answer)]
    return None not in sets and _verified([sets[0]], [sets[1]])


def _solutions(parsed: list[Any]) -> sympy.Set | None:
    """Returns an interval, or the solutions of inequalities (a list of them is joined by "or"); else None."""
    value = parsed[0] if parsed else None
    if isinstance(value, sympy.FiniteSet) and value.args:
        parts = [_solutions([part]) for part in value.args]
        return None if None in parts else sympy.Union(*parts)
    if isinstance(value, sympy.Set):
        return value
    relations = sympy.core.relational.Relational | sympy.And | sympy.Or
    if not isinstance(value, relations) or isinstance(value, sympy.Eq):
        return None
    try:
        return value.as_set()
    except (NotImplementedError, TypeError, ValueError, AttributeError):  # of several variables
        return None


_numerically_equal = grader.sympy_numeric_eq


def _is_close(first: Any, second: Any, *precision: int) -> bool:
    """Whether math-verify finds two expressions numerically equal, and their relative difference is small, too.

    math-verify rounds numbers to six decimals, and takes any two below 1e-15 for equal.
    """
    return _numerically_equal(first, second, *precision) and not _differ(first, second)


# math-verify calls it for numbers, and for those in sets, tuples, intervals and equations.
grader.sympy_numeric_eq = _is_close


def _differ(first: Any, second: Any) -> bool:
    """Whether two expressions are numbers with a relative difference of more than 1e-9.

    Symbols get arbitrary values, and 0, where only constants are left, as those of x - a = 0. A percentage counts as
    its number, too, because math-verify takes 50% for 50.
    """
    if not all(isinstance(side, sympy.Expr) for side in (first, second)):
        return False
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    arbitrary = {
        symbol: sympy.Rational(7919 + 104_729 * i, 6007) for i, symbol in enumerate(symbols)
    }
    sides = [(side, grader.get_pct_val(side, side)) for side in (first, second)]
    return any(
        all(
            _are_apart(*(_value(side.subs(values)) for side in pair))
            for pair in itertools.product(*sides)
        )
        for values in (arbitrary, dict.fromkeys(symbols, 0))
    )


def _are_apart(first: sympy.Expr | None, second: sympy.Expr | None) -> bool:
    if first is None or second is None:
        return False
    return abs(first - second) > _TOLERANCE * max(abs(first), abs(second))


def _value(expression: sympy.Expr) -> sympy.Expr | None:
    """Returns a number to 30 digits; None if it is none, or not finite. What cancels completely is 0."""
    number = expression.doit().evalf(30)
    parts = number.as_real_imag() if number.is_number else ()
    if not parts or not all(part.is_Float or part.is_Integer for part in parts):
        return None
    real, imaginary = (0 if part.is_Float and part._prec == 1 else part for part in parts)
    return real + imaginary * sympy.I


def _answer(text: str) -> Answer:
    """Parses an answer: its box, else the content of its LaTeX delimiters, else all of it."""
    # The height of a matrix row (\\[...]) is not a delimiter.
    if "\\boxed" in text or _DELIMITER.search(text):
        return _boxed_or_found(text, _ANYWHERE)
    return Answer(text, _parsed(text))


# The completions of a group have the same gold answer.
_gold = functools.lru_cache(maxsize=64)(_answer)


def _boxed_or_found(text: str, config: list[LatexExtractionConfig]) -> Answer:
    """Parses the content of the last box, or without a box the answer that math-verify finds."""
    if "\\boxed" in text:
        text = _BARE_BOX.sub(lambda box: rf"\boxed{{{box[1].rstrip('.,;:!?')}}}", text)
        boxed = answers.last_boxes(text) or ""
        return Answer(boxed, _parsed(boxed))
    parsed = parse(text, config, extraction_mode="first_match", parsing_timeout=None)
    # The text that math-verify found comes last. If it needs no rewriting, it has been parsed already.
    found_text = parsed[-1] if parsed and isinstance(parsed[-1], str) else ""
    return Answer(
        found_text, _parsed(found_text) if latex_form(found_text) != found_text else parsed
    )


def _parsed(answer: str) -> list[Any]:
    """Parses an answer without delimiters; the result is empty for an empty answer."""
    form = latex_form(answer)
    if not form:
        return []
    return parse(
        f"\\boxed{{{form}}}", _IN_TEXT, extraction_mode="first_match", parsing_timeout=None
    )
