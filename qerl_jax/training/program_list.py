"""Lists the programs of a run, from its plan: nothing is traced, and no weights are needed."""

import dataclasses
import functools

import jax
from jax.sharding import SingleDeviceSharding

from qerl_jax.aqn import exploration
from qerl_jax.compilation.early_programs import Listed
from qerl_jax.config import RunConfig
from qerl_jax.generation.engine import Batch, Engine
from qerl_jax.model import transformer
from qerl_jax.rl import adapter_check, update
from qerl_jax.training.check import CheckedRun


def programs(
    checked: CheckedRun, engine: Engine, updater: update.Updater
) -> tuple[list[Listed], list[Listed]]:
    """Returns the programs of a run on one device, in the order in which it needs them: the first ones, and the others.

    They are those of rollouts and evaluations without tools, of updates, and of the check of the adapter. First come
    those that nothing can take the place of: the largest batch and the longest prefill, of an evaluation if the run
    begins with one, the largest micro-batches, and what the second step needs. The small ones that compile in a tenth
    of a second are not among them: of the noise, of page copies, of checks of numbers.

    Args:
        checked: The run; it has one device.
        engine: What samples its rollouts.
        updater: What updates its policy.
    """
    cfg, model, group = checked.cfg, checked.task.model, checked.cfg.rollout.num_generations
    base = transformer.abstract_base(model.clone(full=False))
    params, frozen = jax.eval_shape(
        functools.partial(transformer.trainable, model), base, jax.random.key(0)
    )
    state = jax.eval_shape(functools.partial(update.first_state, cfg), params)
    sampled = jax.eval_shape(lambda p: transformer.as_computed(p, model.dtype), params)
    noise = None if cfg.noise is None else exploration.abstract_noise(cfg.noise, model)
    place = SingleDeviceSharding(jax.local_devices()[0])
    state, frozen, sampled, noise = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
        (state, frozen, sampled, noise),
    )
    variables = {"params": sampled, "frozen": frozen}
    with_noise = variables if noise is None else variables | {"noise": noise}
    has_turns = checked.task.tools is not None
    sampling = [] if has_turns else engine.programs(with_noise, _batch(cfg), place)
    of_updates = noise if cfg.noise is not None and cfg.noise.scope == "both" else None
    learning = updater.programs(state, frozen, of_updates, cfg)
    check = []
    if model.lora is not None:
        sharing = group if cfg.optim.share_prompts else 1
        check = adapter_check.programs(updater, state.params, frozen, noise, sharing)
    held_out: list[Listed] = []
    if (evaluator := checked.evaluator) is not None and not has_turns:
        batch = dataclasses.replace(
            _batch(cfg),
            rows=evaluator.num_rows,
            prompts=len(evaluator.problems),
            group=evaluator.sampler.params.n,
            own_noise=False,
        )
        held_out = evaluator.sampler.engine.programs(variables, batch, place)
    names = [program.name for program in learning]
    first = 1 + names.index("apply")
    # The second rollout begins with the longest prefill of rows that go on, and ends with the check.
    goes_on = 2 + bool(cfg.rollout.carry)
    begins = [*sampling[:2], *learning[:first], *sampling[2:goes_on], *check]
    others = [*learning[first:], *sampling[goes_on:]]
    if checked.resumed is None:
        return [*held_out[:2], *begins], [*others, *held_out[2:]]
    return begins, [*others, *held_out]


def _batch(cfg: RunConfig) -> Batch:
    """Returns the rows of a rollout."""
    prompts, group = cfg.prompts_per_rollout, cfg.rollout.num_generations
    rows, slots = prompts * group + cfg.rollout.carry, cfg.rollout.max_concurrent
    if cfg.has_row_noise and cfg.noise.per == "sequence":
        prompts, group = rows, 1
    return Batch(
        rows,
        prompts,
        group,
        cfg.rollout.max_completion_length,
        cfg.data.max_prompt_length,
        max_concurrent=slots,
        own_noise=cfg.has_row_noise,
    )
