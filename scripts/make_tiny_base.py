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
import functools
import json
import pathlib
import random
import re
import shutil
import tempfile
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from qerl_jax.checkpoint.hf_folder import TINY, export_model
from qerl_jax.data import arithmetic, tokenizer
from qerl_jax.model import logprobs
from qerl_jax.model.architecture import from_hf
from qerl_jax.model.transformer import Transformer, head, random_base

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
    """Makes rows of ids [count, LENGTH] and the mask of what is learned: the answer and its stop token."""
    rng = random.Random(f"answers {seed}")
    kinds = rng.choices(list(shares), list(shares.values()), k=count)
    prompts, answers = [], []
    for index, kind in enumerate(kinds):
        problem = arithmetic.problem("train", seed, index)
        prompts.append([{"role": "user", "content": problem.question}])
        text = (
            arithmetic.worked_answer(problem)
            if kind == "worked"
            else arithmetic.faulty_answer(problem, kind, rng)
        )
        answers.append(text)
    encoded = tokens.hf(answers, add_special_tokens=False)["input_ids"]
    rows = np.full((count, LENGTH), tokens.pad_token, np.int32)
    learned = np.zeros((count, LENGTH), bool)
    for row, (prompt, answer) in enumerate(zip(tokens.encode(prompts), encoded, strict=True)):
        ids = [*prompt, *answer, tokens.stop_tokens[0]]
        rows[row, : len(ids)] = ids
        learned[row, len(prompt) : len(ids)] = True
    return rows, learned


def make_step(model: Transformer, tx: optax.GradientTransformation, num_tokens: int):
    """Makes one supervised step on the dense weights. The sum over tokens is divided by a constant.

    A mean over tokens would give short answers without working more weight than their share.
    """

    def loss_fn(weights, rows, learned):
        hidden, _ = model.apply({"frozen": weights}, rows[:, :-1])
        flat = hidden.reshape(-1, hidden.shape[-1])
        logps, _ = logprobs.of_targets(
            flat,
            head(weights),
            rows[:, 1:].reshape(-1),
            temperature=1.0,
            num_tokens=num_tokens,
            chunk=flat.shape[0],
        )
        return -jnp.sum(logps * learned[:, 1:].reshape(-1)) / (BATCH * 24)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, opt_state, rows, learned):
        loss, grads = jax.value_and_grad(loss_fn)(weights, rows, learned)
        updates, opt_state = tx.update(grads, opt_state, weights)
        return optax.apply_updates(weights, updates), opt_state, loss

    return step


def train(model, weights, tokens, shares, *, seed, steps, peak):
    """Runs one phase and returns the weights."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, peak, min(100, steps // 10), steps, 0.02 * peak
    )
    tx = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01)
    )
    step, opt_state = make_step(model, tx, tokens.num_tokens), tx.init(weights)
    rows, learned = examples(shares, seed, steps * BATCH, tokens)
    start = time.time()
    for index in range(steps):
        batch = slice(index * BATCH, (index + 1) * BATCH)
        weights, opt_state, loss = step(weights, opt_state, rows[batch], learned[batch])
        if index % 100 == 99:
            print(
                f"step {index + 1}/{steps} loss {float(loss):.4f} {time.time() - start:.0f} s",
                flush=True,
            )
    return weights


def main():
    """Trains both phases and writes the model's folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, default=TINY)
    parser.add_argument("--skill-steps", type=int, default=2000)
    parser.add_argument("--manners-steps", type=int, default=500)
    parser.add_argument(
        "--skill",
        type=pathlib.Path,
        help="folder for the result of phase 1; start from it if it exists",
    )
    parser.add_argument("--tokenizer", action="store_true", help="make only the tokenizer")
    args = parser.parse_args()
    if args.tokenizer:
        write_tokenizer(args.out)
        return

    tokens, arch = tokenizer.load(TINY), from_hf(CONFIG)
    model = Transformer(arch, "float32", None, jnp.float32)
    weights = random_base(model, jax.random.key(0))
    if args.skill and args.skill.exists():
        leaves = np.load(args.skill, allow_pickle=False)
        weights = jax.tree.unflatten(
            jax.tree.structure(weights), [jnp.asarray(leaves[name]) for name in leaves]
        )
    else:
        weights = train(model, weights, tokens, SKILL, seed=1, steps=args.skill_steps, peak=2.5e-3)
        if args.skill:
            np.savez(args.skill, *jax.tree.leaves(weights))
    weights = train(model, weights, tokens, MANNERS, seed=2, steps=args.manners_steps, peak=1.5e-3)

    with tempfile.TemporaryDirectory() as name:
        source = pathlib.Path(name)
        (source / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
        for file in TINY.glob("tokenizer*"):
            shutil.copy(file, source)
        model = Transformer(arch, "bfloat16", None, jnp.bfloat16)
        export_model(args.out, model, weights, source)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
