"""Experience in, new adapters out."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax import messages, sharding
from qerl_jax.config import GrpoConfig, OptimConfig, Remat, RunConfig
from qerl_jax.mesh import Replicas
from qerl_jax.model import logprobs, packing, transformer
from qerl_jax.model.noise import of_rows
from qerl_jax.rl import grpo, masked, microbatches, optimizer
from qerl_jax.rl.entropy import EntropyControl, high_entropy
from qerl_jax.rl.experience import Experience, PackedRows

messages.sent(grpo.RowMetrics)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """What a run learns; all keys of its randomness follow from the step.

    Attributes:
        step: int32, optimizer steps done.
        params: The adapter, or with `trainable = "full"` the layers' own weights, float32.
        opt_state: State of `optimizer.transformation`.
        skipped: int32, optimizer steps that changed nothing: no signal, or a gradient that was not finite.
        reference: A copy of `params` as they were at the start, which follows them with
            `grpo.sync_ref_model`; or None where the reference is the base.
        entropy: What an entropy bonus that adapts has come to; None without one.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    skipped: jax.Array
    reference: Any = None
    entropy: EntropyControl | None = None


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is learned, and of which policy: a static argument of jitted functions.

    Attributes:
        model: The policy.
        grpo: The loss.
        temperature: Temperature of all log-probabilities.
        num_tokens: Ids that the tokenizer has.
        remat: What the backward pass recomputes, see `transformer.Transformer`.
    """

    model: transformer.Transformer
    grpo: GrpoConfig
    temperature: float
    num_tokens: int
    remat: Remat = "none"


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """An optimizer step that was skipped, because its loss or its gradient was not finite.

    Attributes:
        step: Optimizer steps done before it.
        params: Under which that happened.
        experience: The rows of the step.
        fixed: Their log-probabilities under policies that stood still, as far as there were any, and which
            tokens were of high entropy where that counts.
        noise: The tree under which the policy acted, or None.
        entropy_coef: The coefficient of the entropy bonus in that step.
    """

    step: int
    params: Any
    experience: Experience
    fixed: dict[str, np.ndarray]
    noise: Any
    entropy_coef: float = 0.0


def init_state(
    params: Any,
    cfg: OptimConfig,
    *,
    keep_reference: bool = False,
    control: EntropyControl | None = None,
) -> TrainState:
    """The state before the first step, with a copy of `params` as the reference if one is kept.

    Args:
        params: What trains.
        cfg: The optimizer.
        keep_reference: Whether that copy is kept.
        control: The beginning of an entropy bonus that adapts.
    """
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimizer.transformation(cfg).init(params),
        skipped=jnp.int32(0),
        reference=jax.tree.map(jnp.copy, params) if keep_reference else None,
        entropy=jax.tree.map(jnp.asarray, control),
    )


def token_logps(
    model: transformer.Transformer,
    variables: dict[str, Any],
    experience: Experience,
    *,
    temperature: jax.Array | float,
    num_tokens: int,
    adapter: bool = True,
    remat: Remat = "none",
    dropout_key: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of every completion token and entropy of its distribution, float32 [B, C] each.

    Each prompt is computed once for all of its completions. Where rows have noise of their own, `variables` hold
    it as `RowNoise`, and it is drawn by the experience's numbers.
    """
    rows, length = experience.completions.shape
    if experience.noise is not None:
        variables = of_rows(
            variables, jnp.repeat(experience.noise, rows // len(experience.prompts))
        )
    layout = packing.rectangle(
        experience.prompt_lengths, experience.prompts.shape[1], rows=rows, width=length
    )
    tokens = jnp.concatenate([experience.completions.reshape(-1), experience.prompts.reshape(-1)])
    found = packed_logps(
        model,
        variables,
        layout,
        tokens,
        temperature=temperature,
        num_tokens=num_tokens,
        adapter=adapter,
        remat=remat,
        dropout_key=dropout_key,
    )
    logps, entropy = (x[: rows * length].reshape(rows, length) for x in found)
    return logps, entropy


def packed_logps(
    model: transformer.Transformer,
    variables: dict[str, Any],
    layout: packing.Packing,
    tokens: jax.Array,
    *,
    temperature: jax.Array | float,
    num_tokens: int,
    adapter: bool = True,
    remat: Remat = "none",
    dropout_key: jax.Array | None = None,
    entropy_slopes: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`token_logps` of packed rows: float32 [T] each, which only mean something at tokens of completions.

    Args:
        model: The policy.
        variables: Its collections.
        layout: What stands where.
        tokens: int32 [T]; completions come first.
        temperature: See `logprobs`.
        num_tokens: Ids that the tokenizer has.
        adapter: See `transformer.Transformer`.
        remat: Likewise.
        dropout_key: Key of the adapter's dropout; None for none.
        entropy_slopes: Whether gradients flow through the entropies.
    """
    hidden, _ = model.apply(
        variables,
        tokens[None],
        packed=layout,
        adapter=adapter,
        remat=remat,
        rngs=None if dropout_key is None else {"dropout": dropout_key},
    )
    return logprobs.of_targets(
        layout.before(hidden[0]),
        transformer.head(variables["frozen"]),
        tokens,
        temperature=temperature,
        num_tokens=num_tokens,
        count=jnp.sum(layout.lengths),
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
    """The loss of one micro-batch.

    Args:
        objective: What is computed.
        params: What trains, float32.
        frozen: The rest of the policy.
        noise: Noise on the norms under which the policy acts, or None.
        batch: Rows, with the log-probabilities of theirs that `anchors` holds fixed.
        totals: Rows and tokens of the optimizer batch.
        dropout_key: Key of the adapter's dropout, where it has any.

    Returns:
        The loss; counts of `grpo.policy_loss`, how far the policy is from the sampler, and the sum of
        the entropies.
    """
    cfg, lora, layout = objective.grpo, objective.model.lora, batch.packing
    logps, entropies = packed_logps(
        objective.model,
        _variables(params, frozen, noise, batch),
        layout,
        batch.tokens,
        temperature=objective.temperature,
        num_tokens=objective.num_tokens,
        remat=objective.remat,
        dropout_key=dropout_key if lora is not None and lora.dropout else None,
        entropy_slopes=cfg.has_entropy_bonus,
    )
    drift = _drift(jax.lax.stop_gradient(logps), batch)
    # From here on by row, [n, S].
    fixed = {name: layout.by_row(x) for name, x in batch.fixed.items()}
    behaviour, mask = layout.by_row(batch.behaviour_logps), layout.by_row(batch.mask)
    by_row = layout.by_row(logps)
    current = jax.lax.stop_gradient(by_row)
    old = behaviour if cfg.old_logprobs == "behaviour" else fixed.get("old_logps", current)
    weights = grpo.sampling_weights(
        cfg, current, fixed.get("old_logps"), behaviour, batch.advantages, mask
    )
    rows = grpo.LossInputs(
        by_row,
        old,
        batch.advantages,
        mask,
        fixed.get("ref_logps"),
        weights,
        correction=grpo.sampling_correction(cfg, fixed.get("old_logps", current), behaviour, mask),
        entropies=layout.by_row(entropies) if cfg.has_entropy_bonus else None,
        high_entropy=fixed.get("high_entropy"),
    )
    value, counts = grpo.policy_loss(cfg, rows, totals)
    return value, (counts, drift, masked.sum(entropies, batch.mask))


gradient = jax.value_and_grad(loss, argnums=1, has_aux=True)


@functools.partial(jax.jit, static_argnames=("objective", "adapter", "of"))
def score(objective, params, frozen, noise, batch, adapter, of="logps"):
    """Log-probabilities [T] of the tokens of a micro-batch, or with of = "entropies" these.

    Where devices share a base, each has a micro-batch of its own: [fsdp, T].
    """

    def scored(params, frozen, noise, batch):
        logps, entropies = packed_logps(
            objective.model,
            _variables(params, frozen, noise, batch),
            batch.packing,
            batch.tokens,
            temperature=objective.temperature,
            num_tokens=objective.num_tokens,
            adapter=adapter,
        )
        return {"logps": logps, "entropies": entropies}[of]

    in_group = sharding.in_group(objective.model.fsdp, scored, own=(3,), gives_own=True)
    return in_group(params, frozen, noise, batch)


@jax.jit
def zeros(params):
    """A loss and a gradient of 0, to which those of micro-batches are added."""
    return jnp.float32(0), jax.tree.map(jnp.zeros_like, params)


def compiler_options(objective: Objective) -> dict[str, bool]:
    """What XLA is told of the gradient.

    Where the backward pass keeps products, its fusion of slices would compute them twice: for what comes next, and
    once more into the stack of all layers.
    """
    return {} if objective.remat == "layer" else {"xla_gpu_enable_dynamic_slice_fusion": False}


@functools.cache
def _accumulator(objective: Objective):
    @functools.partial(
        jax.jit, donate_argnames="sums", compiler_options=compiler_options(objective)
    )
    def accumulate(sums, *micro_batch):
        # Sums, rows and the key of dropout are another one's on each device of a replica.
        return sharding.in_group(
            objective.model.fsdp, added, own=(0, 4, 6), gives_own=(True, True)
        )(sums, *micro_batch)

    def added(sums, *micro_batch):
        (value, counts), grads = gradient(objective, *micro_batch)
        return jax.tree.map(jnp.add, sums, (value, grads)), counts

    return accumulate


def accumulate(objective, sums, *micro_batch):
    """Adds loss and gradient of a micro-batch to those before it; where devices share a base, of one for each."""
    return _accumulator(objective)(sums, *micro_batch)


@functools.partial(
    jax.jit, static_argnames=("grpo_cfg", "optim_cfg", "total_steps"), donate_argnames="state"
)
def apply(state: TrainState, sums, learns, place, *, grpo_cfg, optim_cfg, total_steps):
    """The optimizer's step; none where the rows teach nothing, or loss or gradient is not finite."""
    value, grads = sums
    rate = optimizer.learning_rate(optim_cfg, total_steps)(place)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(value)
    # Masks of the sampling ratio may have left nothing of rows that could teach.
    learns = learns & (norm != 0)
    keep = learns & finite
    params, opt_state = optimizer.step(
        optimizer.transformation(optim_cfg), rate, keep, grads, state.opt_state, state.params
    )
    new = TrainState(
        step=state.step + 1,
        params=params,
        opt_state=opt_state,
        skipped=state.skipped + ~keep,
        reference=_refreshed(grpo_cfg, state.reference, params, state.step + 1),
        entropy=state.entropy,
    )
    metrics = {
        "loss": value,
        "grad_norm": norm,
        "learning_rate": rate,
        "updates/empty": ~learns,
        "updates/non_finite": learns & ~finite,
    }
    return new, metrics


def _refreshed(cfg: GrpoConfig, reference, params, step):
    """The reference policy after a step: every so many steps it moves towards what trains."""
    if reference is None or not cfg.sync_ref_model:
        return reference
    alpha, due = cfg.ref_model_mixup_alpha, step % cfg.ref_model_sync_steps == 0
    return jax.tree.map(
        lambda r, p: jnp.where(due, (1 - alpha) * r + alpha * p, r), reference, params
    )


@dataclasses.dataclass(frozen=True)
class Updater:
    """Learns from rollouts, one after the other.

    A rollout is shuffled with the key, the rows of a prompt staying together as far as an optimizer
    batch holds them, and cut into optimizer batches of m * a rows. All `num_iterations` passes take
    them in that one order, as TRL's do. An optimizer batch is cut into micro-batches of at most
    `max_tokens_per_microbatch` tokens, of which few are padding (`microbatches.cut`); for `bnpo`, whose
    value depends on the cut, into a micro-batches of m rows. Their gradients are summed, so memory is
    that of one. Each of their shapes is compiled: at most five, or six with bnpo.

    Several devices deal the micro-batches out and add their sums up once, before the optimizer's step,
    which each of them computes.

    Attributes:
        objective: What is learned.
        optim: AdamW and the geometry of its batches: m rows, a micro-batches.
        total_steps: Optimizer steps of the whole run, for the learning rate.
        max_completion_length: The longest that a completion may be, by which `dr_grpo` divides.
        on_non_finite: Called with each step that was skipped for such a loss or gradient.
        max_prompt_length: The longest that a prompt may be; None takes the width of a rollout's prompts.
        replicas: The devices; all of them hold the state, what is frozen, and the noise. On several hosts all must
            come to each call with the same arguments.
        poll: Called before each micro-batch as long as the state is whole; may raise to leave the rollout.
    """

    objective: Objective
    optim: OptimConfig
    total_steps: int
    max_completion_length: int
    on_non_finite: Callable[[NonFinite], None] | None = None
    max_prompt_length: int | None = None
    replicas: Replicas = Replicas()
    poll: Callable[[], None] = lambda: None

    def __call__(
        self,
        state: TrainState,
        frozen: Any,
        experience: Experience,
        noise: Any,
        key: jax.Array,
        place: int | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Learns from one rollout.

        Args:
            state: Donated: its buffers become those of the new state.
            frozen: What of the policy does not train.
            experience: The rollout, on the host.
            noise: The tree, or `RowNoise`, under which the policy acts here too, or None.
            key: Random key for the order of the rows and for dropout.
            place: Where the first of the steps stands on the schedule of the learning rate, which has
                `total_steps`; None means at the state's own step.

        Returns:
            The state, and metrics: scalars, means over the optimizer steps, under TRL's names;
            `sampling/...` compare the policy before its first step with the sampler, on the rows of
            that step: `kl` and `kl_k3` estimate KL(sampler || policy), in nats per token.
            Both, entropy, `kl` and `clip_ratio/...` are of the rows that were computed, which without
            a divergence and an entropy bonus are those with an advantage; `update/rows` is their number in an optimizer
            step, `update/padding` the share of the tokens that went through the linears which were padding,
            or a prompt once more; `update/programs` counts the shapes of micro-batches.
        """
        order_key, step_key = jax.random.split(key)
        place = int(state.step) if place is None else place
        batches = optimizer_batches(self, experience.rows, order_key)
        cfg, records = self.objective.grpo, []
        steps = cfg.num_iterations * len(batches)
        learns = _learns(cfg, experience)
        cuts = [micro_batches(self, experience, rows) for rows in batches]
        fixed = anchors(self, state, frozen, experience, noise, steps, cuts)
        learner = self
        for index in range(steps):
            rows = batches[index % len(batches)]
            held = fixed | _high_entropy(learner, state.params, frozen, experience, noise, rows)
            coef = _entropy_coef(cfg, state.entropy)
            sums, counts = summed_gradient(
                learner,
                state.params,
                frozen,
                experience,
                held,
                noise,
                rows,
                cuts[index % len(batches)],
                jax.random.fold_in(step_key, index),
                coef,
            )
            state, metrics = apply(
                state,
                sums,
                np.any(learns[rows]),
                np.int32(place + index),
                grpo_cfg=cfg,
                optim_cfg=self.optim,
                total_steps=self.total_steps,
            )
            # The state before is gone: what has begun is finished.
            learner = dataclasses.replace(self, poll=lambda: None)
            metrics, counts = jax.device_get((metrics, counts))
            records.append((metrics, *_joined(counts, rows.size)))
            if cfg.has_entropy_bonus:
                tokens = _entropy_tokens(experience, held, rows)
                mean = records[-1][1].entropy.sum(dtype=np.float64) / max(tokens, 1)
                metrics["policy_loss"] = metrics["loss"] + coef * mean
                if state.entropy is not None and tokens:
                    control = state.entropy.after(cfg, mean)
                    state = dataclasses.replace(state, entropy=jax.device_put(control))
                # Read now: the next step is given the state's buffers.
                control = jax.device_get(state.entropy)
                metrics["entropy_coef"] = coef if control is None else control.coef
            if self.on_non_finite and metrics["updates/non_finite"]:
                self.on_non_finite(
                    NonFinite(
                        int(state.step) - 1,
                        params=state.params,
                        experience=experience.take(rows),
                        fixed={name: x[rows.reshape(-1)] for name, x in held.items()},
                        noise=noise,
                        entropy_coef=coef,
                    )
                )
        metrics = _reduce(records) | _sampling_metrics(records[0][2])
        return state, metrics | _packing_metrics(experience, cuts)


def make_updater(
    cfg: RunConfig,
    model: transformer.Transformer,
    num_tokens: int,
    total_steps: int,
    on_non_finite: Callable[[NonFinite], None] | None = None,
    replicas: Replicas = Replicas(),
    poll: Callable[[], None] = lambda: None,
) -> Updater:
    """The updater that a config asks for.

    Args:
        cfg: The run, without what it may leave to the plan: see `memory.planned`.
        model: The policy.
        num_tokens: Ids that the tokenizer has.
        total_steps: Optimizer steps of the whole run.
        on_non_finite: See `Updater`.
        replicas: Likewise.
        poll: Likewise.
    """
    return Updater(
        Objective(
            model,
            cfg.grpo,
            temperature=cfg.rollout.temperature,
            num_tokens=num_tokens,
            remat=cfg.model.gradient_checkpointing,
        ),
        cfg.optim,
        total_steps,
        max_completion_length=cfg.rollout.max_completion_length,
        on_non_finite=on_non_finite,
        max_prompt_length=cfg.data.max_prompt_length,
        replicas=replicas,
        poll=poll,
    )


def anchors(
    updater: Updater,
    state: TrainState,
    frozen: Any,
    experience: Experience,
    noise: Any,
    steps: int,
    cuts: Sequence[Sequence[microbatches.MicroBatch]],
) -> dict[str, np.ndarray]:
    """Log-probabilities [B, C] that stay as they are while a rollout is learned from, in so many steps.

    They are of the rows in `cuts`, the micro-batches of each optimizer batch, and 0 elsewhere.
    """
    cfg, fixed = updater.objective.grpo, {}
    rows = _rows_of(cuts)
    # With a single step per rollout the policy that recomputes is the policy that learns.
    if cfg.old_logprobs == "recompute" and steps > 1:
        fixed["old_logps"] = all_logps(updater, state.params, frozen, experience, noise, rows)
    if cfg.beta:
        kept = state.reference is not None
        params = state.reference if kept else state.params
        fixed["ref_logps"] = all_logps(
            updater, params, frozen, experience, None, rows, adapter=kept
        )
    return fixed


def all_logps(
    updater: Updater,
    params: Any,
    frozen: Any,
    experience: Experience,
    noise: Any,
    rows: np.ndarray,
    *,
    adapter: bool = True,
) -> np.ndarray:
    """float32 [B, C], log-probabilities of those rows [N] of a rollout, and 0 of others."""
    return _of_tokens(updater, params, frozen, experience, noise, rows, adapter, "logps")


def _of_tokens(updater, params, frozen, experience, noise, rows, adapter, of) -> np.ndarray:
    """float32 [B, C], what `score` finds of those rows [N] of a rollout, and 0 of others."""
    found, objective = np.zeros(experience.completions.shape, np.float32), updater.objective
    policies = updater.replicas.each((params, frozen, noise))

    cut = cut_rows(updater, experience, rows)

    def scored(numbers, batches, own):
        packed = updater.replicas.apart([experience.pack(each, {}) for each in batches], own)
        return score(objective, *policies[own], packed, adapter, of)

    scores = _computed(updater, cut, scored, program=(objective, adapter, of))
    for batch, values in zip(cut, scores, strict=True):
        experience.unpack(found, batch, np.asarray(values))
    return found


def _computed[Found](
    updater: Updater,
    cut: Sequence[microbatches.MicroBatch],
    compute: Callable[[Sequence[int], Sequence[microbatches.MicroBatch], int], Found],
    program: Any,
) -> list[Found]:
    """What is computed of each micro-batch, for all of them in order; replicas compute at a time.

    Args:
        updater: What computes them.
        cut: The micro-batches.
        compute: compute(numbers, micro-batches, number of a replica of this host) is called for as many micro-batches
            of one shape as a replica has devices; where that is several, for all of them at once, with an axis in front.
        program: What tells the program from others.

    Returns:
        Of what other hosts computed, and of replicas of several devices, arrays are on the host.
    """
    replicas = updater.replicas
    sets = microbatches.alike(cut, replicas.fsdp)
    places = microbatches.dealt([batches[0] for _, batches in sets], len(replicas))

    def work(own):
        group, found = replicas.groups[own] if replicas.devices else (None,), {}
        mine = [each for each, at in zip(sets, places, strict=True) if at == replicas.own[own]]
        for numbers, batches in mine:
            updater.poll()
            with replicas.compiling(group[0], program, batches[0].shape):
                found[numbers] = compute(numbers, batches, own)
        return found

    def computed():
        made = [each for of_place in replicas.side_by_side(work) for each in of_place.items()]
        if replicas.fsdp == 1:
            return {number: x for (number,), x in made}
        return {
            number: jax.tree.map(lambda x, at=at: x[at], of_set)
            for numbers, of_set in jax.device_get(made)
            for at, number in enumerate(numbers)
        }

    if replicas.hosts.count == 1:
        found = computed()
    else:
        everyones = replicas.hosts.together(lambda: jax.device_get(computed()), updater.poll)
        found = {number: x for each in everyones for number, x in each.items()}
    return [found[number] for number in range(len(cut))]


def _high_entropy(
    updater: Updater,
    params: Any,
    frozen: Any,
    experience: Experience,
    noise: Any,
    rows: np.ndarray,
) -> dict[str, np.ndarray]:
    """Which tokens [B, C] of an optimizer batch [n, k] the policy learns from; empty where from all.

    All rows with tokens are computed, those that cannot learn, too: the quantile is over the batch.
    """
    quantile = updater.objective.grpo.top_entropy_quantile
    if quantile == 1:
        return {}
    chosen = rows.reshape(-1)
    chosen = chosen[experience.lengths[chosen] > 0]
    found = _of_tokens(updater, params, frozen, experience, noise, chosen, True, "entropies")
    mask = np.zeros_like(experience.mask)
    mask[chosen] = experience.mask[chosen]
    return {"high_entropy": high_entropy(found, mask, quantile)}


def _entropy_coef(cfg: GrpoConfig, control: EntropyControl | None) -> float:
    """The coefficient of an optimizer step's entropy bonus."""
    return cfg.entropy_coef if control is None else jax.device_get(control).applied(cfg)


def _entropy_tokens(experience: Experience, fixed: dict[str, np.ndarray], rows: np.ndarray) -> int:
    """Tokens of an optimizer batch [n, k] whose entropies the bonus adds up."""
    counted = fixed.get("high_entropy", experience.mask)
    return int(np.count_nonzero(counted[rows.reshape(-1)]))


def optimizer_batches(updater: Updater, rows: np.ndarray, key: jax.Array) -> np.ndarray:
    """int [batches, n, k]: the rows [P, g] of a rollout as optimizer batches, n prompts with k rows each."""
    accumulation = updater.optim.gradient_accumulation_steps
    batch_rows = updater.optim.per_device_train_batch_size * accumulation
    units = rows.reshape(-1, math.gcd(batch_rows, rows.shape[1]))
    # Within one optimizer step only bnpo can tell which rows share a micro-batch.
    is_bnpo = updater.objective.grpo.loss_type == "bnpo"
    if rows.size > batch_rows or (is_bnpo and accumulation > 1):
        units = units[np.asarray(jax.random.permutation(key, len(units)))]
    return units.reshape(-1, batch_rows // units.shape[1], units.shape[1])


def micro_batches(
    updater: Updater, experience: Experience, rows: np.ndarray
) -> list[microbatches.MicroBatch]:
    """The micro-batches of an optimizer batch of rows [n, k]; there is one at least.

    Rows that cannot learn are left out: their part of the loss is 0 by definition, and they still count in
    what it is divided by. Where no row learns, one micro-batch shows how policy and sampler compare.
    For bnpo, which divides by the tokens of a micro-batch, all rows stay.
    """
    chosen, cfg = rows.reshape(-1), updater.objective.grpo
    if cfg.loss_type == "bnpo":
        return cut_rows(updater, experience, chosen)
    learned = chosen[_learns(cfg, experience)[chosen]]
    if len(learned):
        return cut_rows(updater, experience, learned)
    # What only shows how far policy and sampler are apart.
    return cut_rows(updater, experience, chosen[experience.lengths[chosen] > 0])[-1:]


def summed_gradient(
    updater: Updater,
    params: Any,
    frozen: Any,
    experience: Experience,
    fixed: dict[str, np.ndarray],
    noise: Any,
    rows: np.ndarray,
    cut: Sequence[microbatches.MicroBatch],
    key: jax.Array,
    entropy_coef: float,
) -> tuple[tuple[jax.Array, Any], list[Any]]:
    """Loss and gradient of an optimizer batch [n, k], and counts of its micro-batches."""
    chosen, judged = rows.reshape(-1), experience.judged
    counted = rows.size if judged is None else judged[chosen].sum()
    totals = grpo.BatchTotals(
        rows=np.int32(max(counted, 1)),
        tokens=experience.mask[chosen].sum(dtype=np.int32),
        max_completion_length=updater.max_completion_length,
        num_micro_batches=updater.optim.gradient_accumulation_steps,
    )
    if updater.objective.grpo.has_entropy_bonus:
        tokens = _entropy_tokens(experience, fixed, rows)
        totals = dataclasses.replace(
            totals, entropy_tokens=np.int32(tokens), entropy_coef=np.float32(entropy_coef)
        )
    policies = updater.replicas.each((params, frozen, noise))
    # Made before anything runs: what one device makes for another must not wait for what that device does.
    apart, count = updater.replicas.apart, updater.replicas.fsdp
    keys = [jax.random.fold_in(key, number) for number in range(len(cut))]
    starts = enumerate(updater.replicas.each(zeros(params)))
    sums = [apart([start] * count, own) for own, start in starts]

    def accumulated(numbers, batches, own):
        # Where rows are missing, so are keys.
        own_keys = [keys[number] for number in (*numbers, *numbers[:1] * count)[:count]]
        sums[own], counts = accumulate(
            updater.objective,
            sums[own],
            *policies[own],
            apart([experience.pack(each, fixed) for each in batches], own),
            totals,
            apart(own_keys, own),
        )
        return counts

    counts = _computed(updater, cut, accumulated, program=updater.objective)
    return updater.replicas.total(sums), counts


def replay_step(
    updater: Updater,
    params: Any,
    frozen: Any,
    experience: Experience,
    fixed: dict[str, np.ndarray],
    noise: Any,
    key: jax.Array,
    entropy_coef: float = 0.0,
) -> tuple[jax.Array, Any]:
    """Loss and gradient of an optimizer step that a `NonFinite` describes; `key` is of dropout."""
    rows = experience.rows
    cut = micro_batches(updater, experience, rows)
    return summed_gradient(
        updater, params, frozen, experience, fixed, noise, rows, cut, key, entropy_coef
    )[0]


def _learns(cfg: GrpoConfig, experience: Experience) -> np.ndarray:
    """bool [B], whether a row has tokens, and an advantage, a divergence or an entropy to learn from."""
    always = bool(cfg.beta) or cfg.has_entropy_bonus
    return (experience.lengths > 0) & ((experience.advantages != 0) | always)


def cut_rows(
    updater: Updater, experience: Experience, numbers: np.ndarray, *, largest: bool = False
) -> list[microbatches.MicroBatch]:
    """Rows [N] of a rollout as micro-batches; if asked for, all of the shape that holds any row."""
    optim, group = updater.optim, experience.rows.shape[1]
    prompt_width = updater.max_prompt_length or experience.prompts.shape[1]
    rows, cfg = experience.rows_to_cut(numbers), updater.objective.grpo
    shapes = update_shapes(
        optim,
        cfg.loss_type,
        group=group,
        prompt_width=prompt_width,
        completion_width=updater.max_completion_length,
    )
    shapes = shapes[:1] if largest else shapes
    if cfg.loss_type == "bnpo":
        return microbatches.by_rows(rows, optim.per_device_train_batch_size, shapes)
    replicas = updater.replicas
    return microbatches.cut_for(rows, shapes, len(replicas) * replicas.fsdp)


def update_shapes(
    optim: OptimConfig, loss_type: str, *, group: int, prompt_width: int, completion_width: int
) -> tuple[microbatches.Shape, ...]:
    """All shapes that the micro-batches of an update can have.

    Args:
        optim: How optimizer batches are cut.
        loss_type: For "bnpo" they are cut by rows.
        group: Completions that share a prompt.
        prompt_width: The most tokens of a prompt.
        completion_width: The most tokens of a completion.
    """
    widths = {"prompt_width": prompt_width, "completion_width": completion_width}
    micro_rows = optim.per_device_train_batch_size
    rows = micro_rows * optim.gradient_accumulation_steps
    if loss_type == "bnpo":
        # Rows of a prompt are neighbours in pieces of so many.
        prompts = micro_rows // math.gcd(micro_rows, math.gcd(rows, group))
        return microbatches.shapes_of_rows(micro_rows, prompts=prompts, **widths)
    budget = token_budget(optim, group=group, **widths)
    return microbatches.shapes(budget, group=math.gcd(rows, group), max_rows=rows, **widths)


def token_budget(
    optim: OptimConfig, *, group: int, prompt_width: int, completion_width: int
) -> int:
    """Tokens of a large micro-batch; arguments as of `update_shapes`."""
    if optim.max_tokens_per_microbatch is not None:
        return optim.max_tokens_per_microbatch
    rows = optim.per_device_train_batch_size * optim.gradient_accumulation_steps
    return microbatches.default_budget(
        prompt_width=prompt_width,
        completion_width=completion_width,
        rows=rows,
        prompts=rows // math.gcd(rows, group),
    )


def _rows_of(cuts: Sequence[Sequence[microbatches.MicroBatch]]) -> np.ndarray:
    """int [N], the rows that are in any micro-batch, in order."""
    rows = np.unique(np.concatenate([batch.rows for cut in cuts for batch in cut]))
    return rows[rows >= 0]


def _packing_metrics(
    experience: Experience, cuts: Sequence[Sequence[microbatches.MicroBatch]]
) -> dict[str, float]:
    """How much of what the update computed was rows; how many of them, and in how many shapes."""
    real = sum(experience.rows_to_cut(_rows_of([cut])).tokens for cut in cuts)
    shapes = [batch.shape for cut in cuts for batch in cut]
    return {
        "update/padding": 1 - real / sum(shape.tokens for shape in shapes),
        "update/rows": len(_rows_of(cuts)) / len(cuts),
        "update/programs": len(set(shapes)),
    }


def _variables(params, frozen, noise, batch: PackedRows):
    variables = {"params": params, "frozen": frozen} | ({} if noise is None else {"noise": noise})
    return of_rows(variables, batch.noise)


def _drift(logps: jax.Array, batch: PackedRows) -> dict[str, jax.Array]:
    """How far the policy is from the sampler, on the tokens of one micro-batch."""
    mask = batch.mask
    difference = jnp.where(mask, logps - batch.behaviour_logps, 0.0)
    ratio = jnp.exp(difference)
    return {
        "tokens": jnp.sum(mask),
        # Each by itself, for its quantiles; -1 where there is no token.
        "differences": jnp.where(mask, jnp.abs(difference), -1.0),
        "difference_sum": jnp.sum(jnp.abs(difference)),
        "difference_max": jnp.max(jnp.abs(difference)),
        # The sampler's tokens are samples of KL(sampler || policy); the second is never negative.
        "kl_sum": -jnp.sum(difference),
        "kl_k3_sum": masked.sum(grpo.token_kl(batch.behaviour_logps, logps, "k3"), mask),
        "ratio_sum": masked.sum(ratio, mask),
        "ratio_min": jnp.min(jnp.where(mask, ratio, jnp.inf)),
        "ratio_max": masked.max(ratio, mask),
    }


def _joined(
    counts: list[Any], num_rows: int
) -> tuple[grpo.RowMetrics, dict[str, np.ndarray], float]:
    """What the micro-batches of one optimizer step counted: by row, by micro-batch, in all.

    Rows with tokens come first, then as many without as the step has in all: one shape for all
    steps.
    """
    rows, drifts, entropies = zip(*counts, strict=True)
    joined = jax.tree.map(lambda *each: np.concatenate(each), *rows)
    real = joined.tokens > 0
    padded = jax.tree.map(lambda x: np.pad(x[real], (0, num_rows - real.sum())), joined)
    # One number of each micro-batch, or all of one's tokens.
    together = lambda *each: np.concatenate([np.ravel(x) for x in each])
    return padded, jax.tree.map(together, *drifts), sum(entropies)


def _sampling_metrics(drift: dict[str, np.ndarray]) -> dict[str, Any]:
    """TRL's sampling metrics of an optimizer step before which nothing was learned, and the divergence's."""
    tokens = max(drift["tokens"].sum(), 1)
    lowest = drift["ratio_min"].min()
    differences = drift["differences"]
    # Without a token there is one difference, of 0. One that is no number stays: the step is skipped, and says so.
    differences = np.append(
        differences[~(differences < 0)], np.zeros(int(drift["tokens"].sum() == 0))
    )
    with np.errstate(invalid="ignore"):  # between two that are infinite
        p99 = np.quantile(differences, 0.99)
    return {
        "sampling/sampling_logp_difference/mean": drift["difference_sum"].sum() / tokens,
        "sampling/sampling_logp_difference/max": drift["difference_max"].max(),
        "sampling/sampling_logp_difference/p99": p99,
        "sampling/kl": drift["kl_sum"].sum() / tokens,
        "sampling/kl_k3": drift["kl_k3_sum"].sum() / tokens,
        "sampling/importance_sampling_ratio/mean": drift["ratio_sum"].sum() / tokens,
        "sampling/importance_sampling_ratio/min": lowest if np.isfinite(lowest) else 0.0,
        "sampling/importance_sampling_ratio/max": drift["ratio_max"].max(),
    }


_summarize = jax.jit(grpo.summarize)


def _reduce(records: list[Any]) -> dict[str, Any]:
    """One number per metric out of one per optimizer step."""
    steps = [
        metrics
        | {"entropy": entropies / max(drift["tokens"].sum(), 1)}
        | jax.device_get(_summarize(counts))
        for metrics, counts, drift, entropies in records
    ]
    how = {
        "updates/empty": np.sum,
        "updates/non_finite": np.sum,
        "clip_ratio/low_min": np.min,
        "clip_ratio/high_max": np.max,
        "learning_rate": lambda x: x[-1],
        "entropy_coef": lambda x: x[-1],
    }
    return {
        name: how.get(name, np.mean)(np.array([each[name] for each in steps])) for name in steps[0]
    }
