"""What a packed number format is: its arrays, and the functions that the rest of the project calls.

A format's module defines its arithmetic and ends with its `NumberFormat`, which `registry` lists.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

type Axis = Literal["rows", "columns"]
ScaleRounding = Literal["nearest", "floor"]


class PackedTensor:
    """The arrays of an [N, K] weight of y = x W^T in a number format, or of a stack of such weights.

    Attributes:
      shape: (N, K) of one matrix, static. It stays valid when leading axes of the arrays are sliced, as `lax.scan`
        and `vmap` do with stacked layers.
    """

    shape: tuple[int, int]

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes. They may also be `jax.ShapeDtypeStruct`."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))


@dataclasses.dataclass(frozen=True)
class Options:
    """Choices that some formats offer; the others ignore them.

    Attributes:
      scale_rounding: how MXFP4 rounds its scales; see `mxfp4.quantize`.
      double_quant: whether NF4's scales are quantized too, as in QLoRA.
    """

    scale_rounding: ScaleRounding = "nearest"
    double_quant: bool = True


DEFAULT_OPTIONS = Options()


@dataclasses.dataclass(frozen=True)
class Tiling:
    """How an array may be divided along the rows, or along the columns, of its matrix.

    Attributes:
      axis: the axis of the array that runs along the rows or columns.
      size: number of rows or columns that must stay together.
      entries: number of array entries along `axis` that hold one tile.
    """

    axis: int
    size: int = 1
    entries: int = 1


@dataclasses.dataclass(frozen=True, eq=False)
class NumberFormat:
    """One packed format; most attributes are functions.

    Attributes:
      name: its name in `model.weights`.
      tensor: the class of its packed weights.
      multiple: K must be a multiple of this.
      group: number of consecutive entries that share a scale.
      grid: values of the codes, in ascending order.
      quantize: packs weights [N_i, K] that read the same input: rounds to nearest, with scales from the largest entry
        of each block, and one global scale for all if the format has global scales.
      search: like `quantize`, but with the scale that gives each block the smallest error. Arguments: the weights, the
        `moments` that weight the errors or None, packed weights whose scales are tried too or None, and the options.
      recode: rounds a weight to nearest with the scales of a packed weight of the same shape.
      steps: returns the value of one code unit at each entry of a packed weight, float32 [..., N, K].
      dequantize: decodes a packed weight to [..., N, K] in a given dtype.
      fuse: joins packed weights along N. With `shared`, the caller guarantees that all have one global scale.
      random: makes a random packed weight from a key and its shape (..., N, K).
      tilings: how each array may be divided along the rows and along the columns of the matrix.
      by_rows: returns a packed weight whose arrays are laid out as `tilings` says; differs from its argument if the
        format stores a matrix as one vector.
      from_rows: inverts `by_rows`.
      is_searched: whether a search pays off even if no inputs are known; see docs/quantization.md.
      options: the choices of `Options`.
    """

    name: str
    tensor: type[PackedTensor]
    multiple: int
    group: int
    grid: np.ndarray
    quantize: Callable[[Sequence[jax.Array], Options], list[Any]]
    search: Callable[..., list[Any]]
    recode: Callable[[jax.Array, Any], Any]
    steps: Callable[[Any], jax.Array]
    dequantize: Callable[[Any, DTypeLike], jax.Array]
    fuse: Callable[..., Any]
    random: Callable[[jax.Array, Sequence[int]], Any]
    tilings: Mapping[Axis, Mapping[str, Tiling]]
    by_rows: Callable[[Any], Any] = lambda t: t
    from_rows: Callable[[Any], Any] = lambda t: t
    is_searched: bool = False
    options: Options = DEFAULT_OPTIONS

    @property
    def has_global_scale(self) -> bool:
        """Whether a packed weight has a global scale besides those of its blocks."""
        return "global_scale" in self.tensor.__dataclass_fields__

    def tile(self, axis: Axis) -> int:
        """Returns the number of rows or columns that must stay together when a weight is divided."""
        return math.lcm(*(tiling.size for tiling in self.tilings[axis].values()))

    def pack(
        self,
        parts: Sequence[jax.Array],
        scales: Literal["auto", "search", "maximum"] = "maximum",
        moments: jax.Array | None = None,
        like: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Packs weights that read the same input; compiled.

        Args:
          parts: the weights, [N_i, K] each.
          scales: how block scales are chosen. "maximum" takes them from the largest entry of each block, and the bytes
            equal those of the reference libraries; "search" takes those with the smallest error; "auto" takes the
            choice that suits the format.
          moments: the result of `moments` for the Gram matrix of the inputs. With it, a search minimizes the error of
            each block's contribution to the output, without it the error of the weights.
          like: packed weights of these shapes that may be close to the new ones. A search tries their scales too, so
            that unchanged weights keep their codes.

        Returns:
          The packed weights, in order.
        """
        pays = self.is_searched or moments is not None
        if scales == "search" or (scales == "auto" and pays):
            return self._searched(parts, moments, like)
        return self._nearest(parts)

    @functools.partial(jax.jit, static_argnums=0)
    def _nearest(self, parts: Sequence[jax.Array]) -> list[Any]:
        return self.quantize(parts, self.options)

    @functools.partial(jax.jit, static_argnums=0)
    def _searched(self, parts, moments, like) -> list[Any]:
        return self.search(parts, moments, like, self.options)

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def unpack(self, t: Any, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Dequantizes a packed weight to [..., N, K] in `dtype`; compiled."""
        return self.dequantize(t, dtype)

    def moments(self, gram: jax.Array) -> jax.Array | None:
        """Returns the diagonal blocks of a Gram matrix, one for each scale block of a row.

        Args:
          gram: float32 [K, K], or its diagonal [K].

        Returns:
          float32 [K / group, group, group]; None if K is not a multiple of the group, so that scale blocks cross the
          ends of rows.
        """
        blocks, remainder = divmod(len(gram), self.group)
        if remainder:
            return None
        if gram.ndim == 1:
            return gram.reshape(blocks, self.group, 1) * jnp.eye(self.group, dtype=jnp.float32)
        index = jnp.arange(blocks)
        return gram.reshape(blocks, self.group, blocks, self.group)[index, :, index]
