"""Computes logits of a model folder in float32. An interpreter with torch and transformers runs it:

python model_logits.py FOLDER IDS.npy OUT.npy
"""

import functools
import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def main(folder, ids, out):
    """Loads the model as any user would; packed ones through libraries that unpack weights to bfloat16."""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    options = {"dtype": torch.float32}
    packed = config.get("quantization_config", {}).get("quant_method")
    if packed == "compressed-tensors":
        quantization = CompressedTensorsConfig(run_compressed=False)
        options = {"dtype": torch.bfloat16, "quantization_config": quantization}
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    if packed == "bitsandbytes":
        _as_float(model)
    else:
        model = model.float()
    with torch.no_grad():
        np.save(out, model(torch.from_numpy(np.load(ids))).logits.numpy())


def _as_float(model):
    """Does what `float()` refuses for bitsandbytes' layers, whose CPU kernels compute in bfloat16."""
    from bitsandbytes.functional import dequantize_4bit

    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    for module in model.modules():
        if hasattr(module, "compute_dtype"):
            weight = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
            module.forward = functools.partial(
                torch.nn.functional.linear, weight=weight, bias=module.bias
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
