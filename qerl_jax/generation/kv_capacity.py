"""How many tokens a cache of keys and values holds: arithmetic on bytes and pages, before anything is made."""

import dataclasses
import math
from collections.abc import Callable

from qerl_jax.generation.scheduler import most_prefilled
from qerl_jax.model.architecture import Architecture

# Arrays [B, V] in float32 that sampling holds at once, and what the cache takes of what is left.
_SCORES = 4
_CACHE_SHARE = 0.9
# What rows of an evaluation take of a device's memory, and the bytes taken for that where it reports none.
_ROWS_SHARE, _UNREPORTED_MEMORY = 0.4, 16e9
# Most rows that are sampled at a time unless a config asks for more.
MOST_SLOTS = 512
# The share of their limit that completions are expected to need. Where they need more, some rows wait on the host.
EXPECTED_SHARE = 1 / 4


def pages_wanted(rows: int, row_tokens: int, prompts: int, prompt_tokens: int, size: int) -> int:
    """Pages of a pool in which no row waits: of all rows, of all prompts that rows share, and scratch."""
    return 1 + rows * -(-row_tokens // size) + prompts * -(-prompt_tokens // size)


def pages_for(tokens: int, size: int) -> int:
    """Pages of a pool for so many tokens: scratch, and one for what a row copies, beside them."""
    return 2 + -(-tokens // size)


def workspace(
    arch: Architecture, slots: int, prompts: int, length: int, itemsize: int
) -> dict[str, int]:
    """Bytes that sampling needs beside the cache.

    Args:
        arch: Shape of the policy.
        slots: Tokens that a decode step runs: one of each row that is sampled at a time, or more with drafts.
        prompts: Prompts that are prefilled together.
        length: Most tokens of a prompt.
        itemsize: Bytes of an activation.
    """
    tokens = most_prefilled(prompts, length)
    return {
        "scores": _SCORES * slots * arch.vocab_size * 4,
        "prefill": tokens * (3 * arch.ffn_width + 4 * arch.width) * itemsize,
    }


def capacity(
    arch: Architecture, free: int, fraction: float | None, beside: int, itemsize: int
) -> int:
    """Tokens that a cache may hold.

    Args:
        arch: Shape of the policy.
        free: Free bytes of the device.
        fraction: Share of them that the cache takes; None means nine tenths of what `beside` leaves.
        beside: Bytes of the `workspace`.
        itemsize: Bytes of a key or value.
    """
    share = _CACHE_SHARE * max(0, free - beside) if fraction is None else fraction * free
    tokens = int(share / arch.kv_bytes(itemsize))
    # In coarse steps, so that two runs find the same program in the compilation cache.
    return tokens - tokens % (1 << max(0, tokens.bit_length() - 4))


def best_slots(
    rows: int, wanted: Callable[[int], int], offered: Callable[[int], int | None]
) -> int:
    """Returns the largest number of rows to sample at a time whose expected pages fit in the cache: at most `rows`
    and `MOST_SLOTS`, at least 1.

    Numbers are those that decoding kernels take without filling up: multiples of 32 above 32, and of 8 above 8.

    Args:
        rows: All that are to be sampled.
        wanted: Pages that the rows of so many slots are expected to need, for a number of slots.
        offered: Pages that there is room for beside what so many slots need otherwise; None for any number.
    """
    most = min(rows, MOST_SLOTS)
    fewer = [*range((most - 1) // 32 * 32, 32, -32), *range(32, 8, -8), *range(8, 1, -1)]
    for slots in (most, *(n for n in fewer if n < most)):
        room = offered(slots)
        if room is None or wanted(slots) <= room:
            return slots
    return 1


@dataclasses.dataclass(frozen=True)
class Demand:
    """What sampling needs, by the number of slots: rows that are sampled at a time.

    Attributes:
        arch: Shape of the policy.
        rows: All that are to be sampled.
        prompts: Of which these are completions.
        max_prompt_length: Most tokens of a prompt.
        row_tokens: Most tokens of a row in the cache.
        page_size: S.
        compact: If True, at most min(prompts, slots) prompts are prefilled together. If False, every prefill is
            padded to `slots` prompts.
        itemsize: Bytes of a key or value.
        positions: Most tokens that a step runs with drafts; 0 without.
    """

    arch: Architecture
    rows: int
    prompts: int
    max_prompt_length: int
    row_tokens: int
    page_size: int
    compact: bool
    itemsize: int
    positions: int = 0

    def prefilled(self, slots: int) -> int:
        """Most prompts that are prefilled together."""
        return min(self.prompts, slots) if self.compact else slots

    def pages(self, slots: int) -> int:
        """The most pages of so many rows and of the prompts that they share."""
        shared, prompt_tokens = min(self.prompts, slots), self.max_prompt_length - 1
        return pages_wanted(slots, self.row_tokens, shared, prompt_tokens, self.page_size)

    def workspace(self, slots: int) -> dict[str, int]:
        """Bytes beside the cache, see `workspace`."""
        prompts = self.prefilled(slots)
        most = max(slots, self.positions)
        return workspace(self.arch, most, prompts, self.max_prompt_length, self.itemsize)

    def expected_pages(self, slots: int) -> int:
        """Pages of rows that need a quarter of their limit, but enough for the longest one alone."""
        prompt = self.max_prompt_length - 1
        tokens = prompt + math.ceil(EXPECTED_SHARE * (self.row_tokens - prompt))
        many = pages_wanted(slots, tokens, 1, prompt, self.page_size)
        return max(many, pages_wanted(1, self.row_tokens, 1, prompt, self.page_size))

    def best_slots(self, capacity: Callable[[int], int | None]) -> int:
        """`best_slots` for a cache that holds capacity(slots) tokens; None for any number."""

        def offered(slots: int) -> int | None:
            tokens = capacity(slots)
            return None if tokens is None else pages_for(tokens, self.page_size)

        return best_slots(self.rows, self.expected_pages, offered)


def rows_that_fit(arch: Architecture, memory: float | None, tokens: int, itemsize: int) -> int:
    """Rows of so many tokens whose keys and values fit beside a model of unknown size; at least 1.

    Args:
        arch: Shape of the policy.
        memory: Bytes of the device; None where it does not report them.
        tokens: Most tokens of a row.
        itemsize: Bytes of a key or value.
    """
    share = _ROWS_SHARE * (memory or _UNREPORTED_MEMORY)
    return max(1, int(share / (tokens * arch.kv_bytes(itemsize))))
