import asyncio
import re
import subprocess
import sys

import numpy as np
import pytest

from qerl_jax.config import DataConfig
from qerl_jax.data import datasets
from qerl_jax.rewards import imports, scoring, stock


@pytest.mark.process
def test_importing_rewards_is_light():
    heavy = ["datasets", "flax", "jax", "math_verify", "sympy", "transformers"]
    program = f"import sys, qerl_jax.rewards.scoring; assert not {set(heavy)} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def length_reward(completions, **_):
    return [len(completion) for completion in completions]


def test_functions_are_found_by_name_path_file_and_as_they_are(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def own(completions, **_):\n    return [7.0] * len(completions)\n")
    resolved = scoring.resolve(["accuracy_reward", "math:sqrt", f"{file}:own", length_reward])
    assert [name for name, _ in resolved] == ["accuracy_reward", "sqrt", "own", "length_reward"]
    assert resolved[2][1](["x"]) == [7.0]


def test_only_code_of_the_user_has_a_hash(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(**_): return []\n")
    before = imports.source_hash(f"{file}:f")
    file.write_text("def f(**_): return [0]\n")
    assert before and imports.source_hash(f"{file}:f") not in (None, before)
    assert imports.source_hash(f"{__name__}:evaluate")
    others = ("format_reward", "qerl_jax.rewards.stock:format_reward", "json:loads", "__main__:f")
    assert [imports.source_hash(each) for each in others] == [None] * 4


def test_a_file_of_functions_may_make_what_looks_for_its_module(tmp_path):
    file = tmp_path / "math.py"
    file.write_text(
        "from __future__ import annotations\n"
        "import dataclasses, math, pickle\n"
        "@dataclasses.dataclass\n"
        "class Answer:\n"
        "    value: float\n"
        "def own(completions, **_):\n"
        "    answer = pickle.loads(pickle.dumps(Answer(math.floor(7.5))))\n"
        "    return [answer.value] * len(completions)\n"
    )
    assert evaluate(scoring.resolve([f"{file}:own"])[0][1]).tolist() == [[7.0], [7.0]]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["acuracy_reward"],
            r"^reward function: got 'acuracy_reward'; must be one of accuracy_.*\?$",
        ),
        (["acuracy_reward"], r"did you mean accuracy_reward\?"),
        (
            ["no_such_module:f"],
            "could not import rewards from 'no_such_module': ModuleNotFoundError",
        ),
        (
            ["no_such.py:f"],
            "^reward function: got 'no_such.py:f'; there is no file /.*/no_such.py$",
        ),
        (["math:f"], "math has no 'f'"),
        (["math:pi"], "'math:pi'; cannot be called: float"),
        (["mine.py"], r"must also name the function in the file: 'mine\.py:FUNCTION'"),
        (
            ["format_reward", "qerl_jax.rewards.stock:format_reward"],
            r"got \['format_reward'\]; must differ",
        ),
    ],
)
def test_functions_that_cannot_be_found_are_named(names, message):
    with pytest.raises(ValueError, match=message):
        scoring.resolve(names)


def test_factories_are_called_with_their_options(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def get_constant(value):\n"
        "    def constant(completions, **_): return [value] * len(completions)\n"
        "    return constant\n"
    )
    path = f"{file}:get_constant"
    resolved = scoring.resolve(
        ["get_repetition_penalty_reward", path],
        {path: {"value": 3.0}, "get_repetition_penalty_reward": {"ngram_size": 1}, "other": {}},
    )
    assert [name for name, _ in resolved] == ["repetition_penalty_reward", "constant"]
    assert resolved[0][1](completion_ids=[[1, 1]]) == [-0.5]
    assert resolved[1][1](["x"]) == [3.0]
    ((_, default),) = scoring.resolve(["get_repetition_penalty_reward"])
    assert default(completion_ids=[[1, 1, 1, 1]]) == [-0.5]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("get_cosine_scaled_reward", {}, "get_cosine_scaled_reward: got {}.*missing.*max_len"),
        ("get_cosine_scaled_reward", {"max_len": 0}, "'max_len': 0}; max_len: got 0; must be at"),
        ("get_code_reward", {"second": 1}, "unexpected keyword argument 'second'"),
        ("format_reward", {"strict": True}, "rewards.options.format_reward: .*takes no options"),
        ("math:sqrt", {}, "rewards.options.math:sqrt: got {}"),
        ("platform:machine", {}, "what 'platform:machine' makes cannot be called"),
    ],
)
def test_options_that_a_factory_refuses_are_named(name, options, message):
    with pytest.raises(ValueError, match=message):
        scoring.resolve([name], {name: options})


def evaluate(function, rows=2, name="f", **columns):
    named = [(name, function)]
    return scoring.evaluate(named, ["p"] * rows, ["c"] * rows, [[0]] * rows, columns)


@pytest.mark.parametrize("keyword", ["", "async "])
def test_what_a_function_raises_names_file_line_and_row(keyword, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        f"{keyword}def exact(completions, answer, log_metric, **_):\n"
        "    log_metric('seen', 1)\n"
        "    return [float(c == a.strip()) for c, a in zip(completions, answer)]\n"
    )
    functions = scoring.resolve([f"{file}:exact"])
    message = (
        r"'exact' raised AttributeError on 4 completions with the columns \['answer'\]: .*"
        rf"\({file}:3, in .*; it fails on completion 3 of 4, which has prompts 'p', completions 'c', answer None$"
    )
    with pytest.raises(scoring.RewardError, match=message):
        evaluate(functions[0][1], name="exact", rows=4, answer=["1", "2", None, 4])
    file.write_text("import math\nmath.nothing\n")
    with pytest.raises(ValueError, match=rf"'nothing' \({file}:2, in <module>\)$"):
        scoring.resolve([f"{file}:exact"])


def test_functions_receive_columns_and_extras_and_may_abstain():
    def plain(prompts, completions, completion_ids, level, extra, log_extra, log_metric):
        return [level[0] + extra, None]

    async def slow(level, **_):
        await asyncio.sleep(0)
        return np.array(level) * 0.5

    named = [("slow", slow), ("plain", plain)]
    rows = ["p", "q"], ["a", "b"], [[1], [2]]
    scores = scoring.evaluate(named, *rows, {"level": [3, 4]}, {"extra": 10})
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores, np.float32([[1.5, 13], [2, np.nan]]))


def test_async_functions_may_keep_what_belongs_to_an_event_loop():
    turns = asyncio.Semaphore(1)

    async def one_by_one(completions, **_):
        async def judge(completion):
            async with turns:
                await asyncio.sleep(0)
                return 1.0

        return await asyncio.gather(*map(judge, completions))

    async def notebook():  # whose thread runs a loop already
        return evaluate(Callable())

    class Callable:
        __call__ = staticmethod(one_by_one)

    for function in (one_by_one, one_by_one, Callable()):
        assert evaluate(function).tolist() == [[1.0], [1.0]]
    assert asyncio.run(notebook()).tolist() == [[1.0], [1.0]]


def test_an_async_function_that_raises_ends_the_others():
    ended = []

    async def waits(**_):
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    named = [("waits", waits), ("raises_late", raises_late)]
    with pytest.raises(scoring.RewardError, match="'raises_late' raised KeyError"):
        scoring.evaluate(named, ["p"], ["c"], [[0]], {})
    assert ended == [True]


async def raises_late(**_):
    raise KeyError("late")


def logs(column, values):
    return lambda log_extra, **_: log_extra(column, values) or [0, 0]


WITHIN = []  # within itself
WITHIN.append(WITHIN)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda **_: 1 / 0,
            r"'f' raised ZeroDivisionError on 2 completions with the columns \['level'\]: .*; it fails on the first and the last "
            "completion, and completion 1 of 2 has prompts 'p', completions 'c', level 1$",
        ),
        (raises_late, "'f' raised KeyError on 2 completions"),
        (lambda completions, answer, **_: [], "raised TypeError on 2 completions.*'answer'"),
        (lambda **_: [1.0], "'f', values: got 1; must be one for each of 2 completions"),
        (lambda **_: 1.0, "'f': got 'float'; must return a list of 2 values"),
        (lambda **_: "10", "'f': got 'str'; must return a list of 2 values"),
        (lambda **_: [1, "1"], "'f', completion 2 of 2: got '1'"),
        (lambda **_: [[1], 1], r"'f', completion 1 of 2: got \[1\]"),
        (lambda **_: [1, float("nan")], "'f', completion 2 of 2: got nan"),
        (lambda **_: [float("inf"), 1], "'f', completion 1 of 2: got inf"),
        (
            lambda **_: [1, -1e30],
            r"'f', completion 2 of 2: got -1e\+30; must be .* within \+-1e\+15",
        ),
        (lambda **_: [1, 10**400], "'f', completion 2 of 2: got 1000"),
        (logs("letters", [1]), "'f' raised .*'letters'.*got 1; must be 2 values"),
        (logs("reward", [1, 2]), "'reward'; is a column already"),
        (logs("seen", [{(1, 2): 3}, None]), r"log_extra\('seen'\): cannot be written as JSON"),
        (logs("seen", [WITHIN, None]), r"log_extra\('seen'\): cannot be written as JSON"),
    ],
)
def test_faulty_functions_are_named(function, message):
    with pytest.raises(scoring.RewardError, match=message):
        evaluate(function, level=[1, 2])


def test_what_functions_log_is_recorded():
    async def first(completions, log_extra, log_metric, **_):
        log_extra("letters", [len(c) for c in completions])
        log_metric("share", 1)
        return [0, 0]

    def second(log_metric, **_):
        log_metric("share", np.float32(0.5))
        return [0, 0]

    record = scoring.Record(2)
    named = [("first", first), ("second", second)]
    scoring.evaluate(named, ["p", "q"], ["a", "bcd"], [[1], [2]], {}, record=record)
    assert record.columns == {"letters": [1, 3]}
    assert record.values == {"share": [0.5, 1.0]}


def test_columns_must_not_take_an_arguments_name():
    names = ("prompts", "log_metric", "extra")
    with pytest.raises(ValueError, match=r"\['prompts', 'log_metric', 'extra'\]"):
        scoring.evaluate([], ["p"], ["c"], [[0]], dict.fromkeys(names, [1]), {"extra": 1})


PROBLEMS = [datasets.Problem(f"{n}+1=", {"answer": f"{n + 1}"}) for n in range(2)]


def test_check_finds_a_missing_column_before_training():
    scoring.check(scoring.resolve(["accuracy_reward", "format_reward"]), PROBLEMS)
    needs_level = [("needs_level", lambda level, **_: level)]
    with pytest.raises(scoring.RewardError, match=r"'needs_level' raised TypeError.*\['answer'\]"):
        scoring.check(needs_level, PROBLEMS)


@pytest.mark.parametrize(
    ("function", "remedy"),
    [
        (lambda answer: answer, r"name those that it needs, and end its arguments with \*\*_"),
        (lambda level, **_: level, "the rows have no column 'level': rename one by data.columns"),
        (lambda prompt, **_: prompt, "a reward gets `prompts` and `completions`: lists with"),
    ],
)
def test_an_error_about_arguments_says_what_to_change(function, remedy):
    end = r".*\(tried before training, on 2 rows with a made-up completion\)$"
    with pytest.raises(scoring.RewardError, match=remedy + end):
        scoring.check([("mine", function)], PROBLEMS)


def test_a_completion_at_fault_is_named_by_its_row_of_the_data():
    rows = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(22)]
    problems = datasets.from_rows(DataConfig("rows"), rows, "dataset")[20:]

    def picky(answer, **_):
        return [1 / (each != problems[1].columns["answer"]) for each in answer]

    where = re.escape("it fails on completion 2 of 2 (row 21 of the data, from 0 on), which has")
    with pytest.raises(scoring.RewardError, match=where):
        scoring.check([("picky", picky)], problems)
    where = re.escape("'mute', completion 2 of 2 (row 21 of the data, from 0 on): got 'x'")
    with pytest.raises(scoring.RewardError, match=where):
        scoring.check([("mute", lambda **_: [0, "x"])], problems)


def test_an_error_about_arguments_inside_a_reward_gets_no_such_advice():
    def calls_wrongly(completions, **_):
        return sorted(completions, reversed=True)

    with pytest.raises(scoring.RewardError, match="in calls_wrongly") as raised:
        scoring.check([("mine", calls_wrongly)], PROBLEMS)
    assert "end its arguments" not in str(raised.value)


def test_completions_take_the_form_of_their_prompts():
    assert scoring.as_completion("1+1=", "2") == "2"
    chat = scoring.as_completion([{"role": "user", "content": "1+1="}], "2")
    assert chat == [{"role": "assistant", "content": "2"}]
    assert stock.completion_text(chat) == "2"


def test_functions_are_told_of_rows_as_these_end():
    told = []

    def slow(completions, **_):
        return [0.0] * len(completions)

    slow.begin = lambda completions, answer, **columns: told.append((completions, answer, columns))
    problems = [
        datasets.Problem("2 + 3", {"answer": "5", "level": 1}),
        datasets.Problem([{"role": "user", "content": "x"}], {"answer": None, "level": 2}),
    ]
    begin = scoring.beginner([("slow", slow), ("plain", lambda **_: [])], problems, 2)
    begin(1, "five")
    begin(2, "no")
    assert told == [
        (["five"], ["5"], {"level": [1]}),
        ([[{"role": "assistant", "content": "no"}]], [None], {"level": [2]}),
    ]
    assert scoring.beginner([("plain", lambda **_: [])], problems, 2) is None
    # What is wrong shows when all rows are scored.
    slow.begin = lambda **_: 1 // 0
    scoring.beginner([("slow", slow)], problems, 2)(0, "text")
