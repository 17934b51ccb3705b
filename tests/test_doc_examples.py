"""Tests the examples in the docstrings of the public names, one after the other, on the base in the package.

`make docs` runs the slow ones, too.
"""

import doctest
import inspect
import pathlib
import re
import tomllib

import pytest

import qerl_jax
from qerl_jax import config as configs
from qerl_jax.api.policy import Policy
from qerl_jax.api.runs import Run
from qerl_jax.data import datasets
from qerl_jax.rewards import scoring
from qerl_jax.system.checked import from_table

DOCS = pathlib.Path(__file__).parents[1] / "docs"
# In the order in which they build on each other: `load` makes `policy`, `train` makes `run`.
EXAMPLES = (
    *(qerl_jax.load, Policy.generate, Policy.stream, Policy.with_tools, Policy.logprobs),
    *(Policy.save_pretrained, qerl_jax.train, Run, qerl_jax.load_run, qerl_jax.report),
    *(qerl_jax.plan, qerl_jax.export, qerl_jax.quantize, qerl_jax.evaluate),
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """The working directory of all examples, and what they have defined so far."""
    return tmp_path_factory.mktemp("examples"), {}


@pytest.mark.slow
@pytest.mark.parametrize("documented", EXAMPLES, ids=lambda each: each.__qualname__)
def test_the_example_of_a_docstring_gives_what_it_shows(documented, shared, monkeypatch):
    folder, names = shared
    monkeypatch.chdir(folder)
    text = inspect.getdoc(documented)
    test = doctest.DocTestParser().get_doctest(text, names, documented.__qualname__, None, None)
    shown, runner = [], doctest.DocTestRunner()
    runner.run(test, out=shown.append, clear_globs=False)
    names.update(test.globs)
    assert test.examples and runner.failures == 0, "".join(shown)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """Makes an empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page, language="python", smaller=()):
    """Returns the blocks of a page in a language, in which some numbers are smaller."""
    text = (DOCS / page).read_text()
    for number, other in smaller:
        assert text.count(number) == 1
        text = text.replace(number, other)
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", text)


def run(written):
    """Runs blocks one after the other, and returns what they define."""
    names = {"__name__": "page"}
    for block in written:
        exec(block, names)
    return names


@pytest.mark.slow
def test_the_guide_runs_from_its_first_line_to_its_last(here):
    fewer = ('"max_steps": 10', '"max_steps": 1'), ('batch_size": 64', 'batch_size": 8')
    written = blocks("python.md", smaller=[*fewer, ("num_problems=64", "num_problems=8")])
    assert len(written) == 4 and len(run(written)["run"].metrics) == 1
    assert (here / "sums.png").stat().st_size > 1000


@pytest.mark.slow
def test_the_page_on_environments_runs_as_written(here, capsys):
    names = run(blocks("environments.md"))
    folders = sorted(path.name for path in (here / "runs").iterdir())
    assert folders == ["higher_or_lower", "several", "weather"]
    assert {"rewards/HigherOrLower/mean", "rewards/Diary/mean"} <= {*names["run"].metrics.columns}
    assert capsys.readouterr().out.rstrip().endswith(str(names["output"].messages))


def test_the_configs_of_the_page_on_environments_are_configs():
    read = [tomllib.loads(block)["tools"] for block in blocks("environments.md", "toml")]
    made = [from_table(qerl_jax.ToolsConfig, table, "tools.") for table in read]
    assert len(made) == 3 and made[2].environments["game"] == "guess_number"


@pytest.fixture
def started(here):
    """Makes a folder with the files that the page "Getting started" lets its reader write."""
    texts = blocks("getting-started.md") + blocks("getting-started.md", "toml")
    for name, text in zip(("my_rewards.py", "make_rows.py", "my.toml"), texts, strict=True):
        (here / name).write_text(text)
    run(texts[1:2])
    return here


def test_the_files_of_getting_started_make_a_run(started):
    cfg = configs.load(started / "my.toml")
    problems = datasets.from_config(cfg.data, split="train", seed=0)
    named = scoring.resolve(cfg.rewards.functions)
    texts = [f"<answer>{n}</answer>" for n in (2, 3)]
    assert len(problems) == 49 * 49
    assert named[0][1](completions=texts, answer=["2", "2"]) == [1.0, 0.0]
    scoring.check(named, problems[:2])


@pytest.mark.slow
def test_the_run_of_getting_started_learns(started):
    rewards = qerl_jax.train(started / "my.toml", quiet=True).metrics["reward"]
    assert rewards.iloc[-3:].mean() > 0.4 > rewards.iloc[:3].mean()


def test_the_rewards_of_their_page_give_what_it_says(here):
    written = blocks("rewards.md")
    names = run(block for block in written if "train(" not in block)
    assert len(written) == 4
    assert names["has_answer"](["<answer>7</answer>", "7"], answer=[7, 7]) == [1.0, 0.0]
    chat = [{"role": "assistant", "content": "x" * 200}]
    assert names["is_short"](["short", chat]) == [1.0, 0.0]
    assert names["get_length_reward"](2)([[1], [1, 2, 3, 4]]) == [0.0, -1.0]


@pytest.mark.slow
def test_the_page_on_rewards_runs_as_written(here):
    metrics = run(blocks("rewards.md"))["run"].metrics
    assert {"rewards/has_answer/mean", "rewards/is_short/mean"} <= {*metrics.columns}
    assert metrics["reward_std"].max() > 0


def test_the_stock_of_rewards_is_on_their_page():
    page = (DOCS / "rewards.md").read_text().partition("## Stock rewards")[2]
    named = set(re.findall(r"`(\w+_reward)`", page))
    assert named == {*scoring.STOCK, *scoring.FACTORIES}


def test_the_rows_and_sections_of_the_page_on_data_are_read():
    names = run(blocks("data.md"))
    for rows, is_text in (("rows", True), ("chats", False)):
        first = datasets.from_rows(qerl_jax.DataConfig("rows"), names[rows], "dataset")[0]
        assert first.is_from_text == is_text and first.columns["answer"] == "42"
    for block in blocks("data.md", "toml"):
        table = tomllib.loads(block)
        for name, cls in (("data", qerl_jax.DataConfig), ("eval", qerl_jax.EvalConfig)):
            if name in table:
                from_table(cls, table[name], f"{name}.")


def test_the_metrics_of_their_page_are_those_of_the_code():
    page = (DOCS / "metrics.md").read_text().partition("## Every metric")[2]
    cells = re.findall(r"(?m)^\| (`.*?`) \|", page)
    named = {name for cell in cells for name in re.findall(r"`([\w/]+)`", cell)}
    package = pathlib.Path(qerl_jax.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    made = set(re.findall(r'"((?:[a-z]\w*/)*[a-z]\w*)"', code))
    made |= {f"perf/{phase}_time" for phase in re.findall(r'lap\("(\w+)"\)', code)}
    assert {name for name in named if "NAME" not in name} <= made
    groups = "sampling|completions|eval|aqn|update|updates|clip_ratio|dynamic_sampling"
    assert {name for name in made if re.fullmatch(f"({groups})/.+", name)} <= named


def test_the_readme_and_the_site_begin_with_the_same_example():
    assert blocks("../README.md") == blocks("index.md")[:1]


@pytest.mark.slow
def test_the_readmes_example_learns_and_answers(here, capsys):
    names = run(blocks("index.md")[:1])
    assert names["run"].has_learned and (here / "runs" / "sums" / "report.md").is_file()
    assert "<answer>" in capsys.readouterr().out


def test_every_public_function_has_an_example():
    functions = {getattr(qerl_jax, name) for name in qerl_jax.__all__ if name != "__version__"}
    assert {each for each in functions if inspect.isfunction(each)} <= set(EXAMPLES)
