"""Tests verl's answer readers and normal form, with values worked out by hand from its rules."""

import pytest

from qerl_jax.data import verl_answers
from tests.tables import spread


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("#### 18", "18", "18"),
        ("#### 1,234", "1234", "1,234"),
        ("#### -7", "-7", "-7"),
        ("#### 18.", "18.", "18."),
        ("#### 18.0", "18.0", "18.0"),
        ("####18", None, "18"),
        ("#### $18", None, "18"),
        ("#### 1\n#### 2", "2", "2"),
        ("#### 2 of 3", "2", "3"),
        ("10-7", None, "-7"),
        ("It is 5 .", None, "5"),
        ("It is 5, yes", None, "5,"),
        ("5 , yes", None, ","),
        (".", None, None),
        ("", None, None),
        ("#### 18" + 293 * " ", "18", "18"),
        ("#### 18" + 294 * " ", None, "18"),
        ("#### 18" + 299 * " ", None, "8"),
    ],
)
def test_gsm8k_is_read_from_the_last_300_characters(text, strict, flexible):
    assert verl_answers.strict_number(text) == strict
    assert verl_answers.flexible_number(text) == flexible


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Answer: 5\nso", "5"),
        ("answer : 5\nAnswer:6", "6"),
        ("Answer: 5\n" + 290 * ".", "5"),
        ("Answer: 5\n" + 291 * ".", None),
        (r"\boxed{5}", None),
    ],
)
def test_the_answer_line_is_read_from_the_last_300_characters(text, line):
    assert verl_answers.answer_line(text) == line


@pytest.mark.parametrize(
    ("box", "text"),
    spread(
        [
            (r"\frac{1}{2}", [r"\boxed{4} and \boxed{\frac{1}{2}}"]),
            ("5", [r"\boxed{5}" + 400 * " ", r"$\boxed 5$ so"]),
            ("5", [r"\boxed{4} but $\boxed 5$ or \boxed{6}"]),
            ("{5}", [r"\boxed {5}"]),
            (None, [r"\boxed5", r"\boxed{5", r"\fbox{5}", "5"]),
        ]
    ),
)
def test_the_last_box_is_read_from_all_of_the_text(text, box):
    assert verl_answers.boxed(text) == box


@pytest.mark.parametrize(
    ("form", "answer"),
    spread(
        [
            (r"\frac{1}{2}", [r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", ".5"]),
            (r"\frac{1}{72}", [r"\frac1{72}"]),
            (r"\frac{72}1", [r"\frac{72}1"]),
            (r"\frac{1}{2}x+\frac{3}{4}", [r"\frac12x+\frac34"]),
            (r"\frac1", [r"\frac1"]),
            (r"\frac{-1}{2}", ["-1/2"]),
            ("01/2", ["01/2"]),
            ("-0/2", ["-0/2"]),
            ("x/2", ["x/2"]),
            ("1/2/3", ["1/2/3"]),
            ("0.50", ["0.50"]),
            (r"\sqrt{3}", [r"\sqrt3"]),
            (r"\sqrt{}3", [r"\sqrt 3"]),
            (r"2\sqrt{3}", [r"2\sqrt{3}"]),
            ("5", ["x = 5", "xy=5", r"5\text{ cm}", r"\$5"]),
            ("xyz=5", ["xyz=5"]),
            (r"5\text{cm}", [r"5\text{cm}"]),
            ("90", [r"90^\circ", r"90^{\circ}"]),
            ("50", [r"50\%"]),
            ("(1,2)", [r"\left( 1, \! 2 \right)"]),
            ("{0.5}", ["{.5}"]),
            ("12", ["1 \n 2"]),
            ("a\\b", [r"a \\ b"]),
            ("", [""]),
        ]
    ),
)
def test_hendrycks_form_removes_what_his_code_removes(answer, form):
    assert verl_answers.hendrycks_form(answer) == form


@pytest.mark.parametrize("answer", [r"5\text{ a}\text{ b}", r"\sqrt", r"\sqrt\sqrt2", r"\frac"])
def test_answers_without_a_form_are_compared_as_they_stand(answer):
    with pytest.raises(ValueError, match="answer: got"):
        verl_answers.hendrycks_form(answer)
    assert verl_answers.same_in_hendrycks_form(answer, answer)
    assert not verl_answers.same_in_hendrycks_form(answer, answer + " ")
    assert verl_answers.same_in_hendrycks_form("1/2", r"\dfrac12")
