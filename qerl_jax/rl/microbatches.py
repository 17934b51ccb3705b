"""Which rows make up a micro-batch, and how wide it is: plain index arithmetic on the host."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

# Shares of the widest completion to which micro-batches are cut: each width is another program.
_WIDTHS = (1, 3 / 4, 1 / 2, 3 / 8, 1 / 4, 3 / 16, 1 / 8)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together.

    Attributes:
        rows: int [n, k]: n prompts, k rows of each. -1 marks a place that no row takes.
        width: C, the completion tokens of each row that are computed.
    """

    rows: np.ndarray
    width: int


def chunks(rows: np.ndarray, size: int, lengths: np.ndarray) -> np.ndarray:
    """Cuts the rows of each prompt into chunks, of rows of like length.

    Args:
        rows: int [N, g], the rows of N prompts.
        size: k, rows of a chunk; divides g.
        lengths: int [B], by row.

    Returns:
        int [N * g / k, k].
    """
    order = np.argsort(-lengths[rows], axis=1, kind="stable")
    return np.take_along_axis(rows, order, axis=1).reshape(-1, size)


def by_rows(rows: np.ndarray, micro_rows: int, width: int) -> list[MicroBatch]:
    """Micro-batches of `micro_rows` rows as they come; rows int [N, g], as many of a prompt together as divide both."""
    size = math.gcd(rows.shape[1], micro_rows)
    return [MicroBatch(batch, width) for batch in rows.reshape(-1, micro_rows // size, size)]


def by_tokens(
    rows: np.ndarray,
    lengths: np.ndarray,
    *,
    budget: int,
    prompt_width: int,
    max_length: int,
) -> list[MicroBatch]:
    """As few micro-batches as hold at most `budget` tokens each, padding included; long rows first.

    Rows without a token are left out. Widths are taken from a list of seven, and only the last
    micro-batch has fewer prompts than its width holds: half, a quarter ... of them. So the
    number of shapes, each of which is compiled, is bounded whatever the lengths are.

    Args:
        rows: int [N, g], the rows of one optimizer step: g of each of N prompts.
        lengths: int [B], tokens of each row that are learned from; 0 for none.
        budget: Tokens; at least `prompt_width + max_length`.
        prompt_width: Tp.
        max_length: C, the longest that a completion may be.

    Raises:
        ValueError: When the budget does not hold one row.
    """
    size = chunk_size(
        rows.shape[1], budget=budget, prompt_width=prompt_width, max_length=max_length
    )
    cut = chunks(rows, size, lengths)
    longest = lengths[cut].max(axis=1)
    order = np.argsort(-longest, kind="stable")
    order = order[: max(1, int((longest > 0).sum()))]
    batches = []
    while len(order):
        width = round_up(int(longest[order[0]]), max_length)
        prompts = min(budget // (prompt_width + size * width), rows.size // size)
        while prompts // 2 >= len(order):
            prompts //= 2
        taken = np.full((prompts, size), -1)
        taken[: len(order)] = cut[order[:prompts]]
        batches.append(MicroBatch(taken, width))
        order = order[prompts:]
    return batches


def chunk_size(group: int, *, budget: int, prompt_width: int, max_length: int) -> int:
    """The most rows of one prompt, a divisor of `group`, that a micro-batch of `budget` tokens holds."""
    fitting = (budget - prompt_width) // max_length
    if fitting < 1:
        raise ValueError(
            f"max_tokens_per_microbatch: got {budget}; must hold a prompt and a completion, "
            f"{prompt_width} + {max_length} tokens"
        )
    return max(k for k in range(1, group + 1) if group % k == 0 and k <= fitting)


def round_up(length: int, limit: int) -> int:
    """The least of seven widths, from `limit` down to an eighth of it, that holds `length` tokens."""
    return min(width for width in widths(limit) if width >= length)


def widths(limit: int) -> Sequence[int]:
    """The widths that micro-batches can have, widest first."""
    return [math.ceil(limit * share) for share in _WIDTHS]
