"""Tests the jitted update against a direct one: full logits, a loss written row by row, AdamW by hand."""

import dataclasses
import functools
import types
from concurrent.futures import Future

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qerl_jax import config
from qerl_jax.aqn import schedule as noise
from qerl_jax.aqn.draw import row_noise
from qerl_jax.compilation.early_programs import EarlyPrograms
from qerl_jax.config import (
    CorrectionConfig,
    EntropyConfig,
    GrpoConfig,
    LoraConfig,
    MaskConfig,
    MismatchConfig,
    OptimConfig,
    ReferenceConfig,
)
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import (
    Transformer,
    head,
    init_params,
    noise_shapes,
    random_base,
    trainable,
)
from qerl_jax.rl import update, update_metrics
from qerl_jax.rl.entropy import EntropyControl
from qerl_jax.rl.objective import Objective
from tests.experiences import in_lines, of_lines
from tests.programs import compiled

ARCH = Architecture("qwen2", 64, 32, 48, 2, 4, 2, 8)
NUM_TOKENS, TEMPERATURE = 60, 0.7
PROMPT_LENGTHS = np.array([1, 2, 3, 4, 5, 5, 2, 3], np.int32)
LENGTHS = np.array([6, 1, 4, 5, 6, 2, 3, 6], np.int32)
ROWS, WIDTH, LONGEST = 8, 11, 6
BOUNDS = {"max_prompt_length": WIDTH - LONGEST, "max_completion_length": LONGEST}
CUT_ROW = 4  # masked as a whole, as a truncated completion would be
PLAIN = OptimConfig(
    learning_rate=0.05,
    lr_scheduler_type="constant",
    warmup_ratio=0.0,
    adam_beta1=0.0,  # so that the first moment is the gradient
    adam_epsilon=1e-3,  # so that Adam is smooth where gradients are near 0
    max_grad_norm=1e9,
)
TWO_BATCHES = dataclasses.replace(PLAIN, per_device_train_batch_size=4, warmup_ratio=0.8)

DAPO = GrpoConfig()
GRPO = GrpoConfig(loss_type="grpo", reference=ReferenceConfig(0.3))
DR_GRPO = GrpoConfig(loss_type="dr_grpo")
EVERY_OPTION = GrpoConfig(
    "bnpo", 0.05, epsilon_high=0.1, delta=1.2, importance_sampling_level="sequence"
)


def slow(*values):
    """Makes a case of a parametrized test that is slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


@functools.cache
def model(dropout=0.0):
    return Transformer(ARCH, "nvfp4", LoraConfig(2, 4.0, dropout, train_norms=True), jnp.float32)


@functools.cache
def base():
    return random_base(model(), jax.random.key(0))


@functools.cache
def fresh_params():
    return jax.device_get(init_params(model(), base(), jax.random.key(1)))


@functools.cache
def trained_params():
    """Makes params that differ from the start: B is not 0, and norms are not the base's."""
    rng = np.random.default_rng(2)
    move = lambda p: (p + rng.normal(0, 0.2, p.shape)).astype(np.float32)
    return jax.tree.map(move, fresh_params())


@functools.partial(jax.jit, static_argnames="adapter")
def direct_logps(params, tokens, adapter=True):
    """Computes the log-probability [B, C] and entropy of each live completion token from all logits."""
    variables = {"params": params, "frozen": base()}
    hidden, _ = model().apply(variables, tokens, adapter=adapter)
    scores = hidden @ head(base()).astype(jnp.float32).T / TEMPERATURE
    everything = jax.nn.log_softmax(scores[..., :NUM_TOKENS])
    rows, index = np.nonzero(np.arange(LONGEST) < LENGTHS[:, None])
    places = PROMPT_LENGTHS[rows] + index
    seen = everything[rows, places - 1]
    chosen = seen[np.arange(len(rows)), tokens[rows, places]]
    fill = lambda values: jnp.zeros((ROWS, LONGEST)).at[rows, index].set(values)
    return fill(chosen), fill(-jnp.sum(jnp.exp(seen) * seen, axis=-1))


def direct_values():
    return direct_logps(trained_params(), sample_tokens())


@functools.cache
def sample_tokens():
    """Makes rows [prompt, completion] without a gap, padded."""
    rng = np.random.default_rng(3)
    tokens = np.full((ROWS, WIDTH), 59, np.int32)
    for row, length in enumerate(PROMPT_LENGTHS + LENGTHS):
        tokens[row, :length] = rng.integers(0, NUM_TOKENS, length)
    return tokens


@functools.cache
def sample_experience():
    rng = np.random.default_rng(4)
    tokens = sample_tokens()
    completions = np.full((ROWS, LONGEST), 59, np.int32)
    for row, (start, length) in enumerate(zip(PROMPT_LENGTHS, LENGTHS, strict=True)):
        completions[row, :length] = tokens[row, start : start + length]
    mask = np.arange(LONGEST) < LENGTHS[:, None]
    mask[CUT_ROW] = False
    own = np.asarray(own_logps())
    # Far enough from the policy that ratios leave the clip range on both sides.
    behaviour = own + rng.normal(0, 0.4, own.shape)
    behaviour = np.where(np.arange(LONGEST) < LENGTHS[:, None], behaviour, 0).astype(np.float32)
    advantages = rng.normal(size=ROWS).astype(np.float32)
    advantages[1] = 0
    prompts = tokens[:, : WIDTH - LONGEST]
    return of_lines(prompts, PROMPT_LENGTHS, completions, mask, behaviour, advantages)


def changed(**fields):
    """Returns the example with other fields."""
    return dataclasses.replace(sample_experience(), **fields)


def arguments(**fields):
    """Returns what follows the state in a call of the updater."""
    return base(), changed(**fields), None, jax.random.key(0)


def masks(experience):
    """Returns bool [B, C]: the tokens that are learned from."""
    return in_lines(experience, experience.mask, LONGEST)


def behaviour_logps(experience):
    """Returns the sampler's log-probabilities, float32 [B, C]."""
    return in_lines(experience, experience.behaviour_logps, LONGEST)


def own_logps():
    return direct_values()[0]


def geometry(micro_rows, accumulation):
    """Makes micro-batches that hold so many of the longest rows."""
    return dataclasses.replace(
        PLAIN,
        per_device_train_batch_size=micro_rows,
        gradient_accumulation_steps=accumulation,
        max_tokens_per_microbatch=micro_rows * WIDTH,
    )


def state_of(params, **changes):
    """Makes a first state that may be donated."""
    state = update.init_state(jax.tree.map(jnp.array, params), PLAIN)
    return dataclasses.replace(state, **changes)


def make(*, grpo=DAPO, optim=PLAIN, dropout=0.0, remat="none", temperature=TEMPERATURE):
    objective = Objective(model(dropout), grpo, temperature, NUM_TOKENS, remat)
    return update.Updater(objective, optim, 10, **BOUNDS)


def run(*, params=None, experience=None, noise=None, seed=0, **options):
    """Returns state and metrics after one rollout, on the host."""
    state = state_of(trained_params() if params is None else params)
    experience = sample_experience() if experience is None else experience
    result = make(**options)(state, base(), experience, noise, jax.random.key(seed))
    return jax.device_get(result)


def gradient(state):
    """Returns the last gradient, which is Adam's first moment with beta1 = 0."""
    return state.opt_state[1].mu


def grouped(share):
    """Makes the example with two prompts of 3 and 5 tokens for four rows each, or with one prompt per row."""
    alone = sample_experience()
    prompts = alone.take(np.array([2, 4] if share else np.repeat([2, 4], 4))[:, None])
    return dataclasses.replace(
        alone, prompts=prompts.prompts, prompt_offsets=prompts.prompt_offsets
    )


def assert_close(actual, expected, rtol=1e-4, atol=1e-6):
    leaves = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for a, e in leaves:
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol)


def of_rows(metrics):
    """Returns the metrics that do not depend on how rows were cut."""
    return {k: v for k, v in metrics.items() if not k.startswith("update/")}


def assert_same_update(actual, expected):
    """Checks that two results of `run` have the same gradient, and the same metrics but for those of cutting."""
    assert_close(gradient(actual[0]), gradient(expected[0]))
    assert_close(of_rows(actual[1]), of_rows(expected[1]), atol=1e-5)


def loss_and_gradient(**options):
    """Returns loss and gradient of an update, and its metrics."""
    state, metrics = run(**options)
    return (metrics["loss"], gradient(state)), metrics


def after_adamw(params, gradients, is_decayed):
    """Computes AdamW's first step: from m = v = 0 the corrected moments are g and g^2."""

    def step(path, p, g):
        decay = PLAIN.weight_decay * is_decayed(path[-1].key)
        return p - PLAIN.learning_rate * (g / (np.abs(g) + PLAIN.adam_epsilon) + decay * p)

    return jax.tree_util.tree_map_with_path(step, params, gradients)


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def differs(actual, expected):
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return any(not np.allclose(a, e, rtol=1e-3, atol=1e-5) for a, e in pairs)


def shuffled_rows(seed=0):
    """Returns the order in which an update with this seed meets the rows, where the order matters."""
    order_key, _ = jax.random.split(jax.random.key(seed))
    return np.asarray(jax.random.permutation(order_key, ROWS))


def learned_tokens(experience):
    """Returns bool [B, C]: tokens of rows that an update without a divergence computes."""
    return masks(experience) & (experience.advantages != 0)[:, None]


def direct_loss(logps, experience, grpo, optim, old, ref, weights, order):
    """Computes the loss of one optimizer batch, a row at a time."""
    high = grpo.epsilon if grpo.epsilon_high is None else grpo.epsilon_high
    sums, counts = [], []
    behaviour = grpo.old_logprobs == "behaviour"
    delta = (3.0 if behaviour else jnp.inf) if grpo.delta is None else grpo.delta
    for row in range(ROWS):
        n, advantage = int(experience.num_learned[row]), experience.advantages[row]
        log_ratio = logps[row, :n] - old[row, :n]
        if grpo.importance_sampling_level == "sequence" and n:
            log_ratio = jnp.full(n, 1.0) * jnp.sum(log_ratio) / n
        ratio = jnp.exp(log_ratio)
        capped, clipped = jnp.minimum(ratio, delta), jnp.clip(ratio, 1 - grpo.epsilon, 1 + high)
        losses = -weights[row, :n] * jnp.minimum(capped * advantage, clipped * advantage)
        if grpo.reference:
            d = ref[row, :n] - logps[row, :n]
            losses = losses + grpo.reference.beta * (jnp.exp(d) - d - 1)
        sums.append(jnp.sum(losses))
        counts.append(n)
    match grpo.loss_type:
        case "grpo":
            return sum(s / max(n, 1) for s, n in zip(sums, counts, strict=True)) / ROWS
        case "dr_grpo":
            return sum(sums) / (ROWS * LONGEST)
        case "dapo":
            return sum(sums) / sum(counts)
        case "bnpo":
            shared = order.reshape(-1, optim.per_device_train_batch_size)
            means = [sum(sums[i] for i in rows) / sum(counts[i] for i in rows) for rows in shared]
            return sum(means) / len(means)


def direct_loss_and_gradient(grpo, optim=PLAIN, weights=None):
    experience = sample_experience()
    policy = lambda params: direct_logps(params, sample_tokens())[0]
    logps, pull_back = jax.vjp(policy, trained_params())
    old = logps if grpo.old_logprobs == "recompute" else behaviour_logps(experience)
    ref = direct_logps(trained_params(), sample_tokens(), adapter=False)[0]
    weights = np.ones(logps.shape) if weights is None else weights
    fixed = (experience, grpo, optim, old, ref, weights, shuffled_rows())
    loss, cotangent = jax.jit(jax.value_and_grad(lambda logps: direct_loss(logps, *fixed)))(logps)
    return loss, pull_back(cotangent)[0]


@pytest.mark.parametrize(
    ("grpo", "optim"),
    [
        *(slow(g, geometry(*n)) for g in (DAPO, GRPO, DR_GRPO) for n in ((8, 1), (1, 8))),
        (EVERY_OPTION, geometry(4, 2)),
    ],
)
def test_loss_and_gradient_equal_a_direct_implementation(grpo, optim):
    expected = direct_loss_and_gradient(grpo, optim)
    actual, metrics = loss_and_gradient(grpo=grpo, optim=optim)
    assert_close(actual, expected)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(expected[1]), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("estimator", [None, "corrected", "published"])
def test_a_published_ratio_is_1_whatever_the_noise_did_and_a_corrected_one_knows_it(estimator):
    cfg = config.RunConfig(
        output_dir="run",
        model=config.ModelConfig("none", gradient_checkpointing="none"),
        data=config.DataConfig("arithmetic", max_prompt_length=WIDTH - LONGEST),
        rewards=config.RewardConfig(("accuracy_reward",)),
        rollout=config.RolloutConfig(temperature=TEMPERATURE, max_completion_length=LONGEST),
        noise=config.NoiseConfig(estimator=estimator),
        optim=PLAIN,
        max_steps=1,
    )
    updater = update.make_updater(cfg, model(), NUM_TOKENS, 10)
    experience = sample_experience()
    _, metrics = updater(state_of(trained_params()), base(), experience, None, jax.random.key(0))
    mask, advantages = masks(experience), experience.advantages[:, None]
    ratio = np.exp(own_logps() - behaviour_logps(experience))
    ratio = np.ones_like(ratio) if estimator == "published" else ratio
    gain = np.minimum(np.minimum(ratio, 3) * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
    np.testing.assert_allclose(metrics["loss"], -np.sum(gain * mask) / np.sum(mask), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("grpo", [GRPO, slow(DR_GRPO)], ids=lambda cfg: cfg.loss_type)
def test_a_row_that_nobody_judged_is_not_among_the_rows_that_a_loss_is_divided_by(grpo):
    judged = np.arange(ROWS) != CUT_ROW
    actual, _ = loss_and_gradient(grpo=grpo, experience=changed(judged=judged))
    share = ROWS / (ROWS - 1)  # where all are judged, all rows divide
    expected, _ = loss_and_gradient(grpo=grpo)
    assert_close(actual, jax.tree.map(lambda x: x * share, expected))


@pytest.mark.slow
@pytest.mark.parametrize("grpo", [GRPO, DR_GRPO, DAPO], ids=lambda cfg: cfg.loss_type)
def test_micro_batches_of_2_and_of_all_rows_give_the_same_parameters(grpo):
    whole, cut = run(grpo=grpo), run(grpo=grpo, optim=geometry(2, 4))
    assert_same_update(cut, whole)
    assert_close(cut[0].params, whole[0].params, atol=1e-5)


def test_micro_batches_have_shapes_that_are_compiled_or_the_largest():
    early, cfg = EarlyPrograms(), dataclasses.replace(PLAIN, per_device_train_batch_size=16)
    lengths = {"max_prompt_length": 128, "max_completion_length": 384}
    updater = dataclasses.replace(make(optim=cfg), early=early, **lengths)
    largest, *others = updater.shapes(1)
    accumulates = [(updater.objective, shape) for shape in others]
    score = (updater.objective, False, "logps", True, others[0])
    divide = lambda: update.divide_rows(updater, sample_experience(), np.arange(2))
    assert updater.compiled_shapes(1) == updater.shapes(1) and divide()[0].shape != largest
    early._pending = {key: Future() for key in (*accumulates, score)}
    assert updater.compiled_shapes(1) == (largest,)
    assert {batch.shape for batch in divide()} == {largest}
    for key in accumulates:
        early._pending[key].set_result(None)
    assert updater.compiled_shapes(1) == (largest, *others[1:])
    early._pending[score].set_result(None)
    assert updater.compiled_shapes(1) == updater.shapes(1)


def test_the_step_is_adamw():
    state, _ = run()
    expected = after_adamw(trained_params(), gradient(state), lambda name: name != "scale")
    assert_close(state.params, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grpo", "micro_rows", "tokens"),
    [*((GRPO, n, n * WIDTH) for n in (8, 4, 2)), (DR_GRPO, 2, 17), (GRPO, 2, 40)],
)
def test_a_prompt_computed_once_gives_the_update_of_a_prompt_in_every_row(grpo, micro_rows, tokens):
    """A micro-batch has two prompts, one, or half of one; the reference policy is scored like this, too.

    Cut by tokens it has two rows of a prompt, of three widths; or four, which are scored under the reference.
    """
    optim = geometry(micro_rows, 8 // micro_rows)
    optim = dataclasses.replace(optim, max_tokens_per_microbatch=tokens)
    shared = run(experience=grouped(True), grpo=grpo, optim=optim)
    assert_same_update(shared, run(experience=grouped(False), grpo=grpo))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [slow("products"), slow("mlp"), "layer"])
def test_rematerialized_layers_give_the_same_update(remat):
    assert_same_update(run(remat=remat), run())


HALF_SILENT = np.array([0.7, 0, 0, -1.1, 0.4, 0, -0.3, 0], np.float32)


@pytest.mark.parametrize("changes", [{}, {"advantages": HALF_SILENT}])
def test_metrics_of_computed_rows_and_their_sampler_equal_a_direct_computation(changes):
    experience = changed(**changes)
    mask = learned_tokens(experience)
    logps, entropies = direct_values()
    log_ratio = (logps - behaviour_logps(experience))[mask]
    ratio, difference = np.exp(log_ratio), np.abs(log_ratio)
    _, metrics = run(experience=experience)
    if not changes:  # without clipping no test would notice a wrong clip range
        assert metrics["clip_ratio/low_mean"] > 0 and metrics["clip_ratio/high_mean"] > 0
    expected = {
        "update/entropy": np.mean(entropies[mask]),
        "sampling/sampling_logp_difference/p99": np.quantile(difference, 0.99),
        "sampling/kl": np.mean(-log_ratio),
        "sampling/kl_k3": np.mean(ratio - 1 - log_ratio),
        "sampling/importance_sampling_ratio/min": ratio.min(),
    }
    for name, x in (("sampling_logp_difference", difference), ("importance_sampling_ratio", ratio)):
        expected |= {f"sampling/{name}/mean": x.mean(), f"sampling/{name}/max": x.max()}
    assert_close({name: metrics[name] for name in expected}, expected)


def test_two_estimates_of_the_divergence_from_the_sampler_find_the_exact_one():
    """Tokens of one known distribution are scored by another; the exact sum is the oracle."""
    rng = np.random.default_rng(5)
    sampler, trainer = (rng.dirichlet(np.ones(6)) for _ in range(2))
    tokens = rng.choice(6, 40_000, p=sampler)
    ours, theirs = (jnp.log(x.astype(np.float32))[tokens] for x in (trainer, sampler))
    mask = np.ones(len(tokens), bool)
    batch = types.SimpleNamespace(mask=mask, behaviour_logps=theirs, fixed={})
    drift = jax.device_get(update_metrics.drift(ours, batch))
    metrics = update_metrics.of_sampling(jax.tree.map(np.ravel, drift))
    exact = np.sum(sampler * np.log(sampler / trainer))
    assert exact > 0.1
    estimates = metrics["sampling/kl"], metrics["sampling/kl_k3"]
    np.testing.assert_allclose(estimates, [exact] * 2, rtol=0.05)


@pytest.mark.slow
def test_the_order_of_rows_changes_nothing():
    """The shortest and the longest rows, and an empty one, change places."""
    moved = sample_experience().take(np.array([4, 7, 1, 0, 6, 3, 2, 5])[:, None])
    assert_same_update(run(experience=moved, grpo=GRPO), run(grpo=GRPO))


RECOMPUTE = GrpoConfig(
    old_logprobs="recompute", mismatch=MismatchConfig(CorrectionConfig(clip_max=1.1))
)


@pytest.mark.slow
def test_a_single_recomputed_step_has_ratio_1_and_the_weights_of_the_correction():
    experience = sample_experience()
    weights = np.exp(own_logps() - behaviour_logps(experience))
    assert np.any(weights[masks(experience)] > 1.1)
    actual, metrics = loss_and_gradient(grpo=RECOMPUTE)
    assert_close(actual, direct_loss_and_gradient(RECOMPUTE, weights=np.minimum(weights, 1.1)))
    assert {name for name in metrics if name.startswith("clip_ratio/") and metrics[name]} == set()


MASKED = GrpoConfig(
    mismatch=MismatchConfig(mask=MaskConfig(1.3), off_policy_threshold=0.1), epsilon=0.4
)


def stays(experience):
    """Returns bool [B, 1]: rows with an advantage, or from which the policy has moved at most 0.1 nats per token."""
    mask = masks(experience)
    away = np.where(mask, behaviour_logps(experience) - own_logps(), 0).sum(axis=1)
    away /= np.maximum(mask.sum(axis=1), 1)
    return ((experience.advantages >= 0) | (away <= 0.1))[:, None]


@pytest.mark.slow
def test_masks_of_the_sampling_ratio_are_those_of_the_policy_that_learns():
    experience = sample_experience()
    ratio = np.exp(own_logps() - behaviour_logps(experience))
    within = (ratio <= 1.3) & (ratio >= 1 / 1.3)
    weights = np.asarray(within & stays(experience), float)
    assert 0 < weights[masks(experience)].mean() < 1
    actual, metrics = loss_and_gradient(grpo=MASKED)
    assert_close(actual, direct_loss_and_gradient(MASKED, weights=weights))
    assert_close(metrics["sampling/masked_mean"], np.mean(weights[learned_tokens(experience)] == 0))


@pytest.mark.slow
def test_a_step_of_which_masks_leave_nothing_changes_no_weight():
    far = changed(behaviour_logps=sample_experience().behaviour_logps - 5)
    state, metrics = run(grpo=MASKED, experience=far)
    assert metrics["updates/empty"] == 1 and metrics["sampling/masked_mean"] == 1
    assert_equal(state.params, trained_params())


EXPLORES = GrpoConfig(
    loss_type="cispo",
    epsilon_high=1.2,
    top_entropy_quantile=0.5,
    entropy=EntropyConfig(0.5),
    mismatch=MismatchConfig(off_policy_threshold=0.1),
)


def explored():
    return changed(advantages=sample_experience().advantages * (np.arange(ROWS) != 7))


def explores_directly(logps, entropies):
    """Computes CISPO on high-entropy tokens with an entropy bonus, from log-probabilities and entropies."""
    experience = explored()
    counted, (now, surprise) = masks(experience), np.asarray(direct_values())
    high = counted & (surprise >= np.quantile(surprise[counted], 0.5))
    assert 0 < high.sum() < counted.sum() and high[7].any()  # a row without an advantage
    ratio = np.exp(np.where(counted, now - behaviour_logps(experience), 0))
    weights = np.minimum(ratio, 1.2) * experience.advantages[:, None] * high * stays(experience)
    policy = -jnp.sum(weights * logps) / counted.sum()
    return policy - 0.5 * jnp.sum(entropies * high) / high.sum()


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(8, 1), (2, 4)])
def test_entropies_choose_tokens_and_teach_all_rows_however_rows_are_cut(sizes):
    policy = lambda params: direct_logps(params, sample_tokens())
    values, pull_back = jax.vjp(policy, trained_params())
    loss, cotangents = jax.value_and_grad(explores_directly, argnums=(0, 1))(*values)
    options = {"grpo": EXPLORES, "experience": explored(), "optim": geometry(*sizes)}
    actual, metrics = loss_and_gradient(**options)
    assert_close(actual, (loss, pull_back(cotangents)[0]))
    assert metrics["entropy_coef"] == 0.5 and metrics["policy_loss"] > metrics["loss"]
    assert metrics["update/rows"] == ROWS - 1  # all but the one that is masked


VESPO = dataclasses.replace(RECOMPUTE, loss_type="vespo", num_iterations=2)


@pytest.mark.slow
def test_rows_that_are_weighed_as_a_whole_weigh_the_same_however_rows_are_cut():
    whole, whole_metrics = run(grpo=VESPO)
    cut, cut_metrics = run(grpo=VESPO, optim=geometry(2, 4))
    # Adam divides small gradients by their own size, and how they round depends on the CPU: one without AVX-512 moved a
    # parameter by 2.6e-4 of a step.
    assert_close(cut.params, whole.params, atol=4e-4 * PLAIN.learning_rate)
    assert_close(of_rows(cut_metrics), of_rows(whole_metrics), atol=1e-5)
    assert whole_metrics["vespo/phi_seq_mean"] not in (0, 1)


ADAPTS = GrpoConfig(entropy=EntropyConfig(coef=0.1, adaptive=True, coef_delta=0.05, target=9.0))


@pytest.mark.slow
def test_a_coefficient_that_adapts_is_part_of_the_state():
    """No entropy comes before the first step, so only the second one has a bonus."""
    state, losses = state_of(trained_params(), entropy=EntropyControl.begin(ADAPTS.entropy)), []
    for _ in range(2):
        state, metrics = make(grpo=ADAPTS)(state, *arguments())
        losses.append(metrics["policy_loss"] - metrics["loss"])
    assert losses[0] == 0
    np.testing.assert_allclose(losses[1], 0.15 * metrics["update/entropy"], rtol=1e-4)
    np.testing.assert_allclose([state.entropy.coef, metrics["entropy_coef"]], 0.2, rtol=1e-6)
    np.testing.assert_allclose(state.entropy.last, metrics["update/entropy"], rtol=1e-5)


@pytest.mark.slow
def test_nothing_reads_a_state_that_was_given_away(monkeypatch):
    """A GPU deletes what `apply` is given; a CPU may keep it."""
    apply = update.apply

    def taking(state, *rest, **options):
        after = apply(state, *rest, **options)
        for leaf in jax.tree.leaves(state):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        return after

    monkeypatch.setattr(update, "apply", taking)
    state = state_of(trained_params(), entropy=EntropyControl.begin(ADAPTS.entropy))
    cfg = dataclasses.replace(ADAPTS, num_iterations=3)
    _, metrics = make(grpo=cfg)(jax.device_put(state), *arguments())
    np.testing.assert_allclose(metrics["entropy_coef"], 0.25, rtol=1e-6)


SEVERAL_STEPS = GrpoConfig(old_logprobs="recompute", num_iterations=2)


@pytest.mark.slow
def test_behaviour_is_recompute_where_the_sampler_was_the_policy():
    same = changed(behaviour_logps=np.asarray(own_logps())[masks(sample_experience())])
    behaviour = dataclasses.replace(SEVERAL_STEPS, old_logprobs="behaviour")
    expected, _ = run(grpo=SEVERAL_STEPS, experience=same, optim=TWO_BATCHES)
    state, metrics = run(grpo=behaviour, experience=same, optim=TWO_BATCHES)
    assert_close(state.params, expected.params, rtol=1e-3, atol=1e-4)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    # With another sampler they part: the equality above is not for want of a difference.
    assert differs(run(grpo=behaviour, optim=TWO_BATCHES)[0].params, expected.params)


@pytest.mark.slow
def test_the_key_shuffles_the_rows_and_later_steps_leave_the_recomputed_policy_behind():
    options = {"grpo": SEVERAL_STEPS, "optim": TWO_BATCHES}
    (first, metrics), (again, _), (other, _) = (run(seed=seed, **options) for seed in (0, 0, 1))
    assert_equal(first.params, again.params)
    assert differs(first.params, other.params)
    assert metrics["clip_ratio/region_mean"] > 0
    assert first.step == 4  # two batches of four rows, gone through twice
    # Of 8 warm-up steps this rollout's last was the fourth.
    np.testing.assert_allclose(metrics["learning_rate"], TWO_BATCHES.learning_rate / 2, rtol=1e-6)


@pytest.mark.slow
def test_every_pass_takes_the_shuffled_batches_in_the_same_order():
    """As TRL's buffer does: two passes over two batches are four updates of one batch each."""
    several = GrpoConfig(num_iterations=2)
    at_once, _ = run(grpo=several, optim=TWO_BATCHES, seed=3)
    orders = shuffled_rows(seed=3).reshape(2, 4, 1)
    state, batches = state_of(trained_params()), [sample_experience().take(x) for x in orders]
    for batch in (*batches, *batches):
        state, _ = make(optim=TWO_BATCHES)(state, base(), batch, None, jax.random.key(9))
    assert_close(at_once.params, jax.device_get(state.params), rtol=1e-3, atol=1e-5)


SYNCED = dataclasses.replace(
    GRPO, reference=ReferenceConfig(0.3, "synced", mixup_alpha=0.25, sync_steps=2)
)
STILL = dataclasses.replace(GRPO, reference=ReferenceConfig(0.3, sync_steps=1))


@pytest.mark.slow
def test_a_kept_reference_is_what_the_divergence_is_taken_to():
    """A fresh adapter acts as the base does, so as a reference it equals the adapter switched off."""
    state = state_of(trained_params(), reference=jax.tree.map(jnp.array, fresh_params()))
    kept, kept_metrics = jax.device_get(make(grpo=SYNCED)(state, *arguments()))
    off, off_metrics = run(grpo=GRPO)
    assert off_metrics["kl"] > 1e-3
    assert_close(kept_metrics, off_metrics, atol=1e-5)
    assert_close(kept.params, off.params, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("grpo", [SYNCED, slow(STILL)])
def test_a_reference_moves_towards_the_policy_every_so_many_steps_if_it_follows(grpo):
    state = update.init_state(jax.tree.map(jnp.array, trained_params()), PLAIN, keep_reference=True)
    divergences, mixed = [], trained_params()
    for step in range(1, 4):
        state, metrics = make(grpo=grpo)(state, *arguments())
        divergences.append(metrics["kl"])
        if step == 2 and grpo is SYNCED:
            mix = lambda r, p: 0.75 * r + 0.25 * p
            expected = jax.tree.map(mix, trained_params(), jax.device_get(state.params))
            mixed = jax.device_get(state.reference)
            assert_close(mixed, expected, rtol=1e-6)
        assert_equal(state.reference, mixed)
    assert abs(divergences[0]) < 1e-9 < divergences[1]
    assert differs(state.params, mixed)


def test_all_weights_of_the_layers_train_where_the_model_is_full():
    """The oracle is one AdamW step on the gradient of a direct loss through the bare base."""
    bare = Transformer(ARCH, "float32", None, jnp.float32)
    dense, full = random_base(bare, jax.random.key(0)), bare.clone(full=True)
    params, rest = trainable(full, dense, jax.random.key(1))
    experience = sample_experience()
    rows, index = np.nonzero(masks(experience))
    places = PROMPT_LENGTHS[rows] + index

    def loss(frozen):
        hidden, _ = bare.apply({"frozen": frozen}, sample_tokens())
        scores_ = hidden @ head(frozen).T / TEMPERATURE
        seen = jax.nn.log_softmax(scores_[..., :NUM_TOKENS])[rows, places - 1]
        logps = seen[np.arange(len(rows)), sample_tokens()[rows, places]]
        ratio = jnp.exp(logps - behaviour_logps(experience)[rows, index])
        advantage = experience.advantages[rows]
        clipped = jnp.clip(ratio, 0.8, 1.2)
        capped = jnp.minimum(ratio, 3.0)  # what `delta` is by default
        return -jnp.mean(jnp.minimum(capped * advantage, clipped * advantage))

    value, slopes = jax.jit(jax.value_and_grad(loss))(dense)
    objective = Objective(full, DAPO, TEMPERATURE, NUM_TOKENS, "layer")
    improve = update.Updater(objective, PLAIN, 10, **BOUNDS)
    before, state = jax.device_get(params), update.init_state(params, PLAIN)
    state, metrics = jax.device_get(improve(state, rest, *arguments()[1:]))
    assert_close(metrics["loss"], value)
    expected = {"layers": slopes["layers"]}
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))
    assert_close(gradient(state), expected, rtol=1e-3, atol=1e-4 * largest)
    stepped = after_adamw(before, gradient(state), lambda name: name == "weight")
    assert_close(state.params, stepped, atol=1e-5)


def test_kl_is_to_the_policy_without_its_adapter():
    reference = direct_logps(trained_params(), sample_tokens(), adapter=False)[0]
    d = (reference - own_logps())[masks(sample_experience())]
    _, metrics = run(grpo=GRPO)
    np.testing.assert_allclose(metrics["kl"], np.mean(np.exp(d) - d - 1), rtol=1e-4)
    _, metrics = run(grpo=GRPO, params=fresh_params())
    assert 0 <= metrics["kl"] < 1e-9


def test_kl_teaches_where_advantages_are_silent():
    state, metrics = run(grpo=GRPO, experience=changed(**NO_ADVANTAGE))
    assert state.skipped == 0 and metrics["updates/empty"] == 0
    assert differs(state.params, trained_params())


@pytest.mark.slow
def test_zero_noise_is_no_noise_and_other_noise_changes_the_update():
    key, shapes = jax.random.key(5), noise_shapes(ARCH)
    silent, noisy = (run(noise=noise.norm_noise(key, sigma, shapes)) for sigma in (0.0, 0.1))
    assert_same_update(silent, run())
    assert differs(gradient(noisy[0]), gradient(run()[0]))


@pytest.mark.slow
def test_an_update_acts_under_the_noise_of_each_rows_number():
    """One number for all rows is one vector for all; their own numbers give another update."""
    shapes, key = noise_shapes(ARCH), jax.random.key(5)
    shared = noise.norm_noise(jax.random.fold_in(key, 6), 0.1, shapes)
    rows = row_noise(key, 0.1, shapes, "sequence")
    numbered = lambda numbers: changed(noise=np.asarray(numbers, np.int32))
    expected, _ = run(noise=shared)
    options = {"noise": rows, "optim": geometry(4, 2)}
    alike, _ = run(experience=numbered([6] * ROWS), **options)
    assert_close(gradient(alike), gradient(expected), rtol=1e-3, atol=1e-5)
    own, _ = run(experience=numbered(range(ROWS)), **options)
    assert differs(gradient(own), gradient(expected))
    # Whichever rows they are computed with.
    moved = numbered(range(ROWS)).take(np.array([4, 7, 1, 0, 6, 3, 2, 5])[:, None])
    moved, _ = run(experience=moved, **options)
    assert_close(gradient(moved), gradient(own), rtol=1e-3, atol=1e-5)


ALL_MASKED = {"mask": np.zeros(LENGTHS.sum() - LENGTHS[CUT_ROW], bool)}
NO_ADVANTAGE = {"advantages": np.zeros(ROWS, np.float32)}
INFINITE = {"advantages": np.array([1, 1, 1, np.inf, 1, 1, 1, 1], np.float32)}


@pytest.mark.parametrize(
    ("changes", "empty", "non_finite"),
    [(ALL_MASKED, 1, 0), (NO_ADVANTAGE, 1, 0), (INFINITE, 0, 1)],
    ids=["all masked", "no advantage", "infinite advantage"],
)
def test_a_step_that_cannot_teach_changes_nothing_but_the_counts(changes, empty, non_finite):
    before = run()[0]
    donated = jax.tree.map(jnp.array, before)
    after, metrics = jax.device_get(make()(donated, *arguments(**changes)))
    assert_equal(after.params, before.params)
    assert_equal(after.opt_state, before.opt_state)
    assert (after.step, after.skipped) == (before.step + 1, before.skipped + 1)
    assert (metrics["updates/empty"], metrics["updates/non_finite"]) == (empty, non_finite)
    if empty:
        assert np.isfinite(list(metrics.values())).all(), metrics


@pytest.mark.slow
def test_every_empty_step_of_a_rollout_is_counted():
    state, metrics = run(grpo=SEVERAL_STEPS, experience=changed(**ALL_MASKED), optim=TWO_BATCHES)
    assert_equal(state.params, trained_params())
    assert (state.step, state.skipped, metrics["updates/empty"]) == (4, 4, 4)
    assert np.isfinite(list(metrics.values())).all(), metrics


def test_a_step_that_runs_again_keeps_the_order_of_its_rows():
    updater = make(grpo=EVERY_OPTION, optim=geometry(4, 2))
    shuffled, again, policy = set(), set(), (trained_params(), base(), None)
    for seed in range(3):
        key = jax.random.key(seed)
        _, metrics = updater(state_of(trained_params()), *arguments()[:3], key)
        loss, _ = update.replay_step(updater, policy, sample_experience(), {}, key)
        shuffled.add(float(metrics["loss"]))
        again.add(float(loss))
    assert len(shuffled) > 1 and len(again) == 1


def test_a_masked_row_with_an_infinite_advantage_is_harmless():
    advantages = sample_experience().advantages.copy()
    advantages[CUT_ROW] = np.inf
    state, metrics = run(experience=changed(advantages=advantages))
    assert state.skipped == 0
    assert_equal(state.params, run()[0].params)
    assert np.isfinite(list(metrics.values())).all(), metrics


SEQUENCE_MASKED = MismatchConfig(mask=MaskConfig(2.0, level="sequence"), off_policy_threshold=0.1)


@pytest.mark.parametrize(
    "grpo",
    [
        DAPO,
        *(slow(GrpoConfig("grpo")), slow(DR_GRPO), slow(RECOMPUTE)),
        slow(GrpoConfig(mismatch=SEQUENCE_MASKED, epsilon=0.4)),
    ],
    ids=["dapo", "grpo", "dr_grpo", "recomputed", "masked"],
)
def test_rows_that_cannot_learn_are_left_out_and_the_gradient_stays(monkeypatch, grpo):
    experience = changed(advantages=HALF_SILENT)
    state, metrics = run(grpo=grpo, experience=experience, optim=geometry(2, 4))
    # The fifth row has an advantage, and no token.
    assert metrics["update/rows"] == 3
    monkeypatch.setattr(update, "_learns", lambda cfg, experience: experience.num_learned > 0)
    whole, all_rows = run(grpo=grpo, experience=experience, optim=geometry(2, 4))
    assert all_rows["update/rows"] == ROWS - 1
    np.testing.assert_allclose(metrics["loss"], all_rows["loss"], rtol=1e-6)
    distance = jax.tree.map(np.subtract, gradient(state), gradient(whole))
    assert optax.tree.norm(distance) < 1e-6 * optax.tree.norm(gradient(whole))


@pytest.mark.parametrize(
    ("grpo", "rows"), [(GRPO, ROWS - 1), (EVERY_OPTION, ROWS)], ids=["beta", "bnpo"]
)
@pytest.mark.slow
def test_rows_without_an_advantage_stay_where_they_count(grpo, rows):
    """A divergence teaches from any row; bnpo divides by the tokens of a micro-batch."""
    experience = changed(advantages=HALF_SILENT)
    _, metrics = run(grpo=grpo, experience=experience, optim=geometry(4, 2))
    assert metrics["update/rows"] == rows


@pytest.mark.slow
def test_where_nothing_learns_some_rows_still_compare_policy_and_sampler():
    experience = changed(**NO_ADVANTAGE)
    state, metrics = run(grpo=SEVERAL_STEPS, experience=experience, optim=geometry(2, 2))
    assert metrics["updates/empty"] == 4 and metrics["update/rows"] >= 1
    assert metrics["sampling/sampling_logp_difference/mean"] > 0.1 and metrics["update/entropy"] > 0
    assert_equal(state.params, trained_params())


def test_padding_is_what_is_neither_a_row_nor_its_prompt():
    experience = grouped(True)
    _, metrics = run(experience=experience, optim=geometry(8, 1))
    # The longest rows of two groups, in one micro-batch of 88 tokens.
    learned = (sample_experience().advantages != 0) & (experience.num_learned > 0)
    real = LENGTHS[learned].sum() + len(experience.prompts)
    assert metrics["update/programs"] == 1
    np.testing.assert_allclose(metrics["update/padding"], 1 - real / 88)


@pytest.mark.parametrize("rows", [np.arange(ROWS), np.repeat([0, 5], 4), np.repeat([3, 7], 4)])
def test_no_rollout_recompiles_whatever_its_lengths(caplog, rows):
    run()
    others = sample_experience().take(rows[:, None])
    assert compiled(caplog, lambda: run(seed=1, experience=others)) == []


@pytest.mark.slow
def test_nothing_is_scored_where_the_samplers_log_probabilities_serve(caplog):
    """There is no pass before the update by default, and none where a single recomputed step is its own old policy."""
    for cfg, passes in ((DAPO, []), (RECOMPUTE, []), (GRPO, ["score"])):
        # With a temperature that no other test has, so that all is compiled here.
        improve, state = make(grpo=cfg, temperature=0.71), state_of(trained_params())
        names = compiled(caplog, functools.partial(improve, state, *arguments()))
        assert "accumulate" in names
        assert [name for name in names if name == "score"] == passes


def test_the_state_is_donated():
    state = state_of(trained_params())
    make()(state, *arguments())
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(base()))


@pytest.mark.slow
def test_dropout_follows_the_key():
    seeded = lambda dropout, *seeds: (gradient(run(dropout=dropout, seed=s)[0]) for s in seeds)
    first, again, other = seeded(0.5, 0, 0, 1)
    assert_equal(first, again)
    assert differs(first, other)
    assert_equal(*seeded(0.0, 0, 1))  # without dropout, it does not
