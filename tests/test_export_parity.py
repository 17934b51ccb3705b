"""Tests that transformers loads our exported models, packed ones through compressed-tensors, and gives our logits.

Needs an interpreter with torch, transformers and, for packed models, compressed-tensors: this one, or
that of QERL_TORCH_PYTHON.
"""

import numpy as np
import pytest

from qerl_jax.checkpoint import export
from tests import golden_files, parity
from tests.golden_files import GOLDEN
from tests.model_folders import copy
from tests.qerl_jax.checkpoint.test_export import TOKENS, finished_run, logits, read

ENDS = {"model.embed_tokens.weight", "lm_head.weight"}


def wide_enough(source, target):
    """Makes a model folder with a row for every id of the tiny tokenizer, which is put into it."""
    held = golden_files.load(source / "model.safetensors")
    tensors = {
        name: np.resize(held[name], (512, held[name].shape[1])) for name in ENDS & held.keys()
    }
    return copy(source, target, config={"vocab_size": 512}, tensors=tensors)


@pytest.mark.slow
@pytest.mark.parametrize(
    "to,library", [("merged", "transformers"), ("nvfp4", "compressed_tensors")]
)
@pytest.mark.parametrize("base", ["qwen2_tied", "qwen3", "llama3", "mistral"])
def test_transformers_gives_our_logits_from_an_exported_model(to, library, base, tmp_path):
    """compressed-tensors unpacks to bfloat16, so packed weights are compared as such."""
    parity.needs(library)
    folder = wide_enough(GOLDEN / "models" / base, tmp_path / "base")
    model = {"model_name_or_path": str(folder), "tokenizer_name_or_path": "qerl-tiny"}
    finished_run(tmp_path / "run", **model)
    export.export(tmp_path / "run", to, tmp_path / "out", base="original", limit=float("inf"))
    theirs = parity.transformers_logits(library, tmp_path / "out", TOKENS, tmp_path)
    weights = "bfloat16" if to == "nvfp4" else "float32"
    np.testing.assert_allclose(logits(*read(tmp_path / "out", weights)), theirs, atol=2e-4)
