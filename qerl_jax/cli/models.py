"""The commands that write models: `export`, `quantize`."""

import pathlib
from typing import Annotated, Literal

import tyro

import qerl_jax
from qerl_jax.cli.common import log
from qerl_jax.config import PackedFormat, Weights


def export(
    run: pathlib.Path,
    out: pathlib.Path,
    /,
    *,
    to: Literal["peft", "merged", "nvfp4", "pair"],
    base: Annotated[Literal["original", "packed"] | None, tyro.conf.arg(name="from")] = None,
    step: int | None = None,
    limit: float | None = None,
    overwrite: bool = False,
    model: str | None = None,
    weights: Weights | None = None,
) -> None:
    """Writes what a run has learned for other programs, and checks it against the trained policy.

    Args:
        run: A run folder, or the folder of an adapter: also that of a run of an older version.
        out: The new folder.
        to: "peft" is the adapter; "merged" a whole 16-bit model; "nvfp4" that model packed again; "pair" the
            packed base and the adapter in two folders, for engines that load both.
        base: Weights that the adapter is added to: the "original" 16-bit ones, or the "packed" ones that
            it was trained on. Absent means "packed" for a merged model; for "nvfp4" it must be given
            where there are both.
        step: Step of the checkpoint to take; absent means the final adapter, or the newest checkpoint.
        limit: Largest mean difference of log-probabilities, in nats; absent means what rounding
            explains.
        overwrite: Replace an earlier export in OUT.
        model: The base of an adapter without its run; absent means the one that its adapter_config.json names.
        weights: The form of that base's weights in training; absent means "nvfp4".

    Examples:
        qerl export runs/mine models/adapter --to peft
        qerl export runs/mine models/merged --to merged
        qerl export runs/mine models/packed --to nvfp4 --from packed
        qerl export runs/mine models/pair --to pair
    """
    report = qerl_jax.export(**locals())  # which has the same options

    from qerl_jax.checkpoint.export import lines

    log(f"{to} in {out}")
    log(*lines(report))


def quantize(
    source: str,
    target: pathlib.Path,
    /,
    *,
    format: PackedFormat = "nvfp4",
    method: Literal["rtn", "awq", "gptq", "awq+gptq"] = "rtn",
    block_scales: Literal["auto", "search", "maximum"] = "auto",
    scale_rounding: Literal["nearest", "floor"] = "nearest",
    double_quant: bool = True,
    dataset: str = "open-thoughts/OpenThoughts-114k",
    num_samples: int = 256,
    max_length: int = 2048,
    seed: int = 0,
    keep: tuple[str, ...] = (),
) -> None:
    """Writes a 4-bit folder of a 16-bit model, layer by layer; the same call goes on after a stop.

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
        double_quant: Leave NF4's scales in 32 bits; without this option they are quantized too.
        dataset: For all methods but "rtn", the rows to calibrate on: "arithmetic", "arithmetic-mixed", a data set
            of the hub, or a .jsonl, .json or .parquet file with messages, a text, or a question and an answer.
        num_samples: Number of rows to calibrate on.
        max_length: The most tokens used of each row.
        seed: Random seed for the choice of the rows.
        keep: Linears that stay in 16 bits: names, or patterns such as "model.layers.0.*" or "*.down_proj". Of
            linears that read the same input (q, k and v; gate and up) all stay if one does.

    Examples:
        qerl quantize Qwen/Qwen2.5-7B-Instruct qwen-nvfp4
        qerl quantize Qwen/Qwen2.5-7B-Instruct qwen-nvfp4 --method awq --keep "*.down_proj"
    """
    qerl_jax.quantize(**locals())  # which has the same options
