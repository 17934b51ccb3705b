"""Tests that completions end at the same tokens in sampling, training and exports, and prompts are one in all."""

import contextlib
import dataclasses
import datetime
import json
import shutil
import types

import numpy as np
import pytest

import qerl_jax
from qerl_jax.api import completion_file, runs
from qerl_jax.checkpoint import hf_folder
from qerl_jax.checkpoint import policy as policies
from qerl_jax.checkpoint.policy import LoadedPolicy, PolicySource, find_policy
from qerl_jax.config.run_file import write_run
from qerl_jax.data import tokenizer
from qerl_jax.data.datasets import from_rows
from qerl_jax.system.checked import from_table
from qerl_jax.training import check

GREEDY = {"temperature": 0.0, "max_tokens": 40}
PROMPTS = ["What is 2+3?", "What is (5-3)*3?"]
END = 421  # <|im_end|>, with which the tiny base and its template end a turn
ROW = [{"role": "user", "content": "?"}]


@pytest.fixture(scope="module")
def tiny():
    return qerl_jax.load(dtype="float32", quiet=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The tiny base with the ends of Qwen2.5's base models: its files name <|endoftext|>, its template <|im_end|>."""
    folder = tmp_path_factory.mktemp("base") / "model"
    shutil.copytree(hf_folder.TINY, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 419}))
    path = folder / "tokenizer_config.json"
    path.chmod(0o644)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token": "<|endoftext|>"}))
    return folder


def test_a_base_ends_where_its_template_ends_a_turn(base, tiny, capsys, tmp_path):
    policy = qerl_jax.load(base, dtype="float32")
    assert "ends a turn with '<|im_end|>', which no config names" in capsys.readouterr().err
    ours, right = (one.generate(PROMPTS, **GREEDY) for one in (policy, tiny))
    for output, expected in zip(ours, right, strict=True):
        assert output.outputs[0].token_ids.tolist() == expected.outputs[0].token_ids.tolist()
        assert output.outputs[0].finish_reason == "stop" and expected.text == output.text
    hf_folder.copy_companions(base, tmp_path)  # as all exports do
    generation = json.loads((tmp_path / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [419, END]
    ended = policy.generate(PROMPTS, **GREEDY, ignore_eos=True, stop=["<|im_end|>"])
    assert [output.outputs[0].token_ids[-1] for output in ended] == [END, END]


@pytest.mark.slow
def test_stop_tokens_end_a_completion_and_are_not_in_its_text(tiny):
    free = tiny.generate(PROMPTS[0], **GREEDY)[0].outputs[0]
    ids, decode = free.token_ids.tolist(), tiny.tokenizer.decode
    first = ids.index(ids[6])
    options = GREEDY | {"stop_token_ids": [ids[6]]}
    output = tiny.generate(PROMPTS[0], **options)[0].outputs[0]
    assert output.token_ids.tolist() == ids[: first + 1] and output.finish_reason == "stop"
    assert output.text == decode(ids[:first]) == "".join(tiny.stream(PROMPTS[0], **options))


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("stop", ["<|im_end|>\n"], "holds the special token"),
        ("stop", "text", "must be a list of texts"),
        ("stop_token_ids", [7, 1_000_000], "must be ids of the tokenizer, which has 4.. tokens"),
        ("stop_token_ids", [-1], "must be ids of tokens"),
        ("stop_token_ids", ["x"], "must be ids of tokens"),
        ("top_k", -2, "must be at least -1"),
    ],
)
def test_impossible_ends_are_refused_by_their_field(tiny, field, value, rule):
    with pytest.raises(ValueError, match=f"^{field}: got .*{rule}"):
        tiny.generate("a", **{field: value})


def test_top_k_may_be_off_by_vllms_number():
    assert qerl_jax.SamplingParams(top_k=-1) == qerl_jax.SamplingParams()


def test_a_prompt_with_half_a_character_is_refused(tiny):
    with pytest.raises(ValueError, match=r"^prompts\[1\]: holds '\\ud800', half a character"):
        tiny.generate(["a", "b\ud800"])
    with pytest.raises(ValueError, match=r"^completions\[0\]: holds '\\ud800', half a character"):
        tiny.logprobs(["a"], ["\ud800"])
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("a", "\ud800")]
    with pytest.raises(ValueError, match=r"row 1, column 'prompt': holds '\\ud800', half a char"):
        qerl_jax.train("quickstart", rows, eval=None)


ROWS = [{"prompt": f"What is {a}+2?", "answer": a + 2} for a in range(8)]


def checked(folder, base, model=(), rows=ROWS, **rollout):
    """Checks a run on ROWS, as `train` does before it loads weights."""
    lengths = {"num_generations": 4, "max_completion_length": 32}
    table = {
        "model": {"model_name_or_path": str(base), "dtype": "float32"} | dict(model),
        "data": {"dataset": "rows", "max_prompt_length": 48},
        "rewards": {"functions": ["accuracy_reward"]},
        "rollout": lengths | rollout,
        "optim": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1},
    }
    cfg = from_table(qerl_jax.RunConfig, table | {"output_dir": str(folder), "max_steps": 2})
    return check.check(cfg, problems=from_rows(cfg.data, rows, "rows"))


@pytest.fixture(scope="module")
def dated(base, tmp_path_factory):
    """That base with a template that prints the date."""
    model = tmp_path_factory.mktemp("dated") / "model"
    shutil.copytree(base, model)
    path = model / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{{ strftime_now('%d %b') }}" + config["chat_template"]
    path.write_text(json.dumps(config))
    return model


def clock(today):
    """The module `datetime` on that day."""
    now = lambda zone: datetime.date.fromisoformat(today)
    return types.SimpleNamespace(datetime=types.SimpleNamespace(now=now), UTC=datetime.UTC)


@dataclasses.dataclass(frozen=True)
class Interrupted:
    """A policy that notes the date in its prompts, and is interrupted after its first completion."""

    tokenizer: object
    dates: list
    slow_because = None
    dated = LoadedPolicy.dated

    def completions(self, prompts, params, *, columns, first):
        self.dates.append(self.tokenizer.render([ROW])[0][:6])
        columns = {"text": "", "finish_reason": "stop", "token_ids": [1], "messages": None}
        yield types.SimpleNamespace(**columns, logprobs=np.zeros(1))
        if not first:
            raise KeyboardInterrupt


def test_completions_that_are_continued_later_keep_the_date(dated, tmp_path, monkeypatch):
    out, rows = tmp_path / "out.jsonl", [{"prompt": prompt} for prompt in PROMPTS]
    source = PolicySource(qerl_jax.ModelConfig(str(dated)))
    policy = Interrupted(tokenizer.load(dated), [])
    monkeypatch.setattr(completion_file, "of_source", lambda *_, **__: policy)
    options = {"limits": None, "log": lambda line: None}
    for today in ("2026-03-01", "2026-03-09"):
        monkeypatch.setattr(policies, "datetime", clock(today))
        with contextlib.suppress(KeyboardInterrupt):
            completion_file.write(out, source, rows, PROMPTS, qerl_jax.SamplingParams(), **options)
    assert policy.dates == ["01 Mar"] * 2 and len(out.read_text().splitlines()) == 2
    stated = dataclasses.replace(source.model, chat_template_date="2026-03-05")
    for model in (stated, qerl_jax.ModelConfig("qerl-tiny")):
        assert PolicySource(model).frozen_date() == {}


def test_a_run_keeps_the_date_on_which_it_began(dated, tmp_path, monkeypatch):
    model, run = dated, tmp_path / "run"
    for today in ("2026-03-01", "2026-03-09"):
        monkeypatch.setattr(check, "datetime", clock(today))
        subject = checked(run, model)
        assert subject.task.tokenizer.render([ROW])[0].startswith("01 Mar")
        assert subject.task.tokenizer.stop_tokens == (419, END)
        (run / "adapter").mkdir(parents=True, exist_ok=True)
        write_run(run, subject.cfg)
    policy = find_policy(None, run, base=True)
    assert policy.model.chat_template_date == "2026-03-01"
    with pytest.raises(ValueError, match="chat_template_date"):
        checked(run, model, {"chat_template_date": "2026-03-02"})


def test_a_run_without_a_date_in_its_template_has_none_and_refuses_impossible_stops(tmp_path):
    assert checked(tmp_path, "qerl-tiny").cfg.model.chat_template_date is None
    for field, value in (("stop", ["a<|im_end|>"]), ("stop_token_ids", [5000])):
        with pytest.raises(ValueError, match=rf"^rollout\.{field}: got"):
            checked(tmp_path, "qerl-tiny", **{field: value})
    with pytest.raises(
        ValueError, match=r"^model\.chat_template_date: got 'today'; must be a date"
    ):
        checked(tmp_path, "qerl-tiny", {"chat_template_date": "today"})


def test_data_are_tried_before_weights_are_looked_for(base, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(base, model)
    (model / "model.safetensors").unlink()
    rows = [{"prompt": "What is 1+2?" * 9, "answer": 3}]
    with pytest.raises(ValueError, match="max_prompt_length"):
        checked(tmp_path / "run", model, rows=rows)
    with pytest.raises(ValueError, match="no model.safetensors"):
        checked(tmp_path / "run", model)


def test_of_a_stream_as_many_rows_are_read_as_the_run_asks(tmp_path):
    datasets = pytest.importorskip("datasets")

    def endless():
        yield from ({"prompt": f"{n}", "answer": n} for n in iter(int, 1))

    stream = datasets.IterableDataset.from_generator(endless)
    read = lambda **fields: runs._first_rows(
        qerl_jax.RunConfig(
            **{"output_dir": "x", "model": qerl_jax.ModelConfig("qerl-tiny")},
            rewards=qerl_jax.RewardConfig(("accuracy_reward",)),
            **{"data": qerl_jax.DataConfig("rows"), "max_steps": 3} | fields,
        ),
        stream,
    )
    per_step = 1  # of 8 rows, 8 completions each
    assert len(read()) == 3 * per_step
    assert len(read(data=qerl_jax.DataConfig("rows", num_problems=11))) == 11
    with pytest.raises(ValueError, match="data.num_problems: got None; must say how many rows"):
        read(max_steps=None, num_train_epochs=1)
