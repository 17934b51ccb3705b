"""The jobs of the command line as functions: measure, export, quantize, plan, report."""

import os
import pathlib
import sys
import tempfile
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal

from pallas_kernels import runtime
from qerl_jax.api import policy as policies
from qerl_jax.api.policy import Policy
from qerl_jax.api.settings import Config, Mesh, mesh_of, options_of, run_config
from qerl_jax.checkpoint import export as exports
from qerl_jax.checkpoint import policy as sources
from qerl_jax.checkpoint.policy import PolicySource
from qerl_jax.config import BlockScales, MeshConfig, PackedFormat, Weights
from qerl_jax.evaluation import benchmark
from qerl_jax.evaluation.options import EvalOptions
from qerl_jax.planning import cards, memory
from qerl_jax.planning.memory import Plan
from qerl_jax.quantization import quantizer
from qerl_jax.quantization.calibration import Calibration
from qerl_jax.system.checked import ConfigError, require
from qerl_jax.tracking import terminal


def evaluate(
    policy: Policy | PolicySource | str | os.PathLike,
    *sets: str,
    options: EvalOptions | None = None,
    output_dir: str | os.PathLike | None = None,
    mesh: Mesh | None = None,
    quiet: bool = False,
    **fields: Any,
) -> dict[str, dict[str, Any]]:
    """Measures how often a policy is right on sets of problems, with confidence intervals.

    >>> summaries = qerl_jax.evaluate(
    ...     policy, "arithmetic", samples=2, max_tokens=40, num_problems=16, quiet=True)
    >>> summary = summaries["arithmetic"]
    >>> summary["problems"], summary["samples"], summary["estimates"][0]["name"]
    (16, 2, 'mean@2')
    >>> low, high = summary["estimates"][0]["over_problems"]
    >>> 0 <= low <= summary["estimates"][0]["value"] <= high <= 1
    True

    Args:
        policy: A loaded policy, a run, or the name of a model, run folder or PEFT folder. The protocol "run" has
            the tools of the run; a policy `with_tools` has its own, whatever the protocol.
        *sets: "gsm8k", "math500", "aime24", "aime25", "amc23", "arithmetic", any data set of the hub,
            or a .jsonl, .json or .parquet file of {"prompt": ..., "answer": ...}.
        options: How the sets are asked and judged; absent means the defaults.
        output_dir: Folder of the results; a call that finds unfinished results goes on from there. Absent
            means a folder in `eval/` of the run folder, or without a run in `evals/`. Its name is that of the
            policy, and of the protocol if one is given. Results of a policy that is not saved are not kept.
        mesh: The devices, as the section [mesh] of a config has them. Absent means all of this process, one for
            each replica. A loaded policy has its own.
        quiet: Show nothing on the terminal.
        **fields: Fields of `EvalOptions` that take another value.

    Returns:
        A summary by set: `problems`, `samples`, `mean_length`, and `estimates`, of which each has a
        `name` (mean@N first, then pass@k and maj@k), a `value`, and the ends of its 95 % intervals.

    Raises:
        ConfigError: For an impossible argument, by its name.
        ValueError: For problems or rewards that cannot be used, or results of something else in the folder.
    """
    options = options_of(EvalOptions, options, "options", fields)
    _check_sets(sets, options.path)
    loaded = policy if isinstance(policy, Policy) else None
    rule = "must be absent for a loaded policy: give it to qerl_jax.load"
    require(mesh is None or loaded is None, "mesh", mesh, rule)
    mesh = mesh_of(mesh, MeshConfig())
    runtime.use_compilation_cache()
    source = policy.source if isinstance(policy, Policy) else policy
    source = source if isinstance(source, PolicySource) else policies.find(source)
    tools = loaded.tools if loaded else None
    jobs = []
    for name in map(os.fspath, sets):
        protocol = benchmark.protocol_for(name, source, options, tools.cfg if tools else None)
        jobs.append((benchmark.source_of(name, source, options), protocol))
    with tempfile.TemporaryDirectory() as temporary:
        folder = output_dir or results_folder(source, options.protocol)
        if loaded and loaded.unsaved:
            rule = "must be absent for weights that are in no file: call save_pretrained first"
            require(output_dir is None, "output_dir", output_dir, rule)
            folder = temporary
        return benchmark.run(
            source,
            jobs,
            pathlib.Path(folder),
            seed=options.seed,
            max_concurrent=options.max_concurrent,
            log=_log(quiet),
            policy=loaded,
            mesh=mesh,
            quiet=quiet,
            toolboxes=tools.toolboxes if tools else None,
        )


def _check_sets(sets: tuple, path: str | None) -> None:
    """Refuses anything but names or files, and more than one of them with a path."""
    if not sets:
        raise ConfigError('sets: got none; give at least one, such as "gsm8k"')
    for index, name in enumerate(sets):
        rule = "must be the name of a set, or a file; rows are written to a .jsonl file first"
        require(isinstance(name, str | os.PathLike), f"sets[{index}]", name, rule)
    rule = "must be absent with several sets: it is the place of one"
    require(path is None or len(sets) == 1, "path", path, rule)


def _check_choices(*choices: tuple[str, Any, tuple]) -> None:
    """Refuses an argument, by its name and value, that is not among its possible values."""
    for name, value, values in choices:
        require(value in values, name, value, f"must be one of {', '.join(map(repr, values))}")


def results_folder(source: PolicySource, protocol: str | None) -> pathlib.Path:
    """The default folder for the results of a policy."""
    parent = source.folder / "eval" if source.folder else pathlib.Path("evals")
    return parent / (source.name if protocol is None else f"{source.name}-{protocol}")


def export(
    run: Policy | str | os.PathLike,
    out: str | os.PathLike,
    *,
    to: Literal["peft", "merged", "nvfp4", "pair"] = "peft",
    base: Literal["original", "packed"] | None = None,
    step: int | None = None,
    limit: float | None = None,
    overwrite: bool = False,
    model: str | None = None,
    weights: Weights | None = None,
) -> dict[str, Any]:
    """Writes what a run has learned for other programs, and checks it against the trained policy.

    >>> report = qerl_jax.export(run, "exported", to="merged", base="packed")
    >>> report["mean_difference"] <= report["limit"]
    True

    Args:
        run: A run, its folder, a policy that was loaded from one, or the folder of an adapter.
        out: The new folder. It appears whole or not at all.
        to: "peft" is the adapter; "merged" a whole 16-bit model; "nvfp4" that model packed again; "pair" the
            packed base and the adapter in two folders, for engines that load both.
        base: Weights that the adapter is added to: the "original" 16-bit ones, or the "packed" ones
            that it was trained on. Absent means "packed" for a merged model; for "nvfp4" it must be
            given where there are both.
        step: Step of the checkpoint to take; absent means the final adapter, or the newest checkpoint.
        limit: Largest mean difference of log-probabilities, in nats; absent means what rounding explains.
        overwrite: Whether an earlier export in `out` is replaced.
        model: The base of an adapter without its run; absent means the one that its adapter_config.json names.
        weights: The form of that base's weights in training; absent means "nvfp4".

    Returns:
        How far the export is from the trained policy, as its export.json has it.

    Raises:
        ConfigError: For a policy that no run has trained: `Policy.save_pretrained` writes its adapter.
        FileNotFoundError: When the run, or what it has learned, is not there.
        FileExistsError: When `out` holds files, or with `overwrite` files that are no export.
        ExportError: When the log-probabilities differ by more than the limit; nothing is written.
    """
    _check_choices(
        ("to", to, ("peft", "merged", "nvfp4", "pair")),
        ("base", base, (None, "original", "packed")),
    )
    path: Any = run
    if isinstance(run, Policy):
        rule = "must come from a run as it was trained; its adapter is written by save_pretrained"
        source, path = run.source, run.source.folder
        is_newest = path is not None and (
            source.step or sources.saved(path) == (source.adapter, None)
        )
        require(is_newest and not run.unsaved, "run", run, rule)
        step = source.step if step is None else step
    require(isinstance(path, str | os.PathLike), "run", run, "must be a run, or its folder")
    runtime.use_compilation_cache()
    options: dict[str, Any] = {"base": base, "step": step, "limit": limit, "overwrite": overwrite}
    options |= {"model": model, "weights": weights}
    return exports.export(os.fspath(path), to, pathlib.Path(out), **options)


def quantize(
    source: str | os.PathLike,
    target: str | os.PathLike,
    *,
    format: PackedFormat = "nvfp4",
    method: quantizer.Method = "rtn",
    block_scales: BlockScales = "auto",
    scale_rounding: Literal["nearest", "floor"] = "nearest",
    double_quant: bool = True,
    dataset: str = Calibration.dataset,
    num_samples: int = Calibration.num_samples,
    max_length: int = Calibration.max_length,
    seed: int = 0,
    keep: Sequence[str] = (),
    quiet: bool = False,
) -> dict[str, Any]:
    """Writes a 4-bit folder of a 16-bit model, layer by layer; the same call goes on after a stop.

    >>> report = qerl_jax.quantize("qerl-tiny", "tiny-nvfp4", quiet=True)
    >>> report["bytes"] < report["source_bytes"]
    True
    >>> qerl_jax.load("tiny-nvfp4", dtype="float32")
    Policy('tiny-nvfp4', adapter=None, weights='nvfp4')

    Args:
        source: A 16-bit folder or hub name.
        target: The new folder; one that exists must be empty.
        format: Format that the linears are packed to.
        method: "rtn" rounds to nearest; "awq" finds scales of inputs by calibration; "gptq" corrects the
            errors of earlier columns in later ones; "awq+gptq" does one after the other.
        block_scales: "search" takes for each block of weights the scale that rounds it best; "maximum" the
            one that other libraries take. "auto" searches where that is better: for NVFP4, and wherever there
            is calibration.
        scale_rounding: How MXFP4's scales are rounded: compressed-tensors' "nearest", or the OCP
            specification's "floor".
        double_quant: Whether NF4's scales are quantized too.
        dataset: For all methods but "rtn", the rows to calibrate on; see `Calibration`.
        num_samples: Number of rows to calibrate on.
        max_length: The most tokens used of each row.
        seed: Random seed for the choice of the rows.
        keep: Linears that stay in 16 bits: a name, a pattern such as "model.layers.0.*" or "*.down_proj", or a
            list of these. Of linears that read the same input (q, k and v; gate and up) all stay if one does.
        quiet: Show nothing.

    Returns:
        The report, which the folder holds as quantization_report.json: sizes, time, errors by layer.

    Raises:
        FileExistsError: When the target holds something, or what is left of a job that differs.
        ValueError: When the source is quantized already, cannot be packed, or will not fit on disk.
    """
    _check_choices(
        ("format", format, typing.get_args(PackedFormat)),
        ("method", method, typing.get_args(quantizer.Method)),
        ("block_scales", block_scales, typing.get_args(BlockScales)),
        ("scale_rounding", scale_rounding, ("nearest", "floor")),
    )
    runtime.use_compilation_cache()
    rows = Calibration(dataset, num_samples, max_length, seed)
    patterns = (keep,) if isinstance(keep, str) else tuple(keep)
    choices = (format, method, block_scales, scale_rounding, double_quant)
    recipe = quantizer.Recipe(*choices, rows, patterns)
    if quiet:
        return quantizer.quantize(os.fspath(source), pathlib.Path(target), recipe, _log(quiet))
    with terminal.job("quantizing") as (log, move):
        return quantizer.quantize(os.fspath(source), pathlib.Path(target), recipe, log, move)


def plan(
    config: Config,
    device_memory: str | int | None = None,
    device: str | None = None,
    **overrides: Any,
) -> Plan:
    """Estimates how much device memory a run needs; no weight is made.

    >>> plan = qerl_jax.plan(run.config, device_memory="80GB")
    >>> plan.fits, plan.peak < 1e9
    (True, True)
    >>> print(plan)  # doctest: +ELLIPSIS
    always ...

    Args:
        config: A config, in any form that `train` takes.
        device_memory: Memory of the device as "80GB" or in bytes; absent means that of this device, or of `device`.
        device: Name of a card to plan for, such as "RTX 4090"; absent means this device.
        **overrides: As for `train`.

    Raises:
        ConfigError: For an impossible config, or an unknown card.
        ValueError: For a size that cannot be read.
    """
    cfg = run_config(config, overrides)
    card = None if device is None else cards.named(device)
    limit = memory.device_memory() if card is None else card.limit
    if device_memory is not None:
        limit = memory.parse_size(str(device_memory))
    return memory.plan(cfg, limit=limit, device=card.device if card else None)


def report(*runs: str | os.PathLike, output_dir: str | os.PathLike | None = None) -> pathlib.Path:
    """Writes a page about one or several runs, with PNG files of its charts, and returns its path.

    >>> qerl_jax.report(run).name
    'index.html'

    Args:
        *runs: Runs, or run folders; those that differ only in the seed share a line.
        output_dir: Folder to write; absent means `report/` of the run, or of the working directory for
            several.

    Raises:
        ConfigError: For no run at all.
        FileNotFoundError: When a folder holds no metrics.
    """
    from qerl_jax.tracking import report as pages  # slow to import: it draws

    require(len(runs) > 0, "runs", runs, "must be at least one")
    for index, run in enumerate(runs):
        rule = "must be a run, or its folder; several are given one after the other: report(*runs)"
        require(isinstance(run, str | os.PathLike), f"runs[{index}]", run, rule)
    folder = None if output_dir is None else pathlib.Path(output_dir)
    return pages.write([pathlib.Path(run) for run in runs], folder)


def _log(quiet: bool) -> Callable[[str], None]:
    """Returns what writes a line to the standard output at once, or does nothing."""

    def say(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    return (lambda text: None) if quiet else say
