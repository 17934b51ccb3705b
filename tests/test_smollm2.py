"""Tests a real pretrained model, SmolLM2-135M-Instruct, against Hugging Face transformers.

Needs the model's folder, which `scripts/smollm2.py` makes: QERL_SMOLLM2 names it.
"""

import dataclasses
import functools
import hashlib
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import qerl_jax
from qerl_jax import config
from qerl_jax.model import layers, logprobs
from qerl_jax.model.transformer import head
from qerl_jax.tracking import logger as log
from qerl_jax.training.trainer import train
from tests.golden_files import GOLDEN

FOLDER = os.environ.get("QERL_SMOLLM2")
RECORDED = json.loads((GOLDEN / "smollm2/golden.json").read_text("utf-8"))
ROWS = RECORDED["rows"]
CHATS = [row["chat"] for row in ROWS]
LOGPS = np.concatenate([row["logps"] for row in ROWS])
GREEDY = {"temperature": 0.0, "max_tokens": max(len(row["tokens"]) for row in ROWS)}

WHY = "QERL_SMOLLM2 names no folder of SmolLM2-135M-Instruct (scripts/smollm2.py makes one)"
pytestmark = pytest.mark.skipif(not FOLDER, reason=WHY)


@functools.cache
def policy(weights="float32", dtype="float32"):
    return qerl_jax.load(FOLDER, weights=weights, dtype=dtype, quiet=True)


@functools.cache
def distributions(weights="float32", dtype="float32"):
    """Computes log-probabilities [n, V] for each row's n recorded tokens, with one forward pass per row."""
    loaded = policy(weights, dtype)
    width = max(len(row["prompt_ids"]) + len(row["tokens"]) for row in ROWS)

    @jax.jit
    def of(variables, ids):
        hidden, _ = loaded.model.apply(variables, ids)
        scores = layers.logits(hidden, head(variables["frozen"]))
        return logprobs.log_softmax(scores, 1.0, loaded.tokenizer.num_tokens)[0]

    found = []
    for row in ROWS:
        first, tokens = len(row["prompt_ids"]), row["tokens"]
        ids = np.zeros((1, width), np.int32)
        ids[0, : first + len(tokens)] = row["prompt_ids"] + tokens
        logps = of(loaded.variables, jnp.asarray(ids))
        found.append(np.asarray(logps[first - 1 : first - 1 + len(tokens)]))
    return found


def of_recorded(logps):
    """Takes [n, V] of each row, and returns one array of the log-probabilities of all recorded tokens."""
    pairs = zip(logps, ROWS, strict=True)
    return np.concatenate([each[np.arange(len(each)), row["tokens"]] for each, row in pairs])


def test_the_model_is_the_one_that_was_recorded():
    for name, expected in RECORDED["sha256"].items():
        found = hashlib.sha256(pathlib.Path(FOLDER, name).read_bytes()).hexdigest()
        assert found == expected, f"{name}: other numbers cannot be expected of another file"


def test_prompts_get_the_ids_that_transformers_gives_them():
    ids = policy().tokenizer.encode(CHATS)
    assert ids == [row["prompt_ids"] for row in ROWS]


def test_greedy_completions_in_float32_are_those_of_transformers():
    for row, found in zip(ROWS, policy().completions(CHATS, **GREEDY), strict=True):
        assert found.token_ids.tolist() == row["tokens"], row["chat"]
        assert found.text == row["text"]
        np.testing.assert_allclose(found.logprobs, row["logps"], rtol=0, atol=1e-4)


def test_a_forward_pass_in_float32_gives_the_log_probabilities_of_transformers():
    np.testing.assert_allclose(of_recorded(distributions()), LOGPS, rtol=0, atol=1e-4)


# Mean KL(float32 || other) per token in nats, and the mean difference of the log-probabilities of the
# recorded tokens. Found: 0.0008 and 0.019, 0.26 and 0.37, 0.29 and 0.41.
@pytest.mark.parametrize(
    "weights,dtype,most_kl,most_difference",
    [
        ("bfloat16", "bfloat16", 0.003, 0.04),
        ("nvfp4", "float32", 0.35, 0.5),
        ("nf4", "bfloat16", 0.4, 0.55),
    ],
)
def test_a_rounded_base_stays_close_to_the_float32_one(weights, dtype, most_kl, most_difference):
    exact, rounded = distributions(), distributions(weights, dtype)
    kls = [np.sum(np.exp(p) * (p - q), axis=-1) for p, q in zip(exact, rounded, strict=True)]
    difference = np.abs(of_recorded(rounded) - LOGPS).mean()
    assert 0 < np.concatenate(kls).mean() < most_kl
    assert difference < most_difference


def test_a_packed_base_generates_finite_log_probabilities_of_likely_tokens():
    completions = list(policy("nvfp4", "bfloat16").completions(CHATS, **GREEDY))
    assert len(completions) == len(CHATS)
    logps = np.concatenate([found.logprobs for found in completions])
    assert np.isfinite(logps).all() and (logps <= 0).all()
    assert logps.mean() > -1.2  # found: -0.76; of one token in 49,152 by chance it would be -10.8


@pytest.mark.gpu
def test_training_on_the_real_model_learns_from_finite_losses(tmp_path):
    """It runs three steps of the shipped config; `scripts/smollm2.py` does this and the rest of the product."""
    cfg = config.load("smollm2_arithmetic")
    model = dataclasses.replace(cfg.model, model_name_or_path=FOLDER)
    changes = {"output_dir": str(tmp_path / "run"), "max_steps": 3, "model": model}
    evaluation = dataclasses.replace(cfg.eval, num_problems=16)
    cfg = dataclasses.replace(cfg, eval=evaluation, **changes)
    train(cfg, quiet=True)
    steps = [row for row in log.read_metrics(tmp_path / "run") if "loss" in row]
    assert len(steps) == 3
    assert np.isfinite([[row["loss"], row["grad_norm"]] for row in steps]).all()
    assert max(row["grad_norm"] for row in steps) > 0
    assert max(row["reward"] for row in steps) > 0
    assert (tmp_path / "run/adapter/adapter_model.safetensors").is_file()
