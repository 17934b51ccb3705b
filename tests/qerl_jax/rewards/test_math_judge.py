"""math-verify behind our reading of a completion: which answers count as the gold one."""

import pytest

from qerl_jax.rewards import math_judge


@pytest.mark.parametrize(
    ("gold", "completion", "agrees"),
    [
        # where the answer is looked for
        ("5", r"so \boxed{5}", True),
        ("5", r"\boxed{4}. No: it must be \boxed{5}", True),
        ("5", r"\boxed{5}. No: it must be \boxed{4}", False),
        (r"\{1, 2\}", r"\boxed{1} and \boxed{2}", True),
        ("5", r"\boxed{5} and then $7$", True),
        ("5", "The final answer is $5$.", True),
        ("5", "<answer>5</answer>", True),
        ("5", r"<answer>\boxed{5}</answer>", True),
        ("5", "<answer>$5$</answer>", True),
        ("5", r"<answer>\(5\)</answer>", True),
        ("5", "<answer>it is $5$</answer>", True),
        ("5", r"\boxed{5} <answer>4</answer>", False),
        ("5", "<answer>4</answer> <answer>5</answer>", True),
        ("5", "5", False),
        ("5", "I think it is 5", False),
        ("5", r"\boxed{", False),
        ("5", r"\boxed{}", False),
        ("5", "<answer></answer>", False),
        ("5", "", False),
        # what counts as equal
        ("1/2", r"\boxed{0.5}", True),
        (r"\frac12", r"\boxed{\frac{1}{2}}", True),
        (r"\frac{1}{2}", r"\boxed{\frac12}", True),
        (r"2\sqrt{3}", "<answer>2</answer>", False),
        (r"2\sqrt{3}", r"<answer>\sqrt{12}</answer>", True),
        ("x^2-1", r"\boxed{(x-1)(x+1)}", True),
        ("x=5", r"\boxed{5}", True),
        ("27.0", "<answer>27</answer>", True),  # as AMC 23 has it
        ("025", r"\boxed{25}", True),  # as AIME 2024 has it
        ("5", r"\boxed{x=5}", True),
        ("5", r"\boxed{-5}", False),
        ("025", r"\boxed{25}", True),
        ("27.0", r"\boxed{27}", True),
        ("1,234", r"\boxed{1234}", True),
        (r"\$3.50", "<answer>3.50</answer>", True),
        ("50\\%", r"\boxed{0.5}", True),
        ("10", r"\boxed{10\text{ cm}}", True),
        (r"(3, \frac{\pi}{2})", r"\boxed{\left(3, \pi/2\right)}", True),
        ("(1, 2)", r"\boxed{(2, 1)}", False),
        (r"\{1, 2\}", r"\boxed{\{2, 1\}}", True),
        ("[2, 5)", r"\boxed{[2, 5)}", True),
        ("[2, 5)", r"\boxed{(2, 5)}", False),
        (r"\text{(B)}", r"\boxed{\text{(B)}}", True),
        ("B", "<answer>C</answer>", False),
    ],
)
def test_agreement_is_of_values_and_of_the_stated_answer(gold, completion, agrees):
    assert math_judge.is_readable(gold)
    assert math_judge.agrees(gold, completion) is agrees


@pytest.mark.parametrize("gold", ["", " ", "$$"])
def test_gold_answers_that_say_nothing_are_unreadable(gold):
    assert not math_judge.is_readable(gold)
