"""Rollouts: what is sampled from problems, and how it is scored."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax import checkpoint, rewards, rollouts, sampling, tokenizer
from qerl_jax.architecture import Architecture
from qerl_jax.data import Problem
from qerl_jax.model import LoRA, Transformer, init_params, random_base
from qerl_jax.rollouts import Rollout

ARCH = Architecture("qwen2", 512, 32, 48, 2, 4, 2, 8)
GROUP, PROMPT_WIDTH, LONGEST = 2, 24, 6
# A random model would rarely sample the one real stop token.
STOPS = tuple(range(3, 103))


@functools.cache
def tokens():
    return tokenizer.load(checkpoint.TINY)


@functools.cache
def policy():
    model = Transformer(ARCH, "nvfp4", LoRA(2, 4.0), jnp.float32)
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
    admitted = rollouts.admit(PROBLEMS, tokens(), max_prompt_length=limit, overlong="drop")
    assert admitted == [PROBLEMS[0], PROBLEMS[2]]


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
    functions = rewards.resolve(["accuracy_reward", "format_reward"])
    combined, each = rollouts.score(arithmetic_rollout(), functions, None)
    assert each.tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]
    assert combined.tolist() == [[2, 0], [1, 0]]
    assert combined.dtype == each.dtype == np.float32


def test_weights_multiply_their_functions():
    functions = rewards.resolve(["accuracy_reward", "format_reward"])
    combined, each = rollouts.score(arithmetic_rollout(), functions, (2.0, 0.5))
    assert combined.tolist() == [[2.5, 0], [2, 0]]
    assert each.tolist() == [[1, 1], [0, 0], [1, 0], [0, 0]]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), ()])
def test_weights_must_match_the_functions(weights):
    functions = rewards.resolve(["accuracy_reward", "format_reward"])
    with pytest.raises(ValueError, match=rf"weights: got {len(weights)}; .* 2 functions"):
        rollouts.score(arithmetic_rollout(), functions, weights)


def test_functions_get_what_trl_would_give_them():
    seen = []

    def recorder(**arguments):
        seen.append(arguments)
        return [0.0] * 6

    texts = [f"text {row}" for row in range(6)]
    rollout = written(texts, PROBLEMS, lengths=[1, 4, 2, 3, 4, 1])
    rollouts.score(rollout, rewards.resolve([recorder]), None)

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
    assert set(arguments) == {"prompts", "completions", "completion_ids", "answer", "level"}


def test_a_function_that_changes_its_prompts_changes_no_problem():
    def vandal(prompts, **_):
        prompts[0][0]["content"] = "changed"
        return [0.0] * len(prompts)

    rollouts.score(arithmetic_rollout(), rewards.resolve([vandal]), None)
    assert PROBLEMS[0].prompt[0]["content"] == "1+2="


def test_abstaining_functions_are_left_out_of_the_sum():
    def first_row_only(completions, **_):
        return [5.0, *[None] * (len(completions) - 1)]

    async def not_the_last(completions, **_):
        return [*[1.0] * (len(completions) - 1), None]

    functions = rewards.resolve([first_row_only, not_the_last])
    combined, each = rollouts.score(arithmetic_rollout(), functions, (1.0, 3.0))
    np.testing.assert_array_equal(each, [[5, 1], [np.nan, 1], [np.nan, 1], [np.nan, np.nan]])
    assert combined.tolist() == [[8, 3], [3, 0]]


def test_a_function_that_raises_is_named():
    def broken(**_):
        raise KeyError("no such thing")

    with pytest.raises(rewards.RewardError, match="'broken' raised KeyError on 4 rows"):
        rollouts.score(arithmetic_rollout(), rewards.resolve([broken]), None)


def test_collected_rollouts_are_scored_by_their_tokens():
    rollout = collect(0)
    combined, each = rollouts.score(rollout, rewards.resolve(["token_hash_reward"]), None)
    assert combined.shape == (len(PROBLEMS), GROUP) and each.shape == (6, 1)
    np.testing.assert_array_equal(combined.reshape(-1), each[:, 0])
    rows = [row[:n].tolist() for row, n in zip(rollout.completions, rollout.lengths, strict=True)]
    assert len({*each[:, 0].tolist()}) == len({*map(tuple, rows)})
