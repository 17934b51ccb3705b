"""Tests of programs that are traced once and stored: keys, files, and what is read back."""

import functools
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pallas_kernels
from qerl_jax.compilation import json_trees, program_store
from qerl_jax.compilation.jitted import Jitted
from qerl_jax.compilation.program_store import ProgramStore, Traced, key_of
from qerl_jax.generation.packed import Packed
from qerl_jax.rl.update import TrainState


def _scaled(state, factor, key, *, power):
    noise = jax.random.normal(key, state["x"].shape)
    return {"x": state["x"] * factor**power + noise, "count": state["count"] + 1}, Packed.of(
        (state["count"], state["x"][:2])
    )


scaled = Jitted(_scaled, "scaled", static_argnames="power", donate_argnums=0)


def arrays():
    state = {"x": jnp.arange(6, dtype=jnp.float32), "count": jnp.int32(3)}
    return state, jnp.float32(1.5), jax.random.key(5)


def test_a_stored_program_computes_the_same_bits(tmp_path):
    function, store = functools.partial(scaled, power=3), ProgramStore(tmp_path / "programs")
    traced = Traced.of(function, arrays())
    assert traced.donated == (0, 1)
    store.write("a", traced)
    again = store.read("a")
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = function(*arrays())
    got = again.lowered(place, {}).compile()(*jax.tree.leaves(arrays()))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.unflatten(again.results, got), expected)
    assert again.results == jax.tree.structure(expected) and again.donated == (0, 1)


@pytest.mark.parametrize(
    "harm", [lambda b: b[:-9], lambda b: b[:50], lambda b: b"", lambda b: b[:-1] + b"x"]
)
def test_a_damaged_program_is_removed_with_a_line(harm, tmp_path, capsys):
    store = ProgramStore(tmp_path)
    store.write("a", Traced.of(functools.partial(scaled, power=2), arrays()))
    (path,) = tmp_path.iterdir()
    path.write_bytes(harm(path.read_bytes()))
    assert store.read("a") is None and not path.exists()
    assert f"{path}: a damaged program is compiled anew" in capsys.readouterr().err
    assert store.read("a") is None and capsys.readouterr().err == ""


def test_programs_used_longest_ago_make_room(tmp_path):
    program = Traced.of(functools.partial(scaled, power=2), arrays())
    ProgramStore(tmp_path).write("a", program)
    size = (tmp_path / "a.program").stat().st_size
    store = ProgramStore(tmp_path, most_bytes=3 * size)
    store.write("b", program)
    store.write("c", program)
    for used, name in enumerate("bca"):
        os.utime(tmp_path / f"{name}.program", (used, used))
    store.write("d", program)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "c", "d"]


def test_a_key_covers_static_arguments_shapes_kernels_and_flags(monkeypatch):
    key = lambda power, values: key_of(functools.partial(scaled, power=power), values)
    state, factor, random = arrays()
    of = key(2, (state, factor, random))
    assert of == key(2, jax.eval_shape(lambda: (state, factor, random)))
    others = [
        key(3, (state, factor, random)),
        key(2, ({**state, "x": state["x"][1:]}, factor, random)),
        key(2, (state, jnp.bfloat16(1), random)),
        key(2, (({**state}, factor), random)),
    ]
    monkeypatch.setenv("PALLAS_KERNELS", "reference")
    others.append(key(2, (state, factor, random)))
    monkeypatch.setenv("XLA_FLAGS", "--xla_other")
    program_store.surroundings.cache_clear()
    others.append(key(2, (state, factor, random)))
    program_store.surroundings.cache_clear()
    assert len({of, *others}) == 1 + len(others)


def test_a_changed_constant_of_a_kernel_changes_all_keys(tmp_path, monkeypatch):
    copy = tmp_path / "pallas_kernels"
    shutil.copytree(pallas_kernels.__path__[0], copy)
    monkeypatch.setattr(
        program_store, "pallas_kernels", types.SimpleNamespace(__path__=[str(copy)])
    )
    keys = []
    for change in (
        ("LEAST", "LEAST"),
        ("LEAST", "LEAST"),
        ("LEAST_SHARED = ", "LEAST_SHARED = 1 + "),
    ):
        path = copy / "decode_attention" / "config.py"
        text = path.read_text()
        assert change[0] in text
        path.write_text(text.replace(*change))
        program_store.surroundings.cache_clear()
        keys.append(key_of(functools.partial(scaled, power=2), arrays()))
    program_store.surroundings.cache_clear()
    assert keys[0] == keys[1] != keys[2]


def test_trees_survive_json():
    params = {"b": {"a": 1.0}, "a": [2.0, None, (3.0,)]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mask=None))
    state = TrainState(0, params, optimizer.init({"w": jnp.zeros(2)}), 1)
    packed = Packed.of((np.zeros((2, 3), bool), {"x": np.ones(2, np.float32)}, None))
    for tree in (state, packed, None, 1, (packed, [state])):
        structure = jax.tree.structure(tree)
        assert json_trees.from_json(json_trees.to_json(structure)) == structure


@pytest.mark.parametrize(
    "value",
    [
        {"os:system": {"command": "*"}},
        {"qerl_jax.system.files:write_whole": {}},
        {"subprocess:Popen": {"args": "*"}},
        {"qerl_jax.rl.update:TrainState": {"steps": "*"}},
        {"qerl_jax.nowhere:TrainState": {}},
        {"optax:nothing": {}},
    ],
)
def test_a_file_can_name_only_classes_of_trees(value):
    with pytest.raises(ValueError, match="no tree|no class"):
        json_trees.from_json(value)


def test_a_dict_without_names_is_refused():
    with pytest.raises(TypeError, match="other keys than names"):
        json_trees.to_json(jax.tree.structure({1: 2.0}))
