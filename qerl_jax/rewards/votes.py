"""Groups answers that a judge finds mathematically equal, so that they count as the same vote in maj@k."""

import itertools
from collections.abc import Sequence

from qerl_jax.data import answers
from qerl_jax.system import process_pool


def mathematical(
    judges: process_pool.Pool, rows: Sequence[Sequence[str | None]]
) -> list[list[str | None]]:
    r"""Replaces mathematically equal answers to a problem by the same text.

    The judge compares two answers at a time, without the reference answer. Two numbers are compared without the
    judge. An answer that the judge cannot parse, or not in time, is compared as text.

    Args:
        judges: Processes that run `math_judge`'s functions.
        rows: [problems][N] answers as read from completions; None where there is none.

    Returns:
        [problems][N] votes: the canonical text of the first equal answer; None for None.
    """
    spellings = [_spellings(row) for row in rows]
    unread = [
        text for spelling in spellings for text in spelling.values() if answers.number(text) is None
    ]
    readable = dict(zip(unread, judges.map("is_readable", [(t,) for t in unread]), strict=True))
    pairs = [
        (problem, first, second)
        for problem, spelling in enumerate(spellings)
        for first, second in itertools.combinations(spelling, 2)
        if all(readable.get(spelling[name], True) is True for name in (first, second))
        and any(spelling[name] in readable for name in (first, second))
    ]
    calls = [(spellings[problem][a], spellings[problem][b]) for problem, a, b in pairs]
    verdicts = judges.map("same_answer", calls)
    same = {pair for pair, verdict in zip(pairs, verdicts, strict=True) if verdict is True}
    votes = [_leaders(list(spelling), problem, same) for problem, spelling in enumerate(spellings)]
    return [
        [None if text is None else leader[answers.canonical(text)] for text in row]
        for row, leader in zip(rows, votes, strict=True)
    ]


def _spellings(row: Sequence[str | None]) -> dict[str, str]:
    """Returns the first spelling of each answer, by its canonical text, in the order given."""
    spellings: dict[str, str] = {}
    for text in row:
        if text is not None:
            spellings.setdefault(answers.canonical(text), text)
    return spellings


def _leaders(names: Sequence[str], problem: int, same: set[tuple[int, str, str]]) -> dict[str, str]:
    """Maps each name to the first earlier name that leads a group and equals it, else to itself."""
    leaders: dict[str, str] = {}
    for name in names:
        leading = dict.fromkeys(leaders.values())
        leaders[name] = next(
            (leader for leader in leading if (problem, leader, name) in same), name
        )
    return leaders
