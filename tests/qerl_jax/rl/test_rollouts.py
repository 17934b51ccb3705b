"""Tests rollouts: what is sampled from problems, and how it is scored."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.aqn.draw import row_noise
from qerl_jax.checkpoint import hf_folder
from qerl_jax.config import LoraConfig, RolloutConfig
from qerl_jax.data import tokenizer
from qerl_jax.data.datasets import Problem
from qerl_jax.generation.engine import Engine, EngineSpec
from qerl_jax.generation.prompts import admit
from qerl_jax.generation.sampler import Sampler
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.scheduler import QueuedPrompt
from qerl_jax.model import layers, logprobs
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, head, init_params, noise_shapes, random_base
from qerl_jax.rewards import scoring
from qerl_jax.rl import rollouts
from qerl_jax.rl.experience import make_experience
from qerl_jax.rl.objective import token_logps
from qerl_jax.rl.rollouts import Rollout
from tests.experiences import in_one_batch
from tests.qerl_jax.model import caches

ARCH = Architecture("qwen2", 512, 32, 48, 2, 4, 2, 8)
GROUP, PROMPT_WIDTH, LONGEST = 2, 24, 6
# A random model would rarely sample the one real stop token.
STOPS = tuple(range(3, 103))


@functools.cache
def tokens():
    return tokenizer.load(hf_folder.TINY)


@functools.cache
def policy_model():
    return Transformer(ARCH, "nvfp4", LoraConfig(2, 4.0), jnp.float32)


@functools.cache
def policy():
    model = policy_model()
    frozen = random_base(model, jax.random.key(0))
    # A scale at which next tokens differ in probability, and the prompt matters.
    frozen = frozen | {"lm_head": frozen["lm_head"] * 10}
    engine = Engine(model, EngineSpec(tokens().num_tokens), stop_tokens=STOPS)
    params = SamplingParams(n=GROUP, max_tokens=LONGEST)
    sampler = Sampler(engine, tokens(), params, PROMPT_WIDTH)
    params = init_params(model, frozen, jax.random.key(1))
    return sampler, {"params": params, "frozen": frozen}


PROBLEMS = [
    Problem(({"role": "user", "content": "1+2="},), {"answer": "3"}),
    Problem(({"role": "user", "content": "12 + 30 = ?"},), {"answer": "42", "level": 2}),
    Problem("7*8=", {"answer": "56"}),
]


@functools.cache
def collect(seed):
    return rollouts.collect(*policy(), PROBLEMS, jax.random.key(seed))


def test_a_rollout_holds_the_tokens_of_prompts_and_completions_in_the_order_of_the_problems():
    rollout = collect(0)
    prompts = tokens().encode([problem.prompt for problem in PROBLEMS])
    assert len({len(prompt) for prompt in prompts}) == 3
    assert rollout.problems == tuple(PROBLEMS)
    assert rollout.num_generations == GROUP
    assert [ids.tolist() for ids in rollout.prompt_ids] == prompts
    assert len(rollout.completion_ids) == len(rollout.behaviour_logps) == len(rollout.stopped) == 6
    for ids, logps in zip(rollout.completion_ids, rollout.behaviour_logps, strict=True):
        assert ids.shape == logps.shape and (ids.dtype, logps.dtype) == (np.int32, np.float32)
    assert {ids.dtype for ids in rollout.prompt_ids} == {np.dtype(np.int32)}
    assert rollout.lengths.tolist() == [len(ids) for ids in rollout.completion_ids]
    assert rollout.num_tokens == GROUP * sum(map(len, prompts)) + rollout.lengths.sum()


def test_rows_and_texts_end_with_their_stop_token_and_nothing_else_stops():
    rollout = collect(0)
    assert any(rollout.stopped) and not all(rollout.stopped)
    rows = zip(rollout.completion_ids, rollout.behaviour_logps, rollout.stopped, strict=True)
    for ids, logps, stopped in rows:
        assert np.isin(ids, STOPS).tolist() == [False] * (len(ids) - 1) + [stopped]
        assert stopped or len(ids) == LONGEST
        assert (logps < 0).all()
    assert rollout.texts == tuple(tokens().decode(ids.tolist()) for ids in rollout.completion_ids)
    assert any(rollout.texts)


def test_a_rollout_is_a_function_of_its_key():
    ours, theirs = collect.__wrapped__(0), collect(0)
    assert (ours.stopped, ours.texts) == (theirs.stopped, theirs.texts)
    for name in ("prompt_ids", "completion_ids", "behaviour_logps"):
        jax.tree.map(np.testing.assert_array_equal, getattr(ours, name), getattr(theirs, name))
    assert collect(1).texts != collect(0).texts
    # Completions of one prompt differ.
    assert collect(0).texts[::GROUP] != collect(0).texts[1::GROUP]


LENGTHS = [len(ids) for ids in tokens().encode([problem.prompt for problem in PROBLEMS])]
LIMIT = max(LENGTHS) - 1


def test_problems_whose_prompts_fit_are_admitted_as_they_are_and_others_dropped_on_request():
    for overlong in ("error", "drop"):
        options = {"max_prompt_length": LIMIT + 1, "overlong": overlong}
        assert admit(PROBLEMS, tokens(), **options) is PROBLEMS
    lines = []
    options = {"overlong": "drop", "what": "held-out prompts", "log": lines.append}
    admitted = admit(PROBLEMS, tokens(), max_prompt_length=LIMIT, **options)
    assert admitted == [PROBLEMS[0], PROBLEMS[2]]
    rule = f"longer than data.max_prompt_length = {LIMIT}"
    assert lines == [f"1 of 3 held-out prompts are left out: {rule}"]


TOO_LONG = f"^data.max_prompt_length: got {LIMIT}; 1 of 3 prompts are longer.*problem 1 has {LENGTHS[1]} tokens"


@pytest.mark.parametrize(
    ("problems", "limit", "overlong", "message"),
    [
        (PROBLEMS, LIMIT, "error", f'{TOO_LONG}.*data.overlong_prompts = "drop"'),
        (PROBLEMS, 1, "drop", "data.max_prompt_length: got 1; no prompt is that short"),
        ([Problem("", {})], 100, "drop", "prompt of problem 0: must have at least one token"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(problems, limit, overlong, message):
    with pytest.raises(ValueError, match=message):
        admit(problems, tokens(), max_prompt_length=limit, overlong=overlong)


def written(texts, problems, lengths=None):
    """Makes a rollout with given texts; row r holds the tokens 10 r, 10 r + 1, ..."""
    rows = range(len(texts))
    lengths = [4] * len(texts) if lengths is None else lengths
    return Rollout(
        problems=tuple(problems),
        prompt_ids=tuple(np.zeros(4, np.int32) for _ in problems),
        texts=tuple(texts),
        completion_ids=tuple(10 * row + np.arange(lengths[row], dtype=np.int32) for row in rows),
        behaviour_logps=tuple(np.zeros(lengths[row], np.float32) for row in rows),
        stopped=(True,) * len(texts),
    )


def arithmetic_rollout():
    first = ["<think>1+2</think><answer>3</answer>", "<answer>4</answer>"]
    return written([*first, "<answer>42</answer>", "forty-two"], PROBLEMS[:2])


STOCK = scoring.resolve(["accuracy_reward", "format_reward"])


@pytest.mark.parametrize(
    ("weights", "expected"), [(None, [[2, 0], [1, 0]]), ((2.0, 0.5), [[2.5, 0], [2, 0]])]
)
def test_rewards_are_added_up_by_their_weights(weights, expected):
    combined, per_function = rollouts.score(arithmetic_rollout(), STOCK, weights)
    assert per_function.tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]
    assert combined.tolist() == expected
    assert combined.dtype == per_function.dtype == np.float32


def test_weights_must_match_the_functions():
    for weights in ((1.0,), (1.0, 1.0, 1.0), ()):
        with pytest.raises(ValueError, match=rf"weights: got {len(weights)}; .* 2 functions"):
            rollouts.score(arithmetic_rollout(), STOCK, weights)


def test_functions_get_what_trl_would_give_them():
    seen = []

    def recorder(**arguments):
        seen.append(arguments)
        return [0.0] * 6

    texts = [f"text {row}" for row in range(6)]
    rollout = written(texts, PROBLEMS, lengths=[1, 4, 2, 3, 4, 1])
    record = scoring.Record(6)
    rollouts.score(rollout, scoring.resolve([recorder]), None, {"trainer_state": "state"}, record)

    (arguments,) = seen
    first, second = ([dict(message) for message in problem.prompt] for problem in PROBLEMS[:2])
    assert arguments["prompts"] == [first, first, second, second, "7*8=", "7*8="]
    chats = [[{"role": "assistant", "content": f"text {row}"}] for row in range(4)]
    assert arguments["completions"] == [*chats, "text 4", "text 5"]
    ids = [[0], [10, 11, 12, 13], [20, 21], [30, 31, 32], [40, 41, 42, 43], [50]]
    assert arguments["completion_ids"] == ids
    assert type(arguments["completion_ids"][1][0]) is int
    assert arguments["answer"] == ["3", "3", "42", "42", "56", "56"]
    assert arguments["level"] == [None, None, 2, 2, None, None]
    assert arguments["trainer_state"] == "state"
    assert arguments["log_extra"] == record.log_extra
    assert arguments["log_metric"] == record.log_metric
    columns = {"prompts", "completions", "completion_ids", "answer", "level"}
    assert set(arguments) == columns | {"trainer_state", "log_extra", "log_metric"}


def test_a_function_that_changes_its_prompts_changes_no_problem():
    def vandal(prompts, **_):
        prompts[0][0]["content"] = "changed"
        return [0.0] * len(prompts)

    rollouts.score(arithmetic_rollout(), scoring.resolve([vandal]), None)
    assert PROBLEMS[0].prompt[0]["content"] == "1+2="


def test_abstaining_functions_are_left_out_of_the_sum():
    def first_row_only(completions, **_):
        return [5.0, *[None] * (len(completions) - 1)]

    async def not_the_last(completions, **_):
        return [*[1.0] * (len(completions) - 1), None]

    functions = scoring.resolve([first_row_only, not_the_last])
    combined, each = rollouts.score(arithmetic_rollout(), functions, (1.0, 3.0))
    np.testing.assert_array_equal(each, [[5, 1], [np.nan, 1], [np.nan, 1], [np.nan, np.nan]])
    np.testing.assert_array_equal(combined, [[8, 3], [3, np.nan]])


def test_collected_rollouts_are_scored_by_their_tokens():
    rollout = collect(0)
    combined, each = rollouts.score(rollout, scoring.resolve(["token_hash_reward"]), None)
    assert combined.shape == (len(PROBLEMS), GROUP) and each.shape == (6, 1)
    np.testing.assert_array_equal(combined.reshape(-1), each[:, 0])
    rows = {tuple(ids.tolist()) for ids in rollout.completion_ids}
    assert len({*each[:, 0].tolist()}) == len(rows)


def test_rows_go_on_from_those_sampled_with_the_same_key():
    """The first two of three problems, then the third alone, give what the three give at once."""
    arguments = (*policy(), PROBLEMS[2:], jax.random.key(0))
    last = rollouts.collect(*arguments, first_row=4)
    assert last.texts == collect(0).texts[4:]
    ours, theirs = last.completion_ids, collect(0).completion_ids[4:]
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert rollouts.collect(*arguments).texts != last.texts


@pytest.mark.slow
def test_a_rollout_holds_the_samplers_entropies_where_they_are_asked_for():
    cfg = RolloutConfig(num_generations=GROUP, max_completion_length=LONGEST, ignore_eos=True)
    options = {"max_prompt_length": PROMPT_WIDTH, "entropies": True}
    sampler = rollouts.make_sampler(policy_model(), tokens(), cfg, **options)
    rollout = rollouts.collect(sampler, policy()[1], PROBLEMS, jax.random.key(0))
    assert collect(0).entropies is None
    assert len(rollout.entropies) == len(rollout.texts)
    each = np.array(rollout.entropies) / rollout.lengths
    assert (0 < each).all() and (each < np.log(tokens().num_tokens)).all()


PLACES = np.array([5, 2, 9])  # of the problems, in a run


def noisy(per):
    """Returns the policy under noise of groups, sequences or tokens that is strong enough to see."""
    drawn = row_noise(jax.random.key(4), 0.3, noise_shapes(ARCH), per)
    return policy()[0], policy()[1] | {"noise": drawn}


@functools.cache
def collect_noisy(per, max_concurrent=None):
    sampler, variables = noisy(per)
    sampler = dataclasses.replace(sampler, max_concurrent=max_concurrent)
    return rollouts.collect(sampler, variables, PROBLEMS, jax.random.key(0), groups=PLACES)


def trainers_logps(rollout, variables, numbers, share_prompts):
    """Computes the trainer's log-probabilities of each row's tokens in a rollout."""
    experience = make_experience(
        rollout, np.zeros((len(PROBLEMS), GROUP)), share_prompts=share_prompts, noise=numbers
    )
    scale = {"temperature": 1.0, "num_tokens": tokens().num_tokens}
    logps, _ = token_logps(policy_model(), variables, in_one_batch(experience), **scale)
    return np.split(logps[: rollout.lengths.sum()], np.cumsum(rollout.lengths)[:-1])


def distances(rollout, logps):
    """Returns the largest difference of each row's log-probabilities from the sampler's."""
    pairs = zip(logps, rollout.behaviour_logps, strict=True)
    return np.array([np.abs(ours - theirs).max() for ours, theirs in pairs])


@pytest.mark.slow
@pytest.mark.parametrize("per", ["group", "sequence"])
def test_the_trainer_draws_the_noise_under_which_rows_were_sampled(per):
    """It needs only (seed, step, number). A prompt is shared where its completions share their noise."""
    rollout, (_, variables) = collect_noisy(per), noisy(per)
    numbers, shares = variables["noise"].numbers(PLACES, GROUP), per == "group"
    assert (distances(rollout, trainers_logps(rollout, variables, numbers, shares)) < 1e-4).all()
    # Under the noise of other numbers, and under none, they are other ones.
    without = {k: v for k, v in variables.items() if k != "noise"}
    for other in ((variables, numbers + 1), (without, None)):
        assert distances(rollout, trainers_logps(rollout, *other, shares)).max() > 1e-2


@pytest.mark.slow
def test_rows_of_a_group_share_their_noise_and_sequences_do_not():
    rows = {}
    for per in ("group", "sequence"):
        rollout, (_, variables) = collect_noisy(per), noisy(per)
        everyone = np.repeat(variables["noise"].numbers(PLACES, GROUP)[:, :1], GROUP, axis=1)
        logps = trainers_logps(rollout, variables, everyone, share_prompts=False)
        rows[per] = (distances(rollout, logps) < 1e-4).tolist()
    assert rows == {"group": [True] * 6, "sequence": [True, False] * 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    "per", [*(pytest.param(per, marks=pytest.mark.slow) for per in ("group", "sequence")), "token"]
)
def test_noise_of_rows_does_not_depend_on_the_slot_or_the_neighbours(per):
    together, apart = collect_noisy(per), collect_noisy(per, max_concurrent=2)
    assert together.texts == apart.texts
    assert (distances(together, apart.behaviour_logps) < 1e-5).all()


@pytest.mark.slow
def test_noise_of_tokens_is_a_new_draw_for_every_forward_pass():
    """In the loop the prompt without its last token has one draw, and then each token has its own."""
    rollout, (_, variables) = collect_noisy("token"), noisy("token")
    numbers = variables["noise"].numbers(PLACES, GROUP)
    model, plain = policy_model(), {k: v for k, v in variables.items() if k != "noise"}

    @jax.jit
    def run(ids, cache, number, place):
        tree = variables["noise"].draw(number[None], place[None])
        hidden, cache = model.apply(plain | {"noise": tree}, ids, cache=cache)
        scores = layers.logits(hidden[:, -1], head(plain["frozen"]))
        return logprobs.log_softmax(scores, 1.0, tokens().num_tokens)[0], cache

    for row in range(3):
        ids, logps = rollout.completion_ids[row], rollout.behaviour_logps[row]
        prompt, first = rollout.prompt_ids[row // GROUP], numbers[row // GROUP, 0]
        cache = caches.create(ARCH, 1, PROMPT_WIDTH + LONGEST, jnp.float32)
        _, cache = run(prompt[None, :-1], cache, first, np.int32(0))
        sequence = [prompt[-1], *ids]
        for t in range(len(ids)):
            number = numbers[row // GROUP, row % GROUP]
            every, cache = run(np.array([[sequence[t]]]), cache, number, np.int32(t + 1))
            np.testing.assert_allclose(every[ids[t]], logps[t], atol=1e-4)


def test_rows_without_numbers_are_an_error_where_noise_is_theirs():
    sampler, variables = noisy("group")
    queue = [QueuedPrompt(np.ones(3, np.int32), np.zeros((2, 2), np.uint32), 4)]
    with pytest.raises(ValueError, match="prompt 0: rows have noise of their own; must have"):
        sampler.engine.stream(variables, queue, 1.0, max_prompt_length=8)


@pytest.mark.slow
def test_a_config_says_how_completions_are_sampled():
    """End tokens are ignored, and the rewarded text still has the stop string."""
    model, variables = policy_model(), policy()[1]

    def sample(**fields):
        cfg = RolloutConfig(num_generations=GROUP, max_completion_length=LONGEST, **fields)
        sampler = rollouts.make_sampler(model, tokens(), cfg, max_prompt_length=PROMPT_WIDTH)
        return rollouts.collect(sampler, variables, PROBLEMS, jax.random.key(0))

    free = sample(ignore_eos=True)
    assert (free.lengths == LONGEST).all() and not any(free.stopped)
    string = free.texts[1][2:4]
    cut = sample(ignore_eos=True, stop=(string,), max_concurrent=4)
    holds = [string in text for text in free.texts]
    assert holds[1] and list(cut.stopped) == holds
    for row, (text, ids) in enumerate(zip(cut.texts, cut.completion_ids, strict=True)):
        np.testing.assert_array_equal(ids, free.completion_ids[row][: len(ids)])
        assert (string in text) == holds[row]
        assert string not in tokens().decode(ids[:-1])
