r"""Extracts the answer from a completion, and compares answers as text and numbers.

The extracting functions look for one form each: `<answer>` tags, GSM8K's `####`, `\boxed{}`, or a line `Answer:`.
`same`, `canonical` and `minerva_form` are for comparison; `rewards.math_judge` compares by algebra. Everything here
takes time linear in the length of the text, because a model may repeat itself for thousands of tokens.
"""

import decimal
import re
from typing import Any

_BLOCK = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+"
_NUMBER = re.compile(rf"([-+]?)({_DIGITS})")
# A minus directly after an operand is a subtraction, not a sign.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}])([-+])\s?)?\$?({_DIGITS})")
_HASH = re.compile(r"####\s*([-+]?\$?[0-9.,]*[0-9])")
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_CODE = re.compile(r"```(?:python|py)[0-9]*[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)
_MINUS = "\N{MINUS SIGN}"
_BOX = re.compile(r"\\boxed\s*\{")
_AND = re.compile(r",?\s*(?:and|\\text\s*\{\s*and\s*\})")
_NO_DELIMITERS = str.maketrans("", "", "$")


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
    """Returns the number, as it is written, after the last `####` that has one (GSM8K's format); None if none has."""
    return _last(_HASH, text)


def last_number(text: str) -> str | None:
    """Returns the last number of the text, as it is written, with its sign and without a dollar sign, or None."""
    numbers = _NUMBER_IN_TEXT.findall(text.replace(_MINUS, "-"))
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
    """Parses a number such as 1,234, $5.00 or 27., also with a typographic minus; None if it is not a number."""
    plain = text.strip().replace("\\$", "").replace("$", "").replace(_MINUS, "-")
    match = _NUMBER.fullmatch(plain.strip())
    return decimal.Decimal(match[1] + match[2].replace(",", "")) if match else None


def same(answer: str | None, expected: Any) -> float | None:
    """Returns 1.0 if two answers agree, else 0.0; None if there is no expected answer.

    Numbers are compared by value ("$1,234.00" equals "1234"), anything else as stripped text. An answer
    that was not found (None) agrees with nothing.
    """
    if expected is None:
        return None
    if answer is None:
        return 0.0
    given_number, expected_number = number(answer), number(str(expected))
    if given_number is not None and expected_number is not None:
        return float(given_number == expected_number)
    return float(answer.strip() == str(expected).strip())


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
