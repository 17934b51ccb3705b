"""The commands of training runs: `train`, `plan`, `replay`, `report`."""

import contextlib
import os
import pathlib
import sys
import threading

import qerl_jax
from qerl_jax.cli.common import log, run_config, use_compilation_cache
from qerl_jax.cli.options import Parser
from qerl_jax.data import tokenizer
from qerl_jax.distributed.hosts import Hosts, join
from qerl_jax.training import stopping

# The exit code of a run in which no step taught the policy anything.
NOTHING_LEARNED = 3


def train(argv: list[str]) -> int:
    """usage: qerl train CONFIG.toml [--section.field VALUE ...]

    Trains an adapter, or resumes the run in output_dir, and writes a page about it.
    CONFIG.toml is a file, or the name of a config in the package: quickstart, gsm8k_qwen2.5_7b and others.
    `qerl train CONFIG.toml --help` shows every field of the config with its value.
    --noise None, --eval None and --tools None switch a section off; an option of an absent section switches it on.
    SIGINT (Ctrl-C) and SIGTERM finish or drop the current step, save, and exit with 130 or 143.
    A run that has learned nothing says why, and exits with 3. A process of several that has lost another exits with 4.
    On several hosts the same command runs on each: by srun, or with JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID (docs/scale.md).

    Examples:
      qerl train quickstart                       # a first run, on a CPU, in minutes
      qerl train quickstart --help
      qerl train my.toml --output-dir runs/other --optim.learning-rate 2e-5 --noise None
    """
    with stopping.ending_at_once("qerl train"):
        cfg = run_config("train", argv, about=train)
        tokenizer.begin()
        join()
        if not cfg.deterministic:  # which is set before the device starts
            threading.Thread(target=_start_device).start()
        run = qerl_jax.train(cfg)
        if not Hosts.all().leads:
            return 0
        run.report()  # the page, which the run has named already, now with pictures
        log(run.summary())
    if run.has_learned:
        return 0
    sys.stderr.write(f"qerl train: this run has learned nothing (exit status {NOTHING_LEARNED})\n")
    return NOTHING_LEARNED


def _start_device() -> None:
    """Starts the device, which takes seconds, while the main thread imports the library."""
    import jax

    with contextlib.suppress(Exception):  # the main thread gets the same error
        jax.local_devices()


def plan(argv: list[str]) -> None:
    """usage: qerl plan CONFIG.toml [--device NAME] [--device-memory 80GB] [--compile] [--section.field VALUE ...]
       qerl plan --device NAME

    Prints how much device memory the run will need, by phase, and whether it fits.
    --device "RTX 4090" plans for that card instead of this machine's; without a config it says which model sizes
    train there. It knows T4, L4, A100, RTX 3090, RTX 4090, RTX 5090, H100, H200 and B200.
    --device-memory 80GB plans for a device with that much memory instead of this machine's.
    --compile also compiles the update of one micro-batch, and prints the memory that it needs.
    `qerl plan CONFIG.toml --help` shows every field of the config with its value.

    Examples:
      qerl plan gsm8k_qwen2.5_7b --device "RTX 4090"
      qerl plan my.toml --device-memory 80GB --rollout.max-completion-length 8192
    """
    parser = Parser()
    parser.add_argument("--device")
    parser.add_argument("--device-memory")
    parser.add_argument("--compile", action="store_true")
    options, rest = parser.parse_known_args(argv)
    card = None
    if options.device is not None:
        from qerl_jax.planning import cards

        card = cards.named(options.device)
        if not rest:
            log(*cards.describe(card))
            return
    cfg = run_config("plan", rest, ("--device", "--device-memory", "--compile"), about=plan)
    estimate = qerl_jax.plan(cfg, options.device_memory, options.device)
    log(str(estimate))
    if card is not None:
        log(f"sampling    {card.kernels(cfg)}")
    if options.compile:
        from qerl_jax.planning import memory

        use_compilation_cache()
        gigabytes = memory.compiled_update(estimate).temp_size_in_bytes / 1e9
        log(f"compiled  temporaries of one micro-batch {gigabytes:.2f} GB")
    estimate.require()
    if estimate.limit is None:
        log(
            "fits?       this device does not say how much memory it has, so the keys and values of all completions are "
            "counted: --device H100 plans for that card"
        )
    else:
        log(f"it fits     {(estimate.limit - estimate.peak) / 1e9:.2f} GB are left")


def replay(argv: list[str]) -> None:
    """usage: qerl replay RUN_FOLDER/non_finite/STEP.npz

    Runs a step again that was skipped as not finite, and prints what was not finite.

    Examples:
      qerl replay runs/mine/non_finite/step_000012.npz
    """
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError("usage: qerl replay RUN_FOLDER/non_finite/STEP.npz")
    from qerl_jax.training import replay

    use_compilation_cache()
    log(*replay.run(argv[0]))


def report(
    runs: tuple[pathlib.Path, ...],
    /,
    *,
    output_dir: pathlib.Path | None = None,
) -> None:
    """Writes a page about runs, and PNG files of its charts; runs that differ only in the seed share a line.

    Args:
        runs: Run folders.
        output_dir: Folder to write; absent means `report/` of the run, or of the working directory for
            several.

    Examples:
        qerl report runs/mine
        qerl report runs/seed1 runs/seed2 --output-dir compared
    """
    if not runs:
        raise ValueError("missing the runs: qerl report RUN_FOLDER ...")
    from qerl_jax.tracking import report

    shown = [(run, report.lines(run)) for run in runs]
    log(f"page in {qerl_jax.report(*runs, output_dir=output_dir)}")
    for run, lines in shown:
        log(*([os.fspath(run)] if len(shown) > 1 else []), *lines)
