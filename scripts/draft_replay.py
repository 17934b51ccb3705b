"""Replays recorded completions as if drafts had been verified: which drafted tokens would have been sampled.

A draw is a function of (key, position). A verifying call draws each drafted position with that position's own noise, so a
draft is accepted up to its first token that differs from what was recorded; the draw there is the next
token. So a call emits the accepted tokens and one more, and completions are those that were recorded.

All rows that are live make a call together. What a row has emitted in earlier calls, and no more, is there for drafts
of others. Sources of drafts:

    prompt    the row's own prompt
    own       what the row itself has said
    siblings  what the other completions of its group have said so far
    batch     what all rows of the step have said so far, itself included
    earlier   completions of the same problem in earlier steps
    history   completions of all problems in some steps before
    together  all of these; the draft from which most tokens are expected wins
    ended     the other completions of its group, as if all of them had ended before: a bound for what an order
              of rows can make of siblings, and no part of "together"

Drafts from the rest of the group are Seer's idea (arXiv 2511.14617), from earlier epochs SPEC-RL's (arXiv 2509.23232) and
DAS's (arXiv 2511.13841), from past text in general SuffixDecoding's (arXiv 2411.04975), whose rule for the
length is `ByMatch`.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from scripts.recorded_completions import Row
from scripts.suffix_automaton import Draft, SuffixAutomaton

SOURCES = ("prompt", "own", "siblings", "batch", "earlier", "history")
BOUND = "ended"
LONGEST_DRAFT = 8
# Stands before the first token of a completion, so that a first token can be drafted, too.
START = -1
# A longer match would not tell more.
_CONTEXT = 32


@dataclasses.dataclass(frozen=True)
class Past:
    """What was known before a step.

    Attributes:
        prompts: For each group of the step, its prompt.
        earlier: For each group, what was said to its problem before.
        history: What was said to all problems before.
    """

    prompts: list[SuffixAutomaton]
    earlier: list[SuffixAutomaton]
    history: SuffixAutomaton

    def of_group(self, number: int) -> Past:
        """What one of the groups knew."""
        return Past([self.prompts[number]], [self.earlier[number]], self.history)


def past(
    steps: dict[int, list[list[Row]]], step: int, groups: Sequence[Sequence[Row]], recent: int
) -> Past:
    """What groups of a step could know of steps before; `history` goes back by `recent` recorded steps."""
    before = [number for number in sorted(steps) if number < step]
    problems = {group[0].prompt: SuffixAutomaton() for group in groups}
    history = SuffixAutomaton()
    for number in before:
        for row in (row for group in steps[number] for row in group):
            if row.prompt in problems:
                problems[row.prompt].add((START, *row.completion))
            if number in before[-recent:]:
                history.add((START, *row.completion))
    prompts = [SuffixAutomaton() for _ in groups]
    for automaton, group in zip(prompts, groups, strict=True):
        automaton.add(group[0].prompt)
    return Past(prompts, [problems[group[0].prompt] for group in groups], history)


class Source:
    """Automata from which rows read drafts, and which grow by what rows emit."""

    def __init__(
        self,
        automata: Sequence[SuffixAutomaton],
        reads: Sequence[int],
        feeds: Sequence[Sequence[int]] | None = None,
    ):
        """Begins a replay.

        Args:
            automata: The automata.
            reads: For each row, the number of the automaton that it reads.
            feeds: For each row, the numbers of those that it feeds; absent means none.
        """
        self._automata, self._reads = automata, reads
        self._ends = [
            {number: automata[number].add([START]) for number in row} for row in feeds or []
        ]

    def draft(self, row: int, context: Sequence[int]) -> Draft:
        """A draft for a row."""
        return self._automata[self._reads[row]].draft(context, LONGEST_DRAFT)

    def emit(self, row: int, tokens: Sequence[int]) -> None:
        """Takes what a row has emitted."""
        for number, end in self._ends[row].items() if self._ends else ():
            self._ends[row][number] = self._automata[number].add(tokens, end)


def source(name: str, groups: Sequence[Sequence[Row]], known: Past) -> Source:
    """The source of that name for the rows of the groups, in order."""
    group_of = [number for number, group in enumerate(groups) for _ in group]
    rows = range(len(group_of))
    match name:
        case "prompt":
            return Source(known.prompts, group_of)
        case "earlier":
            return Source(known.earlier, group_of)
        case "history":
            return Source([known.history], [0 for _ in rows])
        case "batch":
            return Source([SuffixAutomaton()], [0 for _ in rows], [[0] for _ in rows])
        case "own":
            return Source([SuffixAutomaton() for _ in rows], rows, [[row] for row in rows])
        case "siblings":
            # One for each row, which all others of its group feed.
            others = [[b for b in rows if group_of[b] == group_of[a] and b != a] for a in rows]
            return Source([SuffixAutomaton() for _ in rows], rows, others)
        case "ended":
            automata = [SuffixAutomaton() for _ in rows]
            every = [row.completion for group in groups for row in group]
            for a in rows:
                for b in rows:
                    if group_of[b] == group_of[a] and b != a:
                        automata[a].add((START, *every[b]))
            return Source(automata, rows)
    raise ValueError(f"source: got {name!r}; must be one of {', '.join((*SOURCES, BOUND))}")


class Acceptance:
    """How likely a drafted token is accepted, where those before it are: learned from what rows emit.

    Tokens are counted by source, by how much of what precedes them was matched, and by their share among what followed.
    The share is the guess where nothing was counted. A draft need not have been verified: it is compared
    with what was emitted, as far as that goes.
    """

    def __init__(self):
        self._tried: collections.Counter = collections.Counter()
        self._accepted: collections.Counter = collections.Counter()

    def chances(self, name: str, draft: Draft) -> np.ndarray:
        """For each token of a draft, the chance that it and all before it are accepted."""
        return np.cumprod(
            [
                (self._accepted[kind] + 2 * share) / (self._tried[kind] + 2)
                for kind, share in zip(self._kinds(name, draft), draft.shares, strict=True)
            ]
        )

    def learn(self, name: str, draft: Draft, emitted: Sequence[int]) -> None:
        """Compares a draft with what was emitted instead, up to the first token that differs."""
        for kind, token, said in zip(self._kinds(name, draft), draft.tokens, emitted, strict=False):
            self._tried[kind] += 1
            self._accepted[kind] += token == said
            if token != said:
                return

    def _kinds(self, name: str, draft: Draft) -> list[tuple[str, int, int]]:
        return [
            (name, min(draft.match + place, _CONTEXT).bit_length(), int(8 * share))
            for place, share in enumerate(draft.shares)
        ]


class Policy(Protocol):
    """How many tokens of each row's draft are verified in a call."""

    def __call__(self, drafts: Sequence[Draft], chances: Sequence[np.ndarray]) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Fixed:
    """So many tokens, or as many as there are."""

    most: int

    def __call__(self, drafts, chances):
        return [min(self.most, len(draft.tokens)) for draft in drafts]


@dataclasses.dataclass(frozen=True)
class ByMatch:
    """No more tokens than the context shares with where the draft comes from (SuffixDecoding's rule)."""

    def __call__(self, drafts, chances):
        return [min(draft.match, len(draft.tokens)) for draft in drafts]


@dataclasses.dataclass(frozen=True)
class Controller:
    """As many tokens over all rows as give most tokens for the time of the call, perhaps none.

    Attributes:
        time: Of a call by its number of positions over all rows: takes an array, whose first entry is the call without
            drafts.
        rows: Rows of the batch that this replay stands for, however many are live in it; absent means those.
    """

    time: Callable[[np.ndarray], np.ndarray]
    rows: int | None = None

    def __call__(self, drafts, chances):
        live = len(drafts)
        scale = 1 if self.rows is None else self.rows / live
        # The likeliest first. A row's chances fall along its draft, so what is taken of it is its beginning.
        every = np.concatenate(chances)
        row = np.repeat(np.arange(live), [len(each) for each in chances])
        order = np.argsort(-every, kind="stable")
        emitted = live + np.concatenate([[0], np.cumsum(every[order])])
        rate = emitted / self.time(scale * (live + np.arange(len(order) + 1)))
        return np.bincount(row[order[: rate.argmax()]], minlength=live).tolist()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Every row in every call of a replay, as arrays of one length.

    Attributes:
        call: Number of the call.
        position: Tokens of the completion before the call.
        match: Length of the match of what was verified; 0 without a draft.
        drafted: Tokens that were verified.
        accepted: Tokens of them that were accepted.
        emitted: Tokens that the row got.
    """

    call: np.ndarray
    position: np.ndarray
    match: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray

    @property
    def live(self) -> np.ndarray:
        """Rows of each call."""
        return np.bincount(self.call)

    @property
    def positions(self) -> np.ndarray:
        """Positions of each call: one for each row, and those of drafts."""
        return self.live + np.bincount(self.call, self.drafted).astype(int)

    @property
    def tokens_per_call(self) -> float:
        """Tokens that a row gets from a call, in the mean."""
        return self.emitted.sum() / len(self.emitted)


def replay(
    groups: Sequence[Sequence[Row]],
    names: Sequence[str],
    known: Past,
    policy: Policy,
    acceptance: Acceptance | None = None,
) -> Outcome:
    """Walks over the recorded completions of some groups, all rows at a time.

    Args:
        groups: The groups of a step, or some of them.
        names: The sources of drafts; where there are several, each row takes the draft from which most tokens
            are expected.
        known: What was known before the step.
        policy: How much of the drafts is verified.
        acceptance: What was learned before about acceptance; it learns on. Absent means nothing.
    """
    acceptance = acceptance or Acceptance()
    rows = [row.completion for group in groups for row in group]
    sources = {name: source(name, groups, known) for name in names}
    at, seen, call = [0] * len(rows), [], 0
    while live := [row for row in range(len(rows)) if at[row] < len(rows[row])]:
        found = [_drafts(sources, row, rows[row][: at[row]]) for row in live]
        best = [_best(drafts, acceptance) for drafts in found]
        lengths = policy([draft for draft, _ in best], [chances for _, chances in best])
        said = []
        for row, drafts, (draft, _), drafted in zip(live, found, best, lengths, strict=True):
            rest = rows[row][at[row] :]
            accepted = _agreeing(draft.tokens[:drafted], rest)
            tokens = rest[: accepted + 1]
            for name, each in drafts.items():
                acceptance.learn(name, each, tokens)
            match = draft.match if drafted else 0
            seen.append((call, at[row], match, drafted, accepted, len(tokens)))
            said.append((row, tokens))
        for row, tokens in said:  # after all have drafted: they run at the same time
            at[row] += len(tokens)
            for each in sources.values():
                each.emit(row, tokens)
        call += 1
    return Outcome(*np.array(seen, int).reshape(-1, 6).T)


def _drafts(sources: dict[str, Source], row: int, completion: Sequence[int]) -> dict[str, Draft]:
    """The draft of each source."""
    context = (START, *completion)[-_CONTEXT:]
    return {name: each.draft(row, context) for name, each in sources.items()}


def _best(drafts: dict[str, Draft], acceptance: Acceptance) -> tuple[Draft, np.ndarray]:
    """The draft from which most tokens are expected, and the chances of its tokens."""
    chances = {name: acceptance.chances(name, draft) for name, draft in drafts.items()}
    name = max(chances, key=lambda name: chances[name].sum())
    return drafts[name], chances[name]


def _agreeing(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """How many tokens of a draft come true before the first that does not."""
    pairs = enumerate(zip(draft, tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(draft), len(tokens)))
