"""The examples in the docstrings of the public names run, one after the other, on the base in the package."""

import doctest
import inspect
import pathlib
import re
import tomllib

import pytest

import qerl_jax
from qerl_jax.api.policy import Policy
from qerl_jax.api.runs import Run
from qerl_jax.checked import from_table

DOCS = pathlib.Path(__file__).parents[1] / "docs"
GUIDE = DOCS / "python.md"
# In the order in which they build on each other: `load` makes `policy`, `train` makes `run`.
EXAMPLES = (
    qerl_jax.load,
    Policy.generate,
    Policy.stream,
    Policy.with_tools,
    Policy.logprobs,
    Policy.save_pretrained,
    qerl_jax.train,
    Run,
    qerl_jax.load_run,
    qerl_jax.report,
    qerl_jax.plan,
    qerl_jax.export,
    qerl_jax.quantize,
    qerl_jax.evaluate,
)


@pytest.fixture(scope="module")
def names():
    """What the examples have defined so far."""
    return {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The working directory of all examples."""
    return tmp_path_factory.mktemp("examples")


@pytest.mark.parametrize("documented", EXAMPLES, ids=lambda each: each.__qualname__)
def test_the_example_of_a_docstring_gives_what_it_shows(documented, names, folder, monkeypatch):
    monkeypatch.chdir(folder)
    text = inspect.getdoc(documented)
    test = doctest.DocTestParser().get_doctest(text, names, documented.__qualname__, None, None)
    assert test.examples
    shown = []
    runner = doctest.DocTestRunner()
    runner.run(test, out=shown.append, clear_globs=False)
    names.update(test.globs)
    assert runner.failures == 0, "".join(shown)


def test_the_guide_runs_from_its_first_line_to_its_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = GUIDE.read_text()
    for own, smaller in (
        ('"max_steps": 10', '"max_steps": 1'),
        ('batch_size": 64', 'batch_size": 8'),
        ("num_problems=64", "num_problems=8"),
    ):
        assert text.count(own) == 1
        text = text.replace(own, smaller)
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", text)
    names = {"__name__": "guide"}
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4 and len(names["run"].metrics) == 1
    assert (tmp_path / "sums.png").stat().st_size > 1000


def blocks(page, language):
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", (DOCS / page).read_text())


@pytest.mark.slow
def test_the_page_on_environments_runs_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "page"}
    for block in blocks("environments.md", "python"):
        exec(block, names)
    made = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert made == ["higher_or_lower", "several", "weather"]
    assert {"rewards/HigherOrLower/mean", "rewards/Diary/mean"} <= {*names["run"].metrics.columns}
    assert capsys.readouterr().out.rstrip().endswith(str(names["output"].messages))


def test_the_configs_of_the_page_on_environments_are_configs():
    read = [tomllib.loads(block)["tools"] for block in blocks("environments.md", "toml")]
    made = [from_table(qerl_jax.ToolsConfig, table, "tools.") for table in read]
    assert len(made) == 3 and made[2].environments["game"] == "guess_number"


def test_every_public_function_has_an_example():
    functions = {getattr(qerl_jax, name) for name in qerl_jax.__all__ if name != "__version__"}
    assert {each for each in functions if inspect.isfunction(each)} <= set(EXAMPLES)
