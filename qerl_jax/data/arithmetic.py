"""Procedural arithmetic: any number of problems, their worked answers, and plausible wrong ones.

One problem in ten belongs to the test split, by a hash of its numbers alone, and is never part of training, however it
is worded. `one_step` is for models that cannot yet do several steps; the project's own study uses `mixed`.
"""

import dataclasses
import itertools
import random
import zlib
from collections.abc import Callable, Sequence
from typing import Literal

type Numbers = tuple[int, tuple[tuple[str, int], ...]]  # start and operations (sign, operand)
type Fault = Literal["blurt", "slip", "short", "untagged"]

# Largest value that is multiplied, so that products stay below 100: a tiny model learns two-digit arithmetic.
_LARGEST_FACTOR = 33
_TIMES = {2: "doubles", 3: "triples"}
_VERBS = {
    "+": ("finds {} more", "buys {} more", "gets {} more", "wins {} more"),
    "-": ("sells {}", "loses {}", "gives away {}", "breaks {}"),
    "*": ("{} the pile", "{} the lot", "{} the total"),
}
_SIGNS = {"+": "plus", "-": "minus", "*": "times"}
_ORDERS = {"+": "add {}", "-": "take away {}", "*": "multiply by {}"}
_SMALL = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_NAMES = ("Tom", "Mia", "Ben", "Ana", "Leo", "Zoe", "Sam", "Eva", "Max", "Ida")
_ITEMS = (
    "marbles", "apples", "coins", "stamps", "cards", "shells", "pencils", "books", "eggs", "beads",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ArithmeticProblem:
    """A question, the number it starts from, and the operations (sign, operand) applied in turn."""

    question: str
    start: int
    operations: tuple[tuple[str, int], ...]

    @property
    def values(self) -> tuple[int, ...]:
        """The start, then the result of each operation; the last one is the answer."""
        return tuple(itertools.accumulate(self.operations, _apply, initial=self.start))

    @property
    def answer(self) -> int:
        """The number that the question asks for."""
        return self.values[-1]


def problem(split: str, seed: int, index: int) -> ArithmeticProblem:
    """Makes problem number `index` of a split. It depends only on the arguments, on every platform.

    Two or three operations follow a start in 5..60. Operands of + and - are in 2..40, only values up to 33 are doubled
    or tripled, and no value is below 1. Three in four are word problems, the others expressions.

    Args:
        split: "train", or "test" for the tenth of all problems that training never uses.
        seed: Selects one of endless sequences of problems.
        index: Index in that sequence, from 0.

    Raises:
        ValueError: If the split is another one.
    """
    rng, start, operations = _draw(split, f"{split} {seed} {index}", _several_steps)
    is_story = rng.random() < 0.75
    text = _word_problem(rng, start, operations) if is_story else _expression(start, operations)
    return ArithmeticProblem(text, start, operations)


def one_step(split: str, seed: int, index: int) -> ArithmeticProblem:
    """Makes problem number `index` of the easier kind, "What is 7 + 5?". It depends only on the arguments.

    The problem is the sum or the difference of a number up to 20 and one up to 9, or the product of two numbers up to
    9. The three are equally likely before problems with a result below 1 are sampled again, so differences are a bit
    rarer. There are 396 problems (7 + 5 and 5 + 7 count as two), of which about a tenth is held out. Arguments and
    errors are those of `problem`.
    """
    _, start, operations = _draw(split, f"one-step {split} {seed} {index}", _single_step)
    ((sign, operand),) = operations
    return ArithmeticProblem(f"What is {start} {sign} {operand}?", start, operations)


def mixed(split: str, seed: int, index: int) -> ArithmeticProblem:
    """Makes problem number `index` of a mixture from one-digit sums to three steps.

    Of every 20 consecutive problems, 3 are sums or differences of one-digit numbers, 2 are products of a number up to
    12 and one up to 9, 6 are sums or differences of two-digit numbers, and 9 have the numbers of `problem`. A third
    is written in digits ("What is 34+57?"), a third in words ("What is thirty-four plus fifty-seven?"), and a third
    as a story. Those products are only in digits or words. No result is below 1.

    There are only 117 and 88 problems of the first two kinds, so a large sample repeats them. A tenth of all is held
    out of training, by the numbers, however they are worded. Arguments and errors are those of `problem`.
    """
    kind = _MIXED[index % len(_MIXED)]
    rng, start, operations = _draw(split, f"mixed {split} {seed} {index}", kind)
    forms = (_expression, _spoken) if kind is _times_table else (_expression, _spoken, None)
    told = _pick(rng, forms)
    text = told(start, operations) if told else _word_problem(rng, start, operations)
    return ArithmeticProblem(text, start, operations)


def product(split: str, seed: int, index: int) -> ArithmeticProblem:
    """Makes problem number `index` that asks for a product of two numbers from 11 to 99, "What is 37*46?".

    A tiny model cannot compute them without a tool. Arguments and errors are those of `problem`.
    """
    _, start, operations = _draw(split, f"product {split} {seed} {index}", _factors)
    ((_, operand),) = operations
    return ArithmeticProblem(f"What is {start}*{operand}?", start, operations)


def secret(split: str, seed: int, index: int) -> ArithmeticProblem:
    """Makes problem number `index` of a guessing game: its answer, from 1 to 100, is not in the question.

    Arguments and errors are those of `problem`.
    """
    _, number, _ = _draw(split, f"secret {split} {seed} {index}", _number)
    return ArithmeticProblem("Play a game with me. ", number, ())


def is_held_out(start: int, operations: Sequence[tuple[str, int]]) -> bool:
    """Whether a problem belongs to the test split: whether the CRC-32 of its numbers as text is divisible by 10."""
    text = str(start) + "".join(f"{sign}{operand}" for sign, operand in operations)
    return zlib.crc32(text.encode()) % 10 == 0


def worked_answer(problem: ArithmeticProblem) -> str:
    """Returns the right answer in tags: "<think>55+8=63\\n63-3=60</think><answer>60</answer>"."""
    return _answer(problem.operations, problem.values)


def plain_answer(problem: ArithmeticProblem) -> str:
    """Returns the right answer without tags: one line of work per operation, then a sentence with the result."""
    return f"{_lines(problem.operations, problem.values)}\nThe answer is {problem.answer}."


def faulty_answer(problem: ArithmeticProblem, kind: Fault, rng: random.Random) -> str:
    """Returns an answer with one fault, to train a base model on faults that RL can then remove.

    Args:
        problem: The problem that is answered.
        kind: "blurt" gives the right number without any work, which a tiny model cannot do
            reliably; "slip" gets one operation wrong and continues from there; "short" omits the
            last operation; "untagged" works it out but omits the answer tags.
        rng: Chooses where and by how much a slip errs; the other kinds do not use it.

    Raises:
        ValueError: If the kind is another one.
    """
    match kind:
        case "blurt":
            return f"<think>Easy.</think><answer>{problem.answer}</answer>"
        case "slip":
            return _answer(problem.operations, _values_with_slip(problem, rng))
        case "short":
            return _answer(problem.operations[:-1], problem.values[:-1])
        case "untagged":
            return f"<think>{_lines(problem.operations, problem.values)}</think>{problem.answer}"
    raise ValueError(f"kind must be 'blurt', 'slip', 'short' or 'untagged'; got {kind=}")


def _draw(
    split: str, key: str, numbers: Callable[[random.Random], Numbers]
) -> tuple[random.Random, int, tuple[tuple[str, int], ...]]:
    """Returns a generator in its new state, and its first problem that is in the split and has no value below 1."""
    if split not in ("train", "test"):
        raise ValueError(f"arithmetic has the splits 'train' and 'test'; got {split=}")
    # Only a seed that is a text (hashed by SHA-512) and the method `random()` are guaranteed to give
    # the same numbers in every version of Python.
    rng = random.Random(key)
    while True:
        start, operations = numbers(rng)
        least = min(itertools.accumulate(operations, _apply, initial=start))
        if least >= 1 and is_held_out(start, operations) == (split == "test"):
            return rng, start, operations


def _pick[T](rng: random.Random, options: Sequence[T]) -> T:
    return options[int(rng.random() * len(options))]


def _apply(value: int, operation: tuple[str, int]) -> int:
    sign, operand = operation
    return {"+": value + operand, "-": value - operand, "*": value * operand}[sign]


def _single_step(rng: random.Random) -> Numbers:
    sign = _pick(rng, "+-*")
    start, operand = _pick(rng, range(1, 10 if sign == "*" else 21)), _pick(rng, range(1, 10))
    return start, ((sign, operand),)


def _sum_of(least: int, most: int) -> Callable[[random.Random], Numbers]:
    """Samples sums and differences of two numbers from `least` to `most`."""

    def draw(rng: random.Random) -> Numbers:
        start, operand = (_pick(rng, range(least, most + 1)) for _ in range(2))
        return start, ((_pick(rng, "+-"), operand),)

    return draw


def _times_table(rng: random.Random) -> Numbers:
    return _pick(rng, range(2, 13)), (("*", _pick(rng, range(2, 10))),)


def _factors(rng: random.Random) -> Numbers:
    start, operand = (_pick(rng, range(11, 100)) for _ in range(2))
    return start, (("*", operand),)


def _number(rng: random.Random) -> Numbers:
    return _pick(rng, range(1, 101)), ()


def _several_steps(rng: random.Random) -> Numbers:
    start = value = _pick(rng, range(5, 61))
    operations = []
    for _ in range(_pick(rng, (2, 3))):
        operands = {
            "+": range(2, 41),
            "-": range(2, min(40, value - 1) + 1),
            "*": tuple(_TIMES) if value <= _LARGEST_FACTOR else (),
        }
        sign = _pick(rng, [sign for sign, possible in operands.items() if possible])
        operations.append((sign, _pick(rng, operands[sign])))
        value = _apply(value, operations[-1])
    return start, tuple(operations)


def _word_problem(rng: random.Random, start: int, operations: Sequence[tuple[str, int]]) -> str:
    name, items = _pick(rng, _NAMES), _pick(rng, _ITEMS)
    deeds = [
        _pick(rng, _VERBS[sign]).format(_TIMES[operand] if sign == "*" else operand)
        for sign, operand in operations
    ]
    story = " and ".join(filter(None, (", ".join(deeds[:-1]), deeds[-1])))
    return f"{name} has {start} {items}. {name} {story}. How many {items} does {name} have now?"


def _expression(start: int, operations: Sequence[tuple[str, int]]) -> str:
    text, is_sum = str(start), False
    for sign, operand in operations:
        text = f"({text})" if is_sum and sign == "*" else text
        text, is_sum = f"{text}{sign}{operand}", sign != "*"
    return f"What is {text}?"


def _spoken(start: int, operations: Sequence[tuple[str, int]]) -> str:
    """Returns the question in words, without digits."""
    if len(operations) == 1:
        ((sign, operand),) = operations
        return f"What is {in_words(start)} {_SIGNS[sign]} {in_words(operand)}?"
    orders = [_ORDERS[sign].format(in_words(operand)) for sign, operand in operations]
    return f"Start with {in_words(start)}, {', '.join(orders[:-1])} and {orders[-1]}. What is the result?"


def in_words(number: int) -> str:
    """Returns a number from 0 to 99 in English, such as "thirty-four"."""
    if number < 20:
        return _SMALL[number]
    tens, ones = divmod(number, 10)
    return f"{_TENS[tens]}-{_SMALL[ones]}" if ones else _TENS[tens]


_SMALL_SUM, _LARGE_SUM = _sum_of(1, 9), _sum_of(10, 99)
# The kinds of problems that `mixed` repeats in this order.
_MIXED = (
    _SMALL_SUM, _LARGE_SUM, _several_steps, _times_table, _LARGE_SUM, _several_steps, _several_steps,
    _SMALL_SUM, _LARGE_SUM, _several_steps, _several_steps, _LARGE_SUM, _several_steps,
    _times_table, _LARGE_SUM, _several_steps, _several_steps, _SMALL_SUM, _LARGE_SUM, _several_steps,
)  # fmt: skip


def _lines(operations: Sequence[tuple[str, int]], values: Sequence[int]) -> str:
    return "\n".join(
        f"{before}{sign}{operand}={after}"
        for (sign, operand), before, after in zip(operations, values, values[1:], strict=False)
    )


def _answer(operations: Sequence[tuple[str, int]], values: Sequence[int]) -> str:
    return f"<think>{_lines(operations, values)}</think><answer>{values[-1]}</answer>"


def _values_with_slip(problem: ArithmeticProblem, rng: random.Random) -> list[int]:
    """Returns the problem's values if one result is wrong by 1, 2 or 10 and later operations continue from it."""
    where = 1 + int(rng.random() * len(problem.operations))
    before, after = problem.values[:where], problem.operations[where:]
    candidates = [
        [*before, *itertools.accumulate(after, _apply, initial=problem.values[where] + error)]
        for error in (-10, -2, -1, 1, 2, 10)
    ]
    return _pick(rng, [values for values in candidates if min(values) >= 1])
