"""Rollouts: what is sampled from problems, and how it is scored."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.checkpoint import hf_folder
from qerl_jax.config import LoraConfig, RolloutConfig
from qerl_jax.data import tokenizer
from qerl_jax.data.datasets import Problem
from qerl_jax.generation import batch as sampling
from qerl_jax.model.architecture import Architecture
from qerl_jax.model.transformer import Transformer, init_params, random_base
from qerl_jax.rewards import scoring
from qerl_jax.rl import rollouts
from qerl_jax.rl.rollouts import Rollout, Scored, Supply

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
    generate = sampling.make_generate(
        model,
        num_generations=GROUP,
        max_completion_length=LONGEST,
        num_tokens=tokens().num_tokens,
        stop_tokens=STOPS,
        pad_token=tokens().pad_token,
    )
    params = init_params(model, frozen, jax.random.key(1))
    return generate, {"params": params, "frozen": frozen}


def chat(text):
    return ({"role": "user", "content": text},)


PROBLEMS = [
    Problem(chat("1+2="), {"answer": "3"}),
    Problem(chat("12 + 30 = ?"), {"answer": "42", "level": 2}),
    Problem("7*8=", {"answer": "56"}),
]


@functools.cache
def collect(seed):
    generate, variables = policy()
    return rollouts.collect(
        generate,
        variables,
        tokens(),
        PROBLEMS,
        jax.random.key(seed),
        num_generations=GROUP,
        max_prompt_length=PROMPT_WIDTH,
        temperature=1.0,
    )


def test_rows_are_prompt_and_completion_without_a_gap_in_the_order_of_the_problems():
    rollout = collect(0)
    prompts = tokens().encode([problem.prompt for problem in PROBLEMS])
    assert len({len(prompt) for prompt in prompts}) == 3
    assert rollout.problems == tuple(PROBLEMS)
    assert rollout.num_generations == GROUP
    assert rollout.tokens.shape == (6, PROMPT_WIDTH + LONGEST)
    assert rollout.tokens.dtype == rollout.completions.dtype == np.int32
    for row in range(6):
        prompt, length = prompts[row // GROUP], rollout.lengths[row]
        completion = rollout.completions[row, :length].tolist()
        rest = rollout.tokens.shape[1] - len(prompt) - length
        assert rollout.prompt_lengths[row] == len(prompt)
        expected = [*prompt, *completion, *[tokens().pad_token] * rest]
        assert rollout.tokens[row].tolist() == expected


def test_rows_end_with_their_stop_token_and_nothing_else_stops():
    rollout = collect(0)
    assert rollout.stopped.any() and not rollout.stopped.all()
    for completion, logps, length, stopped in zip(
        rollout.completions, rollout.logps, rollout.lengths, rollout.stopped, strict=True
    ):
        assert np.isin(completion[:length], STOPS).tolist() == [False] * (length - 1) + [stopped]
        assert stopped or length == LONGEST
        assert (logps[:length] < 0).all() and (logps[length:] == 0).all()


def test_texts_are_the_completions_up_to_their_ends():
    rollout = collect(0)
    expected = [
        tokens().decode(row[:length].tolist())
        for row, length in zip(rollout.completions, rollout.lengths, strict=True)
    ]
    assert list(rollout.texts) == expected
    assert all(isinstance(text, str) for text in rollout.texts)
    assert any(rollout.texts)


def test_a_rollout_is_a_function_of_its_key():
    again = collect.__wrapped__(0)
    for name in ("tokens", "completions", "logps", "lengths", "stopped"):
        np.testing.assert_array_equal(getattr(again, name), getattr(collect(0), name))
    assert again.texts == collect(0).texts
    assert collect(1).texts != collect(0).texts


def test_completions_of_one_prompt_differ():
    groups = collect(0).completions.reshape(len(PROBLEMS), GROUP, -1)
    assert any((group[0] != group[1]).any() for group in groups)


def lengths_of_prompts():
    return [len(ids) for ids in tokens().encode([problem.prompt for problem in PROBLEMS])]


def test_problems_whose_prompts_fit_are_admitted_as_they_are():
    longest = max(lengths_of_prompts())
    for overlong in ("error", "drop"):
        admitted = rollouts.admit(PROBLEMS, tokens(), max_prompt_length=longest, overlong=overlong)
        assert admitted is PROBLEMS


def test_an_overlong_prompt_is_an_error_that_counts_and_names_them():
    lengths = lengths_of_prompts()
    assert lengths[1] == max(lengths)
    limit = lengths[1] - 1
    with pytest.raises(ValueError) as error:
        rollouts.admit(PROBLEMS, tokens(), max_prompt_length=limit, overlong="error")
    message = str(error.value)
    assert message.startswith(f"data.max_prompt_length: got {limit}; 1 of 3 prompts are longer")
    assert f"problem 1 has {lengths[1]} tokens" in message
    assert 'data.overlong_prompts = "drop"' in message


def test_overlong_prompts_are_dropped_on_request():
    limit = max(lengths_of_prompts()) - 1
    said = []
    options = {"overlong": "drop", "what": "held-out prompts", "say": said.append}
    admitted = rollouts.admit(PROBLEMS, tokens(), max_prompt_length=limit, **options)
    assert admitted == [PROBLEMS[0], PROBLEMS[2]]
    assert said == [
        f"1 of 3 held-out prompts are left out: longer than data.max_prompt_length = {limit}"
    ]


def test_to_drop_every_prompt_is_an_error():
    with pytest.raises(ValueError, match="data.max_prompt_length: got 1; no prompt is that short"):
        rollouts.admit(PROBLEMS, tokens(), max_prompt_length=1, overlong="drop")


def test_a_prompt_without_tokens_is_an_error_that_names_it():
    problems = [*PROBLEMS, Problem("", {})]
    with pytest.raises(ValueError, match="prompt of problem 3: must have at least one token"):
        rollouts.admit(problems, tokens(), max_prompt_length=100, overlong="drop")


def written(texts, problems, lengths=None):
    """A rollout with given texts; row r holds the tokens 10 r, 10 r + 1, ..."""
    rows = len(texts)
    completions = (10 * np.arange(rows)[:, None] + np.arange(4)).astype(np.int32)
    return Rollout(
        problems=tuple(problems),
        texts=tuple(texts),
        tokens=np.zeros((rows, 8), np.int32),
        prompt_lengths=np.full(rows, 4, np.int32),
        completions=completions,
        logps=np.zeros((rows, 4), np.float32),
        lengths=np.array([4] * rows if lengths is None else lengths, np.int32),
        stopped=np.ones(rows, bool),
    )


def arithmetic_rollout():
    texts = [
        "<think>1+2</think><answer>3</answer>",
        "<answer>4</answer>",
        "<answer>42</answer>",
        "forty-two",
    ]
    return written(texts, PROBLEMS[:2])


def test_stock_rewards_are_added_up_per_prompt():
    functions = scoring.resolve(["accuracy_reward", "format_reward"])
    combined, each = rollouts.score(arithmetic_rollout(), functions, None)
    assert each.tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]
    assert combined.tolist() == [[2, 0], [1, 0]]
    assert combined.dtype == each.dtype == np.float32


def test_weights_multiply_their_functions():
    functions = scoring.resolve(["accuracy_reward", "format_reward"])
    combined, each = rollouts.score(arithmetic_rollout(), functions, (2.0, 0.5))
    assert combined.tolist() == [[2.5, 0], [2, 0]]
    assert each.tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), ()])
def test_weights_must_match_the_functions(weights):
    functions = scoring.resolve(["accuracy_reward", "format_reward"])
    with pytest.raises(ValueError, match=rf"weights: got {len(weights)}; .* 2 functions"):
        rollouts.score(arithmetic_rollout(), functions, weights)


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
    assert arguments["completions"] == [
        [{"role": "assistant", "content": "text 0"}],
        [{"role": "assistant", "content": "text 1"}],
        [{"role": "assistant", "content": "text 2"}],
        [{"role": "assistant", "content": "text 3"}],
        "text 4",
        "text 5",
    ]
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
    assert combined.tolist() == [[8, 3], [3, 0]]


def test_a_function_that_raises_is_named():
    def broken(**_):
        raise KeyError("no such thing")

    with pytest.raises(scoring.RewardError, match="'broken' raised KeyError on 4 rows"):
        rollouts.score(arithmetic_rollout(), scoring.resolve([broken]), None)


def test_collected_rollouts_are_scored_by_their_tokens():
    rollout = collect(0)
    combined, each = rollouts.score(rollout, scoring.resolve(["token_hash_reward"]), None)
    assert combined.shape == (len(PROBLEMS), GROUP) and each.shape == (6, 1)
    np.testing.assert_array_equal(combined.reshape(-1), each[:, 0])
    rows = [row[:n].tolist() for row, n in zip(rollout.completions, rollout.lengths, strict=True)]
    assert len({*each[:, 0].tolist()}) == len({*map(tuple, rows)})


def test_rows_go_on_from_those_sampled_with_the_same_key():
    """The first two of three problems, then the third alone, are the three at once."""
    generate, variables = policy()
    options = {"num_generations": GROUP, "max_prompt_length": PROMPT_WIDTH, "temperature": 1.0}
    arguments = (generate, variables, tokens(), PROBLEMS[2:], jax.random.key(0))
    last = rollouts.collect(*arguments, **options, first_row=4)
    assert last.texts == collect(0).texts[4:]
    np.testing.assert_array_equal(last.completions, collect(0).completions[4:])
    assert rollouts.collect(*arguments, **options).texts != last.texts


def test_a_config_says_how_completions_are_sampled():
    """Ignored end tokens, and a stop string, which the text that is rewarded still holds."""
    model, variables = policy_model(), policy()[1]
    options = {"num_generations": GROUP, "max_prompt_length": PROMPT_WIDTH, "temperature": 1.0}

    def sample(**fields):
        cfg = RolloutConfig(num_generations=8, max_completion_length=LONGEST, **fields)
        generate = rollouts.make_generate(model, tokens(), cfg, num_generations=GROUP)
        return rollouts.collect(
            generate, variables, tokens(), PROBLEMS, jax.random.key(0), **options
        )

    free = sample(ignore_eos=True)
    assert (free.lengths == LONGEST).all() and not free.stopped.any()
    string = free.texts[1][2:4]
    cut = sample(ignore_eos=True, stop=(string,), max_concurrent=4)
    holds = [string in text for text in free.texts]
    assert holds[1] and cut.stopped.tolist() == holds
    for row, (text, length) in enumerate(zip(cut.texts, cut.lengths, strict=True)):
        np.testing.assert_array_equal(cut.completions[row, :length], free.completions[row, :length])
        assert (string in text) == holds[row]
        assert string not in tokens().decode(cut.completions[row, : length - 1])


# --- dynamic sampling


def scripted(*informative):
    """sample() of rounds of two groups, True for those whose completions differ in reward."""

    def sample(drawn, index):
        places = [drawn, drawn + 1]
        texts = [f"{place}{row}" for place in places for row in "ab"]
        each = [[1.0, 0.0] if informative[index][i] else [0.5, 0.5] for i in range(2)]
        rewards_ = np.array(each, np.float32)
        problems = [Problem(str(place), {}) for place in places]
        return Scored(
            written(texts, problems), np.array(places, np.int32), rewards_, rewards_.reshape(4, 1)
        )

    return sample


def places(scored):
    """Positions, having checked that everything else moved along with them."""
    if scored is None:
        return []
    found = scored.positions.tolist()
    assert scored.rollout.texts == tuple(f"{place}{row}" for place in found for row in "ab")
    assert [problem.prompt for problem in scored.rollout.problems] == [str(p) for p in found]
    assert scored.rewards.shape == (len(found), 2)
    np.testing.assert_array_equal(scored.rewards.reshape(-1, 1), scored.per_function)
    assert scored.rollout.tokens.shape == (2 * len(found), 8)
    return found


YES, NO = True, False


@pytest.mark.parametrize(
    ("rounds", "max_rounds", "batch", "surplus", "used", "discarded", "filled"),
    [
        ([(YES, YES)], 9, [0, 1], [], 1, 0, 0),
        ([(YES, NO), (NO, YES)], 9, [0, 3], [], 2, 2, 0),
        ([(NO, YES), (YES, YES)], 9, [1, 2], [3], 2, 1, 0),
        # At the cap what is missing is filled up from the front.
        ([(NO, NO), (NO, YES)], 2, [3, 0], [], 2, 2, 1),
        ([(NO, NO)], 1, [0, 1], [], 1, 0, 2),
    ],
)
def test_groups_of_equal_rewards_are_replaced_until_the_cap(
    rounds, max_rounds, batch, surplus, used, discarded, filled
):
    got, fresh, supply, metrics = rollouts.gather(
        scripted(*rounds), Supply(), max_rounds=max_rounds
    )
    assert places(got) == batch
    assert places(fresh) == list(range(2 * used))
    assert (supply.drawn, places(supply.surplus)) == (2 * used, surplus)
    assert metrics == {
        "dynamic_sampling/rounds": used,
        "dynamic_sampling/groups_discarded": discarded,
        "dynamic_sampling/groups_filled": filled,
        "dynamic_sampling/groups_carried_over": len(surplus),
    }


def test_what_was_left_over_comes_first_in_the_next_rollout():
    _, _, supply, _ = rollouts.gather(scripted((NO, YES), (YES, YES)), Supply(), max_rounds=9)
    batch, fresh, supply, metrics = rollouts.gather(scripted((NO, YES)), supply, max_rounds=9)
    assert (places(batch), places(fresh)) == ([3, 5], [4, 5])
    assert (supply.drawn, supply.surplus) == (6, None)
    assert metrics["dynamic_sampling/groups_discarded"] == 1


def test_without_dynamic_sampling_a_round_is_taken_as_it_comes():
    batch, fresh, supply, metrics = rollouts.gather(scripted((NO, NO)), Supply(4), max_rounds=None)
    assert batch is fresh and places(batch) == [4, 5]
    assert (supply, metrics) == (Supply(6), {})


def test_a_supply_survives_being_written_as_json_bit_for_bit():
    rng = np.random.default_rng(0)
    per_function = rng.normal(size=(6, 2)).astype(np.float32)
    per_function[1, 0] = np.nan
    combined = rng.normal(size=(3, GROUP)).astype(np.float32)
    scored = Scored(collect(0), np.array([7, 4, 9], np.int32), combined, per_function)
    supply = Supply(12, scored.groups([2, 0]))

    restored = Supply.from_table(
        json.loads(json.dumps(supply.to_table())),
        {7: PROBLEMS[0], 4: PROBLEMS[1], 9: PROBLEMS[2]}.__getitem__,
        tokens(),
        max_prompt_length=PROMPT_WIDTH,
        max_completion_length=LONGEST,
    )
    assert restored.drawn == 12
    ours, theirs = restored.surplus, supply.surplus
    for name in ("positions", "rewards", "per_function"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
        assert getattr(ours, name).dtype == getattr(theirs, name).dtype
    for field in dataclasses.fields(Rollout):
        a, b = (getattr(scored.rollout, field.name) for scored in (ours, theirs))
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b, field.name
        assert type(a) is type(b)


def test_a_supply_without_a_surplus_is_its_place_in_the_data():
    widths = {"max_prompt_length": PROMPT_WIDTH, "max_completion_length": LONGEST}
    assert Supply(3).to_table() == {"drawn": 3}
    assert Supply.from_table({"drawn": 3}, PROBLEMS.__getitem__, tokens(), **widths) == Supply(3)
