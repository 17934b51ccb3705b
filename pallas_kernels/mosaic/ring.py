"""A ring buffer of pipeline stages (slots) in shared memory, which bulk copies fill ahead of the readers."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Ring:
    """A ring buffer for items first, first + 1, ..., end - 1. Item i goes to slot (i - first) % stages.

    Attributes:
      stages: number of slots.
      copy: copy(item, slot, ...) starts the bulk copies of an item, which arrive at the slot's barrier in `full`.
      full: a barrier for each slot, complete when the slot's item has arrived.
      empty: a barrier for each slot, complete when all readers have left the slot. None if readers synchronize
        in another way; then `leave` and `refill` must not be called.
      first: index of the first item.
      end: index after the last item; None if the caller of `fetch` checks it.
      which: leading indices of this ring's barriers in `full` and `empty`, which several rings may share.
    """

    stages: int
    copy: Callable[..., None]
    full: jax.Ref
    empty: jax.Ref | None = None
    first: jax.Array | int = 0
    end: jax.Array | int | None = None
    which: tuple[jax.Array, ...] = ()

    def slot(self, item: jax.Array) -> jax.Array:
        """Returns the slot of an item."""
        is_zero = isinstance(self.first, int) and self.first == 0
        return lax.rem(item if is_zero else item - self.first, self.stages)

    def fetch(self, item: jax.Array, *source: jax.Array) -> None:
        """Starts copying an item into its slot. The slot must have no readers."""
        self.copy(item, self.slot(item), *source)

    def fill(self) -> None:
        """Starts copying the first items, one into each slot."""
        for stage in range(self.stages):
            item = jnp.asarray(self.first + stage, jnp.int32)
            pl.when(item < self.end)(lambda item=item: self.fetch(item))

    def wait(self, slot: jax.Array) -> None:
        """Waits until a slot's item has arrived."""
        plgpu.barrier_wait(self.full.at[*self.which, slot])

    def leave(self, slot: jax.Array) -> None:
        """Signals that this warpgroup no longer reads a slot."""
        plgpu.barrier_arrive(self.empty.at[*self.which, slot])

    def refill(self, slot: jax.Array, item: jax.Array) -> None:
        """Starts copying an item into its slot once all readers have left the slot."""
        plgpu.barrier_wait(self.empty.at[*self.which, slot])
        self.fetch(item)
