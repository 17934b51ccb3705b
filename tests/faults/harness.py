"""Faults that tests inject: damaged files, full disks, and short runs to inject them into."""

import dataclasses
import pathlib
import random
import shutil
import subprocess
import sys
import textwrap

from qerl_jax import config
from qerl_jax.tracking import logger

ROOT = pathlib.Path(__file__).parents[2]
# What differs between two runs that are the same.
_TIMES = ("perf/", "step_time")


def tiny(folder, **sections):
    """A config whose run takes seconds on a CPU: six steps of 2 prompts x 2, a checkpoint every second step.

    Sections are changed as section={field: value}, fields as field=value.
    """
    cfg = config.load(ROOT / "configs" / "quickstart.toml")
    defaults = {
        "max_steps": 6,
        "save_steps": 2,
        "data": {"num_problems": 40},
        "rollout": {"num_generations": 2, "max_completion_length": 8},
        "optim": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        "eval": None,
    }
    changes = {
        name: dataclasses.replace(getattr(cfg, name), **value) if isinstance(value, dict) else value
        for name, value in (defaults | sections).items()
    }
    return dataclasses.replace(cfg, output_dir=str(folder), **changes)


def copy_of(run, folder):
    """A run folder under another name, which says so in its config."""
    shutil.copytree(run, folder)
    cfg = config.load(folder / "config.toml")
    (folder / "config.toml").write_text(
        config.dump(dataclasses.replace(cfg, output_dir=str(folder)))
    )
    return folder


def back_to(folder, step):
    """Makes a finished run one that was killed after it had saved a step."""
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    for path in (folder / "checkpoints").iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)


def results(folder):
    """All that two equal runs have in common: metrics without times, completions, the adapter's bytes."""
    rows = [
        {name: value for name, value in row.items() if not name.startswith(_TIMES)}
        for row in logger.read_metrics(folder)
    ]
    completions = {path.name: path.read_text() for path in (folder / "completions").iterdir()}
    return rows, completions, (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def files_of(folder):
    """All files below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, bit):
    """Turns one bit of a file over."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flip_somewhere(paths, rng: random.Random):
    """Turns one random bit of several files over, and gives the file and the bit."""
    sizes = [8 * path.stat().st_size for path in paths]
    (path,) = rng.choices(paths, sizes)
    bit = rng.randrange(8 * path.stat().st_size)
    flip(path, bit)
    return path, bit


def python(code, *arguments, **options):
    """Runs a program in a fresh interpreter, and gives what it left: returncode, stdout, stderr."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, **options
    )


def qerl(*arguments, **options):
    """Runs the command `qerl` in a fresh interpreter."""
    command = [sys.executable, "-m", "qerl_jax", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False, **options
    )


def has_mounts():
    """Whether a small file system can be mounted here, for one process and its children."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )
