"""Tests `make reproduce`: its announcement, its table, and the whole path on a tiny shape."""

import json
import types

import pytest

from qerl_jax import config
from scripts import reproduce


def row(step, accuracy=None, **more):
    if accuracy is not None:
        more |= {f"eval/accuracy{end}": accuracy for end in ("", "_low", "_high")}
    return {"step": step} | more


def test_the_plan_of_7b_says_time_and_memory_without_a_download(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduce", "7b", "--plan-only", "--device", "H100"])
    reproduce.main()
    said = capsys.readouterr().out
    # 117 rollouts of 64 of 7473 problems, with 4 updates each.
    assert "468 optimizer steps in 117 rollouts: about 41 min" in said
    assert "device      what it offers" in said


def test_what_does_not_fit_or_has_no_gpu_is_refused_before_the_download(monkeypatch):
    monkeypatch.setattr("sys.argv", ["reproduce", "32b", "--device", "T4"])
    with pytest.raises(config.ConfigError, match="memory"):
        reproduce.main()
    monkeypatch.setattr("sys.argv", ["reproduce", "7b"])
    with pytest.raises(SystemExit, match="device: got cpu, must be a GPU"):
        reproduce.main()


@pytest.mark.parametrize(
    ("changes", "after"), [([], "90.8"), (["--noise", "None"], "88.5"), (["--max-steps", "4"], "-")]
)
def test_the_table_has_the_paper_s_number_of_the_arm_and_none_for_a_trial(changes, after):
    none = dict.fromkeys(("quick", "folder", "random_weights", "data"))
    args = types.SimpleNamespace(model="7b", **none)
    cfg = reproduce.configured(args, changes)
    steps = {"loss": 0, "step_time": 30, "reward": 0.5, "entropy": 0.25}
    text = reproduce.result("7b", cfg, [row(0, 0.5), row(1, **steps), row(2, 0.75, **steps)])
    assert "| accuracy before, % | 50.0 [50.0, 50.0] |" in text
    assert f"| accuracy after, % | 75.0 [75.0, 75.0] | {after} |" in text
    assert "| minutes of training | 1.0 |" in text
    assert ("This was a test of the script" in text) == (after == "-")


@pytest.mark.slow
def test_the_whole_path_on_random_weights_of_a_tiny_shape(tmp_path, monkeypatch, capsys):
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"{a}+1?", "answer": f"#### {a + 1}"} for a in range(40)]
    # GSM8K has some that are longer than a quick run allows.
    rows.append({"question": "1" + "+1" * 400 + "?", "answer": "#### 401"})
    data.write_text("".join(json.dumps(each) + "\n" for each in rows))
    folder = tmp_path / "run"
    options = ["--folder", "qerl-tiny", "--random-weights", "--data", str(data), "--quick"]
    monkeypatch.setattr("sys.argv", ["reproduce", "7b", *options, "--output-dir", str(folder)])
    reproduce.main()
    assert "not results" in (folder / "table.md").read_text()
    assert (folder / "adapter/adapter_model.safetensors").is_file()
    assert "random weights, nvfp4" in capsys.readouterr().out
