"""Tests reading safetensors files: every type, shards, and each way in which a download can be broken."""

import json
import re
import reprlib
import struct

import ml_dtypes
import numpy as np
import pytest

from qerl_jax.checkpoint import safetensors as tensor_files
from qerl_jax.checkpoint.safetensors import SafetensorsError, Tensors
from tests import golden_files
from tests.faults.harness import files_of
from tests.programs import compiled


def write(path, tensors, spaces=0):
    """Writes a safetensors file of (type name, array) by name; `spaces` after the header move the data."""
    header, start = {}, 0
    for name, (dtype, array) in tensors.items():
        end = start + array.nbytes
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode() + b" " * spaces
    data = b"".join(array.tobytes() for _, array in tensors.values())
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def floats(*values):
    return ("F32", np.array(values, np.float32))


def test_a_tensor_is_sent_to_the_device_without_a_program_for_its_shape(tmp_path, caplog):
    shapes = {str(n): ("F32", np.arange(n, dtype=np.float32)) for n in (1013, 1019)}
    write(tmp_path / "model.safetensors", shapes)
    tensors, arrays = Tensors(tmp_path), {}
    read = lambda: arrays.update((name, tensors.on_device(name)) for name in shapes)
    assert compiled(caplog, read) == []
    for name, (_, expected) in shapes.items():
        np.testing.assert_array_equal(arrays[name], expected)


@pytest.mark.parametrize("spaces", range(4))
def test_every_type_is_read_wherever_its_bytes_lie(tmp_path, spaces):
    names = "F64 F32 F16 BF16 F8_E4M3 I64 I32 U8 I8 BOOL".split()
    dtypes = "float64 float32 float16 bfloat16 float8_e4m3fn int64 int32 uint8 int8 bool".split()
    expected = {
        name: (name, np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype))
        for name, dtype in zip(names, dtypes, strict=True)
    }
    expected |= {"scalar": ("F32", np.float32(3.5)), "none": ("F32", np.zeros((0, 4), np.float32))}
    write(tmp_path / "model.safetensors", expected, spaces)
    tensors = Tensors(tmp_path)
    assert set(tensors) == set(expected)
    for name, (_, array) in expected.items():
        read = tensors[name]
        assert (read.dtype, read.shape, tensors.shape(name)) == (array.dtype, *2 * (array.shape,))
        np.testing.assert_array_equal(read.astype(float), array.astype(float))


@pytest.mark.parametrize("path", ["models/qwen2_untied", "nvfp4/qwen2_untied"])
def test_files_of_the_safetensors_package_are_read(path):
    expected = golden_files.load(f"{path}/model.safetensors")
    tensors = Tensors(golden_files.GOLDEN / path)
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        assert tensors.shape(name) == array.shape
        assert tensors[name].tobytes() == array.tobytes()


def shards(folder):
    """Writes tensors a and b in one shard and c in another, with their index."""
    write(folder / "one.safetensors", {"a": floats(1, 2), "b": floats(3)})
    write(folder / "two.safetensors", {"c": floats(4, 5, 6)})
    weight_map = {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    write_index(folder, {"metadata": {"total_size": 24}, "weight_map": weight_map})
    return weight_map


def write_index(folder, content):
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def test_shards_are_read_as_one_and_only_those_of_the_index(tmp_path):
    shards(tmp_path)
    write(tmp_path / "consolidated.safetensors", {"a": floats(9), "d": floats(9)})
    tensors = Tensors(tmp_path)
    read = {name: tensors[name].tolist() for name in tensors}
    assert read == {"a": [1, 2], "b": [3], "c": [4, 5, 6]} and "d" not in tensors
    for read in (tensors.shape, tensors.__getitem__):
        with pytest.raises(SafetensorsError, match="no tensor z"):
            read("z")


def test_a_file_saved_over_shards_is_read_and_not_the_index_that_was_left(tmp_path):
    """transformers removes the shards of the model before, and leaves its index."""
    for name in set(shards(tmp_path).values()):
        (tmp_path / name).unlink()
    write(tmp_path / "model.safetensors", {"a": floats(9)})
    tensors = Tensors(tmp_path)
    assert {name: tensors[name].tolist() for name in tensors} == {"a": [9]}


def test_another_stem_names_another_file_of_the_folder(tmp_path):
    write(tmp_path / "model.safetensors", {"a": floats(1)})
    write(tmp_path / "adapter_model.safetensors", {"b": floats(2)})
    assert list(Tensors(tmp_path)) == ["a"]
    assert list(Tensors(tmp_path, "adapter_model")) == ["b"]


def test_a_folder_without_its_file_is_an_error(tmp_path):
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": floats(1)})
    with pytest.raises(SafetensorsError, match=r"no model\.safetensors, nor .* " + str(tmp_path)):
        Tensors(tmp_path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"c": "three.safetensors"}, r"1 of 2 shards are missing: three\.safetensors"),
        ({"z": "one.safetensors"}, r"no shard holds z \(1 tensors are missing\)"),
        ({"b": "two.safetensors"}, r"b is in one\.safetensors, not in two"),
    ],
)
def test_an_index_that_its_shards_do_not_fit_is_named(tmp_path, changes, match):
    write_index(tmp_path, {"weight_map": shards(tmp_path) | changes})
    with pytest.raises(SafetensorsError, match=match):
        Tensors(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_index_is_named(tmp_path, content):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SafetensorsError, match=r"index\.json: not an index"):
        Tensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -4, -1])
def test_a_truncated_file_is_named_wherever_it_is_cut(tmp_path, kept):
    """The last 4 bytes are the second tensor."""
    shards(tmp_path)
    path = tmp_path / "one.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SafetensorsError, match=r"one\.safetensors: \d+ bytes.*truncated"):
        Tensors(tmp_path)


# Headers that lie


def raw(path, header, data=bytes(16)):
    """Writes a file whose header is any text or table."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start, end, shape=None, dtype="F32"):
    shape = [(end - start) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


NO_HEADERS = [
    *(b"[" * 100_000, b"null", b"<html>404</html>", b"[1, 2]", b"\xff\xfe", {"a": 3}),
    {"a": {"dtype": "F32", "shape": [4]}},
    {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0]}},
    {"a": entry("0", "16", [4])},
]


@pytest.mark.parametrize(
    "header,match",
    [
        ({"a": entry(0, 8), "b": entry(4, 16)}, "invalid offset for tensor `b`"),
        ({"a": entry(0, 16), "b": entry(0, 16)}, "invalid offset for tensor `[ab]`"),
        ({"a": entry(0, 4), "b": entry(8, 16)}, "invalid offset for tensor `b`"),
        ({"a": entry(4, 16)}, "invalid offset for tensor `a`"),
        ({"a": entry(0, 12)}, "file not fully covered"),
        ({"a": entry(8, 4, [1])}, "invalid offset for tensor `a`"),
        ({"a": entry(-4, 0, [1])}, "invalid value: integer `-4`"),
        ({"a": entry(0, 20)}, "truncated"),
        ({"a": entry(0, 2**63)}, "overflow"),
        ({"a": entry(0, 16, [2**40, 2**40])}, "overflow"),
        ({"a": entry(0, 16, [-2, -2])}, "invalid value: integer `-2`"),
        ({"a": entry(0, 16, [4.0])}, "floating point `4.0`, expected usize"),
        ({"a": entry(0, 16, [True, 4])}, "boolean `true`, expected usize"),
        ({"a": entry(0, 16, "4")}, "string .4., expected a sequence"),
        ({"a": entry(0.0, 16.0, [4])}, "floating point `0.0`, expected usize"),
        ({"a": entry(0, 16, [4], ["F32"])}, "invalid type: sequence"),
        ({"a": entry(0, 16, [4], None)}, "invalid type: null"),
        (b'{"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, "a": 1}', "integer `1`"),
        (b'{"a": ' * 50_000, "recursion limit exceeded"),
        ({"a": entry(0, 16, [3])}, "invalid shape, data type, or offset"),
        ({"a": entry(0, 16, [16], "F8_E8M0")}, "a has the type F8_E8M0; known are F64, F32"),
        ({"a": entry(0, 16, [16], "F5")}, "unknown variant `F5`"),
        *((header, "not a safetensors file") for header in NO_HEADERS),
    ],
)
def test_a_header_that_lies_is_named(tmp_path, header, match):
    raw(tmp_path / "model.safetensors", header)
    with pytest.raises(SafetensorsError, match=rf"model\.safetensors: .*{match}"):
        Tensors(tmp_path)


def test_a_header_of_absurd_length_is_not_read(tmp_path):
    length = 100_000_001
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", length))
        file.truncate(8 + length)  # without taking room on the disk
    with pytest.raises(SafetensorsError, match=r"model\.safetensors: .* header too large"):
        Tensors(tmp_path)


def test_a_name_that_occurs_twice_is_one_tensor_within_the_file(tmp_path):
    twice = b'{"a": %s, "a": %s}' % ((json.dumps(entry(0, 16)).encode(),) * 2)
    raw(tmp_path / "model.safetensors", twice, np.arange(4, dtype=np.float32).tobytes())
    assert Tensors(tmp_path)["a"].tolist() == [0, 1, 2, 3]


NAMES = ("../two", "/etc/two", "sub/two", "..\\two", "two\0", "%2e%2e/two", "~/two", "", 300 * "a")
OTHERS = ("..", "", ".", "../two", "/etc/passwd", "two.bin", None, 3)


@pytest.mark.parametrize("file", [*(f"{name}.safetensors" for name in NAMES), *OTHERS])
def test_an_index_names_files_of_its_own_folder_only(tmp_path, file):
    inner = tmp_path / "model"
    (inner / "sub").mkdir(parents=True)
    weight_map = shards(inner)
    for place in (tmp_path, inner / "sub"):
        (place / "two.safetensors").write_bytes((inner / "two.safetensors").read_bytes())
    write_index(inner, {"weight_map": weight_map | {"c": file}})
    before, shown = files_of(tmp_path), re.escape(reprlib.repr(file))
    with pytest.raises(SafetensorsError, match=f"{shown}, which is no safetensors file of its own"):
        Tensors(inner)
    assert files_of(tmp_path) == before


def test_a_tensor_in_two_shards_is_named(tmp_path):
    shards(tmp_path)
    write(tmp_path / "two.safetensors", {"c": floats(4), "a": floats(5)})
    with pytest.raises(SafetensorsError, match=r"a is in one\.safetensors too"):
        Tensors(tmp_path)


# Writing


def test_what_is_written_is_read_back_and_by_the_safetensors_package(tmp_path):
    import safetensors

    held = {
        "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
        "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
        "half": np.ones(3, ml_dtypes.bfloat16),
        "scales": np.array([[1, 448]], ml_dtypes.float8_e4m3fn),
        "scalar": np.array(2.5, np.float32),
        "none": np.zeros((0, 2), np.float32),
    }
    table = {name: (value.dtype, value.shape) for name, value in held.items()}
    tensor_files.write_shards(tmp_path, table, held.__getitem__)
    tensors = Tensors(tmp_path)
    assert list(tensors) == list(held)
    for name, value in held.items():
        assert tensors[name].dtype == value.dtype
        np.testing.assert_array_equal(tensors[name].astype(float), value.astype(float))
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as theirs:
        assert set(theirs.keys()) == set(held) and theirs.metadata() == {"format": "pt"}
        np.testing.assert_array_equal(theirs.get_tensor("transposed"), held["transposed"])


def test_shards_are_filled_in_order_and_indexed(tmp_path):
    held = {name: np.full(n, n, np.float32) for name, n in (("a", 2), ("b", 3), ("c", 9), ("d", 1))}
    table = {name: (value.dtype, value.shape) for name, value in held.items()}
    tensor_files.write_shards(tmp_path, table, held.__getitem__, shard_bytes=20)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 60
    assert index["weight_map"] == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00001-of-00003.safetensors",
        "c": "model-00002-of-00003.safetensors",
        "d": "model-00003-of-00003.safetensors",
    }
    tensors = Tensors(tmp_path)
    for name, value in held.items():
        np.testing.assert_array_equal(tensors[name], value)


def test_a_tensor_that_is_not_what_the_table_says_is_refused(tmp_path):
    table = {"a": (np.dtype(np.float32), (2,))}
    with pytest.raises(ValueError, match=r"a: got float64 of shape \(2,\); the table says"):
        tensor_files.write_shards(tmp_path, table, lambda name: np.zeros(2))
