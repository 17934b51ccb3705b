"""Run by an interpreter that has torch and transformers: logits of a model folder, in float32.

python model_logits.py FOLDER IDS.npy OUT.npy
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig


def main(folder, ids, out):
    """Loads it as any user would; a packed one through compressed-tensors, which unpacks to bfloat16."""
    config = json.loads((pathlib.Path(folder) / "config.json").read_text())
    options = {"dtype": torch.float32}
    if "quantization_config" in config:
        quantization = CompressedTensorsConfig(run_compressed=False)
        options = {"dtype": torch.bfloat16, "quantization_config": quantization}
    model = AutoModelForCausalLM.from_pretrained(folder, **options).float()
    with torch.no_grad():
        np.save(out, model(torch.from_numpy(np.load(ids))).logits.numpy())


if __name__ == "__main__":
    main(*sys.argv[1:])
