"""Times training steps: `python -m scripts.bench_step`, or `--rows NAME ...` for rows of the target table.

Without `--rows` it times every phase of whole steps of a config, with an NVFP4 and with a BF16 base. It runs `train`
itself. Each arm runs in its own process, which is killed at its time limit. An arm fails unless its gradients are
finite and not zero and its adapter has changed. It prints markdown rows: seconds per phase (the median of all steps but
the first, which compiles), and how far each phase is from its floor:

- rollout: bytes that every decode step must read (linears, head, live keys and values) / measured bandwidth
- update: (6 * parameters of the linears * tokens, for forward, recomputation and input gradient, plus the head's share)
  / measured bf16 rate

With `--rows` each row of `ROWS` runs in its own process with its own time limit. If its target says 80 GB, it has a
memory pool of that size (`--pool-gib`). "update" rows time only the update, on random tokens. The others time whole
steps of `train` on arithmetic problems after a filler text, so that prompts have close to 256 tokens. Bases are random
and packed on the device. Each row appends a JSON line to `--out`, with the planned and the measured peak memory. Model
FLOP/s count 4 * parameters * tokens, with a prompt once for its group and without recomputation.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from qerl_jax import config
from qerl_jax.model import architecture
from qerl_jax.tracking import logger
from scripts.limits import BF16_RATE

# What JAX reaches on one H200, reading 4 GiB. A row of another card is compared with it, too.
BANDWIDTH = 4.3e12
PHASES = ("rollout", "reward", "update")


# XLA counts .9957 of the memory that nvidia-smi prints for an H200: a fraction of 0.5723 gave a pool of 80.01 GiB.
XLA_SHARE = 0.9957
# The largest share of a card that a pool can have; the driver and cuBLAS need the rest.
MOST_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the target table.

    Attributes:
        model: Name in `architecture.KNOWN`.
        target: The target, as text.
        prompts: P, number of prompts.
        group: Completions per prompt.
        prompt: Tokens per prompt.
        completion: Tokens per completion.
        rank: LoRA rank.
        steps: Number of steps. If there are more than one, the first compiles and is not timed.
        update_only: Whether only the update is timed, on random tokens.
        pooled: Whether memory is limited to 80 GB.
        weights: Format of the linears.
        optim: Fields of `OptimConfig`; by default one optimizer step has all rows.
        remat: Value of `model.gradient_checkpointing`.
        timeout: Time limit in seconds.
    """

    model: str
    target: str
    prompts: int
    group: int
    prompt: int
    completion: int
    rank: int = 32
    steps: int = 4
    update_only: bool = False
    pooled: bool = False
    weights: str = "nvfp4"
    optim: dict = dataclasses.field(default_factory=dict)
    remat: str = "layer"
    timeout: int = 240


# By default one micro-batch holds all rows.
_ALL = {"max_tokens_per_microbatch": 8 * (8 + 1016)}
_UPDATE = Row("qwen2.5-7b", "<= 0.70 s, <= 12.5 GiB", 8, 1, 8, 1016, update_only=True, optim=_ALL)
_GROUP = Row("qwen2.5-7b", "shared prompt", 1, 8, 256, 512, update_only=True)
_TWO_PROMPTS = {"max_tokens_per_microbatch": 2 * (256 + 8 * 512)}
_ROLLOUT = Row("qwen2.5-7b", ">= 1.5x of bf16", 2, 8, 256, 512, optim=_TWO_PROMPTS)
_MANY = dataclasses.replace(
    _ROLLOUT,
    target=">= 1.1x of bf16",
    prompts=8,
)
_TWO = {"": "nvfp4", "-bf16": "bfloat16"}
ROWS = {
    "7b-update": _UPDATE,
    "7b-update-bf16": dataclasses.replace(_UPDATE, target="baseline", weights="bfloat16"),
    "7b-update-products": dataclasses.replace(_UPDATE, target="faster", remat="products"),
    "7b-update-none": dataclasses.replace(_UPDATE, target="<= 0.46 s", remat="none"),
    "7b-update-auto": dataclasses.replace(_UPDATE, target="<= 0.46 s", remat="auto"),
    "7b-update-8bit": dataclasses.replace(
        _UPDATE, target="smaller", optim=_ALL | {"optimizer": "adamw_8bit"}
    ),
    "7b-group": _GROUP,
    "7b-group-apart": dataclasses.replace(
        _GROUP, target="baseline of 7b-group", optim={"share_prompts": False}
    ),
    "32b-step": Row("qwen2.5-32b", "<= 5 s, <= 40 GB", 1, 8, 256, 512, 16, 3, pooled=True),
    "32b-update": Row("qwen2.5-32b", "", 1, 8, 256, 512, 16, update_only=True, pooled=True),
    "32b-step-mlp": Row(
        "qwen2.5-32b", "<= 5 s, <= 40 GB", 1, 8, 256, 512, 16, 3, pooled=True, remat="mlp"
    ),
    "32b-step-auto": Row(
        "qwen2.5-32b", "<= 4.9 s", 1, 8, 256, 512, 16, 3, pooled=True, remat="auto"
    ),
    "32b-update-mlp": Row(
        "qwen2.5-32b", "", 1, 8, 256, 512, 16, update_only=True, pooled=True, remat="mlp"
    ),
    # With two completions and their prompt at a time there is memory to keep products.
    "32b-step-products": Row(
        "qwen2.5-32b",
        "<= 5 s, <= 40 GB",
        1,
        8,
        256,
        512,
        16,
        3,
        pooled=True,
        optim={"max_tokens_per_microbatch": 256 + 2 * 512},
        remat="products",
    ),
    "32b-long": Row(
        "qwen2.5-32b",
        "runs",
        1,
        8,
        256,
        8192,
        16,
        2,
        pooled=True,
        optim={"max_tokens_per_microbatch": 17408},
        timeout=540,
    ),
    "72b-step": Row("qwen2.5-72b", "runs", 1, 4, 256, 1024, 16, 2, pooled=True, timeout=420),
    "7b-16": _ROLLOUT,
    "7b-16-bf16": dataclasses.replace(_ROLLOUT, target="baseline", weights="bfloat16"),
    "7b-64": _MANY,
    "7b-64-bf16": dataclasses.replace(_MANY, target="baseline", weights="bfloat16"),
    # The other steps of the paper's tables 3 and 5 to 7.
    **{
        f"{size}-{count}{suffix}": dataclasses.replace(
            row, model=f"qwen2.5-{size}", target="the paper's", weights=weights
        )
        for size, formats in (
            ("3b", _TWO),
            ("7b", {"-nf4": "nf4"}),
            ("14b", _TWO | {"-nf4": "nf4"}),
        )
        for count, row in ((16, _ROLLOUT), (64, _MANY))
        for suffix, weights in formats.items()
    },
}


def _filler(tokenizer: str, length: int) -> str:
    """A filler text that leaves 32 of `tokens` tokens for a short sum and the chat template."""
    from qerl_jax.data import tokenizer as tokenizers

    sentence, encode = "Take your time. ", tokenizers.load(tokenizer).hf.encode
    each = (len(encode(sentence * 9)) - len(encode(sentence))) / 8
    return sentence * max(0, int((length - 32) / each))


def row_config(row: Row, tokenizer: str, folder: str, kernels: str = "auto") -> config.RunConfig:
    """The config of a row's run. Its data are short sums after a filler, so that prompts have almost the row's
    length.
    """
    rows = row.prompts * row.group
    optim = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    return config.RunConfig(
        output_dir=folder,
        max_steps=row.steps,
        log_completions=False,
        model=config.ModelConfig(
            row.model,
            tokenizer,
            row.weights,
            random_base=True,
            gradient_checkpointing=row.remat,
            kernels=kernels,
        ),
        data=config.DataConfig(
            "arithmetic",
            num_problems=64,
            max_prompt_length=row.prompt,
            system_prompt="",
            prompt_template=("" if row.update_only else _filler(tokenizer, row.prompt))
            + "{prompt}",
            overlong_prompts="drop",
        ),
        rewards=config.RewardConfig(("token_hash_reward",)),
        lora=config.LoraConfig(row.rank, float(row.rank)),
        rollout=config.RolloutConfig(
            num_generations=max(2, row.group),
            generation_batch_size=rows,
            max_completion_length=row.completion,
            drafts="off",
            ignore_eos=True,
        ),
        optim=config.OptimConfig(**(optim | row.optim)),
        mesh=config.MeshConfig(1),
    )


def run_row(name: str, tokenizer: str, *, profile: bool, kernels: str = "auto") -> dict:
    """Measures one row in this process; on request also the kernels of an update."""
    import jax

    from pallas_kernels import runtime
    from qerl_jax.planning import memory

    row = ROWS[name]
    runtime.use_compilation_cache()
    runtime.use_kernels(kernels)
    with tempfile.TemporaryDirectory() as folder:
        cfg = row_config(row, tokenizer, folder, kernels)
        planned = memory.estimate(cfg, limit=memory.device_memory())
        remat = memory.planned(cfg, limit=memory.device_memory()).model.gradient_checkpointing
        result = _time_update(row, cfg, profile) if row.update_only else _time_steps(row, cfg)
    arch = architecture.KNOWN[row.model]
    seconds = result["update"]
    flops = 4 * linear_parameters(arch) * result["tokens"]
    stats = runtime.memory_stats() or {}
    return result | {
        "row": name,
        "kernels": kernels,
        "target": row.target,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
        "pool_gb": stats.get("bytes_limit", 0) / 1e9,
        "planned_gb": planned.peak / 1e9,
        "gradient_checkpointing": remat,
        "update_mfu": flops / seconds / BF16_RATE,
    }


def _time_steps(row: Row, cfg: config.RunConfig) -> dict:
    from qerl_jax.training import guards, trainer

    # The adapter is checked in steps 2, 3, 5, 9 and so on, so seldom in a long run.
    guards.is_due = lambda *_: False
    trainer.train(cfg)
    rows = logger.read_metrics(cfg.output_dir)
    norms = [logged["grad_norm"] for logged in rows]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms), norms
    steady = rows[1:] or rows
    phases = {name: statistics.median(r[f"perf/{name}_time"] for r in steady) for name in PHASES}
    mean_length = statistics.mean(logged["completions/mean_length"] for logged in steady)
    return phases | {
        "step": statistics.median(logged["step_time"] for logged in steady),
        "first_step": rows[0]["step_time"],
        "tokens": round(row.prompts * (row.prompt + row.group * mean_length)),
        "mean_length": mean_length,
        "logp_difference": rows[-1]["sampling/sampling_logp_difference/mean"],
    }


def _time_update(row: Row, cfg: config.RunConfig, profile: bool) -> dict:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from qerl_jax.model.transformer import Transformer, init_params, random_base
    from qerl_jax.planning import memory
    from qerl_jax.rl import grpo, objective, update
    from qerl_jax.rl.experience import Experience

    lora = config.LoraConfig(cfg.lora.rank, cfg.lora.alpha)
    model = Transformer(architecture.KNOWN[row.model], row.weights, lora, jnp.bfloat16)
    frozen = random_base(model, jax.random.key(0))
    state = update.init_state(init_params(model, frozen, jax.random.key(1)), cfg.optim)
    planned = memory.planned(cfg, limit=memory.device_memory())
    improve = update.make_updater(planned, model, 151665, row.steps)
    rng = np.random.default_rng(0)
    rows = row.prompts * row.group
    shared = row.prompts if cfg.optim.share_prompts else rows
    size = rows * row.completion
    experience = Experience(
        prompts=rng.integers(0, 151643, shared * row.prompt, np.int32),
        prompt_offsets=np.arange(shared + 1) * row.prompt,
        completions=rng.integers(0, 151643, size, np.int32),
        offsets=np.arange(rows + 1) * row.completion,
        mask=np.ones(size, bool),
        # Close to what random weights give, so that no ratio is clipped.
        behaviour_logps=np.full(size, -12.0, np.float32),
        advantages=np.where(np.arange(rows) % 2, 1.0, -1.0).astype(np.float32),
    )
    times = []
    for step in range(row.steps):
        started = time.perf_counter()
        state, metrics = improve(state, frozen, experience, None, jax.random.key(step))
        jax.block_until_ready(state)
        times.append(time.perf_counter() - started)
        assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0, metrics
    tokens = shared * row.prompt + size
    result = {"update": statistics.median(times[1:]), "first_step": times[0], "tokens": tokens}
    if not profile:
        return result
    gradient = functools.partial(objective.gradient, improve.objective)
    counts = (rows, experience.mask.sum(), row.completion)
    totals = grpo.BatchTotals(*map(jnp.int32, counts))
    first, *_ = update.micro_batches(improve, experience, experience.rows)
    packed = experience.pack(first, {})
    arguments = (state.params, frozen, None, packed, totals, jax.random.key(0))
    return result | _kernels(gradient, arguments)


def _kernels(gradient, arguments) -> dict:
    """Device seconds of all kernels, and of the longest ones, in the gradient of the first micro-batch."""
    import jax
    from jax.experimental.mosaic.gpu import profiler

    _, kernels = profiler.measure(jax.jit(gradient), aggregate=False)(*arguments)
    spent, launches = collections.Counter(), collections.Counter()
    for name, milliseconds in kernels:
        spent[name] += milliseconds / 1e3
        launches[name] += 1
    most = [(name[:80], launches[name], seconds) for name, seconds in spent.most_common(40)]
    return {"kernels": spent.total(), "longest": most}


def linear_parameters(arch: architecture.Architecture) -> int:
    """Number of weights in the linears of all layers."""
    return arch.num_layers * sum(
        arch.input_width(name) * size for name, parts in arch.linears().items() for _, size in parts
    )


def pool_share(pool_gib: float) -> float:
    """The share of this card's memory that is a pool of this size, at most `MOST_SHARE`."""
    ask = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    said = subprocess.run(ask, check=True, capture_output=True, text=True).stdout
    return min(MOST_SHARE, pool_gib / (XLA_SHARE * float(said.split()[0]) / 1024))


def bench_rows(
    names: list[str],
    tokenizer: str | None,
    pool_gib: float,
    out: pathlib.Path,
    *,
    profile: bool,
    kernels: str = "auto",
) -> int:
    """Runs rows one after the other, each in its own process. Each result is written at once."""
    failed = 0
    for name in names:
        row, environment = ROWS[name], dict(os.environ)
        if row.pooled:
            environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{pool_share(pool_gib):.4f}"
        command = [sys.executable, "-m", "scripts.bench_step", "--row", name]
        command += ["--kernels", kernels]
        command += ["--profile"] if profile else []
        command += ["--tokenizer", tokenizer or "Qwen/Qwen2.5-7B-Instruct"]
        try:
            done = subprocess.run(
                command,
                timeout=row.timeout,
                check=True,
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )
            result = json.loads(done.stdout.splitlines()[-1])
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            failed += 1
            result = {"row": name, "target": row.target, "failed": str(error)}
        if "failed" not in result and abs(result["peak_gb"] / result["planned_gb"] - 1) > 0.1:
            failed += 1
            result["failed"] = "the peak is not within 10 % of the plan"
        with out.open("a") as file:
            file.write(json.dumps(result) + "\n")
        print(json.dumps(result), flush=True)
    return bool(failed)


def floors(cfg: config.RunConfig) -> dict[str, float]:
    """The least seconds that any implementation needs on an H200, by phase."""
    arch = architecture.known(cfg.model.model_name_or_path)
    linears = linear_parameters(arch)
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
    """Trains, checks, and writes result.json into `folder`."""
    import jax
    import numpy as np

    from qerl_jax.checkpoint.safetensors import Tensors
    from qerl_jax.training import trainer

    cfg = dataclasses.replace(cfg, output_dir=str(folder / "run"))
    trainer.train(cfg)
    rows = [row for row in logger.read_metrics(cfg.output_dir) if row["step"] > 0]
    norms = [row["grad_norm"] for row in rows]
    assert all(math.isfinite(norm) and norm > 0 for norm in norms), norms
    adapter = Tensors(folder / "run" / "adapter", "adapter_model")
    moved = [float(np.abs(adapter[name]).max()) for name in adapter if "lora_B" in name]
    assert min(moved) > 0, "an adapter did not change"
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
    parser.add_argument("--model", help="a name of architecture.KNOWN; default: the config's")
    parser.add_argument("--arms", default="nvfp4,bfloat16")
    parser.add_argument("--tokenizer", help="folder of the tokenizer, if the hub cannot be reached")
    parser.add_argument("--data", help="folder of the data, if the hub cannot be reached")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--timeout", type=int, default=280, help="time limit of an arm, in seconds")
    parser.add_argument(
        "--kernels", default="auto", choices=("auto", "hopper", "portable", "reference")
    )
    parser.add_argument(
        "--rows", nargs="+", choices=[*ROWS, "all"], help="rows of the target table"
    )
    parser.add_argument(
        "--pool-gib", type=float, default=78, help="memory pool of rows for an 80 GB card, in GiB"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("bench_step.jsonl"))
    parser.add_argument(
        "--profile",
        action="store_true",
        help="for rows that time only an update: print its longest kernels",
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--row", help=argparse.SUPPRESS)
    args = parser.parse_args()

    if (
        args.profile
        and not args.row
        and any(name == "all" or not ROWS[name].update_only for name in args.rows or ("all",))
    ):
        parser.error("--profile needs --rows that time only an update")
    if args.row:
        traits = {"profile": args.profile, "kernels": args.kernels}
        print(json.dumps(run_row(args.row, args.tokenizer, **traits)))
        return 0
    if args.rows:
        names = list(ROWS) if "all" in args.rows else args.rows
        traits = {"profile": args.profile, "kernels": args.kernels}
        return bench_rows(names, args.tokenizer, args.pool_gib, args.out, **traits)

    cfg = config.load(args.config)
    model = dataclasses.replace(
        cfg.model,
        model_name_or_path=args.model or cfg.model.model_name_or_path,
        tokenizer_name_or_path=args.tokenizer or cfg.model.tokenizer_name_or_path,
        kernels=args.kernels,
    )
    data = dataclasses.replace(cfg.data, path=args.data or cfg.data.path)
    cfg = dataclasses.replace(cfg, model=model, data=data)
    if args.steps:
        cfg = dataclasses.replace(cfg, max_steps=args.steps, num_train_epochs=None)
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
