"""Tests that a number format is one row in each registry: a toy format runs wherever the others do."""

import ast
import dataclasses
import pathlib
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import FORMATS, NumberFormat, PackedTensor, packed_matmul
from pallas_kernels.formats.number_format import Tiling
from pallas_kernels.formats.registry import with_options
from qerl_jax.checkpoint import base_model, packed_formats
from qerl_jax.checkpoint.folder_tensors import FolderTensors
from qerl_jax.checkpoint.packed_formats import FolderFormat
from qerl_jax.config import PackedFormat
from qerl_jax.model import architecture, fused_decode
from qerl_jax.model.division import Division
from qerl_jax.model.transformer import Transformer, random_base
from qerl_jax.quantization import quantizer
from tests.model_folders import assert_trees_equal
from tests.pallas_kernels.common import slow

ROOT = pathlib.Path(__file__).parents[1]
# CONTRIBUTING, "A number format", lists these and the tests and pages; the portable kernels need not read a format.
PLACES = {
    "pallas_kernels/formats/registry.py",
    "qerl_jax/checkpoint/packed_formats.py",
    "qerl_jax/config/sections.py",
    "qerl_jax/training/dose.py",
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ToyTensor(PackedTensor):
    """Bytes with one scale for each block of 4 rows and 8 columns."""

    codes: jax.Array
    scales: jax.Array
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})


def per_entry(scales):
    return jnp.repeat(jnp.repeat(scales, 4, axis=-2), 8, axis=-1)


def toy(w, scales=None):
    w = w.astype(jnp.float32)
    if scales is None:
        *stack, n, k = w.shape
        largest = jnp.max(jnp.abs(w.reshape(*stack, n // 4, 4, k // 8, 8)), axis=(-3, -1))
        scales = jnp.maximum(largest, 1e-6) / 127
    return ToyTensor(jnp.round(w / per_entry(scales)).astype(jnp.int8), scales, w.shape[-2:])


def decode(t, dtype=jnp.float32):
    return (t.codes * per_entry(t.scales)).astype(dtype)


def fuse(parts, *, shared):
    join = lambda name: jnp.concatenate([getattr(part, name) for part in parts], axis=-2)
    codes, scales = join("codes"), join("scales")
    return ToyTensor(codes, scales, codes.shape[-2:])


NUMBERS = NumberFormat(
    name="toy8",
    tensor=ToyTensor,
    multiple=8,
    group=8,
    grid=np.arange(-127, 128, dtype=np.float32),
    quantize=lambda parts, options: [toy(part) for part in parts],
    search=lambda parts, moments, like, options: [toy(part) for part in parts],
    recode=lambda w, t: toy(w, t.scales),
    steps=lambda t: per_entry(t.scales),
    dequantize=decode,
    fuse=fuse,
    random=lambda key, shape: toy(0.02 * jax.random.normal(key, shape)),
    tilings={
        "rows": {"codes": Tiling(-2), "scales": Tiling(-2, 4)},
        "columns": {"codes": Tiling(-1), "scales": Tiling(-1, 8)},
    },
)


def read_toy(tensors, name):
    codes = tensors[f"{name}.weight_toy"]
    return ToyTensor(codes, tensors[f"{name}.weight_step"], codes.shape)


def folder_format(options):
    return FolderFormat(
        numbers=with_options("toy8", options),
        shapes=lambda n, k: {"weight_toy": (n, k), "weight_step": (n // 4, k // 8)},
        nbytes=lambda n, k: n * k + n * k // 8,
        types={"weight_toy": ("I8",)},
        write=lambda t: {"weight_toy": t.codes, "weight_step": t.scales},
        read=read_toy,
        config={"quant_method": "toy", "format": "eight", "ignore": ["lm_head"]},
    )


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Adds the toy format to the registries."""
    monkeypatch.setitem(FORMATS, "toy8", NUMBERS)
    monkeypatch.setitem(packed_formats.WRITTEN, "toy8", folder_format)
    monkeypatch.setitem(packed_formats._READ, ("toy", "eight"), folder_format)


def read(folder, weights="toy8"):
    model = Transformer(architecture.load(folder), weights, None, jnp.float32)
    model = model.clone(dense_linears=FolderTensors(folder, model.arch).dense_linears())
    return model, base_model.read_base(folder, model)


def test_a_new_format_is_quantized_written_and_read(tmp_path):
    recipe = quantizer.Recipe("toy8", keep=("model.layers.0.mlp.*",))
    report = quantizer.quantize("qerl-tiny", tmp_path / "out", recipe, lambda line: None)
    assert all(layer["weights"]["qkv"] < 0.01 for layer in report["layers"])
    assert packed_formats.of_folder(tmp_path / "out").name == "toy8"
    model, base = read(tmp_path / "out")
    assert model.dense_linears == (("gate_up", (0,)), ("down", (0,)))
    assert isinstance(base["layers"]["qkv"]["weight"], ToyTensor)
    _, dense = read(tmp_path / "out", "float32")
    unpacked = decode(base["layers"]["qkv"]["weight"])
    np.testing.assert_allclose(unpacked, dense["layers"]["qkv"]["weight"], rtol=1e-6)


@pytest.mark.slow
def test_a_16_bit_base_is_packed_on_load_as_random_ones_are():
    model, base = read(base_model.hf_folder.TINY)
    shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    made = random_base(model, jax.random.key(0))
    assert shapes(made["layers"]["down"]) == shapes(base["layers"]["down"])
    hidden, _ = jax.jit(model.apply)({"frozen": base}, jnp.arange(8)[None])
    assert np.isfinite(hidden).all()
    reason = fused_decode.supports(model.clone(dtype=jnp.bfloat16), 1, "portable")
    assert reason is not None


def test_a_new_format_multiplies_and_has_a_gradient():
    w, x = NUMBERS.random(jax.random.key(0), (8, 16)), jnp.ones((3, 16))
    y, pull = jax.vjp(lambda x: packed_matmul(x, w), x)
    np.testing.assert_allclose(y, x @ decode(w).T, rtol=1e-5)
    np.testing.assert_allclose(pull(y)[0], y @ decode(w), rtol=1e-5)
    with pytest.raises(ValueError, match=r"one \[N, K\] matrix; got a stack \(2, 8, 16\)"):
        packed_matmul(x, NUMBERS.random(jax.random.key(0), (2, 8, 16)))


@pytest.mark.parametrize("linear", ["qkv", *map(slow, ("gate_up", "down"))])
def test_blocks_that_span_rows_are_divided_whole(linear):
    arch = architecture.load(base_model.hf_folder.TINY)
    division = Division(arch, 2, "toy8")
    division.require()
    shape = sum(size for _, size in arch.linears()[linear]), arch.input_width(linear)
    weight = NUMBERS.random(jax.random.key(0), shape)
    assert_trees_equal(division.whole(linear, division.split(linear, weight)), weight)
    narrow = dataclasses.replace(arch, head_size=2, num_heads=8, num_kv_heads=2)
    with pytest.raises(ValueError, match=r"2 outputs of k_proj, in heads of 2, and blocks of 4 "):
        Division(narrow, 2, "toy8").require()


def code_words(path):
    """Yields the identifiers and strings of a file, without docstrings and comments."""
    tree = ast.parse(path.read_text())
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and id(node) not in texts:
            yield str(node.value)
        else:
            names = ("id", "attr", "name", "arg", "module")
            yield from (str(getattr(node, name, "")) for name in names)


@pytest.mark.parametrize("name", ["mxfp4", "nf4"])
def test_a_format_is_named_where_contributing_says_and_nowhere_else(name):
    named = set()
    for package in ("pallas_kernels", "qerl_jax"):
        for path in (ROOT / package).rglob("*.py"):
            pattern = re.compile(rf"(?i)(?<!v){name}")
            if pattern.search(path.read_text()) and any(map(pattern.search, code_words(path))):
                named.add(str(path.relative_to(ROOT)))
    portable = {path for path in named if path.startswith("pallas_kernels/portable/")}
    assert named - portable == PLACES | {f"pallas_kernels/formats/{name}.py"}


def test_the_registries_and_the_config_list_the_same_formats():
    names = [name for name in FORMATS if name != "toy8"]
    assert names == list(typing.get_args(PackedFormat))
    assert set(packed_formats.WRITTEN) == set(FORMATS)
    assert {*packed_formats._READ.values()} >= {*packed_formats.WRITTEN.values()}
