"""How the kernel of `decode` divides its work, and which problems it supports.

Functions that depend on the device take it as an argument; None means the current device.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import runtime
from pallas_kernels.decode_attention.plans import PAGE
from pallas_kernels.runtime import Device

# Queries of a group are padded to half the rows that a warp has, or to all of them.
GROUP = 16
# Query heads per key head, by the head's size. With more than eight of size 64 the kernel missed the reference on an
# H100 wherever a piece had several pages, though it meets it when interpreted; those of 128 met it in all cases.
MOST_QUERIES = {64: 8, 128: GROUP}
HEAD_SIZES = tuple(MOST_QUERIES)
# Parts that are read at a time when a unit is summed, by number of teams: as many as registers allow with 8 rows.
BATCH = {1: 16, 2: 16, 3: 8, 4: 8}


@dataclasses.dataclass(frozen=True)
class Config:
    """How a problem is divided.

    Attributes:
      pages: most pages of a piece, unless the unit has the largest number of parts.
      stages: pages that are loading or loaded for each team.
      parts: most pieces of a unit. A unit is a row's queries of one key head.
      blocks: number of blocks; the pieces are divided among their teams.
      teams: teams per block; 1 to 4.
    """

    pages: int
    stages: int
    parts: int
    blocks: int
    teams: int = 1

    def __post_init__(self):
        if self.pages < 1:
            raise ValueError(f"pages must be 1 or more; got {self.pages}")
        if self.stages < 1:
            raise ValueError(f"stages must be 1 or more; got {self.stages}")
        if self.parts < 1:
            raise ValueError(f"parts must be 1 or more; got {self.parts}")
        if self.blocks < 1:
            raise ValueError(f"blocks must be 1 or more; got {self.blocks}")
        if self.teams not in BATCH:
            raise ValueError(f"teams must be 1 to {max(BATCH)}; got {self.teams}")


def supports_heads(heads: int, key_heads: int, head_size: int) -> str | None:
    """Why this kernel cannot attend with a model's heads, or None.

    Args:
      heads: H, query heads.
      key_heads: J, key/value heads.
      head_size: C, channels per head.
    """
    if head_size not in HEAD_SIZES:
        return f"needs a head size of 64 or 128; got {head_size}"
    if (group := heads // key_heads) > (most := MOST_QUERIES[head_size]):
        return f"needs at most {most} query heads per key head of size {head_size}; got {group}"
    return None


def supports_cache(shape: tuple[int, ...], dtype: DTypeLike) -> str | None:
    """Why this kernel cannot read a cache, or None."""
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
    device: Device | None = None,
) -> str | None:
    """Why this kernel cannot run a problem with this configuration, or None."""
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
    if (used := shared_bytes(group, head_size, config)) > (most := most_shared_bytes(device)):
        return f"needs {used} bytes of shared memory of {most}"
    return None


def pick_config(
    rows: int, key_heads: int, head_size: int, group: int = 8, device: Device | None = None
) -> Config:
    """Picks as many teams as registers allow, and longer pieces where there are many units.

    Configurations for groups of another size differ in stages alone, on which no plan depends.

    Args:
      rows: B.
      key_heads: J.
      head_size: C.
      group: H / J.
      device: the device that runs it.
    """
    device = device or runtime.device()
    units = rows * key_heads
    # With so few units most of the time goes into summing parts, which more registers per team speed up.
    teams = 2 if units <= 8 else 4 if head_size <= 64 else 3
    # Of 2, 3, 4 and 6 the fastest on an H200 for 1, 8, 16 and 128 rows of 4 key heads; for 64, where 6 is 5 %
    # faster for rows of unlike length and 4 is 4 % faster for others, the latter.
    pages = 2 if units <= 32 else 3 if units <= 96 else 4 if units <= 384 else 6
    stages, parts = max(1, 768 // head_size // teams), -(-64 // pages)
    config = Config(pages, stages, parts, device.processors, teams)
    while config.stages > 1 and shared_bytes(group, head_size, config) > most_shared_bytes(device):
        config = dataclasses.replace(config, stages=config.stages - 1)
    return config


def most_shared_bytes(device: Device | None = None) -> int:
    """Bytes of shared memory that a block may use, less what barriers and alignment take."""
    return (device or runtime.device()).shared_bytes - 2048


def shared_bytes(group: int, head_size: int, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    pages = config.stages * 2 * PAGE * head_size * 2
    inputs = 2 * (input_rows(group) * row_columns(head_size) * 2 + 2 * 64 * 4)
    return config.teams * (pages + inputs + 4)


def row_columns(head_size: int) -> int:
    """Columns of a head's row in shared memory: at least 128, so that a half turned row is a slice."""
    return max(head_size, 128)


def group_rows(group: int) -> int:
    """Rows that a group's queries are padded to."""
    return 8 if group <= 8 else GROUP


def input_rows(group: int) -> int:
    """Rows of a unit's queries, key and value in shared memory; the first `group_rows` are read as queries."""
    return max(group + 2, group_rows(group))
