"""Tests that files are only data: nothing in them runs, they reach no other files, and no secret is logged."""

import ast
import contextlib
import json
import os
import pathlib
import pickle
import shutil
import sys
import textwrap

import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.checkpoint import safetensors
from qerl_jax.cli import main
from qerl_jax.data import datasets, tokenizer
from qerl_jax.model import architecture
from qerl_jax.rl import rollouts
from qerl_jax.training import replay
from tests.faults import harness

# Modules that run what they read.
EXECUTE = set("pickle cPickle dill cloudpickle joblib shelve marshal runpy code".split())
CALLS = {"eval", "exec", "compile", "__import__", "os.system", "torch.load", "yaml.load"}


def dotted(node):
    """Returns the dotted name of what is called, such as os.system."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def what_executes(tree):
    """Finds places of a program that may execute what it reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = getattr(node, "module", None)
            names = [module] if module else [alias.name for alias in node.names]
            if {name.split(".")[0] for name in names} & EXECUTE:
                yield node.lineno
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            says = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            is_open = name.endswith("np.load") and says.get("allow_pickle") is not False
            trusts = any(map(says.get, ("trust_remote_code", "allow_pickle", "shell")))
            if name in CALLS or is_open or trusts:
                yield node.lineno


def test_no_module_runs_what_it_reads():
    for folder in ("qerl_jax", "pallas_kernels", "scripts"):
        for path in (harness.ROOT / folder).rglob("*.py"):
            # That runs lines of the TRL that is installed, to record what they compute; reads nothing else.
            if path.name != "record_trl.py":
                assert list(what_executes(ast.parse(path.read_text()))) == [], path


def test_what_would_run_it_is_seen():
    code = """
        import pickle
        from joblib import load
        eval(x)
        np.load(path)
        np.load(path, allow_pickle=True)
        AutoTokenizer.from_pretrained(x, trust_remote_code=True)
        subprocess.run(x, shell=True)
        os.system(x)
        torch.load(x)"""
    tree = ast.parse(textwrap.dedent(code))
    assert sorted(what_executes(tree)) == list(range(2, 11))


class Canary:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (pathlib.Path.touch, (self.path,))


def test_a_step_with_pickled_objects_is_refused(tmp_path, capsys):
    canary = tmp_path / "canary"
    path = tmp_path / "run" / "non_finite" / "step_000001.npz"
    path.parent.mkdir(parents=True)
    config.write_run(path.parents[1], harness.tiny(tmp_path / "run"))
    np.savez(path, step=np.array([Canary(canary)], dtype=object))
    whole = path.read_bytes()
    for data in (whole, whole[:200], pickle.dumps(Canary(canary))):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="is not a step that a run has skipped"):
            replay.run(path)
    np.savez(path, step=np.int32(1))
    assert str(path) in harness.refused(capsys, "replay", path)
    assert not canary.exists()


def test_pickled_weights_are_not_read(tmp_path):
    canary = tmp_path / "canary"
    for name in ("pytorch_model.bin", "model.safetensors"):
        (tmp_path / name).write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(safetensors.SafetensorsError, match="truncated or not a safetensors file"):
        safetensors.Tensors(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(safetensors.SafetensorsError, match="pickled weights are not read"):
        safetensors.Tensors(tmp_path)
    assert not canary.exists()


def test_code_that_a_model_brings_along_is_not_run(tmp_path):
    canary = tmp_path / "canary"
    code = f"import pathlib; pathlib.Path({str(canary)!r}).touch()\nclass Evil: pass\n"
    (tmp_path / "evil.py").write_text(code)
    auto = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil"}
    shutil.copytree(harness.TINY, tmp_path, dirs_exist_ok=True)
    for name in ("tokenizer_config.json", "config.json"):
        path = tmp_path / name
        table = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(table | {"auto_map": auto, "model_type": "qwen2"}))
    for load in (tokenizer.load, architecture.load):
        # It may be read as what it is beside.
        with contextlib.suppress(ValueError, NotImplementedError):
            load(tmp_path)
    assert not canary.exists()


def test_code_beside_a_data_set_is_not_run(tmp_path):
    canary, folder = tmp_path / "canary", tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(f"import pathlib; pathlib.Path({str(canary)!r}).touch()\n")
    (folder / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    cfg = config.DataConfig(dataset="own", path=str(folder))
    with pytest.raises(ValueError, match="could not load the data set .* scripts are no longer"):
        datasets.from_config(cfg, split="train", seed=0)
    assert not canary.exists()


NAMES = "HF_TOKEN WANDB_API_KEY OPENAI_API_KEY AWS_SECRET_ACCESS_KEY MY_PASSWORD".split()
CANARIES = {name: f"canary-{index}-4f1c9e" for index, name in enumerate(NAMES)}


@pytest.mark.slow
def test_secrets_of_the_environment_reach_neither_log_nor_folder(tmp_path, monkeypatch, capsys):
    for name, value in CANARIES.items():
        monkeypatch.setenv(name, value)

    def failing():
        raise KeyError(f"of {sorted(os.environ)[0]}")

    harness.before_call(monkeypatch, rollouts, "score", 2, failing)
    path = harness.write_config(tmp_path / "run")
    assert main.main(["train", str(path)]) == 1
    assert main.main(["train", "--debug", str(path), "--max-steps", "2"]) == 2
    assert main.main(["env"]) == 0
    texts = [path.read_bytes() for path in harness.files_of(tmp_path)]
    assert any("Traceback" in text.decode(errors="replace") for text in texts)
    shown = "".join(capsys.readouterr())
    for secret in CANARIES.values():
        assert secret not in shown and not any(secret.encode() in text for text in texts)


RUN = """
import sys
seen = set()
def hook(event, arguments):
    if event in ("pickle.find_class", "os.system", "webbrowser.open"):
        seen.add((event, *map(str, arguments)))
sys.addaudithook(hook)
from qerl_jax import config
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.training.trainer import train
cfg = config.load(sys.argv[1])
seen.clear()
train(cfg, quiet=True)
train(config.from_table(config.RunConfig, config.to_table(cfg) | {"max_steps": 3}), quiet=True)
print("seen", sorted(seen))
"""


@pytest.mark.slow
def test_a_run_that_is_resumed_unpickles_nothing(tmp_path):
    path = harness.write_config(tmp_path / "run", max_steps=2)
    done = harness.run(sys.executable, "-c", RUN, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "seen []"
    assert sys.version_info >= (3, 12)
