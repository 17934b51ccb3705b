"""What we export, PEFT loads, and it means the same there.

Needs an interpreter with torch, transformers and peft: this one, or that of QERL_TORCH_PYTHON.
"""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax import adapters, checkpoint, layers
from qerl_jax.config import LoraConfig, ModelConfig
from qerl_jax.model import head, init_params

SCRIPT = pathlib.Path(__file__).parent / "parity" / "peft_logits.py"


def torch_python():
    """The interpreter to compare with, or None."""
    if named := os.environ.get("QERL_TORCH_PYTHON"):
        return named
    here = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "peft"))
    return sys.executable if here else None


@pytest.mark.slow
@pytest.mark.skipif(torch_python() is None, reason="no interpreter with torch and peft is known")
@pytest.mark.parametrize("train_norms", [False, True], ids=["lora", "lora and norms"])
def test_peft_gives_our_logits_from_an_exported_adapter(train_norms, tmp_path):
    cfg = ModelConfig("qerl-tiny", weights="float32", dtype="float32")
    model, frozen, _ = checkpoint.load_policy(cfg, LoraConfig(8, 16.0, 0.0, train_norms))
    params = init_params(model, frozen, jax.random.key(0))
    keys = iter(jax.random.split(jax.random.key(1), 100))
    # Away from the start, where B is zero and norms are the base's.
    params = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(next(keys), x.shape), params)
    tokens = np.asarray(jax.random.randint(jax.random.key(2), (2, 20), 0, 426), np.int64)

    adapters.export_adapter(tmp_path / "adapter", params, model.lora, str(checkpoint.TINY))
    np.save(tmp_path / "ids.npy", tokens)
    paths = [checkpoint.TINY, tmp_path / "adapter", tmp_path / "ids.npy", tmp_path / "out.npz"]
    subprocess.run([torch_python(), SCRIPT, *map(str, paths)], check=True)
    theirs = np.load(tmp_path / "out.npz")

    variables = {"params": params, "frozen": frozen}
    for name, adapter in (("base", False), ("adapter", True)):
        hidden, _ = model.apply(variables, jnp.asarray(tokens, jnp.int32), adapter=adapter)
        ours = layers.logits(hidden, head(frozen))
        np.testing.assert_allclose(ours, theirs[name], atol=2e-4)
    assert np.abs(theirs["adapter"] - theirs["base"]).max() > 0.1
