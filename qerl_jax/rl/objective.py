"""The policy's loss on one micro-batch, and the log-probabilities and entropies from which it is computed."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from qerl_jax.aqn.draw import of_rows
from qerl_jax.compilation.jitted import jitted
from qerl_jax.config import GrpoConfig, Remat
from qerl_jax.distributed import sharding
from qerl_jax.model import logprobs, transformer
from qerl_jax.rl import grpo, masked, update_metrics
from qerl_jax.rl.experience import PackedRows

# XLA's options for a gradient that keeps results of matrix products for the backward pass: its dynamic-slice fusion would
# compute them twice, once for the next operation, and once to write them into the stack of all layers.
KEPT_PRODUCTS = {"xla_gpu_enable_dynamic_slice_fusion": False}


@dataclasses.dataclass(frozen=True)
class Objective:
    """The policy and its loss: a static argument of jitted functions.

    Attributes:
        model: The policy.
        grpo: Options of the loss.
        temperature: Temperature of all log-probabilities.
        num_tokens: Number of ids that the tokenizer has.
        remat: What the backward pass recomputes, see `transformer.Transformer`.
    """

    model: transformer.Transformer
    grpo: GrpoConfig
    temperature: float
    num_tokens: int
    remat: Remat = "none"


def token_logps(
    model: transformer.Transformer,
    variables: dict[str, Any],
    batch: PackedRows,
    *,
    temperature: jax.Array | float,
    num_tokens: int,
    adapter: bool = True,
    remat: Remat = "none",
    dropout_key: jax.Array | None = None,
    entropy_slopes: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes the log-probability of every completion token, and the entropy of its distribution.

    Each prompt is computed once for all of its completions.

    Args:
        model: The policy.
        variables: Its collections `frozen`, `params` (the adapter) and `noise`, which may be a `RowNoise`.
        batch: The completions and their prompts, T tokens: see `Experience.pack`.
        temperature: Divides the logits.
        num_tokens: Number of ids that the tokenizer has.
        adapter: Whether the adapter is applied; False computes the base.
        remat: What the backward pass recomputes.
        dropout_key: Key of LoRA's dropout; None for no dropout.
        entropy_slopes: Whether gradients flow through the entropies.

    Returns:
        Log-probabilities and entropies, float32 [T] each, in nats; valid only at tokens of completions.
    """
    hidden, _ = model.apply(
        of_rows(variables, batch.noise),
        batch.tokens[None],
        packed=batch.packing,
        adapter=adapter,
        remat=remat,
        rngs=None if dropout_key is None else {"dropout": dropout_key},
    )
    return logprobs.of_targets(
        batch.packing.before(hidden[0]),
        transformer.head(variables["frozen"]),
        batch.tokens,
        temperature=temperature,
        num_tokens=num_tokens,
        count=jnp.sum(batch.packing.lengths),
        entropy_slopes=entropy_slopes,
    )


def loss(
    objective: Objective,
    params: Any,
    frozen: Any,
    noise: Any,
    batch: PackedRows,
    totals: grpo.BatchTotals,
    dropout_key: jax.Array,
) -> tuple[jax.Array, Any]:
    """Computes the loss of one micro-batch.

    Args:
        objective: The policy and its loss.
        params: The trained parameters, float32.
        frozen: The rest of the policy.
        noise: Noise on the norms of the policy, or None.
        batch: The rows, with their fixed log-probabilities from `update.anchors`.
        totals: Sizes of the optimizer batch.
        dropout_key: Key of the adapter's dropout; not used without dropout.

    Returns:
        The loss, a float32 scalar; and as auxiliary values the counts of `grpo.policy_loss`, the result of
        `update_metrics.drift`, and the sum of the entropies in nats.
    """
    cfg, lora, layout = objective.grpo, objective.model.lora, batch.packing
    logps, entropies = _of_policy(
        *(objective, params, frozen, noise, batch),
        remat=objective.remat,
        dropout_key=dropout_key if lora is not None and lora.dropout else None,
        entropy_slopes=cfg.entropy is not None,
    )
    drift = update_metrics.drift(jax.lax.stop_gradient(logps), batch)
    # From here on arrays are by row, [n, S], as the equations of `grpo` are. Sums by segments of [T] would be other
    # roundings of the same numbers, and a sum by segments is a scatter, which is slow on a GPU and has no fixed order.
    fixed = {name: layout.by_row(x) for name, x in batch.fixed.items()}
    behaviour_logps, mask = layout.by_row(batch.behaviour_logps), layout.by_row(batch.mask)
    by_row = layout.by_row(logps)
    current = jax.lax.stop_gradient(by_row)
    old_logps = fixed.get("old_logps", current)
    weights = grpo.sampling_weights(
        cfg, current, fixed.get("old_logps"), behaviour_logps, batch.advantages, mask
    )
    rows = grpo.LossInputs(
        by_row,
        old_logps if cfg.old_logprobs == "recompute" else behaviour_logps,
        batch.advantages,
        mask,
        fixed.get("ref_logps"),
        weights,
        correction=grpo.sampling_correction(cfg, old_logps, behaviour_logps, mask)
        if cfg.loss_type == "vespo"
        else None,
        entropies=layout.by_row(entropies) if cfg.entropy else None,
        high_entropy=fixed.get("high_entropy"),
    )
    value, counts = grpo.policy_loss(cfg, rows, totals)
    return value, (counts, drift, masked.sum(entropies, batch.mask))


gradient = jax.value_and_grad(loss, argnums=1, has_aux=True)


@jitted(static_argnames=("objective", "adapter", "of"))
def score(objective, params, frozen, noise, batch, adapter, of="logps"):
    """Computes log-probabilities of the tokens of a micro-batch, or entropies of their distributions.

    Args:
        objective: See `loss`; static.
        params: See `loss`.
        frozen: See `loss`.
        noise: See `loss`.
        batch: T tokens. If devices share a base, its arrays have a leading axis [group].
        adapter: Whether the adapter is applied; static.
        of: "logps" or "entropies"; static.

    Returns:
        float32 [T], in nats, valid only at completion tokens. If devices share a base, each computes its own
        micro-batch: [group, T].
    """

    def scored(params, frozen, noise, batch):
        logps, entropies = _of_policy(objective, params, frozen, noise, batch, adapter=adapter)
        return {"logps": logps, "entropies": entropies}[of]

    in_group = sharding.in_group(objective.model.group, scored, own=(3,), gives_own=True)
    return in_group(params, frozen, noise, batch)


def _of_policy(objective, params, frozen, noise, batch, **options):
    """Returns `token_logps` of the objective's policy."""
    variables = {"params": params, "frozen": frozen} | ({} if noise is None else {"noise": noise})
    scale = {"temperature": objective.temperature, "num_tokens": objective.num_tokens}
    return token_logps(objective.model, variables, batch, **scale, **options)
