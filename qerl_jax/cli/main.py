"""The command `qerl`: finds the sub-command, runs it, and reports an error in one line."""

import contextlib
import importlib.metadata
import inspect
import logging
import os
import pathlib
import platform
import subprocess
import sys
import traceback

# Without PyTorch, transformers prints a notice about it, which would be the first line that a
# newcomer sees.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
# In a file or a pipe each state of a bar would be a line.
if not sys.stderr.isatty():
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from qerl_jax.cli import common, completions, crashes, evaluate, generate, models, train
from qerl_jax.cli.common import log
from qerl_jax.system.checked import meant, require


def env(argv: list[str]) -> None:
    """usage: qerl env

    Prints versions, devices, and which kernels they get, for bug reports.
    """
    if argv:
        raise ValueError(f"got {' '.join(argv)!r}; it takes no arguments")
    log(*_versions(), *_machine(), *_devices())


def completion(argv: list[str]) -> None:
    """usage: qerl completion SHELL

    Prints a script that completes commands, names of recipes, options and their values in bash or zsh.

    Examples:
      source <(qerl completion bash)
      mkdir -p ~/.local/share/bash-completion/completions
      qerl completion bash > ~/.local/share/bash-completion/completions/qerl
      qerl completion zsh > "${fpath[1]}/_qerl"
    """
    shells = " or ".join(completions.SHELLS)
    if not argv:
        raise ValueError(f"missing the shell: qerl completion {shells}")
    require(
        argv in [[shell] for shell in completions.SHELLS],
        "shell",
        " ".join(argv),
        f"must be {shells}",
    )
    log(completions.script(argv[0], COMMANDS))


def _versions() -> list[str]:
    python = f"python {platform.python_version()} on {platform.platform()}"
    return [python, *map(_version, _PACKAGES)]


def _machine() -> list[str]:
    """Memory and processors, the driver of the card, and what the sandbox of programs needs."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [f"machine: {len(os.sched_getaffinity(0))} processors, {memory / 1e9:.0f} GB of memory"]
    driver = pathlib.Path("/sys/module/nvidia/version")
    with contextlib.suppress(OSError):
        lines.append(f"NVIDIA driver {driver.read_text().strip()}")
    try:
        answer = subprocess.run(["bwrap", "--version"], capture_output=True, text=True, timeout=10)
        return [*lines, answer.stdout.strip() or "bubblewrap does not tell its version"]
    except (OSError, subprocess.SubprocessError):
        return [*lines, "bubblewrap not installed: rewards cannot run programs"]


def _devices() -> list[str]:
    import jax

    from pallas_kernels import runtime

    lines = []
    for device in jax.local_devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = "" if limit is None else f", {limit / 1e9:.0f} GB for XLA"
        lines.append(f"device {device.id}: {device.device_kind} ({device.platform}{memory})")
    return [*lines, *runtime.describe_kernels()]


_PACKAGES = (
    "qerl-jax jax jaxlib flax optax orbax-checkpoint jax-triton triton transformers datasets numpy"
).split()


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} not installed"


_USAGE = """usage: qerl COMMAND ...

Training
  train CONFIG.toml [--section.field VALUE ...]   train an adapter, or resume the run in output_dir
  plan CONFIG.toml [--device NAME] [...]          estimate device memory, and say whether the run fits
  plan --device "RTX 4090"                        list the model sizes that train on a card
  report RUN_FOLDER ...                           write a page and PNG files of one or several runs
  replay RUN_FOLDER/non_finite/STEP.npz           repeat a step that was skipped as not finite

Measuring
  eval SET ... [--adapter RUN_FOLDER]             measure accuracy, with intervals
  compare EVAL_FOLDER EVAL_FOLDER                 compare two policies on the same problems

Using what was learned
  generate PROMPT [--model M] [--adapter DIR]     print completions; or --input FILE --output OUT.jsonl
  export RUN_FOLDER OUT --to KIND                 write the adapter, a merged model, or a 4-bit base with its adapter

Models and data
  quantize MODEL DIR [--format F] [--method M]    write a 4-bit folder of a 16-bit model
  filter CONFIG.toml OUT.jsonl [--low R]          keep the problems that are neither too easy nor too hard

This installation
  env                                             print versions, devices and kernels, for bug reports
  completion SHELL                                print a completion script for bash or zsh
  --version                                       print the version of the package

Examples
  qerl train quickstart                           a first run, on a CPU, in minutes
  qerl generate "What is (5-3)*3?" --adapter runs/quickstart
  qerl train quickstart --help                    every field of a config with its value

CONFIG.toml is a file, or the name of a config in the package. qerl COMMAND --help shows a command's options and
examples. With --debug an error comes with its traceback. Exit codes: 0 done, 1 a fault of the program, 2 something
to correct (input, disk, memory), 3 a run that has learned nothing, or a filter that kept nothing, 4 another process of
the run has ended, 130 and 143 ended by SIGINT and SIGTERM, 141 nobody reads the output any more."""
COMMANDS = {
    "train": train.train,
    "plan": train.plan,
    "generate": generate.generate,
    "filter": evaluate.filter_problems,
    "export": models.export,
    "quantize": models.quantize,
    "eval": evaluate.evaluate,
    "compare": evaluate.compare,
    "replay": train.replay,
    "report": train.report,
    "env": env,
    "completion": completion,
}
_HELP = (["-h"], ["--help"])
_UNREAD = 141  # as after SIGPIPE


def main(argv: list[str] | None = None) -> int:
    """Runs a sub-command, and returns its exit code, which `_USAGE` explains.

    An error is one line on stderr; that of an unexpected one names a file with the traceback, and with `--debug` the
    traceback comes before.
    """
    # These write their messages themselves. Importing orbax gives the root logger a handler, which would
    # write each a second time.
    for library in ("datasets", "huggingface_hub"):
        logging.getLogger(library).propagate = False
    # The readers of files log an error and raise it, so it is said twice, first in Arrow's words.
    logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    argv = [word for word in argv if word != "--debug"]
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    name, *rest = argv or [""]
    # A command that reads its own arguments has its help in its docstring. The options of the others are
    # their parameters.
    text = inspect.getdoc(COMMANDS.get(name, main))
    reads_itself = text.startswith("usage:")
    try:
        if argv[:1] in _HELP or not argv or reads_itself and rest[:1] in _HELP:
            log(text if reads_itself else _USAGE)
            return 0 if argv else 2
        if argv == ["--version"] or (name in COMMANDS and rest == ["--version"]):
            log(_version("qerl-jax"))
            return 0
        if name not in COMMANDS:
            hint = meant(name, COMMANDS) or "; qerl --help lists them"
            raise ValueError(f"there is no such command{hint}")
        if reads_itself:
            return COMMANDS[name](rest) or 0
        return common.call(COMMANDS[name], rest, f"qerl {name}") or 0
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = _failed(name, argv, error)
        # Ends a process of several at once; where nothing was computed, there is only one.
        if "qerl_jax.distributed.hosts" in sys.modules:
            sys.modules["qerl_jax.distributed.hosts"].leave(code)
        return code
    except KeyboardInterrupt as stopped:
        if debug:
            traceback.print_exc()
        sys.stderr.write(f"qerl {name}: {str(stopped) or 'interrupted'}\n")
        return getattr(stopped, "exit_code", 130)


def _failed(name: str, argv: list[str], error: Exception) -> int:
    """Prints what went wrong, and returns the exit code."""
    if crashes.is_of_output(error):
        crashes.drop_output()
        if not crashes.in_what(error):  # of a run it is told what is saved
            return _UNREAD
    if crashes.is_expected(error) or hasattr(error, "exit_code"):
        sys.stderr.write(f"qerl {name}: {crashes.in_one_line(error)}{crashes.in_what(error)}\n")
        return getattr(error, "exit_code", 2)
    versions = _versions()
    try:
        versions += _devices()
    except Exception as cause:  # for example a lost driver, which may have caused the error
        versions.append(f"devices: {crashes.in_one_line(cause)}")
    path = crashes.keep(error, argv, versions, [getattr(error, "run_folder", None)])
    sys.stderr.write(f"qerl {name}: {crashes.describe(error, path)}\n")
    return 1
