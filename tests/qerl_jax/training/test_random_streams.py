"""Tests the random streams of runs."""

import itertools
import types

import jax

from qerl_jax.training.random_streams import EVAL, NOISE, PARAMS, SAMPLE, UPDATE, stream_key


def stream(seed, number):
    key = stream_key(types.SimpleNamespace(seed=seed), number)
    return tuple(jax.random.key_data(key).tolist())


def test_no_two_streams_meet_whatever_the_seeds():
    seeds = (0, 1, 1000, 2000, 3000, 4000, 2**32 - 4000, 2**32 - 1000, 2**32 - 1)
    numbers = (SAMPLE, NOISE, UPDATE, EVAL, PARAMS)
    keys = {stream(*pair) for pair in itertools.product(seeds, numbers)}
    assert len(keys) == len(seeds) * len(numbers)
    # Nor does one meet what a command draws with such a seed.
    assert keys.isdisjoint((0, seed) for seed in seeds)


def test_a_stream_is_threefry_of_its_number_under_the_seed():
    """The number is Random123's known answer of threefry2x32 with 20 rounds, for key 0 and counter 0."""
    assert stream(0, SAMPLE) == (0x6B200159, 0x99BA4EFE)
