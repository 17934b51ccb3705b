"""Benchmarks of training, for `scripts.bench`: an update, whole steps, a shipped recipe, several devices, one layer.

Bases are random in a known shape, and packed on the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.data import tokenizer as tokenizers
from qerl_jax.data.datasets import Problem
from qerl_jax.distributed.mesh import Replicas
from qerl_jax.evaluation.evaluator import Evaluator, judged, protocol_of_run
from qerl_jax.generation.sampler import Sampler
from qerl_jax.generation.sampling_params import EngineLimits
from qerl_jax.model.transformer import Transformer, init_params, random_base
from qerl_jax.planning import memory
from qerl_jax.rl import update as updates
from qerl_jax.rl.experience import make_experience
from qerl_jax.rl.rollouts import Rollout
from qerl_jax.tracking.logger import read_metrics
from qerl_jax.training import trainer
from scripts.bench import BF16_RATE, ROOT, Benchmark, Case, Tell
from scripts.bench_sampling import (
    KNOWN_IDS,
    TINY,
    by_kernel,
    devices_of,
    known_name,
    peak_gb,
    print_kernels,
    seconds_of,
    shape_of,
)
from scripts.check_device_run import Stages

LENGTHS = ROOT / "scripts" / "bench_recipe_lengths.json"
PHASES = ("rollout", "reward", "update")
# Rollouts that compile: the first sampling and learning, the second a run's own checks.
UNTIMED = 2
# XLA counts .9957 of the memory that nvidia-smi prints: a fraction of 0.5723 gave a pool of 80.01 GiB on an H200.
XLA_SHARE = 0.9957
# The largest share of a card that a pool can have; the driver and cuBLAS need the rest.
MOST_SHARE = 0.95
# How much larger the difference of trainer and sampler may be than on the fewest devices: a factor, and in nats.
_FACTOR, _NATS = 1.5, 1e-6


def pool_of(case: Case) -> dict[str, str]:
    """The environment variable that limits a process to a pool of memory of so many GiB, as on a smaller card."""
    if not case["pool_gib"]:
        return {}
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    share = case["pool_gib"] / (XLA_SHARE * float(text.split()[0]) / 1024)
    return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{min(MOST_SHARE, share):.4f}"}


def filler(tokenizer: str, length: int) -> str:
    """A text that leaves 32 of so many tokens for a short sum and the chat template."""
    sentence, ids = "Take your time. ", tokenizers.load(tokenizer).ids
    longer, shorter = map(len, ids([sentence * 9, sentence]))
    tokens = (longer - shorter) / 8
    return sentence * max(0, int((length - 32) / tokens))


def configured(case: SimpleNamespace, folder: str, **options: Any) -> config.RunConfig:
    """The config of a case's run: a random base, and short sums behind a filler as prompts."""
    rows = case.prompts * case.group
    optim = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1}
    optim |= {"optimizer": case.optimizer, "share_prompts": case.share_prompts}
    optim |= {"max_tokens_per_microbatch": case.microbatch} if case.microbatch else {}
    return config.RunConfig(
        output_dir=folder,
        max_steps=case.steps,
        log_completions=False,
        model=config.ModelConfig(
            known_name(case.model),
            case.tokenizer,
            case.base,
            random_base=True,
            gradient_checkpointing=case.remat,
            kernels=case.kernels,
        ),
        data=config.DataConfig(
            "arithmetic",
            num_problems=64,
            max_prompt_length=case.prompt,
            system_prompt="",
            prompt_template=filler(case.tokenizer, case.prompt) + "{prompt}",
            overlong_prompts="drop",
        ),
        rewards=config.RewardConfig(("token_hash_reward",)),
        lora=config.LoraConfig(case.rank, float(case.rank)),
        rollout=config.RolloutConfig(
            num_generations=max(2, case.group),
            generation_batch_size=rows,
            max_completion_length=case.completion,
            drafts="off",
            ignore_eos=True,
        ),
        optim=config.OptimConfig(**optim),
        mesh=config.MeshConfig(1),
    )


def random_experience(
    vocabulary: int, prompts: Sequence[int], lengths: Sequence[int], share_prompts: bool
) -> Any:
    """Random rows of these lengths to learn from, with advantages of 1 and -1 in turn; those of a prompt are neighbours."""
    draw = np.random.default_rng(0)
    ids = lambda sizes: tuple(draw.integers(0, vocabulary, size).astype(np.int32) for size in sizes)
    rollout = Rollout(
        problems=(Problem("", {}),) * len(prompts),
        prompt_ids=ids(prompts),
        texts=("",) * len(lengths),
        completion_ids=ids(lengths),
        # Close to what random weights give, so that no ratio is clipped.
        behaviour_logps=tuple(np.full(size, -np.log(vocabulary), np.float32) for size in lengths),
        stopped=(True,) * len(lengths),
    )
    signs = np.where(np.arange(len(lengths)) % 2, 1.0, -1.0).astype(np.float32)
    return make_experience(rollout, signs.reshape(len(prompts), -1), share_prompts=share_prompts)


def update(case: SimpleNamespace) -> Callable[[Tell], None]:
    """An optimizer step on random rows of one length, without sampling.

    `mfu`: 4 x parameters of the linears x tokens / time / 790 TFLOP/s, without recomputation, a prompt once for its
    group. The case fails if the memory at its peak is not within a tenth of the plan.
    """
    runtime.use_compilation_cache()
    runtime.use_kernels(case.kernels)
    cfg, arch = configured(case, "unused"), shape_of(case.model)
    model = Transformer(arch, case.base, cfg.lora, jnp.dtype(cfg.model.dtype))
    frozen = random_base(model, jax.random.key(0))
    state = updates.init_state(init_params(model, frozen, jax.random.key(1)), cfg.optim)
    plan = memory.plan(cfg, limit=memory.device_memory())
    improve = updates.make_updater(plan.cfg, model, min(KNOWN_IDS, arch.vocab_size), 100)
    rows = case.prompts * case.group
    shared = case.prompts if case.share_prompts else rows
    sizes = [case.prompt] * case.prompts, [case.completion] * rows
    experience = random_experience(min(151_643, arch.vocab_size), *sizes, case.share_prompts)

    def step(number: int) -> None:
        nonlocal state
        state, metrics = improve(state, frozen, experience, None, jax.random.key(number))
        jax.block_until_ready(state)
        assert math.isfinite(metrics["grad_norm"]) and metrics["grad_norm"] > 0, metrics

    step(0)
    tokens = shared * case.prompt + rows * case.completion
    flops = 4 * tokens * arch.num_layers * sum(map(arch.linear_size, arch.linears()))

    def measure(tell: Tell) -> None:
        started = time.perf_counter()
        step(1)
        seconds, peak = time.perf_counter() - started, peak_gb()
        row = {"update_s": seconds, "mfu": flops / seconds / BF16_RATE, "peak_gb": peak}
        tell(row | {"planned_gb": plan.peak / 1e9, "tokens": tokens})
        assert not peak or abs(peak / (plan.peak / 1e9) - 1) < 0.1, "the peak is not as planned"

    return measure


def step(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Whole steps of `train`: sampling, rewards and update; the first compiles.

    Steps that check the adapter are left out of the medians, if there are others.
    """
    runtime.use_compilation_cache()
    runtime.use_kernels(case.kernels)

    def measure(tell: Tell) -> None:
        with tempfile.TemporaryDirectory() as folder:
            cfg = configured(case, folder)
            plan = memory.plan(cfg, limit=memory.device_memory())
            trainer.train(cfg, quiet=True)
            rows = read_metrics(folder)
        norms = [row["grad_norm"] for row in rows]
        assert all(math.isfinite(norm) and norm > 0 for norm in norms), norms
        steady = [row for row in rows[1:] if "sampling/adapter_share" not in row] or rows
        median = lambda name: statistics.median(row[name] for row in steady)
        tell(
            {
                "step_s": median("step_time"),
                **{f"{phase}_s": median(f"perf/{phase}_time") for phase in PHASES},
                "first_s": rows[0]["step_time"],
                "mean_length": median("completions/mean_length"),
                "logp_difference": rows[-1]["sampling/sampling_logp_difference/mean"],
                "peak_gb": peak_gb(),
                "planned_gb": plan.peak / 1e9,
            }
        )

    return measure


def completion_lengths(sigma: float, truncated: float, limit: int) -> list[int]:
    """The length of each completion in tokens, by row number. A share of them reaches the limit."""
    recorded = json.loads(LENGTHS.read_text())["completion_tokens"][f"{sigma:g}"]
    lengths = [min(length, limit) for length in recorded]
    if truncated:
        lengths[:: round(1 / truncated)] = [limit] * len(lengths[:: round(1 / truncated)])
    return lengths


def reward(completions, chance, **_) -> list[float]:
    """Reward 1 or 0, drawn with the probability of the problem; the seed is the completion's text."""
    draws = [zlib.crc32(str(text).encode()) / 2**32 for text in completions]
    return [float(draw < float(p)) for draw, p in zip(draws, chance, strict=True)]


def problems() -> list[Problem]:
    """As many problems as there are recorded prompts; of ten, three are always right and three always wrong.

    With the tokenizer of the package a character is a token.
    """
    chances = itertools.cycle([0, 1, 0.5, 0, 1, 0.3, 0, 1, 0.5, 0.8])
    lengths = json.loads(LENGTHS.read_text())["prompt_tokens"]
    return [
        Problem("1" * length, {"chance": str(p)})
        for length, p in zip(lengths, chances, strict=False)
    ]


def recipe_config(case: SimpleNamespace, devices: int = 1, factor: int = 1) -> config.RunConfig:
    """The config of a shipped recipe, on a random base unless the config is SmolLM2's, with `factor` times as many rows."""
    path = ROOT / "configs" / f"{case.config}.toml"
    cfg, table = config.load(path), config.read_table(path)
    name = case.smollm2 or known_name(case.model or cfg.model.model_name_or_path)
    table["model"]["model_name_or_path"] = name
    if not case.smollm2:
        table["model"] |= {"tokenizer_name_or_path": TINY, "random_base": True}
        table["rewards"] = {"functions": ["token_hash_reward"]}
    if case.completions or factor > 1:
        count = cfg.updates_per_rollout
        rows = factor * (case.completions or cfg.generation_batch_size)
        batch = min(rows // count, cfg.optim.per_device_train_batch_size)
        table["optim"] |= {"per_device_train_batch_size": batch}
        table["optim"] |= {"gradient_accumulation_steps": rows // count // batch}
        table["rollout"]["generation_batch_size"] = rows
        table["max_steps"] = count
        table.pop("num_train_epochs", None)
    table["mesh"] = {"data": devices}
    for change in case.set:
        set_field(table, *change.split("=", 1))
    return config.from_table(config.RunConfig, table)


def set_field(table: dict[str, Any], path: str, value: str) -> None:
    """Sets a field such as "rollout.max_concurrent" to "128" (JSON, or else a text); "null" removes it."""
    *sections, name = path.split(".")
    for section in sections:
        table = table.setdefault(section, {})
    with contextlib.suppress(json.JSONDecodeError):
        value = json.loads(value)
    table[name] = value
    if value is None:
        del table[name]


def rollouts_of(
    case: SimpleNamespace, cfg: config.RunConfig, tell: Tell
) -> tuple[updates.TrainState, list[dict[str, Any]]]:
    """Trains for a few rollouts, with recorded lengths unless the policy is a real one.

    After each timed rollout it tells the medians so far. Returns the last state and the rows of metrics.jsonl.
    """
    more: dict[str, Any] = {}
    if not case.smollm2:
        limit = cfg.rollout.max_completion_length
        more["row_lengths"] = completion_lengths(case.sigma, case.truncated, limit)
        more |= {"problems": problems(), "reward_functions": [reward]}
    stages, ends, began = Stages(), [0.0], time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, stages("train"):
        count = cfg.updates_per_rollout * (UNTIMED + case.rollouts)
        run = str(pathlib.Path(folder) / "run")
        changes = {"output_dir": run, "max_steps": count, "save_steps": count, "eval": None}
        cfg = dataclasses.replace(cfg, num_train_epochs=None, **changes)

        def on_step(number: int, row: dict[str, Any]) -> None:
            ends.append(time.perf_counter() - began)
            print(f"{ends[-1]:.1f} s: step {number}", file=sys.stderr, flush=True)
            gaps = [end - start for start, end in itertools.pairwise(ends)]
            if len(gaps) <= UNTIMED:
                return
            rows = read_metrics(run)[UNTIMED:]
            median = lambda name: statistics.median(row[name] for row in rows)
            phases = {f"{phase}_s": median(f"perf/{phase}_time") for phase in PHASES}
            whole, compiled = statistics.median(gaps[UNTIMED:]), stages.rows()[0]
            mean_length = median("completions/mean_length")
            tell(
                {
                    "rollouts": len(gaps) - UNTIMED,
                    "step_s": whole,
                    **phases,
                    "other_s": whole - sum(phases.values()),
                    "first_s": gaps[0],
                    "programs": compiled["programs"] + compiled["cached"],
                    "compile_s": compiled["compile"],
                    "tokens_per_s": cfg.generation_batch_size * mean_length / whole,
                    "padding": row.get("update/padding"),
                    "mean_length": mean_length,
                    "truncated": median("completions/clipped_ratio"),
                    "peak_gb": peak_gb(),
                }
            )

        state = trainer.train(cfg, on_step=on_step, quiet=True, **more)
        return state, read_metrics(run)


def recipe(case: SimpleNamespace) -> Callable[[Tell], None]:
    """A rollout of a shipped recipe and its updates, with recorded lengths: log-normal, mean 250; some at the limit.

    `padding` is 1 - real / computed tokens in the linears of the update.
    """
    runtime.use_compilation_cache()
    return lambda tell: rollouts_of(case, recipe_config(case), tell)


def start(case: SimpleNamespace) -> Callable[[Tell], None]:
    """Seconds from `qerl train` to the end of the first rollout and its updates: with an empty cache, then with that.

    The policy is `--base`, a real one on the problems of `--set data.dataset=...`, or random weights on arithmetic, whose
    rows all reach their limit. `*_later_s` are the seconds of each later rollout with its updates.
    """
    recipe = recipe_config(case)
    table, count = config.to_table(recipe), recipe.updates_per_rollout * case.rollouts
    for name in ("eval", "num_train_epochs"):
        table.pop(name, None)
    if case.base:
        weights = {"weights": table["model"]["weights"], "dtype": table["model"]["dtype"]}
        table["model"] = {"model_name_or_path": case.base} | weights
        table["rewards"] = {"functions": ["gsm8k_flexible_reward"]}
    else:
        lengths = {"max_prompt_length": table["data"]["max_prompt_length"]}
        table["data"] = {"dataset": "arithmetic", "num_problems": 4096} | lengths
    table |= {"max_steps": count, "save_steps": count}
    cfg = config.from_table(config.RunConfig, table)

    def measure(tell: Tell) -> None:
        row: dict[str, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            for cache in ("cold", "warm"):
                output = pathlib.Path(folder) / cache
                run = dataclasses.replace(cfg, output_dir=str(output))
                output.with_suffix(".toml").write_text(config.dump(run))
                first, *later = rollout_ends(output, f"{folder}/cache")
                row |= {f"{cache}_s": first, f"{cache}_later_s": later}
        tell(row)  # asks for the device, whose memory this process then holds

    return measure


def rollout_ends(output: pathlib.Path, cache: str) -> list[float]:
    """Runs `qerl train` on the config beside a run folder; returns the seconds of each rollout, the first from the start."""
    command = [sys.executable, "-m", "qerl_jax", "train", str(output.with_suffix(".toml"))]
    kept = {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ends = [time.perf_counter()]
    with subprocess.Popen(command, env={**os.environ, **kept}, stdout=sys.stderr) as process:
        while process.poll() is None:
            time.sleep(0.05)
            if (output / "metrics.jsonl").exists():
                new = len(read_metrics(output)) - len(ends) + 1
                ends += [time.perf_counter()] * new
    assert process.returncode == 0, f"qerl train ended with {process.returncode}"
    return [end - begin for begin, end in itertools.pairwise(ends)]


def evaluation(case: SimpleNamespace) -> Callable[[Tell], None]:
    """A recipe's evaluation on random weights, with recorded lengths: one queue, or batches of so many problems."""
    runtime.use_compilation_cache()
    cfg = recipe_config(case)
    arch, dtype = shape_of(cfg.model.model_name_or_path), jnp.dtype(cfg.model.dtype)
    model = Transformer(arch, cfg.model.weights, cfg.lora, dtype)
    frozen = random_base(model, jax.random.key(0))
    variables = {"params": init_params(model, frozen, jax.random.key(1)), "frozen": frozen}
    limit, count = cfg.rollout.max_completion_length, cfg.eval.num_problems
    sampler = Sampler.of(
        *(
            model,
            tokenizers.load(TINY),
            protocol_of_run(cfg).sampling,
            EngineLimits.of(cfg.rollout),
        ),
        max_prompt_length=cfg.data.max_prompt_length,
        row_lengths=completion_lengths(case.sigma, case.truncated, limit),
    )
    chosen = [*itertools.islice(itertools.cycle(problems()), count)]
    evaluators = [
        Evaluator(sampler, batch, ("reward", reward), jax.random.key(0))
        for batch in itertools.batched(chosen, case.batch or count)
    ]

    def measure(tell: Tell) -> None:
        started = time.perf_counter()
        rows = [row for one in evaluators for _, row in judged(variables, [one])]
        seconds, tokens = time.perf_counter() - started, sum(row["length"] for row in rows)
        assert len(rows) == count * cfg.eval.num_generations
        more = {"rows": len(rows), "mean_length": tokens / len(rows), "peak_gb": peak_gb()}
        tell({"evaluation_s": seconds, "tokens_per_s": tokens / seconds} | more)

    measure(lambda row: None)
    return measure


def scaling(case: SimpleNamespace) -> Callable[[Tell], None]:
    """A recipe on several devices: "strong" with as many completions in all, "weak" with as many per device.

    Cases of strong scaling must agree: the same number of tokens, and log-probabilities of trainer and sampler as close
    to each other. `all_reduce_ms` is the time to sum an adapter's gradients.
    """
    runtime.use_compilation_cache()

    def measure(tell: Tell) -> None:
        cfg = recipe_config(case, case.devices, case.devices if case.how == "weak" else 1)
        rows: list[dict[str, Any]] = []
        state, (first, *_) = rollouts_of(case, cfg, rows.append)
        replicas = Replicas.of(cfg.mesh, cfg.generation_batch_size)
        parts = replicas.each(state.params)
        spent = statistics.median(seconds_of(lambda: replicas.total(parts), 10))
        mismatch = first["sampling/sampling_logp_difference/mean"]
        more = {"sampled": first["num_tokens"], "mismatch": mismatch}
        tell(rows[-1] | more | {"all_reduce_ms": 1e3 * spent})

    return measure


def disagreements(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How cases of strong scaling differ from the same with the fewest devices, a line for each error.

    Texts and rewards may differ: with another batch size a last bit can change a token.
    """
    lines, first = [], {}
    for row in sorted(rows, key=lambda row: row["devices"]):
        if row["how"] != "strong":
            continue
        base = first.setdefault(tuple(row[axis] for axis in ("env", *_RECIPE_AXES)), row)
        pair = f"{row['devices']} devices and {base['devices']} disagree:"
        if row["sampled"] != base["sampled"]:
            lines.append(f"{pair} {row['sampled']} tokens in a step instead of {base['sampled']}")
        elif row["mismatch"] > _FACTOR * base["mismatch"] + _NATS:
            apart = f"{row['mismatch']:.3g} nats instead of {base['mismatch']:.3g}"
            lines.append(f"{pair} trainer and sampler differ by {apart}")
    return lines


def training_layer(case: SimpleNamespace) -> Callable[[Tell], None]:
    """A layer in training with attention: forward pass, dX and the gradients of adapter and norms.

    `kernels_ms` is the sum of the kernels of a layer, which are printed, and `layer_ms` the wall time.
    """
    runtime.use_compilation_cache()
    runtime.use_kernels(case.kernels)
    arch = dataclasses.replace(shape_of(case.model), vocab_size=512, num_layers=case.layers)
    lora = config.LoraConfig(case.rank, float(case.rank))
    model = Transformer(arch, case.base, lora, jnp.bfloat16)
    frozen = random_base(model, jax.random.key(0))
    params = init_params(model, frozen, jax.random.key(1))
    params = jax.tree.map(lambda leaf: leaf + 1e-3, params)
    ids = jax.random.randint(jax.random.key(2), (case.rows, case.length), 0, 512)

    @jax.jit
    def gradient(params, frozen, ids):
        def loss(params):
            variables = {"params": params, "frozen": frozen}
            hidden, _ = model.apply(variables, ids, remat=case.remat)
            return jnp.sum(hidden.astype(jnp.float32) ** 2)

        return jax.grad(loss)(params)

    arguments = params, frozen, ids
    jax.block_until_ready(gradient(*arguments))

    def measure(tell: Tell) -> None:
        started = time.perf_counter()
        jax.block_until_ready(gradient(*arguments))
        wall = 1e3 * (time.perf_counter() - started) / case.layers
        kernels = print_kernels(by_kernel(gradient, *arguments), case.layers)
        tell({"layer_ms": wall, "kernels_ms": kernels or wall})

    return measure


_AXES = {"model": ["7b"], "base": ["nvfp4"], "rank": [32], "remat": ["layer"]}
_RUN = {"group": 1, "prompt": 8, "completion": 1016, "microbatch": 8192, "pool_gib": 0.0}
_RUN |= {"kernels": "auto", "steps": 1, "tokenizer": TINY}
_RUN |= {"optimizer": "adamw", "share_prompts": True}
_STEP = {"group": 8, "prompt": 256, "completion": 512, "steps": 4, "microbatch": 8704}
_TINY = {"model": [TINY], "base": ["nvfp4"], "rank": [4]}
_TINY_RUN = {"prompts": [2], "group": 2, "prompt": 40, "completion": 8}
_TINY_RUN |= _TINY | {"microbatch": 0, "steps": 2}
_RECIPE_AXES = {"config": ["paper/gsm8k_qwen2.5_7b"], "model": [""]}
_EVALUATION = {"smollm2": "", "completions": 0, "set": [], "sigma": 0.5, "truncated": 0.01}
_RECIPE = _EVALUATION | {"rollouts": 1}
_TINY_RECIPE = {"config": ["quickstart"], "model": [TINY], "completions": 16}
_TINY_RECIPE |= {"set": ["rollout.max_completion_length=24", "data.max_prompt_length=232"]}
_STEP_TIMES = ("step_s", "rollout_s", "reward_s", "update_s")
BENCHMARKS = {
    "update": Benchmark(
        update,
        axes={**_AXES, "prompts": [8]},
        settings=_RUN,
        tiny=_TINY_RUN,
        shows=("update_s", "mfu", "peak_gb", "planned_gb"),
        metric="update_s",
        environment=pool_of,
    ),
    "step": Benchmark(
        step,
        axes={**_AXES, "prompts": [2]},
        settings=_RUN | _STEP,
        tiny=_TINY_RUN,
        shows=(*_STEP_TIMES, "peak_gb", "planned_gb"),
        metric="step_s",
        rounds=1,
        timeout=420,
        environment=pool_of,
    ),
    "recipe": Benchmark(
        recipe,
        axes=_RECIPE_AXES,
        settings=_RECIPE,
        tiny=_TINY_RECIPE,
        shows=(*_STEP_TIMES, "other_s", "first_s", "padding"),
        metric="step_s",
        compared="config",
        rounds=1,
        timeout=300,
    ),
    "start": Benchmark(
        start,
        axes=_RECIPE_AXES,
        settings={"smollm2": "", "completions": 0, "set": [], "base": "", "rollouts": 4},
        tiny=_TINY_RECIPE | {"rollouts": 2},
        shows=("cold_s", "warm_s", "cold_later_s", "warm_later_s"),
        metric="cold_s",
        compared="config",
        rounds=1,
        timeout=590,
    ),
    "evaluation": Benchmark(
        evaluation,
        axes={**_RECIPE_AXES, "batch": [0, 64]},
        settings=_EVALUATION,
        tiny=_TINY_RECIPE | {"batch": [0, 2], "set": [*_TINY_RECIPE["set"], "eval.num_problems=5"]},
        shows=("evaluation_s", "tokens_per_s", "mean_length", "rows", "peak_gb"),
        metric="evaluation_s",
        compared="batch",
        rounds=1,
        timeout=590,
    ),
    "scaling": Benchmark(
        scaling,
        axes={**_RECIPE_AXES, "how": ["strong", "weak"], "devices": [1, 2, 4]},
        settings=_RECIPE | {"completions": 512, "truncated": 0.0, "rollouts": 2},
        tiny=_TINY_RECIPE | {"how": ["strong"], "devices": [1]},
        shows=(*_STEP_TIMES, "tokens_per_s", "all_reduce_ms", "sampled", "mismatch", "peak_gb"),
        metric="tokens_per_s",
        compared="devices",
        rounds=1,
        timeout=300,
        environment=devices_of,
        disagreements=disagreements,
    ),
    "training_layer": Benchmark(
        training_layer,
        axes={**_AXES, "base": ["bfloat16", "nvfp4"], "remat": ["none"], "rows": [16]},
        settings={"kernels": "auto", "length": 512, "layers": 4},
        tiny=_TINY | {"rows": [2], "length": 16, "layers": 2},
        shows=("kernels_ms", "layer_ms"),
        metric="kernels_ms",
        rounds=7,
    ),
}
