"""8-bit AdamW: moments are stored in 8-bit blocks, with a quarter of the memory (arXiv:2110.02861).

A block of 256 values is stored as its largest magnitude, in float32, and an 8-bit code per value: its index
in a table of 256 numbers between -1 and 1 (between 0 and 1 for the second moment, which has no sign). The
numbers are dense near 0, so that small values keep their relative precision. A second moment that is not 0
is never stored as 0, since its root is a divisor.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BLOCK = 256
# Smaller leaves stay in float32, as in the paper: 8 bits would save almost nothing there.
SMALLEST = 4096
# Number of blocks that are dequantized at a time: 8 MiB in float32.
_AT_ONCE = 8192


class Blocks(NamedTuple):
    """An array of any shape, flattened and stored in blocks; the last block is padded with zeros.

    Attributes:
        codes: uint8 [blocks, 256], indices in `table`.
        scales: float32 [blocks], the largest magnitude of each block.
    """

    codes: jax.Array
    scales: jax.Array


@functools.cache
def table(signed: bool) -> np.ndarray:
    """Returns the 256 numbers that codes stand for, float32 [256], ascending.

    They cover seven decades below 1. Each decade has half as many numbers as the next larger one: the midpoints
    of equal parts of [0.1, 1], times a power of ten. Signed tables have half as many positive numbers.
    """
    finest = 1 if signed else 2
    parts = [np.linspace(0.1, 1, finest * 2**decade + 1) for decade in range(7)]
    decades = [10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2 for i, edges in enumerate(parts)]
    numbers = np.concatenate(decades)
    values = [-numbers, numbers] if signed else [numbers]
    return np.sort(np.concatenate([*values, [0.0, 1.0]])).astype(np.float32)


def quantize(x: jax.Array, *, signed: bool) -> Blocks:
    """Quantizes a float32 array: each value gets the code of the nearest number.

    Args:
        x: float32 array of any shape.
        signed: Whether values have a sign; if not, positive values never get the code of 0.
    """
    blocks = _blocks(x)
    scales = jnp.max(jnp.abs(blocks), axis=1)
    unit = blocks / jnp.where(scales > 0, scales, 1.0)[:, None]
    numbers = table(signed)
    codes = jnp.searchsorted(jnp.asarray((numbers[1:] + numbers[:-1]) / 2), unit)
    if not signed:
        codes = jnp.maximum(codes, unit > 0)
    return Blocks(codes.astype(jnp.uint8), scales)


def dequantize(blocks: Blocks, shape: tuple[int, ...], *, signed: bool) -> jax.Array:
    """Returns the float32 array of a shape from its blocks; `signed` as for `quantize`."""
    values = jnp.asarray(table(signed))[blocks.codes] * blocks.scales[:, None]
    return values.reshape(-1)[: math.prod(shape)].reshape(shape)


def scale_by_adam_8bit(b1: float, b2: float, eps: float) -> optax.GradientTransformation:
    """Returns `optax.scale_by_adam` with moments stored in 8 bits; leaves below 4096 values keep float32.

    Each step's update is computed from the moments before they are rounded again. Blocks are dequantized in chunks
    of 8192, so that no moment is ever held completely in float32; only the update of a leaf is. The state is that of
    `optax.scale_by_adam`, with `Blocks` for the leaves of its moments.
    """
    adam = optax.scale_by_adam(b1, b2, eps)

    def init(params):
        # Each moment gets its own zeros, since a buffer that is used twice cannot be donated.
        mu, nu = (
            jax.tree.map(
                lambda p, signed=signed: (
                    _zeros(p.size, signed=signed) if p.size >= SMALLEST else jnp.zeros_like(p)
                ),
                params,
            )
            for signed in (True, False)
        )
        return optax.ScaleByAdamState(jnp.int32(0), mu, nu)

    def update(grads, state, params=None):
        def small(grad, mu, nu):
            moves, new = adam.update(grad, optax.ScaleByAdamState(state.count, mu, nu))
            return moves, new.mu, new.nu

        def of_blocks(grad, mu, nu):
            mu = dequantize(mu, grad.shape, signed=True)
            nu = dequantize(nu, grad.shape, signed=False)
            moves, mu, nu = small(grad, mu, nu)
            return moves, quantize(mu, signed=True), quantize(nu, signed=False)

        def large(grad, mu, nu):
            moves, mu, nu = _in_chunks(of_blocks, _blocks(grad), mu, nu)
            return moves.reshape(-1)[: grad.size].reshape(grad.shape), mu, nu

        leaves, tree = jax.tree.flatten(grads)
        of_moments = (tree.flatten_up_to(moment) for moment in (state.mu, state.nu))
        done = [
            (large if grad.size >= SMALLEST else small)(grad, *moments)
            for grad, *moments in zip(leaves, *of_moments, strict=True)
        ]
        moves, mu, nu = (tree.unflatten(column) for column in zip(*done, strict=True))
        return moves, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(init, update)


def _zeros(size: int, *, signed: bool) -> Blocks:
    blocks = -(-size // BLOCK)
    (code,) = np.flatnonzero(table(signed) == 0)
    return Blocks(jnp.full((blocks, BLOCK), code, jnp.uint8), jnp.zeros(blocks, jnp.float32))


def _blocks(x: jax.Array) -> jax.Array:
    """Reshapes an array to [blocks, 256], padded with zeros."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _in_chunks(function, *trees):
    """Applies a function to `_AT_ONCE` rows of the trees at a time; its results replace those rows."""

    def chunk(start, size, trees):
        taken = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, size), trees)
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0),
            trees,
            function(*taken),
        )

    whole, rest = divmod(len(jax.tree.leaves(trees)[0]), _AT_ONCE)
    if whole:
        trees = jax.lax.fori_loop(0, whole, lambda i, t: chunk(i * _AT_ONCE, _AT_ONCE, t), trees)
    return chunk(whole * _AT_ONCE, rest, trees) if rest else trees
