"""The operations that the kernel for many rows (`prefill`) computes before a tile leaves the registers."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Epilogue:
    """The operations after a product of M rows: LoRA with at most 64 ranks in each part of N, norm, bias.

    A part of N is one of the linear layers that are joined along N, such as q, k and v.

    Attributes:
      u: bfloat16 [M, 64 * parts], x A of each part, padded with zeros to 64 ranks.
      b: bfloat16 [N, 64], B^T times alpha / R; each row has the ranks of its own part, then zeros. Its rows are in
        the order of the rows of `HopperNVFP4.words`.
      unit: float32 [M], 1 / RMS of each row, from the norm before the linear.
      bias: float32 [N] in the same order as b, or None.
      sizes: rows of W in each part.
    """

    u: jax.Array
    b: jax.Array
    unit: jax.Array
    bias: jax.Array | None
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
