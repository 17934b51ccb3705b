"""The stock tools and environments.

A tool is a function whose annotations and docstring say how it is called; an environment is a class whose methods
are tools. The policy reads these docstrings.
"""

import ast
import operator
from collections.abc import Callable

from qerl_jax.rewards import sandbox

_OPERATIONS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
# Maximum characters of a calculator's result.
_MOST_DIGITS = 100
# Maximum characters of a program's output, which is later also truncated by tokens.
_MOST_CHARACTERS = 4000


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers, +, -, *, /, // and % and parentheses, such as "(5-3)*12".

    Returns:
        The number.
    """
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
    if len(text) > _MOST_DIGITS:
        raise ValueError("the number is too long")
    return text


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(left), _value(right))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATIONS:
            return _OPERATIONS[type(sign)](_value(operand))
    raise ValueError("only numbers, + - * / // % and parentheses can be computed")


def python(code: str) -> str:
    """Runs a Python program in a sandbox without network or files, and gives what it prints.

    Args:
        code: The program; print what you want to see.

    Returns:
        Its output, or the error that ended it.
    """
    sandbox.require()
    outcome = sandbox.run(code, "", _LIMITS)
    if outcome.status == "timeout":
        return "The program took too long and was stopped."
    text = outcome.output if outcome.status == "ok" else outcome.output + outcome.errors
    if len(text) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        text = f"{text[:half]}\n...\n{text[-half:]}"
    return text.strip() or "(no output)"


_LIMITS = sandbox.Limits(seconds=4.0)


class GuessNumber:
    """A game of several turns: the policy guesses a number, and each guess is answered "higher" or "lower".

    The number is in the row's column `secret` (or `answer`). The reward falls with each guess beyond the number that
    bisection needs.
    """

    def __init__(self, high: int = 100, most_guesses: int = 8):
        self.high, self.most_guesses = high, most_guesses
        self.guesses, self.found, self._secret = 0, False, 0

    def reset(self, secret: int | None = None, answer: int | str | None = None, **_) -> str:
        """Begins a game."""
        number = int(secret if secret is not None else answer)
        if not 1 <= number <= self.high:
            raise ValueError(f"secret: got {number}; must be in 1 ... {self.high}")
        self.guesses, self.found, self._secret = 0, False, number
        return (
            f"I think of a whole number from 1 to {self.high}. Find it with as few guesses as you can; "
            f"you have {self.most_guesses}."
        )

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: The guess.

        Returns:
            "correct", "higher" where the number is higher than the guess, or "lower".
        """
        if self.found or self.guesses >= self.most_guesses:
            raise ValueError("the game is over")
        self.guesses += 1
        self.found = int(number) == self._secret
        if self.found:
            return "correct"
        return "higher" if self._secret > int(number) else "lower"

    def get_reward(self) -> float:
        """Returns 0 if the number was not found, 1 if within the guesses that bisection needs, and less for more."""
        if not self.found:
            return 0.0
        needed = max(1, (self.high).bit_length())
        spare = max(1, self.most_guesses - needed + 1)
        return 1.0 - 0.5 * max(0, self.guesses - needed) / spare


TOOLS: dict[str, Callable] = {"calculator": calculator, "python": python}
ENVIRONMENTS: dict[str, Callable] = {"guess_number": GuessNumber}
