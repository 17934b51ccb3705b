"""Tests what `import qerl_jax` offers: lazy imports, public names, and errors for bad arguments."""

import ast
import dataclasses
import functools
import importlib
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from matplotlib.figure import Figure

import qerl_jax
from qerl_jax import config, rl
from qerl_jax.api import jobs, runs, settings
from qerl_jax.api import policy as policies
from qerl_jax.checkpoint import export, peft
from qerl_jax.checkpoint import policy as sources
from qerl_jax.cli import main
from qerl_jax.data.datasets import Problem
from qerl_jax.generation.engine import Engine
from qerl_jax.generation.sampling_params import EngineLimits
from qerl_jax.rewards.scoring import RewardError
from qerl_jax.system.checked import ConfigError
from qerl_jax.tracking import logger
from qerl_jax.training import trainer
from tests.faults import harness

ROOT = pathlib.Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"
GIVEN = (["3+4"], ["<think>3+4=7</think><answer>7</answer>"])  # a prompt and a completion
ROWS = [{"prompt": f"{a}+{b}", "answer": a + b} for a in range(6) for b in range(6)]
SMALL = {
    "max_steps": 1,
    "seed": 0,
    "model": {"model_name_or_path": "qerl-tiny", "dtype": "float32"},
    "lora": {"rank": 8, "alpha": 8.0},
    "data": {"max_prompt_length": 48},
    "rollout": {"num_generations": 4, "max_completion_length": 32},
    "optim": {"learning_rate": 3e-3},
}


def small(folder, **changed):
    return SMALL | {"output_dir": str(folder)} | changed


def digits(completions, **_):
    """Returns the share of digits in a text."""
    return [sum(c.isdigit() for c in text) / 40 for text in completions]


@pytest.fixture(scope="module")
def policy():
    return qerl_jax.load(dtype="float32")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Trains two steps with own rows and an own reward."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    return qerl_jax.train(small(folder, max_steps=2), ROWS, digits, quiet=True)


def test_importing_the_package_its_configs_and_the_command_line_loads_no_jax():
    code = (
        "import sys, qerl_jax\n"
        "qerl_jax.RunConfig, qerl_jax.SamplingParams, qerl_jax.__version__, dir(qerl_jax)\n"
        "import qerl_jax.cli.train\n"
        "assert not {'jax', 'pandas', 'matplotlib', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@pytest.mark.parametrize("package", [qerl_jax, rl])
def test_every_name_that_is_listed_can_be_loaded_and_no_module_bears_it(package):
    assert dir(package) == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'trane'"):
        package.trane  # noqa: B018
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert modules & set(package.__all__) <= {"rl"}


@pytest.mark.parametrize("package", [qerl_jax, rl])
def test_editors_are_told_the_same_names_as_python(package):
    tree = ast.parse(pathlib.Path(package.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    told = {(node.module, alias.name) for node in imports for alias in node.names}
    for module, name in told - {("qerl_jax", "rl")}:
        assert getattr(package, name) is getattr(importlib.import_module(module), name)
    whole = [node for node in block.body if isinstance(node, ast.Import)]
    names = {name for _, name in told} | {alias.asname for node in whole for alias in node.names}
    assert names == set(package.__all__) - {"__version__"}


def test_a_path_a_table_and_a_config_mean_the_same_run(tmp_path):
    by_path = settings.run_config(QUICKSTART)
    assert by_path == settings.run_config(by_path) == settings.run_config(str(QUICKSTART))
    sections = {name: value for name, value in vars(by_path).items() if value is not None}
    assert settings.run_config(sections) == by_path


def test_overrides_change_fields_within_a_section_and_none_removes_one():
    before = settings.run_config(QUICKSTART)
    changes = {"num_train_epochs": 2, "optim": {"learning_rate": 1e-4}, "noise": None}
    cfg = settings.run_config(QUICKSTART, changes)
    assert (cfg.max_steps, cfg.num_train_epochs, cfg.noise) == (None, 2.0, None)
    assert cfg.optim == dataclasses.replace(before.optim, learning_rate=1e-4)
    four = qerl_jax.LoraConfig(4)
    assert settings.run_config(cfg, {"lora": four}).lora == four
    # They reach into tables of sections.
    started = settings.run_config(QUICKSTART, {"grpo": {"reference": {"beta": 0.1}, "sapo": None}})
    cfg = settings.run_config(started, {"grpo": {"reference": {"policy": "base"}}})
    assert cfg.grpo.reference == config.ReferenceConfig(0.1, "base")
    mismatch = qerl_jax.MismatchConfig(qerl_jax.CorrectionConfig(clip_max=2.0))
    options = {"old_logprobs": "recompute", "mismatch": mismatch}
    assert settings.run_config(cfg, {"grpo": options}).grpo.correction.clip_max == 2
    assert settings.run_config(cfg, {"grpo": {"reference": None}}).grpo.reference is None


def test_a_config_need_not_say_what_the_arguments_say(tmp_path):
    cfg = settings.run_config(small(tmp_path), has_rows=True, functions=[digits, "format_reward"])
    assert cfg.data.dataset == "rows"
    assert cfg.rewards.functions == (f"{__name__}:digits", "format_reward")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": 3}, "config: got 3; must be a RunConfig, a table"),
        ({"config": SMALL | {"output_dir": "x", "optim": 3}}, "optim: got 3; must be a section"),
        ({"grpo": {"beta": 0.1}}, "grpo.beta: is now grpo.reference.beta"),
        ({"grpo": {"dynamic_sampling": True}}, "grpo.dynamic_sampling: is now a section"),
        ({"optim": {"learning_rat": 1.0}}, "optim.learning_rat: unknown field; [optim] has"),
        ({"optim": {"learning_rate": "1e-4"}}, "optim.learning_rate: got '1e-4'; must be of type"),
        ({"max_steps": 1, "num_train_epochs": 2}, "max_steps, num_train_epochs: got (1, 2.0)"),
        ({"num_train_epochs": 2, "max_steps": 1}, "max_steps, num_train_epochs: got (1, 2.0)"),
        ({"max_stepz": 1}, "max_stepz: unknown field; the top level has"),
        ({"dataset": "gsm8k"}, "dataset: got 'gsm8k'; must be a list of dicts"),
        ({"dataset": {"train": ROWS}}, "or a datasets.Dataset (or IterableDataset) of one split"),
        ({"dataset": ["1+1"]}, "dataset: got ['1+1']; must be a list of dicts"),
        ({"dataset": []}, "dataset: got []; must have at least one row"),
        ({"dataset": [{"text": "1"}]}, "dataset: columns: got ['text']; must have a column 'prompt'"),
        ({"dataset": [*ROWS, {"answer": 1}]}, "dataset, row 36, column 'prompt': must be text or"),
        (
            {"dataset": [*ROWS, {"prompt": [{"role": "user", "content": "1"}]}]},
            "dataset, row 36, column 'prompt': all prompts must be texts, or all chats",
        ),
        ({"reward_funcs": 3}, "reward_funcs: got 3; must be a function, or a list"),
        ({"reward_funcs": [3]}, "reward_funcs[0]: got 3; must be a function, a name"),
        ({"reward_funcs": []}, "reward_funcs: got []; must be at least one"),
        ({"reward_funcs": ["no_such"]}, "reward_funcs: got 'no_such'; must be one of"),
        ({"callbacks": [3]}, "callbacks[0]: got 3; must be a function"),
        ({"eval": {}}, "eval.dataset: got None; must name the set to evaluate on"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_by_its_name_and_nothing_is_written(arguments, message, tmp_path):
    given = {"config": small(tmp_path / "run"), "dataset": ROWS, "reward_funcs": digits}
    with pytest.raises(ValueError, match=re.escape(message)):
        qerl_jax.train(**given | arguments)
    assert not (tmp_path / "run").exists()


def test_a_function_in_a_config_is_refused_by_the_field_and_the_rule():
    with pytest.raises(ConfigError, match="rewards.functions: got .*digits.*; must be a list of n"):
        qerl_jax.RewardConfig((digits,))
    with pytest.raises(ConfigError, match="optim.learning_rate: got '1e-4'; must be positive"):
        qerl_jax.OptimConfig(learning_rate="1e-4")


@pytest.mark.slow
def test_rewards_get_completions_in_the_form_of_the_prompts(tmp_path):
    seen = []

    def texts(prompts, completions, answer, **_):
        seen.append((prompts, completions, answer))
        return [0.0] * len(completions)

    async def slow_texts(completions, **_):
        assert all(isinstance(each, str) for each in completions)
        return [0.0] * len(completions)

    def chats(prompts, completions, **_):
        assert all(prompt[-1]["role"] == "user" for prompt in prompts)
        assert all(each[0]["role"] == "assistant" for each in completions)
        return [0.0] * len(completions)

    trained = qerl_jax.train(small(tmp_path / "texts"), ROWS, [texts, slow_texts], quiet=True)
    for prompts, completions, answers in seen:
        assert all(isinstance(each, str) for each in (*prompts, *completions))
        assert all(sum(map(int, p.split("+"))) == a for p, a in zip(prompts, answers, strict=True))
    row = logger.read_metrics(trained.folder)[0]
    assert {"rewards/texts/mean", "rewards/slow_texts/mean"} <= row.keys()
    # The model sees the text as a user's message.
    logged = next((trained.folder / "completions").iterdir()).read_text()
    assert '"role": "user"' in logged

    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    with pytest.raises(RewardError, match="'texts'|AssertionError"):
        qerl_jax.train(small(tmp_path / "chats"), rows, slow_texts, quiet=True)
    qerl_jax.train(small(tmp_path / "chats"), rows, chats, quiet=True)


@pytest.mark.slow
def test_a_data_set_trains_as_the_list_of_its_rows_does(tmp_path, run):
    rows = importlib.import_module("datasets").Dataset.from_list(ROWS)
    other = qerl_jax.train(small(tmp_path / "a", max_steps=2), rows, digits, quiet=True)
    assert list(other.metrics["reward"]) == list(run.metrics["reward"])


@pytest.mark.slow
def test_a_problem_is_taken_as_it_is(tmp_path):
    seen = []

    def reward(prompts, completions, **_):
        seen.extend(prompts)
        return [0.0] * len(completions)

    problems = [Problem(f"{a}+1=", {}) for a in range(8)]
    trained = qerl_jax.train(small(tmp_path / "run"), problems, reward, quiet=True)
    assert set(seen) <= {problem.prompt for problem in problems}
    assert '"prompt": "' in next((trained.folder / "completions").iterdir()).read_text()
    # The policy is asked in the same way after training.
    held = trained.policy(max_concurrent=1)
    (output,) = held.generate("3+1=", max_tokens=1)
    assert output.prompt_token_ids.tolist() == held.tokenizer.encode(["3+1="])[0]


def test_a_run_that_has_ended_loads_nothing_unless_its_adapter_is_missing(
    run, tmp_path, monkeypatch, capsys
):
    def load(checked, **_):
        raise InterruptedError("load")

    monkeypatch.setattr(trainer, "load", load)
    folder = harness.copy_of(run.folder, tmp_path / "run")
    again = lambda: qerl_jax.train(small(folder, max_steps=2), ROWS, digits)
    assert again() == qerl_jax.load_run(folder)
    assert "nothing left to do: the run in" in capsys.readouterr().out
    assert again().metrics.equals(run.metrics) and again().has_learned
    for path in (folder / "checkpoints" / "ended", folder / "adapter"):
        path.rename(tmp_path / "aside")
        with pytest.raises(InterruptedError, match="load"):
            again()
        (tmp_path / "aside").rename(path)
    # A longer run has an end of its own.
    with pytest.raises(InterruptedError, match="load"):
        qerl_jax.train(small(folder, max_steps=3), ROWS, digits)
    (folder / "checkpoints" / "ended").write_text("1\n")
    with pytest.raises(InterruptedError, match="load"):
        again()


@pytest.mark.slow
def test_a_callback_sees_every_step_and_ends_the_run_with_false_or_an_error(tmp_path, run):
    def fail(step, metrics):
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        qerl_jax.train(small(tmp_path / "failed"), ROWS, digits, fail, quiet=True)
    seen = []
    stop = lambda step, metrics: step < 1
    note = lambda step, metrics: seen.append((step, metrics["reward"]))
    cfg = small(tmp_path / "run", max_steps=2)
    stopped = qerl_jax.train(cfg, ROWS, digits, [stop, note], quiet=True)
    assert [step for step, _ in seen] == [1]
    assert stopped.policy(max_concurrent=2).source.adapter == stopped.folder / "adapter"

    # A later call goes on as if nothing had been.
    whole = qerl_jax.train(cfg, ROWS, digits, note, quiet=True)
    assert seen == list(run.metrics["reward"].items())
    model = run.policy().model
    trees = [peft.import_adapter(each.folder / "adapter", model) for each in (whole, run)]
    jax.tree.map(np.testing.assert_array_equal, *trees)


@pytest.mark.parametrize(
    "answers, goes_on",
    [((False, None), False), ((np.bool_(False),), False), ((None, np.bool_(True), 0), True)],
)
def test_false_ends_a_run_be_it_pythons_or_numpys(answers, goes_on, tmp_path, monkeypatch):
    told = {}
    monkeypatch.setattr(runs.trainer, "train", lambda cfg, **given: told.update(given))
    callbacks = [lambda step, metrics, each=each: each for each in answers]
    qerl_jax.train(small(tmp_path / "run"), ROWS, digits, callbacks)
    assert told["on_step"](1, {"reward": 0.5}) == goes_on


def test_a_run_gives_its_metrics_as_a_table_and_its_curves_as_a_figure(run):
    assert list(run.metrics.index) == [1, 2] and run.metrics.index.name == "step"
    rows = logger.read_metrics(run.folder)
    assert list(run.metrics["loss"]) == [row["loss"] for row in rows]
    assert isinstance(run.plot(), Figure)
    assert run.summary().startswith("reward ")
    assert run.config == settings.run_config(run.folder / "config.toml")
    assert qerl_jax.load_run(str(run.folder)) == run
    with pytest.raises(FileNotFoundError, match="no config.toml in"):
        qerl_jax.load_run(run.folder / "completions")


@pytest.mark.slow
def test_the_policy_of_a_run_holds_its_adapter_under_every_name(run):
    named = [run.policy(), qerl_jax.load(run.folder), qerl_jax.load(run.folder / "adapter")]
    texts = [each.generate("3+4", temperature=0.0, max_tokens=20)[0].text for each in named]
    assert len(set(texts)) == 1
    assert str(run.folder / "adapter") in repr(named[0])
    assert np.abs(named[0].variables["params"]["layers"]["qkv"]["q_proj"]["b"]).max() > 0


@pytest.mark.slow
def test_a_run_that_has_not_ended_is_asked_by_its_newest_checkpoint(run, tmp_path, capsys):
    stopped = tmp_path / "stopped"
    shutil.copytree(run.folder, stopped)
    shutil.rmtree(stopped / "adapter")
    held = qerl_jax.load_run(stopped).policy()
    assert "has not ended: its checkpoint of step 2 is taken" in capsys.readouterr().err
    ask = {"temperature": 0.0, "max_tokens": 20}
    assert held.generate("3+4", **ask)[0].text == run.policy().generate("3+4", **ask)[0].text
    params = held.variables["params"]
    jax.tree.map(np.testing.assert_array_equal, params, run.policy().variables["params"])
    assert main.main(["generate", "3+4", "--adapter", str(stopped), "--max-tokens", "1"]) == 0
    sets = ["arithmetic", "--num-problems", "2", "--samples", "1", "--max-tokens", "1"]
    assert main.main(["eval", *sets, "--adapter", str(stopped)]) == 0
    assert (stopped / "eval" / "checkpoint-2" / "arithmetic" / "summary.json").is_file()

    shutil.rmtree(stopped / "checkpoints")
    with pytest.raises(FileNotFoundError, match="this run has saved nothing yet"):
        qerl_jax.load(stopped)


@pytest.mark.slow
def test_a_run_that_goes_on_after_its_end_is_asked_by_its_newest_checkpoint(run, tmp_path):
    longer = tmp_path / "longer"
    shutil.copytree(run.folder, longer)

    @functools.wraps(digits)
    def judged(completions, **_):
        if logger.read_metrics(longer)[-1]["step"] == 3:
            raise ValueError("stopped")
        return digits(completions)

    assert policies.find(longer).step is None
    with pytest.raises(RewardError, match="stopped"):
        qerl_jax.train(small(longer, max_steps=4), ROWS, judged, quiet=True)
    assert policies.find(longer).name == "checkpoint-3"
    assert qerl_jax.export(longer, tmp_path / "out")["step"] == 3
    # An earlier end's adapter can still be asked by its own name, but it is not the run's newest.
    old = qerl_jax.load(longer / "adapter")
    with pytest.raises(ConfigError, match="must come from a run as it was trained"):
        qerl_jax.export(old, tmp_path / "other")


def test_a_whole_model_is_asked_only_if_the_run_has_ended_and_does_not_go_on(tmp_path, monkeypatch):
    config.write_run(tmp_path, settings.run_config("gsm8k_qwen2.5_3b_full", {}))
    (tmp_path / "checkpoints" / "1").mkdir(parents=True)
    with pytest.raises(FileNotFoundError, match="has no model: .* when it has ended"):
        policies.find(tmp_path)
    (tmp_path / "model").mkdir()
    assert sources.find_policy(None, tmp_path).model.model_name_or_path == str(tmp_path / "model")
    monkeypatch.setattr(sources, "_goes_on", lambda files: True)
    for ask in (policies.find, functools.partial(export.export, to="nvfp4", out=tmp_path / "new")):
        with pytest.raises(FileNotFoundError, match="goes on since it wrote .* when it has ended"):
            ask(tmp_path)


@pytest.mark.parametrize(("dataset", "is_chat"), [("bigmath", True), ("gsm8k", False)])
def test_a_text_is_asked_as_in_training_also_if_the_set_has_a_system_prompt(
    dataset, is_chat, tmp_path
):
    data = {"dataset": dataset, "apply_chat_template": False}
    cfg = settings.run_config(QUICKSTART, {"data": data, "eval": None})
    config.write_run(tmp_path, cfg)
    source = sources.find_policy(None, tmp_path, base=True)  # of a run that has saved nothing
    assert (source.apply_chat_template, source.adapter, source.name) == (is_chat, None, "base")


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_samplers_own(run, temperature):
    adapted = run.policy()
    prompts = ["(5-3)*3", [{"role": "user", "content": "12+30"}], "7"]
    params = qerl_jax.SamplingParams(n=3, max_tokens=24, temperature=temperature, top_p=0.9)
    outputs = adapted.generate(prompts, params)
    assert [output.prompt for output in outputs] == prompts
    pairs = [(output.prompt, each) for output in outputs for each in output.outputs]
    texts, ids = [text for text, _ in pairs], [each.token_ids for _, each in pairs]
    scored = adapted.logprobs(texts, ids, temperature=temperature)
    for logprobs, (_, each) in zip(scored, pairs, strict=True):
        assert logprobs.dtype == np.float32
        np.testing.assert_allclose(logprobs, each.logprobs, atol=1e-4)


@pytest.mark.slow
def test_log_probabilities_of_many_rows_are_those_of_each(policy, monkeypatch):
    prompts, texts = [row["prompt"] for row in ROWS[:7]], [str(9**n) for n in range(7)]
    each = [policy.logprobs(*pair)[0] for pair in zip(prompts, texts, strict=True)]
    monkeypatch.setattr(policies, "_SCORED_TOKENS", 3 * 64)  # three rows at a time
    for one, other in zip(policy.logprobs(prompts, texts), each, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)
    ids = policy.tokenizer.encode(texts)
    assert [len(one) for one in each] == [len(one) for one in ids]
    assert policy.logprobs([], []) == []
    assert policy.logprobs("1+1", [[]])[0].shape == (0,)


@pytest.mark.slow
def test_without_the_adapter_log_probabilities_are_those_of_the_base(run, policy):
    (base,), (trained,) = policy.logprobs(*GIVEN), run.policy().logprobs(*GIVEN)
    (switched_off,) = run.policy().logprobs(*GIVEN, adapter=False)
    np.testing.assert_allclose(switched_off, base, atol=1e-5)
    assert np.abs(trained - base).max() > 1e-4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.generate(3), "prompts: got int; must be texts, or chats"),
        (lambda p: p.generate(["1", 3]), "prompts[1]: got 3; must be texts, or chats"),
        (lambda p: p.generate("1", 3), "sampling_params: got 3; must be SamplingParams"),
        (lambda p: p.generate("1", max_token=3), "max_token: unknown option; SamplingParams has"),
        (lambda p: p.generate("1", temperature="hot"), "temperature: got 'hot'; must not be"),
        (lambda p: p.logprobs(["1"], []), "completions: got 0; must be one for each of 1 prompts"),
        (lambda p: p.logprobs(["1"], [0.5]), "completions[0]: got 0.5; must be a text or the ids"),
        (lambda p: p.logprobs(["1"], [[9999]]), "completions[0]: got [9999]; must have ids in"),
        (lambda p: p.logprobs(["1"], ["1" * 5000]), "completions: got 5000; with a prompt of"),
        (lambda p: p.with_params({}), "params: got <class 'dict'>; needs a policy with an adapter"),
        (lambda p: p.save_pretrained("x"), "weights: got 'nvfp4'; is packed, and has no adapter"),
        (lambda p: qerl_jax.load(3), "name: got 3; must be a folder or a hub name"),
        (lambda p: qerl_jax.load(seed=2**32), "seed: got 4294967296; must be an integer in [0, 2**32"),
        (lambda p: qerl_jax.quantize("qerl-tiny", "x", seed=-1), "seed: got -1; must be an integer"),
        (lambda p: qerl_jax.load(lora=8), "lora: got 8; must be a LoraConfig"),
        (lambda p: qerl_jax.load(max_concurrent=0), "max_concurrent: got 0; must be at least 1"),
        (lambda p: qerl_jax.load(max_concurrent="4"), "max_concurrent: got '4'; must be at least 1"),
        (lambda p: qerl_jax.load(max_concurrent=1.5), "max_concurrent: got 1.5; must be at least 1"),
        (lambda p: qerl_jax.load(kv_cache_tokens=9.5), "kv_cache_tokens: got 9.5; must be at least"),
        (lambda p: qerl_jax.evaluate(p), 'sets: got none; give at least one, such as "gsm8k"'),
        (lambda p: qerl_jax.evaluate(p, "gsm8k", drafts=True), "drafts: got True; must be"),
        (lambda p: qerl_jax.evaluate(p, ROWS), "must be the name of a set, or a file"),
        (lambda p: qerl_jax.export(p, "x"), "must come from a run as it was trained"),
        (lambda p: qerl_jax.quantize("qerl-tiny", "x", method="hqq"), "method: got 'hqq'; must"),
        (lambda p: qerl_jax.plan(QUICKSTART, "big"), "device-memory: got 'big'; must be a size"),
        (lambda p: qerl_jax.export("x", "y", to="gguf"), "to: got 'gguf'; must be one of 'peft'"),
        (lambda p: qerl_jax.export("x", "y", base="fp16"), "base: got 'fp16'; must be one of None"),
        (lambda p: qerl_jax.report(["x", "y"]), "runs[0]: got ['x', 'y']; must be a run, or its"),
        (lambda p: qerl_jax.report(), "runs: got (); must be at least one"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_call_is_said_by_its_name(call, message, policy):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(policy)


@pytest.mark.slow
def test_a_device_that_reports_no_memory_samples_64_completions_or_as_a_limit_says(policy):
    assert policy._sampler(qerl_jax.SamplingParams()).max_concurrent == 64
    for limits in (EngineLimits(96), EngineLimits(kv_cache_tokens=4096)):
        assert limits.on_this_device() == limits
    few = dataclasses.replace(policy, limits=EngineLimits(np.int64(2)))  # a number of numpy will do
    assert len(few.generate(["1+1", "2+2", "3+3"], max_tokens=1)) == 3


@pytest.mark.slow
def test_what_is_saved_is_the_policy_when_it_is_loaded_again(run, tmp_path):
    trained = run.policy()
    louder = trained.with_params(jax.tree.map(lambda x: 2 * x, trained.variables["params"]))
    again = qerl_jax.load(adapter=louder.save_pretrained(tmp_path / "louder"), dtype="float32")
    np.testing.assert_array_equal(louder.logprobs(*GIVEN)[0], again.logprobs(*GIVEN)[0])
    assert louder.unsaved and "unsaved" in repr(louder) and not again.unsaved
    # A dense base is saved as a whole model.
    dense = qerl_jax.load("qerl-tiny", weights="float32", dtype="float32")
    folder = dense.save_pretrained(tmp_path / "dense")
    again = qerl_jax.load(folder, weights="float32", dtype="float32")
    np.testing.assert_array_equal(dense.logprobs(*GIVEN)[0], again.logprobs(*GIVEN)[0])


@pytest.mark.slow
def test_loading_and_evaluating_tell_what_is_read_unless_they_are_to_be_quiet(
    policy, tmp_path, capsys
):
    qerl_jax.load(dtype="float32", quiet=True)
    assert capsys.readouterr() == ("", "")
    fresh = qerl_jax.load(dtype="float32", lora=qerl_jax.LoraConfig(rank=4))
    assert capsys.readouterr() == ("", "base: qerl-tiny, held in nvfp4\n")
    # A fresh adapter changes nothing yet.
    np.testing.assert_allclose(fresh.logprobs(*GIVEN)[0], policy.logprobs(*GIVEN)[0], atol=1e-5)
    assert fresh.unsaved and fresh.model.lora.rank == 4
    few = {"num_problems": 1, "samples": 1, "max_tokens": 2}
    for quiet, line in ((True, ""), (False, "base: qerl-tiny, held in nvfp4\n")):
        folder = tmp_path / str(quiet)
        qerl_jax.evaluate("qerl-tiny", "arithmetic", output_dir=folder, quiet=quiet, **few)
        assert capsys.readouterr().err == line


@pytest.mark.slow
def test_an_evaluation_makes_drafts_as_it_is_told_and_takes_numbers_of_numpy(
    policy, tmp_path, monkeypatch
):
    told, built = [], Engine.of.__func__
    of = lambda *a, **options: told.append(a[3].drafts) or built(*a, **options)
    monkeypatch.setattr(Engine, "of", classmethod(of))
    two = {"samples": np.int64(1), "max_tokens": np.int32(2), "num_problems": np.int64(2)}
    two |= {"seed": np.int64(0), "max_concurrent": np.int64(2), "temperature": np.float32(0.5)}
    for drafts in ("auto", "off"):
        options = {"drafts": drafts, "output_dir": tmp_path / drafts, "quiet": True}
        found = qerl_jax.evaluate(policy, "arithmetic", **two, **options)["arithmetic"]
        assert (found["problems"], found["samples"]) == (2, 1)
    assert told == ["auto", "off"]


def test_one_pattern_of_linears_to_keep_may_stand_alone(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(jobs.quantizer, "quantize", lambda *given: told.append(given[2].keep))
    for keep in ("*.down_proj", ["*.down_proj"]):
        qerl_jax.quantize("qerl-tiny", tmp_path / "x", keep=keep, quiet=True)
    assert told == 2 * [("*.down_proj",)]


@pytest.mark.slow
def test_a_policy_is_evaluated_as_its_run_is_and_an_unsaved_one_leaves_no_file(
    run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    options = {"samples": 1, "max_tokens": 32, "num_problems": 8, "protocol": "paper"}
    by_policy = qerl_jax.evaluate(run.policy(), "arithmetic", **options, output_dir="a", quiet=True)
    assert capsys.readouterr().out == ""
    assert by_policy == qerl_jax.evaluate(run, "arithmetic", **options, output_dir="b")
    assert "8/8 completions" in capsys.readouterr().out
    params = run.policy().variables["params"]
    unsaved = run.policy().with_params(params)
    assert by_policy == qerl_jax.evaluate(unsaved, "arithmetic", **options, quiet=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    with pytest.raises(ConfigError, match="output_dir: got 'c'; must be absent"):
        qerl_jax.evaluate(unsaved, "arithmetic", **options, output_dir="c")


@pytest.mark.slow
def test_a_policy_of_a_run_is_exported_as_the_run_is(run, tmp_path):
    first = qerl_jax.export(run.policy(), tmp_path / "a")
    last = qerl_jax.export(str(run.folder), tmp_path / "c", to="peft")
    assert first == run.export(tmp_path / "b") == last and first["to"] == "peft"


def test_a_plan_says_whether_the_run_fits():
    # Without tokens of a micro-batch the plan would choose fewer of them.
    said = {"optim": {"max_tokens_per_microbatch": 4096}}
    plan = qerl_jax.plan(QUICKSTART, "1GB", max_steps=10, **said)
    assert plan.fits and str(plan).startswith("always ")
    needed = plan.size("always", "update")
    assert plan.peak >= needed > 1e6
    small = qerl_jax.plan(QUICKSTART, needed - 1, **said)
    assert small.fits is False
    with pytest.raises(ConfigError, match="memory: this run needs"):
        small.require()
    assert qerl_jax.plan(QUICKSTART).fits is None  # a CPU does not say how much it has
