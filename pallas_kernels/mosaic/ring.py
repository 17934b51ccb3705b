"""A ring of slots in shared memory, which bulk copies fill ahead of the readers."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """What items first, first + 1, ... , end - 1 go through, item `first` through slot 0.

    Attributes:
      stages: number of slots.
      copy: copy(item, slot, ...) starts the bulk copies of an item, which arrive at `full.at[slot]`.
      full: a barrier for each slot: an item is there.
      empty: a barrier for each slot: all readers have left it. None where readers synchronize otherwise.
      first: number of the first item.
      end: number after the last item; None where the caller of `fetch` checks it.
      which: indices of this ring's barriers where those of several rings lie together.
    """

    stages: int
    copy: Callable[..., None]
    full: jax.Ref
    empty: jax.Ref | None = None
    first: jax.Array | int = 0
    end: jax.Array | int | None = None
    which: tuple[jax.Array, ...] = ()

    def slot(self, item: jax.Array) -> jax.Array:
        """The slot of an item."""
        is_zero = isinstance(self.first, int) and self.first == 0
        return lax.rem(item if is_zero else item - self.first, self.stages)

    def fetch(self, item: jax.Array, *source: jax.Array) -> None:
        """Starts the copies of an item into its slot, which must have no more readers."""
        self.copy(item, self.slot(item), *source)

    def fill(self) -> None:
        """Fetches the first items, one for each slot."""
        for stage in range(self.stages):
            item = jnp.asarray(self.first + stage, jnp.int32)
            pl.when(item < self.end)(lambda item=item: self.fetch(item))

    def wait(self, slot: jax.Array) -> None:
        """Waits until the item of a slot is there."""
        plgpu.barrier_wait(self.full.at[*self.which, slot])

    def leave(self, slot: jax.Array) -> None:
        """Signals that this warpgroup no longer reads a slot."""
        plgpu.barrier_arrive(self.empty.at[*self.which, slot])

    def refill(self, slot: jax.Array, item: jax.Array) -> None:
        """Fetches an item into its slot once all readers have left it."""
        plgpu.barrier_wait(self.empty.at[*self.which, slot])
        self.fetch(item)
