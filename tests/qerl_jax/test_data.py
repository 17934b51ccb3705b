import itertools
import json
import pathlib

import pytest

from qerl_jax import arithmetic, data

GSM8K = pathlib.Path(__file__).parents[1] / "golden" / "gsm8k"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def rows(tmp_path):
    """Writes rows into a .jsonl file and returns its path."""

    def write(*rows):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_gsm8k_rows_get_number_and_solution():
    problems = data.load(str(GSM8K), split="test")
    answers = "18 3 70000 540 20 64 260 160 45 460 2125 114200".split()
    assert [problem.columns["answer"] for problem in problems] == answers
    first = problems[0]
    assert first.prompt[0]["role"] == "user" and len(first.prompt) == 1
    assert first.prompt[0]["content"].startswith("Janet’s ducks lay 16 eggs")
    assert first.columns["solution"].endswith("market.\n#### 18")


def test_system_prompt_comes_first_and_suffix_last():
    problem = data.load(
        str(GSM8K), split="test", system_prompt="Think.", prompt_suffix=" Go.", num_problems=1
    )[0]
    assert [message["role"] for message in problem.prompt] == ["system", "user"]
    assert problem.prompt[0]["content"] == "Think."
    assert problem.prompt[1]["content"].endswith("farmers' market? Go.")


def test_text_prompts_stay_text_until_a_system_prompt_makes_a_chat(rows):
    path = rows({"prompt": "1+1=", "answer": "2", "level": 3})
    assert data.load(path)[0] == data.Problem("1+1=", {"answer": "2", "level": 3})
    assert data.load(path, prompt_suffix="?")[0].prompt == "1+1=?"
    chat = ({"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="})
    assert data.load(path, system_prompt="Add.")[0].prompt == chat


def test_verl_rows_keep_messages_and_give_the_ground_truth_as_answer(rows):
    messages = [{"role": "user", "content": "2*2?"}]
    row = {
        "data_source": "sums",
        "prompt": messages,
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    problem = data.load(rows(row))[0]
    assert problem.prompt == tuple(messages)
    assert problem.columns["answer"] == problem.columns["ground_truth"] == "4"
    assert problem.columns["data_source"] == "sums"


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"answer": "1", "solution": "2"}, "1"),
        ({"ground_truth": "3", "solution": "2"}, "3"),
        ({"solution": "2"}, "2"),
        ({"answer": "Work.\n#### -1,234"}, "-1234"),
        ({"answer": "channel ####7"}, "channel ####7"),
    ],
)
def test_answer_comes_from_the_first_column_that_has_one(rows, columns, answer):
    assert data.load(rows({"problem": "?", **columns}))[0].columns["answer"] == answer


def test_parquet_files_are_read_too(tmp_path):
    import datasets

    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"question": "?", "answer": "1"}] * 3).to_parquet(path)
    assert len(data.load(str(path), split="test")) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "?", "answer": "1"}, r"no column 'prompt' .* it has \['answer', 'text'\]"),
        ({"prompt": 3}, "row 0, column 'prompt': must be text or messages .* got 3"),
        ({"prompt": []}, "must be text or messages"),
        ({"prompt": [{"role": "user"}]}, "must be text or messages"),
    ],
)
def test_rows_without_a_usable_prompt_are_refused_at_load(rows, row, message):
    with pytest.raises(ValueError, match=message):
        data.load(rows(row))


def test_two_system_messages_are_refused(rows):
    path = rows({"prompt": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]})
    with pytest.raises(ValueError, match="row 0: has a system message already"):
        data.load(path, system_prompt="c")


def test_missing_sources_are_named(tmp_path, rows):
    with pytest.raises(ValueError, match="no such file or folder: .*absent"):
        data.load(str(tmp_path / "absent"))
    with pytest.raises(ValueError, match="absent.jsonl"):
        data.load("absent.jsonl")
    with pytest.raises(ValueError, match="split='dev'.*Unknown split"):
        data.load(str(GSM8K), split="dev")
    with pytest.raises(ValueError, match="is empty"):
        data.load(rows())
    with pytest.raises(ValueError, match="num_problems must be at least 1; got 0"):
        data.load("arithmetic", num_problems=0)


def test_arithmetic_is_drawn_by_seed_and_split():
    problems = data.load("arithmetic", seed=5, split="test", num_problems=4)
    expected = [arithmetic.problem("test", 5, index) for index in range(4)]
    assert [p.prompt[0]["content"] for p in problems] == [p.question for p in expected]
    assert [p.columns for p in problems] == [{"answer": str(p.answer)} for p in expected]
    assert len(data.load("arithmetic")) == data.ARITHMETIC_PROBLEMS


def test_problems_are_a_sequence():
    problems = data.Problems(5, lambda index: data.Problem(str(index), {}))
    assert problems[-1].prompt == "4" and [p.prompt for p in problems[1:4:2]] == ["1", "3"]
    assert len(list(problems)) == 5
    with pytest.raises(IndexError):
        problems[5]


def test_every_pass_meets_every_problem_once_in_an_order_of_its_own():
    problems = list("abcdefg")
    stream = itertools.chain.from_iterable(data.batches(problems, batch_size=3, seed=0))
    seen = list(itertools.islice(stream, 21))  # seven batches of three, three passes of seven
    passes = [seen[:7], seen[7:14], seen[14:]]
    assert all(sorted(order) == problems for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    assert seen[:3] != data.batch(problems, 0, batch_size=3, seed=1)


def test_batches_resume_by_their_number_alone():
    problems = list(range(10))
    whole = list(itertools.islice(data.batches(problems, batch_size=4, seed=9), 8))
    resumed = list(itertools.islice(data.batches(problems, batch_size=4, seed=9, start=5), 3))
    assert resumed == whole[5:]


def test_batches_may_exceed_the_problems():
    assert sorted(data.batch([1, 2, 3], 0, batch_size=7, seed=0))[:2] == [1, 1]


@pytest.mark.parametrize(
    ("problems", "index", "batch_size"), [([], 0, 1), ([1], -1, 1), ([1], 0, 0)]
)
def test_impossible_batches_are_refused(problems, index, batch_size):
    with pytest.raises(ValueError, match="a batch needs problems, batch_size >= 1"):
        data.batch(problems, index, batch_size=batch_size, seed=0)


def test_collate_aligns_columns_and_copies_messages():
    chat = data.Problem(({"role": "user", "content": "?"},), {"answer": "1"})
    text = data.Problem("!", {"answer": "2", "level": 3})
    prompts, columns = data.collate([chat, text])
    assert prompts == [[{"role": "user", "content": "?"}], "!"]
    assert columns == {"answer": ["1", "2"], "level": [None, 3]}
    prompts[0][0]["content"] = "changed"
    assert chat.prompt[0]["content"] == "?"
