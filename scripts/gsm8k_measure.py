"""Measurements of the study on Qwen2.5 beside its training: the test set, and what rounding and noise do at the start."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qerl_jax.api.policy import Policy, find, of_source
from qerl_jax.aqn import draw
from qerl_jax.aqn.dose import equal_entropy_temperature
from qerl_jax.config import LoraConfig
from qerl_jax.data.tokenizer import Message
from qerl_jax.generation.sampling_params import EngineLimits
from qerl_jax.model import layers, logprobs
from qerl_jax.model.transformer import head, noise_shapes
from qerl_jax.rewards.stock import STOCK

# Samples of a test problem, and how they are sampled. The greedy completion is one more.
SAMPLES, SAMPLING = 4, {"temperature": 0.6, "top_p": 0.95}
# Doses of AQN that are measured, and draws of each.
SIGMAS, DRAWS = (1e-2, 2e-2, 5e-2, 1e-1, 2e-1), 3
# Rows of one forward pass, and tokens whose distributions are compared at a time.
_ROWS, _CHUNK = 8, 512
_RESAMPLED = 2000


def loaded(path: str, weights: str, lora: LoraConfig | None) -> Policy:
    """Loads a base as the arms of the study do, with a fresh adapter, which changes nothing, or without one."""
    source = find(path, weights=weights, block_scales="maximum")
    return of_source(source, EngineLimits(), lora=lora, quiet=True)


def chats(rows: Sequence[Mapping[str, Any]], system_prompt: str) -> list[list[Message]]:
    """The prompts of rows as the policy is asked in training."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [[*system, {"role": "user", "content": row["prompt"]}] for row in rows]


def tested(
    policy: Policy,
    rows: Sequence[Mapping[str, Any]],
    system_prompt: str,
    max_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """Asks a policy all problems: samples of each, and a greedy completion; returns the accuracies.

    `right` has a digit for each problem, the number of its samples that are right by the strict parser, which wants the
    answer in a box. `flexible` takes the last number of the text. Both are shares of all samples. No base has drafts,
    which only packed ones could have.
    """
    began, prompts = time.monotonic(), chats(rows, system_prompt)
    gold = [row["answer"] for row in rows]
    options = {"max_tokens": max_tokens, "seed": seed, "drafts": "off"}
    outputs = policy.generate(prompts, n=SAMPLES, **SAMPLING, **options)
    greedy = [output.text for output in policy.generate(prompts, temperature=0.0, **options)]
    samples = [one for output in outputs for one in output.outputs]
    texts = [sample.text for sample in samples]

    def judged(parser: str, texts: Sequence[str], repeats: int) -> np.ndarray:
        answers = [answer for answer in gold for _ in range(repeats)]
        return np.array(STOCK[parser](completions=texts, answer=answers)).reshape(-1, repeats)

    strict, last = "boxed_reward", "gsm8k_flexible_reward"
    right = judged(strict, texts, SAMPLES)
    share = lambda values: float(f"{np.mean(values):.5g}")
    return {
        "right": "".join(str(int(count)) for count in right.sum(axis=1)),
        "samples": SAMPLES,
        "strict": share(right),
        "flexible": share(judged(last, texts, SAMPLES)),
        "greedy_strict": share(judged(strict, greedy, 1)),
        "greedy_flexible": share(judged(last, greedy, 1)),
        "mean_length": share([len(sample.token_ids) for sample in samples]),
        "truncated": share([sample.finish_reason == "length" for sample in samples]),
        "seconds": round(time.monotonic() - began, 1),
    }


def own_answers(
    policy: Policy, prompts: Sequence[Sequence[Message]], max_tokens: int, seed: int
) -> list[dict[str, Any]]:
    """Samples an answer to each prompt at temperature 1: the tokens of both, and whether it was cut off."""
    options = {"max_tokens": max_tokens, "seed": seed, "drafts": "off"}
    outputs = policy.generate(list(prompts), temperature=1.0, **options)
    return [
        {
            "prompt": output.prompt_token_ids.tolist(),
            "answer": output.outputs[0].token_ids.tolist(),
            "truncated": output.outputs[0].finish_reason == "length",
        }
        for output in outputs
    ]


class Start:
    """What rounding, noise and temperature do to the 16-bit policy, on its own answers: all see the same tokens."""

    def __init__(self, policy: Policy, answers: Sequence[Mapping[str, Any]]):
        """Takes a policy and its answers (`own_answers`) as the reference."""
        pairs = [(row["prompt"], row["answer"]) for row in answers]
        self.lengths = [len(answer) for _, answer in pairs]
        width = -(-max(len(a) + len(b) for a, b in pairs) // 64) * 64
        count = -(-len(pairs) // _ROWS) * _ROWS
        self._ids = np.zeros((count, width), np.int32)
        # True at the slots whose hidden states predict a token of the answer.
        self._live = np.zeros((count, width), bool)
        for row, (prompt, answer) in enumerate(pairs):
            end = len(prompt) + len(answer)
            self._ids[row, :end] = [*prompt, *answer]
            self._live[row, len(prompt) - 1 : end - 1] = True
        self._rows = np.nonzero(self._live)[0]
        self._head, self._num_tokens = head(policy.variables["frozen"]), policy.tokenizer.num_tokens
        self._hidden = self._states(policy, policy.variables)
        self.reference = self._of(self._hidden)

    def _states(self, policy: Policy, variables: Any) -> jax.Array:
        """The hidden states of a policy that predict the answers' tokens, [N, D]."""
        apply = _applied(policy.model)
        parts = [
            apply(variables, self._ids[at : at + _ROWS]) for at in range(0, len(self._ids), _ROWS)
        ]
        return jnp.concatenate(parts)[self._live]

    def _of(self, hidden: jax.Array, temperature: float = 1.0) -> np.ndarray:
        """KL(reference || policy) and the policy's entropy at each token, [2, N]."""
        size = min(_CHUNK, len(hidden))
        padded = -(-len(hidden) // size) * size
        rows = [jnp.pad(x, ((0, padded - len(x)), (0, 0))) for x in (self._hidden, hidden)]
        compare = functools.partial(_compared, self._num_tokens)
        parts = [
            compare(self._head, *(x[at : at + size] for x in rows), temperature)
            for at in range(0, padded, size)
        ]
        return np.concatenate(parts, axis=1)[:, : len(hidden)]

    def measured(self, policy: Policy, noise: Any = None) -> dict[str, Any]:
        """What another policy, or this one with noise, is at the reference's tokens; in nats per token.

        Intervals are of 95 %, from resampled answers.
        """
        variables = policy.variables | ({} if noise is None else {"noise": noise})
        return self._summary(self._of(self._states(policy, variables)))

    def at_temperature(self, temperature: float) -> dict[str, Any]:
        """What the reference is at another temperature."""
        return self._summary(self._of(self._hidden, temperature))

    def matched_temperature(self, entropy: float) -> float:
        """The temperature at which the reference has an entropy."""
        options = {"num_tokens": self._num_tokens}
        return equal_entropy_temperature(self._hidden, self._head, entropy, **options)

    def _summary(self, values: np.ndarray) -> dict[str, Any]:
        divergence, entropy = values
        columns = {"kl": divergence, "entropy": entropy, "change": entropy - self.reference[1]}
        answers = len(self.lengths)
        counts = np.bincount(self._rows, minlength=answers)
        chosen = np.random.default_rng(0).integers(answers, size=(_RESAMPLED, answers))
        summary = {}
        for name, column in columns.items():
            sums = np.bincount(self._rows, column, answers)
            ends = np.quantile(sums[chosen].sum(1) / counts[chosen].sum(1), [0.025, 0.975])
            summary[name] = [float(f"{x:.4g}") for x in (column.mean(), *ends)]
        return summary


@functools.cache
def _applied(model: Any) -> Any:
    """Compiled: the hidden states of rows of tokens after the last norm."""
    return jax.jit(lambda variables, ids: model.apply(variables, ids)[0])


@functools.partial(jax.jit, static_argnums=0)
def _compared(num_tokens: int, head: jax.Array, ours: jax.Array, other: jax.Array, temperature):
    exact, logps = (
        logprobs.log_softmax(layers.logits(x, head), heat, num_tokens)
        for x, heat in ((ours, 1.0), (other, temperature))
    )
    known = ~jnp.isneginf(exact)
    difference = jnp.where(known, exact - logps, 0)
    return jnp.stack([jnp.sum(jnp.exp(exact) * difference, axis=-1), logprobs.entropy(logps)])


def dose(start: Start, policy: Policy, sigma: float) -> dict[str, Any]:
    """What AQN of a sigma does to the 16-bit policy, the mean of several draws, and its share of a scale (median)."""
    shapes = noise_shapes(policy.model.arch)
    draws = [
        start.measured(policy, draw.norm_noise(jax.random.key(seed), sigma, shapes))
        for seed in range(DRAWS)
    ]
    scales = policy.variables["frozen"]["layers"]
    sizes = [np.abs(np.asarray(scales[name]["scale"], np.float32)) for name in shapes["layers"]]
    return {
        "kl": float(f"{np.mean([one['kl'][0] for one in draws]):.4g}"),
        "kl_of_draws": [one["kl"][0] for one in draws],
        "change": float(f"{np.mean([one['change'][0] for one in draws]):.4g}"),
        "share_of_a_scale": float(f"{np.median(sigma / np.concatenate(sizes)):.4g}"),
    }
