"""The devices of a run, and the data that moves between them.

Replicas are data parallel: each holds the whole policy, on its own device or on a few devices that share its base. It
samples some of the rows, and computes some of the micro-batches. Devices exchange only sums of gradients between
replicas, before the optimizer's step.
"""

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from qerl_jax.config import MeshConfig
from qerl_jax.distributed import sharding
from qerl_jax.distributed.hosts import HostLost, Hosts
from qerl_jax.system.checked import require

_ON_HOST = np.ndarray | np.generic
# The mesh axis of the replicas.
_DATA = "data"
_AUTO = jax.sharding.AxisType.Auto


def places(cfg: MeshConfig, rows: int, hosts: Hosts | None = None) -> int:
    """Returns the number of replicas on all hosts: as configured, or as many as devices and rows of a rollout allow."""
    if cfg.data is not None:
        return cfg.data
    # All hosts have the same number of devices; other runs are refused.
    most = max(1, len(jax.local_devices()) // cfg.group)
    return min(most, rows // (count := (hosts or Hosts.all()).count)) * count


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Replicas of the policy, each on one device or on a group that shares a base, on one or several hosts.

    A "place" is the index of a replica among those of all hosts; each host has the same number of replicas.

    Attributes:
        devices: The devices of this process, group by group. Empty means a run on one device: arrays are not moved.
        hosts: The processes of the run.
        group: Number of devices of a replica, which share its base (`sharding`).
    """

    devices: tuple[jax.Device, ...] = ()
    hosts: Hosts = Hosts()
    group: int = 1

    @classmethod
    def of(cls, cfg: MeshConfig, rows: int, hosts: Hosts | None = None) -> Self:
        """Makes the replicas that a config describes.

        Args:
            cfg: The mesh.
            rows: Rows of a rollout; without a number of replicas in the config, there are no more replicas than
                rows.
            hosts: The processes of the run; None means all that have joined.

        Raises:
            ConfigError: If this process has too few devices, they are of different kinds, or their number does not
                fit the hosts and rows.
        """
        seen, hosts = jax.local_devices(), hosts or Hosts.all()
        rule = f"a run on {hosts.count} hosts needs at least as many rows in a rollout"
        require(rows >= hosts.count, "rollout.generation_batch_size", rows, rule)
        total = places(cfg, rows, hosts)
        rule = f"must be a multiple of the number of processes, {hosts.count}"
        require(total % hosts.count == 0, "mesh.data", total, rule)
        count = total // hosts.count * cfg.group
        kinds = sorted({device.device_kind for device in seen[:count]})
        most = len(seen) // cfg.group * hosts.count
        of_all = f", and all {hosts.count} together {len(seen) * hosts.count}" * (hosts.count > 1)
        noun = "device" if len(seen) == 1 else "devices"
        here = f"this process sees {len(seen)} {noun} ({', '.join(kinds)}){of_all}"
        rule = f"the devices of a base are of one host, and {here}"
        field = "mesh.tensor" if cfg.tensor > 1 else "mesh.fsdp"
        require(cfg.group <= len(seen), field, cfg.group, rule)
        grouping = f", each with {field} = {cfg.group} of them" * (cfg.group > 1)
        rule = f"{here}: ask for at most {most}{grouping}, or leave it out for all"
        require(count <= len(seen), "mesh.data", cfg.data, rule)
        rule = f"all must be of one kind, and these are {', '.join(kinds)}: choose by CUDA_VISIBLE_DEVICES"
        require(len(kinds) == 1, "mesh.data", count, rule)
        is_one = count * hosts.count == 1
        return cls(() if is_one else tuple(seen[:count]), hosts, cfg.group)

    def __len__(self) -> int:
        """Returns the number of replicas of the run on all hosts."""
        return max(1, len(self.devices) // self.group) * self.hosts.count

    @property
    def own(self) -> range:
        """The indices of this process's replicas among those of all hosts."""
        count = len(self) // self.hosts.count
        return range(self.hosts.index * count, (self.hosts.index + 1) * count)

    @property
    def groups(self) -> tuple[tuple[jax.Device, ...], ...]:
        """The devices of each replica of this process; empty if `devices` is empty."""
        return tuple(itertools.batched(self.devices, self.group))

    def hold(self, tree: Any) -> Any:
        """Puts each array of a tree on all devices of this host; a device that already has the array gets no copy.

        Of the weights of a shared base, each device of a group gets its part.
        """
        # Arrays that are not committed to a device would have programs of their own.
        place = self.places_of(tree) if self.devices else jax.local_devices()[0]
        return jax.device_put(tree, place)

    def places_of(self, tree: Any) -> Any:
        """Returns the sharding on this host of each array of a tree; shapes and dtypes are enough."""
        mesh = _mesh(self.devices, self.group)
        return jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), sharding.specs(tree, self.group)
        )

    def each(self, tree: Any) -> tuple[Any, ...]:
        """Returns the tree as each replica of this host holds it, one tree per replica, without a copy."""
        if not self.devices:
            return (tree,)
        held = self.hold(tree)
        if self.group == 1:
            return tuple(_by_device(self.devices, held))
        parts = (functools.partial(_of_group, group) for group in self.groups)
        return tuple(jax.tree.map(part, held) for part in parts)

    def apart(self, trees: Sequence[Any], replica: int) -> Any:
        """Joins one tree per device of this host's replica number `replica` into one with a leading axis for them.

        Trees may be on the host or on these devices. For a replica of one device its tree is returned as it is.
        """
        if self.group == 1:
            return trees[0]
        group = self.groups[replica]
        spread = NamedSharding(_mesh(group, len(group)), P(sharding.GROUP))
        # Arrays on the host are stacked on the host.
        stack = lambda *arrays: (np if isinstance(arrays[0], _ON_HOST) else jnp).stack(arrays)
        return jax.device_put(jax.tree.map(stack, *trees), spread)

    def total(self, trees: Sequence[Any]) -> Any:
        """Sums trees over all devices of all hosts: an all-reduce in the arrays' own dtype. All hosts must call this.

        Args:
            trees: One tree per replica of this host. If a replica has several devices, arrays have a leading axis for
                them (`apart`).

        Returns:
            The sum, on all devices.

        Raises:
            HostLost: If another host does not answer.
        """
        if not self.devices:
            (tree,) = trees
            return tree
        if self.group == 1:
            return self._total(trees)
        parts = itertools.chain(*map(_by_device, self.groups, trees))
        return jax.tree.map(lambda x: x[0], self._total([*parts]))

    def of_first(self, tree: Any) -> Any:
        """Broadcasts the first process's tree to the devices of all hosts; of other trees only the shapes are used."""
        if self.hosts.count == 1:
            return tree
        first, *_ = _by_device(self.devices, self.hold(tree))
        zeros = _by_device(self.devices, self.hold(jax.tree.map(jnp.zeros_like, tree)))
        return self._total([first, *zeros[1:]] if self.hosts.leads else zeros)

    def side_by_side[Result](self, work: Callable[[int], Result]) -> list[Result]:
        """Calls `work` with the index of each replica of this host, each in its own thread, and returns the results.

        Launching a program on a GPU returns only after most of it has run, so with one thread devices would not run
        in parallel.
        """
        if not self.devices:
            return [work(0)]
        with ThreadPoolExecutor(len(self.own)) as threads:
            return list(threads.map(work, range(len(self.own))))

    def compiling(
        self, device: jax.Device, *program: Hashable
    ) -> contextlib.AbstractContextManager:
        """Returns a context for calling a program: replicas that have not run it yet enter one after the other.

        The first replica compiles it, and the others find it in JAX's compilation cache (on a CPU each compiles
        it). Two compilations may give different programs, because XLA measures each time which algorithms are
        fastest, and these round differently. `device` is the (first) one that runs the program.
        """
        return _one_after_the_other(device, program) if self.devices else contextlib.nullcontext()

    def _total(self, trees: Sequence[Any]) -> Any:
        """Returns the sum of the trees of all devices of all hosts; this host passes its own."""
        stacked = jax.tree.map(self._stacked, *trees)
        if self.hosts.count == 1:
            whole = _all_reduce(self._whole_mesh)(stacked)
        else:
            whole = jax.tree.map(self._as_held, self._reduced(stacked))
        return jax.tree.map(lambda x, like: x.reshape(like.shape), whole, trees[0])

    def _stacked(self, *parts: jax.Array) -> jax.Array:
        """Makes one array of which each device of all hosts holds its own part; a scalar gets an axis."""
        parts = [part.reshape(-1) if part.ndim == 0 else part for part in parts]
        (first, *rest), mesh = parts[0].shape, self._whole_mesh
        shape, placed = (mesh.size * first, *rest), NamedSharding(mesh, P(_DATA))
        return jax.make_array_from_single_device_arrays(shape, placed, parts)

    def _reduced(self, stacked: Any) -> Any:
        """Returns the sum over all hosts."""
        try:
            return jax.block_until_ready(_all_reduce(self._whole_mesh)(stacked))
        except Exception as error:  # gloo and NCCL raise different types
            text = " ".join(str(error).split())[:200]
            raise HostLost(f"gradients cannot be added up with the other hosts: {text}") from error

    def _as_held(self, array: jax.Array) -> jax.Array:
        """Converts an array that all hosts hold to one on this host's devices."""
        parts = [part.data for part in array.addressable_shards]
        sharding = NamedSharding(_mesh(self.devices, self.group), P())
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)

    @property
    def _whole_mesh(self) -> Mesh:
        """A mesh with one axis of the devices of all hosts; each host uses its first devices."""
        if self.hosts.count == 1:
            return _row(self.devices)
        hosts = (jax.local_devices(process_index=host) for host in range(self.hosts.count))
        return _row(tuple(device for seen in hosts for device in seen[: len(self.devices)]))


def _of_group(group: tuple[jax.Device, ...], whole: jax.Array) -> jax.Array:
    """Returns the part of an array that a replica's devices hold, as one array."""
    parts = _by_device(group, whole)
    placed = NamedSharding(_mesh(group, len(group)), whole.sharding.spec)
    return jax.make_array_from_single_device_arrays(whole.shape, placed, parts)


def _by_device(devices: Sequence[jax.Device], tree: Any) -> list[Any]:
    """Returns, for each device, its part of a tree's arrays."""
    leaves, form = jax.tree.flatten(tree)
    shards = [{part.device: part.data for part in leaf.addressable_shards} for leaf in leaves]
    return [jax.tree.unflatten(form, [parts[device] for parts in shards]) for device in devices]


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
def _mesh(devices: tuple[jax.Device, ...], group: int) -> Mesh:
    """Returns a mesh of replicas of `group` devices each; for a single replica of several devices, of one axis."""
    if len(devices) == group > 1:
        return Mesh(np.array(devices), (sharding.GROUP,), axis_types=(_AUTO,))
    rows = np.array(devices).reshape(-1, group)
    return Mesh(rows, (_DATA, sharding.GROUP), axis_types=(_AUTO,) * 2)


@functools.cache
def _row(devices: tuple[jax.Device, ...]) -> Mesh:
    return Mesh(np.array(devices), (_DATA,), axis_types=(_AUTO,))


@functools.cache
def _all_reduce(mesh: Mesh):
    def added(tree):
        return jax.tree.map(lambda x: jax.lax.psum(x, _DATA), tree)

    return jax.jit(jax.shard_map(added, mesh=mesh, in_specs=P(_DATA), out_specs=P()))
