"""Tests the stock rewards one by one, with tables that can be checked by hand."""

import decimal
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qerl_jax.rewards import sandbox, stock
from qerl_jax.rewards.stock import FACTORIES, STOCK
from qerl_jax.system.process_pool import Failure
from tests.tables import spread


def score(name, completion, answer):
    """Returns a function's value for one row, which is the same for a text and for a chat."""
    (value,) = STOCK[name](completions=[completion], answer=[answer])
    chat = [{"role": "assistant", "content": completion}]
    assert STOCK[name](completions=[chat], answer=[answer]) == [value]
    return value


# By names of rewards: (answer, a value for each name, completions).
CORRECT = {
    # The last answer is compared by value.
    ("accuracy_reward",): [
        ("27", 1, ["<answer>27</answer>", "<answer> 27.0 </answer>", "<answer>27.</answer>"]),
        ("27", 0, ["<answer>27.5</answer>"]),
        ("1234", 1, ["<answer>$1,234.00</answer>"]),
        ("5", 1, [r"<answer>\$5</answer>"]),
        ("1234", 0, ["<answer>12,34</answer>"]),
        ("1,2", 1, ["<answer>1,2</answer>"]),
        ("25", 1, ["<answer>025</answer>"]),
        ("-3", 1, ["<answer>-3</answer>", "<answer>−3</answer>"]),
        ("-3", 0, ["<answer>3</answer>"]),
        ("3", 1, ["<answer>+3</answer>"]),
        ("0.50", 1, ["<answer>.5</answer>"]),
        (4, 1, ["<answer>4</answer>"]),
        (4.0, 1, ["<answer>4</answer>"]),
        ("four", 1, ["<answer>four</answer>"]),
        ("four", 0, ["<answer>Four</answer>"]),
        ("东京 🙂", 1, ["<answer>东京 🙂</answer>"]),
        ("4", 0, ["<answer>4 eggs</answer>"]),
        ("2", 1, ["<answer>1</answer> no: <answer>2</answer>", "<answer>2</answer><answer>"]),
        ("2", 1, ["<answer><answer>2</answer></answer>", "<answer>\n2\n</answer>"]),
        ("1", 0, ["<answer>1</answer> no: <answer>2</answer>"]),
        ("20", 1, ["<answer>€20</answer>", "<answer>２０</answer>"]),
        ("", None, ["<answer></answer>"]),
        (" \n", None, ["<answer> </answer>"]),
        (float("nan"), None, ["<answer>nan</answer>"]),
        ("2", 0, ["<answer>2", "2", ""]),
        (None, None, ["<answer>2</answer>"]),
    ],
    # The first reads what follows ####, the other the last number.
    ("gsm8k_hash_reward", "gsm8k_flexible_reward"): [
        ("1234", 1, 1, ["so\n#### 1,234"]),
        ("5", 1, 1, ["####5", "#### $5.00."]),
        ("-7", 1, 1, ["#### -7"]),
        ("2", 1, 1, ["#### 1\n#### 2", "#### 2\n#### ?"]),
        ("2", 1, 0, ["#### 2 of 3"]),
        ("2", 0, 1, ["### 2", "She has 2 eggs.", "2"]),
        ("2", 0, 0, ["She has 2 eggs out of 12", ""]),
        (None, None, None, ["#### 2"]),
        ("3", 0, 0, ["#### 3/4", "#### 3 / 4", "#### 3, 4", "#### 3-4", "#### 3 or 4"]),
        ("3", 0, 0, ["#### 3\\frac12", r"#### 3\cdot 5", "#### 3e5", "#### 3 000"]),
        ("7", 0, 0, ["#### 7:30", "#### 7 x 2", "#### 7h30", "#### 7 hours 30 minutes"]),
        ("7", 0, 1, ["#### 7 million", "#### 7k", "#### 7!"]),
        ("7", 1, 0, ["#### 7 cm2"]),
        ("7", 1, 1, ['#### "7"', "#### <7>", "#### US$7", "#### USD 7", "#### Rs. 7"]),
        ("2", 0, 0, ["#### 2^3", "#### 2^{10}", "#### $2^3$", "#### 2\n#### 2^3"]),
        ("2", 0, 0, ["#### **2**^3"]),
        ("72", 1, 1, ["#### **72**", "#### `72`", "#### $72$", "#### 72%", r"#### $\boxed{72}$"]),
        ("72", 1, 1, ["#### 72.", "#### 72 - as wanted", "#### 72km", r"#### 72^\circ"]),
        ("72", 1, 1, ["####\n72"]),
        ("20", 1, 1, ["#### €20", "#### £20.00", r"#### \$20", "#### 20€", "#### ２０"]),
        ("-5", 1, 1, ["#### −5", "#### $-5", "#### **-5**"]),
        ("-5", 1, 1, ["#### -$5", "#### -€5.00"]),
        ("3", 0, 1, ["#### 3½"]),
    ],
    # The last box is compared as text or number.
    ("boxed_reward",): [
        ("5", 1, [r"\boxed{5}", r"\boxed{5.0}", r"\boxed{4} then \boxed{5}"]),
        ("5", 1, [r"\boxed{x = 5 \text{ cm}}"]),
        ("5", 0, [r"\boxed{5} then \boxed{4}", r"\boxed{5", "5"]),
        (r"\frac{1}{2}", 1, [r"\boxed{\frac12}"]),
        (r"\frac{1}{2}", 0, [r"\boxed{0.5}"]),
        (r"\frac{4}{7}", 1, [r"\boxed {\frac{4}{7}}"]),
        ("1234", 1, [r"\boxed{1,234}"]),
        ("12", 0, [r"\boxed{1,2}"]),
        ("1,2", 0, [r"\boxed{12}"]),
        ("1,2", 1, [r"\boxed{1, 2}"]),
        (None, None, [r"\boxed{5}"]),
    ],
    # Both read only the end of the text.
    ("dapo_reward", "dapo_boxed_reward"): [
        ("34", 1, 0, ["Answer: 34", "answer : 34", "Answer: $34$", "Answer: x = 34"]),
        ("34", 1, 0, ["Answer: 34 cm", "Answer: 33\nAnswer: 34", "Answer: 34\n" + 289 * "."]),
        ("1234", 1, 0, ["Answer: 1,234"]),
        (r"\frac{1}{2}", 1, 0, [r"Answer: $\frac12$"]),
        ("34", 1, 1, [r"Answer: \boxed{34}"]),
        ("34", 0, 0, ["Answer: 34.0", "Answer: 34\nAnswer: 33", "Answer: 34 because", "34"]),
        ("34", 0, 0, [r"\boxed{ 34}", r"\boxed{34}" + 91 * " ", "Answer: 34\n" + 290 * "."]),
        ("", None, None, [""]),
        ("34", 0, 1, [r"\boxed{34}", r"\boxed{34}" + 90 * " "]),
        (34, 1, 0, ["Answer: 34"]),
        (None, None, None, ["Answer: 34"]),
    ],
    # The tagged answer is compared to the letter.
    ("xml_answer_reward", "int_reward"): [
        ("72", 2, 0.2, ["<answer>72</answer>", "<answer>\n72\n</answer>\n"]),
        ("72", 2, 0.2, ["<answer>1</answer><answer>72</answer>", "72"]),
        ("72", 0, 0, ["<answer>72.0</answer>", "It is 72", "<answer></answer>", ""]),
        ("-72", 2, 0, ["<answer>-72</answer>"]),
    ],
}


@pytest.mark.parametrize("names", CORRECT, ids=" and ".join)
def test_correctness_is_judged_as_the_table_says(names):
    for answer, *values, completion in spread(CORRECT[names]):
        scores = [score(name, completion, answer) for name in names]
        assert scores == values, (answer, completion)


RIGHT_OF_18 = {
    "dapo_reward": "Answer: 18",
    "dapo_boxed_reward": r"\boxed{18}",
    "verl_gsm8k_reward": "#### 18",
    "verl_gsm8k_flexible_reward": "#### 18",
    "verl_math_reward": r"\boxed{18}",
    "xml_answer_reward": "<answer>18</answer>",
    "accuracy_reward": "<answer>18</answer>",
    "math_verify_reward": r"\boxed{18}",
}


@pytest.mark.parametrize("gold", [18, 18.0, np.float32(18), np.int8(18), decimal.Decimal("18.00")])
def test_a_whole_number_is_an_answer_in_whatever_type(gold):
    for name, text in RIGHT_OF_18.items():
        assert score(name, text, gold) == (2 if name == "xml_answer_reward" else 1), name


FORMS = ("format_reward", "soft_format_reward", "think_reward", "think_format_reward")
LINES = "<think>\nwhy\n</think>\n<answer>\n5\n</answer>\n"
# By names of rewards: (a value for each name, completions).
WELL_FORMED = {
    FORMS: [
        (1, 0.2, 0.2, 1, ["<think>a</think><answer>b</answer>"]),
        (1, 0.2, 0.2, 1, ["<think>a\n\nb</think>\n<answer>c\nd</answer>\n"]),
        (1, 0.2, 0.2, 1, ["<think></think><answer></answer>"]),
        (1, 0.2, 0.2, 0, [" <think>a</think><answer>b</answer>"]),
        (0, 0, 0.2, 1, ["<think>a</think> so <answer>b</answer>"]),
        (0, 0, 0.2, 1, ["<think>a<answer>b</answer></think>", "<think>a</think><answer>b"]),
        (0, 0, 0.2, 1, ["<think></answer></think><answer>"]),
        (0, 0.2, 0.2, 1, ["<think>a</think><answer>b</answer> done"]),
        (0, 0.2, 0.2, 1, ["<think>a</think><answer>b</answer><answer>c</answer>"]),
        (0, 0.2, 0.2, 0, ["Hm. <think>a</think><answer>b</answer>"]),
        (0, 0.2, 0.2, 0, ["<think><think>a</think></think><answer>b</answer>"]),
        (0, 0.2, 0.2, 0, ["<think>a</think><think>b</think><answer>c</answer>"]),
        (0, 0, 0.2, 0, ["<answer>b</answer><think>a</think>"]),
        (0, 0, 0, 0, ["</think><think>", "<think>a", "<THINK>a</THINK><ANSWER>b</ANSWER>"]),
        (0, 0, 0, 0, [""]),
    ],
    ("strict_format_reward", "xmlcount_reward"): [
        (0.2, 0.5, [LINES]),
        (0, 0.5, [LINES.rstrip(), LINES.replace("why", "why\nso"), "Hm. " + LINES]),
        (0, pytest.approx(0.5 - 0.004, abs=1e-12), [LINES + "done"]),
        (0, 0.25, [LINES.replace("\n5\n", "5"), "<think>\nwhy\n</think>\n"]),
        (0, pytest.approx(0, abs=1e-12), [LINES + LINES]),
        (0, 0, ["5", ""]),
    ],
}


@pytest.mark.parametrize("names", WELL_FORMED, ids=" and ".join)
def test_forms_are_told_apart_as_the_table_says(names):
    for *values, completion in spread(WELL_FORMED[names]):
        assert [STOCK[name]([completion])[0] for name in names] == values, completion


def test_correct_and_well_formed_needs_both():
    texts = [f"<think>1+1</think><answer>{number}</answer>" for number in (2, 3, 2)]
    rewards = STOCK["correct_and_well_formed_reward"](
        completions=[*texts, "<answer>2</answer>"], answer=["2", "2", None, "2"]
    )
    assert rewards == [1, 0, None, 0]


def test_token_hash_depends_on_the_tokens_alone_and_varies():
    function = stock.token_hash_reward
    values = function([[1, 2], np.array([1, 2], np.int32), [2, 1], [1], []])
    assert values[0] == values[1] and len(set(values)) == 4
    many = function([[i] for i in range(4000)])
    assert 0 <= min(many) and max(many) < 1
    assert np.mean(many) == pytest.approx(0.5, abs=0.02)  # standard error .0046
    program = "from qerl_jax.rewards.stock import STOCK; "
    program += "print(STOCK['token_hash_reward']([[1, 2]])[0])"
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert float(said) == values[0]


isolated = pytest.mark.skipif(sandbox.unavailable() is not None, reason=str(sandbox.unavailable()))
ELSEWHERE = {"code_reward", "math_verify_reward", "reasoning_accuracy_reward"}  # in processes


@pytest.mark.timeout(120)
def test_repeated_tags_are_scored_in_linear_time():
    # 40,000 tags: quadratic patterns need minutes here.
    hostile = "<think></think><answer>" * 10_000 + "#### ." * 1000
    hostile += "Answer:" * 1000 + r"\boxed{" * 1000 + "\n1,111" * 1000 + "```python" * 1000
    for name in STOCK.keys() - ELSEWHERE:
        assert STOCK[name](completions=[hostile], answer=["1"], completion_ids=[[0]])


@pytest.mark.parametrize(
    ("ids", "size", "reward"),
    [
        ([1, 2, 3, 4], 2, 0),
        ([5, 5, 5, 5, 5], 2, -0.75),  # 1 of 4 pairs is unique
        ([1, 2, 1, 2, 1], 2, -0.5),
        ([1, 2, 3, 1, 2, 3], 3, -0.25),
        ([1, 1], 3, 0),
        ([], 3, 0),
        ([7], 1, 0),
    ],
)
def test_repetition_is_punished_by_the_share_of_repeated_ngrams(ids, size, reward):
    function = FACTORIES["get_repetition_penalty_reward"](ngram_size=size)
    assert function(completion_ids=[ids, np.array(ids, np.int32)]) == [reward, reward]
    double = FACTORIES["get_repetition_penalty_reward"](ngram_size=size, max_penalty=-2.0)
    assert double(completion_ids=[ids]) == [2 * reward]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("get_repetition_penalty_reward", {"ngram_size": 0}, "ngram_size: got 0"),
        ("get_repetition_penalty_reward", {"max_penalty": 0.5}, "max_penalty: got 0.5"),
        ("get_cosine_scaled_reward", {"max_len": 0}, "max_len: got 0"),
        ("get_math_verify_reward", {"seconds": 0.0}, "workers and seconds: .* must be positive"),
        ("get_math_verify_reward", {"workers": 0}, "workers and seconds: .* must be positive"),
        ("get_code_reward", {"seconds": 0}, "seconds must be positive"),
        ("get_code_reward", {"memory_mb": 1}, "memory_mb at least 64"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        FACTORIES[name](**options)


@pytest.mark.process
def test_math_verify_abstains_without_a_gold_answer_and_never_on_a_completion():
    metrics = {}
    rewards = FACTORIES["get_math_verify_reward"](workers=1)(
        completions=[r"\boxed{0.5}", r"\boxed{2}", r"\boxed{2}", "\\boxed{", r"\boxed{2}"],
        answer=["1/2", "1/2", None, "2", ""],
        log_metric=metrics.__setitem__,
    )
    assert rewards == [1, 0, None, 0, None]
    assert metrics == {
        "rewards/math_verify_reward/timeouts": 0,
        "rewards/math_verify_reward/failures": 0,
    }


@pytest.mark.slow
@pytest.mark.process
def test_math_verify_counts_a_hang_as_a_wrong_answer_and_reports_it():
    metrics = {}
    rewards = FACTORIES["get_math_verify_reward"](seconds=6.0, workers=1)(
        completions=[r"\boxed{9^{9^{9^{9}}}}", r"\boxed{2}"],
        answer=["2", "2"],
        log_metric=metrics.__setitem__,
    )
    assert rewards == [0, 1]
    assert metrics["rewards/math_verify_reward/timeouts"] == 1


@pytest.mark.parametrize("name", ["get_math_verify_reward", "get_reasoning_accuracy_reward"])
def test_a_judgement_takes_at_most_5_seconds_by_default(name, monkeypatch):
    limits = []
    monkeypatch.setattr(stock, "_math_judges", lambda workers, seconds: limits.append(seconds))
    FACTORIES[name]()
    assert limits == [5.0]


class Judges:
    """Stands in for the worker processes: it answers from a table, by gold answer."""

    readable = {"gold hangs": Failure("timeout"), "gold crashes": Failure("died")}
    agrees = {"hangs": Failure("timeout"), "raises": Failure("raised", "TypeError: ?")}

    def map(self, function, calls):
        table = {"is_readable": self.readable, "agrees": self.agrees}[function]
        return [table.get(gold, True) for gold, *_ in calls]


def test_math_verify_abstains_where_the_gold_answer_is_to_blame(monkeypatch):
    monkeypatch.setattr(stock, "_math_judges", lambda workers, seconds: Judges())
    metrics = {}
    answer = ["2", "gold hangs", "gold crashes", "hangs", "raises", "hangs"]
    rewards = FACTORIES["get_math_verify_reward"]()(
        completions=["?"] * 6, answer=answer, log_metric=metrics.__setitem__
    )
    assert rewards == [1, None, None, 0, 0, 0]
    assert metrics == {
        "rewards/math_verify_reward/timeouts": 3,
        "rewards/math_verify_reward/failures": 2,
    }


@pytest.mark.process
def test_reasoning_accuracy_looks_behind_the_reasoning():
    completions = [
        r"<think>\boxed{1}</think> \boxed{2}",
        r"<think>\boxed{2}</think> \boxed{1}",
        r"<think>\boxed{2}",
        r"</think> no </think> \boxed{2}",
    ]
    function = FACTORIES["get_reasoning_accuracy_reward"](workers=1)
    assert function(completions=completions, answer=["2"] * 4) == [1, 0, 0, 1]


@pytest.mark.process
def test_cosine_reward_prefers_short_right_and_long_wrong_answers():
    function = FACTORIES["get_cosine_scaled_reward"](max_len=100)
    right, wrong = r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"
    lengths = [0, 50, 100, 250, 25]
    ids = [[1] * length for length in lengths]
    expected = [1, 0.75, 0.5, 0.5, 0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2]
    for text, sign in ((right, 1), (wrong, -1)):
        rewards = function(completions=[text] * 5, answer=["1/3"] * 5, completion_ids=ids)
        assert rewards == pytest.approx([sign * value for value in expected])
    assert function(completions=[right], answer=[None], completion_ids=[[1]]) == [None]


def code(body):
    return f"So:\n```python\n{body}\n```\n"


def info(*tests, language="python", **more):
    cases = [{"input": given, "output": out, **more} for given, out in tests]
    return {"language": language, "test_cases": cases}


DOUBLE = info(("1\n", "2\n"), ("5\n", "10\n"), ("-3\n", "-6\n"), ("0\n", "0\n"))


@pytest.mark.process
@isolated
@pytest.mark.parametrize(
    ("completion", "verification", "reward"),
    [
        (code("print(2 * int(input()))"), DOUBLE, 1),
        (code("print(abs(2 * int(input())))"), DOUBLE, 0.75),
        (code("print(2)"), DOUBLE, 0.25),
        (code("print(2 * int(input()), '\\n')"), DOUBLE, 1),
        (code("print(2 * int(input()))\nprint('more')"), DOUBLE, 0),
        (code("print(2 * int(input()))\nraise SystemExit(1)"), DOUBLE, 0),
        (code("print(2 * int(input())"), DOUBLE, 0),
        (code("print(0)") + code("print(2 * int(input()))"), DOUBLE, 1),
        ("print(2 * int(input()))", DOUBLE, 0),
        ("", DOUBLE, 0),
        # a shorter output must not pass for the lines that it has
        (code("print(1)"), info(("", "1\n2\n")), 0),
        (code("print(1, 2, sep='\\n')"), info(("", "1 \n2")), 1),
        (code("print(1)"), info(("", "1"), type="stdin_stdout", fn_name=None), 1),
        (code("print(1)"), info(("", "1"), type="function_call"), None),
        (code("print(1)"), info(("", "1"), language="javascript"), None),
        (code("print(1)"), info(), None),
        (code("print(1)"), None, None),
    ],
)
def test_code_earns_the_share_of_tests_that_it_passes(completion, verification, reward):
    rewards = STOCK["code_reward"](completions=[completion], verification_info=[verification])
    assert rewards == [reward]


@pytest.mark.slow
@pytest.mark.process
@isolated
def test_code_that_does_not_end_is_reported():
    metrics = {}
    rewards = FACTORIES["get_code_reward"](seconds=2.0)(
        completions=[code("while True: pass"), code("print(2 * int(input()))")],
        verification_info=[info(("1", "2")), DOUBLE],
        log_metric=metrics.__setitem__,
    )
    assert rewards == [0, 1]
    assert metrics == {"rewards/code_reward/timeouts": 1}


def test_code_is_never_run_where_it_cannot_be_isolated(monkeypatch):
    monkeypatch.setattr(sandbox, "unavailable", lambda: "no bwrap")
    with pytest.raises(NotImplementedError, match="cannot be isolated here.*no bwrap"):
        STOCK["code_reward"](completions=[code("print(2)")], verification_info=[DOUBLE])


@pytest.mark.parametrize(
    ("longest", "cache", "punishments"),
    [
        (100, 20, {0: 0, 1: 0, 80: 0, 81: -0.05, 85: -0.25, 90: -0.5, 99: -0.95, 100: -1}),
        (4, 4, {0: 0, 1: -0.25, 4: -1}),
    ],
)
def test_the_overlong_punishment_falls_from_0_to_minus_1(longest, cache, punishments):
    rewards = stock.get_soft_overlong_punishment(longest, cache)(
        completion_ids=map(range, punishments)
    )
    assert rewards == [np.float32(punishment) for punishment in punishments.values()]


@pytest.mark.parametrize(("longest", "cache"), [(4096, 819), (100, 20), (30, 7), (1024, 256)])
def test_the_punishment_has_the_bits_of_compiled_arithmetic(longest, cache):
    lengths = np.arange(longest + 1, dtype=np.int32)
    over = jax.jit(lambda n: -jnp.clip((n - (longest - cache)) / cache, 0, 1))(lengths)
    punish = stock.get_soft_overlong_punishment(longest, cache)
    assert punish(completion_ids=[range(n) for n in lengths]) == np.asarray(over).tolist()
