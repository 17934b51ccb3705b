"""Measures tokens per second of a shipped recipe on one and several devices: `python -m scripts.bench_scale`.

Runs `train` itself as `scripts.bench_recipe` does: with a random base and completions that end at lengths from a
committed file. In strong scaling a rollout has 512 completions on any number of devices; in weak scaling it has 512 per
device. The first two rollouts compile and are not timed.

    python -m scripts.bench_scale                                # the recipe of 7B on 1, 2 and 4 devices
    python -m scripts.bench_scale --devices 1 2 --how strong
    python -m scripts.bench_scale --mesh tensor --shape qwen2.5-32b   # decoding 16 rows on 1, 2 and 4 devices together
    python -m scripts.bench_scale --mesh fsdp tensor --devices 4 --rows 16 64 --base bfloat16
    python -m scripts.bench_scale --tiny --devices 1 2           # a trial on virtual devices of a CPU, in minutes

It prints for each row: seconds of a rollout and its updates, by phase; completion tokens per second, also relative to
the fewest devices; seconds of the all-reduce of an adapter's gradients; and the largest memory of a device. Rows of
strong scaling must agree: the same number of tokens, and log-probabilities of trainer and sampler as close to each
other as on the fewest devices. (Texts and rewards differ: with another batch size a last bit can change a token.) Every
row runs in its own process, which sees only its devices (CUDA_VISIBLE_DEVICES) and is killed at its time limit.

With --mesh no recipe is trained: rows are decoded by one replica of all devices, which share a random base (`fsdp`) or
decode rows together (`tensor`), as `scripts.bench_rollouts` does it on one device. It prints: milliseconds of a step;
tokens per second, also relative to the fewest devices; milliseconds of a step's all-reduces alone, two per layer of
bfloat16 [rows, width], and microseconds of one; which kernels decode; and the largest memory of a device.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from scripts import bench_recipe

ROOT = pathlib.Path(__file__).resolve().parents[1]
ROWS = 512  # completions of a rollout, in all or per device
UNTIMED = 2
# How much larger the difference of trainer and sampler may be than on the fewest devices: a factor, and in nats.
_FACTOR, _NATS = 1.5, 1e-6
PHASES = bench_recipe.PHASES


def recipe(args: argparse.Namespace, how: str, devices: int) -> Any:
    """The config of a row."""
    from qerl_jax import config

    rows = ROWS * (devices if how == "weak" else 1)
    if args.tiny:
        cfg = config.load(ROOT / "configs" / "quickstart.toml")
        rollout = dataclasses.replace(cfg.rollout, generation_batch_size=rows // 8)
        optim = dataclasses.replace(
            cfg.optim, per_device_train_batch_size=8, gradient_accumulation_steps=rows // 64
        )
        return dataclasses.replace(
            cfg, rollout=rollout, optim=optim, mesh=config.MeshConfig(devices)
        )
    cfg = config.load(ROOT / "configs" / f"{bench_recipe.RECIPES[args.shape]}.toml")
    cfg = bench_recipe.with_random_base(cfg, args.shape, rows)
    for field in args.set:
        cfg = bench_recipe.with_field(cfg, *field.split("=", 1))
    return dataclasses.replace(cfg, mesh=config.MeshConfig(devices))


def measure(args: argparse.Namespace, how: str, devices: int) -> dict[str, Any]:
    """Trains for a few rollouts in this process. Returns medians of the timed ones."""
    import jax

    from qerl_jax.distributed.mesh import Replicas
    from qerl_jax.tracking.logger import read_metrics
    from qerl_jax.training import trainer

    cfg, given, ends = recipe(args, how, devices), {}, []
    if not args.tiny:
        limit = cfg.rollout.max_completion_length
        bench_recipe.end_rows_at(bench_recipe.completion_lengths("0.5", args.truncated, limit))
        given = {"problems": bench_recipe.problems(), "reward_functions": [bench_recipe.reward]}
    begun = time.perf_counter()

    def on_step(step, row):
        ends.append(time.perf_counter() - begun)
        spent = {phase: round(row[f"perf/{phase}_time"], 2) for phase in PHASES}
        print(f"{ends[-1]:.1f} s: step {step}, {spent}", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory() as folder:
        cfg = bench_recipe.short_run(cfg, folder, args.rollouts)
        state = trainer.train(cfg, on_step=on_step, quiet=True, **given)
        rows = read_metrics(cfg.output_dir)
    later = rows[UNTIMED:]
    median = lambda name: statistics.median(row[name] for row in later)
    step = statistics.median(
        end - start for start, end in zip(ends[UNTIMED - 1 :], ends[UNTIMED:], strict=False)
    )
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "step_s": step,
        **{f"{phase}_s": median(f"perf/{phase}_time") for phase in PHASES},
        "first_s": ends[0],
        "tokens_per_s": median("completions/mean_length") * cfg.generation_batch_size / step,
        "sampled": rows[0]["num_tokens"],
        "mismatch": rows[0]["sampling/sampling_logp_difference/mean"],
        "peak_gb": max(each.get("peak_bytes_in_use", 0) for each in stats) / 1e9,
        **all_reduce(Replicas.of(cfg.mesh, cfg.generation_batch_size), state.params),
    }


def measure_decode(args: argparse.Namespace, how: str, rows: int, devices: int) -> dict[str, Any]:
    """Decodes rows on one replica of so many devices in this process."""
    import jax

    from qerl_jax.config import MeshConfig
    from qerl_jax.model import fused_decode
    from scripts import bench_rollouts

    if args.tiny:
        bench_rollouts.PROMPT, bench_rollouts.SHORT, bench_rollouts.LONG = 16, 32, 64
    model = str(ROOT / "qerl_jax" / "assets" / "tiny") if args.tiny else args.shape
    mesh = MeshConfig(data=1, **{how: devices})
    prompts = {"prompt": bench_rollouts.PROMPT, "siblings": 1}
    asked = argparse.Namespace(model=model, rank=32, kernels="auto", **prompts)
    bench = bench_rollouts.Bench(asked, args.base, mesh)
    row = bench_rollouts.decode(bench, rows)
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    together = mesh.tensor > 1
    each = reduce_of_rows(bench.replicas, rows, bench.arch.width) if together else 0.0
    return {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "base": args.base,
        "rows": rows,
        "step_s": row["step"],
        "first_s": row["first_call"],
        "tokens_per_s": rows / row["step"],
        "reduce_s": each,
        "reduces_s": 2 * bench.arch.num_layers * each,
        "kernels": fused_decode.fit(bench.model.own_part, rows) or "plain",
        "peak_gb": max(stat.get("peak_bytes_in_use", 0) for stat in stats) / 1e9,
    }


def reduce_of_rows(replicas: Any, rows: int, width: int, times: int = 128) -> float:
    """Seconds of an all-reduce of bfloat16 [rows, width] over the devices of a replica, of many one after the other."""
    import jax
    import jax.numpy as jnp

    from qerl_jax.distributed import sharding

    def reduced(x):
        mean = lambda _, y: jax.lax.psum(y, sharding.GROUP) / replicas.group
        return jax.lax.fori_loop(0, times, mean, x)

    run = jax.jit(sharding.in_group(replicas.group, reduced))
    (x,), spent = replicas.each(replicas.hold(jnp.ones((rows, width), jnp.bfloat16))), []
    for _ in range(6):
        begun = time.perf_counter()
        jax.block_until_ready(run(x))
        spent.append(time.perf_counter() - begun)
    return min(spent[1:]) / times


def all_reduce(replicas: Any, params: Any) -> dict[str, float]:
    """Median seconds of ten all-reduces of an adapter's gradients over all devices, and their size in gigabytes."""
    import jax

    each, spent = replicas.each(params), []
    for _ in range(11):
        begun = time.perf_counter()
        jax.block_until_ready(replicas.total(each))
        spent.append(time.perf_counter() - begun)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 1e9
    return {"all_reduce_s": statistics.median(spent[1:]), "all_reduce_gb": size}


def environment(tiny: bool, devices: int) -> dict[str, str]:
    """Environment variables that limit a process to this many devices."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if tiny:
        flags = (
            f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
        )
        return os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(16)))).split(",")
    return os.environ | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": ",".join(seen[:devices])}


def run(args: argparse.Namespace, devices: int, *how: str) -> dict[str, Any]:
    """Runs a row in its own process. The result is empty if it failed."""
    command = [sys.executable, "-m", "scripts.bench_scale", "--child", str(devices), *how]
    command += ["--base", args.base, "--shape", args.shape, "--truncated", str(args.truncated)]
    command += ["--rollouts", str(args.rollouts), *(["--tiny"] if args.tiny else [])]
    command += ["--set", *args.set] if args.set else []
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=ROOT,
        env=environment(args.tiny, devices),
    )
    try:
        output, _ = process.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(f"killed after {args.timeout:g} s", flush=True)
    found = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
    return found[0] if found else {}


def disagreement(row: dict[str, Any], first: dict[str, Any]) -> str | None:
    """How a row of strong scaling wrongly differs from the one with the fewest devices; None if it does not."""
    if row["sampled"] != first["sampled"]:
        return f"{row['sampled']} tokens in the first step instead of {first['sampled']}"
    if row["mismatch"] > _FACTOR * first["mismatch"] + _NATS:
        return f"trainer and sampler differ by {row['mismatch']:.3g} nats instead of {first['mismatch']:.3g}"
    return None


def main() -> int:
    """Runs the rows one after the other and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--how", nargs="+", default=["strong", "weak"], choices=["strong", "weak"])
    parser.add_argument(
        "--mesh",
        nargs="+",
        choices=["fsdp", "tensor"],
        help="time decoding on these meshes instead of a recipe",
    )
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[16], help="with --mesh: rows that are decoded"
    )
    parser.add_argument(
        "--base",
        default="nvfp4",
        choices=["nvfp4", "mxfp4", "nf4", "bfloat16"],
        help="with --mesh: format of the base",
    )
    parser.add_argument(
        "--shape",
        default="qwen2.5-7b",
        help=f"recipe: {', '.join(bench_recipe.RECIPES)}; with --mesh any known shape",
    )
    parser.add_argument(
        "--truncated", type=float, default=0.0, help="share of rows that reach the limit"
    )
    parser.add_argument(
        "--rollouts", type=int, default=4, help="number of rollouts; the first two only compile"
    )
    parser.add_argument(
        "--timeout", type=float, default=280, help="time limit of a row, in seconds"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="run the quickstart on virtual CPU devices"
    )
    parser.add_argument("--out", type=pathlib.Path, help="append rows to this JSONL file")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="FIELD=VALUE", help="change a field of the recipe"
    )
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rollouts <= UNTIMED:
        parser.error(f"--rollouts: got {args.rollouts}; must be at least {UNTIMED + 1}")
    if not args.mesh and args.shape not in bench_recipe.RECIPES and not args.child:
        parser.error(f"--shape: got {args.shape}; must be one of {', '.join(bench_recipe.RECIPES)}")
    if args.child:
        devices, how, *rows = args.child
        if rows:
            row = measure_decode(args, how, int(rows[0]), int(devices))
        else:
            row = measure(args, how, int(devices))
        print("ROW " + json.dumps(row), flush=True)
        return 0
    if args.mesh:
        return decode_table(args)
    print(
        "| scaling, devices | step s | rollout | reward | update | tokens/s | x | all-reduce | GB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    failed, alone = False, {}
    for how in args.how:
        first: dict[str, Any] = {}
        for devices in sorted(args.devices):
            # On one device strong and weak scaling are the same.
            row = dict(alone) if devices == 1 and alone else run(args, devices, how)
            alone = row if devices == 1 else alone
            failed |= not row
            if not row:
                continue
            first = first or row
            record(args, row, first, how=how, devices=devices, tiny="quickstart")
            print(_line(row), flush=True)
            if how == "strong" and (found := disagreement(row, first)):
                failed = True
                print(f"{devices} devices and {first['devices']} disagree: {found}")
    return int(failed)


def record(
    args: argparse.Namespace, row: dict[str, Any], first: dict[str, Any], *, tiny: str, **how: Any
) -> None:
    """Adds to a row what it was and its speed as a multiple of the first row's, and appends it to --out."""
    row |= how | {"date": time.strftime("%Y-%m-%d"), "what": tiny if args.tiny else args.shape}
    row["times"] = row["tokens_per_s"] / first["tokens_per_s"]
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(row) + "\n")


def decode_table(args: argparse.Namespace) -> int:
    """Prints the rows of --mesh; the exit status."""
    print(
        "| mesh, devices | rows | step ms | tokens/s | x | all-reduces ms | of one us | kernels | GB |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    failed = False
    for how, rows in itertools.product(args.mesh, args.rows):
        first: dict[str, Any] = {}
        for devices in sorted(args.devices):
            row = run(args, devices, how, str(rows))
            failed |= not row
            if not row:
                continue
            first = first or row
            record(args, row, first, how=how, devices=devices, tiny="tiny")
            cells = [f"{row['what']}, {how}, {devices}", f"{rows}", f"{row['step_s'] * 1e3:.2f}"]
            cells += [f"{row['tokens_per_s']:.0f}", f"{row['times']:.2f}"]
            cells += [f"{row['reduces_s'] * 1e3:.2f}", f"{row['reduce_s'] * 1e6:.0f}"]
            print(
                f"| {' | '.join([*cells, row['kernels'], f'{row["peak_gb"]:.1f}'])} |", flush=True
            )
    return int(failed)


def _line(row: dict[str, Any]) -> str:
    seconds = [f"{row[f'{name}_s']:.2f}" for name in ("step", *PHASES)]
    cells = [f"{row['what']}, {row['how']}, {row['devices']}", *seconds]
    cells += [f"{row['tokens_per_s']:.0f}", f"{row['times']:.2f}"]
    cells += [f"{row['all_reduce_s'] * 1e3:.1f} ms", f"{row['peak_gb']:.1f}"]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
