"""Tests the normal form of LaTeX answers: equal spellings become one, different answers stay apart."""

import time

import pytest

from qerl_jax.data.latex_form import LONGEST, latex_form
from tests.tables import spread

# Those beside the ones that `tests/qerl_jax/rewards/test_math_judge.py` has.
SPELLINGS = [
    (r"\frac{1} {2}", [r"\frac {1} {2}"]),
    ("1234567", [r"1,\!234,\!567"]),
    ("1,2,3", ["1 2 3"]),
    ("5", ["$5$", r"5\ \text{m/s}^{2}", "5 square feet"]),
    ("-5", ["\N{MINUS SIGN}5"]),
    (r"\text{B}", [r"\text{B.}"]),
    ("1, 2", [r"1\text{ and }2"]),
    ("3 I", ["3i"]),
    ("{I}^2", ["i^2"]),
    (r"\Omega_{110b2}", ["110_2", "0110_{two}"]),
    (r"-\Omega_{37b8}", [r"-37_{\text{eight}}"]),
    (r"\Omega_{F0b16}", ["F0_{16}"]),
    ("", ["", "9" * LONGEST + "9"]),
]
# Left as they are.
PLAIN = r"1,\,234|\binom 5 2|2^3 3^2|0.3...|f\circ g|cm|5t|5\text{ t}|x=\text{ north}"
PLAIN += r"|\sin x|pi|a_i|x_2|3A_1|\log_2 8|FF_{16}"


@pytest.mark.parametrize(
    ("form", "answer"),
    [*spread(SPELLINGS), *((text, text) for text in (*PLAIN.split("|"), "9" * LONGEST))],
)
def test_each_spelling_is_rewritten_to_what_it_means(answer, form):
    assert latex_form(answer) == form
    assert latex_form(form) == form


@pytest.mark.slow
@pytest.mark.parametrize("piece", ["~", "cm ", "9", "/", r"\,", r"\text{cm}", "i", "1 ", "{", "_"])
def test_no_answer_keeps_the_rewriting_busy(piece):
    began = time.thread_time()
    latex_form(piece * (LONGEST // len(piece)))
    latex_form(piece * 100_000)
    assert time.thread_time() - began < 3
