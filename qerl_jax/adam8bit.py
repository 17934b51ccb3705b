"""AdamW's moments in 8 bits, block by block: a quarter of their memory (arXiv:2110.02861).

A block of 256 values is stored as its largest magnitude, in float32, and a code of 8 bits for each
value: its place in a table of 256 numbers between -1 and 1 (0 and 1 for the second moment, which has
no sign) that lie close together near 0, so that small values keep their relative precision. A value
that is not 0 is never stored as a second moment of 0: under its root it would be divided by.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCK = 256
# Smaller leaves keep float32, as the paper's authors do: they save next to nothing.
SMALLEST = 4096


class Blocks(NamedTuple):
    """An array of any shape in blocks; its last block is filled up with zeros.

    Attributes:
        codes: uint8 [blocks, 256].
        scales: float32 [blocks], the largest magnitude of each.
    """

    codes: jax.Array
    scales: jax.Array


class Moments(NamedTuple):
    """State of the optimizer.

    Attributes:
        count: int32, steps done.
        mu: Mean of the gradient, a tree of `Blocks` and, for small leaves, arrays.
        nu: Mean of its square, likewise.
    """

    count: jax.Array
    mu: Any
    nu: Any


@functools.cache
def table(signed: bool) -> np.ndarray:
    """The 256 numbers that codes stand for, ascending, float32.

    Seven decades below 1; from one to the next finer one the numbers of a decade halve, each the
    middle of an equal part of [0.1, 1] times its power of ten. The sign takes one bit.
    """
    finest = 1 if signed else 2
    decades = []
    for decade in range(7):
        edges = np.linspace(0.1, 1, finest * 2**decade + 1)
        decades.append(10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2)
    numbers = np.concatenate(decades)
    values = [-numbers, numbers] if signed else [numbers]
    return np.sort(np.concatenate([*values, [0.0, 1.0]])).astype(np.float32)


def quantize(x: jax.Array, *, signed: bool) -> Blocks:
    """The nearest code of each value of a float32 array."""
    flat = x.reshape(-1)
    blocks = jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=1)
    unit = blocks / jnp.where(scales > 0, scales, 1.0)[:, None]
    numbers = table(signed)
    codes = jnp.searchsorted(jnp.asarray((numbers[1:] + numbers[:-1]) / 2), unit)
    if not signed:
        codes = jnp.maximum(codes, unit > 0)
    return Blocks(codes.astype(jnp.uint8), scales)


def dequantize(blocks: Blocks, shape: tuple[int, ...], *, signed: bool) -> jax.Array:
    """The float32 array of that shape."""
    values = jnp.asarray(table(signed))[blocks.codes] * blocks.scales[:, None]
    return values.reshape(-1)[: math.prod(shape)].reshape(shape)


def scale_by_adam_8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """`optax.scale_by_adam` whose moments rest in 8 bits between steps; leaves below 4096 values stay as they are.

    Each step's move is computed from the moments before they are rounded again.
    """

    def packed(leaf):
        return leaf.size >= SMALLEST

    def rest(tree, signed):
        return jax.tree.map(lambda x: quantize(x, signed=signed) if packed(x) else x, tree)

    def awake(tree, like, signed):
        return jax.tree.map(
            lambda x, m: dequantize(m, x.shape, signed=signed) if packed(x) else m, like, tree
        )

    def init(params):
        # Zeros of its own for each moment: a buffer that is there twice cannot be donated.
        mu, nu = (jax.tree.map(jnp.zeros_like, params) for _ in range(2))
        return Moments(jnp.int32(0), rest(mu, True), rest(nu, False))

    def update(grads, state, params=None):
        del params
        before = optax.ScaleByAdamState(
            state.count, awake(state.mu, grads, True), awake(state.nu, grads, False)
        )
        moves, after = optax.scale_by_adam(b1, b2, eps).update(grads, before)
        return moves, Moments(after.count, rest(after.mu, True), rest(after.nu, False))

    return optax.GradientTransformation(init, update)
