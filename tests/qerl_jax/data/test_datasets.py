import itertools
import json
import pathlib

import datasets
import pytest

from qerl_jax import config
from qerl_jax.data import arithmetic
from qerl_jax.data import datasets as data


def load(dataset, *, split="train", seed=0, **section):
    """Loads the problems of a `[data]` section."""
    return data.from_config(config.DataConfig(dataset, **section), split=split, seed=seed)


GSM8K = pathlib.Path(__file__).parents[2] / "golden" / "gsm8k"


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
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
    problems = load(str(GSM8K), split="test")
    answers = "18 3 70000 540 20 64 260 160 45 460 2125 114200".split()
    assert [problem.columns["answer"] for problem in problems] == answers
    first = problems[0]
    assert first.prompt[0]["role"] == "user" and len(first.prompt) == 1
    assert first.prompt[0]["content"].startswith("Janet’s ducks lay 16 eggs")
    assert first.columns["solution"].endswith("market.\n#### 18")


def test_system_prompt_comes_first_and_the_template_takes_the_last_message():
    texts = {"system_prompt": "Think.", "prompt_template": "{prompt} Go."}
    problem = load(str(GSM8K), split="test", **texts)[0]
    assert [message["role"] for message in problem.prompt] == ["system", "user"]
    assert problem.prompt[0]["content"] == "Think."
    assert problem.prompt[1]["content"].endswith("farmers' market? Go.")


@pytest.mark.parametrize("column", ["prompt", "question", "problem"])
def test_a_text_is_a_message_in_every_column_and_from_every_place(rows, column):
    row = {column: "1+1=", "answer": "2", "level": 3}
    path, columns = rows(row), {"answer": "2", "level": 3}
    user = {"role": "user", "content": "1+1="}
    expected = data.Problem((user,), columns, is_from_text=True)
    assert load(path)[0] == expected
    assert data.from_rows(config.DataConfig("rows"), [row], "dataset")[0] == expected
    chat = ({"role": "system", "content": "Add."}, user)
    assert load(path, system_prompt="Add.")[0].prompt == chat
    # Rewards get the text.
    assert load(path, system_prompt="Add.")[0].as_given == "1+1="


@pytest.mark.parametrize("column", ["prompt", "question"])
def test_without_the_chat_template_texts_stay_as_they_are(rows, column):
    row, chat = {column: "1+1="}, {column: [{"role": "user", "content": "1+1="}]}
    cfg = config.DataConfig("rows", apply_chat_template=False)
    assert load(rows(row), apply_chat_template=False)[0].prompt == "1+1="
    assert data.from_rows(cfg, [row], "dataset")[0].prompt == "1+1="
    assert data.from_rows(cfg, [chat], "dataset")[0].prompt == tuple(chat[column])


def test_verl_rows_keep_messages_and_give_the_ground_truth_as_answer(rows):
    messages = [{"role": "user", "content": "2*2?"}]
    model = {"style": "rule", "ground_truth": "4"}
    problem = load(rows({"data_source": "sums", "prompt": messages, "reward_model": model}))[0]
    assert problem.prompt == tuple(messages)
    assert problem.columns["answer"] == problem.columns["ground_truth"] == "4"
    assert problem.columns["data_source"] == "sums"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{prompt}", "Is {x} in [0, 1)?"),
        ("Level {level}: {prompt}", "Level 3: Is {x} in [0, 1)?"),
        (r"{prompt} Use \boxed{} or {}.", r"Is {x} in [0, 1)? Use \boxed{} or {}."),
        ("{unknown} {prompt}", "{unknown} Is {x} in [0, 1)?"),
        ("{prompt}{prompt}", "Is {x} in [0, 1)?" * 2),
    ],
)
def test_templates_fill_in_columns_and_leave_other_braces(rows, template, prompt):
    path = rows({"prompt": "Is {x} in [0, 1)?", "level": 3, "x": "kept as it is"})
    assert load(path, prompt_template=template)[0].as_given == prompt


TESTS = {
    "language": "python",
    "test_cases": [{"input": "1", "output": "2", "type": "stdin_stdout"}],
}
SET_ROWS = {
    "gsm8k": ({"question": "?", "answer": "Work.\n#### 1,234"}, "1234"),
    "bigmath": ({"prompt": "?", "solution": "5", "llama8b_solve_rate": None}, "5"),
    "bigmath_hard": ({"prompt": "?", "solution": "5"}, "5"),
    "dapo_math": (
        {"prompt": "bare", "source_prompt": [{"role": "user", "content": "?"}], "solution": "34"}
        | {"reward_model": {"ground_truth": "34", "style": "rule"}},
        "34",
    ),
    "miromind": ({"problem": "?", "clean_answer": "7", "answer": "It is 7."}, "7"),
    "math": ({"problem": "?", "solution": r"So \boxed{\frac12}.", "level": "1"}, r"\frac12"),
    "math500": ({"problem": "?", "solution": "Long.", "answer": "7"}, "7"),
    "aime24": ({"id": 60, "problem": "?", "solution": "Long.", "answer": "025"}, "025"),
    "aime25": ({"problem": "?", "answer": "70", "id": "0"}, "70"),
    "amc23": ({"id": 0, "question": "?", "problem": "?", "answer": "27.0"}, "27.0"),
    "verifiable_code": (
        {"problem": "?", "gold_standard_solution": "x", "verification_info": TESTS},
        None,
    ),
}


@pytest.mark.parametrize("name", data.SETS)
def test_a_named_set_reads_its_columns_under_its_prompt(rows, name):
    row, answer = SET_ROWS[name]
    problem = load(name, path=rows(row))[0]
    instruction = data.SETS[name].system_prompt
    assert problem.columns.get("answer") == answer
    expected = [{"role": "user", "content": "?"}]
    if instruction is not None:
        expected.insert(0, {"role": "system", "content": data.SYSTEM_PROMPTS[instruction]})
    assert problem.prompt == tuple(expected)
    bare = load(name, path=rows(row), system_prompt="", prompt_template="{prompt}!")[0]
    assert bare.prompt == ({"role": "user", "content": "?!"},)
    if name == "verifiable_code":
        (test,) = problem.columns["verification_info"]["test_cases"]
        assert (test["input"], test["output"]) == ("1", "2")


@pytest.mark.parametrize(
    ("name", "hub", "configuration"),
    [
        ("gsm8k", "openai/gsm8k", "main"),
        ("bigmath", "open-r1/Big-Math-RL-Verified-Processed", "level_3_4_5"),
        ("bigmath_hard", "open-r1/Big-Math-RL-Verified-Processed", "level_4_5"),
        ("dapo_math", "open-r1/DAPO-Math-17k-Processed", "en"),
        ("miromind", "miromind-ai/MiroMind-M1-RL-62K", None),
        ("math500", "HuggingFaceH4/MATH-500", None),
        ("aime24", "HuggingFaceH4/aime_2024", None),
        ("aime25", "math-ai/aime25", None),
        ("amc23", "math-ai/amc23", None),
    ],
)
def test_a_named_set_comes_from_the_hub_unless_it_is_here(name, hub, configuration, monkeypatch):
    asked = []

    def load_dataset(*arguments, **options):
        asked.append((*arguments, options))
        return datasets.Dataset.from_list([SET_ROWS[name][0]])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    load(name)
    data.from_config(config.DataConfig(name, name="other"), split="test", seed=0)
    assert asked == [(hub, configuration, {"split": "train"}), (hub, "other", {"split": "test"})]


def test_a_system_prompt_may_be_named(rows):
    path = rows({"problem": "?"})
    for name, text in data.SYSTEM_PROMPTS.items():
        assert load(path, system_prompt=name)[0].prompt[0]["content"] == text


def test_long_problems_of_a_set_are_left_out_by_their_characters(rows):
    texts = ["a" * 1024, "b" * 1025, "c"]
    path = rows(*({"prompt": text, "solution": "1"} for text in texts))
    begin = lambda problems: [problem.prompt[-1]["content"][0] for problem in problems]
    assert begin(load("bigmath", path=path)) == ["a", "c"]
    assert begin(load("bigmath", path=path, num_problems=1)) == ["a"]
    assert begin(load("bigmath", path=path, max_prompt_characters=1025)) == ["a", "b", "c"]
    assert begin(load("bigmath", path=path, max_prompt_characters=1)) == ["c"]
    assert len(load(path)) == 3
    with pytest.raises(ValueError, match="max_prompt_characters: got 1; no prompt is that short"):
        load(rows({"prompt": "too long"}), max_prompt_characters=1)


def test_the_characters_of_a_chat_are_those_of_its_messages(rows):
    chat = lambda text: {"prompt": [{"role": "user", "content": text}], "answer": "1"}
    path = rows(chat("abc"), chat("abcd"))
    assert len(load(path, max_prompt_characters=3)) == 1


def test_columns_may_be_mapped(rows):
    path = rows({"body": "?", "key": "3", "prompt": "not this", "answer": "nor this"})
    problem = load(path, columns={"prompt": "body", "answer": "key"})[0]
    assert problem.prompt == ({"role": "user", "content": "?"},)
    assert problem.columns["answer"] == problem.columns["key"] == "3"
    assert problem.columns["prompt"] == "not this"
    with pytest.raises(ValueError, match="data.columns.answer: got 'text'; .* has no such column"):
        load(path, columns={"answer": "text"})


def test_a_section_of_the_config_says_all_of_it(rows):
    path = rows({"body": "?", "key": "3"}, {"body": "longer", "key": "4"})
    names = {"columns": {"prompt": "body", "answer": "key"}, "max_prompt_characters": 5}
    texts = {"system_prompt": "Add.", "prompt_template": "{prompt} ({key})"}
    (problem,) = load("math", split="test", path=path, **names, **texts)
    assert [message["content"] for message in problem.prompt] == ["Add.", "? (3)"]
    assert problem.columns["answer"] == "3"
    several = config.DataConfig("arithmetic", num_problems=5)
    assert len(data.from_config(several, split="test", seed=0)) == 5
    assert len(data.from_config(several, split="test", seed=0, num_problems=2)) == 2


def test_a_copy_of_a_set_is_read_with_or_without_the_hubs_configurations(tmp_path):
    for name, folder in (("plain", "."), ("level_4_5", "hard")):
        place = tmp_path / name / folder
        place.mkdir(parents=True)
        datasets.Dataset.from_list([{"prompt": name, "solution": "1"}]).to_parquet(
            place / "train.parquet"
        )
    card = "---\nconfigs:\n- config_name: level_4_5\n  data_files: hard/train.parquet\n"
    card += "- config_name: other\n  data_files: absent.parquet\n---\n"
    (tmp_path / "level_4_5" / "README.md").write_text(card)
    for name in ("plain", "level_4_5"):
        problem = load("bigmath_hard", path=str(tmp_path / name))[0]
        assert problem.prompt[-1]["content"] == name


@pytest.mark.parametrize(
    ("columns", "answer"),
    [
        ({"answer": "1", "solution": "2"}, "1"),
        ({"solution": r"First \boxed{1}, so \boxed{\{2\}}"}, r"\{2\}"),
        ({"answer": r"\boxed{1}"}, r"\boxed{1}"),
        ({"ground_truth": "3", "solution": "2"}, "3"),
        ({"solution": "2"}, "2"),
        ({"answer": "Work.\n#### -1,234"}, "-1234"),
        ({"answer": "#### 5\nIt is ####."}, "5"),
        ({"answer": "channel ####7"}, "channel ####7"),
    ],
)
def test_answer_comes_from_the_first_column_that_has_one(rows, columns, answer):
    assert load(rows({"problem": "?", **columns}))[0].columns["answer"] == answer


def test_a_set_that_cannot_be_reached_is_an_error_with_a_remedy(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    said = r"'gsm8k' \(split 'train' of 'main'\): the hub cannot be reached; .* on disk by `path`"
    with pytest.raises(ValueError, match=said):
        load("gsm8k")


def test_parquet_files_are_read_too(tmp_path):
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list([{"question": "?", "answer": "1"}] * 3).to_parquet(path)
    assert len(load(str(path), split="test")) == 3


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "?", "answer": "1"},
            r"got \['answer', 'text'\]; must have a column 'prompt'.*, or",
        ),
        ({"prompt": 3}, "row 0, column 'prompt': got 3; must be text or messages"),
        ({"prompt": []}, "must be text or messages"),
        ({"prompt": [{"role": "user"}]}, "must be text or messages"),
        (
            {"prompt": [{"role": "system", "content": "a"}]},
            "row 0: .* has a system message already",
        ),
    ],
)
def test_rows_without_a_usable_prompt_are_refused_at_load(rows, row, message):
    with pytest.raises(ValueError, match=message):
        load(rows(row), system_prompt="c")


BIG = 12345678901234567890


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "json", "rows"])
def test_whole_numbers_beside_missing_ones_and_fractions_keep_their_form(ending, tmp_path):
    pandas = pytest.importorskip("pandas")
    golds = [18, None, 2.5, 4]
    table = [{"prompt": f"{row}", "answer": gold} for row, gold in enumerate(golds)]
    path = tmp_path / f"rows.{ending}"
    if ending == "rows":  # as of a table in memory, whose missing values are NaN
        rows = pandas.DataFrame(table).to_dict("records")
        problems = data.from_rows(config.DataConfig("mine"), rows, "rows")
    else:
        if ending == "parquet":
            pandas.DataFrame(table).to_parquet(path)
        else:
            lines = "\n".join(map(json.dumps, table))
            path.write_text(json.dumps(table) if ending == "json" else lines)
        problems = load(str(path))
    assert [repr(problem.columns["answer"]) for problem in problems] == ["18", "None", "2.5", "4"]


@pytest.mark.parametrize(
    ("golds", "texts"),
    [
        ([BIG, 18], [f"{BIG}", "18"]),
        ([-BIG, 2.5, None], [f"{-BIG}", "2.5", None]),
        ([2**53 + 1, 0.5], ["9007199254740993", "0.5"]),
        ([10**30], [f"{10**30}"]),
        ([2**53 + 1, 7], [2**53 + 1, 7]),  # these fit into 64 bits
    ],
)
def test_whole_numbers_that_a_reader_of_json_rounds_keep_all_digits(golds, texts, rows):
    path = rows(*({"prompt": "a", "answer": gold} for gold in golds))
    assert [problem.columns["answer"] for problem in load(path)] == texts
    path = rows(*({"prompt": "a", "reward_model": {"ground_truth": gold}} for gold in golds))
    assert [problem.columns["answer"] for problem in load(path)] == texts


@pytest.mark.parametrize("gold", [BIG, -BIG, 10**30])
def test_whole_numbers_in_a_list_of_rows_keep_all_digits_or_are_refused(gold, tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"prompt": "a", "answer": gold}, {"prompt": "b", "answer": None}]))
    try:
        assert load(str(path))[0].columns["answer"] == f"{gold}"
    except ValueError as error:
        assert "write whole numbers of more than 64 bits as texts" in str(error)


@pytest.mark.parametrize("blank", ["", "  ", "#### ", "so\n####"])
def test_a_blank_answer_is_none(rows, blank):
    assert load(rows({"prompt": "a", "answer": blank}))[0].columns["answer"] is None


def test_the_name_of_a_file_is_no_pattern(tmp_path):
    for name in ("rows[1]", "rows1"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"question": name}) + "\n")
    (problem,) = load(str(tmp_path / "rows[1].jsonl"))
    assert problem.prompt == ({"role": "user", "content": "rows[1]"},)


@pytest.mark.parametrize("form", ["lines", "list", "one"])
def test_answers_that_are_dates_stay_as_they_are_written(form, tmp_path):
    dates = ["2024-02-29", "2024-03-01 08:00"][: 1 if form == "one" else 2]
    table = [
        {"question": "When?", "answer": date, "reward_model": {"ground_truth": date}}
        for date in dates
    ]
    table += [{"question": "Never?", "answer": None, "reward_model": None}] if dates[1:] else []
    texts = {
        "lines": "\n\n".join(map(json.dumps, table)),
        "list": json.dumps(table),
        "one": json.dumps(table[0], indent=1),
    }
    path = tmp_path / ("rows.jsonl" if form == "lines" else "rows.json")
    path.write_text(texts[form])
    found = [problem.columns for problem in load(str(path))]
    assert [columns["answer"] for columns in found] == [row["answer"] for row in table]
    assert [columns["reward_model"] for columns in found] == [row["reward_model"] for row in table]


@pytest.mark.parametrize("answers", [("23", 13), (23, "13"), ("23", True), ("[1]", [1])])
def test_a_column_of_texts_and_other_values_is_refused(answers, rows):
    path = rows(*({"question": "?", "answer": answer} for answer in answers))
    rule = r"column 'answer': row 0 has .* and row 1 has .*: write all as texts"
    with pytest.raises(ValueError, match=rule):
        load(path)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "rows.jsonl",
            '{"question": "a"}\n\n{"question": "b" "answer": 1}\n',
            "line 3, column 18: .*delimiter$",
        ),
        ("rows.jsonl", '{"question": "a"}\n{"question":\n', "line 2, column 13: not JSON"),
        ("rows.json", '[{"question": "a"},\n {"question": }]\n', "line 2, column 15: not JSON"),
        ("rows.jsonl", '{"question": "a"}\n[1, 2]\n', r"line 2: got \[1, 2\]; must be an object"),
        ("rows.json", '[{"question": "a"}, 3]', "row 1: got 3; must be an object"),
    ],
)
def test_broken_json_is_an_error_that_names_file_and_line(name, text, said, tmp_path):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=f"{path}.*: {said}"):
        load(str(path))


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        ("{}/absent", {}, "absent'; no such file or folder"),
        ("absent.jsonl", {}, "absent.jsonl"),
        ("{}/rows.csv", {}, "rows.csv'; must be a folder, or a file that ends in .jso"),
        (str(GSM8K), {"split": "dev"}, "split 'dev'.*Unknown split"),
        ("{}/rows.jsonl", {}, "is empty"),
        ("arithmetic", {"num_problems": 0}, "num_problems: got 0; must be at least 1"),
        ("gsm8k", {"path": "relative/folder"}, "got 'relative/folder'; no such file or folder"),
        ("arithmetic", {"max_prompt_characters": 3}, "prompt_characters: got .*3.; arithmetic has"),
        ("arithmetic", {"name": "hard"}, "config: got 'hard'; .* configurations .*'one-step'"),
    ],
)
def test_missing_sources_are_named(name, section, message, tmp_path, rows):
    (tmp_path / "rows.csv").write_text("question\na\n")
    rows()
    with pytest.raises(ValueError, match=message):
        load(name.format(tmp_path), **section)


@pytest.mark.parametrize(
    ("name", "function"), [(None, arithmetic.problem), ("one-step", arithmetic.one_step)]
)
def test_arithmetic_is_drawn_by_configuration_seed_and_split(name, function):
    problems = load("arithmetic", name=name, seed=5, split="test", num_problems=4)
    expected = [function("test", 5, index) for index in range(4)]
    assert [p.prompt[-1]["content"] for p in problems] == [p.question for p in expected]
    assert [p.columns for p in problems] == [{"answer": str(p.answer)} for p in expected]
    assert len(load("arithmetic", name=name)) == data.ARITHMETIC_PROBLEMS


def test_problems_are_a_sequence():
    problems = data.Problems(5, lambda index: data.Problem(str(index), {}))
    assert problems[-1].prompt == "4" and [p.prompt for p in problems[1:4:2]] == ["1", "3"]
    assert len(list(problems)) == 5
    with pytest.raises(IndexError):
        problems[5]


def test_every_pass_meets_every_problem_once_in_an_order_of_its_own():
    problems = list("abcdefg")
    batches = [data.batch(problems, index, batch_size=3, seed=0) for index in range(7)]
    seen = list(itertools.chain.from_iterable(batches))  # three passes of seven
    passes = [seen[:7], seen[7:14], seen[14:]]
    assert all(sorted(order) == problems for order in passes)
    assert len({tuple(order) for order in passes}) == 3
    assert seen[:3] != data.batch(problems, 0, batch_size=3, seed=1)
    assert sorted(data.batch([1, 2, 3], 0, batch_size=7, seed=0))[:2] == [1, 1]


def test_a_batch_is_a_function_of_its_number_whatever_was_asked_before():
    problems = list(range(10))
    batches = lambda *indices: [data.batch(problems, i, batch_size=4, seed=9) for i in indices]
    whole = batches(*range(8))
    data._order.cache_clear()
    assert batches(5, 6, 7) == whole[5:]


@pytest.mark.parametrize(
    ("problems", "index", "batch_size"), [([], 0, 1), ([1], -1, 1), ([1], 0, 0)]
)
def test_impossible_batches_are_refused(problems, index, batch_size):
    rule = "problems, batch_size, index: got .*; must be at least 1, 1 and 0"
    with pytest.raises(ValueError, match=rule):
        data.batch(problems, index, batch_size=batch_size, seed=0)


def test_collate_aligns_columns_and_copies_messages():
    chat = data.Problem(({"role": "user", "content": "?"},), {"answer": "1"})
    text = data.Problem("!", {"answer": "2", "level": 3})
    prompts, columns = data.collate([chat, text])
    assert prompts == [[{"role": "user", "content": "?"}], "!"]
    assert columns == {"answer": ["1", "2"], "level": [None, 3]}
    prompts[0][0]["content"] = "changed"
    assert chat.prompt[0]["content"] == "?"


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
TALK = [
    {"role": "user", "content": "Weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "Ask."},
    {"role": "tool", "name": "weather", "tool_call_id": "1", "content": "4 C"},
    {"role": "user", "content": "And in Fahrenheit?"},
]


def test_messages_keep_all_keys_but_those_that_datasets_has_added():
    other = {"type": "function", "function": {"name": "time", "arguments": {"zone": "UTC"}}}
    chats = [TALK, [TALK[0], {"role": "assistant", "tool_calls": [other]}, TALK[3]]]
    filled = datasets.Dataset.from_list([{"prompt": chat} for chat in chats])
    assert filled[0]["prompt"][0]["tool_calls"] is None  # what is to be undone
    bare = [{name: v for name, v in message.items() if v is not None} for message in TALK]
    for rows in (filled, [{"prompt": chat} for chat in chats]):
        problems = data.from_rows(config.DataConfig("rows"), rows, "rows")
        assert [list(problem.prompt) for problem in problems] == [bare, chats[1]]
    problems[0].as_given[1]["tool_calls"][0]["function"]["name"] = "changed"
    assert problems[0].prompt[1]["tool_calls"] == [CALL]


@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": []}])
def test_a_message_without_content_needs_tool_calls(message):
    assert data.is_chat(TALK)
    assert not data.is_chat([{"role": "assistant", **message}])


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_half_a_character_is_refused_with_row_and_column(field):
    chat = [{"role": "user", "content": "a", field: "b\udfff"}]
    rows = [{"question": TALK[:1]}, {"question": chat}]
    problems = data.from_rows(config.DataConfig("rows"), rows, "rows")
    with pytest.raises(ValueError, match=r"^rows, row 1, column 'question': holds '\\udfff', half"):
        problems[1]
    rows = [{"prompt": "a", "level": "\ud800"}]
    cfg = config.DataConfig("rows", prompt_template="{level} {prompt}")
    with pytest.raises(ValueError, match=r"^rows, row 0, column 'level': holds"):
        data.from_rows(cfg, rows, "rows")
