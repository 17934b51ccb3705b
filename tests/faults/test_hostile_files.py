"""Tests that hostile files (nested too deeply, not text, too slow) are refused in one line."""

import json
import time

import pytest

from qerl_jax import config
from qerl_jax.checkpoint import packed_formats, peft, safetensors
from qerl_jax.cli import main
from qerl_jax.data import datasets
from qerl_jax.model import architecture
from qerl_jax.system import files
from tests.faults import harness
from tests.tables import spread

DEEP = 100_000 * "["
JUST_TOO_DEEP = (files.DEEPEST + 1) * '{"a": ' + "1" + (files.DEEPEST + 1) * "}"


def test_values_nest_to_the_limit_and_not_beyond():
    at_the_limit = files.DEEPEST * "[" + "1" + files.DEEPEST * "]"
    assert files.parse_json(at_the_limit) == json.loads(at_the_limit)
    assert files.parse_json(json.dumps([DEEP])) == [DEEP]  # brackets in a text
    for text in (f"[{at_the_limit}]", (files.DEEPEST + 1) * "[" + (files.DEEPEST + 1) * "]"):
        with pytest.raises(ValueError, match="nest more than 64 deep"):
            files.parse_json(text.encode())


READERS = {
    "config.json": lambda path: files.read_json(path),
    "adapter_config.json": lambda path: peft.read_lora(path.parent),
    "hf_quant_config.json": lambda path: packed_formats.of_folder(path.parent),
    "model.safetensors.index.json": lambda path: safetensors.Tensors(path.parent),
    "results.jsonl": lambda path: files.whole_lines(path),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", [DEEP, JUST_TOO_DEEP])
def test_json_that_nests_too_deeply_is_refused_by_every_reader(name, text, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / name
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=f"{name}: .*nest more than 64 deep"):
        READERS[name](path)


TOML = {
    "lists": "a = " + 3000 * "[" + 3000 * "]",
    "tables": "a = " + 3000 * "{a=" + "1" + 3000 * "}",
    "a key": ".".join(30_000 * "a") + " = 1",
    "a key of quoted parts": " . ".join(30_000 * ['"a"']) + " = 1",
    "a heading": "[" + ".".join(30_000 * "a") + "]",
    "a key in a table": "a = {" + ".".join(30_000 * "a") + " = 1}",
    "just too deeply": "a = " + 65 * "[" + 65 * "]",
}


@pytest.mark.parametrize("case", TOML)
def test_toml_that_nests_too_deeply_is_refused_at_once(case, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(TOML[case])
    started = time.process_time()
    shown = harness.refused(capsys, "train", path)
    assert time.process_time() - started < 2
    assert f"{path}" in shown and "must nest at most 64 deep" in shown


def test_a_folder_for_a_config_is_told_from_nothing(tmp_path, capsys):
    for path, said in ((tmp_path, "is a folder; name a file in it"), (tmp_path / "x", "no such")):
        assert said in harness.refused(capsys, "train", path)


def test_a_config_as_long_as_a_book_or_with_a_number_of_a_page_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    no_key = "a = '" + 60 * "1.1" + "'\n" + 70 * "[[a.b]]\n[a.c]\n"
    for text, message in (
        ("#" * (1 << 20) + "\n", "must be at most 1048576 bytes long"),
        ("a = " + "1" * 5000, "run.toml: not valid TOML: Exceeds the limit"),
        (no_key, "not valid TOML: .*line 2"),
    ):
        path.write_text(text)
        with pytest.raises(config.ConfigError, match=message):
            config.read_table(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"prompt": "a"}\n' + DEEP, "rows.jsonl, row 2: not JSON: lists and tables nest more"),
        (JUST_TOO_DEEP, "rows.jsonl, row 1: not JSON: lists and tables nest more than 64 deep"),
        (b'{"prompt": "\xff"}', "rows.jsonl: not UTF-8 text: "),
        (b"\xff\xfea\0", "rows.jsonl: not UTF-8 text: "),
    ],
)
def test_a_prompt_file_that_is_no_such_is_named(content, said, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert said in harness.refused(capsys, "generate", "--input", path)
    refusal = harness.refused(capsys, "generate", "--input", f"{path}\0")
    assert "must hold no NUL character" in refusal


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n{"prompt": ' + 100_000 * b"[", "line 2: lists and tables nest more"),
        (b'{"prompt": "\xff", "answer": "1"}', "row 0: not UTF-8 text: "),
    ],
)
def test_a_data_set_that_is_no_such_is_named(content, said, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content + b"\n")
    cfg = config.DataConfig(dataset="own", path=str(path))
    with pytest.raises(ValueError, match=f"rows.jsonl.*{said}|{said}.*rows.jsonl"):
        datasets.from_config(cfg, split="train", seed=0)


def test_an_error_that_quotes_a_whole_file_is_a_line_that_can_be_read(tmp_path, capsys):
    path = tmp_path / "run.toml"
    text = (harness.ROOT / "configs" / "quickstart.toml").read_text()
    path.write_text(text.replace("max_steps = 30", f"max_steps = '{'x' * 100_000}'"))
    assert " [...] " in harness.refused(capsys, "train", path)


def run_folder(folder, files):
    """Makes a run folder of these files, given by their paths in it."""
    for name, text in {"metrics.jsonl": '{"step": 1, "reward": 0.5}\n', **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    "text", ["{}", '{"name": 3}', '{"estimates": [1], "samples": 1, "name": ""}', "[]", "{"]
)
def test_an_evaluation_that_is_none_is_named_by_the_report(text, tmp_path, capsys):
    folder = run_folder(tmp_path, {"eval/m/gsm8k/summary.json": text})
    assert "eval/m/gsm8k/summary.json: " in harness.refused(capsys, "report", folder)


def test_rows_that_are_no_completions_are_left_out_of_the_report(tmp_path):
    rows = ["[1]", "3", '{"reward": "x"}', '{"reward": 1, "prompt": 3, "completion": "a"}']
    rows += ['{"reward": 1, "prompt": "asked", "completion": "told"}', '{"reward": null}']
    folder = run_folder(tmp_path, {"completions/step_000001.jsonl": "\n".join(rows) + "\n"})
    assert main.main(["report", folder]) == 0
    assert "told" in (tmp_path / "report" / "index.html").read_text()


@pytest.mark.parametrize("text", ["", "[1]\n", '{"gold": "1"}\n', '{"gold": "1", "right": []}\n'])
def test_an_evaluation_that_is_none_is_named_by_the_comparison(text, tmp_path, capsys):
    files_ = {"summary.json": "{}", "settings.json": "{}", "problems.jsonl": text}
    folder = run_folder(tmp_path, files_)
    assert "problems.jsonl" in harness.refused(capsys, "compare", folder, folder)


METHODS = {"quant_method": ["modelopt"]}, {"quant_method": "modelopt", "quant_algo": {}}
BAD_FIELDS = [
    ("model_type", [{"a": 1}, ["qwen2"]]),
    ("layer_types", [3, True]),
    ("hidden_size", [True]),
    ("vocab_size", [10**40]),
    ("rms_norm_eps", ["small", 1e308]),
    ("rope_theta", [float("nan"), -1]),
    (
        "rope_scaling",
        [harness.LLAMA3 | {"factor": "8"}, harness.LLAMA3 | {"low_freq_factor": None}],
    ),
    ("sliding_window", ["wide"]),
    ("max_position_embeddings", [[256]]),
    ("quantization_config", [4, *METHODS]),
]


@pytest.mark.parametrize(("field", "value"), spread(BAD_FIELDS))
def test_a_model_of_another_form_is_refused_by_its_field(field, value, tmp_path):
    table = json.loads((harness.TINY / "config.json").read_text())
    if field == "sliding_window":  # which Qwen2 has a switch for
        table["model_type"] = "mistral"
    (tmp_path / "config.json").write_text(json.dumps(table | {field: value}))
    with pytest.raises((ValueError, NotImplementedError), match=field):
        architecture.load(tmp_path)
        packed_formats.of_folder(tmp_path)
