"""Tests that `scripts/compile_decode.py` compiles what the engine runs."""

import importlib.util

import jax
import pytest

from qerl_jax.generation import engine
from qerl_jax.generation.packed import Packed
from scripts import compile_decode


@pytest.mark.parametrize("base", ["nvfp4", "bfloat16"])
def test_the_chunk_can_be_traced_from_shapes_alone(base):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes, traits = compile_decode.arguments("qwen2.5-0.5b", base, 2, 8, device)
    traced = engine.decode.of(traits["model"]).trace(*shapes, **traits)
    _, brought, rows = traced.out_info
    tokens, logps, *_ = jax.eval_shape(Packed.tree, brought)
    assert tokens.shape == logps.shape == (2, traits["spec"].chunk)
    assert rows == jax.tree.map(lambda x: x.update(sharding=rows.words.sharding), shapes[2])


def lowered(card, kernels, model):
    """The text of the program for a card that is absent, and the traits of its arguments."""
    jax.clear_caches()
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with compile_decode.as_on(card, kernels) as card:
        absent = jax.sharding.AbstractDevice(card.name, card.processors, platform="gpu")
        mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=absent)
        shapes, traits = compile_decode.arguments(model, "nvfp4", 64, 8, device)
        with jax.sharding.use_abstract_mesh(mesh):
            traced = engine.decode.of(traits["model"]).trace(*shapes, **traits)
            return traced.lower(lowering_platforms=("cuda",)).as_text(), traits


@pytest.mark.slow
def test_the_program_is_lowered_for_a_card_that_is_absent():
    """What JAX refuses in a kernel for a card, it refuses here, and not in interpret mode."""
    text, _ = lowered("H200", None, "qwen2.5-3b")
    # Three products with an epilogue each, gate_up with its own, and attention.
    assert text.count("@mosaic_gpu_v2") == 8


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("jax_triton") is None,
    reason="needs jax-triton and JAX with CUDA (.[cuda])",
)
@pytest.mark.parametrize("name", ["A100", "RTX 4090"])
def test_jax_triton_lowers_the_program_for_a_card_that_is_absent(monkeypatch, name):
    """The interpreter, which other tests use, does not call jax-triton; and on a CPU nothing else does."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    text, traits = lowered(name, "portable", "qwen2.5-0.5b")
    # Four products, four kernels that finish them, and two of attention, in each layer.
    assert text.count("@triton_kernel_call") == 10 * traits["model"].arch.num_layers


def test_a_card_is_described_to_xla_by_its_own_numbers():
    said = compile_decode.properties(compile_decode.card("RTX 4090"))
    assert "{ major: 8 minor: 9 }" in said and "core_count: 128" in said
    assert "shared_memory_per_block_optin: 101376" in said and '"NVIDIA RTX 4090"' in said


def test_kernels_are_counted_in_the_loop_over_layers_alone():
    program = """%outer.2 (x: f32[]) -> f32[] {
  %copy.9 = f32[] copy(%x)
  %while.3 = (s32[]) while(%t), condition=%c, body=%layer.1, backend_config={"known_trip_count":{"n":"30"},"x":{}}
}

%layer.1 (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = f32[4]{0} fusion(%arg), kind=kLoop, calls=%inside
  %b = (f32[4]{0}, s8[8]{0}) custom-call(%a), custom_call_target="__cublas$lt$matmul"
  %c = f32[4]{0} get-tuple-element(%b), index=0
}
"""
    assert compile_decode.launches(program, 30) == 2
    assert compile_decode.launches(program, 28) is None
