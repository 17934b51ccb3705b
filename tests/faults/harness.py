"""Faults that tests inject: damaged files, full disks, and short runs to inject them into."""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

from qerl_jax import config
from qerl_jax.api import settings
from qerl_jax.checkpoint.run_state import StateFiles
from qerl_jax.cli import main
from qerl_jax.tracking import logger

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "qerl_jax" / "assets" / "tiny"
# A `rope_scaling` of a config.json.
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8192,
}
# Of metrics: beginnings of the names of times.
_TIMES = ("perf/", "step_time")


def quickstart(folder, **sections):
    """The quickstart config with changes: sections as section={field: value}, fields as field=value."""
    file = ROOT / "configs" / "quickstart.toml"
    return settings.run_config(file, {"output_dir": str(folder)} | sections)


def tiny(folder, **sections):
    """A config whose run takes seconds on a CPU: six steps of 2 prompts x 2, a checkpoint every second step."""
    defaults = {
        "data": {"num_problems": 40},
        "rollout": {"num_generations": 2, "max_completion_length": 8},
        "optim": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
        **{"max_steps": 6, "save_steps": 2, "eval": None},
    }
    return quickstart(folder, **(defaults | sections))


def written(cfg):
    """Writes a config beside its run folder, and returns the path of the file."""
    path = pathlib.Path(f"{cfg.output_dir}.toml")
    path.write_text(config.dump(cfg))
    return path


def write_config(folder, **sections):
    """Writes the config of `tiny` beside its run folder, and returns the path of the file."""
    return written(tiny(folder, **sections))


def refused(capsys, *argv):
    """The one line with which the command line refuses its arguments."""
    assert main.main([str(word) for word in argv]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"qerl {argv[0]}: ") and shown.count("\n") == 1 and len(shown) < 4000
    return shown


def json_lines(path):
    """Reads the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def before_call(patch, module, name, nth, action):
    """Does something before the nth call, counted from 0, of a function of a module."""
    calls, function = itertools.count(), getattr(module, name)

    def watched(*arguments, **options):
        if next(calls) == nth:
            action()
        return function(*arguments, **options)

    patch.setattr(module, name, watched)


def send(number=signal.SIGTERM):
    """Sends a signal to this process."""
    os.kill(os.getpid(), number)


def without_times(rows):
    """Removes from rows of metrics what differs between two runs that are the same."""
    return [{k: v for k, v in row.items() if not k.startswith(_TIMES)} for row in rows]


def copy_of(run, folder):
    """Copies a run folder under another name, and puts that name into its config."""
    shutil.copytree(run, folder)
    cfg = config.load(folder / "config.toml")
    config.write_run(folder, dataclasses.replace(cfg, output_dir=str(folder)))
    return folder


def back_to(folder, step):
    """Turns a finished run into one that was killed after it had saved a step."""
    shutil.rmtree(folder / "adapter", ignore_errors=True)
    for path in (folder / "checkpoints").glob("[0-9]*"):
        if int(path.name) > step:
            shutil.rmtree(path)


def results(folder):
    """Returns what two equal runs have in common: metrics without times, completions, the adapter's bytes."""
    rows = without_times(logger.read_metrics(folder))
    completions = {path.name: path.read_text() for path in (folder / "completions").iterdir()}
    return rows, completions, (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def files_of(folder):
    """Lists all files below a folder, in order."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, bit):
    """Flips one bit of a file."""
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def flip_somewhere(paths, rng):
    """Flips one random bit of several files, and returns the file and the bit."""
    (path,) = rng.choices(paths, [8 * path.stat().st_size for path in paths])
    bit = rng.randrange(8 * path.stat().st_size)
    flip(path, bit)
    return path, bit


def run(*command, timeout=600):
    """Runs a command, and returns its exit code and output."""
    how = {"capture_output": True, "text": True, "timeout": timeout}
    return subprocess.run([*map(str, command)], cwd=ROOT, check=False, **how)


def qerl(*arguments, timeout=600):
    """Runs the command `qerl` in a fresh interpreter."""
    return run(sys.executable, "-m", "qerl_jax", *arguments, timeout=timeout)


@dataclasses.dataclass(frozen=True)
class Fault:
    """What was done to a run, and where it stood then; a step is 0 where there is none."""

    kind: str  # of FAULTS, or FULL
    logged: int  # the last step in its log
    saved: int  # its newest checkpoint
    kept: int  # its newest checkpoint that can be read after the fault
    code: int  # with which the command ended
    shown: str  # on stderr


# A signal; or a kill, after which the newest checkpoint is damaged if there is one before it.
FAULTS = ("SIGKILL", "SIGTERM", "SIGINT", "flip", "truncate")
# Takes the room on a small file system, which holds nothing but the run.
FULL = "full"


def disturb(path, folder, rng, count, kinds=FAULTS, timeout=600):
    """Starts the run of a config file again and again, and does something to it at a random moment each time.

    Moments, kinds and bits are chosen by `rng`; `FULL` may be among the kinds where the run folder is on a small file
    system. The run may end before so many faults. A start that takes longer than the timeout, in seconds, is a hang.
    Yields each `Fault` when its process has ended.
    """
    for _ in range(count):
        process = start(path)
        wait_for_step(process, folder, last_step(folder) + 1, timeout)
        time.sleep(rng.uniform(0, 0.5))
        kind = rng.choice(kinds)
        ballast = folder.parent / "ballast"
        if kind == FULL:
            fill(ballast, spare=rng.choice((0, 1000, 100_000, 1_000_000)))
        else:
            process.send_signal(getattr(signal, kind, signal.SIGKILL))
        _, shown = process.communicate(timeout=timeout)
        ballast.unlink(missing_ok=True)
        found = StateFiles(folder, keep=None)
        saved = max(found.steps(), default=0)
        if kind in ("flip", "truncate") and len(found.steps()) > 1:
            paths = files_of(folder / "checkpoints" / str(saved))
            if kind == "flip":
                flip_somewhere(paths, rng)
            else:
                cut = rng.choice([file for file in paths if file.stat().st_size])
                os.truncate(cut, rng.randrange(cut.stat().st_size))
        kept = found.newest() or 0
        yield Fault(kind, last_step(folder), saved, kept, process.returncode, shown)
        if process.returncode == 0:
            return


def fill(path, spare):
    """Writes a file that fills its file system, except for some spare bytes."""
    found = os.statvfs(path.parent)
    with path.open("wb") as file, contextlib.suppress(OSError):
        file.write(bytes(max(0, found.f_bavail * found.f_frsize - spare)))


def start(path):
    """Starts `qerl train` on a config file, with a readable stderr."""
    command = [sys.executable, "-m", "qerl_jax", "train", str(path)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


def last_step(folder):
    """Returns the last step in a run's log; 0 if there is none."""
    return max((row["step"] for row in logger.read_metrics(folder)), default=0)


def wait_for_step(process, folder, step, timeout=300):
    """Waits until a step is logged, the process has ended, or the time is over."""
    deadline = time.monotonic() + timeout
    while last_step(folder) < step and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def has_mounts():
    """Returns whether one process and its children can mount a small file system here."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and run(*command).returncode == 0
