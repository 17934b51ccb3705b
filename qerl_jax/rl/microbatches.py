"""Divides rows into micro-batches and chooses their shapes: plain index arithmetic on the host."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Self

import numpy as np

from qerl_jax.config import OptimConfig
from qerl_jax.model import packing
from qerl_jax.model.architecture import Architecture
from qerl_jax.system.checked import require

# Sizes of micro-batches: (divisor of the token budget, factor on attention rows per token compared with full size).
_SIZES = ((1, 1), (2, 1), (12, 2))
# The same if all rows have one width, so that there are fewer other shapes.
_SIZES_OF_ONE_WIDTH = ((1, 1), (4, 2), (16, 4))
# Tokens of the largest micro-batch by default, and of the smallest.
_TOKENS, _FEWEST = 8192, 128
# Token slots of the attention rows, as multiples of a micro-batch's tokens: in the widest rows, the middle ones and
# the narrowest. Slots of short rows cost little, so there are more of them.
_SLOTS = (1, 1.5, 2)
# The narrowest rows have an eighth of the widest width, but at least and at most these widths.
_NARROWEST = (128, 512)
# Smaller micro-batches are tried if the busiest device has more than this factor of its share of the work.
_EVEN = 1.05
# Cost of an attention slot, in units of a token that runs through the linears of a 7B model: 1/128 for its copies,
# and 1/128 for every 512 slots of the row's width.
_SLOT_COST, _ROW_WIDTH = 1 / 128, 512
# Fixed time of a micro-batch on a Hopper GPU: seconds of kernel launches per layer, and of dequantization per
# parameter. With SmolLM2 launches take twice as long (docs/tried-and-rejected.md), but with that value more
# than a tenth of its tokens would be padding. Time of a token: seconds for any model, and seconds per parameter.
_LAYER_SECONDS, _DEQUANTIZING_SECONDS = 0.25e-3, 1.1e-12
_TOKEN_SECONDS, _PARAMETER_SECONDS = 3.9e-6, 7.5e-15


@dataclasses.dataclass(frozen=True)
class Shape:
    """The shape of a micro-batch, for which a program is compiled.

    Attributes:
        tokens: T, length of the flat token axis.
        arrays: Pairs (n_k, S_k): n_k attention rows of width S_k, in tokens; the widest first.
        prompt_width: The most tokens of a prompt.
        overhead: Fixed cost of a micro-batch, in tokens, see the function `overhead`.
    """

    tokens: int
    arrays: tuple[tuple[int, int], ...]
    prompt_width: int
    overhead: float = dataclasses.field(default=0.0, compare=False)

    @property
    def num_rows(self) -> int:
        """The most rows that fit."""
        return sum(count for count, _ in self.arrays)

    @property
    def slots(self) -> int:
        """The number of token slots of all attention rows."""
        return sum(count * width for count, width in self.arrays)

    @property
    def cost(self) -> float:
        """The cost of a micro-batch of this shape, in units of a token that runs through the linears."""
        slots = sum(count * width * (1 + width / _ROW_WIDTH) for count, width in self.arrays)
        return self.tokens + _SLOT_COST * slots + self.overhead


@dataclasses.dataclass(frozen=True)
class Rows:
    """Rows to be divided into micro-batches.

    Attributes:
        numbers: int [N], the index of each row in the rollout.
        lengths: int [N], tokens of each completion.
        prompts: int [N], the index of each row's prompt.
        prompt_lengths: int [N], tokens of that prompt.
    """

    numbers: np.ndarray
    lengths: np.ndarray
    prompts: np.ndarray
    prompt_lengths: np.ndarray

    def take(self, chosen: np.ndarray) -> Self:
        """Returns some of the rows, by indices or a mask [N]."""
        return type(self)(*(x[chosen] for x in vars(self).values()))

    def in_slots(self, slots: np.ndarray) -> Self:
        """Returns the rows of a micro-batch by their indices int [n]; -1 gives an empty row, with number -1."""
        values = zip(vars(self).values(), _EMPTY_ROW, strict=True)
        return type(self)(*(np.append(x, fill)[slots] for x, fill in values))

    @property
    def tokens(self) -> int:
        """The number of tokens of all completions, and of each prompt once."""
        _, first = np.unique(self.prompts, return_index=True)
        return int(self.lengths.sum() + self.prompt_lengths[first].sum())


# Number, length, prompt and length of the prompt.
_EMPTY_ROW = (-1, 0, -1, 0)


def empty_rows(count: int) -> Rows:
    """Returns rows without tokens, which fill a micro-batch."""
    return Rows(*(np.full(count, value) for value in _EMPTY_ROW))


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows that are computed together.

    Attributes:
        shape: The shape that the program is compiled for.
        rows: The n rows by attention row; an empty one has number -1, no prompt and no tokens.
    """

    shape: Shape
    rows: Rows

    @functools.cached_property
    def packing(self) -> packing.Packing:
        """The layout of the token axis. All passes over the micro-batch use it."""
        return packing.pack(
            self.rows.prompts,
            self.rows.prompt_lengths,
            self.rows.lengths,
            tokens=self.shape.tokens,
            arrays=self.shape.arrays,
            prompt_width=self.shape.prompt_width,
        )


def overhead(arch: Architecture) -> float:
    """Returns the fixed cost of a micro-batch, in tokens that the model computes in the same time.

    It is about 250 for a 7B model and 1,500 for one of 135M parameters: the smaller a model, the more tokens it
    computes while its kernels are launched.
    """
    size = arch.num_parameters()
    once = arch.num_layers * _LAYER_SECONDS + size * _DEQUANTIZING_SECONDS
    return once / (_TOKEN_SECONDS + size * _PARAMETER_SECONDS)


def shapes(
    budget: int,
    *,
    prompt_width: int,
    completion_width: int,
    group: int,
    max_rows: int,
    overhead: float = 0.0,
) -> tuple[Shape, ...]:
    """Returns all shapes of micro-batches of at most `budget` tokens: at most three, since each compiles a program.

    Micro-batches have the whole budget of tokens, a half or a twelfth of it. Their attention rows have up to three
    widths; the largest is that of the longest row. If there are several widths, halves do not have the widest. If there
    is only one, there are quarters and sixteenths instead. Two more shapes would save 0 to 4 % of an update's time.

    Args:
        budget: Tokens of the largest micro-batch.
        prompt_width: The most tokens of a prompt.
        completion_width: The most tokens of a completion.
        group: Completions that share a prompt.
        max_rows: The most rows that are ever divided at once.
        overhead: See the function `overhead`; only the choice between the shapes depends on it.

    Raises:
        ValueError: If the longest row does not fit into the budget.
    """
    longest = prompt_width + completion_width
    rule = f"must hold a prompt and a completion, {prompt_width} + {completion_width} tokens"
    require(budget >= longest, "max_tokens_per_microbatch", budget, rule)
    # Tokens of the longest row, with its share of a prompt that the group has in common.
    longest_share = completion_width + prompt_width / group
    chosen = []
    row_widths = _row_widths(longest)
    for divisor, share in _SIZES if len(row_widths) > 1 else _SIZES_OF_ONE_WIDTH:
        tokens = budget // divisor
        if divisor > 1 and tokens < _FEWEST:
            break
        wide = sorted({min(width, tokens) for width in row_widths}, reverse=True)
        rows = [s * tokens / w for s, w in zip(_SLOTS[-len(wide) :], wide, strict=True)]
        rows[0] = max(rows[0], tokens / longest_share)
        arrays = tuple(
            (min(max_rows, math.ceil(share * n)), w) for n, w in zip(rows, wide, strict=True)
        )
        arrays = arrays[1:] or arrays if divisor == 2 else arrays
        chosen.append(Shape(tokens, arrays, prompt_width, overhead))
    return tuple(chosen)


def update_shapes(
    optim: OptimConfig, loss_type: str, *, group: int, overhead: float = 0.0, **widths: int
) -> tuple[Shape, ...]:
    """Returns all shapes that the micro-batches of an update can have.

    Args:
        optim: Sizes of optimizer batches and micro-batches.
        loss_type: For "bnpo" micro-batches have a fixed number of rows.
        group: See `shapes`.
        overhead: See `shapes`.
        **widths: `prompt_width` and `completion_width` of `shapes`.
    """
    micro_rows = optim.per_device_train_batch_size
    rows = micro_rows * optim.gradient_accumulation_steps
    if loss_type == "bnpo":
        # Rows of a prompt are neighbours in groups of this size.
        prompts = micro_rows // math.gcd(micro_rows, math.gcd(rows, group))
        return shapes_of_rows(micro_rows, prompts=prompts, **widths)
    budget, sharing = token_budget(optim, group=group, **widths), math.gcd(rows, group)
    return shapes(budget, group=sharing, max_rows=rows, overhead=overhead, **widths)


def token_budget(
    optim: OptimConfig, *, group: int, prompt_width: int, completion_width: int
) -> int:
    """Returns the most tokens of a micro-batch; arguments as for `shapes`.

    By default it is 8192, but at least the longest row, and at most all rows of an optimizer step: more tokens would
    not make matrix products faster. If two of the longest rows have a little more than 8192 tokens, the default is
    their size, so that one such row fills half a micro-batch.
    """
    if optim.max_tokens_per_microbatch is not None:
        return optim.max_tokens_per_microbatch
    rows = optim.per_device_train_batch_size * optim.gradient_accumulation_steps
    longest, prompts = prompt_width + completion_width, rows // math.gcd(rows, group)
    tokens = 2 * longest if _TOKENS < 2 * longest <= _TOKENS * 4 / 3 else max(_TOKENS, longest)
    return min(tokens, prompts * prompt_width + rows * completion_width)


def divide(rows: Rows, shapes: Sequence[Shape]) -> list[MicroBatch]:
    """Divides rows into micro-batches of the given shapes with little padding; long rows come first.

    A micro-batch begins with the longest row that is left and other rows of its prompt. Then come prompts
    whose rows all fit, then single rows. A micro-batch has the prompt of its rows once. The chosen shape
    has the most real tokens for its cost.

    Args:
        rows: Rows with tokens; if there are none, the result is one micro-batch without rows.
        shapes: The result of the function `shapes`.
    """
    spans = rows.lengths + rows.prompt_lengths
    # Rows by prompt, the longest first.
    groups: dict[int, list[int]] = {}
    for i in np.argsort(-rows.lengths, kind="stable").tolist():
        groups.setdefault(int(rows.prompts[i]), []).append(i)
    batches = []
    while groups:
        order = sorted(groups.values(), key=lambda group: -spans[group[0]])
        longest = spans[order[0][0]]
        fillings = [
            _fill(shape, order, rows, spans)
            for shape in shapes
            if min(shape.arrays[0][1], shape.tokens) >= longest
        ]
        best = max(fillings, key=lambda filling: filling.used / filling.shape.cost)
        batches.append(best.micro_batch())
        taken = {i for array in best.arrays for i in array}
        groups = {
            prompt: left
            for prompt, group in groups.items()
            if (left := [i for i in group if i not in taken])
        }
    if not batches:
        least = min(shapes, key=lambda shape: shape.cost)
        batches.append(MicroBatch(least, empty_rows(least.num_rows)))
    return batches


def divide_for(rows: Rows, shapes: Sequence[Shape], devices: int) -> list[MicroBatch]:
    """Divides rows as `divide` does, but with smaller micro-batches if large ones would leave some `devices` idle.

    It tries micro-batches of at most the whole budget of tokens, then a half, and so on; only rows that are too long
    for these get larger ones. It returns the first division in which no device exceeds its share of the work by more
    than 5%, else the one with the least work for the busiest device.
    """
    if devices == 1:
        return divide(rows, shapes)
    spans = rows.lengths + rows.prompt_lengths
    best, least = [], math.inf
    for most in sorted({shape.tokens for shape in shapes}, reverse=True):
        smaller = [shape for shape in shapes if shape.tokens <= most]
        fits = spans <= max(min(shape.arrays[0][1], shape.tokens) for shape in smaller)
        batches = divide(rows.take(~fits), shapes) if not fits.all() else []
        batches += divide(rows.take(fits), smaller) if fits.any() or not batches else []
        loads = np.bincount(
            assign(batches, devices), [batch.shape.cost for batch in batches], minlength=devices
        )
        if loads.max() < least:
            best, least = batches, loads.max()
        if least <= _EVEN * loads.mean():
            break
    return best


def sets_of_one_shape(
    batches: Sequence[MicroBatch], width: int
) -> list[tuple[tuple[int, ...], list[MicroBatch]]]:
    """Groups micro-batches of equal shape into sets of `width`, and returns each with the indices of its members.

    Incomplete sets are filled up with micro-batches without rows, which have no index.
    """
    if width == 1:
        return [((number,), [batch]) for number, batch in enumerate(batches)]
    by_shape: dict[Shape, list[int]] = {}
    for number, batch in enumerate(batches):
        by_shape.setdefault(batch.shape, []).append(number)
    sets = []
    for shape, of_shape in by_shape.items():
        for numbers in itertools.batched(of_shape, width):
            chosen = [batches[number] for number in numbers]
            empty = MicroBatch(shape, empty_rows(len(chosen[0].rows.numbers)))
            sets.append((numbers, chosen + [empty] * (width - len(chosen))))
    return sets


def assign(batches: Sequence[MicroBatch], devices: int) -> list[int]:
    """Distributes micro-batches, the costliest first, to the device with the least work so far; returns its index."""
    loads, owners = np.zeros(devices), [0] * len(batches)
    for number in sorted(range(len(batches)), key=lambda n: -batches[n].shape.cost):
        owners[number] = int(np.argmin(loads))
        loads[owners[number]] += batches[number].shape.cost
    return owners


def by_rows(rows: Rows, micro_rows: int, shapes: Sequence[Shape]) -> list[MicroBatch]:
    """Divides rows, in order, into micro-batches of `micro_rows` rows; the last one may have fewer.

    Each has the cheapest shape of `shapes_of_rows` that fits.
    """
    batches = []
    for start in range(0, len(rows.numbers), micro_rows):
        slots = np.arange(start, start + micro_rows)
        some = rows.in_slots(np.where(slots < len(rows.numbers), slots, -1))
        longest = np.max(some.lengths + some.prompt_lengths)
        fitting = [s for s in shapes if s.tokens >= some.tokens and s.arrays[0][1] >= longest]
        least = min(fitting, key=lambda shape: shape.cost)
        batches.append(MicroBatch(least, some))
    return batches


def shapes_of_rows(
    micro_rows: int, *, prompts: int, prompt_width: int, completion_width: int
) -> tuple[Shape, ...]:
    """Returns all shapes of micro-batches with a given number of rows and prompts: at most three.

    Their rows have one of three widths. Their number of tokens is that of the longest rows, a half or a quarter of it.
    """
    budget = prompts * prompt_width + micro_rows * completion_width
    widths = enumerate(_row_widths(prompt_width + completion_width))
    return tuple(
        Shape(budget >> half, ((micro_rows, width),), prompt_width)
        for half, width in widths
        if not half or budget >> half >= _FEWEST
    )


class _Filling:
    """A micro-batch that is being filled."""

    def __init__(self, shape: Shape, rows: Rows, spans: np.ndarray):
        self.shape, self.rows, self.spans = shape, rows, spans
        self.arrays: list[list[int]] = [[] for _ in shape.arrays]
        self.prompts: set[int] = set()
        self.used = 0

    def take(self, chosen: Sequence[int]) -> bool:
        """Adds rows of one prompt if all of them fit, and returns whether they did."""
        first = chosen[0]
        prompt = int(self.rows.prompts[first])
        shared = 0 if prompt in self.prompts else int(self.rows.prompt_lengths[first])
        tokens = shared + int(self.rows.lengths[list(chosen)].sum())
        if self.used + tokens > self.shape.tokens:
            return False
        free = [n - len(a) for (n, _), a in zip(self.shape.arrays, self.arrays, strict=True)]
        numbers = []
        for i in chosen:
            wide = [
                n for n, (_, w) in enumerate(self.shape.arrays) if free[n] and w >= self.spans[i]
            ]
            if not wide:
                return False
            free[wide[-1]] -= 1  # the narrowest, which comes last
            numbers.append(wide[-1])
        for i, number in zip(chosen, numbers, strict=True):
            self.arrays[number].append(i)
        self.prompts.add(prompt)
        self.used += tokens
        return True

    def micro_batch(self) -> MicroBatch:
        """Returns the micro-batch, with the rows in the order of its attention rows."""
        slots = []
        for (count, _), array in zip(self.shape.arrays, self.arrays, strict=True):
            slots += array + [-1] * (count - len(array))
        return MicroBatch(self.shape, self.rows.in_slots(np.array(slots)))


def _fill(shape: Shape, groups: list[list[int]], rows: Rows, spans: np.ndarray) -> _Filling:
    """Fills a micro-batch of a shape with rows by prompt, longest first."""
    filling, (first, *others) = _Filling(shape, rows, spans), groups
    for i in first:
        filling.take([i])
    for group in [group for group in others if not filling.take(group)]:
        for i in group:
            filling.take([i])
    return filling


def _row_widths(longest: int) -> list[int]:
    """Returns up to three widths of rows, widest first: a geometric sequence from the longest, rounded up to 64."""
    low, high = _NARROWEST
    narrowest = min(longest, max(low, min(high, longest // 8)))
    middle = math.sqrt(longest * narrowest)
    rounded = {min(longest, math.ceil(width / 64) * 64) for width in (middle, narrowest)}
    return sorted({longest, *rounded}, reverse=True)
