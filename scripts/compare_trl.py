"""Prints every loss and correction beside TRL's own numbers (docs/losses.md): `python -m scripts.compare_trl`.

TRL's numbers are those of tests/golden/loss_trl, which `scripts.record_trl` recorded. Ours are computed in float32, as
in training. The last column is the largest difference of the gradient with respect to log-probabilities, relative to
its largest entry.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from qerl_jax.config import LOSS_TYPES, GrpoConfig, from_table
from qerl_jax.rl import entropy, grpo

GOLDEN = pathlib.Path(__file__).parents[1] / "tests/golden/loss_trl"

# Where an option of TRL's stands in our config, if not under its name in [grpo].
_TABLES = {
    "beta": ("reference", "beta"),
    "use_bias_correction_kl": ("reference", "bias_correction"),
    "entropy_coef": ("entropy", "coef"),
    "off_policy_mask_threshold": ("mismatch", "off_policy_threshold"),
    **{f"sapo_{name}": ("sapo", name) for name in ("temperature_pos", "temperature_neg")},
    **{f"vespo_{name}": ("vespo", name) for name in ("k_pos", "lambda_pos", "k_neg", "lambda_neg")},
}


def config_of(options: dict, clip_max: float) -> GrpoConfig:
    """The config of a recorded case, whose options have TRL's names."""
    table: dict = {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 0.0, "mismatch": {}}
    for name, value in options.items():
        section, field = _TABLES.get(name, ("", name))
        (table.setdefault(section, {}) if section else table)[field] = value
    mode = table.pop("importance_sampling_mode", None)
    if mode is not None:
        table["old_logprobs"] = "recompute"
        table["mismatch"]["correction"] = {"mode": mode, "clip_max": clip_max}
    if not table["mismatch"]:
        del table["mismatch"]
    if not table.get("reference", {}).get("beta"):
        table.pop("reference", None)
    return from_table(GrpoConfig, table, "grpo.")


def inputs_of(cfg: GrpoConfig, vectors: dict[str, np.ndarray]) -> grpo.LossInputs:
    """The recorded rows as arguments of `policy_loss`, in JAX's default dtype."""
    x = {name: jnp.asarray(value) for name, value in vectors.items() if "." not in name}
    mask, behaviour = x["mask"] != 0, x["behaviour_logps"]
    batch = grpo.LossInputs(
        x["logps"],
        x["old_logps"],
        x["advantages"],
        mask,
        x["ref_logps"] if cfg.reference else None,
        grpo.sampling_weights(cfg, x["logps"], x["old_logps"], behaviour, x["advantages"], mask),
        grpo.sampling_correction(cfg, x["old_logps"], behaviour, mask),
        x["entropies"],
    )
    if cfg.top_entropy_quantile == 1:
        return batch
    marked = entropy.high_entropy(
        vectors["entropies"], vectors["mask"] != 0, cfg.top_entropy_quantile
    )
    return batch._replace(high_entropy=jnp.asarray(marked))


def loss_and_gradient(cfg: GrpoConfig, batch: grpo.LossInputs) -> tuple[jax.Array, jax.Array]:
    """Our loss of a case, and its gradient with respect to the log-probabilities."""
    totals = grpo.BatchTotals(max_completion_length=32)
    loss = lambda logps: grpo.policy_loss(cfg, batch._replace(logps=logps), totals)[0]
    return jax.value_and_grad(loss)(batch.logps)


def row_of(case: dict) -> str:
    """The first cells of a case's row: the loss, the values that are not default, and TRL's number."""
    loss = case["options"]["loss_type"]
    told = [
        f"{name} = {value}"
        for name, value in case["options"].items()
        if name != "loss_type" and (name, value) != ("beta", 0)
    ]
    return f"| {loss} | {', '.join(told)} | {case['loss']:.6f} |"


def main() -> None:
    recorded = json.loads((GOLDEN / "cases.json").read_text())
    vectors = load_file(GOLDEN / "vectors.safetensors")
    print(f"| loss | beside the defaults | TRL {recorded['trl']} | ours | gradient |")
    print("| --- | --- | --- | --- | --- |")
    by_loss = lambda numbered: LOSS_TYPES.index(numbered[1]["options"]["loss_type"])
    for number, case in sorted(enumerate(recorded["cases"]), key=by_loss):
        cfg = config_of(case["options"], recorded["clip_max"])
        value, grad = loss_and_gradient(cfg, inputs_of(cfg, vectors))
        expected = vectors[f"{number}.grad"]
        # Both are 0 where the only token with a gradient is clipped.
        apart = np.max(np.abs(grad - expected)) / (np.max(np.abs(expected)) or 1)
        print(f"{row_of(case)} {value:.6f} | {apart:.0e} |")


if __name__ == "__main__":
    main()
