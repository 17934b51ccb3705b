"""A suffix automaton of several growing token sequences: what followed the longest known end of a context.

Drafts come of it (`scripts.study_drafts`). That past text drafts for speculative decoding is the idea of SAM decoding
(arXiv 2411.10666), which reads what followed one earlier place, and of SuffixDecoding (arXiv 2411.04975), which
takes what followed most often, from a suffix tree; here an automaton counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        match: Number of the context's last tokens that were found; 0 where nothing is drafted.
        tokens: The draft, perhaps empty.
        shares: For each token, how often it followed what precedes it, n times out of N, as n / (N + 1): less than 1
            where little was seen.
    """

    match: int = 0
    tokens: Sequence[int] = ()
    shares: Sequence[float] = ()


class SuffixAutomaton:
    """All substrings of some sequences, and how often each occurs.

    A state stands for substrings that end at the same places of the sequences, the longest of which has `_length`
    tokens; `_link` leads to the state of the longest shorter end, which occurs at more places. Sequences grow token by
    token, in any order, and memory grows with their tokens. The construction is that of Blumer et al. (1985), for
    several sequences. A token more costs as many steps as its new end has links: few in text, and as many as there
    are tokens where one token is repeated.

    >>> automaton = SuffixAutomaton()
    >>> state = automaton.add("abcabd")
    >>> automaton.draft("xab", 2)
    Draft(match=2, tokens=['c', 'a'], shares=[0.3333333333333333, 0.5])
    """

    def __init__(self):
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count = [-1], [0], [0]

    def add(self, tokens: Sequence[int], end: int = 0) -> int:
        """Lets a sequence grow.

        Args:
            tokens: What is appended.
            end: What the last call for the sequence returned; 0 begins a new one.

        Returns:
            The end of the sequence, for the next call.
        """
        for token in tokens:
            end = self._append(token, end)
            state = end
            while state > 0:
                self._count[state] += 1
                state = self._link[state]
            self._count[0] += 1
        return end

    def count(self, tokens: Sequence[int]) -> int:
        """How often the tokens occur in the sequences."""
        state = 0
        for token in tokens:
            if token not in self._next[state]:
                return 0
            state = self._next[state][token]
        return self._count[state]

    def draft(self, context: Sequence[int], most: int) -> Draft:
        """Drafts what followed the longest end of the context most often, token by token.

        Args:
            context: The tokens before the draft; the longer, the slower. A match is no longer than it.
            most: The largest length of a draft.
        """
        state, match = self._longest(context)
        if not match:
            return Draft()
        tokens, shares = [], []
        while len(tokens) < most and self._next[state]:
            token = max(self._next[state], key=lambda t: self._count[self._next[state][t]])
            following = self._next[state][token]
            tokens.append(token)
            shares.append(self._count[following] / (self._count[state] + 1))
            state = following
        return Draft(match, tokens, shares)

    def _longest(self, context: Sequence[int]) -> tuple[int, int]:
        """The state and the length of the longest end of the context after which something followed."""
        state = match = 0
        for token in context:
            while state and token not in self._next[state]:
                state = self._link[state]
                match = self._length[state]
            if token in self._next[state]:
                state, match = self._next[state][token], match + 1
        while state and not self._next[state]:  # an end of a sequence, so far
            state = self._link[state]
            match = self._length[state]
        return state, match

    def _append(self, token: int, end: int) -> int:
        """The state of a sequence's tokens and one more, which may be known from another sequence."""
        known = self._next[end].get(token)
        if known is not None:
            return self._own(end, token, known)
        new = self._state(self._length[end] + 1)
        state = end
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        self._link[new] = 0 if state < 0 else self._own(state, token, self._next[state][token])
        return new

    def _own(self, state: int, token: int, target: int) -> int:
        """The state whose longest string is that of `state` and the token; split off the target where it is not."""
        if self._length[target] == self._length[state] + 1:
            return target
        half = self._state(self._length[state] + 1)
        self._next[half] = dict(self._next[target])
        self._link[half], self._link[target] = self._link[target], half
        self._count[half] = self._count[target]
        while state >= 0 and self._next[state].get(token) == target:
            self._next[state][token] = half
            state = self._link[state]
        return half

    def _state(self, length: int) -> int:
        self._next.append({})
        self._link.append(-1)
        self._length.append(length)
        self._count.append(0)
        return len(self._next) - 1
