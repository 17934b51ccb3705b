"""Replays recorded completions as if drafts had been verified: which drafted tokens would have been sampled.

A sampled token is a function of (key, position). A verifying call samples each drafted position with that position's
own noise. So a draft is accepted up to the first token that differs from the recording, and the call samples the next
token there. A call emits the accepted tokens and one more, and completions are exactly those that were recorded.

All live rows make a call together. Drafts for other rows may use what a row emitted in earlier calls, but nothing
later. Sources of drafts:

    prompt    the row's own prompt
    own       the row's own completion so far
    siblings  the other completions of its group so far
    batch     all completions of the step so far, its own included
    earlier   completions of the same problem in earlier steps
    history   completions of all problems in some steps before
    together  all of these; the draft with the most expected tokens is used
    ended     the other completions of its group as a whole: an upper bound for what an order of rows can gain from
              siblings, and no part of "together"
    engine    what qerl_jax.generation.draft_search finds in the same texts but `history`, and the same problem's
              completions of the last step only; no part of "together"

Drafts from the rest of the group are Seer's idea (arXiv 2511.14617), from earlier epochs SPEC-RL's (arXiv 2509.23232)
and DAS's (arXiv 2511.13841), from past text in general SuffixDecoding's (arXiv 2411.04975), whose rule for the length
is `ByMatch`.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from qerl_jax.generation.draft_search import LONGEST_MATCH, MOST
from scripts.recorded_completions import Row
from scripts.suffix_automaton import Draft, SuffixAutomaton

SOURCES = ("prompt", "own", "siblings", "batch", "earlier", "history")
BOUND, ENGINE = "ended", "engine"
LONGEST_DRAFT = 8
# Comes before the first token of a completion, so that a first token can be drafted too.
START = -1
# A longer match would not give better drafts.
_CONTEXT = 32


@dataclasses.dataclass(frozen=True)
class Past:
    """What was known before a step.

    Attributes:
        prompts: The prompt of each group of the step.
        earlier: For each group, earlier completions of its problem.
        history: Earlier completions of all problems.
        last: For each group, the completions of its problem when it was last sampled.
    """

    prompts: list[SuffixAutomaton]
    earlier: list[SuffixAutomaton]
    history: SuffixAutomaton
    last: list[list[tuple[int, ...]]]

    def of_group(self, number: int) -> Past:
        """What was known for one of the groups."""
        return Past(
            [self.prompts[number]], [self.earlier[number]], self.history, [self.last[number]]
        )


def past(
    steps: dict[int, list[list[Row]]], step: int, groups: Sequence[Sequence[Row]], recent: int
) -> Past:
    """Collects what was known before a step for its groups. `history` goes back by `recent` recorded steps."""
    before = [number for number in sorted(steps) if number < step]
    problems = {group[0].prompt: SuffixAutomaton() for group in groups}
    history, last = SuffixAutomaton(), {}
    for number in before:
        for group in steps[number]:
            last[group[0].prompt] = [row.completion for row in group]
        for row in (row for group in steps[number] for row in group):
            if row.prompt in problems:
                problems[row.prompt].add((START, *row.completion))
            if number in before[-recent:]:
                history.add((START, *row.completion))
    prompts = [SuffixAutomaton() for _ in groups]
    for automaton, group in zip(prompts, groups, strict=True):
        automaton.add(group[0].prompt)
    return Past(
        prompts,
        [problems[group[0].prompt] for group in groups],
        history,
        [last.get(group[0].prompt, []) for group in groups],
    )


class Source:
    """Automata from which rows read drafts, and to which emitted tokens are added."""

    def __init__(
        self,
        automata: Sequence[SuffixAutomaton],
        reads: Sequence[int],
        feeds: Sequence[Sequence[int]] | None = None,
    ):
        """Starts a replay.

        Args:
            automata: The automata.
            reads: For each row, the number of the automaton that it reads.
            feeds: For each row, the numbers of the automata that get its tokens; absent means none.
        """
        self._automata, self._reads = automata, reads
        self._ends = [
            {number: automata[number].add([START]) for number in row} for row in feeds or []
        ]

    def draft(self, row: int, context: Sequence[int]) -> Draft:
        """Makes a draft for a row."""
        return self._automata[self._reads[row]].draft(context, LONGEST_DRAFT)

    def emit(self, row: int, tokens: Sequence[int]) -> None:
        """Adds the tokens that a row emitted."""
        for number, end in self._ends[row].items() if self._ends else ():
            self._ends[row][number] = self._automata[number].add(tokens, end)


class EngineSource:
    """Finds what `draft_search.search` finds: what followed the longest match of at most eight tokens.

    Of matches of one length, those in texts of the group that have ended come first, then those of rows of the group,
    then those of other rows; and of these the last one that was said.
    """

    def __init__(self, groups: Sequence[Sequence[Row]], known: Past):
        self._group_of = [number for number, group in enumerate(groups) for _ in group]
        self._completions = [row.completion for group in groups for row in group]
        self._prompts = [row.prompt for group in groups for row in group]
        self._left = [len(each) for each in self._completions]
        # The text and the place of the last match, by where it is and by its tokens.
        self._places: dict[tuple, tuple[list[int], int]] = {}
        self._texts: list[list[int]] = [[] for _ in self._group_of]
        for number, completions in enumerate(known.last):
            for completion in completions:
                self._add_ended(groups[number][0].prompt, completion, number)
        rows = (row for group in groups for row in group)
        for number, row in enumerate(rows):
            self._add(self._texts[number], row.prompt, self._scopes(number))

    def draft(self, row: int, context: Sequence[int]) -> Draft:
        """Makes a draft for a row; see `Source`."""
        last, group = self._texts[row][-LONGEST_MATCH:], self._group_of[row]
        scopes = (("ended", group), ("live", group), ("live", None))
        for begin, scope in itertools.product(range(len(last)), scopes):
            found = self._places.get((scope, tuple(last[begin:])))
            if found is not None:
                text, place = found
                tokens = text[place + 1 : place + 1 + MOST]
                return Draft(len(last) - begin, tokens, [0.5] * len(tokens))
        return Draft(0, [], [])

    def emit(self, row: int, tokens: Sequence[int]) -> None:
        """Adds the tokens that a row emitted."""
        self._add(self._texts[row], tokens, self._scopes(row))
        self._left[row] -= len(tokens)
        if not self._left[row]:
            self._add_ended(self._prompts[row], self._completions[row], self._group_of[row])

    def _add_ended(self, prompt: Sequence[int], completion: Sequence[int], group: int) -> None:
        self._add([], (*prompt[-LONGEST_MATCH:], *completion), [("ended", group)])

    def _scopes(self, row: int) -> list[tuple]:
        return [("live", self._group_of[row]), ("live", None)]

    def _add(self, text: list[int], tokens: Sequence[int], scopes: Sequence[tuple]) -> None:
        for token in tokens:
            # A place is a match only if a token follows it.
            place = len(text) - 1
            text.append(token)
            for size in range(1, min(LONGEST_MATCH, place + 1) + 1):
                match = tuple(text[place + 1 - size : place + 1])
                for scope in scopes:
                    self._places[scope, match] = text, place


def source(name: str, groups: Sequence[Sequence[Row]], known: Past) -> Source | EngineSource:
    """Makes the source of that name for the rows of the groups, in order."""
    group_of = [number for number, group in enumerate(groups) for _ in group]
    rows = range(len(group_of))
    match name:
        case "engine":
            return EngineSource(groups, known)
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
            # One automaton for each row, which gets the tokens of the other rows of its group.
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
    raise ValueError(f"source: got {name!r}; must be one of {', '.join((*SOURCES, BOUND, ENGINE))}")


class Acceptance:
    """Estimates the probability that a drafted token is accepted if those before it are. It learns from emitted tokens.

    Tokens are counted by source, by the length of the match before them, and by their share among the tokens that
    followed. The share is the estimate where nothing was counted. A draft need not be verified to be counted: it is
    compared with the emitted tokens as far as they go.
    """

    def __init__(self):
        self._tried: collections.Counter = collections.Counter()
        self._accepted: collections.Counter = collections.Counter()

    def chances(self, name: str, draft: Draft) -> np.ndarray:
        """For each token of a draft, the probability that it and all before it are accepted."""
        return np.cumprod(
            [
                (self._accepted[kind] + 2 * share) / (self._tried[kind] + 2)
                for kind, share in zip(self._kinds(name, draft), draft.shares, strict=True)
            ]
        )

    def learn(self, name: str, draft: Draft, emitted: Sequence[int]) -> None:
        """Compares a draft with the emitted tokens, up to the first token that differs."""
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
    """Decides how many tokens of each row's draft are verified in a call."""

    def __call__(self, drafts: Sequence[Draft], chances: Sequence[np.ndarray]) -> list[int]: ...


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A fixed number of tokens, or as many as the draft has."""

    most: int

    def __call__(self, drafts, chances):
        return [min(self.most, len(draft.tokens)) for draft in drafts]


@dataclasses.dataclass(frozen=True)
class ByMatch:
    """At most as many tokens as the draft's source matched of the context (SuffixDecoding's rule)."""

    def __call__(self, drafts, chances):
        return [min(draft.match, len(draft.tokens)) for draft in drafts]


@dataclasses.dataclass(frozen=True)
class Controller:
    """The number of tokens over all rows with the most expected tokens per time of the call; it may be 0.

    Attributes:
        time: Time of a call by its number of positions over all rows. It takes an array whose first entry is the call
            without drafts.
        rows: Rows of the batch that this replay represents, however many are live in it; absent means the live rows.
    """

    time: Callable[[np.ndarray], np.ndarray]
    rows: int | None = None

    def __call__(self, drafts, chances):
        live = len(drafts)
        scale = 1 if self.rows is None else self.rows / live
        # The most likely tokens come first. Probabilities fall along a row's draft, so the chosen tokens are its
        # beginning.
        every = np.concatenate(chances)
        row = np.repeat(np.arange(live), [len(each) for each in chances])
        order = np.argsort(-every, kind="stable")
        emitted = live + np.concatenate([[0], np.cumsum(every[order])])
        rate = emitted / self.time(scale * (live + np.arange(len(order) + 1)))
        return np.bincount(row[order[: rate.argmax()]], minlength=live).tolist()


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A replay: arrays of equal length with an entry for every row in every call.

    Attributes:
        call: Index of the call.
        position: Tokens of the completion before the call.
        match: Length of the match of the verified draft; 0 without a draft.
        drafted: Number of verified tokens.
        accepted: Number of accepted tokens.
        emitted: Number of tokens that the row got.
    """

    call: np.ndarray
    position: np.ndarray
    match: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    emitted: np.ndarray

    @property
    def live(self) -> np.ndarray:
        """Number of rows of each call."""
        return np.bincount(self.call)

    @property
    def positions(self) -> np.ndarray:
        """Number of positions of each call: one for each row, and the drafted ones."""
        return self.live + np.bincount(self.call, self.drafted).astype(int)

    @property
    def tokens_per_call(self) -> float:
        """Mean number of tokens that a row gets from a call."""
        return self.emitted.sum() / len(self.emitted)


def replay(
    groups: Sequence[Sequence[Row]],
    names: Sequence[str],
    known: Past,
    policy: Policy,
    acceptance: Acceptance | None = None,
) -> Outcome:
    """Replays the recorded completions of some groups, with all rows at once.

    Args:
        groups: The groups of a step, or some of them.
        names: The sources of drafts. If there are several, each row uses the draft with the most expected tokens.
        known: What was known before the step.
        policy: Decides how much of the drafts is verified.
        acceptance: What is known about acceptance; it learns from this replay too. Absent means a new one.
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
        for row, tokens in said:  # after all rows have drafted, because they run at the same time
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
    """The draft with the most expected tokens, and the probabilities of its tokens."""
    chances = {name: acceptance.chances(name, draft) for name, draft in drafts.items()}
    name = max(chances, key=lambda name: chances[name].sum())
    return drafts[name], chances[name]


def _agreeing(draft: Sequence[int], tokens: Sequence[int]) -> int:
    """The number of a draft's tokens before the first that is wrong."""
    pairs = enumerate(zip(draft, tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(draft), len(tokens)))
