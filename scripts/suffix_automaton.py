"""A suffix automaton of several growing token sequences: what followed the longest known suffix of a context.

`scripts.study_drafts` uses it for drafts. Speculative decoding with drafts from past text is the idea of SAM decoding
(arXiv 2411.10666), which reads what followed at one earlier place, and of SuffixDecoding (arXiv 2411.04975), which uses
the most frequent continuation in a suffix tree. Here an automaton counts continuations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Draft:
    """Tokens that may come next.

    Attributes:
        match: Number of the context's last tokens that were found; 0 if nothing is drafted.
        tokens: The draft, which may be empty.
        shares: For each token, n / (N + 1), if it followed the text before it n times out of N. So it is below 1 after
            few observations.
    """

    match: int = 0
    tokens: Sequence[int] = ()
    shares: Sequence[float] = ()


class SuffixAutomaton:
    """All substrings of some sequences, and how often each occurs.

    A state represents the substrings that end at the same places of the sequences; the longest has `_length` tokens.
    `_link` leads to the state of its longest suffix that occurs at more places. Sequences grow token by token, in any
    order, and memory grows with their tokens. The construction is that of Blumer et al. (1985), for several sequences.
    Adding a token takes as many steps as its new suffix has links: few in text, and as many as there are tokens if one
    token is repeated.

    >>> automaton = SuffixAutomaton()
    >>> state = automaton.add("abcabd")
    >>> automaton.draft("xab", 2) Draft(match=2, tokens=['c', 'a'], shares=[0.3333333333333333, 0.5])
    """

    def __init__(self):
        self._next: list[dict[int, int]] = [{}]
        self._link, self._length, self._count = [-1], [0], [0]

    def add(self, tokens: Sequence[int], end: int = 0) -> int:
        """Appends tokens to a sequence.

        Args:
            tokens: The tokens to append.
            end: The result of the last call for the sequence; 0 starts a new one.

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
        """Drafts the most frequent continuation of the longest known suffix of the context, token by token.

        Args:
            context: The tokens before the draft. A match is no longer than this; long contexts are slower.
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
        """The state and the length of the longest suffix of the context that something followed."""
        state = match = 0
        for token in context:
            while state and token not in self._next[state]:
                state = self._link[state]
                match = self._length[state]
            if token in self._next[state]:
                state, match = self._next[state][token], match + 1
        while state and not self._next[state]:  # the end of a sequence, so far
            state = self._link[state]
            match = self._length[state]
        return state, match

    def _append(self, token: int, end: int) -> int:
        """The state of a sequence after one more token, which another sequence may have already."""
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
        """The state whose longest string is that of `state` plus the token, split off from the target if necessary."""
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
