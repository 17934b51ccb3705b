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
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qerl_jax.checked import require
from qerl_jax.config import MeshConfig
from qerl_jax.hosts import HostLost, Hosts

# The axis of the mesh along which replicas stand.
_DATA = "data"


def places(cfg: MeshConfig, rows: int) -> int:
    """Devices that a run with so many rows in a rollout takes on all hosts: as many as are asked for, or seen."""
    if cfg.data is not None:
        return cfg.data
    # Each host sees as many as this one: a run in which they differ is refused.
    return min(len(jax.local_devices()), rows // (count := Hosts.all().count)) * count


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Devices that each hold the whole policy, on one host or on several.

    Places are the numbers of the devices among those of all hosts; each host has as many of them.

    Attributes:
        devices: Those of this process, one at least; none stands for the one device of a run on which arrays
            happen to be, where nothing is moved.
        hosts: The processes of the run.
    """

    devices: tuple[jax.Device, ...] = ()
    hosts: Hosts = Hosts()

    @classmethod
    def of(cls, cfg: MeshConfig, rows: int) -> Self:
        """The replicas that a config asks for, on all hosts that have joined.

        Args:
            cfg: The mesh.
            rows: Rows of a rollout; without a number of devices in the config, no more are taken.

        Raises:
            ConfigError: When this process does not see its share of the devices, or they are not alike.
        """
        seen, hosts = jax.local_devices(), Hosts.all()
        rule = f"a run on {hosts.count} hosts needs as many rows in a rollout at least"
        require(rows >= hosts.count, "rollout.generation_batch_size", rows, rule)
        total = places(cfg, rows)
        rule = f"must be a multiple of the number of processes, {hosts.count}"
        require(total % hosts.count == 0, "mesh.data", total, rule)
        count = total // hosts.count
        kinds = sorted({device.device_kind for device in seen[:count]})
        most = len(seen) * hosts.count
        of_all = f", and all {hosts.count} together {most}" if hosts.count > 1 else ""
        require(
            count <= len(seen),
            "mesh.data",
            cfg.data,
            f"this process sees {len(seen)} of them ({', '.join(kinds)}){of_all}: ask for at most {most}, or "
            "leave it out for all",
        )
        rule = f"all must be of one kind, and these are {', '.join(kinds)}: choose by CUDA_VISIBLE_DEVICES"
        require(len(kinds) == 1, "mesh.data", count, rule)
        return cls(tuple(seen[:count]) if total > 1 else (), hosts)

    def __len__(self) -> int:
        """How many devices the run has on all hosts."""
        return max(1, len(self.devices)) * self.hosts.count

    @property
    def own(self) -> range:
        """The places of this process's devices."""
        count = max(1, len(self.devices))
        return range(self.hosts.index * count, (self.hosts.index + 1) * count)

    def hold(self, tree: Any) -> Any:
        """The tree with each array on all devices of this host; where one has it already, it is not copied there."""
        return jax.device_put(tree, self._sharding()) if self.devices else tree

    def each(self, tree: Any) -> tuple[Any, ...]:
        """The tree as each device of this host holds it, without a copy."""
        if not self.devices:
            return (tree,)
        leaves, form = jax.tree.flatten(self.hold(tree))
        found = [{part.device: part.data for part in leaf.addressable_shards} for leaf in leaves]
        return tuple(
            jax.tree.unflatten(form, [parts[device] for parts in found]) for device in self.devices
        )

    def total(self, trees: Sequence[Any]) -> Any:
        """The sum of the trees, one of each device, held by all of them: an all-reduce in the arrays' own type.

        Args:
            trees: Those of this host's devices; all hosts must come here.

        Raises:
            HostLost: When another host does not answer.
        """
        if not self.devices:
            (tree,) = trees
            return tree
        stacked = jax.tree.map(self._stacked, *trees)
        if self.hosts.count == 1:
            whole = _all_reduce(self._whole_mesh)(stacked)
        else:
            whole = jax.tree.map(self._as_held, self._reduced(stacked))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), whole, trees[0])

    def of_first(self, tree: Any) -> Any:
        """The tree that the first process gives, held by the devices of all hosts.

        Args:
            tree: As this host holds it; that of another host than the first only tells shapes and types.
        """
        if self.hosts.count == 1:
            return tree
        zeros = jax.tree.map(jnp.zeros_like, tree)
        first, *others = self.each(zeros)
        return self.total([self.each(tree)[0] if self.hosts.leads else first, *others])

    def side_by_side[Result](self, work: Callable[[int], Result]) -> list[Result]:
        """What `work` gives for the number of each device of this host, called in a thread of its own for each.

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
        """One array of which each device of all hosts holds its own part; a number becomes an axis."""
        parts = [part.reshape(-1) if part.ndim == 0 else part for part in parts]
        first, *rest = parts[0].shape
        shape, sharding = (len(self) * first, *rest), NamedSharding(self._whole_mesh, P(_DATA))
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _reduced(self, stacked: Any) -> Any:
        """The sum over all hosts."""
        try:
            return jax.block_until_ready(_all_reduce(self._whole_mesh)(stacked))
        except Exception as error:  # gloo's and NCCL's come as different types
            text = " ".join(str(error).split())[:200]
            raise HostLost(f"gradients cannot be added up with the other hosts: {text}") from error

    def _as_held(self, array: jax.Array) -> jax.Array:
        """An array that all hosts hold, as this host holds it."""
        parts = [part.data for part in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(array.shape, self._sharding(), parts)

    def _sharding(self) -> NamedSharding:
        return NamedSharding(_mesh(self.devices), P())

    @property
    def _whole_mesh(self) -> Mesh:
        """The devices of all hosts; each has chosen its first ones."""
        if self.hosts.count == 1:
            return _mesh(self.devices)
        chosen = [
            device
            for host in range(self.hosts.count)
            for device in jax.local_devices(process_index=host)[: len(self.devices)]
        ]
        return _mesh(tuple(chosen))


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
