"""Tests scaled rotations and attention windows against transformers (golden/rope), and which configs are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint import base_model
from qerl_jax.generation.sampler import Sampler
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.model import architecture, layers
from qerl_jax.model.transformer import Transformer, head
from tests import golden_files
from tests.golden_files import GOLDEN
from tests.model_folders import copy
from tests.pallas_kernels.common import slow

CASES = json.loads((GOLDEN / "rope" / "cases.json").read_text())
BASES = GOLDEN / "models"

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
LAYERS = ["full_attention", "sliding_attention"]
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}


def from_changed(base, changes):
    config = json.loads((BASES / base / "config.json").read_text()) | changes
    return architecture.from_hf({name: v for name, v in config.items() if v is not None})


@pytest.mark.parametrize("name", [slow(name) if name.endswith("_v4") else name for name in CASES])
def test_frequencies_and_logits_equal_transformers(name, tmp_path):
    base, changes = CASES[name]["base"], CASES[name]["changes"]
    recorded = golden_files.load(GOLDEN / "rope" / "reference.safetensors")
    folder = copy(BASES / base, tmp_path / "model", config=changes)
    arch = architecture.load(folder)
    np.testing.assert_allclose(
        layers.rope_frequencies(arch), recorded[f"{name}.inv_freq"], rtol=2e-6
    )
    cosine, _ = layers.rope_tables(jnp.zeros((1, 1), jnp.int32), arch)
    np.testing.assert_allclose(cosine, recorded[f"{name}.attention_factor"][0], rtol=1e-6)
    model = Transformer(arch, "float32", None, jnp.float32)
    frozen = base_model.read_base(folder, model)
    run = lambda frozen, ids: layers.logits(model.apply({"frozen": frozen}, ids)[0], head(frozen))
    logits = jax.jit(run)(frozen, recorded["ids"])[0, np.array([11, 23])]
    np.testing.assert_allclose(logits, recorded[f"{name}.logits"], atol=1e-4)


@pytest.mark.parametrize(
    ("base", "changes", "context", "window"),
    [
        ("mistral", {"sliding_window": 24}, 24, 24),
        ("mistral", {"sliding_window": 512}, 512, None),
        ("mistral", {"max_position_embeddings": 8192}, 8192, None),  # null in the file
        ("qwen2_tied", QWEN_WINDOW | {"max_window_layers": 2}, 128, None),
        ("qwen2_tied", QWEN_WINDOW | {"max_window_layers": 1, "layer_types": None}, 8, 8),
        ("qwen3", {"layer_types": LAYERS, "sliding_window": 9}, 9, 9),
        ("qwen2_tied", {"use_sliding_window": False, "sliding_window": 0}, 128, None),
        ("qwen2_tied", {"rope_parameters": YARN}, 512, None),
    ],
)
def test_the_longest_row_is_that_of_context_and_window(base, changes, context, window):
    config = json.loads((BASES / base / "config.json").read_text()) | changes
    arch = architecture.from_hf(config)
    assert (arch.context, arch.window) == (context, window)
    arch.require_context(context - 2, 2, "max_tokens")
    rule = "sliding_window = .*only full attention" if window else "max_position_embeddings"
    with pytest.raises(ValueError, match=f"max_tokens: got 3; with a prompt of .*{rule}"):
        arch.require_context(context - 2, 3, "max_tokens")


def test_a_completion_may_not_leave_the_window():
    """At the end of the context it would be cut off; here transformers would go on."""
    sampler = Sampler(None, None, SamplingParams(max_tokens=8), context=24, window=24)
    assert sampler._limit(0, 16) == 8
    with pytest.raises(ValueError, match="prompt 3: got 25 tokens with max_tokens; only full att"):
        sampler._limit(3, 17)


def test_a_window_that_mistrals_config_does_not_state_is_transformers_default():
    config = json.loads((BASES / "mistral" / "config.json").read_text())
    del config["sliding_window"]
    arch = architecture.from_hf(config | {"max_position_embeddings": 8192})
    assert arch.context == arch.window == 4096


@pytest.mark.parametrize(
    ("scaling", "text"),
    [
        ({"rope_type": "yarn"}, None),  # its factor is that of the contexts: 1
        ({"rope_type": "linear"}, "got 'linear'; it needs factor"),
        ({"rope_type": "linear", "factor": 0}, r"rope_scaling.factor: got 0; must be a positive"),
        ({"rope_type": "yarn", "factor": "4"}, r"rope_scaling.factor: got '4'"),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}, "beta_fast: got -1"),
        ({"rope_type": "longrope", "factor": 4.0}, "got 'longrope'; supported are default, linear"),
        (
            {"full_attention": {"rope_type": "default"}},
            "got 'full_attention'; one rotation for all",
        ),
        ({"rope_type": ["yarn"]}, r"got \['yarn'\]; supported are"),
    ],
)
def test_an_impossible_scaling_is_refused_by_its_field(scaling, text):
    changes = {"rope_parameters": None, "rope_scaling": scaling, "rope_theta": 1e4}
    if text is None:
        assert from_changed("llama3", changes).rope_scaling.factor == 1
        return
    with pytest.raises((ValueError, NotImplementedError), match=text):
        from_changed("llama3", changes)


@pytest.mark.parametrize("field", ["tie_word_embeddings", "use_sliding_window"])
def test_a_switch_must_be_true_or_false(field):
    with pytest.raises(ValueError, match=f"config.json: {field}: got 'false'; must be true or"):
        from_changed("qwen2_tied", {field: "false", "layer_types": None})


def test_dynamic_scaling_needs_a_context_beyond_which_it_would_begin():
    changes = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}
    assert from_changed("llama3", changes).rope_scaling is None
    with pytest.raises(ValueError, match="got 'dynamic'; it needs max_position_embeddings"):
        from_changed("llama3", changes | {"max_position_embeddings": None})
