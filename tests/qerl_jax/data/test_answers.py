"""Tests answers: where each form is found in a text, and which two are equal."""

import decimal
import math
import random
import re

import numpy as np
import pytest

from qerl_jax.data import answers
from tests.tables import spread

# What a function makes of texts: (result, texts).
READINGS = {
    answers.last_block: [
        ("2", ["<answer>2</answer>", "<answer>\n 2 \n</answer>", "<answer>2</answer> done"]),
        ("2", ["<answer>1</answer> no: <answer>2</answer>", "<answer>2</answer> so <answer>3"]),
        (None, ["2</answer>", " just 2 ", ""]),
    ],
    answers.tagged: [
        ("2", ["<answer>2</answer>", "<answer>\n 2 \n</answer>", "<answer>2</answer> done"]),
        ("2", ["<answer>1</answer> no: <answer>2</answer>", "2</answer>"]),
        ("3", ["<answer>2</answer> so <answer>3"]),
        ("just 2", [" just 2 "]),
        ("", [""]),
    ],
    # Signs are told from subtractions.
    answers.last_number: [
        ("12", ["first 3, then 12"]),
        ("1,234.50", ["it costs $1,234.50."]),
        ("2000", ["in 1999,2000 people"]),
        ("-7", ["so x = -7", "so x = - 7", "so x = −7"]),
        ("-5", ["a loss of -$5"]),
        ("7", ["10-7", "(2)-7"]),
        ("5.", ["from 3 to 5."]),
        (".5", ["about .5"]),
        (None, ["I cannot say", ""]),
    ],
    # A box goes to its own brace.
    answers.last_boxed: [
        ("5", [r"\boxed{5}", "\\boxed\n{5}", r"\boxed{4} then \boxed {5}", r"\boxed{\boxed{5}}"]),
        (r"\frac{1}{2}", [r"\boxed{1} and \boxed{\frac{1}{2}}"]),
        (r"\{1, 2\}", [r"\boxed{\{1, 2\}}"]),
        ("", [r"\boxed{}"]),
        (None, [r"\boxed{1} and \boxed{2", r"\boxed 5", r"\fbox{5}", ""]),
        (r"\frac{4}{7}", [r"\boxed {\frac{4}{7}}"]),
    ],
    # Boxes are one answer where "and" joins them.
    answers.last_boxes: [
        ("1,2", [r"\boxed{1} and \boxed{2}", r"$\boxed{1}$, and $\boxed {2}$"]),
        ("1,2", [r"\boxed{1}\text{ and }\boxed{2}", r"\boxed{0}. So \boxed{1} and \boxed{2}"]),
        ("1,2,3", [r"\boxed{1}, \boxed{2} and \boxed{3}"]),
        ("2", [r"\boxed{1}, \boxed{2}", r"\boxed{1} \boxed{2}", r"\boxed{1 and \boxed{2}"]),
        ("2", [r"\boxed{1} and then \boxed{2}", r"\boxed{1} or \boxed{2}"]),
        (None, [r"\boxed{1} and \boxed{2", "5"]),
    ],
    answers.answer_line: [
        ("5", ["Answer: 5", "Answer:\n5"]),
        ("5 ", ["the ANSWER :  5 \nthanks"]),
        ("2", ["Answer: 1\nAnswer: 2"]),
        (None, ["Answers: 5", "Answer:"]),
    ],
    answers.last_code: [
        ("c\nd\n", ["```python\na\n```\n```c\nb\n```\n```py\nc\nd\n```\n```\ne\n```"]),
        ("x", ["```python3\nx```"]),
        (None, ["```python\nnever closed"]),
    ],
    answers.stated: [
        ("3", [r"<answer>3</answer> \boxed{4}"]),
        ("4", [r"7 apples, \boxed{4} \#### 5"]),
        ("5", ["#### 5\nAnswer: 6"]),
        ("x = 6", ["Answer: x = 6"]),
        ("8", ["It is 7, or 8!"]),
        (None, ["Nothing."]),
    ],
    answers.number: [
        (decimal.Decimal(1234), ["1,234"]),
        (decimal.Decimal(5), ["$5.00", r"\$5", "€5", "５"]),
        (decimal.Decimal(27), ["27."]),
        (decimal.Decimal(-3), ["−3", "-£3"]),
        (None, ["12,34", "1,2", "3 eggs", ""]),
    ],
    answers.minerva_form: [
        ("5", ["5", "x = 5", "$5$", "the value is $5$.", r"\boxed{5}", "5 cm", "5 degrees"]),
        ("5", [r"\$5", "5 dollars"]),
        ("c", ["a = b = c"]),
        ("east", [r"\text{east}", r"\mbox{east}"]),
        ("(B)", [r"\textbf{(B)}"]),
        ("90", [r"90^\circ", r"90^{\circ}"]),
        ("apple", ["an apple"]),
        (r"\frac{1}{2}", [r"\frac12", r"\frac{1}{2}"]),
        (r"\sqrt{2}", [r"\sqrt2", r"\sqrt{2}"]),
        ("1234", ["1,234", r"1,\!234", "1{,}234"]),
        ("(1,2)", ["(1,2)", "( 1 , 2 )"]),
        ("x,y", [r"x\text{ and }y"]),
        ("34", ["3, 4"]),  # Minerva's own: a list of digits passes for a number with commas
        ("", [""]),
    ],
}


@pytest.mark.parametrize("read", READINGS, ids=lambda function: function.__name__)
def test_texts_are_read_as_the_table_says(read):
    for expected, text in spread(READINGS[read]):
        assert (text, read(text)) == (text, expected)


@pytest.mark.parametrize(
    ("value", "gold", "text"),
    [
        (18.0, 18, "18"),
        (-0.0, 0, "0"),
        (2.5, 2.5, "2.5"),
        (1e-7, 1e-7, "0.0000001"),
        (np.float32(0.1), 0.1, "0.1"),
        (np.float16(3), 3, "3"),
        (np.int64(-3), -3, "-3"),
        (np.uint64(2**64 - 1), 2**64 - 1, "18446744073709551615"),
        (12345678901234567890, 12345678901234567890, "12345678901234567890"),
        (
            decimal.Decimal("1234567890123456789012.00"),
            1234567890123456789012,
            "1234567890123456789012",
        ),
        (decimal.Decimal("0.50"), decimal.Decimal("0.50"), "0.50"),
        (1e20, 1e20, "100000000000000000000"),
        (True, True, "True"),
        (np.str_("a"), "a", "a"),
        ("18.0", "18.0", "18.0"),
        (" 5\n", " 5\n", "5"),
        (["5 "], ["5 "], "5"),
        ([], [], None),
        (decimal.Decimal("sNaN"), None, None),
        ([1, 2], [1, 2], "[1, 2]"),
        *((blank, None, None) for blank in (None, "", " \n", math.nan, np.float64("nan"))),
    ],
)
def test_an_answer_of_a_row_has_one_form_whatever_it_comes_from(value, gold, text):
    form = answers.gold(value)
    assert form == gold and type(form) is type(gold)
    assert answers.gold_text(value) == text


@pytest.mark.parametrize("value", [["1", "2"], ("1", 2), {"value": 5}, b"5", np.array(["a", "b"])])
def test_what_is_no_single_answer_is_refused(value):
    with pytest.raises(ValueError, match="answer: got .*; must be one text or number"):
        answers.gold_text(value)


def test_a_missing_value_of_pandas_is_no_answer():
    pandas = pytest.importorskip("pandas")
    assert [answers.gold(value) for value in (pandas.NA, pandas.NaT)] == [None, None]


def published_form(answer):
    """Computes the part of Minerva's normal form that unwraps, with the patterns of its authors."""
    answer = re.sub(r".*?\$(.*?)\$.*", r"$\1$", answer)
    for command in ("text", "textbf", "overline"):
        answer = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", answer)
    return re.sub(r"\\boxed\{(.*)\}", r"\1", answer).replace("$", "").strip()


def test_minerva_form_unwraps_as_its_published_patterns_do():
    rng = random.Random(0)
    pieces = ("$", "{", "}", "\n", "x", "y", "\\text{", "\\textbf{", "\\overline{", "\\boxed{")
    changed = 0
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randint(0, 12)))
        if "\\text{}" in text or "\\text{\n}" in text:
            continue  # these are removed before
        expected = published_form(text)
        assert answers.minerva_form(text) == expected, text
        changed += expected != text
    assert changed > 10_000


@pytest.mark.timeout(60)  # a quadratic pattern takes minutes
@pytest.mark.parametrize(
    "piece",
    ["x", "$", "x$\n", "\\text{", "\\boxed{", "\\overline{x", "frac", "sqrt", "=", "{", "}"],
)
def test_minerva_form_is_linear_in_the_text(piece):
    answers.minerva_form(piece * (200_000 // len(piece)))


@pytest.mark.parametrize(
    ("first", "second"),
    [("27.0", "$27."), ("1,000", "1000"), (r"\frac12", r"x=\frac{1}{2}"), ("0", "-0.0")],
)
def test_equal_answers_are_one_vote(first, second):
    assert answers.canonical(first) == answers.canonical(second)
    assert answers.canonical(first) != answers.canonical("28")


@pytest.mark.parametrize("listed", ["1,2", "1, 2", "(1,2)", r"1,\,2", "01,2"])
def test_a_list_of_digits_is_not_the_number_of_its_digits(listed):
    assert answers.canonical(listed) != answers.canonical("12")


def test_numbers_of_many_digits_are_votes_of_their_own():
    long = "1234567890" * 3
    assert answers.canonical(f"{long}.500") == f"{long}.5" != answers.canonical(f"{long}.6")
    assert answers.canonical("1200") == "1200"
