"""Tests that PEFT loads our exports and we load PEFT's adapters, with the same meaning.

Needs an interpreter with torch, transformers and peft: this one, or that of QERL_TORCH_PYTHON.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint import hf_folder, peft
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.config import LoraConfig, ModelConfig
from qerl_jax.model import layers
from qerl_jax.model.transformer import head, init_params
from tests import parity

CFG = ModelConfig("qerl-tiny", weights="float32", dtype="float32")
TOKENS = np.random.default_rng(2).integers(0, 426, (2, 20))


def logits(model, frozen, params, **how):
    variables = {"params": params, "frozen": frozen}
    hidden, _ = model.apply(variables, jnp.asarray(TOKENS, jnp.int32), **how)
    return layers.logits(hidden, head(frozen))


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        LoraConfig(8, 16.0),
        LoraConfig(8, 16.0, train_norms=True),
        LoraConfig(
            4,
            16.0,
            target_modules=("q_proj", "v_proj", "down_proj"),
            rank_pattern={"layers.1.self_attn.q_proj": 2, "down_proj": 6},
            alpha_pattern={"v_proj": 32.0},
            use_rslora=True,
        ),
    ],
    ids=["lora", "lora and norms", "patterns"],
)
def test_peft_gives_our_logits_from_an_exported_adapter(shape, tmp_path):
    parity.needs("peft")
    model, frozen, _ = load_base(CFG, shape)
    params = init_params(model, frozen, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    # Away from the start, where B is zero and norms are the base's.
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(next(keys), x.shape), params)
    # What fills up a branch of a lower rank is no part of it.
    peft.export_adapter(tmp_path / "adapter", params, shape, str(hf_folder.TINY))
    params = peft.import_adapter(tmp_path / "adapter", model)
    np.save(tmp_path / "ids.npy", TOKENS)
    paths = [hf_folder.TINY, tmp_path / "adapter", tmp_path / "ids.npy", tmp_path / "out.npz"]
    parity.run("peft", "peft_logits.py", *paths)
    theirs = np.load(tmp_path / "out.npz")
    for name, adapter in (("base", False), ("adapter", True)):
        ours = logits(model, frozen, params, adapter=adapter)
        np.testing.assert_allclose(ours, theirs[name], atol=2e-4)
    assert np.abs(theirs["adapter"] - theirs["base"]).max() > 0.1


SMALL, LARGE = {"r": 4, "lora_alpha": 8}, {"r": 8, "lora_alpha": 16}
OPTIONS = {
    "all": LARGE | {"target_modules": "all-linear"},
    "rslora": LARGE | {"use_rslora": True, "target_modules": "all-linear"},
    "patterns": SMALL
    | {
        "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"],
        "rank_pattern": {"v_proj": 6, "layers.1.self_attn.o_proj": 2},
        "alpha_pattern": {"v_proj": 3, ".*down_proj": 20},
        "exclude_modules": ["layers.0.self_attn.q_proj"],
    },
    "patterns and rslora": SMALL
    | {
        "use_rslora": True,
        "target_modules": r".*\.(mlp|self_attn)\.(q|k|up)_proj",
        "rank_pattern": {"q_proj": 9},
        "alpha_pattern": {"model.layers.2.mlp.up_proj": 1},
    },
    "some layers": SMALL | {"target_modules": ["q_proj", "up_proj"], "layers_to_transform": [0, 2]},
    "norms": {
        **{"r": 4, "lora_alpha": 4, "target_modules": ["k_proj"]},
        "modules_to_save": ["input_layernorm", "post_attention_layernorm"],
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_an_adapter_that_peft_saved_gives_pefts_logits(options, tmp_path):
    parity.needs("peft")
    (tmp_path / "options.json").write_text(json.dumps(OPTIONS[options]))
    np.save(tmp_path / "ids.npy", TOKENS)
    names = ("options.json", "ids.npy", "adapter", "out.npy")
    paths = [hf_folder.TINY, *(tmp_path / name for name in names)]
    parity.run("peft", "peft_writes.py", *paths)
    theirs = np.load(tmp_path / "out.npy")

    model, frozen, _ = load_base(CFG, peft.read_lora(tmp_path / "adapter"))
    params = peft.import_adapter(tmp_path / "adapter", model)
    np.testing.assert_allclose(logits(model, frozen, params), theirs, atol=2e-4)
