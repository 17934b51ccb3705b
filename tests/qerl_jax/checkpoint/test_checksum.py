"""Tests that a base which is wrong on the device is noticed: by its copies, its first load, and its start."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qerl_jax.checkpoint import checksum
from qerl_jax.training import guards

BIG = 3 * 2**20  # bytes, more than what is read back


@pytest.fixture
def compared(monkeypatch, tmp_path):
    """Compares on this CPU, too, with a new cache folder; returns that folder."""
    monkeypatch.setattr(checksum, "is_compared", lambda: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "qerl_jax/bases"


def wrong_copies(monkeypatch, count, change):
    """Makes the first `count` copies to the device wrong."""
    put, left = jax.device_put, [count]

    def copy(array, *more):
        if left[0]:
            left[0] -= 1
            array = array.copy()
            change(array.reshape(-1).view(np.uint8))
        return put(array, *more)

    monkeypatch.setattr(jax, "device_put", copy)


def zero_a_page(data):
    data[4096:8192] = 0


def swap_two_pages(data):
    data[4096:8192], data[40960:45056] = data[40960:45056].copy(), data[4096:8192].copy()


@pytest.mark.parametrize(
    "dtype", "uint8 int8 bool float16 bfloat16 float8_e4m3fn float32 int32".split()
)
@pytest.mark.parametrize("change", [zero_a_page, swap_two_pages])
def test_a_wrong_copy_of_any_type_is_made_again(monkeypatch, capsys, compared, dtype, change):
    dtype = jnp.dtype(dtype)
    data = np.random.default_rng(0).integers(0, 2 if dtype.kind == "b" else 100, BIG + 24, np.uint8)
    array = data.view(dtype).reshape(2, -1)
    wrong_copies(monkeypatch, 2, change)
    name = f"{dtype} {change.__name__}"  # a line that was printed is not printed again
    copy = checksum.to_device(array, name)
    assert np.asarray(copy).tobytes() == array.tobytes()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" differs")[0] for line in lines] == [
        f"warning: {name}: copy {n} to the device" for n in (1, 2)
    ]
    assert "from byte 4096 to" in lines[0]


def test_a_small_copy_is_compared_too_and_three_wrong_ones_end_the_run(monkeypatch, compared):
    wrong_copies(monkeypatch, 6, lambda data: data.__setitem__(7, 255))
    with pytest.raises(
        RuntimeError, match="weight: copy 3 .*3 of 40 bytes from byte 7 to 35, 0 of"
    ):
        checksum.to_device(np.zeros(10, np.float32), "weight")


def test_a_type_that_jax_changes_is_not_compared(compared):
    assert checksum.to_device(np.ones(3, np.float64), "weight").dtype == np.float32


@pytest.mark.parametrize("size", [4 * 4096, 4 * 4096 * 3, 1, 4 * 4096 + 2])
def test_the_host_and_the_device_sum_alike(size):
    array = np.random.default_rng(1).integers(0, 256, 4 * size, np.uint8).view(ml_dtypes.bfloat16)
    sums = checksum.block_sums(jnp.asarray(array))
    words = np.zeros(-(-4 * size // 16384) * 4096, np.uint32)
    words[:size] = array.view(np.uint32)
    np.testing.assert_array_equal(sums, words.reshape(-1, 4096).sum(1, dtype=np.uint64) % 2**32)


def tree():
    return {"a": jnp.arange(12.0).reshape(3, 4), "b": jnp.arange(5, dtype=jnp.uint8)}


def test_a_checksum_of_a_tree_sees_bits_and_places():
    first = int(checksum.of_tree(tree()))
    bits = np.arange(12, dtype=np.float32).view(np.uint32).astype(np.uint64).reshape(3, 4)
    expected = (bits * [1, 3, 5, 7]).sum() + (np.arange(5) * [1, 3, 5, 7, 9]).sum()
    assert first == expected % 2**32
    swapped = tree() | {"b": jnp.array([1, 0, 2, 3, 4], jnp.uint8)}
    signed = tree() | {"a": tree()["a"].at[0, 0].set(-0.0)}
    assert first not in (int(checksum.of_tree(swapped)), int(checksum.of_tree(signed)))


def wrong_tree(number):
    return tree() | {"b": jnp.full(5, number, jnp.uint8)}


@pytest.mark.parametrize(
    ("loads", "result"),
    [
        ([tree()], tree()),
        ([wrong_tree(7), tree()], tree()),  # a wrong load
        (
            [wrong_tree(7), wrong_tree(7)],
            wrong_tree(7),
        ),  # the first one was wrong, or compiled in another way
        ([wrong_tree(7), wrong_tree(8)], None),
    ],
)
def test_a_base_is_loaded_again_if_it_is_not_what_it_was_at_first(
    compared, tmp_path, capsys, loads, result
):
    folder = tmp_path / f"{len(loads)}-{result is None}"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    load = lambda trees: checksum.load_checked(iter(copied(trees)).__next__, folder, ("nvfp4",))
    load([tree()])
    (path,) = compared.iterdir()
    if result is None:
        with pytest.raises(
            RuntimeError, match=f"three loads have the checksums {path.read_text()}"
        ):
            load(loads)
    else:
        assert checksum._text(load(loads)) == checksum._text(result) == path.read_text()
    warned = f"{folder}: the base on the device has the checksum" in capsys.readouterr().err
    assert warned == (len(loads) == 2)


def copied(trees):
    return [jax.tree.map(jnp.copy, one) for one in trees]


def test_other_files_and_another_form_are_other_bases(compared, tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    load = lambda number, form: checksum.load_checked(lambda: wrong_tree(number), tmp_path, (form,))
    load(1, "nvfp4")
    load(2, "nf4")
    (tmp_path / "config.json").write_text("{ }")
    load(3, "nvfp4")
    assert not capsys.readouterr().err


def test_nothing_is_saved_beside_a_base_that_changed():
    first = checksum.of_tree(tree())
    guards.require_unchanged_base(tree(), first)
    with pytest.raises(RuntimeError, match=r"base: its checksum is .*Nothing was saved"):
        guards.require_unchanged_base(tree() | {"b": jnp.zeros(5, jnp.uint8)}, first)
