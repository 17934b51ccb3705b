import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import runtime
from pallas_kernels.decode_attention import decode_attention, supports_heads
from pallas_kernels.portable import attention
from tests.combinations import spread
from tests.pallas_kernels import test_decode_attention as siblings
from tests.pallas_kernels.common import slow
from tests.pallas_kernels.devices import like


def run(arguments, **options):
    attend = functools.partial(decode_attention, implementation="portable", **options)
    return jax.jit(attend)(*arguments)


@pytest.mark.parametrize(
    ("shape", "ends", "width", "pages"),
    [
        ((14, 2, 128), [0, 63, 64, 100], 2, 2),  # a row's first token, the ends of a page
        ((4, 2, 64), [300, 5], 5, 2),  # three pieces, the last one shorter; rows that end early
        slow((9, 3, 32), [70, 191], 3, 1),  # heads in no power of two; a piece for each page
    ],
)
def test_attention_meets_the_reference(monkeypatch, portable, shape, ends, width, pages):
    monkeypatch.setattr(attention, "pages_of_a_piece", lambda *_: pages)
    arguments = siblings.problem(1, *shape, ends, width)
    siblings.assert_meets_reference(run(arguments), arguments, ulps=1)


@pytest.mark.slow
def test_tokens_of_a_row_at_once_meet_the_reference(monkeypatch, portable):
    monkeypatch.setattr(attention, "pages_of_a_piece", lambda *_: 2)
    arguments, sequence = siblings.tokens_of(1, 4, 2, 64, [(126, 4), (5, 1)], 3)
    siblings.assert_meets_reference(run(arguments, sequence=sequence), arguments, ulps=1)


def test_rows_do_not_see_each_other(monkeypatch, portable):
    monkeypatch.setattr(attention, "pages_of_a_piece", lambda *_: 2)
    arguments = siblings.problem(2, 4, 2, 64, [150, 20], 3)
    out, *_ = run(arguments)
    qkv, *rest = arguments
    other, *_ = run((qkv.at[1].multiply(3), *rest[:-1], rest[-1].at[1].set(3)))
    np.testing.assert_array_equal(out[0], other[0])


def test_places_outside_are_moved_to_the_nearest_inside(portable):
    siblings.assert_indices_are_clamped(run, siblings.problem(3, 2, 1, 32, [127, 5], 2))


def test_what_does_not_fit_is_named(portable):
    assert "size 32, 64, 128 or 256; got 80" in supports_heads(4, 2, 80)
    assert supports_heads(28, 4, 128) is None
    arguments = siblings.problem(4, 2, 1, 32, [5], 1, dtype=jnp.float32)
    with pytest.raises(NotImplementedError, match="'portable': needs queries and cache in bf"):
        decode_attention(*arguments, implementation="portable")


@pytest.mark.parametrize(
    ("capability", "kilobytes", "group", "size", "slots", "fits"),
    # What Triton's compiler asks for: 41, 82, 76, 143, 106, 164 and 295 kB.
    [
        ("7.5", 64, 7, 128, 64, True),
        ("7.5", 64, 8, 256, 64, False),
        ("8.9", 99, 8, 256, 64, True),
        ("8.9", 99, 8, 256, 128, False),
        ("12.0", 99, 64, 256, 64, False),
        ("9.0", 227, 64, 256, 64, True),
        ("9.0", 227, 64, 256, 128, False),
    ],
)
def test_pages_beyond_shared_memory_are_refused(capability, kilobytes, group, size, slots, fits):
    with runtime.on(like(compute_capability=capability, shared_bytes=kilobytes << 10)):
        reason = attention.supports_heads(2 * group, 2, size, slots)
    assert reason is None if fits else f"shared memory of {kilobytes << 10}" in reason


@pytest.mark.parametrize(
    ("rows", "key_heads", "width", "pages"),
    [(1, 4, 12, 1), (8, 4, 128, 4), (64, 8, 32, 16), (128, 8, 128, 128), (1, 1, 1, 1)],
)
def test_a_row_is_cut_by_shapes_alone(h200, rows, key_heads, width, pages):
    assert attention.pages_of_a_piece(rows, key_heads, width) == pages


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "rows"), spread([(28, 4, 128), (40, 8, 128), (9, 3, 64)], [1, 8, 64], every=2)
)
def test_on_its_device_long_rows_meet_the_reference(portable, shape, rows):
    ends = np.random.default_rng(rows).integers(0, 2048, rows).tolist()
    arguments = siblings.problem(rows, *shape, ends, 32)
    siblings.assert_meets_reference(run(arguments), arguments, ulps=1)
