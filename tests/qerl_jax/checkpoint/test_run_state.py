"""Tests the saved state of a run: it is exact, the newest is found first, and it is never partial."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.config import LoraConfig, OptimConfig
from qerl_jax.model.transformer import Transformer, init_params
from qerl_jax.rl import update
from qerl_jax.rl.entropy import EntropyControl
from tests.model_folders import ARCH, DENSE, assert_trees_equal, base, with_norms


@pytest.fixture(scope="module")
def norms():
    return with_norms()


@pytest.fixture(scope="module")
def state(norms):
    """Makes a state after a step, in which no leaf equals that of a fresh state."""
    _, params = norms
    fresh = update.init_state(params, OptimConfig())
    rng = np.random.default_rng(1)

    move = lambda leaf: (leaf + rng.integers(1, 100, leaf.shape)).astype(leaf.dtype)
    return jax.tree.map(move, fresh)


def at(state, step):
    return dataclasses.replace(state, step=jnp.int32(step))


@pytest.mark.parametrize("committed", [False, True])
def test_a_state_round_trips_bit_for_bit_and_is_committed_if_the_fresh_one_is(
    tmp_path, norms, state, committed
):
    StateFiles(tmp_path, keep=1).save(at(state, 1))
    like = update.init_state(norms[1], OptimConfig())
    if committed:
        like = jax.device_put(like, jax.devices()[0])
    restored = StateFiles(tmp_path, keep=1).restore(like)
    assert isinstance(restored, update.TrainState)
    assert {leaf.committed for leaf in jax.tree.leaves(restored)} == {committed}
    assert_trees_equal(restored, at(state, 1))


def test_a_kept_reference_and_the_supply_round_trip_with_the_state(tmp_path, norms, state):
    supply = {"drawn": 8, "rows": [{"logps": [float(np.float32(-0.1))], "stopped": True}]}
    kept = dataclasses.replace(at(state, 3), reference=jax.tree.map(jnp.negative, state.params))
    files = StateFiles(tmp_path, keep=2)
    assert files.supply() is None and files.restore(state) is None
    files.save(at(kept, 2), {"drawn": 4})
    files.save(kept, supply)
    again = StateFiles(tmp_path, keep=2)
    like = update.init_state(norms[1], OptimConfig(), keep_reference=True)
    assert_trees_equal(again.restore(like), kept)
    assert again.supply() == supply


# A state as versions without an entropy bonus wrote it.
FIELDS = ["step", "params", "opt_state", "skipped", "reference"]
EarlierState = dataclasses.make_dataclass("EarlierState", FIELDS, frozen=True)
jax.tree_util.register_dataclass(EarlierState)


def test_a_coefficient_that_adapts_round_trips_and_earlier_checkpoints_have_none(tmp_path, state):
    fields = {name: getattr(state, name) for name in FIELDS}
    files = StateFiles(tmp_path, keep=2)
    files.save(EarlierState(**(fields | {"step": jnp.int32(2)})))
    assert_trees_equal(files.restore(state), at(state, 2))
    control = EntropyControl(jnp.float32(0.25), jnp.float32(np.inf))
    adapts = dataclasses.replace(at(state, 3), entropy=control)
    files.save(adapts)
    assert_trees_equal(files.restore(jax.tree.map(jnp.zeros_like, adapts)), adapts)


def test_the_newest_states_are_kept_and_the_newest_whole_one_is_restored(tmp_path, state):
    """orbax writes under a temporary name, which stays behind if the process is killed."""
    files, folder = StateFiles(tmp_path, keep=2), tmp_path / "checkpoints"
    for step in (1, 2, 10):
        files.save(at(state, step))
    assert sorted(path.name for path in folder.iterdir()) == ["10", "2"]
    assert files.restore(state).step == 10
    (folder / "10").rename(folder / "10.orbax-checkpoint-tmp-0")
    assert StateFiles(tmp_path, keep=2).restore(state).step == 2


def test_a_state_of_another_adapter_is_refused(tmp_path, state):
    files = StateFiles(tmp_path, keep=2)
    files.save(state)
    other = Transformer(ARCH, "float32", LoraConfig(4, 16.0, train_norms=True), jnp.float32)
    params = init_params(other, base(DENSE, "float32"), jax.random.key(0))
    with pytest.raises(ValueError, match="shape"):
        files.restore(update.init_state(params, OptimConfig()))
