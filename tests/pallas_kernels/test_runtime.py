"""Tests the questions about the device and about JAX."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import re
import tomllib
import types
from typing import get_args

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import runtime
from pallas_kernels.decode_attention import config as configs
from pallas_kernels.decode_attention import decode as attention
from pallas_kernels.nvfp4_matmul import (
    decode,
    dense_tile,
    dequantize,
    layout,
    prefill,
    prefill_config,
)
from pallas_kernels.nvfp4_matmul import decode_config as nvfp4_configs
from tests.pallas_kernels.devices import like


@pytest.fixture
def folder_of_programs(monkeypatch):
    """Sets where JAX keeps compiled programs, and resets that and which it keeps afterwards."""
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_compilation_cache_max_size",
    )
    before = {name: getattr(jax.config, name) for name in names}
    yield lambda folder: jax.config.update(names[0], folder)
    for name, value in before.items():
        jax.config.update(name, value)


def test_a_gpus_programs_are_kept_unless_jax_is_told_where(folder_of_programs):
    default = str(pathlib.Path("~/.cache/qerl_jax/xla").expanduser())
    cases = [("gpu", None, default), ("gpu", "/elsewhere", "/elsewhere"), ("cpu", None, None)]
    for platform, before, after in cases:
        folder_of_programs(before)
        with runtime.on(like(platform=platform)):
            runtime.use_compilation_cache()
        assert jax.config.jax_compilation_cache_dir == after


@pytest.mark.parametrize(("given", "seconds"), [(None, 0.0), ("2", 7.0)])
def test_programs_that_compile_quickly_are_kept_too_unless_jax_is_told_which(
    monkeypatch, folder_of_programs, given, seconds
):
    name = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
    monkeypatch.delenv(name, raising=False)
    if given is not None:
        monkeypatch.setenv(name, given)
    folder_of_programs(None)
    jax.config.update(name.lower(), 7.0)
    with runtime.on(runtime.H200):
        runtime.use_compilation_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == seconds


def test_deterministic_kernels_are_asked_for_once(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--one=1")
    assert all(runtime.use_deterministic_kernels() for _ in range(2))
    assert os.environ["XLA_FLAGS"] == f"--one=1 {_DETERMINISTIC}"


_DETERMINISTIC = "--xla_gpu_deterministic_ops=true"


@pytest.mark.parametrize(("flags", "is_used"), [("", True), ("", False), (_DETERMINISTIC, True)])
def test_a_gpu_used_without_them_has_no_deterministic_kernels(monkeypatch, h200, flags, is_used):
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr("jax._src.xla_bridge.backends_are_initialized", lambda: is_used)
    for _ in range(2):
        assert runtime.use_deterministic_kernels() == bool(flags or not is_used)


@pytest.mark.parametrize(
    ("kind", "bandwidth", "l2"),
    [
        ("NVIDIA H200", 4.8e12, 60 << 20),
        ("NVIDIA H200 NVL", 4.8e12, 60 << 20),
        ("NVIDIA H100 80GB HBM3", 3.35e12, 50 << 20),
        ("NVIDIA H100 PCIe", 2.0e12, 50 << 20),
        ("NVIDIA H20", 4.0e12, 60 << 20),
        ("NVIDIA of tomorrow", 4.8e12, 60 << 20),
    ],
)
def test_the_card_knows_its_processors_and_a_table_the_rest(monkeypatch, kind, bandwidth, l2):
    traits = {"device_kind": kind, "core_count": 16, "shared_memory_per_block_optin": 9}
    found = types.SimpleNamespace(compute_capability="9.0", **traits)
    # A namespace is not hashed by identity, as a device of JAX is.
    monkeypatch.setattr(runtime, "_described", runtime._described.__wrapped__)
    monkeypatch.setattr(jax, "devices", lambda: [found])
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    device = runtime.device()
    assert (device.name, device.processors, device.shared_bytes) == (kind, 16, 9)
    assert (device.bandwidth, device.l2_bytes) == (bandwidth, l2)
    assert runtime.is_hopper() and runtime.device_kind() == kind and runtime.platform() == "gpu"


@pytest.mark.skipif(runtime.platform() != "cpu", reason="asks what happens elsewhere")
def test_memory_is_that_of_the_fullest_of_several_devices(monkeypatch):
    def seen(*stats):
        devices = [types.SimpleNamespace(memory_stats=lambda each=each: each) for each in stats]
        monkeypatch.setattr(jax, "local_devices", lambda: devices)
        return runtime.memory_stats()

    first = {"bytes_limit": 80, "bytes_in_use": 30, "peak_bytes_in_use": 40}
    other = {"bytes_limit": 70, "bytes_in_use": 20, "peak_bytes_in_use": 60}
    assert seen(first) == first
    assert seen(first, other, None) == first | {"peak_bytes_in_use": 60}
    assert seen(None, None) is None


def test_without_a_gpu_what_is_planned_is_planned_for_an_h200():
    device, card = runtime.device(), runtime.H200
    assert (device.name, device.platform) == ("cpu", "cpu")
    figures = lambda d: (d.processors, d.l2_bytes, d.bandwidth, d.shared_bytes)
    assert figures(device) == figures(card)


@pytest.fixture
def grids(monkeypatch):
    """Collects the sizes of the grids of all launched kernels, without running any."""
    found = []

    def kernel(body, *, out_type, grid, **traits):
        found.append(grid)
        zeros = lambda out: jnp.zeros(out.shape, out.dtype)
        return lambda *operands: jax.tree.map(zeros, out_type)

    monkeypatch.setattr(plgpu, "kernel", kernel)
    return found


def test_plans_and_grids_fit_the_processors_that_a_card_has(grids, assume):
    card = assume(runtime.CARDS["NVIDIA H100 PCIe"])
    assert card.processors == 114
    # Decoding: one block each of wide matrices, a few each of others.
    assert nvfp4_configs.pick_config(16, 37888, 3584).blocks == 114
    assert nvfp4_configs.pick_config(128, 4608, 3584).blocks == 114
    assert {c.blocks for c in nvfp4_configs.candidates(64, 37888, 3584)} >= {114, 228}
    assert configs.pick_config(64, 4, 128).blocks == 114
    # A's share of the blocks.
    units = jnp.zeros((1, 56, 1, 4, *layout.TILE_SHAPE), jnp.int32)
    traits = {"height": 64, "m": 64, "base_bytes": 114 << 17, "most": 99}
    shares = functools.partial(dense_tile.shares, units, **traits)
    assert shares(processors=132) > shares(processors=114)
    words = jax.ShapeDtypeStruct((592, 56, *layout.TILE_SHAPE), jnp.int32)
    w = layout.HopperNVFP4(words, jax.ShapeDtypeStruct((1,), jnp.float32), (37888, 3584))
    x = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    config = nvfp4_configs.pick_config(16, *w.shape)
    jax.eval_shape(functools.partial(decode.matmul, config=config), x(16, 3584), w)
    jax.eval_shape(prefill.matmul, x(2048, 3584), w)
    jax.eval_shape(prefill.backward, x(2048, 37888), w)
    jax.eval_shape(dequantize.dequantize, w)
    turns, numbers = jnp.zeros((64, 64)), jnp.zeros(64, jnp.int32)
    config = configs.pick_config(64, 4, 128, 7)
    attend = functools.partial(attention.decode_attention, config=config)
    rest = jnp.int32(0), numbers[:, None], numbers
    run = lambda qkv, cache: attend(qkv, turns, turns, cache, cache, *rest)
    jax.eval_shape(run, x(64, 36, 128), x(2, 65, 4, 64, 128))
    clusters = 114 // prefill_config.pick_config(2048, 37888, 3584).cluster
    assert grids == [(114,), (clusters,), (114,), (4 * 114,), (114,)]


def test_no_kernel_knows_a_number_of_processors_by_heart():
    folder = pathlib.Path(runtime.__file__).parent
    sources = [path for path in folder.rglob("*.py") if path.name != "runtime.py"]
    assert len(sources) > 20
    for path in sources:
        assert not re.search(r"\b(132|114)\b", path.read_text()), path


@pytest.fixture
def on(monkeypatch):
    """Returns on(name, capability), which makes kernels be chosen as on a card, with or without jax-triton."""
    with contextlib.ExitStack() as stack:

        def enter(name, capability, *, has_triton=True):
            card = dataclasses.replace(runtime.H200, name=name, compute_capability=capability)
            stack.enter_context(runtime.on(card, "auto"))
            monkeypatch.delenv("PALLAS_KERNELS", raising=False)
            found = runtime.TRITON if has_triton else {}
            monkeypatch.setattr(runtime, "_installed", found.get)

        yield enter


@pytest.mark.parametrize(
    ("name", "capability", "has_triton", "chosen"),
    [
        ("NVIDIA H200", "9.0", True, "hopper"),
        ("NVIDIA H100 PCIe", "9.0", False, "hopper"),
        ("NVIDIA A100-SXM4-80GB", "8.0", True, "portable"),
        ("NVIDIA GeForce RTX 3090", "8.6", True, "portable"),
        ("Tesla T4", "7.5", True, "portable"),
        ("Quadro RTX 6000", "7.5", True, "portable"),
        ("NVIDIA GeForce RTX 5090", "12.0", True, "portable"),
        ("NVIDIA GeForce RTX 4090", "8.9", False, "reference"),
        ("Tesla V100-SXM2-16GB", "7.0", True, "reference"),
    ],
)
def test_a_card_gets_the_best_kernels_there_are_for_it(on, name, capability, has_triton, chosen):
    on(name, capability, has_triton=has_triton)
    lines = runtime.describe_kernels()
    assert lines[0] == f"kernels: {chosen}"
    if chosen == "reference":
        install = "pip install jax-triton==0.3.1 triton==3.6.0"
        assert ("7.5 or more; this is Tesla" if has_triton else install) in lines[2]
    is_old = float(capability) < 8
    assert runtime.tensor_core_type() == ("float16" if is_old else "bfloat16")
    assert runtime.has_cudnn_attention(128) != is_old


def test_cards_of_other_makers_have_neither_triton_nor_cudnn_here(on):
    on("AMD Instinct MI300X", "gfx942")
    assert "needs an NVIDIA GPU; this is AMD" in runtime.describe_kernels()[2]
    assert not runtime.has_cudnn_attention(128)


@pytest.mark.parametrize(("package", "version"), [("jax-triton", "0.4.1"), ("triton", "3.9.0")])
def test_another_version_than_the_tested_one_is_not_called(monkeypatch, on, package, version):
    on("NVIDIA A100-SXM4-80GB", "8.0")
    monkeypatch.setattr(runtime, "_installed", {**runtime.TRITON, package: version}.get)
    kernels, _, portable = runtime.describe_kernels()
    assert kernels == "kernels: reference"
    assert f"needs another {package} than {version}: pip install jax-triton==0.3.1" in portable


def test_what_is_missing_is_named_with_the_versions_of_the_project(on):
    on("NVIDIA A100-SXM4-80GB", "8.0", has_triton=False)
    (said,) = [line for line in runtime.describe_kernels() if "pip install" in line]
    project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
    wanted = [each.partition(";")[0] for each in project["optional-dependencies"]["triton"]]
    assert said.endswith(f"pip install {' '.join(wanted)}")


def test_kernels_can_be_chosen_by_name(on):
    on("NVIDIA H200", "9.0")
    for name, hopper_runs, portable_runs in (
        ("reference", False, False),
        ("portable", False, True),
        ("hopper", True, False),
        ("auto", True, True),
    ):
        runtime.use_kernels(name)
        assert runtime.chosen_kernels() == name
        assert (runtime.unless_hopper() is None) == hopper_runs
        assert (runtime.unless_portable() is None) == portable_runs


def test_the_environment_says_what_auto_means(monkeypatch, on):
    on("NVIDIA H200", "9.0")
    monkeypatch.setenv("PALLAS_KERNELS", "portable")
    assert runtime.describe_kernels()[:2] == [
        "kernels: portable",
        "Hopper kernels: no, kernels 'portable' were chosen",
    ]
    runtime.use_kernels("hopper")
    assert runtime.unless_hopper() is None
    runtime.use_kernels("auto")
    monkeypatch.setenv("PALLAS_KERNELS", "marlin")
    with pytest.raises(ValueError, match="PALLAS_KERNELS must be one of auto.*got 'marlin'"):
        runtime.unless_hopper()


def test_kernels_that_cannot_run_are_refused_and_change_nothing(on):
    on("NVIDIA A100-SXM4-80GB", "8.0", has_triton=False)
    for name, reason in (("hopper", "needs a GPU of compute capability 9.0"), ("portable", "pip")):
        with pytest.raises(NotImplementedError, match=f"kernels '{name}': .*{reason}"):
            runtime.use_kernels(name)
    with pytest.raises(ValueError, match="one of auto, hopper, portable, reference; got 'marlin'"):
        runtime.use_kernels("marlin")
    assert runtime.chosen_kernels() == "auto"


def test_a_config_may_say_what_the_runtime_knows():
    from qerl_jax import config

    assert get_args(config.Kernels) == runtime.KERNELS
