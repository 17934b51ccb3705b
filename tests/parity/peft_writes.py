"""Saves an adapter with PEFT and computes its logits. An interpreter with torch, transformers and peft runs it:

python peft_writes.py BASE OPTIONS.json IDS.npy ADAPTER OUT.npy
"""

import json
import pathlib
import sys

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM


def main(base, options, ids, adapter, out):
    """Makes an adapter with these options of LoraConfig and no zeros; saves it, and runs it in float32."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = json.loads(pathlib.Path(options).read_text())
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.05 * torch.randn_like(parameter)
        np.save(out, model(torch.from_numpy(np.load(ids))).logits.numpy())
    model.save_pretrained(adapter)


if __name__ == "__main__":
    main(*sys.argv[1:])
