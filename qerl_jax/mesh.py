"""The devices of a run, and what crosses between them.

Data parallel: each replica holds the whole policy on a device of its own, samples some of the rows, and computes some of
the micro-batches. Only sums of gradients cross, before the optimizer's step.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qerl_jax.checked import require
from qerl_jax.config import MeshConfig

# The axis of the mesh along which replicas stand.
_DATA = "data"


def places(cfg: MeshConfig, rows: int) -> int:
    """Devices that a run with so many rows in a rollout takes: as many as are asked for, or seen."""
    return min(len(jax.local_devices()), rows) if cfg.data is None else cfg.data


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Devices that each hold the whole policy.

    Attributes:
        devices: Two or more; none stands for the one device on which arrays happen to be, where nothing
            is moved.
    """

    devices: tuple[jax.Device, ...] = ()

    @classmethod
    def of(cls, cfg: MeshConfig, rows: int) -> Self:
        """The replicas that a config asks for.

        Args:
            cfg: The mesh.
            rows: Rows of a rollout; without a number of devices in the config, no more are taken.

        Raises:
            ConfigError: When this process does not see so many devices, or they are not alike.
        """
        seen, count = jax.local_devices(), places(cfg, rows)
        kinds = sorted({device.device_kind for device in seen[:count]})
        require(
            count <= len(seen),
            "mesh.data",
            cfg.data,
            f"this process sees {len(seen)} of them ({', '.join(kinds)}): ask for at most {len(seen)}, or "
            "leave it out for all",
        )
        rule = f"all must be of one kind, and these are {', '.join(kinds)}: choose by CUDA_VISIBLE_DEVICES"
        require(len(kinds) == 1, "mesh.data", count, rule)
        return cls(tuple(seen[:count]) if count > 1 else ())

    def __len__(self) -> int:
        return max(1, len(self.devices))

    def hold(self, tree: Any) -> Any:
        """The tree with each array on all devices; where one has it already, it is not copied there."""
        return jax.device_put(tree, self._sharding()) if self.devices else tree

    def each(self, tree: Any) -> tuple[Any, ...]:
        """The tree as each device holds it, without a copy."""
        if not self.devices:
            return (tree,)
        leaves, form = jax.tree.flatten(self.hold(tree))
        found = [{part.device: part.data for part in leaf.addressable_shards} for leaf in leaves]
        return tuple(
            jax.tree.unflatten(form, [parts[device] for parts in found]) for device in self.devices
        )

    def total(self, trees: Sequence[Any]) -> Any:
        """The sum of the trees, one of each device, held by all of them: an all-reduce in the arrays' own type."""
        if not self.devices:
            (tree,) = trees
            return tree
        whole = _all_reduce(self._mesh)(jax.tree.map(self._stacked, *trees))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), whole, trees[0])

    def side_by_side[Result](self, work: Callable[[int], Result]) -> list[Result]:
        """What `work` gives for the number of each device, called in a thread of its own for each.

        To launch a program on a GPU takes until most of it has run: one thread would make devices take turns.
        """
        if not self.devices:
            return [work(0)]
        with ThreadPoolExecutor(len(self.devices)) as threads:
            return list(threads.map(work, range(len(self.devices))))

    def compiling(
        self, device: jax.Device, *program: Hashable
    ) -> contextlib.AbstractContextManager:
        """Around a call of a program: lets one device after the other come to one that is new to it.

        The first compiles it, the others find it in JAX's cache of compiled programs (on a CPU each compiles it). What
        is compiled twice is not always the same program: XLA measures each time which algorithms are fastest, and
        they round differently.

        Args:
            device: Where it runs.
            *program: What tells it from others.
        """
        return _one_after_the_other(device, program) if self.devices else contextlib.nullcontext()

    def _stacked(self, *parts: jax.Array) -> jax.Array:
        """One array of which each device holds its own part; a number becomes an axis."""
        parts = [part.reshape(-1) if part.ndim == 0 else part for part in parts]
        first, *rest = parts[0].shape
        shape = (len(parts) * first, *rest)
        return jax.make_array_from_single_device_arrays(shape, self._sharding(_DATA), parts)

    def _sharding(self, *axes: str) -> NamedSharding:
        return NamedSharding(self._mesh, P(*axes))

    @property
    def _mesh(self) -> Mesh:
        return _mesh(self.devices)


_compiles, _compiled = threading.Lock(), set()


@contextlib.contextmanager
def _one_after_the_other(device: jax.Device, program: Hashable) -> Iterator[None]:
    if (device, program) in _compiled:
        yield
        return
    with _compiles:
        yield
    _compiled.add((device, program))


@functools.cache
def _mesh(devices: tuple[jax.Device, ...]) -> Mesh:
    return Mesh(np.array(devices), (_DATA,), axis_types=(jax.sharding.AxisType.Auto,))


@functools.cache
def _all_reduce(mesh: Mesh):
    def added(tree):
        return jax.tree.map(lambda x: jax.lax.psum(x, _DATA), tree)

    return jax.jit(jax.shard_map(added, mesh=mesh, in_specs=P(_DATA), out_specs=P()))
