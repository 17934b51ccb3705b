"""Tests evaluations: questions and verdicts, files that survive a kill, and comparisons."""

import dataclasses
import functools
import itertools
import json
import pathlib
import shutil
import threading
import types
from concurrent.futures import CancelledError, Future

import jax
import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.checkpoint import peft
from qerl_jax.checkpoint.policy import PolicySource, find_policy, load_base
from qerl_jax.cli import main
from qerl_jax.config import EvalConfig, LoraConfig, ModelConfig
from qerl_jax.data import answers, datasets
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.evaluation import benchmark, evaluator, protocols
from qerl_jax.evaluation.comparison import compare
from qerl_jax.evaluation.options import EvalOptions
from qerl_jax.evaluation.results import Results
from qerl_jax.generation.sampler import Completion, Sampler
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.scheduler import RowTokens
from qerl_jax.model import fused_decode
from qerl_jax.model.transformer import trainable
from qerl_jax.rewards import scoring
from qerl_jax.system.files import Progress

ROOT = pathlib.Path(__file__).parents[3]
GSM8K = ROOT / "tests" / "golden" / "gsm8k"
TINY = ModelConfig("qerl-tiny", dtype="float32")
BASE = PolicySource(TINY)


def arithmetic(problems=6):
    return benchmark.source_of("arithmetic", BASE, EvalOptions(num_problems=problems))


def sums(reward="accuracy_reward", **changes):
    """Returns four answers to each sum."""
    fields = {"n": 4, "temperature": 1.0, "top_p": 1.0, "max_tokens": 44} | changes
    return protocols.Protocol(reward, SamplingParams(**fields))


@functools.cache
def base():
    return benchmark.load_policy(BASE, 0)


def run(folder, policy=BASE, problems=6, **changes):
    said, sets = [], [(arithmetic(problems), sums(**changes))]
    options = {"max_concurrent": 2, "policy": base() if policy is BASE else None}
    summaries = benchmark.run(policy, sets, folder, log=said.append, **options)
    return summaries["arithmetic"], said


def records(folder, name="arithmetic"):
    return list(map(json.loads, (folder / name / "problems.jsonl").read_text().splitlines()))


@pytest.fixture
def unmeasured(monkeypatch):
    """Leaves out sampling; returns a policy for it, and a list of the sets that would be sampled."""
    sets = []
    monkeypatch.setattr(benchmark, "_measure", lambda _, together, *__: sets.extend(together))
    monkeypatch.setattr(benchmark, "summarize", lambda values: {})
    monkeypatch.setattr(fused_decode, "slow_because", lambda *_: None)
    return types.SimpleNamespace(model=types.SimpleNamespace(own_part=None)), sets


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Returns the folder of an evaluation of the base, its summary, and what it said."""
    folder = tmp_path_factory.mktemp("finished")
    return folder, *run(folder)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    """Makes a PEFT adapter that changes nothing: its B is zero."""
    folder = tmp_path_factory.mktemp("peft") / "adapter"
    model, frozen, _ = load_base(TINY, LoraConfig(4, 4.0))
    params, _ = trainable(model, frozen, jax.random.key(0))
    peft.export_adapter(folder, params, model.lora, "qerl-tiny")
    return folder


def test_slow_sampling_is_told_once_for_all_sets(unmeasured, tmp_path, monkeypatch):
    monkeypatch.setattr(fused_decode, "slow_because", lambda model, rows: f"slow: {rows} rows")
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "What is 1+2?", "answer": "3"}\n')
    sets = [(arithmetic(1), sums()), (benchmark.source_of(str(other), BASE), sums())]
    said = []
    assert len(benchmark.run(BASE, sets, tmp_path, max_concurrent=2, log=said.append)) == 2
    assert said == ["slow: 2 rows"]


@pytest.mark.parametrize("name", protocols.SPLITS)
def test_protocols_are_those_of_paper_and_verl(name):
    paper, verl = protocols.paper(name), protocols.verl(name)
    ours, theirs = paper.sampling, verl.sampling
    assert (ours.temperature, ours.top_p, ours.max_tokens) == (0.6, 0.95, 4096)
    assert paper.reward == "math_verify_reward" and paper.system_prompt == "think-answer"
    small = name in ("aime24", "aime25", "amc23")
    assert ours.n == theirs.n * (1 if small else 4)
    assert (theirs.temperature, theirs.top_p) == ((1.0, 0.7) if small else (0.0, 1.0))
    assert ("####" in verl.prompt_template) == (verl.reward == "verl_gsm8k_reward")
    assert name in datasets.SETS


@pytest.mark.parametrize(
    ("name", "gold", "right", "wrong"),
    [
        # In the last 300 characters, digit by digit.
        ("gsm8k", "1,080", "so\n#### 1,080", "#### 1080.0"),
        ("gsm8k", "18", "#### 18" + 293 * " ", "#### 18" + 294 * " "),
        ("math500", r"\frac{1}{2}", r"\boxed{0.5}" + 400 * " ", r"Answer: \frac{1}{2}"),
        ("aime24", "025", "Answer: 25", r"So it is \boxed{25}."),
        ("aime25", "25", "Answer: $25$", "Answer: 25\n" + 300 * "."),
        ("amc23", "27.0", "Answer: 27", "Answer: 27.0"),
    ],
)
def test_verls_protocol_asks_and_scores_as_verl_does(name, gold, right, wrong):
    protocol = protocols.verl(name)
    ((_, reward),) = scoring.resolve([protocol.reward])
    assert list(reward(completions=[right, wrong], answer=[gold, gold])) == [1, 0]
    form = {"gsm8k": "####", "math500": "\\boxed{}"}.get(name, 'after "Answer:"')
    assert form in protocol.prompt_template and protocol.system_prompt == ""
    # Rows that carry DAPO's instruction are asked without another.
    protocol = protocols.verl("dapo_math")
    assert (protocol.reward, protocol.prompt_template) == ("dapo_reward", None)


def test_every_record_says_what_was_answered_and_how_it_was_judged(finished):
    folder, summary, said = finished
    assert said[-1].startswith("arithmetic: 24/24 completions, 0.")
    assert said[-1].endswith("right so far")
    rows = records(folder)
    assert [row["problem"] for row in rows] == list(range(6))
    for row in rows:
        columns = (row[name] for name in ("right", "answers", "completions"))
        for right, answer, text in zip(*columns, strict=True):
            assert (f"<answer>{answer}</answer>" in text) == (answer is not None)
            assert right == (answer == row["gold"])
        assert len(row["votes"]) == 4 and (None in row["votes"]) == (None in row["answers"])
    right = np.array([row["right"] for row in rows])
    assert 0 < right.sum() < right.size
    mean, pass_2, pass_4, maj_2, maj_4 = summary["estimates"]
    assert [e["name"] for e in summary["estimates"]] == "mean@4 pass@2 pass@4 maj@2 maj@4".split()
    assert mean["value"] == right.mean() and pass_4["value"] == right.any(axis=1).mean()
    assert mean["over_problems"][0] < mean["value"] < mean["over_problems"][1]
    assert mean["over_samples"] and pass_2["over_samples"] and not pass_4["over_samples"]
    assert json.loads((folder / "arithmetic" / "summary.json").read_text()) == summary


@pytest.mark.slow
@pytest.mark.process
def test_votes_of_a_mathematical_reward_are_its_own(tmp_path, monkeypatch):
    halves = itertools.cycle(["1/2", "0.5"])
    monkeypatch.setattr(answers, "stated", lambda text: next(halves))
    run(tmp_path, problems=2, reward="math_verify_reward")
    for row in records(tmp_path):
        assert row["answers"] == ["1/2", "0.5"] * 2 and row["votes"] == ["1/2"] * 4


def test_a_reward_that_compares_strings_votes_by_its_strings():
    given = [["18.", "18", "18.0", None]]
    votes = lambda name, texts: evaluator._votes((name, lambda **_: []), texts)
    assert votes("verl_gsm8k_reward", given) == given
    assert votes("gsm8k_hash_reward", given) == [["18", "18", "18", None]]
    assert votes("verl_math_reward", [["1/2", r"\dfrac12"]]) == [2 * [r"\frac{1}{2}"]]


@pytest.mark.slow
def test_an_evaluation_that_failed_before_its_first_answer_may_be_asked_otherwise(tmp_path):
    with pytest.raises(ValueError, match="max_tokens"):
        run(tmp_path, max_tokens=10**6)
    assert (tmp_path / "arithmetic" / "settings.json").is_file()
    assert run(tmp_path)[1]


def files(folder):
    """Returns the bytes of the files of a set."""
    return {path.name: path.read_bytes() for path in (folder / "arithmetic").iterdir()}


@pytest.fixture
def queues(monkeypatch):
    """Returns the number of rows of each call of the sampler."""
    counts, ask = [], Sampler.ask

    def counted(self, variables, problems, keys, **options):
        counts.append(sum(map(len, keys)))
        return ask(self, variables, problems, keys, **options)

    monkeypatch.setattr(Sampler, "ask", counted)
    return counts


@pytest.mark.slow
def test_all_sets_and_samples_are_one_queue_whose_rows_do_not_depend_on_each_other(
    finished, tmp_path, queues
):
    other = tmp_path / "other.jsonl"
    other.write_text('{"question": "What is 1+2?", "answer": "3"}\n' * 3)
    sets = [(benchmark.source_of(str(other), BASE), sums(n=2)), (arithmetic(), sums())]
    out, said = tmp_path / "out", []
    benchmark.run(BASE, sets, out, max_concurrent=5, log=said.append, policy=base())
    assert queues == [3 * 2 + 6 * 4]
    assert files(out) == files(finished[0])  # alone, and two rows at a time
    assert [len(row["right"]) for row in records(out, "other")] == [2, 2, 2]
    assert {line.split(",")[0] for line in said} >= {
        "arithmetic: 24/24 completions",
        "other: 6/6 completions",
    }


def test_sets_that_are_sampled_differently_have_queues_of_their_own():
    def of(name, date="2026-03-01", **changes):
        results = types.SimpleNamespace(identity={"chat_template_date": date})
        return benchmark._Set(name, sums(**changes), (), None, None, results)

    sets = [of("a"), of("b", temperature=0.5), of("c", n=2), of("d", max_tokens=4)]
    names = [[o.name for o in queue] for queue in benchmark._queues([*sets, of("e", "2026-03-09")])]
    assert names == [["a", "c"], ["b"], ["d"], ["e"]]


def test_results_that_are_continued_later_keep_the_date_of_rows_and_of_problems(tmp_path):
    path = tmp_path / "set" / "problems.jsonl"

    def results(day):
        date = {"chat_template_date": f"2026-03-0{day}"}
        return Results(path, {"seed": 0}, frozen=date, settings=path.with_name("settings.json"))

    with results(1) as first:
        first.rows.add([{"problem": 0}])
    with results(2) as second:
        assert second.identity == {"seed": 0, "chat_template_date": "2026-03-01"}
        second.finish([{}])
    with results(3) as third:
        assert third.identity == second.identity and third.of_problems.values == [{}]


@pytest.mark.slow
def test_an_evaluation_that_was_killed_goes_on_with_the_rows_that_had_not_ended(
    finished, tmp_path, queues, monkeypatch
):
    folder, whole, _ = finished
    path = tmp_path / "arithmetic" / "problems.jsonl.partial"
    lines = lambda: path.read_text().splitlines(keepends=True)
    progress_add = Progress.add
    for count in (7, 24):  # rows in the file; the last time all of them, but no results

        def add(self, values, count=count):
            if self.path != path or len(lines()) > count:
                raise KeyboardInterrupt
            return progress_add(self, values)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Progress, "add", add)
            run(tmp_path)
        assert len(lines()) == 1 + count and (path.parent / "problems.jsonl").read_bytes() == b""
        with pytest.raises(ValueError, match="other settings .protocol.temperature.: choose an"):
            run(tmp_path, temperature=0.5)
        # In the middle of a line, and of a character.
        path.write_bytes(path.read_bytes() + '{"problem": 3, "prompt": "ü'.encode()[:-1])
    assert queues == [24, 24 - 7]
    assert run(tmp_path)[0] == whole and len(queues) == 2
    assert files(tmp_path) == files(folder)


@pytest.mark.slow
def test_problems_that_have_a_result_are_not_asked_again(finished, tmp_path, queues):
    folder, whole, _ = finished
    shutil.copytree(folder, tmp_path / "stopped")
    path = tmp_path / "stopped" / "arithmetic" / "problems.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    # As older versions wrote it: killed in the middle of a line, and of a character.
    path.write_bytes("".join(lines[:3]).encode() + lines[3][:20].encode() + "ü".encode()[:1])
    stopped, said = run(tmp_path / "stopped")
    assert queues == [12] and said and stopped == whole
    assert files(tmp_path / "stopped") == files(folder)
    again, said = run(tmp_path / "stopped")
    assert again == whole and said == [] and queues == [12]
    with pytest.raises(ValueError, match="other settings .protocol.temperature.: choose another"):
        run(tmp_path / "stopped", temperature=0.5)


@pytest.mark.parametrize("line", ["3", '{"problem": 1}', '{"problem": "x", "sample": 0}'])
def test_a_file_of_rows_that_are_none_is_named(line, finished, tmp_path):
    identity = json.loads((finished[0] / "arithmetic" / "settings.json").read_text())
    path = tmp_path / "arithmetic" / "problems.jsonl.partial"
    path.parent.mkdir()
    path.write_text(json.dumps(identity) + f"\n{line}\n")
    with pytest.raises(ValueError, match="problems.jsonl.partial: has a row that is not of an ev"):
        run(tmp_path)


class Ended:
    """A sampler whose completions have ended before they are asked for."""

    params, hosts, fails = types.SimpleNamespace(n=2), Hosts(), False

    def ask(self, variables, problems, keys, *, rows, on_text):
        assert rows == 6
        pairs = [(problem, key) for problem, of in zip(problems, keys, strict=True) for key in of]
        for row, (problem, _) in reversed([*enumerate(pairs)]):
            ids = np.arange(row)
            tokens = RowTokens(row, ids, np.zeros(row), "stop" if row else "length")
            text = Future()
            text.set_result(f"{row}")
            yield Completion(tokens, problem, ids, text)
        if self.fails:  # then conversations are abandoned
            text = Future()
            text.set_exception(CancelledError())
            yield Completion(tokens, problem, ids, text)
            raise MemoryError("out of pages")


def of_three(function):
    rows = [datasets.Problem("?", {"answer": f"{n}"}) for n in range(3)]
    return evaluator.Evaluator(Ended(), rows, ("right", function), jax.random.key(0))


def test_what_has_ended_is_judged_together_in_the_callers_thread():
    threads = []

    def right(completions, answer, **_):
        threads.append(threading.current_thread())
        assert len(completions) == len(answer)
        return [
            None if a == "2" else float(c == a) for c, a in zip(completions, answer, strict=True)
        ]

    one = of_three(right)
    rows = [row for _, row in evaluator.judged({}, [one])]
    assert {*threads} == {threading.main_thread()} and len(threads) <= 6
    first, second, third = one.records(rows)
    assert (first["right"], second["right"]) == ([True, False], [False, False])
    assert third["unjudged"] == 2 and third["completions"] == ["4", "5"]
    assert first["stopped"] == [False, True] and second["lengths"] == [2, 3]
    left = evaluator.judged({}, [one], [{0, 1, 3}])
    numbers = [2 * row["problem"] + row["sample"] for _, row in left]
    assert sorted(numbers) == [2, 4, 5]


def test_an_error_of_the_sampler_or_of_the_judge_ends_both():
    def wrong(**_):
        raise ZeroDivisionError

    one = of_three(lambda completions, **_: [0.0] * len(completions))
    one.sampler.fails = True
    with pytest.raises(MemoryError, match="out of pages"):
        [*evaluator.judged({}, [one])]
    with pytest.raises(scoring.RewardError, match="ZeroDivisionError"):
        [*evaluator.judged({}, [of_three(wrong)])]
    assert not [t for t in threading.enumerate() if t.name.startswith("evaluation")]


@pytest.mark.slow
def test_an_adapter_that_changes_nothing_scores_what_its_base_scores(adapter, tmp_path):
    policy = find_policy(None, adapter, dtype="float32")
    assert policy.model == TINY and policy.name == "adapter"
    run(tmp_path / "with", policy)
    run(tmp_path / "base")
    assert records(tmp_path / "with") == records(tmp_path / "base")
    comparison = compare(tmp_path / "with", tmp_path / "base")["arithmetic"]
    assert comparison.changed == ["adapter", "adapter.sha256"]
    difference = comparison.differences["mean"]
    assert difference.mean == 0 and difference.low == -difference.high < 0
    assert list(comparison.differences) == "mean pass@2 pass@4 maj@2 maj@4".split()
    wide = comparison.differences["pass@4"]  # one verdict a problem, where the mean has four
    assert wide.high == pytest.approx(4 * difference.high)


def test_a_comparison_needs_the_same_problems(finished, tmp_path, monkeypatch):
    six, _, _ = finished
    monkeypatch.chdir(six / "arithmetic")
    assert list(compare(".", "..")) == ["arithmetic"]  # a set, from within its folder
    shutil.copytree(six, tmp_path / "five")
    path = tmp_path / "five" / "arithmetic" / "problems.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(ValueError, match="not of the same problems"):
        compare(six, tmp_path / "five")
    with pytest.raises(FileNotFoundError, match="no finished evaluation"):
        compare(six, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("problems", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_an_accuracy_has_an_interval_where_there_are_several_problems(problems):
    policy, (reward,) = base(), scoring.resolve(["accuracy_reward"])
    limits = sums(max_tokens=2).sampling
    sampler = Sampler.of(policy.model, policy.tokenizer, limits, max_prompt_length=64)
    rows = datasets.from_config(arithmetic(problems), split="test", seed=0)
    ended = []
    one = evaluator.Evaluator(sampler, rows, reward, jax.random.key(0))
    found = one(policy.variables, lambda: ended.append(1))
    assert found["eval/accuracy"] == 0 and len(ended) == one.num_rows == 4 * problems
    ends = {"eval/accuracy_low", "eval/accuracy_high"} & found.keys()
    assert len(ends) == (2 if problems > 1 else 0)


@pytest.fixture
def run_folder(adapter, tmp_path):
    """Makes what a finished run leaves for an evaluation."""
    evaluation = EvalConfig(num_problems=5, temperature=0.7, num_generations=4)
    fields = {"output_dir": str(tmp_path), "data": {"system_prompt": "Add."}, "eval": evaluation}
    config.write_run(tmp_path, settings.run_config("quickstart", fields))
    for name in ("adapter", "best"):
        shutil.copytree(adapter, tmp_path / name)
    return tmp_path


def test_a_run_folder_brings_its_model_prompt_problems_and_sampling(run_folder):
    policy = find_policy(None, run_folder)
    assert policy.adapter == run_folder / "adapter" and policy.name == "adapter"
    assert find_policy(None, run_folder / "best").name == "best"
    base = find_policy(None, run_folder, base=True)
    assert (base.name, base.adapter, base.model) == ("base", None, policy.model)
    assert policy.model == dataclasses.replace(TINY, gradient_checkpointing="none")
    source = benchmark.source_of("arithmetic", policy)
    assert (source.split, source.num_problems) == ("test", 5)
    protocol = benchmark.protocol_for("arithmetic", policy, EvalOptions(top_p=0.9))
    sampling = protocol.sampling
    assert (sampling.temperature, sampling.top_p, sampling.n) == (0.7, 0.9, 4)
    assert protocol.system_prompt == "Add." and sampling.max_tokens == 44
    run = settings.run_config(policy.run, {"rollout": {"stop": ["|"]}})
    stopped = dataclasses.replace(policy, run=run)
    assert benchmark.protocol_for("arithmetic", stopped).sampling.stop == ("|",)
    # Another set, asked as the run asks; and under the paper's protocol instead.
    named = lambda name: benchmark.protocol_for("math500", policy, EvalOptions(protocol=name))
    assert named("run").system_prompt == "Add."
    assert named("paper") == protocols.paper("math500")


@pytest.mark.parametrize("applies", [True, False])
def test_a_set_is_asked_in_the_form_of_training_or_a_warning_names_the_cure(
    applies, run_folder, tmp_path, unmeasured
):
    rows, path = tmp_path / "rows.jsonl", run_folder / "config.toml"
    rows.write_text('{"prompt": "What is 1+2?", "answer": "3"}\n')
    text = path.read_text().replace('system_prompt = "Add."\n', "")
    field = "apply_chat_template = "
    path.write_text(text.replace(f"{field}true", f"{field}{applies}".lower()))
    policy, lines, (loaded, jobs) = find_policy(None, run_folder), [], unmeasured

    def is_text(folder, **options):
        source = benchmark.source_of(str(rows), policy, EvalOptions(**options))
        sets = [(source, benchmark.protocol_for(str(rows), policy))]
        benchmark.run(policy, sets, tmp_path / folder, policy=loaded, log=lines.append)
        return isinstance(jobs[-1].problems[0].prompt, str)

    assert is_text("same") == (not applies) and lines == []
    assert is_text("other", apply_chat_template=not applies) == applies
    (line,) = lines
    assert line.startswith("warning: rows: texts are asked ") and 'the protocol "run"' in line


def test_a_run_of_a_whole_model_brings_that_model(run_folder):
    path = run_folder / "config.toml"
    text = path.read_text().replace('trainable = "lora"', 'trainable = "full"')
    text = text.replace('weights = "nvfp4"', 'weights = "float32"')
    lora = text[text.index("[lora]") : text.index("[rollout]")]
    path.write_text(text.replace(lora, ""))
    (run_folder / "model").mkdir()
    policy = find_policy(None, run_folder)
    assert policy.adapter is None and policy.name == "model"
    assert policy.model.model_name_or_path == str(run_folder / "model")
    base = find_policy(None, run_folder, base=True)
    assert base.name == "base" and base.model.model_name_or_path == "qerl-tiny"

    # What was trained on random weights is read from its files; only the base is made anew.
    path.write_text(path.read_text().replace("random_base = false", "random_base = true"))
    trained, base = (find_policy(None, run_folder, base=b).model for b in (False, True))
    assert not trained.random_base and base.random_base


def test_commands_evaluate_and_compare(run_folder, capsys):
    for options in ([], ["--base"]):
        short = ["--num-problems", "2", *options]
        assert main.main(["eval", "arithmetic", "--adapter", str(run_folder), *short]) == 0
    shown = capsys.readouterr().out
    assert "arithmetic: 2 problems, 4 samples each" in shown and "mean@4" in shown
    folders = [str(run_folder / "eval" / name) for name in ("adapter", "base")]
    assert main.main(["compare", *folders]) == 0
    shown = capsys.readouterr().out
    assert "  mean     +0.000 [-" in shown
    assert "settings that differ: adapter, adapter.sha256" in shown


@pytest.mark.slow
def test_a_benchmark_is_read_from_a_folder_under_a_protocol(tmp_path, capsys):
    where = ["--path", str(GSM8K), "--output-dir", str(tmp_path), "--num-problems", "2"]
    assert main.main(["eval", "gsm8k", "--protocol", "verl", "--max-tokens", "2", *where]) == 0
    first, _ = records(tmp_path, "gsm8k")
    assert first["gold"] == "18" and len(first["prompt"]) == 1
    assert first["prompt"][0]["content"].endswith('output the final answer after "####".')


def test_a_judge_that_the_run_was_not_trained_with_is_named(run_folder, tmp_path, unmeasured):
    found, (loaded, _) = find_policy(None, run_folder), unmeasured
    rewards = {"rewards": {"functions": ["mine.py:right"], "weights": None}}

    def said(**changes):
        trained = settings.run_config(found.run, rewards | changes)
        policy, lines = dataclasses.replace(found, run=trained), []
        sets = [(arithmetic(1), benchmark.protocol_for("arithmetic", policy))]
        folder = tmp_path / f"{len(changes)}"
        benchmark.run(policy, sets, folder, policy=loaded, log=lines.append)
        return lines

    (line,) = said(eval=None)
    assert line.startswith("arithmetic: judged by accuracy_reward, and the run was trained with m")
    assert said() == []


def test_of_rows_without_an_answer_the_options_of_the_command_are_named(tmp_path, capsys):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1+2?", "gold": "3"}\n')
    assert main.main(["eval", str(rows), "--output-dir", str(tmp_path / "eval")]) == 2
    error = capsys.readouterr().err
    assert "the rows have no column 'answer': name yours by --columns answer COLUMN" in error
    assert "or choose another reward by --reward" in error
    assert "(tried before evaluating, on 1 rows" in error and "training" not in error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--temperature", "0", "--samples", "2"], "greedy samples"),
        (["--samples", "0"], "samples: got 0; must be at least 1"),
        (["--max-concurrent", "0"], "max_concurrent: got 0; must be at least 1"),
        (["--protocol", "run"], "protocol: got 'run'; needs --adapter with a run folder"),
        (["--adapter", "/nowhere"], "adapter: got '/nowhere'; has no adapter_config.json"),
        (["--reward", "acuracy_reward"], "acuracy_reward"),
        (["aime24", "--path", "/nowhere"], "--path is the place of one set; got 2 sets"),
    ],
)
def test_bad_input_is_one_line_that_names_it(options, message, tmp_path, capsys):
    assert main.main(["eval", "arithmetic", *options, "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
