"""Tests the normal form of LaTeX answers: equal spellings become one, different answers stay apart."""

import time

import pytest

from qerl_jax.data.latex_form import LONGEST, latex_form
from tests.tables import spread


@pytest.mark.parametrize(
    ("form", "answer"),
    spread(
        [
            (r"\text{cm}", [r"\text {cm}"]),
            (r"\frac{1} {2}", [r"\frac {1} {2}"]),
            ("12345", [r"12\,345"]),
            ("1234567", [r"1,\!234,\!567"]),
            ("1234", ["1{,}234"]),
            ("1,2", [r"1,2", r"1\,2"]),
            (r"1,\,234", [r"1,\,234"]),
            ("12,34", [r"12\,34"]),
            ("1,2,3", ["1 2 3"]),
            (r"\frac 1 2", [r"\frac 1 2"]),
            (r"\binom 5 2", [r"\binom 5 2"]),
            ("2^3 3^2", ["2^3 3^2"]),
            (r"3\frac{1}{2}", ["3 1/2"]),
            ("5", ["$5$", r"\$5", "5.", r"5^\circ", r"5\ \text{m/s}^{2}", "5 square feet"]),
            ("5", [r"5\text{ m}"]),
            ("-5", ["\N{MINUS SIGN}5"]),
            ("0.5", ["0.5"]),
            ("0.3...", ["0.3..."]),
            (r"\text{B}", [r"\text{B.}"]),
            (r"f\circ g", [r"f\circ g"]),
            (r"\text{east}", [r"\text{east}"]),
            ("cm", ["cm"]),
            ("5t", ["5t"]),
            (r"5\text{ t}", [r"5\text{ t}"]),
            (r"x=\text{ north}", [r"x=\text{ north}"]),
            ("1, 2", [r"1\text{ and }2"]),
            ("3 I", ["3i"]),
            ("{I}^2", ["i^2"]),
            (r"\sin x", [r"\sin x"]),
            ("pi", ["pi"]),
            ("a_i", ["a_i"]),
            (r"\Omega_{110b2}", ["110_2", "0110_{two}"]),
            (r"-\Omega_{37b8}", [r"-37_{\text{eight}}"]),
            ("11", ["11_{10}"]),
            ("FF_{16}", ["FF_{16}"]),
            (r"\Omega_{F0b16}", ["F0_{16}"]),
            ("x_2", ["x_2"]),
            ("3A_1", ["3A_1"]),
            (r"\log_2 8", [r"\log_2 8"]),
            ("", ["", "9" * LONGEST + "9"]),
            ("9" * LONGEST, ["9" * LONGEST]),
        ]
    ),
)
def test_each_spelling_is_rewritten_to_what_it_means(answer, form):
    assert latex_form(answer) == form
    assert latex_form(form) == form


@pytest.mark.parametrize("piece", ["~", "cm ", "9", "/", r"\,", r"\text{cm}", "i", "1 ", "{", "_"])
def test_no_answer_keeps_the_rewriting_busy(piece):
    began = time.thread_time()
    latex_form(piece * (LONGEST // len(piece)))
    latex_form(piece * 100_000)
    assert time.thread_time() - began < 3
