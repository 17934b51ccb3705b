"""The commands of training runs: `train`, `plan`, `replay`, `report`."""

import argparse
import dataclasses
import os
import pathlib

import tyro

from qerl_jax.cli.common import log, run_config


def train(argv: list[str]) -> None:
    """usage: qerl train CONFIG.toml [--section.field VALUE ...]

    Trains an adapter, or resumes the run in output_dir, and writes a page about it.
    `qerl train CONFIG.toml --help` shows every field of the config with its value.
    """
    cfg = run_config("train", argv)
    from qerl_jax.tracking import report
    from qerl_jax.training import trainer

    trainer.train(cfg)
    log(f"page in {report.write([cfg.output_dir])}")
    for line in report.lines(cfg.output_dir):
        log(line)


def plan(argv: list[str]) -> None:
    """usage: qerl plan CONFIG.toml [--device-memory 80GB] [--compile] [--section.field VALUE ...]

    Prints what the run will hold on the device, and whether it fits.
    --device-memory 80GB plans for a device with so much memory instead of this one.
    --compile also compiles the update of one micro-batch, and prints what it needs.
    `qerl plan CONFIG.toml --help` shows every field of the config with its value.
    """
    parser = argparse.ArgumentParser(prog="qerl plan", add_help=False)
    parser.add_argument("--device-memory")
    parser.add_argument("--compile", action="store_true")
    options, rest = parser.parse_known_args(argv)
    cfg = run_config("plan", rest)
    from pallas_kernels import runtime
    from qerl_jax import memory

    size = options.device_memory
    limit = memory.device_memory() if size is None else memory.parse_size(size)
    made = memory.estimate(cfg, limit=limit)
    for line in made.lines(limit):
        log(line)
    if options.compile:
        runtime.use_compilation_cache()
        size = memory.compiled_update(cfg).temp_size_in_bytes
        log(f"compiled  temporaries of one micro-batch {size / 1e9:.2f} GB")
    if limit is not None:
        made.require(limit)


def replay(argv: list[str]) -> None:
    """usage: qerl replay RUN_FOLDER/non_finite/STEP.npz

    Runs a step that was skipped as not finite once more, and prints what was not finite.
    """
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError("usage: qerl replay RUN_FOLDER/non_finite/STEP.npz")
    from pallas_kernels import runtime
    from qerl_jax.training import replay

    runtime.use_compilation_cache()
    for line in replay.run(argv[0]):
        log(line)


@dataclasses.dataclass(frozen=True)
class Report:
    """Writes a page about runs, and PNG files of its charts; runs that differ in the seed only share a line.

    Attributes:
        runs: Run folders.
        output_dir: Folder to write; absent means `report/` of the run, or of the working directory for
            several.
    """

    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    output_dir: pathlib.Path | None = None


def report(argv: list[str]) -> None:
    """Writes a page about runs and prints its main numbers."""
    args = tyro.cli(Report, args=argv, prog="qerl report")
    if not args.runs:
        raise ValueError("missing the runs: qerl report RUN_FOLDER ...")
    from qerl_jax.tracking import report

    shown = [(run, report.lines(run)) for run in args.runs]
    log(f"page in {report.write(args.runs, args.output_dir)}")
    for run, each in shown:
        for line in (os.fspath(run), *each) if len(shown) > 1 else each:
            log(line)
