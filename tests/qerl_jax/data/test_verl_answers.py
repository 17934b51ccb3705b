"""Tests verl's answer readers and normal form, with values worked out by hand from its rules."""

import pytest

from qerl_jax.data import verl_answers
from tests.tables import spread

# What a function makes of texts: (result, texts). All but `boxed` read the last 300 characters.
READINGS = {
    verl_answers.strict_number: [
        ("18", ["#### 18", "#### 18" + 293 * " "]),
        ("1234", ["#### 1,234"]),
        ("-7", ["#### -7"]),
        ("18.", ["#### 18."]),
        ("18.0", ["#### 18.0"]),
        ("2", ["#### 1\n#### 2", "#### 2 of 3"]),
        (None, ["####18", "#### $18", "10-7", "It is 5 .", "It is 5, yes", "5 , yes", ".", ""]),
        (None, ["#### 18" + 294 * " ", "#### 18" + 299 * " "]),
    ],
    verl_answers.flexible_number: [
        ("18", ["#### 18", "####18", "#### $18", "#### 18" + 293 * " ", "#### 18" + 294 * " "]),
        ("1,234", ["#### 1,234"]),
        ("-7", ["#### -7", "10-7"]),
        ("18.", ["#### 18."]),
        ("18.0", ["#### 18.0"]),
        ("2", ["#### 1\n#### 2"]),
        ("3", ["#### 2 of 3"]),
        ("5", ["It is 5 ."]),
        ("5,", ["It is 5, yes"]),
        (",", ["5 , yes"]),
        ("8", ["#### 18" + 299 * " "]),
        (None, [".", ""]),
    ],
    verl_answers.answer_line: [
        ("5", ["Answer: 5\nso", "Answer: 5\n" + 290 * "."]),
        ("6", ["answer : 5\nAnswer:6"]),
        (None, ["Answer: 5\n" + 291 * ".", r"\boxed{5}"]),
    ],
    verl_answers.boxed: [
        (r"\frac{1}{2}", [r"\boxed{4} and \boxed{\frac{1}{2}}"]),
        (
            "5",
            [r"\boxed{5}" + 400 * " ", r"$\boxed 5$ so", r"\boxed{4} but $\boxed 5$ or \boxed{6}"],
        ),
        ("{5}", [r"\boxed {5}"]),
        (None, [r"\boxed5", r"\boxed{5", r"\fbox{5}", "5"]),
    ],
    verl_answers.hendrycks_form: [
        (r"\frac{1}{2}", [r"\dfrac{1}{2}", r"\frac12", "1/2", "0.5", ".5"]),
        (r"\frac{1}{72}", [r"\frac1{72}"]),
        (r"\frac{1}{2}x+\frac{3}{4}", [r"\frac12x+\frac34"]),
        (r"\frac{-1}{2}", ["-1/2"]),
        (r"\sqrt{3}", [r"\sqrt3"]),
        (r"\sqrt{}3", [r"\sqrt 3"]),
        ("5", ["x = 5", "xy=5", r"5\text{ cm}", r"\$5"]),
        ("90", [r"90^\circ", r"90^{\circ}"]),
        ("50", [r"50\%"]),
        ("(1,2)", [r"\left( 1, \! 2 \right)"]),
        ("{0.5}", ["{.5}"]),
        ("12", ["1 \n 2"]),
        ("a\\b", [r"a \\ b"]),
        *((same, [same]) for same in (r"\frac{72}1", r"\frac1", "01/2", "-0/2", "x/2", "1/2/3")),
        *((same, [same]) for same in ("0.50", r"2\sqrt{3}", "xyz=5", r"5\text{cm}", "")),
    ],
}


@pytest.mark.parametrize("read", READINGS, ids=lambda function: function.__name__)
def test_texts_are_read_as_by_verl(read):
    for expected, text in spread(READINGS[read]):
        assert (text, read(text)) == (text, expected)


@pytest.mark.parametrize("answer", [r"5\text{ a}\text{ b}", r"\sqrt", r"\sqrt\sqrt2", r"\frac"])
def test_answers_without_a_form_are_compared_as_they_stand(answer):
    with pytest.raises(ValueError, match="answer: got"):
        verl_answers.hendrycks_form(answer)
    assert verl_answers.same_in_hendrycks_form(answer, answer)
    assert not verl_answers.same_in_hendrycks_form(answer, answer + " ")
    assert verl_answers.same_in_hendrycks_form("1/2", r"\dfrac12")
