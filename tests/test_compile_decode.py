"""What `scripts/compile_decode.py` compiles is what the engine runs."""

import jax
import pytest

from qerl_jax.generation import engine
from scripts import compile_decode


@pytest.mark.parametrize("base", ["nvfp4", "bfloat16"])
def test_the_chunk_can_be_traced_from_shapes_alone(base):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes, traits = compile_decode.arguments("qwen2.5-0.5b", base, 2, 8, device)
    traced = engine._decode.of(traits["model"]).trace(*shapes, **traits)
    _, (tokens, logps, *_), moved = traced.out_info
    assert tokens.shape == logps.shape == (2, traits["spec"].chunk)
    assert set(moved) == {"ends", "token", "step", "live"}
