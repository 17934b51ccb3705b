r"""Extracts the answer from a completion, and compares answers as text and numbers.

The extracting functions look for one form each: `<answer>` tags, GSM8K's `####`, `\boxed{}`, or a line `Answer:`.
`same`, `canonical` and `minerva_form` are for comparison; `rewards.math_judge` compares by algebra. Everything here
takes time linear in the length of the text, because a model may repeat itself for thousands of tokens.
"""

import decimal
import math
import re
from typing import Any

import numpy as np

from qerl_jax.system.checked import require

_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"([-+]?)({_DIGITS})")
# Signs of currencies, and ASCII's form of wide characters and the typographic minus.
CURRENCY = "$€£¥₹¢₩₽₪₫₱₺₴฿"
ASCII = {wide: wide - 0xFEE0 for wide in range(0xFF01, 0xFF5F)} | {0x2212: "-", 0x3000: " "}
# A minus directly after an operand is a subtraction, not a sign.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])([-+])\s?)?[{CURRENCY}]?({_DIGITS})")
_MARKUP = rf"(?:[\s*_`~\"'“<({{\[{CURRENCY}]|USD?|EUR|GBP|Rs\.?|\\(?:boxed|text|textbf|mathbf)?)*"
_HASH = re.compile(rf"####{_MARKUP}(?:([-+]){_MARKUP})?([0-9.,]*[0-9])(?=([^\n]{{0,20}}))")
# What makes the digits before it a part of something else: 3/4, 7:30, 2^3, 3,4, 3-4, 1e5, 2\pi, 5!, 5k, 5 million,
# 3 x 5, 3 hours 30; but not 5^\circ, 5 cm2.
_GOES_ON = re.compile(
    r"[,\s*_`$\\})\]]*(?:[0-9¼-¾⅐-⅞π]|[/⁄:]\s*[0-9(\\]|[-+±×÷·–]\s*[0-9(\\$]|\^(?!\s*\{?\s*\\circ)"
    r"|[eExXh][-+]?\s*[0-9]|(?!of\s)[A-Za-z]+\s+[0-9]|[kK!](?![A-Za-z])|(?:hundred|thousand|[mbtr]+illion|dozen)"
    r"|(?<=\\)(?:[dtc]?frac|sqrt|times|cdot|div|pi|over)(?![a-z]))"
)
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_CODE = re.compile(r"```(?:python|py)[0-9]*[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_BOX = re.compile(r"\\boxed\s*\{")
_PLAIN = ASCII | dict.fromkeys(map(ord, CURRENCY))
_AND = re.compile(r",?\s*(?:and|\\text\s*\{\s*and\s*\})")
_NO_DELIMITERS = str.maketrans("", "", "$")


# From here on a float64 does not have all digits of a whole number.
ROUNDED = 2.0**53


def gold(value: Any) -> Any:
    """Returns a row's answer as rewards get it, whichever file or library it comes from.

    A number of NumPy becomes one of Python, and a whole number that is stored with a fraction, as in a column of a
    table with missing values, becomes an int: 18 for 18.0. A float of at least 2**53 stays one, since its digits may
    be rounded. No answer is None: a blank text, NaN or a missing value of pandas. All else stays as it is.
    """
    if isinstance(value, np.floating):
        value = float(str(value))  # the digits that were written: 0.1 for a float32
    elif isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value if value.strip() else None
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    if isinstance(value, float | decimal.Decimal):
        if value.is_nan() if isinstance(value, decimal.Decimal) else math.isnan(value):
            return None
        is_exact = isinstance(value, decimal.Decimal) or abs(value) < ROUNDED
        if is_exact and math.isfinite(value) and value == int(value):
            return int(value)
    return value


def gold_text(value: Any) -> str | None:
    """Returns a row's answer as text without space around it, with all digits of a number: "0.0000001" for 1e-7.

    A list of one text counts as that text, and one of numbers as "[1, 2]". None if there is no answer.

    Raises:
        ValueError: If it is a list of several texts, a table or bytes.
    """
    rule = "must be one text or number"
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, list | tuple) and any(isinstance(item, str) for item in value):
        require(len(value) == 1, "answer", value, rule, ValueError)
        value = value[0]
    require(not isinstance(value, set | dict | bytes), "answer", value, rule, ValueError)
    value = None if isinstance(value, list | tuple) and not value else gold(value)
    if isinstance(value, float) and math.isfinite(value):
        return f"{decimal.Decimal(repr(value)):f}"
    return None if value is None else str(value).strip()


def _last(pattern: re.Pattern, text: str) -> str | None:
    """Returns the group of a pattern's last match; None if there is no match."""
    return next(reversed(pattern.findall(text)), None)


def last_block(text: str) -> str | None:
    """Returns the stripped text of the last complete `<answer>` block; None if there is no block."""
    block = _last(_BLOCK, text)
    return block and block.strip()


def tagged(text: str) -> str:
    """Returns the stripped text between the last `<answer>` and `</answer>`; the whole text if it has no tags.

    Source: QeRL's published code, which compares a text without tags as a whole.
    """
    return text.rpartition("<answer>")[2].partition("</answer>")[0].strip()


def after_reasoning(text: str) -> str:
    """Returns the text after the last `</think>`; "" if there is no such tag."""
    return text.rpartition("</think>")[2] if "</think>" in text else ""


def after_hashes(text: str) -> str | None:
    """Returns the number after the last `####` that has one (GSM8K's format); None if none has.

    Markup and signs of currencies around it are left out. None, too, if the digits are only a part of the answer, as
    in 3/4, 7:30 or 2^3.
    """
    numbers = _HASH.findall(text.translate(ASCII))
    if not numbers or _GOES_ON.match(numbers[-1][2]):
        return None
    return "".join(numbers[-1][:2])


def last_number(text: str) -> str | None:
    """Returns the last number of the text, as it is written, with its sign and without that of a currency, or None."""
    numbers = _NUMBER_IN_TEXT.findall(text.translate(ASCII))
    return "".join(numbers[-1]) if numbers else None


def last_boxed(text: str) -> str | None:
    r"""Returns the content of the last `\boxed{}`; None if there is none, or its brace is never closed."""
    openings = list(_BOX.finditer(text))
    return braced(text, openings[-1].end(), len(text)) if openings else None


def last_boxes(text: str) -> str | None:
    r"""Returns the contents of the last `\boxed{}` and of the boxes that "and" joins to it, with commas between.

    `\boxed{1} and \boxed{2}` gives "1,2". Boxes before these two may be joined by a comma. Without an "and", the last
    box is a new answer: `\boxed{1}, no: \boxed{2}` gives "2". None as for `last_boxed`.
    """
    openings = list(_BOX.finditer(text))
    if not openings:
        return None
    boxes = [braced(text, openings[-1].end(), len(text))]
    start = openings[-1].start()
    for opening in reversed(openings[:-1]):
        inside = braced(text, opening.end(), start)
        between = "" if inside is None else text[opening.end() + len(inside) + 1 : start]
        joint = between.translate(_NO_DELIMITERS).strip()
        if inside is None or not (_AND.fullmatch(joint) or (joint == "," and len(boxes) > 1)):
            break
        boxes.append(inside)
        start = opening.start()
    return None if boxes[0] is None else ",".join(box for box in reversed(boxes) if box is not None)


def braced(text: str, start: int, stop: int) -> str | None:
    """Returns the text from `start`, just after an opening brace, to its closing brace before `stop`, or None."""
    depth = 1
    for end in range(start, stop):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def answer_line(text: str) -> str | None:
    """Returns the rest of the line after the last "Answer:", in upper or lower case; None if there is none."""
    return _last(_ANSWER_LINE, text)


def stated(text: str) -> str | None:
    r"""Returns the answer of a text in any form: the last `<answer>` block, else box, `####`, "Answer:" or number."""
    readings = (last_block, last_boxes, after_hashes, answer_line, last_number)
    return next((answer for read in readings if (answer := read(text)) is not None), None)


def canonical(answer: str) -> str:
    """Returns a form that is equal for answers that are the same number or have the same Minerva form.

    Unlike Minerva's form it keeps the commas of a list: "1,2" is not "12".
    """
    form = _minerva_text(answer).strip()
    value = number(answer)
    value = number(form) if value is None else value
    if value is None:
        return form
    if value == 0:  # and -0
        return "0"
    digits = f"{value:f}"  # all digits; arithmetic would round to 28
    return digits.rstrip("0").rstrip(".") if "." in digits else digits


def last_code(text: str) -> str | None:
    """Returns the content of the last fenced block of Python code (```python or ```py); None if there is none."""
    return _last(_CODE, text)


def number(text: str) -> decimal.Decimal | None:
    """Parses a number such as 1,234, €5.00 or 27., also with a typographic minus; None if it is not a number."""
    plain = text.strip().replace("\\$", "").translate(_PLAIN)
    match = _NUMBER.fullmatch(plain.strip())
    return decimal.Decimal(match[1] + match[2].replace(",", "")) if match else None


def same(answer: str | None, expected: str) -> float:
    """Returns 1.0 if two answers agree, else 0.0.

    Numbers are compared by value ("$1,234.00" equals "1234"), anything else as stripped text. An answer
    that was not found (None) agrees with nothing.
    """
    if answer is None:
        return 0.0
    numbers = number(answer), number(expected)
    if None not in numbers:
        return float(numbers[0] == numbers[1])
    return float(answer.strip() == expected.strip())


# Replaced in this order. Articles are matched with the space after them, so "a b" loses its "a ".
_REWRITTEN = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
_REMOVED_WORDS = (
    "square ways integers dollars mph inches hours km units \\ldots sue points feet minutes digits "
    "cents degrees cm gm pounds meters meals edges students childrentickets multiples"
).split()
_REMOVED_TEX = (
    *("\\text{s}", "\\text{.}", "\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *("\\text{}", "\\mathrm{th}", "^\\circ", "^{\\circ}", "\\;", ",\\!", "{,}", '"', "\\dots"),
)


def minerva_form(answer: str) -> str:
    r"""Returns a final answer in the normal form that Minerva's evaluation compares as text.

    This is the text after the last `=`, without units and spaces and without the `$`, `\text` or `\boxed` around it,
    with braces in `\frac12` and `\sqrt2`, and without commas in whole numbers.

    Source: Lewkowycz et al. 2022 (arXiv:2206.14858), appendix D; DAPO scores with it.
    """
    form = _minerva_text(answer)
    without_commas = form.replace(",", "")
    return (without_commas if without_commas.isdigit() else form).strip()


def _minerva_text(answer: str) -> str:
    """Returns Minerva's form before the commas of an answer of digits and commas are removed."""
    answer = answer.rpartition("=")[2]
    removed = dict.fromkeys((*_REMOVED_WORDS, *_REMOVED_TEX), "")
    for before, after in (*_REWRITTEN, *removed.items()):
        answer = answer.replace(before, after)
    answer = "\n".join(map(_between_dollars, answer.split("\n")))
    for command in ("text", "textbf", "overline"):
        # The brace is optional, so that each opening matches at once and the search takes linear time.
        opened = rf"\\{command}\{{([^}}\n]*)(\}}?)"
        answer = re.sub(opened, lambda match: match[1] if match[2] else match[0], answer)
    answer = re.sub(r"\\boxed\{(.*)", _without_last_brace, answer)
    answer = re.sub(r"frac([^{])(.)", r"frac{\1}{\2}", answer)
    answer = re.sub(r"sqrt([^{])", r"sqrt{\1}", answer)
    return answer.replace("$", "")


def _between_dollars(line: str) -> str:
    """Returns the part of a line from its first to its second dollar sign; the whole line if it has less than two."""
    parts = line.split("$", 2)
    return f"${parts[1]}$" if len(parts) == 3 else line


def _without_last_brace(boxed: re.Match) -> str:
    r"""Returns the rest of a line after `\boxed{` without its last closing brace; without one, the whole match."""
    before, brace, after = boxed[1].rpartition("}")
    return before + after if brace else boxed[0]
