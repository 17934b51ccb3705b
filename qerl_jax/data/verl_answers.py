r"""Extracts and compares answers exactly as verl does: as strings, in verl's own normal forms.

Scores are comparable with verl's only if the peculiarities of its scorers are kept. So numbers are compared as text
("18." and "18.0" are not "18"), and a box with a space before its brace includes the brace.

Source: verl (Apache-2.0), verl/utils/reward_score: gsm8k, math_reward (formerly `math`), math_dapo.
"""

import re

from qerl_jax.data import answers

# verl's gsm8k and math_dapo read only this many characters at the end of a completion.
TAIL = 300
_HASHES = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")
# Replaced in this order.
_REWRITTEN = {
    **{"\n": "", "\\!": "", "\\\\": "\\", "tfrac": "frac", "dfrac": "frac"},
    **dict.fromkeys(("\\left", "\\right", "^{\\circ}", "^\\circ", "\\$"), ""),
}
_UNIT = "\\text{ "


def strict_number(text: str) -> str | None:
    """Returns the number after the last `#### ` with one in the last 300 characters, without commas, or None."""
    numbers = _HASHES.findall(text[-TAIL:])
    return numbers[-1].replace(",", "") if numbers else None


def flexible_number(text: str) -> str | None:
    """Returns the last run of digits, points and commas, other than ".", in the last 300 characters, or None."""
    numbers = [run for run in _NUMBER.findall(text[-TAIL:]) if run != "."]
    return numbers[-1] if numbers else None


def answer_line(text: str) -> str | None:
    """Returns the rest of the line after the last "Answer:", in any case, in the last 300 characters, or None."""
    return answers.answer_line(text[-TAIL:])


def boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`, or None.

    If a `\boxed ` with a space occurs, it is instead the text after the last of these, up to a dollar sign.
    """
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    is_braced = start >= 0 and text.startswith("\\boxed{", start)
    return answers.braced(text, start + len("\\boxed{"), len(text)) if is_braced else None


def same_in_hendrycks_form(answer: str, expected: str) -> bool:
    """Whether two answers have the same Hendrycks form; if one of them has none, whether their texts are equal."""
    try:
        return hendrycks_form(answer) == hendrycks_form(expected)
    except ValueError:
        return answer == expected


def hendrycks_vote(answer: str) -> str:
    """Returns the Hendrycks form, by which votes are counted; the text itself if it has none."""
    try:
        return hendrycks_form(answer)
    except ValueError:
        return answer


def hendrycks_form(answer: str) -> str:
    r"""Returns the normal form in which the authors of MATH compare answers as text.

    It has no spaces, `\left` and `\right`, degree, percent and dollar signs, or `\text{ }` with a unit at the end. It
    drops a short `x =` at the start, adds braces to `\frac12` and `\sqrt2`, and writes 1/2 as a `\frac` and "0.5" as
    one half.

    Raises:
        ValueError: If the original code fails on the answer: two units, or a root or fraction of nothing.

    Source: Hendrycks et al. 2021 (arXiv:2103.03874), the code of its evaluation; verl scores MATH with it.
    """
    for before, after in _REWRITTEN.items():
        answer = answer.replace(before, after)
    if answer.count(_UNIT) > 1:
        raise ValueError(f"answer: got {answer!r}; has more than one unit")
    answer = answer.partition(_UNIT)[0].replace("\\%", "")
    answer = answer.replace(" .", " 0.").replace("{.", "{0.")
    if answer.startswith("."):
        answer = "0" + answer
    if answer.count("=") == 1 and answer.index("=") <= 2:
        answer = answer.partition("=")[2]
    if re.search(r"\\sqrt(?:\\sqrt|$)", answer):
        raise ValueError(f"answer: got {answer!r}; has a root of nothing")
    answer = re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", answer).replace(" ", "")
    answer = _with_braces(answer)
    if answer == "0.5":
        return "\\frac{1}{2}"
    quotient = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))/(-?(?:0|[1-9][0-9]*))", answer)
    if quotient is None or "-0" in quotient.groups():
        return answer
    return rf"\frac{{{quotient[1]}}}{{{quotient[2]}}}"


def _with_braces(answer: str) -> str:
    r"""Returns an answer with `\frac12` as `\frac{1}{2}`; unchanged if a fraction has no denominator."""
    first, *fractions = answer.split("\\frac")
    written = [first]
    for fraction in fractions:
        if not fraction:
            raise ValueError(f"answer: got {answer!r}; has a fraction of nothing")
        if fraction[0] != "{":
            if len(fraction) < 2:
                return answer
            below = fraction[1:] if fraction[1] == "{" else f"{{{fraction[1]}}}{fraction[2:]}"
            fraction = f"{{{fraction[0]}}}{below}"
        written.append(fraction)
    return "\\frac".join(written)
