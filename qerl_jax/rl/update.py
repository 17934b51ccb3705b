"""The policy update: optimizer steps on the adapter (or other trained parameters) from one rollout."""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax.aqn.draw import RowNoise
from qerl_jax.compilation.early_programs import EarlyPrograms, Listed
from qerl_jax.compilation.jitted import Jitted, jitted
from qerl_jax.config import GrpoConfig, OptimConfig, RunConfig
from qerl_jax.distributed import messages, sharding
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.model import transformer
from qerl_jax.rl import grpo, microbatches, optimizer, update_metrics
from qerl_jax.rl.entropy import EntropyControl, high_entropy
from qerl_jax.rl.experience import Experience, empty_experience
from qerl_jax.rl.objective import KEPT_PRODUCTS, Objective, gradient, score

messages.sent(grpo.RowMetrics)

# A policy: its trained parameters, the rest of them, and its noise (a tree or `RowNoise`) or None.
type Policy = tuple[Any, Any, Any]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The trained state of a run. It has no random key, because all keys are computed from the step.

    Attributes:
        step: int32, optimizer steps done, skipped ones included.
        params: The adapter, or with `trainable = "full"` the layers' own weights, float32.
        opt_state: State of `optimizer.transformation`.
        skipped: int32, optimizer steps that changed nothing: no signal, or a gradient that was not finite.
        reference: A copy of the initial `params`, updated periodically with `grpo.reference.policy = "synced"`; None if the
            reference is the base.
        entropy: State of an adaptive entropy bonus; None without one.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    skipped: jax.Array
    reference: Any = None
    entropy: EntropyControl | None = None


@dataclasses.dataclass(frozen=True)
class NonFinite:
    """An optimizer step that was skipped because its loss or its gradient was not finite.

    Attributes:
        step: Optimizer steps done before it.
        params: The parameters in that step.
        experience: The rows of the step.
        fixed: float32 [N] each, by completion token: log-probabilities under fixed policies (see `anchors`), and the
            mask of high-entropy tokens, if they are used.
        noise: The noise of the policy in that step, or None.
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
    """Returns the state before the first step.

    Args:
        params: The parameters to train, float32.
        cfg: The optimizer.
        keep_reference: Whether to keep a copy of `params` as the reference policy.
        control: Initial state of an adaptive entropy bonus; None without one.
    """
    copied = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimizer.transformation(cfg).init(params),
        skipped=jnp.int32(0),
        reference=copied(params) if keep_reference else None,
        entropy=jax.tree.map(jnp.asarray, control),
    )


def first_state(cfg: RunConfig, params: Any) -> TrainState:
    """Returns the state of a run before its first step; `params` are the parameters to train, float32."""
    entropy = cfg.grpo.entropy
    return init_state(
        params,
        cfg.optim,
        keep_reference=cfg.keeps_reference,
        control=EntropyControl.begin(entropy) if entropy and entropy.adaptive else None,
    )


@jax.jit
def zeros(params):
    """Returns a zero loss and gradient, to which those of micro-batches are added."""
    return jnp.float32(0), jax.tree.map(jnp.zeros_like, params)


def accumulate(objective, sums, *micro_batch):
    """Adds the loss and gradient of a micro-batch to the sums, and returns the sums and the auxiliary values.

    If devices share a base, each adds its own micro-batch. See `accumulator`.

    Args:
        objective: The policy and its loss; static.
        sums: The loss and its gradient so far; donated.
        *micro_batch: The further arguments of `objective.loss`.
    """

    def added(sums, *micro_batch):
        (value, counts), grads = gradient(objective, *micro_batch)
        return jax.tree.map(jnp.add, sums, (value, grads)), counts

    # Sums, rows and dropout key (arguments 0, 4 and 6) differ between the devices of a replica.
    sharded = {"own": (0, 4, 6), "gives_own": (True, True)}
    return sharding.in_group(objective.model.group, added, **sharded)(sums, *micro_batch)


_static = {"static_argnums": 0, "donate_argnums": 1}
_of_whole_layers = Jitted(accumulate, "_of_whole_layers", **_static)
_of_products = Jitted(accumulate, "_of_products", **_static, compiler_options=KEPT_PRODUCTS)


def accumulator(objective: Objective) -> functools.partial:
    """Returns `accumulate`, jitted, for an objective."""
    return functools.partial(
        _of_whole_layers if objective.remat == "layer" else _of_products, objective
    )


@jitted(static_argnames=("grpo_cfg", "optim_cfg", "total_steps"), donate_argnames="state")
def apply(state: TrainState, sums, learns, schedule_step, *, grpo_cfg, optim_cfg, total_steps):
    """Does the optimizer's step; it is skipped if no row has a signal, or if loss or gradient is not finite.

    Args:
        state: The state before the step; donated.
        sums: The loss, a float32 scalar, and its gradient, a tree like `params`.
        learns: bool scalar, whether any row has a signal.
        schedule_step: int32 scalar, the step's position on the learning-rate schedule.
        grpo_cfg: The objective, which sets when the reference is updated; static.
        optim_cfg: The optimizer; static.
        total_steps: Length of the schedule in optimizer steps; static.

    Returns:
        The new state, and metrics: loss, norm of the gradient before clipping, learning rate, and whether the update
        was empty or not finite.
    """
    value, grads = sums
    rate = optimizer.learning_rate(optim_cfg, total_steps)(schedule_step)
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm) & jnp.isfinite(value)
    # Masks of the sampling ratio may have removed all rows that had a signal.
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
    """Returns the reference policy after a step: at regular intervals it moves towards the trained policy."""
    if reference is None or cfg.reference is None or cfg.reference.policy != "synced":
        return reference
    alpha, due = cfg.reference.mixup_alpha, step % cfg.reference.sync_steps == 0
    return jax.tree.map(
        lambda r, p: jnp.where(due, (1 - alpha) * r + alpha * p, r), reference, params
    )


@dataclasses.dataclass(frozen=True)
class Updater:
    """Updates the policy with one rollout per call.

    A rollout is shuffled with the key, and divided into optimizer batches of m * a rows; rows of a prompt stay
    together if an optimizer batch can hold them. All `num_iterations` passes use the same order, as in TRL. An
    optimizer batch is divided into micro-batches of at most `max_tokens_per_microbatch` tokens (`microbatches.divide`),
    or for `bnpo`, whose value depends on this division, into `a` micro-batches of m rows. Gradients are summed, so
    memory is needed for one micro-batch at a time. A program is compiled for each shape of micro-batches: at most three.
    With several devices the micro-batches are distributed, and the devices' sums are added up once,
    before the optimizer's step, which each device computes.

    Attributes:
        objective: The policy and its loss.
        optim: AdamW and the sizes of its batches: m is `per_device_train_batch_size`, a is
            `gradient_accumulation_steps`.
        total_steps: Optimizer steps of the whole run, for the learning rate.
        max_prompt_length: Most tokens of a prompt.
        max_completion_length: Most tokens of a completion; `dr_grpo` divides by it.
        on_non_finite: Called with each step that was skipped because loss or gradient was not finite.
        replicas: The devices; all of them hold the state, the frozen weights and the noise. On several hosts all
            must make each call with the same arguments.
        poll: Called before each micro-batch until the first optimizer step; it may raise to abandon the rollout.
        early: The programs that are compiled before they are called.
    """

    objective: Objective
    optim: OptimConfig
    total_steps: int
    max_prompt_length: int
    max_completion_length: int
    on_non_finite: Callable[[NonFinite], None] | None = None
    replicas: Replicas = Replicas()
    poll: Callable[[], None] = lambda: None
    early: EarlyPrograms = dataclasses.field(default_factory=EarlyPrograms)

    def __call__(
        self,
        state: TrainState,
        frozen: Any,
        experience: Experience,
        noise: Any,
        key: jax.Array,
        schedule_step: int | None = None,
    ) -> tuple[TrainState, dict[str, Any]]:
        """Updates the policy with one rollout.

        Args:
            state: The state before; donated, so it cannot be used afterwards.
            frozen: The part of the policy that is not trained.
            experience: The rollout, on the host.
            noise: The sampler's noise (a tree or `RowNoise`), with which the policy is computed here, too; or None.
            key: Random key for the order of the rows and for dropout.
            schedule_step: The first step's position on the learning-rate schedule of `total_steps`; None means
                `state.step`.

        Returns:
            The new state, and metrics: scalars, mostly means over the optimizer steps, under TRL's names.
            `sampling/...` compare the policy before its first step with the sampler, on the rows of that step. These,
            `update/entropy`, `kl` and `clip_ratio/...` cover only the computed rows; without a KL term and an entropy
            bonus these are the rows with an advantage. Other `update/...` are those of `_packing_metrics`.
        """
        order_key, step_key = jax.random.split(key)
        schedule_step = int(state.step) if schedule_step is None else schedule_step
        batches = optimizer_batches(self, experience.rows, order_key)
        cfg, records = self.objective.grpo, []
        steps = cfg.num_iterations * len(batches)
        learns = _learns(cfg, experience)
        divided = [micro_batches(self, experience, rows) for rows in batches]
        fixed = anchors(self, state, frozen, experience, noise, steps, divided)
        learner = self
        for index in range(steps):
            rows, policy = batches[index % len(batches)], (state.params, frozen, noise)
            per_token = fixed | _high_entropy(learner, policy, experience, rows)
            coef = _entropy_coef(cfg, state.entropy)
            parts, dropout_key = divided[index % len(batches)], jax.random.fold_in(step_key, index)
            sums, counts = summed_gradient(
                learner, policy, experience, per_token, rows, parts, dropout_key, coef
            )
            has_signal, now = np.any(learns[rows]), np.int32(schedule_step + index)
            function = functools.partial(apply, **self.static)
            state, metrics = self.early.call(("apply",), function, state, sums, has_signal, now)
            # The earlier state was donated and is lost, so from here on the rollout must be finished.
            learner = dataclasses.replace(self, poll=lambda: None)
            metrics, counts = jax.device_get((metrics, counts))
            records.append((metrics, *update_metrics.joined(counts, rows.size)))
            entropies = records[-1][1].entropy
            if cfg.entropy is not None and entropies is not None:
                tokens = _entropy_tokens(experience, per_token, rows)
                mean = entropies.sum(dtype=np.float64) / max(tokens, 1)
                metrics["policy_loss"] = metrics["loss"] + coef * mean
                if state.entropy is not None and tokens:
                    control = state.entropy.after(cfg.entropy, float(mean))
                    state = dataclasses.replace(state, entropy=jax.device_put(control))
                # Read now, because the next step donates the state's buffers.
                control = jax.device_get(state.entropy)
                metrics["entropy_coef"] = coef if control is None else control.coef
            if self.on_non_finite and metrics["updates/non_finite"]:
                index_of_tokens = experience.tokens_of(rows.reshape(-1))
                of_rows = {name: x[index_of_tokens] for name, x in per_token.items()}
                step, taken = int(state.step) - 1, experience.take(rows)
                self.on_non_finite(NonFinite(step, state.params, taken, of_rows, noise, coef))
        metrics = update_metrics.reduced(records) | update_metrics.of_sampling(records[0][2])
        return state, metrics | _packing_metrics(experience, divided)

    @property
    def static(self) -> dict[str, Any]:
        """The static arguments of `apply`."""
        cfg, optim = self.objective.grpo, self.optim
        return {"grpo_cfg": cfg, "optim_cfg": optim, "total_steps": self.total_steps}

    def shapes(self, group: int) -> tuple[microbatches.Shape, ...]:
        """Returns all shapes of micro-batches, given the number of completions that share a prompt."""
        return microbatches.update_shapes(
            self.optim,
            self.objective.grpo.loss_type,
            group=group,
            prompt_width=self.max_prompt_length,
            completion_width=self.max_completion_length,
            overhead=microbatches.overhead(self.objective.model.arch),
        )

    def compiled_shapes(self, group: int) -> tuple[microbatches.Shape, ...]:
        """Returns the largest of `shapes`, and those of the others whose programs are compiled or not listed."""
        largest, *others = self.shapes(group)
        unready = {
            key[-1] for key in self.early.unready
        }  # the shape ends the key of each of its programs
        return (largest, *(shape for shape in others if shape not in unready))

    def programs(self, state: TrainState, frozen: Any, noise: Any, cfg: RunConfig) -> list[Listed]:
        """Lists the programs of an update on one device; nothing is traced.

        Those of smaller micro-batches, which the largest can take the place of, come last, after the optimizer's.

        Args:
            state: See `__call__`, as for `frozen` and `noise`; shapes (`jax.ShapeDtypeStruct`) are enough.
            frozen: See there.
            noise: See there.
            cfg: The run.
        """
        objective, policy, listed = self.objective, (state.params, frozen, noise), []
        fixed = _fixed(self, state, frozen, noise, cfg.updates_per_rollout)
        passes = {(adapter, "logps", one[2] is None): one for one, adapter in fixed.values()}
        if objective.grpo.top_entropy_quantile < 1:
            passes[True, "entropies", noise is None] = policy
            fixed["high_entropy"] = policy, True
        if cfg.rollout.carry:
            fixed["ages"] = policy, True
        place = jax.tree.leaves(state.params)[0].sharding
        sums = jax.ShapeDtypeStruct((), jnp.float32, sharding=place), state.params
        experience = empty_experience(has_noise=isinstance(noise, RowNoise))
        for shape in self.shapes(cfg.rollout.num_generations if cfg.optim.share_prompts else 1):
            batch = microbatches.MicroBatch(shape, microbatches.empty_rows(shape.num_rows))
            for (adapter, of, *which), scored in passes.items():
                part = experience.pack(batch, {})
                function = functools.partial(score, objective, adapter=adapter, of=of)
                key = (objective, adapter, of, *which, shape)
                listed.append(Listed("score", key, function, (*scored, part)))
            part = experience.pack(batch, dict.fromkeys(fixed, np.zeros(0, np.float32)))
            arrays = sums, *policy, part, _totals(self, 1, 0, 0, 0.0), jax.random.key(0)
            listed.append(Listed("accumulate", (objective, shape), accumulator(objective), arrays))
        function = functools.partial(apply, **self.static)
        step = state, sums, np.bool_(True), np.int32(0)
        of_largest = len(passes) + 1
        listed.insert(of_largest, Listed("apply", ("apply",), function, step))
        return listed


def make_updater(
    cfg: RunConfig,
    model: transformer.Transformer,
    num_tokens: int,
    total_steps: int,
    **options: Any,
) -> Updater:
    """Makes an updater from a config.

    Args:
        cfg: The run, with all planned values filled in: see `memory.plan`.
        model: The policy.
        num_tokens: Number of ids that the tokenizer has.
        total_steps: Optimizer steps of the whole run.
        **options: `on_non_finite`, `replicas` and `poll` of `Updater`.
    """
    remat = cfg.model.gradient_checkpointing
    assert remat != "auto", "the plan chooses it"
    return Updater(
        Objective(model, cfg.objective, cfg.rollout.temperature, num_tokens, remat),
        cfg.optim,
        total_steps,
        max_prompt_length=cfg.data.max_prompt_length,
        max_completion_length=cfg.rollout.max_completion_length,
        **options,
    )


def anchors(
    updater: Updater,
    state: TrainState,
    frozen: Any,
    experience: Experience,
    noise: Any,
    steps: int,
    divided: Sequence[Sequence[microbatches.MicroBatch]],
) -> dict[str, np.ndarray]:
    """Computes log-probabilities that stay fixed during the `steps` optimizer steps on a rollout.

    They are computed for the rows in `divided`, the micro-batches of each optimizer batch; others are 0.

    Returns:
        float32 [N] each, by completion token, in nats: "old_logps", computed with `noise`, if `old_logprobs` is
        "recompute" and there are several steps; "ref_logps", computed without noise, for a KL term. And "ages", in
        rollouts, of the policies that sampled the tokens, if these differ.
    """
    rows, versions = _rows_of(divided), experience.versions
    fixed = {
        name: scores(updater, policy, experience, rows, adapter=adapter)
        for name, (policy, adapter) in _fixed(updater, state, frozen, noise, steps).items()
    }
    if versions is not None:
        fixed["ages"] = ((int(state.step) - versions) // steps).astype(np.float32)
    return fixed


def _fixed(
    updater: Updater, state: TrainState, frozen: Any, noise: Any, steps: int
) -> dict[str, tuple[Policy, bool]]:
    """Returns the policies of `anchors`, and whether they have an adapter."""
    cfg, policies = updater.objective.grpo, {}
    # With a single step, the old policy is the learning policy: `loss` uses its log-probabilities without gradient.
    if cfg.old_logprobs == "recompute" and steps > 1:
        policies["old_logps"] = (state.params, frozen, noise), True
    if cfg.reference is not None:
        adapter = state.reference is not None
        params = state.reference if adapter else state.params
        policies["ref_logps"] = (params, frozen, None), adapter
    return policies


def scores(
    updater: Updater,
    policy: Policy,
    experience: Experience,
    rows: np.ndarray,
    *,
    adapter: bool = True,
    of: str = "logps",
) -> np.ndarray:
    """Computes `score` for rows int [k] of a rollout: float32 [N], by completion token; 0 for other rows."""
    values, objective = np.zeros(len(experience.completions), np.float32), updater.objective
    policies = updater.replicas.each(policy)
    batches = divide_rows(updater, experience, rows)

    function = functools.partial(score, objective, adapter=adapter, of=of)

    def scored(call, numbers, members, replica):
        packed = updater.replicas.apart([experience.pack(batch, {}) for batch in members], replica)
        return call(function, *policies[replica], packed)

    results = _computed(
        updater, batches, scored, program=(objective, adapter, of, policy[2] is None)
    )
    for batch, of_batch in zip(batches, results, strict=True):
        index = experience.tokens_of(batch.rows.numbers)
        values[index] = np.asarray(of_batch)[: len(index)]
    return values


def _computed[Result](
    updater: Updater,
    batches: Sequence[microbatches.MicroBatch],
    compute: Callable[[Callable, Sequence[int], Sequence[microbatches.MicroBatch], int], Result],
    program: tuple[Hashable, ...],
) -> list[Result]:
    """Computes a result for each micro-batch, in their order; replicas compute in parallel.

    `compute` is called with a function that calls the program, with one micro-batch per device of a replica of this
    host, all of one shape, with their indices in `batches`, and with the replica's number. If a replica has several
    devices, arrays of the result have a leading axis for them. `program` identifies the program. With several hosts or
    devices per replica, results are on the host.
    """
    replicas = updater.replicas
    sets = microbatches.sets_of_one_shape(batches, replicas.group)
    owners = microbatches.assign([members[0] for _, members in sets], len(replicas))

    def work(replica):
        group, results = replicas.groups[replica] if replicas.devices else (None,), {}
        for (numbers, members), owner in zip(sets, owners, strict=True):
            if owner == replicas.own[replica]:
                updater.poll()
                key = (*program, members[0].shape)
                call = functools.partial(updater.early.call, key)
                with replicas.compiling(group[0], *key):
                    results[numbers] = compute(call, numbers, members, replica)
        return results

    def computed():
        results = [pair for part in replicas.side_by_side(work) for pair in part.items()]
        if replicas.group == 1:
            return {number: x for (number,), x in results}
        return {
            number: jax.tree.map(lambda x, at=at: x[at], of_set)
            for numbers, of_set in jax.device_get(results)
            for at, number in enumerate(numbers)
        }

    if replicas.hosts.count == 1:
        by_number = computed()
    else:
        parts = replicas.hosts.together(lambda: jax.device_get(computed()), updater.poll)
        by_number = {number: x for part in parts for number, x in part.items()}
    return [by_number[number] for number in range(len(batches))]


def _high_entropy(
    updater: Updater, policy: Policy, experience: Experience, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns the mask float32 [N] of high-entropy tokens of an optimizer batch [n, k], or {} without a quantile.

    All rows with tokens are computed, because the quantile is that of the whole batch.
    """
    quantile = updater.objective.grpo.top_entropy_quantile
    if quantile == 1:
        return {}
    rows = _with_tokens(experience, rows.reshape(-1))
    entropies = scores(updater, policy, experience, rows, of="entropies")
    mask = experience.mask & np.isin(experience.row_of_token, rows)
    return {"high_entropy": high_entropy(entropies, mask, quantile)}


def _entropy_coef(cfg: GrpoConfig, control: EntropyControl | None) -> float:
    """Returns the coefficient of an optimizer step's entropy bonus."""
    if cfg.entropy is None:
        return 0.0
    return cfg.entropy.coef if control is None else jax.device_get(control).applied(cfg.entropy)


def _entropy_tokens(experience: Experience, fixed: dict[str, np.ndarray], rows: np.ndarray) -> int:
    """Returns the number of tokens of an optimizer batch [n, k] whose entropies the bonus sums."""
    counted = fixed.get("high_entropy", experience.mask)
    return int(np.count_nonzero(counted[experience.tokens_of(rows.reshape(-1))]))


def optimizer_batches(updater: Updater, rows: np.ndarray, key: jax.Array) -> np.ndarray:
    """Divides rows int [P, g] of a rollout into optimizer batches int [batches, n, k]: n prompts, k rows of each."""
    accumulation = updater.optim.gradient_accumulation_steps
    batch_rows = updater.optim.per_device_train_batch_size * accumulation
    units = rows.reshape(-1, math.gcd(batch_rows, rows.shape[1]))
    # Within one optimizer step only bnpo depends on which rows share a micro-batch.
    is_bnpo = updater.objective.grpo.loss_type == "bnpo"
    if rows.size > batch_rows or (is_bnpo and accumulation > 1):
        units = units[np.asarray(jax.random.permutation(key, len(units)))]
    return units.reshape(-1, batch_rows // units.shape[1], units.shape[1])


def micro_batches(
    updater: Updater, experience: Experience, rows: np.ndarray
) -> list[microbatches.MicroBatch]:
    """Divides an optimizer batch of rows int [n, k] into micro-batches; at least one.

    Rows without a signal are left out: their part of the loss is 0 by definition, and the divisor still counts
    them. If no row has a signal, one micro-batch is kept to compare policy and sampler. For bnpo, which divides by
    the tokens of a micro-batch, all rows are kept.
    """
    chosen, cfg = rows.reshape(-1), updater.objective.grpo
    learned = chosen[_learns(cfg, experience)[chosen] | (cfg.loss_type == "bnpo")]
    if len(learned):
        return divide_rows(updater, experience, learned)
    return divide_rows(updater, experience, _with_tokens(experience, chosen))[-1:]


def summed_gradient(
    updater: Updater,
    policy: Policy,
    experience: Experience,
    fixed: dict[str, np.ndarray],
    rows: np.ndarray,
    batches: Sequence[microbatches.MicroBatch],
    key: jax.Array,
    entropy_coef: float,
) -> tuple[tuple[jax.Array, Any], list[Any]]:
    """Computes loss and gradient of an optimizer batch.

    Args:
        updater: The updater that computes them.
        policy: The policy that learns.
        experience: The rollout.
        fixed: See `NonFinite.fixed`, for the whole rollout.
        rows: int [n, k], indices of the batch's rows.
        batches: The micro-batches of these rows.
        key: Key of LoRA's dropout.
        entropy_coef: Coefficient of the entropy bonus.

    Returns:
        The loss and its gradient, summed over all devices; and the auxiliary values of each micro-batch, see
        `objective.loss`.
    """
    chosen, judged = rows.reshape(-1), experience.judged
    counted = rows.size if judged is None else judged[chosen].sum()
    learned = experience.num_learned[chosen].sum()
    with_entropy = _entropy_tokens(experience, fixed, rows) if updater.objective.grpo.entropy else 0
    totals = _totals(updater, max(counted, 1), learned, with_entropy, entropy_coef)
    policies = updater.replicas.each(policy)
    # Made before anything runs, so that transfers to a device do not wait for its work.
    apart, count = updater.replicas.apart, updater.replicas.group
    keys = [jax.random.fold_in(key, number) for number in range(len(batches))]
    starts = enumerate(updater.replicas.each(updater.replicas.hold(zeros(policy[0]))))
    sums = [apart([start] * count, replica) for replica, start in starts]

    def accumulated(call, numbers, members, replica):
        # Micro-batches that only fill a set have no key of their own and get the first one's.
        set_keys = [keys[number] for number in (*numbers, *numbers[:1] * count)[:count]]
        sums[replica], counts = call(
            accumulator(updater.objective),
            sums[replica],
            *policies[replica],
            apart([experience.pack(batch, fixed) for batch in members], replica),
            totals,
            apart(set_keys, replica),
        )
        return counts

    counts = _computed(updater, batches, accumulated, program=(updater.objective,))
    return updater.replicas.total(sums), counts


def _totals(
    updater: Updater, rows: int, tokens: int, entropy_tokens: int, entropy_coef: float
) -> grpo.BatchTotals:
    """Returns the totals of an optimizer batch; arguments as for `grpo.BatchTotals`."""
    totals = grpo.BatchTotals(
        rows=np.int32(rows),
        tokens=np.int32(tokens),
        max_completion_length=np.int32(updater.max_completion_length),
        num_micro_batches=updater.optim.gradient_accumulation_steps,
    )
    if updater.objective.grpo.entropy is None:
        return totals
    coef = np.float32(entropy_coef)
    return dataclasses.replace(totals, entropy_tokens=np.int32(entropy_tokens), entropy_coef=coef)


def replay_step(
    updater: Updater,
    policy: Policy,
    experience: Experience,
    fixed: dict[str, np.ndarray],
    key: jax.Array,
    entropy_coef: float = 0.0,
) -> tuple[jax.Array, Any]:
    """Computes loss and gradient of an optimizer step that a `NonFinite` describes; `key` is the dropout key."""
    rows = experience.rows
    batches = micro_batches(updater, experience, rows)
    return summed_gradient(updater, policy, experience, fixed, rows, batches, key, entropy_coef)[0]


def _learns(cfg: GrpoConfig, experience: Experience) -> np.ndarray:
    """Returns which rows have a signal, bool [B]: tokens, and an advantage, a KL term or an entropy bonus."""
    always = cfg.reference is not None or cfg.entropy is not None
    return (experience.num_learned > 0) & ((experience.advantages != 0) | always)


def _with_tokens(experience: Experience, rows: np.ndarray) -> np.ndarray:
    """Returns those of the rows int [k] that have tokens to learn from."""
    return rows[experience.num_learned[rows] > 0]


def divide_rows(
    updater: Updater, experience: Experience, numbers: np.ndarray, *, largest: bool = False
) -> list[microbatches.MicroBatch]:
    """Divides rows int [k] of a rollout into micro-batches; with `largest`, all have the shape that fits any row."""
    rows, cfg = experience.rows_to_divide(numbers), updater.objective.grpo
    shapes = updater.compiled_shapes(experience.rows.shape[1])
    shapes = shapes[:1] if largest else shapes
    if cfg.loss_type == "bnpo":
        return microbatches.by_rows(rows, updater.optim.per_device_train_batch_size, shapes)
    replicas = updater.replicas
    return microbatches.divide_for(rows, shapes, len(replicas) * replicas.group)


def _rows_of(divided: Sequence[Sequence[microbatches.MicroBatch]]) -> np.ndarray:
    """Returns the rows that are in any micro-batch, int [k], in ascending order."""
    rows = np.unique(np.concatenate([batch.rows.numbers for part in divided for batch in part]))
    return rows[rows >= 0]


def _packing_metrics(
    experience: Experience, divided: Sequence[Sequence[microbatches.MicroBatch]]
) -> dict[str, float]:
    """Returns metrics of packing.

    `update/rows` is the mean number of computed rows in an optimizer step, `update/padding` the share of the tokens
    through the linears that were padding or repeated prompts, and `update/programs` the number of different shapes.
    """
    real = sum(experience.rows_to_divide(_rows_of([part])).tokens for part in divided)
    shapes = [batch.shape for part in divided for batch in part]
    return {
        "update/padding": 1 - real / sum(shape.tokens for shape in shapes),
        "update/rows": len(_rows_of(divided)) / len(divided),
        "update/programs": len(set(shapes)),
    }
