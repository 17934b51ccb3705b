"""Tests that messages between processes arrive unchanged, and that nothing else is read."""

import pickle

import jax.numpy as jnp
import msgpack
import numpy as np
import pytest

from qerl_jax.distributed import messages
from qerl_jax.generation.scheduler import RowTokens
from qerl_jax.rl.grpo import RowMetrics

messages.sent(RowTokens)
messages.sent(RowMetrics)


def exchanged(value):
    return messages.decode(messages.encode(value))


def test_plain_values_and_containers_arrive_as_they_were():
    value = {
        "none": None,
        3: [True, -(2**40), 0.1, float("inf"), 10**30, -(10**30), 2**64, -(2**63)],
        "half of a pair": "\ud800",
        "nested": ({"text": "a", b"bytes": b"\x00"}, (), []),
    }
    assert exchanged(value) == value


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.uint8, np.bool_, jnp.bfloat16])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_arrays_keep_type_shape_and_bits(dtype, shape):
    value = (np.random.default_rng(0).normal(size=shape) * 9).astype(dtype)
    for given in (value, jnp.asarray(value)):
        found = exchanged(given)
        assert (found.dtype, found.shape) == (value.dtype, shape)
        assert found.tobytes() == value.tobytes()
        assert found.flags.writeable


def test_known_classes_arrive_as_such():
    row = RowTokens(3, np.arange(4), np.zeros(4, np.float32), "stop", given=None)
    found = exchanged([row])[0]
    assert type(found) is RowTokens and (found.row, found.ended, found.given) == (3, "stop", None)
    np.testing.assert_array_equal(found.tokens, row.tokens)
    counts = exchanged(RowMetrics(*[np.ones(2)] * 2, None, None, None))
    assert type(counts) is RowMetrics and counts.kl is None and counts.tokens.sum() == 2


@pytest.mark.parametrize("value", [object(), {1, 2}, np.array([object()]), lambda: 0])
def test_other_things_are_not_sent(value):
    with pytest.raises(TypeError, match="cannot be sent"):
        messages.encode([value])


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps([1]),
        msgpack.packb(["class", "Popen", [["list", ["true"]]]]),
        msgpack.packb(["eval", "1"]),
        msgpack.packb([1, 2]),
        msgpack.packb(["array", "object", [1], b"12345678"]),
        b"",
    ],
)
def test_bytes_of_another_kind_are_refused(data):
    with pytest.raises(ValueError):
        messages.decode(data)
