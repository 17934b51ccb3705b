r"""Normalizes answers in LaTeX before math-verify parses them.

math-verify reads `12\,345` as 12 + 345, `1 2` as 3 and `1011_2` as 1011, and removes the t of `\frac{8}{3}t` as a
unit. `latex_form` rewrites what would be misread and leaves the rest as it is. It never joins numbers that a comma
separates: `1,2` does not become 12.
"""

import re

from qerl_jax.data import answers

# Longest answer in characters: the patterns below take quadratic time in the worst case. The longest reference answer
# of MATH has 159 characters.
LONGEST = 1000
_SPACED_ARGUMENT = re.compile(
    r"(\\(?:boxed|fbox|mbox|text[a-z]*|math[a-z]+|[dtc]?frac|sqrt))\s+(?=\{)"
)
_ROW_SKIP = re.compile(r"\\\\\[\s*-?[0-9.]+\s*(?:pt|em|ex|mu|cm|mm|in)\s*\]")
_DEGREES = re.compile(
    r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\(?:text)?degree(?![A-Za-z])|°"
)
# Thousands separators: spaces of TeX and of Unicode, {,}, and a comma before a negative space, as in 1,\!234.
_SPACE = r"(?:\\[,;: ]|~|[ \u00a0\u2009\u202f]|\{,\}|,?\\!)"
_THOUSANDS = re.compile(rf"(?<![0-9.,^_])[1-9][0-9]{{0,2}}(?:{_SPACE}[0-9]{{3}})+(?![0-9])")
_SEPARATOR = re.compile(_SPACE)
_MIXED = re.compile(r"(?<![0-9.])([0-9]+)(?:\s|\\[,;: ]|~)+([0-9]+)/([0-9]+)(?![0-9.])")
# Numbers with a space between, but not after an exponent, as in 2^3 3^2, nor the arguments of \frac 1 2.
_APART = re.compile(
    r"(?<![0-9.^_])(?<!frac)(?<!frac\s)(?<!binom)(?<!binom\s)([0-9][0-9.]*)(?:\s|\\[,;: ]|~)+(?=[0-9])"
)
_SYMBOLS = answers.ASCII | {0x221E: r"\infty ", 0xB7: r"\cdot ", 0x2205: r"\emptyset "}
_CURRENCY = re.compile(
    rf"\\text\{{\s*[{answers.CURRENCY}]\s*\}}|\\?[{answers.CURRENCY}]"
    r"|\\(?:euro|pounds|yen|text(?:euro|sterling|yen|dollar))(?![A-Za-z])"
)
_NOTHING = re.compile(r"\\varnothing(?![A-Za-z])")
# 0.1\overline{6}, also with \bar and \dot.
_REPEATING = re.compile(
    r"(?<![0-9.])([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*(?:\{\s*([0-9]+)\s*\}|([0-9]))(?![0-9.])"
)
# 1.5e3, but not the number 1E5_{16}.
_POWER_OF_TEN = re.compile(
    r"(?<![0-9A-Za-z._\\])([0-9]+\.?[0-9]*)[eE]([-+]?[0-9]+)(?!\s*[0-9A-Za-z._])"
)
_LAST_DOT = re.compile(r"(?<!\.)\.(?=\s*$)|(?<!\.)\.(?=\s*\}\s*$)")
_LAST_SPACE = re.compile(r"(?:(?<!\\)\\[,;:! ]?|~)\s*$")
_CONJUNCTION = re.compile(r",?\s*\\(?:text|mbox|mathrm)\{\s*,?\s*(?:and|or)\s*\}")
_IMAGINARY = re.compile(
    r"\\(?:mathrm|mathit|mathbf|text)\{i\}|\\imath(?![A-Za-z])"
    # i alone, after one letter (bi), or before one (ix); but pi is the constant.
    r"|(?<![A-Za-z\\])i(?![A-Za-z])|(?<=(?<![A-Za-z\\])[A-Za-oq-z])i(?![A-Za-z])"
    r"|(?<![A-Za-z\\])i(?=[A-Za-z](?![A-Za-z]))"
)
_INDEX_I = re.compile(r"_\s*\{?\s*i(?![A-Za-z])")
_BASE_WORDS = (
    "two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
).split()
_BASES = {word: str(base) for base, word in enumerate(_BASE_WORDS, start=2)}
# Matches 1011_2, (1011)_{2}, 1011_{\text{base two}} and 1011_{(2)}. `_BASE_IN_TEXT` first turns 1011\text{ (base 2)}
# into such a form.
_BASED = re.compile(
    r"(?<![0-9A-Za-z_^.,\\}])\(?([0-9]+|[0-9A-F]*[0-9][0-9A-F]*)\)?\s*_\s*"
    r"(?:\{[\s(]*(?:\\(?:text|mathrm)\{)?[\s(]*(?:base\s*\}?\s*)?([0-9]{1,2}|[a-z]+)[\s)}]*\}|([0-9]))"
)
_BASE_IN_TEXT = re.compile(
    r"(?<=[0-9A-F)])\s*(?:\\[,;: ]\s*)?\(?\s*\\(?:text|mathrm)\{[\s(]*(?:in\s+)?base[\s-]*"
    r"(?:([0-9]{1,2}|[a-z]+)[\s)]*\}|\}\s*([0-9]{1,2}))\s*\)?"
)
# Words after a number that do not change it. Single letters are variables: 5t does not mean 5 tonnes.
_UNITS = (
    "mm cm dm km kg mg ml mL lb lbs oz ft yd mi mph kph kmh sq cu hr hrs min mins sec secs deg "
    "inch inches foot feet yard mile meter metre centimeter centimetre kilometer kilometre millimeter "
    "millimetre gram kilogram milligram ounce pound ton tonne liter litre milliliter gallon quart pint "
    "second minute hour day week month year degree radian dollar cent euro rupee square cubic unit "
    "point digit edge side integer number way time student people person child children man men woman "
    "women boy girl apple orange egg cookie marble coin tile toy book page card ticket meal piece slice "
    "cup bottle box bag item per"
).split()
_TEXT = r"\\(?:text[a-z]*|mbox|mathrm)"
_POWER = r"(?:\s*\^\s*(?:[0-9]|\{\s*-?[0-9]\s*\}))?"
# A run of spaces is tried only from its first space. Tried from every one, an answer of spaces took six seconds.
_UNIT_IN_TEXT = re.compile(
    rf"(?<![\s~/])[\s~/]*(?:\\[,;:! ]\s*)*{_TEXT}\{{([^{{}}]*)\}}{_POWER}\s*$"
)
_UNIT_WORD = re.compile(
    rf"(?<=[0-9)}}\s])[\s/]*(?:\\[,;:! ]\s*)*\b(?:{'|'.join(_UNITS)})(?:s|es)?\.?{_POWER}\s*$"
)
# Text that is not a unit: number words, bases and conjunctions belong to the answer.
_NO_UNIT = re.compile(
    r"\b(?:hundred|thousand|million|billion|trillion|dozen|base|mod|and|or|if|for|where)\b"
    # A single letter is a variable or a choice, unless it is the symbol of a unit.
    r"|^\s*(?![mgshlLJNWVKCF]\b)[A-Za-z]\s*$"
)
_ENDS_A_VALUE = re.compile(r"[0-9A-Za-z)}\]!%]$")


def latex_form(answer: str) -> str:
    r"""Rewrites an answer so that math-verify reads it as it is meant.

    It removes the space between a command and its brace (`\text {cm}`), the extra height of rows (`\\[2pt]`), degree
    signs, units after a value, signs of currencies, and a final full stop. It joins thousands (`12\,345` becomes
    12345), and makes a list of other numbers with a space between. The imaginary unit becomes `I`, `0.\overline{3}` a
    fraction, and 1.5e3 a product. A number in a base other than ten becomes a symbol of its digits and base.

    Args:
        answer: Content of a box or an `<answer>` block, or a reference answer; dollar signs are removed.

    Returns:
        The rewritten answer; "" if it has more than `LONGEST` characters besides the space around it, and so cannot be
        a final answer.
    """
    answer = answer.strip()
    if len(answer) > LONGEST:
        return ""
    form = _CURRENCY.sub("", answer).translate(_SYMBOLS).strip()
    form = _NOTHING.sub(r"\\emptyset", form)
    form = _REPEATING.sub(_fraction, form)
    form = _SPACED_ARGUMENT.sub(r"\1", form)
    form = _ROW_SKIP.sub(r"\\\\", form)
    form = _DEGREES.sub("", form)
    form = _CONJUNCTION.sub(", ", form)
    form = _MIXED.sub(r"\1\\frac{\2}{\3}", form)
    form = _THOUSANDS.sub(lambda number: _SEPARATOR.sub("", number[0]), form)
    form = _APART.sub(r"\1,", form)
    form = _BASE_IN_TEXT.sub(lambda base: f"_{{{base[1] or base[2]}}}", form)
    form = _POWER_OF_TEN.sub(r"\1 \\cdot 10^{\2}", form)
    form = _without_units(form)
    if not _INDEX_I.search(form):
        form = _IMAGINARY.sub(_imaginary_unit, form)
    return _BASED.sub(_numeral, form).strip()


def _without_units(form: str) -> str:
    """Removes the units, unit words and full stop after the value of an answer."""
    while True:
        shorter = _LAST_SPACE.sub("", _LAST_DOT.sub("", form).rstrip())
        unit = _UNIT_IN_TEXT.search(shorter)
        if unit is None or _NO_UNIT.search(unit[1]):
            unit = _UNIT_WORD.search(shorter)
        if unit is not None and _ENDS_A_VALUE.search(shorter[: unit.start()].rstrip()):
            shorter = shorter[: unit.start()].rstrip()
        if shorter == form:
            return form
        form = shorter


def in_radians(answer: str) -> str:
    """Returns an answer with its angles in radians; "" if it has none in degrees."""
    form = _DEGREES.sub(r" \\cdot \\frac{\\pi}{180}", answer)
    return "" if form == answer else form


def _fraction(match: re.Match) -> str:
    """Returns a repeating decimal as a fraction: (16 - 1) / 90 if 0.1 is followed by 6 again and again."""
    whole, fixed, repeated = match[1], match[2], match[3] or match[4]
    above = int(whole + fixed + repeated) - int("0" + whole + fixed)
    return rf"\frac{{{above}}}{{{'9' * len(repeated)}{'0' * len(fixed)}}}"


def _imaginary_unit(match: re.Match) -> str:
    """Returns I, in braces before an exponent: without them math-verify would drop the exponent."""
    return "{I}" if match.string[match.end() :].lstrip().startswith("^") else " I "


def _numeral(match: re.Match) -> str:
    r"""Returns a number with a base: plain digits in base ten, else a symbol that equals only the same number."""
    digits, base = match[1], match[2] or match[3]
    base = _BASES.get(base, base)
    letters = not digits.isdigit()
    if not base.isdigit() or not 2 <= int(base) <= 36 or (letters and int(base) <= 10):
        return match[0]
    plain = digits.lstrip("0") or "0"
    return plain if base == "10" else rf"\Omega_{{{plain}b{base}}}"
