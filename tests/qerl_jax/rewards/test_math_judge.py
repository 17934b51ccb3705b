"""Tests math-verify on answers found by our readers: which ones count as the gold answer."""

import pytest

from qerl_jax.rewards import math_judge
from tests.tables import spread


@pytest.mark.parametrize("gold", ["", " ", "$$"])
def test_gold_answers_that_say_nothing_are_unreadable(gold):
    assert not math_judge.is_readable(gold)


COLUMN = r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"
RIGHT = spread(
    [
        # where the answer is looked for
        ("5", [r"so \boxed{5}", r"\boxed{4}. No: it must be \boxed{5}", r"\boxed{5} and then $7$"]),
        ("5", ["The final answer is $5$.", "<answer>5</answer>", r"<answer>\boxed{5}</answer>"]),
        ("5", ["<answer>$5$</answer>", r"<answer>\(5\)</answer>", "<answer>it is $5$</answer>"]),
        ("5", ["<answer>4</answer> <answer>5</answer>"]),
        (r"\{1, 2\}", [r"\boxed{1} and \boxed{2}", r"\boxed{\{2, 1\}}"]),
        # what counts as equal
        ("1/2", [r"\boxed{0.5}"]),
        (r"\frac12", [r"\boxed{\frac{1}{2}}"]),
        (r"\frac{1}{2}", [r"\boxed{\frac12}"]),
        (r"2\sqrt{3}", [r"<answer>\sqrt{12}</answer>"]),
        ("x^2-1", [r"\boxed{(x-1)(x+1)}"]),
        ("x=5", [r"\boxed{5}"]),
        ("27.0", ["<answer>27</answer>", r"\boxed{27}"]),  # as AMC 23 has it
        ("025", [r"\boxed{25}"]),  # as AIME 2024 has it
        ("5", [r"\boxed{x=5}"]),
        ("1,234", [r"\boxed{1234}"]),
        (r"\$3.50", ["<answer>3.50</answer>"]),
        (r"(3, \frac{\pi}{2})", [r"\boxed{\left(3, \pi/2\right)}"]),
        ("[2, 5)", [r"\boxed{[2, 5)}"]),
        (r"\text{(B)}", [r"\boxed{\text{(B)}}"]),
        # the last box counts, with or without a space before its brace
        (r"\frac{4}{7}", [r"\boxed {\frac{4}{7}}", "\\boxed\n{\\frac{4}{7}}"]),
        ("5", [r"<answer>\boxed {5}</answer>", r"\boxed{4}, no: \boxed{5}"]),
        ("5", [r"\boxed{4}, \boxed{5}", r"\boxed{4} \boxed{5}"]),
        ("5", [r"\boxed{x = 4}, or rather, with the other sign, \boxed{5}"]),
        ("1,2,3", [r"\boxed{1}, \boxed{2} and \boxed{3}"]),
        (r"\{1, 2\}", [r"$\boxed{1}$ and $\boxed{2}$"]),
        # thousands
        ("12345", [r"\boxed{12\,345}", r"\boxed{12\;345}", "<answer>12\u202f345</answer>"]),
        ("12345", [r"\boxed{12 345}"]),
        ("1234567", [r"\boxed{1\,234\,567}"]),
        (r"1,\!657", [r"\boxed{1657}"]),
        ("1657", [r"\boxed{1{,}657}"]),
        ("1657.5", [r"\boxed{\$1\,657.50}"]),
        # units and degrees
        ("10", [r"\boxed{10\text { cm}}"]),
        (r"10\text { cm}", [r"\boxed{10}"]),
        ("9.8", [r"\boxed{9.8\,\text{m}/\text{s}^2}"]),
        ("20", [r"\boxed{20 square units}"]),
        (r"34\text{ sq. units}", [r"\boxed{34}"]),
        ("18", ["<answer>18 apples</answer>"]),
        ("5", [r"\boxed{5\ \mathrm{kg}}"]),
        ("45", ["\\boxed{45°}", r"\boxed{45^{\circ}}"]),
        (r"45^\circ", ["\\boxed{45°}", r"\boxed{45}"]),
        # full stops and rows
        ("5", [r"\boxed{5.}", r"\boxed{5\ }", r"\boxed{5~\text{units}}"]),
        (r"\frac{1}{2}", [r"\boxed{\frac{1}{2}.}"]),
        ("10", [r"\boxed{10\text{ ft.}}"]),
        ("0.1", [r"\boxed{10\%}"]),
        (r"-\frac{5}{3}.", [r"\boxed{-5/3}"]),
        (COLUMN, [r"\boxed{\begin{pmatrix} 1 \\[2pt] 2 \end{pmatrix}}"]),
        # the imaginary unit, however it is written
        ("2+3i", [r"\boxed{2 + 3 i}", r"\boxed{2+3\cdot i}", r"\boxed{3\mathrm{i} + 2}"]),
        (r"2i\sqrt{3}", [r"\boxed{2\sqrt{3}i}"]),
        ("-9", [r"\boxed{(3i)^2}"]),
        ("-1", [r"\boxed{i^2}"]),
        (r"e^{i\pi/3}", [r"\boxed{e^{\pi i/3}}"]),
        ("a+bi", [r"\boxed{a+b\cdot i}"]),
        (r"\sum_{i=1}^n i", [r"\boxed{\sum_{i=1}^{n} i}"]),
        # bases
        ("1011_2", [r"\boxed{1011_{2}}", r"\boxed{1011_{\text{two}}}", r"\boxed{(1011)_2}"]),
        ("1011_2", [r"\boxed{1011_{(2)}}", r"\boxed{1011_{\text{base }2}}"]),
        ("1011_2", [r"\boxed{1011\text{ (base 2)}}", r"\boxed{1011 \text{ base } 2}"]),
        ("2A_{16}", [r"\boxed{2A_{16}}"]),
        ("24_{10}", [r"\boxed{24}"]),
        # variables, lists, mixed numbers
        (r"\frac{8}{3}t", [r"\boxed{\frac{8t}{3}}"]),
        (r"6, 8\text{, and }10", [r"\boxed{6, 8, 10}"]),
        (r"-2 \text{ or } -12", [r"\boxed{-12, -2}"]),
        ("5.5", [r"\boxed{5 1/2}"]),
        ("72", [r"\boxed{2^3 3^2}"]),
        ("0.5", [r"\boxed{\frac 1 2}"]),
        # no solution, intervals, angles
        (r"\emptyset", [r"\boxed{\varnothing}", r"\boxed{∅}"]),
        (r"(3,\infty)", [r"\boxed{x>3}", r"\boxed{3<x}", r"\boxed{(3,∞)}"]),
        ("x>3", [r"\boxed{(3,\infty)}"]),
        ("[3,5)", [r"\boxed{3 \le x < 5}"]),
        (r"(-\infty,2)\cup(5,\infty)", [r"\boxed{x<2 \text{ or } x>5}"]),
        (r"x<2 \text{ or } x>5", [r"\boxed{(-\infty,2)\cup(5,\infty)}"]),
        (r"\frac{\pi}{6}", [r"\boxed{30^\circ}", r"\boxed{30°}"]),
        (r"30^\circ", [r"\boxed{\frac{\pi}{6}}", r"\boxed{30}"]),
        # decimals, currencies, wide digits
        (r"\frac13", [r"\boxed{0.\overline{3}}", r"\boxed{0.\bar3}", r"\boxed{0.3333333333}"]),
        (r"\frac16", [r"\boxed{0.1\overline{6}}"]),
        ("18.90", [r"\boxed{€18.90}", r"\boxed{18.90€}", r"\boxed{\text{£}18.9}"]),
        ("1500", [r"\boxed{1.5e3}", r"\boxed{15E2}", r"\boxed{1.5·10^3}"]),
        ("0.0015", [r"\boxed{1.5e-3}"]),
        ("1E5_{16}", [r"\boxed{1E5_{16}}"]),
        ("18.90", ["<answer>$18.90</answer>", r"\boxed{$18.90}", "<answer>$18.90$</answer>"]),
        ("$1,234", ["<answer>1234</answer>"]),
        ("73", [r"\boxed{７３}"]),
        # a box without a brace, and space that does not count
        ("57", [r"\boxed 57", r"so $\boxed 57$.", r"it is \boxed 57. Done", r"\boxed 57 apples"]),
        (r"\frac12", [r"\boxed\frac12", r"\(\boxed\frac{1}{2}\)"]),
        ("5", [rf"\boxed{{{' ' * 2000}5}}", f"<answer>5{' ' * 2000}</answer>"]),
        # small numbers
        (r"\frac{1}{2^{98}}", [r"\boxed{2^{-98}}", r"\boxed{x = 2^{-98}}"]),
        ("0.0000672", [r"\boxed{6.72 \times 10^{-5}}"]),
        ("0", [r"\boxed{\sqrt2\cdot\sqrt2-2}", r"\boxed{\sin^2(1)+\cos^2(1)-1}"]),
        ("50\\%", [r"\boxed{50}", r"\boxed{0.5}"]),
        # what the text calls its answer
        (r"\frac{8}{3}t", [r"The final answer is $\frac{8}{3}t$."]),
        ("12345", [r"The final answer is $12\,345$."]),
    ]
)


@pytest.mark.parametrize(("gold", "completion"), RIGHT)
def test_right_answers_in_hard_spellings_are_right(gold, completion):
    assert math_judge.is_readable(gold)
    assert math_judge.agrees(gold, completion)


WRONG = spread(
    [
        # no answer, or another one
        ("5", [r"\boxed{5}. No: it must be \boxed{4}", r"\boxed{5} <answer>4</answer>", "5"]),
        ("5", ["I think it is 5", r"\boxed{", r"\boxed{}", "<answer></answer>", "", r"\boxed{-5}"]),
        (r"2\sqrt{3}", ["<answer>2</answer>"]),
        ("(1, 2)", [r"\boxed{(2, 1)}"]),
        ("[2, 5)", [r"\boxed{(2, 5)}"]),
        ("B", ["<answer>C</answer>"]),
        # a list is not a number, and digits apart are no sum
        ("12", [r"\boxed{1,2}", r"\boxed{1, 2}", r"\boxed{1{,}2}", r"\boxed{1,\!2}"]),
        ("12", [r"\boxed{1\,2}", r"\boxed{1 2}"]),
        ("1,2", [r"\boxed{12}"]),
        ("3", [r"\boxed{1 2}", r"\boxed{1\,2}", r"\boxed{5 1/2}"]),
        ("357", [r"\boxed{12\,345}"]),
        ("1234", [r"\boxed{(1,234)}", r"\boxed{12\,34}"]),
        ("12345", [r"\boxed{123\,45}"]),
        ("1", [r"\boxed{1,000}"]),
        # an earlier box, a list of which one is right, a box that is not closed
        ("4", [r"\boxed{4}, no: \boxed{5}", r"\boxed{4}, \boxed{5}"]),
        ("4", [r"\boxed {4} then \boxed {5}"]),
        (r"\{4, 5\}", [r"\boxed{4}, \boxed{5}"]),
        ("2", [r"\boxed{1} and \boxed{2}"]),
        ("1", [r"\boxed{1} and \boxed{2}"]),
        ("5", [r"The final answer is $5$, so \boxed{"]),
        ("5", [r"The final answer is $5$, so \boxed{6}"]),
        # variables are no units, number words neither
        (r"\frac{8}{3}t", [r"\boxed{\frac{8}{3}}"]),
        (r"\frac{8}{3}", [r"\boxed{\frac{8}{3}t}", r"The final answer is $\frac{8}{3}t$."]),
        ("5t", [r"\boxed{5}"]),
        ("5", [r"\boxed{5h}", r"\boxed{5\text{ million}}", r"\boxed{5\text{ dozen}}"]),
        ("2ab", [r"\boxed{2}"]),
        ("3", [r"\boxed{3\mathrm{e}}"]),
        (r"x=\text{east}", [r"\boxed{x=\text{west}}"]),
        (r"\text{(B)}", [r"\boxed{\text{(C)}}"]),
        ("10", [r"\boxed{100\text { cm}}"]),
        ("45", ["\\boxed{54°}"]),
        # bases
        ("1011_2", [r"\boxed{1011_3}", r"\boxed{1011}", r"\boxed{1101_2}"]),
        ("1011_2", [r"\boxed{1011\text{ (base 3)}}", r"\boxed{1011_{(3)}}"]),
        ("1011", [r"\boxed{1011_2}", r"\boxed{1011\text{ (base 3)}}"]),
        ("2516_8", [r"\boxed{2516_{9}}"]),
        ("2A_{16}", [r"\boxed{2A_{15}}", r"\boxed{2B_{16}}"]),
        # the imaginary unit
        ("2+3i", [r"\boxed{2-3i}", r"\boxed{3+2i}", r"\boxed{5}"]),
        ("3", [r"\boxed{3i}"]),
        ("9", [r"\boxed{(3i)^2}"]),
        ("i", [r"\boxed{i^2}"]),
        ("x_i", [r"\boxed{x_j}"]),
        # full stops, rows, near misses
        ("5", [r"\boxed{5.1}"]),
        ("0.3", [r"\boxed{0.33}"]),
        ("0.333...", [r"\boxed{0.333}"]),
        (COLUMN, [r"\boxed{\begin{pmatrix} 2 \\[2pt] 1 \end{pmatrix}}", r"\boxed{(1, 2, 3)}"]),
        (r"\frac{4}{7}", [r"\boxed {\frac{7}{4}}"]),
        ("72", [r"\boxed{2^3, 3^2}"]),
        ("x^2 y", [r"\boxed{x^2}"]),
        (r"\sqrt{12}", [r"\boxed{\sqrt{1}2}"]),
        # small numbers that differ: Math-Verify's issue 14, and MATH's training set
        (r"\frac{1}{2^{98}}", [r"\boxed{\frac{1}{2^{97}}}", r"\boxed{\frac{1}{3^{98}}}"]),
        (r"\frac{1}{2^{98}}", [r"\boxed{0}"]),
        ("10^{-20}", [r"\boxed{10^{-21}}", r"\boxed{10^{-20}i}"]),
        (r"\frac{1}{2004!}", [r"\boxed{\frac{1}{2006!}}"]),
        (r"\frac{2^{2005}+1}{3 \cdot 2^{2006}}", [r"\boxed{\frac{1}{3 \cdot 2^{2006}}}"]),
        ("0.0000001", [r"\boxed{0.0000002}"]),
        (r"\frac13", [r"\boxed{0.333333}"]),
        ("(10^{-20},1)", [r"\boxed{(10^{-21},1)}"]),
        (r"\{10^{-20},1\}", [r"\boxed{\{1,10^{-21}\}}"]),
        ("x=10^{-20}", [r"\boxed{x=10^{-21}}", r"\boxed{10^{-21}}"]),
        ("x>10^{-20}", [r"\boxed{x>10^{-21}}"]),
        ("1000000000", [r"\boxed{1000000002}"]),
        # intervals, angles, powers of ten
        (r"(3,\infty)", [r"\boxed{x \ge 3}", r"\boxed{x<3}"]),
        (r"\frac{\pi}{6}", [r"\boxed{60^\circ}", r"\boxed{30}"]),
        (r"\emptyset", [r"\boxed{0}", r"\boxed{\{0\}}"]),
        ("1500", [r"\boxed{1.5e2}"]),
        ("-2,-12", [r"\boxed{-2}"]),
    ]
)


@pytest.mark.parametrize(("gold", "completion"), WRONG)
def test_wrong_answers_stay_wrong(gold, completion):
    assert math_judge.is_readable(gold)
    assert not math_judge.agrees(gold, completion)


# As MATH and GSM8K write them.
REFERENCES = [
    *("18", "-7", "025", "27.0", "1,080", "850,000", r"1,\!657", r"\$306,\!956.63", "0.0000672"),
    *("50\\%", r"\frac{14}{3}", r"\frac43", r"\frac 59", r"\dfrac{2469}{20,\!000}", "3/2"),
    *(r"2\frac{1}{2}", r"3\sqrt{13}", r"\sqrt[3]{2}", "11\\sqrt2", r"\!\sqrt{21}"),
    *(r"480 + 480\sqrt{3}\text{ feet}", "x^3+3x-6", "6r^2-4r-24", r"y = 2x+3", "x=5"),
    *(r"-\frac{5}{3}.", "(0,9) \\cup (9,36)", "[-2,7]", r"\left( 3, \frac{\pi}{2} \right)"),
    *("(-\\infty, 0]", r"\{1, 2\}", "1,-2", "1, 2, 3", "2516_8", "43_5.", "4210_{5}", "861_{12}"),
    *("-37_8", "24_{10}", "6 - 5i", r"1 \pm \sqrt{19}", "1 + 274i", r"e^{i\pi/4}", r"90^\circ"),
    *(r"30^\circ.", r"20\text{ square units}", "7\\text{ hours}.", r"\text{(C)}"),
    *(r"\text{Evelyn}", r"\text{B,C}", r"-2 \text{ or } -12", r"6, 8\text{, and }10"),
    *(r"4\!:\!51\!:\!06 \text{ p.m.}", r"\begin{pmatrix} 1/5 \\ -18/5 \end{pmatrix}"),
    *("x \\in [-2,7]", r"\begin{pmatrix} -1 & 0 \\ 0 & -1 \end{pmatrix}.", r"f(x)=x^2"),
    *(r"3^{2}\cdot 5", "{17}."),
]


@pytest.mark.parametrize("gold", REFERENCES)
def test_reference_answers_equal_themselves_in_a_box(gold):
    assert math_judge.is_readable(gold)
    assert math_judge.agrees(gold, f"So it is \\boxed{{{gold}}}, as wanted.")


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (r"\frac12", "0.5", True),
        ("x=5", "5", True),
        ("5", "x=5", True),
        (r"\boxed{5}", "5", True),
        ("12", "1,2", False),
        ("", "", False),
    ],
)
def test_two_answers_are_the_same_whichever_comes_first(first, second, same):
    assert math_judge.same_answer(first, second) is same
    assert math_judge.same_answer(second, first) is same
