"""AdamW's moments in 8 bits, block by block: a quarter of their memory (arXiv:2110.02861).

A block of 256 values is stored as its largest magnitude, in float32, and a code of 8 bits for each
value: its place in a table of 256 numbers between -1 and 1 (0 and 1 for the second moment, which has
no sign) that lie close together near 0, so that small values keep their relative precision. A second
moment that is not 0 is never stored as 0, since its root is a divisor.
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
# Blocks that are dequantized at a time: 8 MiB in float32.
_AT_ONCE = 8192


class Blocks(NamedTuple):
    """An array of any shape, stored in blocks; zeros fill up the last block.

    Attributes:
        codes: uint8 [blocks, 256].
        scales: float32 [blocks], the largest magnitude of each.
    """

    codes: jax.Array
    scales: jax.Array


@functools.cache
def table(signed: bool) -> np.ndarray:
    """The 256 numbers that codes stand for, ascending, float32.

    Seven decades below 1; from one to the next finer one the numbers of a decade halve, each the
    middle of an equal part of [0.1, 1] times its power of ten. The sign takes one bit.
    """
    finest = 1 if signed else 2
    edges = [np.linspace(0.1, 1, finest * 2**decade + 1) for decade in range(7)]
    decades = [10.0 ** (i - 6) * (each[:-1] + each[1:]) / 2 for i, each in enumerate(edges)]
    numbers = np.concatenate(decades)
    values = [-numbers, numbers] if signed else [numbers]
    return np.sort(np.concatenate([*values, [0.0, 1.0]])).astype(np.float32)


def quantize(x: jax.Array, *, signed: bool) -> Blocks:
    """The nearest code of each value of a float32 array."""
    blocks = _blocks(x)
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
    """`optax.scale_by_adam` with moments stored in 8 bits; leaves below 4096 values keep float32.

    Each step's update is computed from the moments before they are rounded again. Some thousands of
    blocks are dequantized at a time, so that no whole moment is ever held in float32; only the
    update of a leaf is. The state is that of `optax.scale_by_adam`, with `Blocks` for the leaves of its moments.
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
        of_moments = (tree.flatten_up_to(each) for each in (state.mu, state.nu))
        done = [
            (large if grad.size >= SMALLEST else small)(grad, *moments)
            for grad, *moments in zip(leaves, *of_moments, strict=True)
        ]
        moves, mu, nu = (tree.unflatten(each) for each in zip(*done, strict=True))
        return moves, optax.ScaleByAdamState(optax.safe_increment(state.count), mu, nu)

    return optax.GradientTransformation(init, update)


def _zeros(size: int, *, signed: bool) -> Blocks:
    blocks = -(-size // BLOCK)
    (code,) = np.flatnonzero(table(signed) == 0)
    return Blocks(jnp.full((blocks, BLOCK), code, jnp.uint8), jnp.zeros(blocks, jnp.float32))


def _blocks(x: jax.Array) -> jax.Array:
    """[blocks, 256], filled up with zeros."""
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


def _in_chunks(function, *trees):
    """function(*trees) on `_AT_ONCE` rows at a time; its results replace the arguments."""

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
