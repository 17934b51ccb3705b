"""The dose of a run's noise: the first sigma of one that follows a divergence, and what the noise did at first."""

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from qerl_jax.aqn.dose import bisected
from qerl_jax.checkpoint import hf_folder
from qerl_jax.config import RunConfig
from qerl_jax.quantization.quantizer import REPORT
from qerl_jax.rl import update
from qerl_jax.rl.experience import Experience
from qerl_jax.system.files import read_json
from qerl_jax.tracking.health import Health, Row
from qerl_jax.training.load import PreparedRun
from qerl_jax.training.position import Position

# A first sigma is measured on this many rows, divided among draws of the noise: two draws of the same sigma may move a
# small policy by very different divergences.
_ROWS, _DRAWS = 64, 4
# The lowest KL(16 bit || rounded to this format) that was measured for a pretrained model, in nats per token, and the
# model: rows of the table in docs/design/noise.md.
MEASURED = {
    "nvfp4": (0.0181, "Qwen2.5-Coder-0.5B"),
    "mxfp4": (0.048, "Qwen2.5-Coder-0.5B"),
    "nf4": (0.1391, "SmolLM2-135M"),
}


def with_first_sigma(
    run: PreparedRun, position: Position, experience: Experience, note: Callable[[str], None]
) -> Position:
    """Returns the position with the first sigma of noise that follows a divergence, or as it is if none is needed.

    It is sought in the first rollout and, because the policy learns meanwhile, in the last one without noise. It moves
    the policy by `noise.adaptive.target` on at most 64 rows of that rollout: the mean of four draws, each for a quarter
    of the rows. The divergence is estimated as `sampling/kl_k3` is, which sigma follows from then on. A rollout without
    a token to learn from does not change it; if that is the first one, it is the lowest.

    Args:
        run: The run.
        position: The position of the step that sampled the rows, whose parameters are still there.
        experience: The rows.
        note: Called with a line about the result.
    """
    now, stride = position.schedule_step, run.cfg.updates_per_rollout
    is_last = not run.aqn.stage(now) and run.aqn.stage(now + stride)
    if not run.aqn.seeks or not (position.sigma is None or is_last):
        return position
    cfg, rows = run.cfg.noise, np.flatnonzero(experience.num_learned)[:_ROWS]
    mask = experience.mask & np.isin(experience.row_of_token, rows)
    params, clean = position.state.params, experience.behaviour_logps[mask]

    def divergence(sigma: float) -> float:
        logps = 0.0
        for number, part in enumerate(np.array_split(rows, min(_DRAWS, len(rows)))):
            noise = run.replicas.hold(run.aqn.of_all_rows(position.step + number, sigma))
            policy = params, run.frozen, noise
            logps += update.scores(run.updater, policy, experience, part)  # 0 for other rows
        difference = np.float64(logps[mask]) - clean
        return float(np.mean(np.expm1(difference) - difference))

    if not len(rows):
        return dataclasses.replace(position, sigma=position.sigma or cfg.sigma_end)
    sigma = bisected(divergence, cfg.adaptive.target, cfg.sigma_end, cfg.sigma_start)
    remedies = {cfg.sigma_start: "raise noise.sigma_start", cfg.sigma_end: "lower noise.sigma_end"}
    remedy = f"; {remedies[sigma]} to reach {cfg.adaptive.target:g}" if sigma in remedies else ""
    run.notes.append(
        f"noise: sigma begins at {sigma:.3g}, {sigma * run.aqn.fraction:.2%} of a scale of the norms (median): on "
        f"{mask.sum()} tokens of this rollout it moves the policy by KL = {divergence(sigma):.2g}{remedy}"
    )
    note(run.notes[-1])
    return dataclasses.replace(position, sigma=sigma)


def acted(cfg: RunConfig, health: Health) -> list[str]:
    """Returns lines about the first rollout with noise, after it: what the noise did, and if rounding does far more.

    They are from the log-probabilities that sampler and trainer compute anyway, so there are none if both have noise.
    What sampler and trainer differ by without noise, in the rollout before, is subtracted. Nor are there lines if one of
    the two rollouts had no token to learn from, because the divergence is measured on these.
    """
    if cfg.noise is None or cfg.noise.scope == "both":
        return []
    names = ("update/rows", "aqn/stage", "aqn/sigma", "sampling/kl_k3", "entropy")
    pairs = [health.last(name, 2) for name in names]
    if not (all(pairs) and all(pairs[0])) or pairs[1][0] or not pairs[1][1]:
        return []
    _, _, (_, sigma), divergences, (silent, entropy) = pairs
    divergence = max(divergences[1] - divergences[0], 0.0)
    line = (
        f"noise: at sigma = {sigma:.3g} it moved the policy by KL = {divergence:.2g} nats a token; the sampler's "
        f"entropy is {entropy:.3g}, and was {silent:.3g} in the rollout before"
    )
    if (rounding := _rounding(cfg)) is None:
        return [line]
    kl, source = rounding
    lines = [f"{line}. Rounding to {cfg.model.weights} moves it by {kl:.2g} ({source})"]
    if divergence < kl / 10:
        lines.append(
            f"warning: the noise does less than a tenth of what rounding does, so it changes next to nothing. Raise "
            "noise.sigma_start, whose square the divergence goes with. Below it as a bound, "
            f'[noise.adaptive] with metric = "kl" and target = {kl:.2g} finds the sigma that does as much as rounding'
        )
    return lines


def acted_before(cfg: RunConfig, rows: Iterable[Row]) -> list[str]:
    """Returns the lines of `acted` of a run's earlier rows of metrics: a resumed run reports them, too."""
    health, lines = Health(), []
    for row in rows:
        health.see(row)
        lines += acted(cfg, health)
    return lines


def _rounding(cfg: RunConfig) -> tuple[float, str] | None:
    """Returns by which KL rounding moves the policy, and where this is from; None if nothing is rounded."""
    if cfg.model.weights not in MEASURED:
        return None
    try:
        path = hf_folder.local_folder(cfg.model.model_name_or_path, weights=False) / REPORT
        kl = read_json(path).get("kl")
    except FileNotFoundError:  # none, or the hub does not answer any more, which must not end a run
        kl = None
    if kl is not None:
        return kl, "measured by qerl quantize"
    kl, model = MEASURED[cfg.model.weights]
    return kl, f"of {model}; not measured for this base"
