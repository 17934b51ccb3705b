"""Computes logits of a base and of an adapter on it. An interpreter with torch, transformers and peft runs it:

python peft_logits.py BASE ADAPTER IDS.npy OUT.npz
"""

import sys

import numpy as np
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM


def main(base, adapter, ids, out):
    """Loads base and adapter as any user would, in float32, and writes their logits as `base` and `adapter`."""
    tokens = torch.from_numpy(np.load(ids))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        plain = model(tokens).logits.numpy()
        model = PeftModel.from_pretrained(model, adapter)
        tuned = model(tokens).logits.numpy()
    np.savez(out, base=plain, adapter=tuned)


if __name__ == "__main__":
    main(*sys.argv[1:])
