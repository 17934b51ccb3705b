"""Counts the micro-batches of SmolLM2's update for several overheads: `python -m scripts.count_micro_batches`.

Rows have lengths like those that SmolLM2 samples (log-normal, mean 39, limit 160; 8 of each prompt of 36 to 45 tokens).
They are cut into micro-batches as an update does it, with several values of `microbatches.overhead`: the cost of a
micro-batch besides its tokens. Milliseconds are those of an H100:
15 for each micro-batch and 4.93 us for each of its tokens (docs/lab-notes.md, "SmolLM2's step"). Nothing is computed on
a device.
"""

from __future__ import annotations

import argparse

import numpy as np

from qerl_jax.model.architecture import Architecture
from qerl_jax.rl import microbatches

SMOLLM2 = Architecture(
    "llama", 49152, 576, 1536, 30, 9, 3, 64, tie_word_embeddings=True, qkv_bias=False
)
GROUP, PROMPT, LIMIT = 8, 48, 160
_LAUNCH_MS, _TOKEN_MS = 15.0, 4.93e-3


def drawn(rng: np.random.Generator, rows: int, silent: float) -> microbatches.Rows:
    """The rows of a rollout, without the groups that do not learn."""
    lengths = np.clip(rng.lognormal(np.log(39) - 0.3, 0.8, rows), 1, LIMIT).astype(int)
    prompts = np.arange(rows) // GROUP
    prompt_lengths = rng.integers(36, 46, rows // GROUP)[prompts]
    found = microbatches.Rows(np.arange(rows), lengths, prompts, prompt_lengths)
    return found.take((rng.random(rows // GROUP) >= silent)[prompts])


def count(overhead: float, rows: int, silent: float, rollouts: int) -> tuple[float, float, float]:
    """Milliseconds and micro-batches of an update, as means over rollouts, and the share of padding."""
    rng, real, tokens, batches = np.random.default_rng(0), 0, 0, 0
    sizes = {"prompt_width": PROMPT, "completion_width": LIMIT, "group": GROUP, "max_rows": rows}
    shapes = microbatches.shapes(8192, **sizes, overhead=overhead)
    for _ in range(rollouts):
        chosen = drawn(rng, rows, silent)
        cut = microbatches.cut(chosen, shapes)
        real, batches = real + chosen.tokens, batches + len(cut)
        tokens += sum(batch.shape.tokens for batch in cut)
    ms = _LAUNCH_MS * batches + _TOKEN_MS * tokens
    return ms / rollouts, batches / rollouts, 1 - real / tokens


def main() -> None:
    """Prints a row for each overhead and share of groups that do not learn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=512, help="completions per rollout")
    parser.add_argument("--rollouts", type=int, default=20, help="number of drawn rollouts")
    args = parser.parse_args()
    now = microbatches.overhead(SMOLLM2)
    print("| overhead, tokens | groups without signal | ms | micro-batches | padding |")
    print("| --- | --- | --- | --- | --- |")
    for overhead in (256, now, 2 * now):
        for silent in (0.0, 0.5):
            ms, batches, padding = count(overhead, args.rows, silent, args.rollouts)
            print(f"| {overhead:.0f} | {silent:.0%} | {ms:.0f} | {batches:.1f} | {padding:.1%} |")


if __name__ == "__main__":
    main()
