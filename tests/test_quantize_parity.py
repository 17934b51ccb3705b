"""Tests that transformers loads the folders of `qerl quantize` and gives our logits, also after calibration.

NVFP4 and MXFP4 pass through compressed-tensors, NF4 through bitsandbytes. Needs an interpreter with
torch, transformers and these: this one, or that of QERL_TORCH_PYTHON.
"""

import numpy as np
import pytest

from qerl_jax.checkpoint import hf_folder
from qerl_jax.quantization.calibration import Calibration
from qerl_jax.quantization.quantizer import Recipe, quantize
from tests import parity
from tests.qerl_jax.checkpoint.test_export import TOKENS, logits, read

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
    """The libraries unpack to bfloat16, so the weights are compared as such."""
    recipe, library = CASES[case]
    parity.needs(library)
    quantize(str(hf_folder.TINY), tmp_path / "out", recipe, lambda line: None)
    theirs = parity.transformers_logits(library, tmp_path / "out", TOKENS, tmp_path)
    ours = logits(*read(tmp_path / "out", "bfloat16"))
    np.testing.assert_allclose(ours, theirs, atol=2e-4)
