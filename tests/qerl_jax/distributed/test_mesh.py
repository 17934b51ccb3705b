"""Tests the devices of a run: one device costs nothing extra, and bad meshes are refused."""

import jax
import jax.numpy as jnp
import pytest

from qerl_jax.config import MeshConfig
from qerl_jax.distributed import mesh
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.system.checked import ConfigError


def test_with_one_device_arrays_are_committed_to_it_and_nothing_is_copied():
    alone = mesh.Replicas.of(MeshConfig(data=1), rows=8)
    tree = {"a": jnp.ones(3), "b": None}
    assert len(alone) == 1 and alone.devices == ()
    assert alone.total([tree]) is tree and alone.each(tree)[0] is tree
    held = alone.hold(tree)["a"]
    assert held.committed and not tree["a"].committed
    assert held.unsafe_buffer_pointer() == tree["a"].unsafe_buffer_pointer()


@pytest.mark.parametrize("field", ["data", "fsdp", "tensor"])
def test_more_devices_than_a_host_has_is_an_error(field):
    seen = len(jax.local_devices())
    message = rf"mesh.{field}: got {seen + 1}; .*this process sees {seen} devices? "
    with pytest.raises(ConfigError, match=message):
        mesh.Replicas.of(MeshConfig(**{field: seen + 1}), rows=64)


def test_without_a_number_all_devices_are_taken_that_have_a_row(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: ["a device"] * 4)
    assert [mesh.places(MeshConfig(), rows) for rows in (1, 3, 64)] == [1, 3, 4]
    assert mesh.places(MeshConfig(data=8), 64) == 8


def test_devices_that_share_a_base_are_one_replica(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: ["a device"] * 6)
    for field in ("fsdp", "tensor"):
        assert [mesh.places(MeshConfig(**{field: n}), 64) for n in (1, 2, 4)] == [6, 3, 1]
    groups = mesh.Replicas(tuple("abcdef"), group=2).groups
    assert groups == (("a", "b"), ("c", "d"), ("e", "f"))
    assert len(mesh.Replicas(tuple("abcdef"), group=2)) == 3


def test_places_of_several_hosts_are_numbered_through():
    for devices, group in (("ab", 1), ("abcd", 2)):
        second = mesh.Replicas(tuple(devices), Hosts(1, 3), group)
        assert len(second) == 6 and second.own == range(2, 4)
    assert mesh.Replicas().own == range(1)
