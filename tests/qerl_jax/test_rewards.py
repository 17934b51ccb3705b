import asyncio
import subprocess
import sys

import numpy as np
import pytest

from qerl_jax import data, rewards


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("<answer>27</answer>", "27", 1),
        ("<answer> 27.0 </answer>", "27", 1),
        ("<answer>27.</answer>", "27", 1),
        ("<answer>27.5</answer>", "27", 0),
        ("<answer>$1,234.00</answer>", "1234", 1),
        (r"<answer>\$5</answer>", "5", 1),
        ("<answer>12,34</answer>", "1234", 0),
        ("<answer>1,2</answer>", "1,2", 1),
        ("<answer>025</answer>", "25", 1),
        ("<answer>-3</answer>", "-3", 1),
        ("<answer>−3</answer>", "-3", 1),
        ("<answer>3</answer>", "-3", 0),
        ("<answer>+3</answer>", "3", 1),
        ("<answer>.5</answer>", "0.50", 1),
        ("<answer>4</answer>", 4, 1),
        ("<answer>4</answer>", 4.0, 1),
        ("<answer>four</answer>", "four", 1),
        ("<answer>Four</answer>", "four", 0),
        ("<answer>东京 🙂</answer>", "东京 🙂", 1),
        ("<answer>4 eggs</answer>", "4", 0),
        ("<answer>1</answer> no: <answer>2</answer>", "2", 1),
        ("<answer>1</answer> no: <answer>2</answer>", "1", 0),
        ("<answer>2</answer><answer>", "2", 1),
        ("<answer><answer>2</answer></answer>", "2", 1),
        ("<answer>\n2\n</answer>", "2", 1),
        ("<answer></answer>", "", 1),
        ("<answer>2", "2", 0),
        ("2", "2", 0),
        ("", "2", 0),
        ("<answer>2</answer>", None, None),
    ],
)
def test_accuracy_compares_the_last_answer_by_value(completion, answer, reward):
    assert rewards.accuracy_reward([completion], [answer]) == [reward]
    chat = [{"role": "assistant", "content": completion}]
    assert rewards.accuracy_reward(completions=[chat], answer=[answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "strict", "soft", "think"),
    [
        ("<think>a</think><answer>b</answer>", 1, 0.2, 1),
        ("<think>a\n\nb</think>\n<answer>c\nd</answer>\n", 1, 0.2, 1),
        ("<think></think><answer></answer>", 1, 0.2, 1),
        (" <think>a</think><answer>b</answer>", 1, 0.2, 0),
        ("<think>a</think> so <answer>b</answer>", 0, 0, 1),
        ("<think>a</think><answer>b</answer> done", 0, 0.2, 1),
        ("Hm. <think>a</think><answer>b</answer>", 0, 0.2, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0, 0.2, 1),
        ("<think><think>a</think></think><answer>b</answer>", 0, 0.2, 0),
        ("<think>a</think><think>b</think><answer>c</answer>", 0, 0.2, 0),
        ("<think>a<answer>b</answer></think>", 0, 0, 1),
        ("<answer>b</answer><think>a</think>", 0, 0, 0),
        ("<think>a</think><answer>b", 0, 0, 1),
        ("<think></answer></think><answer>", 0, 0, 1),
        ("<think>a", 0, 0, 0),
        ("<THINK>a</THINK><ANSWER>b</ANSWER>", 0, 0, 0),
        ("", 0, 0, 0),
    ],
)
def test_format_rewards_tell_forms_apart(completion, strict, soft, think):
    assert rewards.format_reward([completion]) == [strict]
    assert rewards.soft_format_reward([completion]) == [soft]
    assert rewards.think_format_reward([completion]) == [think]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("<think>1+1</think><answer>2</answer>", "2", 1),
        ("<think>1+1</think><answer>3</answer>", "2", 0),
        ("<answer>2</answer>", "2", 0),
        ("<think>1+1</think><answer>2</answer>", None, None),
    ],
)
def test_correct_and_well_formed_needs_both(completion, answer, reward):
    assert rewards.correct_and_well_formed_reward([completion], [answer]) == [reward]


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so\n#### 1,234", "1234", 1),
        ("####5", "5", 1),
        ("#### $5.00.", "5", 1),
        ("#### -7", "-7", 1),
        ("#### 1\n#### 2", "2", 1),
        ("#### 2\n#### ?", "2", 1),
        ("### 2", "2", 0),
        ("2", "2", 0),
        ("", "2", 0),
    ],
)
def test_hash_reward_reads_the_last_hash_line(completion, answer, reward):
    assert rewards.gsm8k_hash_reward([completion], [answer]) == [reward]


def test_token_hash_depends_on_the_tokens_alone_and_varies():
    values = rewards.token_hash_reward([[1, 2], np.array([1, 2], np.int32), [2, 1], [1], []])
    assert values[0] == values[1] and len(set(values)) == 4
    many = rewards.token_hash_reward([[i] for i in range(4000)])
    assert 0 <= min(many) and max(many) < 1
    assert np.mean(many) == pytest.approx(0.5, abs=0.02)  # standard error .0046
    program = "from qerl_jax import rewards; print(rewards.token_hash_reward([[1, 2]])[0])"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert float(said) == values[0]


def test_repeated_tags_are_scored_in_linear_time():
    # 40,000 tags: quadratic patterns need minutes here, which the suite's time limit would show.
    hostile = "<think></think><answer>" * 10_000 + "#### ." * 1000
    for function in rewards.STOCK.values():
        assert function(completions=[hostile], answer=["1"], completion_ids=[[0]])


def length_reward(completions, **_):
    return [len(completion) for completion in completions]


def test_functions_are_found_by_name_path_file_and_as_they_are(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def own(completions, **_):\n    return [7.0] * len(completions)\n")
    resolved = rewards.resolve(["accuracy_reward", "math:sqrt", f"{file}:own", length_reward])
    assert [name for name, _ in resolved] == ["accuracy_reward", "sqrt", "own", "length_reward"]
    assert resolved[2][1](["x"]) == [7.0]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy_reward", "no reward function 'acuracy_reward'; there are .*'accuracy_reward'"),
        ("no_such_module:f", "could not import rewards from 'no_such_module': ModuleNotFoundError"),
        ("no_such_file.py:f", "could not import rewards from 'no_such_file.py': FileNotFoundError"),
        ("math:f", "math has no 'f'"),
        ("math:pi", "'math:pi' cannot be called: float"),
    ],
)
def test_functions_that_cannot_be_found_are_named(name, message):
    with pytest.raises(ValueError, match=message):
        rewards.resolve([name])


def test_two_functions_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"repeated: \['format_reward'\]"):
        rewards.resolve(["format_reward", "qerl_jax.rewards:format_reward"])


def evaluate(function, rows=2, **columns):
    return rewards.evaluate(
        [("f", function)], ["p"] * rows, ["c"] * rows, [[0]] * rows, columns, {"extra": 1}
    )


def test_functions_receive_columns_and_extras_and_may_abstain():
    def plain(prompts, completions, completion_ids, level, extra):
        return [level[0] + extra, None]

    async def slow(level, **_):
        await asyncio.sleep(0)
        return np.array(level) * 0.5

    scores = rewards.evaluate(
        [("slow", slow), ("plain", plain)],
        ["p", "q"],
        ["a", "b"],
        [[1], [2]],
        {"level": [3, 4]},
        {"extra": 10},
    )
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, np.float32([[1.5, 13], [2, np.nan]]))


def test_async_functions_run_inside_a_running_loop():
    async def slow(completions, **_):
        return [True for _ in completions]

    async def notebook():
        return evaluate(slow)

    assert asyncio.run(notebook()).tolist() == [[1.0], [1.0]]


class AsyncCallable:
    async def __call__(self, completions, **_):
        return [2] * len(completions)


def test_objects_with_an_async_call_are_awaited():
    assert evaluate(AsyncCallable()).tolist() == [[2.0], [2.0]]


async def raises_late(**_):
    raise KeyError("late")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda **_: 1 / 0, r"'f' raised ZeroDivisionError on 2 rows with the columns \['level'\]"),
        (raises_late, "'f' raised KeyError on 2 rows"),
        (lambda completions, answer, **_: [], "raised TypeError on 2 rows.*'answer'"),
        (lambda **_: [1.0], "'f' returned 1 values for 2 rows"),
        (lambda **_: 1.0, "'f' must return a list of 2 values; got float"),
        (lambda **_: "10", "'f' must return a list of 2 values; got str"),
        (lambda **_: [1, "1"], "'f' returned '1' for row 1"),
        (lambda **_: [[1], 1], r"'f' returned \[1\] for row 0"),
        (lambda **_: [1, float("nan")], "'f' returned nan for row 1"),
        (lambda **_: [float("inf"), 1], "'f' returned inf for row 0"),
    ],
)
def test_faulty_functions_are_named(function, message):
    with pytest.raises(rewards.RewardError, match=message):
        evaluate(function, level=[1, 2])


def test_columns_must_not_take_an_arguments_name():
    with pytest.raises(ValueError, match=r"\['prompts', 'extra'\]"):
        evaluate(lambda **_: [0, 0], prompts=["a", "b"], extra=[1, 2])


def test_check_finds_a_missing_column_before_training():
    problems = data.load("arithmetic", num_problems=2)
    rewards.check(rewards.resolve(list(rewards.STOCK)), problems[:2])
    needs_level = [("needs_level", lambda level, **_: level)]
    with pytest.raises(rewards.RewardError, match=r"'needs_level' raised TypeError.*\['answer'\]"):
        rewards.check(needs_level, problems[:2])


def test_completions_take_the_form_of_their_prompts():
    assert rewards.as_completion("1+1=", "2") == "2"
    chat = rewards.as_completion([{"role": "user", "content": "1+1="}], "2")
    assert chat == [{"role": "assistant", "content": "2"}]
    assert rewards.completion_text(chat) == "2"
