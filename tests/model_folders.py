"""The recorded model folders as parameter trees, and changed copies of them."""

import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.checkpoint import base_model, safetensors
from qerl_jax.config import LoraConfig
from qerl_jax.model import architecture
from qerl_jax.model.transformer import Transformer, init_params
from tests import golden_files
from tests.golden_files import GOLDEN

DENSE = GOLDEN / "models/qwen2_untied"
PACKED = GOLDEN / "nvfp4/qwen2_untied"
ADAPTER = GOLDEN / "lora/qwen2_untied_r8"
ARCH = architecture.load(DENSE)


def read(folder, weights, dtype=jnp.float32):
    """Returns the model and the base of a folder."""
    model = Transformer(architecture.load(folder), weights, None, dtype)
    return model, base_model.read_base(folder, model)


@functools.cache
def base(folder, weights):
    return read(folder, weights)[1]


def assert_trees_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def copy(source, target, *, config=None, tensors=None):
    """Copies a model folder with some fields of its config and some tensors replaced; None removes one."""

    def changed(old, new):
        return {k: v for k, v in (old | (new or {})).items() if v is not None}

    target.mkdir(exist_ok=True)
    fields = json.loads((source / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(changed(fields, config)))
    if tensors is None:
        shutil.copy(source / "model.safetensors", target)
    else:
        held = golden_files.load(source / "model.safetensors")
        safetensors.write(target / "model.safetensors", changed(held, tensors))
    return target


def adapter_model(**changes):
    """Makes the dense model with a LoRA of rank 8."""
    return Transformer(ARCH, "float32", LoraConfig(8, 16.0, **changes), jnp.float32)


def with_norms():
    """Makes a model whose norms are trained, and params of it in which all numbers differ."""
    model = adapter_model(train_norms=True)
    params = init_params(model, base(DENSE, "float32"), jax.random.key(0))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(0)
    leaves = [jnp.asarray(rng.normal(size=leaf.shape).astype(np.float32)) for leaf in leaves]
    return model, jax.tree.unflatten(tree, leaves)
