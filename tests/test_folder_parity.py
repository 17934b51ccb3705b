"""Tests that transformers loads the folders of `qerl export` and `qerl quantize`, and gives our logits.

NVFP4 and MXFP4 pass through compressed-tensors, NF4 through bitsandbytes; both unpack to bfloat16, so packed weights are
compared as such. Needs an interpreter with torch, transformers and these: this one, or that of QERL_TORCH_PYTHON.
"""

import numpy as np
import pytest

from qerl_jax.checkpoint import export, hf_folder
from qerl_jax.quantization.calibration import Calibration
from qerl_jax.quantization.quantizer import Recipe, quantize
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
    parity.needs(library)
    folder = wide_enough(GOLDEN / "models" / base, tmp_path / "base")
    model = {"model_name_or_path": str(folder), "tokenizer_name_or_path": "qerl-tiny"}
    finished_run(tmp_path / "run", **model)
    export.export(tmp_path / "run", to, tmp_path / "out", base="original", limit=float("inf"))
    theirs = parity.transformers_logits(library, tmp_path / "out", TOKENS, tmp_path)
    weights = "bfloat16" if to == "nvfp4" else "float32"
    np.testing.assert_allclose(logits(*read(tmp_path / "out", weights)), theirs, atol=2e-4)


ROWS = Calibration("arithmetic", num_samples=16, max_length=64)
KEEP = ("*.down_proj", "model.layers.0.self_attn.*")
CASES = {
    "nvfp4": (Recipe("nvfp4"), "compressed_tensors"),
    "nvfp4 maximum": (Recipe("nvfp4", block_scales="maximum"), "compressed_tensors"),
    "nvfp4 awq": (Recipe("nvfp4", "awq", calibration=ROWS), "compressed_tensors"),
    "nvfp4 gptq": (Recipe("nvfp4", "gptq", calibration=ROWS), "compressed_tensors"),
    "nvfp4 mixed": (Recipe("nvfp4", keep=KEEP), "compressed_tensors"),
    "mxfp4": (Recipe("mxfp4"), "compressed_tensors"),
    "mxfp4 gptq": (Recipe("mxfp4", "gptq", calibration=ROWS), "compressed_tensors"),
    "nf4": (Recipe("nf4"), "bitsandbytes"),
    "nf4 mixed": (Recipe("nf4", keep=KEEP), "bitsandbytes"),
    "nf4 single": (Recipe("nf4", double_quant=False), "bitsandbytes"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_transformers_gives_our_logits_from_a_quantized_folder(case, tmp_path):
    recipe, library = CASES[case]
    parity.needs(library)
    quantize(str(hf_folder.TINY), tmp_path / "out", recipe, lambda line: None)
    theirs = parity.transformers_logits(library, tmp_path / "out", TOKENS, tmp_path)
    ours = logits(*read(tmp_path / "out", "bfloat16"))
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
