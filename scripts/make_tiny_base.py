"""Makes the base model that ships with the package, and its tokenizer: `python -m scripts.make_tiny_base`.

The tokenizer (`--tokenizer` makes only that) is byte-level BPE over arithmetic problems. Each digit is a token. The
reasoning tags are ordinary added tokens: they survive `skip_special_tokens`, and rewards find them in the decoded text.
The chat marks are special. Text (in Unicode's form C) decodes to itself: every byte has a token.

A Qwen2 with 0.66 M parameters learns procedural arithmetic (`qerl_jax/data/arithmetic.py`) from random weights,
supervised, in two phases. Phase 1 teaches the skill with worked answers. Phase 2 makes the answers worse on purpose:
half of them are a bare number without working, and some are wrong, stop early or forget the tags. The result is a base
that can do the sums but mostly does not try. RL with a verifiable reward can repair this within minutes.

The shipped files were made on one H200 in 40 seconds; on two cores it takes about a quarter of an hour. The two round
differently, so the bytes differ, and the accuracy before RL differs by a few points.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from qerl_jax.checkpoint.hf_folder import TINY, export_model
from qerl_jax.data import arithmetic, tokenizer
from qerl_jax.model.architecture import from_hf
from qerl_jax.model.transformer import Transformer, random_base
from scripts import warm_up

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 512,
}
# Kinds of answers and their shares. "worked" is right and shows its work.
SKILL = {"worked": 1.0}
MANNERS = {"worked": 0.33, "blurt": 0.50, "slip": 0.07, "short": 0.05, "untagged": 0.05}
BATCH, LENGTH = 64, 84


VOCABULARY_LIMIT = 512
NUM_PROBLEMS = 20_000
SEED = 0
CHAT_MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")

# If a config.json of this architecture is beside the file, transformers replaces the file's normalization (NFC) and
# splitting with Qwen2's. So the file has the same ones.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def texts() -> Iterator[str]:
    """The training text: questions, the work of their answers, and the words of a chat."""
    for index in range(NUM_PROBLEMS):
        problem = arithmetic.problem("train", SEED, index)
        yield problem.question
        yield re.sub("|".join(TAGS), "", arithmetic.worked_answer(problem))
        yield from ("Easy.", "system\n", "user\n", "assistant\n")


def make_tokenizer() -> tokenizers.Tokenizer:
    """Trains the tokenizer. The same text gives the same tokenizer."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT - len(CHAT_MARKS) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(), trainer)
    tokenizer.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in CHAT_MARKS])
    tokenizer.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    return tokenizer


def write_tokenizer(folder: pathlib.Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "additional_special_tokens": ["<|im_start|>"],
        "padding_side": "left",
        "model_max_length": 256,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    print(f"{folder}: {tokenizer.get_vocab_size()} tokens")


def examples(shares: dict[str, float], seed: int, count: int, tokens: tokenizer.Tokenizer):
    """Makes rows of ids [count, LENGTH], of which the answer and its stop token count."""
    rng = random.Random(f"answers {seed}")
    kinds = rng.choices(list(shares), list(shares.values()), k=count)
    prompts, answers = [], []
    for index, kind in enumerate(kinds):
        problem = arithmetic.problem("train", seed, index)
        prompts.append([{"role": "user", "content": problem.question}])
        is_worked, faulty = kind == "worked", arithmetic.faulty_answer
        answers.append(
            arithmetic.worked_answer(problem) if is_worked else faulty(problem, kind, rng)
        )
    encoded = tokens.ids(answers)
    ends = [[*answer, tokens.stop_tokens[0]] for answer in encoded]
    return warm_up.joined(tokens.encode(prompts), ends, tokens.pad_token, LENGTH)


def train(model, weights, tokens, shares, *, seed, steps, peak):
    """Runs one phase and returns the weights. The sum over tokens is divided by a constant.

    A mean over tokens would give short answers without working more weight than their share.
    """
    warm = min(100, steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warm, steps, 0.02 * peak)
    adam = optax.adamw(schedule, b2=0.98, weight_decay=0.01)

    def loss(weights, ids, live):
        variables = {"frozen": weights}
        return -warm_up.log_likelihood(model, variables, ids, live, tokens.num_tokens) / (
            BATCH * 24
        )

    rows = examples(shares, seed, steps * BATCH, tokens)
    indices = np.arange(steps * BATCH).reshape(steps, BATCH)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adam)
    return warm_up.descend(loss, weights, optimizer, rows, indices)


def write_model(
    folder: pathlib.Path, model: Transformer, weights: Any, config: dict[str, Any]
) -> None:
    """Writes a model folder with this config.json and the tokenizer of the package."""
    with tempfile.TemporaryDirectory() as name:
        source = pathlib.Path(name)
        (source / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        for file in TINY.glob("tokenizer*"):
            shutil.copy(file, source)
        export_model(folder, model, weights, source)


def main():
    """Trains both phases and writes the model's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=TINY)
    parser.add_argument("--skill-steps", type=int, default=2000)
    parser.add_argument("--manners-steps", type=int, default=500)
    text = "file for the result of phase 1; start from it if it exists"
    parser.add_argument("--skill", type=pathlib.Path, help=text)
    parser.add_argument("--tokenizer", action="store_true", help="make only the tokenizer")
    args = parser.parse_args()
    if args.tokenizer:
        write_tokenizer(args.out)
        return

    tokens, arch = tokenizer.load(TINY), from_hf(CONFIG)
    model = Transformer(arch, "float32", None, jnp.float32)
    weights = random_base(model, jax.random.key(0))
    if args.skill and args.skill.exists():
        leaves = map(jnp.asarray, np.load(args.skill, allow_pickle=False).values())
        weights = jax.tree.unflatten(jax.tree.structure(weights), leaves)
    else:
        weights = train(model, weights, tokens, SKILL, seed=1, steps=args.skill_steps, peak=2.5e-3)
        if args.skill:
            np.savez(args.skill, *jax.tree.leaves(weights))
    weights = train(model, weights, tokens, MANNERS, seed=2, steps=args.manners_steps, peak=1.5e-3)

    write_model(args.out, Transformer(arch, "bfloat16", None, jnp.bfloat16), weights, CONFIG)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
