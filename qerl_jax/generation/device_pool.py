"""The pages of the KV cache on one or several devices: allocation, copies, and transfers to the host and back.

`page_pool` tracks which rows hold a page, and `scheduler` decides which pages move; this module moves their contents.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from qerl_jax.distributed import sharding
from qerl_jax.generation.scheduler import Move
from qerl_jax.model import kv_cache
from qerl_jax.model.transformer import Transformer

# The sharding of the pool [L, N, J, S, C] over devices that decode rows together: by KV heads.
BY_HEADS = PartitionSpec(None, None, sharding.GROUP)
# Number of pages that are copied to or from the host at a time.
_PIECE = 16


def allocate(
    model: Transformer, num_pages: int, page_size: int, device: jax.Device, where: Any
) -> tuple[jax.Array, jax.Array]:
    """Allocates the pool: keys and values, [L, N, J, S, C] each, filled with zeros.

    `device` is the first device of the pool, and `where` the same device; for several devices, it is the sharding of an
    array that all of them hold in full.
    """
    size = model.own_part.arch, num_pages, model.dtype, page_size
    if model.tensor == 1:
        with jax.default_device(device):  # kept short: jit lowers programs again under this context
            pool = kv_cache.pool(*size)
        return jax.device_put(pool, where)
    return _divided_pool(*size, model.tensor, NamedSharding(where.mesh, BY_HEADS))


@functools.partial(jax.jit, static_argnums=range(6))
def _divided_pool(arch, num_pages: int, dtype, page_size: int, count: int, places: NamedSharding):
    """Allocates the pools of several devices as one sharded array, each part on its device."""
    arch = dataclasses.replace(
        arch, num_heads=count * arch.num_heads, num_kv_heads=count * arch.num_kv_heads
    )
    pool = kv_cache.pool(arch, num_pages, dtype, page_size)
    return jax.lax.with_sharding_constraint(pool, places)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="pool")
def copied(pool, sources, targets, *, model: Transformer):
    """Copies pages of the pool, which is donated, in all layers: from `sources` int32 [n] to `targets` int32 [n].

    Entries without a copy are 0 in both arrays.
    """
    with_copies = lambda pool, sources, targets: tuple(
        part.at[:, targets].set(part[:, sources]) for part in pool
    )
    return _in_group(model, with_copies, 1)(pool, sources, targets)


@functools.partial(jax.jit, static_argnames="model")
def _read(pool, pages, *, model: Transformer):
    """Returns the contents of pages [n] in all layers: keys and values, [L, n, J, S, C] each."""
    contents = lambda pool, pages: tuple(part[:, pages] for part in pool)
    return _in_group(model, contents, 1)(pool, pages)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="pool")
def _write(pool, pages, contents, *, model: Transformer):
    """Writes contents to pages [n]: keys and values, [L, n, J, S, C] each; the pool is donated."""

    def written(pool, contents, pages):
        return tuple(part.at[:, pages].set(new) for part, new in zip(pool, contents, strict=True))

    return _in_group(model, written, 2)(pool, contents, pages)


def _in_group(model: Transformer, function, pools: int):
    """Makes a function of arrays on a group; its first `pools` arguments and its result are sharded like the pool."""
    how = {}
    if model.tensor > 1:
        how = {"places": dict.fromkeys(range(pools), BY_HEADS), "gives_own": BY_HEADS}
    return sharding.in_group(model.group, function, **how)


def taken(pool, pages: Sequence[int], model: Transformer) -> list[tuple[np.ndarray, ...]]:
    """Copies pages to the host, and waits until they are there.

    Returns for each `_PIECE` pages a NumPy array of keys and one of values, [L, _PIECE, J, S, C]. The last ones are
    padded with copies of page 0.
    """
    return [
        jax.device_get(_read(pool, _padded(piece), model=model))
        for piece in itertools.batched(pages, _PIECE)
    ]


def returned(pool, move: Move, model: Transformer):
    """Writes contents that `taken` returned to their pages, except those that are skipped; the pool is donated."""
    pages = [0] * move.skipped + move.pages
    for piece, contents in zip(itertools.batched(pages, _PIECE), move.contents, strict=True):
        if any(piece):
            pool = _write(pool, _padded(piece), contents, model=model)
    return pool


def _padded(pages: Sequence[int]) -> np.ndarray:
    """Pads pages to int32 [_PIECE] with page 0, which is scratch."""
    return np.array([*pages, *[0] * (_PIECE - len(pages))], np.int32)
