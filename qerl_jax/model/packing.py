"""Prompts and completions packed on one token axis; each prompt is stored once for all of its completions.

    flat [T]:      completion 1 | completion 2 | ... | prompt 1 | prompt 2 | ... | padding

Linears, norms, adapters and head run on that axis. Attention needs rows [prompt, completion] without gaps: `unfold`
builds them, in arrays of a few widths, and `fold` goes back.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

# The gradients of a prompt are summed over its rows, by a product with a matrix of zeros and ones. Everything else is
# moved by gathers, forward and backward. JAX's own gradient of a gather would be a scatter-add, which is slow, rounds at
# each addition, and has no fixed order on a GPU.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Packing:
    """The layout of a flat axis of T tokens, and of the n rows that attention sees.

    The n rows are divided in order into arrays of n_k rows of width S_k. An unused row has length 0 and no prompt.

    Attributes:
        rows: int32 [T], the row of each token; for a token of a prompt the first row with that prompt, and n for
            padding.
        positions: int32 [T], the slot of each token in its row, which is its position for RoPE.
        prompt_starts: int32 [n], the index on the flat axis where a row's prompt begins.
        prompt_lengths: int32 [n], tokens of the prompt.
        starts: int32 [n], the index on the flat axis where the completion begins; its tokens are contiguous.
        lengths: int32 [n], tokens of the completion.
        arrays: (n_k, S_k) of each array of rows.
        prompt_width: Upper bound on the tokens of a prompt.
    """

    rows: jax.Array
    positions: jax.Array
    prompt_starts: jax.Array
    prompt_lengths: jax.Array
    starts: jax.Array
    lengths: jax.Array
    arrays: tuple[tuple[int, int], ...] = dataclasses.field(metadata={"static": True})
    prompt_width: int = dataclasses.field(metadata={"static": True})

    @property
    def leads(self) -> jax.Array:
        """Whether each row is the first one with its prompt, bool [n]."""
        padded = jnp.pad(self.rows, (0, 1), constant_values=len(self.lengths))
        first = _taken(padded, self.prompt_starts)
        return (self.prompt_lengths > 0) & (first == jnp.arange(len(self.lengths)))

    @property
    def is_prompt(self) -> jax.Array:
        """Whether each token belongs to a prompt, bool [T]."""
        return self.positions < _taken(self.prompt_lengths, self.rows)

    def unfold(self, flat: jax.Array) -> tuple[jax.Array, ...]:
        """Builds the rows: [T, N] -> [n_k, S_k, N] for each array, with prompt, completion, then zeros in a row."""
        return _unfold(self, flat)

    def fold(self, arrays: tuple[jax.Array, ...]) -> jax.Array:
        """Reverses `unfold`: [n_k, S_k, N] for each array -> [T, N].

        A prompt gets the values of its first row, and padding gets 0.
        """
        return _fold(self, arrays)

    def before(self, flat: jax.Array) -> jax.Array:
        """Shifts [T, N] by one token: each completion token gets the values of the token before, which predicts it.

        The first completion token gets those of the prompt's last token. Prompts and padding get 0.
        """
        return _before(self, flat)

    def by_row(self, flat: jax.Array) -> jax.Array:
        """Arranges completion tokens in rows: [T] -> [n, S_1], each row padded with zeros."""
        return _by_row(self, flat)


def pack(
    prompts: np.ndarray,
    prompt_lengths: np.ndarray,
    lengths: np.ndarray,
    *,
    tokens: int,
    arrays: tuple[tuple[int, int], ...],
    prompt_width: int,
) -> Packing:
    """Lays rows out on a flat axis without padding between them; runs on the host.

    Args:
        prompts: int [n], the number of each row's prompt; -1 for an unused row.
        prompt_lengths: int [n], tokens of that prompt.
        lengths: int [n], tokens of each completion.
        tokens: T.
        arrays: (n_k, S_k) of each array of rows; the n_k add up to n.
        prompt_width: Upper bound on the tokens of a prompt.

    Returns:
        A packing with completions in the order of their rows, then prompts in the order of their first rows.

    Raises:
        ValueError: If the tokens do not fit into T, or a row does not fit into its array.
    """
    is_real = prompts >= 0
    lengths, prompt_lengths = (np.where(is_real, x, 0) for x in (lengths, prompt_lengths))
    numbers = np.where(is_real, prompts, -1)
    _, leaders, of = np.unique(numbers, return_index=True, return_inverse=True)
    leader = leaders[of]
    leads = is_real & (leader == np.arange(len(prompts)))
    shared = np.where(leads, prompt_lengths, 0)
    starts = np.cumsum(lengths) - lengths
    prompt_starts = lengths.sum() + np.cumsum(shared) - shared
    real = lengths.sum() + shared.sum()
    widths = np.repeat([width for _, width in arrays], [count for count, _ in arrays])
    if real > tokens or np.any(lengths + prompt_lengths > widths):
        raise ValueError(f"rows of {real} tokens do not fit into {tokens}, or into {arrays}")
    counts = np.concatenate([lengths, shared])
    rows = np.repeat(np.tile(np.arange(len(prompts)), 2), counts)
    positions = np.arange(real) - np.repeat(np.cumsum(counts) - counts, counts)
    positions[: lengths.sum()] += np.repeat(prompt_lengths, lengths)
    rows, positions = (
        np.pad(values, (0, tokens - real), constant_values=fill)
        for values, fill in ((rows, len(prompts)), (positions, 0))
    )
    prompt_starts = np.where(is_real, prompt_starts[leader], tokens)
    fields = rows, positions, prompt_starts, prompt_lengths, starts, lengths
    return Packing(*(field.astype(np.int32) for field in fields), arrays, prompt_width)


def _taken(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns x [M, ...] at an index, and 0 for an index of M or more."""
    return jnp.asarray(x).at[index].get(mode="fill", fill_value=0)


def _parts(packing: Packing):
    """Yields the first row, the number of rows and the width of each array."""
    first = 0
    for count, width in packing.arrays:
        yield first, count, width
        first += count


def _slots(packing: Packing, first: int, count: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Returns, for the slots [n_k, S_k] of an array, the token's index on the flat axis (T for an empty slot), and
    whether the slot is in a prompt."""
    column = lambda x: x[first : first + count, None]
    slot, prompt = jnp.arange(width), column(packing.prompt_lengths)
    index = column(packing.starts) + slot - prompt
    in_completion = slot < prompt + column(packing.lengths)
    tokens = jnp.where(in_completion, index, len(packing.rows))
    in_prompt = slot < prompt
    return jnp.where(in_prompt, column(packing.prompt_starts) + slot, tokens), in_prompt


def _sums_by_prompt(packing: Packing, x: jax.Array) -> jax.Array:
    """Sums x [n, ...] over the rows of each prompt; the sum is in the prompt's first row, and other rows are 0."""
    same = packing.prompt_starts[:, None] == packing.prompt_starts
    matrix = (same & packing.leads[:, None]).astype(x.dtype)
    flat = x.reshape(len(x), -1)
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.dot(matrix, flat, precision=precision).reshape(x.shape)


@jax.custom_vjp
def _unfold(packing: Packing, flat: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(_taken(flat, _slots(packing, *part)[0]) for part in _parts(packing))


def _unfold_bwd(packing: Packing, slopes: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
    width = min(packing.prompt_width, max(x.shape[1] for x in slopes))
    pad = lambda x: jnp.pad(x, ((0, 0), (0, width - x.shape[1]), (0, 0)))
    prompts = jnp.concatenate([pad(x[:, :width]) for x in slopes])
    in_prompt = jnp.arange(width) < packing.prompt_lengths[:, None]
    sums = _sums_by_prompt(packing, jnp.where(in_prompt[..., None], prompts, 0))
    is_prompt, rows = packing.is_prompt, packing.rows * width
    index = jnp.where(is_prompt, rows + packing.positions, sums.shape[0] * width)
    of_prompts = _taken(sums.reshape(-1, sums.shape[-1]), index)
    return None, jnp.where(packing.is_prompt[:, None], of_prompts, _folded(packing, slopes))


_unfold.defvjp(lambda packing, flat: (_unfold(packing, flat), packing), _unfold_bwd)


def _folded(packing: Packing, arrays: tuple[jax.Array, ...]) -> jax.Array:
    flat = 0
    for (first, count, width), x in zip(_parts(packing), arrays, strict=True):
        row = packing.rows - first
        is_inside = (row >= 0) & (row < count)
        index = jnp.where(is_inside, row * width + packing.positions, count * width)
        flat = flat + _taken(x.reshape(count * width, -1), index)
    return flat


_fold = jax.custom_vjp(_folded)


def _fold_bwd(packing: Packing, slopes: jax.Array) -> tuple[None, tuple[jax.Array, ...]]:
    arrays = []
    for first, count, width in _parts(packing):
        index, in_prompt = _slots(packing, first, count, width)
        read = ~in_prompt | packing.leads[first : first + count, None]
        arrays.append(_taken(slopes, jnp.where(read, index, len(slopes))))
    return None, tuple(arrays)


_fold.defvjp(lambda packing, arrays: (_folded(packing, arrays), packing), _fold_bwd)


def _in_completion(packing: Packing) -> tuple[jax.Array, jax.Array]:
    """Returns whether each token is in a completion, and whether it is the completion's first; bool [T] each."""
    prompt = _taken(packing.prompt_lengths, packing.rows)
    real = packing.rows < len(packing.lengths)
    return real & (packing.positions >= prompt), real & (packing.positions == prompt)


@jax.custom_vjp
def _before(packing: Packing, flat: jax.Array) -> jax.Array:
    in_completion, is_first = _in_completion(packing)
    last = _taken(packing.prompt_starts + packing.prompt_lengths - 1, packing.rows)
    index = jnp.where(is_first, last, jnp.arange(len(flat)) - 1)
    return _taken(flat, jnp.where(in_completion, index, len(flat)))


def _before_bwd(packing: Packing, slopes: jax.Array) -> tuple[None, jax.Array]:
    in_completion, is_first = _in_completion(packing)
    follows = jnp.pad(in_completion & ~is_first, (0, 1))[1:]
    index = jnp.where(follows, jnp.arange(len(slopes)) + 1, len(slopes))
    real = packing.lengths > 0
    firsts = _taken(slopes, jnp.where(real, packing.starts, len(slopes)))
    sums = _sums_by_prompt(packing, firsts)
    is_last = packing.positions == _taken(packing.prompt_lengths, packing.rows) - 1
    of_last = _taken(sums, jnp.where(is_last, packing.rows, len(sums)))
    return None, jnp.where(is_last[:, None], of_last, _taken(slopes, index))


_before.defvjp(lambda packing, flat: (_before(packing, flat), packing), _before_bwd)


@jax.custom_vjp
def _by_row(packing: Packing, flat: jax.Array) -> jax.Array:
    slot = jnp.arange(packing.arrays[0][1])
    index = packing.starts[:, None] + slot
    return _taken(flat, jnp.where(slot < packing.lengths[:, None], index, len(flat)))


def _by_row_bwd(packing: Packing, slopes: jax.Array) -> tuple[None, jax.Array]:
    in_completion, _ = _in_completion(packing)
    slot = packing.positions - _taken(packing.prompt_lengths, packing.rows)
    index = jnp.where(in_completion, packing.rows * slopes.shape[1] + slot, slopes.size)
    return None, _taken(slopes.reshape(-1), index)


_by_row.defvjp(lambda packing, flat: (_by_row(packing, flat), packing), _by_row_bwd)
