"""Computes how many tokens the KV cache can hold: arithmetic on bytes and pages, before anything is allocated."""

import dataclasses
import math
from collections.abc import Callable

from qerl_jax.generation.scheduler import most_prefilled
from qerl_jax.model.architecture import Architecture

# Number of float32 arrays [B, V] that sampling holds at once; and the cache's share of the memory that is left.
_SCORES = 4
_CACHE_SHARE = 0.9
# Share of a device's memory for the rows of an evaluation; and the memory in bytes that is assumed if the device does
# not report it.
_ROWS_SHARE, _UNREPORTED_MEMORY = 0.4, 16e9
# The most rows that are sampled at a time unless `max_concurrent` says more.
MOST_SLOTS = 512
# The share of their limit that completions are expected to need. If they need more, some rows are moved to the host.
EXPECTED_SHARE = 1 / 4


def pages_for(tokens: int, size: int) -> int:
    """Returns the pages of a pool for `tokens` tokens, plus scratch and one page that a row copies."""
    return 2 + -(-tokens // size)


def capacity(
    arch: Architecture, free: int, fraction: float | None, beside: int, itemsize: int
) -> int:
    """Returns the capacity of the cache in tokens.

    Args:
        arch: Shape of the policy.
        free: Free bytes of the device.
        fraction: Share of `free` for the cache; None means nine tenths of what `beside` leaves.
        beside: Bytes of `Demand.workspace`.
        itemsize: Bytes of one element of a key or value.
    """
    share = _CACHE_SHARE * max(0, free - beside) if fraction is None else fraction * free
    tokens = int(share / arch.kv_bytes(itemsize))
    # Rounded down to four significant bits, so that two runs find the same program in the compilation cache.
    return tokens - tokens % (1 << max(0, tokens.bit_length() - 4))


@dataclasses.dataclass(frozen=True)
class Demand:
    """Computes the memory that sampling needs, as a function of the number of slots (rows sampled at a time).

    Attributes:
        arch: Shape of the policy.
        rows: Number of all rows to sample.
        prompts: Number of their prompts.
        max_prompt_length: Most tokens of a prompt.
        row_tokens: Most tokens of a row in the cache.
        page_size: S, tokens of a page.
        compact: If True, at most min(prompts, slots) prompts are prefilled together; if False, `slots`, so that
            shapes do not depend on the number of prompts.
        itemsize: Bytes of one element of an activation, a key or a value.
        carries: Whether rows that have begun are prefilled, too.
        positions: Most tokens that a step runs with drafts; 0 without drafts.
        fused_rows: The most rows that fused layers decode; 0 without them.
    """

    arch: Architecture
    rows: int
    prompts: int
    max_prompt_length: int
    row_tokens: int
    page_size: int
    compact: bool
    itemsize: int
    carries: bool = False
    positions: int = 0
    fused_rows: int = 0

    def prefilled(self, slots: int) -> int:
        """Returns the most prompts that are prefilled together."""
        return min(self.prompts, slots) if self.compact else slots

    def pages(self, slots: int) -> int:
        """Returns the largest number of pages that rows in all slots and their shared prompts can need."""
        return self._pages(slots, self.row_tokens, min(self.prompts, slots))

    def _pages(self, rows: int, row_tokens: int, prompts: int = 1) -> int:
        """Returns the pages of a pool in which no row has to wait: of rows, of shared prompts, and scratch."""
        ceil = lambda tokens: -(-tokens // self.page_size)
        return 1 + rows * ceil(row_tokens) + prompts * ceil(self.max_prompt_length - 1)

    def workspace(self, slots: int) -> dict[str, int]:
        """Returns the bytes that sampling needs in addition to the cache, by purpose."""
        arch, longest = self.arch, self.row_tokens if self.carries else self.max_prompt_length
        prompts = most_prefilled(self.prefilled(slots), longest)
        return {
            "scores": _SCORES * max(slots, self.positions) * arch.vocab_size * 4,
            "prefill": prompts * (3 * arch.ffn_width + 4 * arch.width) * self.itemsize,
        }

    def _expected_pages(self, slots: int) -> int:
        """Returns the pages of rows that need a quarter of their limit, but at least those of one longest row."""
        prompt = self.max_prompt_length - 1
        tokens = prompt + math.ceil(EXPECTED_SHARE * (self.row_tokens - prompt))
        return max(self._pages(slots, tokens), self._pages(1, self.row_tokens))

    def slots(self, max_concurrent: int | None, capacity: Callable[[int], int | None]) -> int:
        """Returns the number of rows to sample at a time: `max_concurrent`, or its default if that is None.

        The default is that of rollouts, evaluations and `Policy`: as many rows as fit in the cache if each needs a
        quarter of its limit, at most `rows` and `MOST_SLOTS`, at least 1. Below the upper bound only numbers are tried
        that decoding kernels take without padding: multiples of 32 above 32, and of 8 above 8. Above `fused_rows`, none
        is tried up to twice that, because fewer make as many tokens per second.

        Args:
            max_concurrent: The number that the user wants; None for the default.
            capacity: capacity(slots) is the number of tokens that the cache holds; None means any number.
        """
        if max_concurrent is not None:
            return max_concurrent
        most = min(self.rows, MOST_SLOTS)
        fewer = [*range((most - 1) // 32 * 32, 32, -32), *range(32, 8, -8), *range(8, 1, -1)]
        for slots in (most, *(n for n in fewer if n < most)):
            if self.fused_rows < slots <= 2 * self.fused_rows:
                continue
            tokens = capacity(slots)
            if tokens is None or self._expected_pages(slots) <= pages_for(tokens, self.page_size):
                return slots
        return 1


def rows_that_fit(arch: Architecture, memory: float | None, tokens: int, itemsize: int) -> int:
    """Returns how many rows' keys and values fit beside a model of unknown size; at least 1.

    Args:
        arch: Shape of the policy.
        memory: Bytes of the device; None if the device does not report them.
        tokens: Most tokens of a row.
        itemsize: See `Demand`.
    """
    share = _ROWS_SHARE * (memory or _UNREPORTED_MEMORY)
    return max(1, int(share / (tokens * arch.kv_bytes(itemsize))))
