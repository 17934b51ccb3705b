"""Keeps the completions of each prompt when it was last sampled, in which drafts are searched in later epochs."""

import threading

import numpy as np

# The most tokens that are kept; the completions that were sampled longest ago are dropped first.
_MOST_TOKENS = 1 << 25


class Recall:
    """The completions of each prompt from one round of sampling. Several threads may add to a round at the same time."""

    def __init__(self):
        self._held = self._rounds = 0
        # The round and its completions, by the bytes of a prompt's tokens; those of the last round come last.
        self._texts: dict[bytes, tuple[int, list[np.ndarray]]] = {}
        self._lock = threading.Lock()

    def begin(self) -> int:
        """Begins a round, and returns its number."""
        with self._lock:
            self._rounds += 1
            return self._rounds

    def completions(self, prompt: np.ndarray) -> tuple[np.ndarray, ...]:
        """Returns the completions of a prompt, int32 [n] each, in the order in which they ended."""
        with self._lock:
            return tuple(self._texts.get(prompt.tobytes(), (0, ()))[1])

    def add(self, number: int, prompt: np.ndarray, completion: np.ndarray) -> None:
        """Adds a completion int32 [n] of a prompt int32 [T] to the round of this number.

        The first completion of a prompt in a round replaces those of earlier rounds.
        """
        key = prompt.tobytes()
        with self._lock:
            of_round, texts = self._texts.pop(key, (number, []))
            if of_round != number:
                self._held -= sum(map(len, texts))
                texts = []
            texts.append(completion)
            self._texts[key] = number, texts
            self._held += len(completion)
            while self._held > _MOST_TOKENS:
                _, dropped = self._texts.pop(next(iter(self._texts)))
                self._held -= sum(map(len, dropped))
