"""Measures seconds per step of a shipped recipe with realistic lengths: `python -m scripts.bench_recipe`.

Runs `train` itself on a random base of a known shape. Completions end at lengths from a committed file
(`bench_recipe_lengths.json`: log-normal, mean 250); a given share runs into the limit. Prompts have GSM8K's lengths. Of
ten groups, three have only right answers and three only wrong ones, as in a real run. The first rollout compiles
sampling and learning, and the second compiles a run's own checks; neither is timed. (Older libraries have no such
checks: with `--before` only the first is not timed.)

    python -m scripts.bench_recipe                                    # GSM8K on 7B, 1 % truncated, sigma .5
    python -m scripts.bench_recipe --shape qwen2.5-32b --truncated 0 .05 --sigma 1
    python -m scripts.bench_recipe --before ../older                  # beside the library of another folder, in one run
    python -m scripts.bench_recipe --smollm2 FOLDER                   # SmolLM2 with its own text
    python -m scripts.bench_recipe --update --before ../older         # only one optimizer step, in which all rows learn
    python -m scripts.bench_recipe --set rollout.max_concurrent=128   # a recipe with another value

It prints for each row: seconds of a rollout and its updates, by phase; padding = 1 - real / computed tokens in the
linears of the update; the share of the last rollout's time in which the GPU was idle, as its driver reports it; and the
number of compiled programs with their compile time in seconds. Every row runs in its own process, which is killed at
its time limit; the rollouts timed until then count.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import functools
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
import zlib
from collections.abc import Callable
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
LENGTHS = ROOT / "scripts" / "bench_recipe_lengths.json"
RECIPES = {
    "qwen2.5-3b": "gsm8k_qwen2.5_3b",
    "qwen2.5-7b": "gsm8k_qwen2.5_7b",
    "qwen2.5-14b": "gsm8k_qwen2.5_14b",
    "qwen2.5-32b": "gsm8k_qwen2.5_32b",
}
PHASES = ("rollout", "reward", "update")
_UNTIMED = {"now": 2, "before": 1}


def completion_lengths(sigma: str, truncated: float, limit: int) -> list[int]:
    """The length of each completion in tokens, by row number. A share of them reaches the limit."""
    lengths = json.loads(LENGTHS.read_text())["completion_tokens"][sigma]
    lengths = [min(length, limit) for length in lengths]
    if truncated:
        lengths[:: round(1 / truncated)] = [limit] * len(lengths[:: round(1 / truncated)])
    return lengths


def end_rows_at(lengths: list[int]) -> None:
    """Makes the engine end each row at a given length, as if it had sampled a stop token there."""
    from qerl_jax.generation import engine, scheduler
    from qerl_jax.rl import rollouts

    make_sampler, collect = rollouts.make_sampler, rollouts.collect
    numbers, first = itertools.count(), 0

    def counted(sampler, variables, problems, *rest, **more):
        nonlocal first
        first = next(numbers) * len(problems) * sampler.num_generations
        return collect(sampler, variables, problems, *rest, **more)

    class Recorded(scheduler.Schedule):
        def _end(self, row: int) -> int:
            return lengths[(first + row) % len(lengths)]

        def slots(self, with_history):
            slots = super().slots(with_history)
            for slot, row in self._running():
                slots.limit[slot] = min(slots.limit[slot], self._end(row.index))
            return slots

        def harvest(self, *brought, **more):
            limits = {row.index: row.cached.prompt.limit for _, row in self._running()}
            return [
                dataclasses.replace(each, ended="stop")
                if each.ended and self._end(each.row) < limits[each.row]
                else each
                for each in super().harvest(*brought, **more)
            ]

    def without_ends(model, tokenizer, how, **more):
        # An end token sampled from random weights would end a row too early, so it is ignored. The config does not say
        # so, because it would then refuse `mask_truncated_completions`: it does not know about the recorded lengths.
        return make_sampler(model, tokenizer, dataclasses.replace(how, ignore_eos=True), **more)

    engine.Schedule = Recorded
    rollouts.make_sampler, rollouts.collect = without_ends, counted


def reward(completions, chance, **_):
    """Reward 1 or 0, drawn with the probability of the problem; the seed is the completion's text."""
    draws = [zlib.crc32(str(text).encode()) / 2**32 for text in completions]
    return [float(draw < float(p)) for draw, p in zip(draws, chance, strict=True)]


def problems() -> list[Any]:
    """As many problems as there are recorded prompts. With the tokenizer of the package a character is a token."""
    from qerl_jax.data.datasets import Problem

    chances = itertools.cycle([0, 1, 0.5, 0, 1, 0.3, 0, 1, 0.5, 0.8])
    lengths = json.loads(LENGTHS.read_text())["prompt_tokens"]
    return [
        Problem("1" * length, {"chance": str(p)})
        for length, p in zip(lengths, chances, strict=False)
    ]


def short_run(cfg: Any, folder: str, rollouts: int) -> Any:
    """The config of a run with this many rollouts, without evaluations, that saves only at its end."""
    steps = cfg.updates_per_rollout * rollouts
    return dataclasses.replace(
        cfg,
        output_dir=str(pathlib.Path(folder) / "run"),
        max_steps=steps,
        num_train_epochs=None,
        save_steps=steps,
        eval=None,
    )


class Tokens:
    """Counts the tokens that updates compute, for libraries that do not report them."""

    def __init__(self):
        self.computed = self.real = 0
        from qerl_jax.rl import update

        accumulate = update.accumulate

        def counted(objective, sums, params, frozen, noise, batch, *rest):
            with contextlib.suppress(TypeError):  # a library that packs rows on one axis reports it
                part = batch[0]
                has_rows = part.mask.reshape(len(part.prompts), -1).any(axis=1)
                self.computed += part.prompts.size + part.completions.size
                self.real += int(part.prompt_lengths[has_rows].sum() + part.mask.sum())
            return accumulate(objective, sums, params, frozen, noise, batch, *rest)

        update.accumulate = counted

    def padding(self) -> float | None:
        """Padding since the last call: 1 - real / computed tokens."""
        share = 1 - self.real / self.computed if self.computed else None
        self.computed = self.real = 0
        return share


def measure(args: argparse.Namespace, tell: Callable[[dict[str, Any]], None]) -> None:
    """Trains for a few rollouts in this process. After each timed rollout it reports the medians so far."""
    from pallas_kernels import runtime
    from qerl_jax.tracking.logger import read_metrics
    from qerl_jax.training import trainer
    from scripts import recipe_timeline
    from scripts.check_device_stages import Stages

    runtime.use_compilation_cache()
    given: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        cfg = recipe(args)
        if not args.smollm2:
            limit = cfg.rollout.max_completion_length
            end_rows_at(completion_lengths(args.sigma[0], args.truncated[0], limit))
            given = {"problems": problems(), "reward_functions": [reward]}
        untimed = _UNTIMED[args.child]
        rollouts = args.rollouts - _UNTIMED["now"] + untimed
        cfg = short_run(cfg, folder, rollouts)
        tokens, stages, paddings = Tokens(), Stages(), []

        def on_step(step, row):
            line.marks.append(line.now())
            paddings.append(row.get("update/padding", tokens.padding()))
            spent = {phase: round(row[f"perf/{phase}_time"], 2) for phase in PHASES}
            print(f"{line.now():.1f} s: step {step}, {spent}", file=sys.stderr, flush=True)
            if len(line.marks) > untimed:
                tell(summary(read_metrics(cfg.output_dir)))
                if args.timeline:
                    args.timeline.write_text(json.dumps(line.last()))

        def summary(rows):
            median = lambda name: statistics.median(row[name] for row in rows[untimed:])
            gaps = [end - start for start, end in itertools.pairwise([0.0, *line.marks])]
            whole = statistics.median(gaps[untimed:])
            phases = {phase: median(f"perf/{phase}_time") for phase in PHASES}
            compiled = stages.rows()[0]
            return {
                "rollouts": len(gaps) - untimed,
                "step_s": whole,
                **{f"{phase}_s": seconds for phase, seconds in phases.items()},
                "other_s": whole - sum(phases.values()),
                "first_s": gaps[0],
                "padding": paddings[-1],
                "idle": line.idle(*[0.0, *line.marks][-2:]),
                "programs": compiled["programs"] + compiled["cached"],
                "compile_s": compiled["compile"],
                "mean_length": median("completions/mean_length"),
                "truncated": median("completions/clipped_ratio"),
                "peak_gb": rows[-1].get("perf/peak_memory_gb"),
            }

        with stages("train"), recipe_timeline.watch() as line:
            trainer.train(cfg, on_step=on_step, quiet=True, **given)


def measure_update(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds of one optimizer step on unsampled rows of the recorded lengths; the smaller of two measurements."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels import runtime
    from qerl_jax import config
    from qerl_jax.model import architecture, transformer
    from qerl_jax.planning import memory
    from qerl_jax.rl import update
    from qerl_jax.rl.experience import Experience
    from scripts import recipe_timeline
    from scripts.check_device_stages import Stages

    runtime.use_compilation_cache()
    cfg = recipe(args)
    optim, limit = cfg.optim, cfg.rollout.max_completion_length
    rows = optim.per_device_train_batch_size * optim.gradient_accumulation_steps
    prompts = rows // cfg.rollout.num_generations
    lengths = np.array(completion_lengths(args.sigma[0], args.truncated[0], limit)[:rows])
    prompt_lengths = np.array(json.loads(LENGTHS.read_text())["prompt_tokens"][:prompts], np.int32)
    rng = np.random.default_rng(0)
    # Truncated rows that are masked have no tokens.
    masked = (lengths == limit) & cfg.grpo.mask_truncated_completions
    learned = np.where(masked, 0, lengths)
    experience = Experience(
        rng.integers(0, 50_000, prompt_lengths.sum(), np.int32),
        np.append(0, np.cumsum(prompt_lengths)),
        rng.integers(0, 50_000, learned.sum(), np.int32),
        np.append(0, np.cumsum(learned)),
        np.ones(learned.sum(), bool),
        # Close to what random weights give, so that no ratio is clipped.
        np.full(learned.sum(), -12.0, np.float32),
        np.where(np.arange(rows) % 2, 1.0, -1.0).astype(np.float32),
    )
    lora = config.LoraConfig(cfg.lora.rank, cfg.lora.alpha)
    arch = architecture.KNOWN[args.shape]
    model = transformer.Transformer(arch, cfg.model.weights, lora, jnp.bfloat16)
    frozen = transformer.random_base(model, jax.random.key(0))
    state = update.init_state(transformer.init_params(model, frozen, jax.random.key(1)), cfg.optim)
    if hasattr(memory, "planned"):  # an older library does not plan
        cfg = memory.planned(cfg, limit=memory.device_memory())
    improve = update.make_updater(cfg, model, min(151_665, arch.vocab_size), 10)
    tokens, stages = Tokens(), Stages()
    with stages("update"), recipe_timeline.watch() as line:
        for step in range(3):
            tokens.padding()
            state, metrics = improve(state, frozen, experience, None, jax.random.key(0))
            jax.block_until_ready(state)
            line.marks.append(line.now())
            print(f"{line.now():.1f} s: step {step}", file=sys.stderr, flush=True)
    if args.timeline:
        args.timeline.write_text(json.dumps(line.last()))
    gaps = [end - start for start, end in itertools.pairwise(line.marks)]
    compiled = stages.rows()[0]
    stats = runtime.memory_stats() or {}
    if args.profile:
        print_kernels(improve, state.params, frozen, experience)
    return {
        "step_s": min(gaps),
        "rollout_s": 0.0,
        "reward_s": 0.0,
        "update_s": min(gaps),
        "other_s": 0.0,
        "first_s": line.marks[0],
        "padding": metrics.get("update/padding", tokens.padding()),
        "idle": line.idle(*line.marks[-2:]),
        "programs": compiled["programs"] + compiled["cached"],
        "compile_s": compiled["compile"],
        "mean_length": float(lengths.mean()),
        "truncated": float((lengths == limit).mean()),
        "peak_gb": stats.get("peak_bytes_in_use", 0) / 1e9,
    }


def print_kernels(improve: Any, params: Any, frozen: Any, experience: Any) -> None:
    """Prints the time of a micro-batch of each shape, by kernel."""
    import jax
    import numpy as np
    from jax.experimental.mosaic.gpu import profiler

    from qerl_jax.rl import grpo, objective, update

    accumulation = improve.optim.gradient_accumulation_steps
    rows, tokens = np.int32(128), np.int32(32_000)
    totals = grpo.BatchTotals(rows, tokens, improve.max_completion_length, accumulation)
    gradient = jax.jit(
        functools.partial(objective.gradient, improve.objective),
        compiler_options=objective.compiler_options(improve.objective),
    )
    cut = update.micro_batches(improve, experience, experience.rows)
    counts = collections.Counter(batch.shape for batch in cut)
    for batch in {batch.shape: batch for batch in cut}.values():
        # It runs twice, so nothing is donated.
        arguments = (params, frozen, None, experience.pack(batch, {}), totals, jax.random.key(0))
        program = gradient.lower(*arguments).compile()
        _, kernels = profiler.measure(program, aggregate=False)(*arguments)
        spent, launches = collections.Counter(), collections.Counter()
        for name, milliseconds in kernels:
            spent[name] += milliseconds
            launches[name] += 1
        print(f"{counts[batch.shape]} of {batch.shape}: {spent.total():.1f} ms", file=sys.stderr)
        for name, milliseconds in spent.most_common(22):
            print(f"{milliseconds:9.2f} ms x{launches[name]:5d}  {name[:80]}", file=sys.stderr)


def recipe(args: argparse.Namespace) -> Any:
    """The config of a shape's recipe, or of SmolLM2's, with the changes of the command line."""
    from qerl_jax import config

    if args.smollm2:
        cfg = config.load(ROOT / "configs" / "smollm2_arithmetic.toml")
        model = dataclasses.replace(cfg.model, model_name_or_path=str(args.smollm2))
        cfg = dataclasses.replace(cfg, model=model)
    else:
        cfg = config.load(ROOT / "configs" / f"{RECIPES[args.shape]}.toml")
        cfg = with_random_base(cfg, args.shape, args.rows)
    if hasattr(config, "MeshConfig"):  # an older library has one device
        cfg = dataclasses.replace(cfg, mesh=config.MeshConfig(1))
    for field in args.set:
        cfg = with_field(cfg, *field.split("=", 1))
    return cfg


def with_field(cfg: Any, path: str, value: str) -> Any:
    """A config with one changed field, such as "rollout.max_concurrent" set to "128" (parsed as JSON, or else a
    string).
    """
    name, _, rest = path.partition(".")
    if rest:
        return dataclasses.replace(cfg, **{name: with_field(getattr(cfg, name), rest, value)})
    try:
        given = json.loads(value)
    except json.JSONDecodeError:
        given = value
    return dataclasses.replace(cfg, **{name: given})


def with_random_base(cfg: Any, shape: str, rows: int | None) -> Any:
    """The recipe on a random base of a shape, with the tokenizer of the package and optionally fewer rows."""
    model = dataclasses.replace(
        cfg.model,
        model_name_or_path=shape,
        tokenizer_name_or_path=str(ROOT / "qerl_jax" / "assets" / "tiny"),
        random_base=True,
    )
    changes: dict[str, Any] = {
        "model": model,
        "rewards": type(cfg.rewards)(("token_hash_reward",)),
    }
    if rows:
        updates = cfg.updates_per_rollout
        changes["rollout"] = dataclasses.replace(cfg.rollout, generation_batch_size=rows)
        changes["optim"] = dataclasses.replace(
            cfg.optim,
            gradient_accumulation_steps=rows // updates // cfg.optim.per_device_train_batch_size,
        )
        changes |= {"max_steps": updates, "num_train_epochs": None}
    return dataclasses.replace(cfg, **changes)


def child(args: argparse.Namespace) -> None:
    """Measures one row. It prints the result so far after each timed rollout."""
    import jax

    origin = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    tell = lambda row: print("ROW " + json.dumps(origin | row), flush=True)
    if args.update:
        tell(measure_update(args))
    else:
        measure(args, tell)


def run(args: argparse.Namespace, arm: str, library: pathlib.Path, *lengths: Any) -> dict:
    """Runs a row in its own process with the library of a folder. The result is empty if it failed."""
    sigma, truncated = lengths
    command = [sys.executable, str(pathlib.Path(__file__).resolve()), "--child", arm]
    command += ["--shape", args.shape, "--sigma", sigma, "--truncated", str(truncated)]
    command += ["--rollouts", str(args.rollouts)]
    command += ["--rows", str(args.rows)] if args.rows else []
    command += ["--smollm2", str(args.smollm2)] if args.smollm2 else []
    command += ["--update"] if args.update else []
    command += ["--profile"] if args.profile and arm == "now" else []
    command += ["--timeline", str(args.timeline)] if args.timeline and arm == "now" else []
    command += ["--set", *args.set] if args.set and arm == "now" else []
    paths = [str(library), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    # Memory is taken at once, as a run does: pieces of it are too small for a large cache.
    environment.pop("XLA_PYTHON_CLIENT_PREALLOCATE", None)
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=environment
    )
    try:
        output, _ = process.communicate(timeout=args.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        print(f"killed after {args.timeout} s", flush=True)
    found = [json.loads(line[4:]) for line in output.splitlines() if line.startswith("ROW ")]
    return found[-1] if found else {}


def main() -> int:
    """Runs the rows one after the other and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="qwen2.5-7b", choices=RECIPES)
    parser.add_argument("--sigma", nargs="+", default=["0.5"], choices=["0.5", "1"])
    parser.add_argument("--truncated", type=float, nargs="+", default=[0.01])
    parser.add_argument("--rows", type=int, help="completions per rollout; default: the recipe's")
    parser.add_argument(
        "--rollouts", type=int, default=3, help="number of rollouts; the first two only compile"
    )
    parser.add_argument(
        "--before", type=pathlib.Path, help="folder of another version of the library"
    )
    parser.add_argument(
        "--smollm2", type=pathlib.Path, help="folder that scripts.make_smollm2 wrote"
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="time limit of a row, in seconds"
    )
    parser.add_argument("--out", type=pathlib.Path, help="append rows to this JSONL file")
    parser.add_argument(
        "--set",
        nargs="*",
        default=[],
        metavar="FIELD=VALUE",
        help="change a field of the recipe, as in the examples above",
    )
    parser.add_argument(
        "--update", action="store_true", help="measure one optimizer step, without a rollout"
    )
    parser.add_argument(
        "--profile", action="store_true", help="with --update: print the longest kernels"
    )
    parser.add_argument(
        "--timeline",
        type=pathlib.Path,
        help="write the spans of the last rollout to this JSON file",
    )
    parser.add_argument("--child", choices=_UNTIMED, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rollouts <= _UNTIMED["now"]:
        parser.error(f"--rollouts: got {args.rollouts}; must be at least {_UNTIMED['now'] + 1}")
    if args.child:
        child(args)
        return 0
    libraries = {"before": args.before.resolve()} if args.before else {}
    libraries["now"] = ROOT
    lengths = [("0.5", 0.0)] if args.smollm2 else itertools.product(args.sigma, args.truncated)
    failed = False
    print(
        "| what | step s | rollout | reward | update | other | first | padding | idle | programs |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for sigma, truncated in lengths:
        steps = {}
        for arm, library in libraries.items():
            row = run(args, arm, library, sigma, truncated)
            failed |= not row
            if not row:
                continue
            what = (
                "SmolLM2" if args.smollm2 else f"{args.shape}, sigma {sigma}, {truncated:.0%} cut"
            )
            what += ", an update" if args.update else ""
            what += "".join(f", {field}" for field in args.set if arm == "now")
            row = {"what": what, "arm": arm, "date": time.strftime("%Y-%m-%d")} | row
            steps[arm] = row["step_s"]
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            print(_line(row), flush=True)
        if len(steps) == 2:
            print(f"{steps['before'] / steps['now']:.2f} times as fast as before", flush=True)
    return int(failed)


def _line(row: dict[str, Any]) -> str:
    share = lambda value: "" if value is None else f"{value:.1%}"
    seconds = [row[f"{name}_s"] for name in ("step", *PHASES, "other", "first")]
    cells = [f"{row['what']}, {row['arm']}", *(f"{each:.2f}" for each in seconds)]
    programs = f"{row['programs']} in {row['compile_s']:.0f} s"
    return f"| {' | '.join([*cells, share(row['padding']), share(row['idle']), programs])} |"


if __name__ == "__main__":
    sys.exit(main())
