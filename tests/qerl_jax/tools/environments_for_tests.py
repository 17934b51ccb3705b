"""Tools and environments that tests import in other processes."""

import asyncio
import json
import os
import time

from qerl_jax.tools.stock_tools import calculator


def double(x: int) -> int:
    """Doubles.

    Args:
        x: A number.
    """
    return 2 * x


async def later(x: int) -> int:
    """Waits, and gives back.

    Args:
        x: A number.
    """
    return x


def halve(fails: bool) -> str:
    """Gives half a character back.

    Args:
        fails: Whether it raises it.
    """
    if fails:
        raise ValueError("\ud83d")
    return "\ud83d"


def hang() -> str:
    """Never ends."""
    while True:
        time.sleep(0.01)


class Counter:
    """Counts; its process can be hung and ended."""

    def __init__(self, step: int = 1):
        self.step, self.count, self._hidden, self.handle = step, 0, 1, object()

    def reset(self, start: int = 0, **row) -> str | None:
        """Begins."""
        if start < 0:
            raise ValueError("start must not be negative")
        self.count = start
        return f" From {start}." if start else None

    def add(self, times: int) -> int:
        """Counts on.

        Args:
            times: How often.
        """
        self.count += self.step * times
        return self.count

    def stall(self) -> str:
        """Never ends."""
        return hang()

    def die(self) -> None:
        """Ends the process."""
        os._exit(1)

    def get_reward(self) -> float:
        """The count."""
        return self.count

    def _own(self):
        raise AssertionError("no tool")


class WithoutReward:
    """Says nothing and judges nothing."""

    def reset(self, **row):
        """Begins."""

    async def wait(self) -> str:
        """Waits."""
        return "waited"


class Remote:
    """Keeps a connection between its calls."""

    async def reset(self, **row):
        """Connects."""
        self._connection = asyncio.create_task(asyncio.sleep(0.01, "connected"))

    async def ask(self) -> str:
        """Waits for the connection."""
        return await self._connection


class Listening(WithoutReward):
    """Says what it is told."""

    def reset(self, **row):
        """Begins."""
        return json.dumps(sorted(row))


class Asked:
    """Gives 1 to rows that call it."""

    def reset(self, **row):
        """Begins."""
        self.asked = 0

    def compute(self, expression: str) -> str:
        """Computes.

        Args:
            expression: Numbers and signs.
        """
        self.asked += 1
        return calculator(expression)

    def get_reward(self) -> float:
        """Whether it was called."""
        return float(self.asked > 0)


class AskedInTheFirst(Asked):
    """Gives 1 to rows that call it, if it runs where the first process of a run lets it run."""

    def get_reward(self) -> float:
        """Whether it was called, and there."""
        return super().get_reward() * (os.environ.get("JAX_PROCESS_ID", "0") == "0")


class Silent(WithoutReward):
    """Answers, and gives no reward."""

    def echo(self, text: str) -> str:
        """Says what is said.

        Args:
            text: Any.
        """
        return text
