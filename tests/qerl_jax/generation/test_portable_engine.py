"""Tests the whole engine on the portable kernels, run by Triton's interpreter."""

import jax
import numpy as np
import pytest

from pallas_kernels import runtime
from pallas_kernels.portable.layout import PortableWeight
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import ModelConfig
from qerl_jax.generation.engine import Engine, EngineSpec
from qerl_jax.generation.scheduler import QueuedPrompt
from qerl_jax.model import fused_decode
from tests.pallas_kernels.devices import assume, like  # noqa: F401
from tests.qerl_jax.generation.test_engine import complete


@pytest.mark.slow
@pytest.mark.skipif(not runtime.interprets_triton(), reason="needs triton and a CPU")
@pytest.mark.parametrize(
    ("weights", "capability"),
    # Before 8.0 float16 is multiplied, which has no MXFP4.
    [("nvfp4", "8.0"), ("mxfp4", "8.0"), ("nf4", "8.0"), ("nvfp4", "7.5"), ("nf4", "7.5")],
)
def test_the_portable_engine_samples_what_the_reference_does(assume, weights, capability):  # noqa: F811
    assume(like(compute_capability=capability), "auto")
    found = {}
    for kernels in ("reference", "portable"):
        # What was traced with other kernels must not be met again.
        jax.clear_caches()
        cfg = ModelConfig("qerl-tiny", weights=weights, dtype="bfloat16", kernels=kernels)
        model, frozen, _ = load_base(cfg, None)
        is_portable = isinstance(frozen["layers"]["qkv"]["weight"], PortableWeight)
        assert is_portable == (kernels == "portable") == (fused_decode.fit(model, 2) == kernels)
        engine = Engine(model, EngineSpec(model.arch.vocab_size), kv_cache_tokens=256)
        prompt = QueuedPrompt(np.array([5, 6, 7, 8], np.int32), np.zeros((2, 2), np.uint32), 3)
        limits = {"max_prompt_length": 8, "max_concurrent": 2}
        found[kernels] = complete(engine, [prompt], 0.0, {"frozen": frozen}, **limits)
    # NF4's table is rounded to bfloat16 there, and weights are here. Float16 drops the ends of small values.
    atol = 0 if weights != "nf4" and capability == "8.0" else 0.05
    for number, row in found["reference"].items():
        other = found["portable"][number]
        np.testing.assert_array_equal(row.tokens, other.tokens)
        np.testing.assert_allclose(row.behaviour_logps, other.behaviour_logps, atol=atol)
