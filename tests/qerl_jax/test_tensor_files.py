"""Reading safetensors: every type, shards, and each way in which a download can be broken."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest

from qerl_jax.tensor_files import SafetensorsError, Tensors
from tests import golden_files


def write(path, tensors, spaces=0):
    """A safetensors file of (type name, array) by name; `spaces` after the header move the data."""
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


@pytest.mark.parametrize("spaces", range(4))
def test_every_type_is_read_wherever_its_bytes_lie(tmp_path, spaces):
    types = {
        "F64": np.float64,
        "F32": np.float32,
        "F16": np.float16,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "I64": np.int64,
        "I32": np.int32,
        "U8": np.uint8,
        "I8": np.int8,
        "BOOL": np.bool_,
    }
    expected = {
        name: (name, np.array([[0, 1, 1], [1, 0, 1]]).astype(dtype))
        for name, dtype in types.items()
    }
    write(tmp_path / "model.safetensors", expected, spaces)
    tensors = Tensors(tmp_path)
    assert set(tensors) == set(types)
    for name, (_, array) in expected.items():
        assert tensors[name].dtype == array.dtype
        np.testing.assert_array_equal(tensors[name].astype(float), array.astype(float))


def test_scalars_and_empty_tensors_keep_their_shapes(tmp_path):
    tensors = {
        "scalar": ("F32", np.array(3.5, np.float32)),
        "none": ("F32", np.zeros((0, 4), np.float32)),
    }
    write(tmp_path / "model.safetensors", tensors)
    tensors = Tensors(tmp_path)
    assert tensors["scalar"].shape == () and tensors["scalar"].item() == 3.5
    assert tensors.shape("none") == tensors["none"].shape == (0, 4)


@pytest.mark.parametrize("path", ["models/qwen2_untied", "nvfp4/qwen2_untied"])
def test_files_of_the_safetensors_package_are_read(path):
    expected = golden_files.load(f"{path}/model.safetensors")
    tensors = Tensors(golden_files.GOLDEN / path)
    assert set(tensors) == set(expected)
    for name, array in expected.items():
        assert tensors.shape(name) == array.shape
        assert tensors[name].tobytes() == array.tobytes()


def shards(folder):
    """Tensors a, b in one shard and c in another, with their index."""
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
    assert {name: tensors[name].tolist() for name in tensors} == {
        "a": [1, 2],
        "b": [3],
        "c": [4, 5, 6],
    }
    assert "c" in tensors and "d" not in tensors


def test_another_stem_names_another_file_of_the_folder(tmp_path):
    write(tmp_path / "model.safetensors", {"a": floats(1)})
    write(tmp_path / "adapter_model.safetensors", {"b": floats(2)})
    assert list(Tensors(tmp_path)) == ["a"]
    assert list(Tensors(tmp_path, "adapter_model")) == ["b"]


def test_a_folder_without_its_file_is_an_error(tmp_path):
    write(tmp_path / "model-00001-of-00002.safetensors", {"a": floats(1)})
    with pytest.raises(SafetensorsError, match=r"no model\.safetensors, nor .* " + str(tmp_path)):
        Tensors(tmp_path)


def test_a_missing_shard_is_named(tmp_path):
    shards(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(SafetensorsError, match=r"1 of 2 shards are missing: two\.safetensors"):
        Tensors(tmp_path)


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path):
    weight_map = shards(tmp_path)
    write_index(tmp_path, {"weight_map": weight_map | {"z": "one.safetensors"}})
    with pytest.raises(SafetensorsError, match=r"no shard holds z \(1 tensors are missing\)"):
        Tensors(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_broken_index_is_named(tmp_path, content):
    shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(SafetensorsError, match=r"index\.json: not an index"):
        Tensors(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 8, 40, -1])
def test_a_truncated_file_is_named_wherever_it_is_cut(tmp_path, kept):
    shards(tmp_path)
    path = tmp_path / "two.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(SafetensorsError, match=r"two\.safetensors: \d+ bytes.*truncated"):
        Tensors(tmp_path)


def test_a_file_cut_between_two_tensors_is_found(tmp_path):
    write(tmp_path / "model.safetensors", {"a": floats(1, 2), "b": floats(3)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(SafetensorsError, match="b ends at byte .*truncated"):
        Tensors(tmp_path)


@pytest.mark.parametrize(
    "header",
    [
        b"<html>404</html>",
        b"[1, 2]",
        b'{"a": 3}',
        b'{"a": {"dtype": "F32", "shape": [1]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}',
        b"\xff\xfe",
    ],
)
def test_what_is_no_safetensors_file_is_named(tmp_path, header):
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(SafetensorsError, match=r"model\.safetensors: not a safetensors file"):
        Tensors(tmp_path)


def test_an_unknown_type_is_named(tmp_path):
    write(tmp_path / "model.safetensors", {"a": ("F4", np.zeros(4, np.uint8))})
    with pytest.raises(SafetensorsError, match="a has the type F4; known are F64, F32"):
        Tensors(tmp_path)


def test_a_shape_that_does_not_fill_its_bytes_is_named(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"a": floats(1, 2, 3)})
    path.write_bytes(path.read_bytes().replace(b'"shape": [3]', b'"shape": [2]'))
    with pytest.raises(SafetensorsError, match=r"a of shape \(2,\) and type F32 does not fill"):
        Tensors(tmp_path)


def test_an_absent_name_is_an_error(tmp_path):
    shards(tmp_path)
    tensors = Tensors(tmp_path)
    for read in (tensors.shape, tensors.__getitem__):
        with pytest.raises(SafetensorsError, match="no tensor z"):
            read("z")
