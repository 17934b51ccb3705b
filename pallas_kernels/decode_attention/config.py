"""The configuration of the Hopper decode attention kernel, and the problems that it supports.

`plans.py` explains units and parts.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.decode_attention.plans import PAGE

# The most query heads per key head. One warp holds 16 rows of a `wgmma` operand; queries are padded to 8 or 16 rows.
GROUP = 16
# The most rows that read a shared page together: each has 8 of the 64 rows of a `wgmma` operand.
SIBLINGS = 8
# Rows read the pages of a common prompt together if there are at least so many pages (512 tokens). On an H200 this
# decodes 16 prompts of 1024 tokens with 8 rows each 13 % faster. With 256 tokens it makes a layer's attention 1 us
# slower.
LEAST_SHARED = 8
HEAD_SIZES = 64, 128
# How many parts of a unit are loaded at once when they are summed, by number of warpgroups in a block: as many as fit
# into registers if queries are padded to 8 rows.
BATCH = {1: 16, 2: 16, 3: 8, 4: 8}


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel divides a problem.

    Attributes:
      pages: most pages in a part. Parts are longer if a unit would otherwise have more than `parts` of them.
      stages: pipeline stages of each warpgroup; a stage is a slot in shared memory for one page of keys and values.
      parts: most parts in a unit, which is one row and one key head; see `plans.Split`.
      blocks: number of blocks. The parts are divided among the warpgroups of all blocks.
      warpgroups: number of warpgroups per block, 1 to 4.
    """

    pages: int
    stages: int
    parts: int
    blocks: int
    warpgroups: int = 1

    def __post_init__(self):
        for name in ("pages", "stages", "parts", "blocks"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be 1 or more; got {value}")
        if self.warpgroups not in BATCH:
            raise ValueError(f"warpgroups must be 1 to {max(BATCH)}; got {self.warpgroups}")


def supports_heads(heads: int, key_heads: int, head_size: int) -> str | None:
    """Returns why this kernel does not support H query heads and J key/value heads of C channels, or None."""
    if head_size not in HEAD_SIZES:
        return f"needs a head size of 64 or 128; got {head_size}"
    if (group := heads // key_heads) > GROUP:
        return f"needs at most {GROUP} query heads per key head; got {group}"
    return None


def supports_sharing(heads: int, key_heads: int) -> str | None:
    """Returns why rows of H query heads and J key/value heads cannot read shared pages together, or None."""
    if (group := heads // key_heads) > 64 // SIBLINGS:
        return f"rows that share pages need at most {64 // SIBLINGS} query heads per key head; got {group}"
    return None


def supports_cache(shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Returns why this kernel cannot read a cache of this shape [L, N, J, S, C] and dtype, or None if it can."""
    *_, slots, head_size = shape
    if dtype != jnp.bfloat16:
        return f"needs keys and values in bfloat16; got {dtype}"
    if head_size not in HEAD_SIZES:
        return f"needs a head size of 64 or 128; got {head_size}"
    if slots != PAGE:
        return f"needs pages of {PAGE} slots; got {slots}"
    return None


def supports(
    qkv_shape: tuple[int, ...],
    dtype: DTypeLike,
    cache_shape: tuple[int, ...],
    cache_dtype: DTypeLike,
    config: Config,
) -> str | None:
    """Returns why this kernel cannot run a problem with this configuration, or None if it can.

    The arguments are shapes and dtypes of qkv [B, H + 2 J, C] and of the keys [L, N, J, S, C].
    """
    layers, pages, key_heads, slots, head_size = cache_shape
    group = qkv_shape[1] // key_heads - 2
    if reason := supports_cache(cache_shape, cache_dtype):
        return reason
    if dtype != jnp.bfloat16:
        return f"needs qkv in bfloat16; got {dtype}"
    if reason := supports_heads(group * key_heads, key_heads, head_size):
        return reason
    if layers * pages * key_heads * slots >= 2**31:
        return f"needs fewer than 2^31 rows of keys; got L * N * J * S of {cache_shape[:-1]}"
    if (used := shared_bytes(group, head_size, config)) > (most := most_shared_bytes()):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def pick_config(rows: int, key_heads: int, head_size: int, group: int = 8) -> Config:
    """Picks a configuration. More units get longer parts and, above 8 units, as many warpgroups as registers allow.

    `rows` is B, rows of the batch; `group` is H / J, query heads per key head. It only affects `stages`, which a plan
    does not depend on.
    """
    units = rows * key_heads
    # With at most 8 units, summing parts takes most of the time. It is faster with more registers per warpgroup.
    warpgroups = 2 if units <= 8 else 4 if head_size <= 64 else 3
    # The fastest of 2, 3, 4 and 6 on an H200 for 1, 8, 16 and 128 rows of 4 key heads. For 64 rows, 6 is 5 % faster
    # if lengths differ, and 4 is 4 % faster if they are equal; 4 is used.
    pages = 2 if units <= 32 else 3 if units <= 96 else 4 if units <= 384 else 6
    stages, parts = max(1, 768 // head_size // warpgroups), -(-64 // pages)
    config = Config(pages, stages, parts, runtime.device().processors, warpgroups)
    while config.stages > 1 and shared_bytes(group, head_size, config) > most_shared_bytes():
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def most_shared_bytes() -> int:
    """Returns the bytes of shared memory that a block may use for data; 2 KiB are kept for barriers and alignment."""
    return runtime.device().shared_bytes - 2048


def shared_bytes(group: int, head_size: int, config: Config) -> int:
    """Returns the bytes of shared memory that a block needs for data: pages, inputs and flags of all warpgroups."""
    pages = config.stages * 2 * PAGE * head_size * 2
    inputs = 2 * (input_rows(group) * row_columns(head_size) * 2 + 2 * 64 * 4)
    return config.warpgroups * (pages + inputs + 4 * SIBLINGS)


def row_columns(head_size: int) -> int:
    """Returns the columns that a head's row takes in shared memory.

    They are at least 128: a head of 64 is stored twice, so that the row shifted by half a head (for RoPE) is a slice.
    """
    return max(head_size, 128)


def group_rows(group: int) -> int:
    """Returns the number of rows, 8 or 16, to which a group's queries are padded."""
    return 8 if group <= 8 else GROUP


def input_rows(group: int) -> int:
    """Returns the rows of shared memory for a unit's queries, new key and new value.

    The first `group_rows` rows are read as queries, so there are at least as many.
    """
    return max(group + 2, group_rows(group))
