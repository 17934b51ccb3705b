"""Times every phase of whole training steps, NVFP4 base beside BF16 base: `python -m scripts.bench_step`.

It runs `train` itself, so what is timed is the product, not a copy of it. Each arm is a process of
its own, killed when it overstays; it must see finite, non-zero gradients and an adapter that moved,
or it fails. Prints markdown rows: seconds per phase (median of the steps after the first, which
compiles), and how far each phase is from its floor:

- rollout: the bytes that every decode step must read (linears, head, live keys and values) /
  measured bandwidth
- update: 6 * parameters of the linears * tokens (forward, recomputation, input gradient) + the
  head's share / measured bf16 rate
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile

from qerl_jax import architecture, config, log

# What one H200 reaches through JAX: a read of 4 GiB, and a bf16 product of 8192^3.
BANDWIDTH, BF16_RATE = 4.3e12, 790e12
PHASES = ("rollout", "reward", "update")


def floors(cfg: config.RunConfig) -> dict[str, float]:
    """Seconds below which no implementation on that card can go."""
    arch = architecture.KNOWN[cfg.model.model_name_or_path]
    linears = arch.num_layers * sum(
        arch.input_width(name) * size for name, parts in arch.linears().items() for _, size in parts
    )
    head = arch.vocab_size * arch.width
    rows, length = cfg.generation_batch_size, cfg.rollout.max_completion_length
    per_token = 2 * arch.num_layers * arch.kv_width * 2
    live = rows * (cfg.data.max_prompt_length / 2 + length / 2) * per_token
    weights = linears * (0.5625 if cfg.model.weights == "nvfp4" else 2) + 2 * head
    tokens = rows * (cfg.data.max_prompt_length + length)
    flops = 6 * linears * tokens + 6 * head * rows * length
    return {
        "rollout": length * (weights + live) / BANDWIDTH,
        "reward": 0.0,
        "update": flops / BF16_RATE,
    }


def run_arm(cfg: config.RunConfig, folder: pathlib.Path) -> None:
    """Trains, checks, and leaves result.json in `folder`."""
    import jax
    import numpy as np

    from qerl_jax import train
    from qerl_jax.tensor_files import Tensors

    cfg = dataclasses.replace(cfg, output_dir=str(folder / "run"))
    train.train(cfg)
    rows = [row for row in log.read_metrics(cfg.output_dir) if row["step"] > 0]
    norms = [row["grad_norm"] for row in rows]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms), norms
    adapter = Tensors(folder / "run" / "adapter", "adapter_model")
    moved = [float(np.abs(adapter[name]).max()) for name in adapter if "lora_B" in name]
    assert min(moved) > 0, "an adapter did not move"
    device = jax.devices()[0]
    steady = rows[1:] or rows
    result = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "first_step": rows[0]["step_time"],
        "phases": {
            name: statistics.median(row[f"perf/{name}_time"] for row in steady) for name in PHASES
        },
        "peak_memory_gb": rows[-1].get("perf/peak_memory_gb"),
        "logp_difference": [row["sampling/sampling_logp_difference/mean"] for row in rows],
        "logp_difference_max": max(row["sampling/sampling_logp_difference/max"] for row in rows),
        "sigma": [row.get("aqn/sigma") for row in rows],
        "grad_norm": norms,
        "smallest_adapter_change": min(moved),
        "tokens": rows[-1]["num_tokens"] / len(rows),
        "mean_length": rows[-1]["completions/mean_length"],
    }
    (folder / "result.json").write_text(json.dumps(result))


def main() -> int:
    """Runs the arms one after the other and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", default="configs/bench_7b.toml")
    parser.add_argument("--model", help="another name of architecture.KNOWN")
    parser.add_argument("--arms", default="nvfp4,bfloat16")
    parser.add_argument("--tokenizer", help="folder, where the hub cannot be reached")
    parser.add_argument("--data", help="folder, likewise")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--timeout", type=int, default=280, help="seconds per arm")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()

    cfg = config.load(args.config)
    model = dataclasses.replace(
        cfg.model,
        model_name_or_path=args.model or cfg.model.model_name_or_path,
        tokenizer_name_or_path=args.tokenizer or cfg.model.tokenizer_name_or_path,
    )
    data = dataclasses.replace(cfg.data, path=args.data or cfg.data.path)
    cfg = dataclasses.replace(cfg, model=model, data=data, max_steps=args.steps or cfg.max_steps)
    if args.child:
        arm, folder = args.child.split(":", 1)
        cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, weights=arm))
        run_arm(cfg, pathlib.Path(folder))
        return 0

    results, failed = {}, []
    for arm in args.arms.split(","):
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "scripts.bench_step",
                *sys.argv[1:],
                "--child",
                f"{arm}:{folder}",
            ]
            try:
                subprocess.run(command, timeout=args.timeout, check=True)
                results[arm] = json.loads((pathlib.Path(folder) / "result.json").read_text())
            except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
                failed.append(f"{arm}: {error}")
    if results:
        _print_table(cfg, results)
    for line in failed:
        print(f"FAILED {line}")
    return bool(failed)


def _print_table(cfg: config.RunConfig, results: dict) -> None:
    rows, length = cfg.generation_batch_size, cfg.rollout.max_completion_length
    print(
        f"{cfg.model.model_name_or_path}, {rows} rows, prompt <= {cfg.data.max_prompt_length}, {length} new tokens"
    )
    print(
        "| base | phase | seconds | floor | of floor | against bfloat16 |\n| --- | --- | --- | --- | --- | --- |"
    )
    for arm, result in results.items():
        limits = floors(dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, weights=arm)))
        for phase, seconds in result["phases"].items():
            other = results.get("bfloat16", {}).get("phases", {}).get(phase)
            against = f"{other / seconds:.2f}x" if other else ""
            share = f"{limits[phase] / seconds:.3f}" if limits[phase] else ""
            print(
                f"| {arm} | {phase} | {seconds:.3f} | {limits[phase]:.3f} | {share} | {against} |"
            )
    for arm, result in results.items():
        print(f"{arm}: {json.dumps(result)}")


if __name__ == "__main__":
    sys.exit(main())
