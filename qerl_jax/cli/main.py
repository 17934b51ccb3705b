"""The command `qerl`: parse, one call."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import sys
from typing import Annotated, Any, Literal

# Without PyTorch transformers greets with a notice about it, which would be a newcomer's first
# line.
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import tyro

from qerl_jax import config
from qerl_jax.config import ConfigError, Dtype, EvalConfig, NoiseConfig, RunConfig, Weights


@dataclasses.dataclass(frozen=True)
class Generate:
    """Prints completions: of one prompt as it is sampled, of several one after the other.

    Attributes:
        prompt: User messages.
        input: A file of prompts instead: .jsonl with a "prompt" per row, a text or chat messages
            (and, if each is to have its own, a "seed"); or any other text file with one per line.
        output: A .jsonl file for the completions, one row each, beside the columns of `input`: `completion`,
            `finish_reason`, `num_tokens`, and `cumulative_logprob` at the temperature (as training has it). Until
            all are there they are in `<output>.partial`, from which a later call goes on.
        model: Local folder or hub name; "qerl-tiny" ships with the package.
        adapter: A PEFT folder, such as a run's `adapter`.
        system_prompt: A system message, or a name of `data.SYSTEM_PROMPTS`, such as "think-answer".
        weights: How the linears are held.
        dtype: Of the activations.
        max_tokens: Longest completion; it ends where the model's context does, too.
        temperature: 0 is greedy.
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens up to this mass.
        min_p: Drop tokens below this fraction of the likeliest one's probability.
        repetition_penalty: Makes tokens that were there before less likely; 1 is off.
        stop: Texts before which a completion ends.
        ignore_eos: Go on after the end token.
        n: Completions per prompt.
        seed: Of the samples.
        max_concurrent: Completions sampled at a time.
        kv_cache_tokens: Room for keys and values, in tokens; completions wait while there is none.
        kv_cache_fraction: The same as a fraction of the device memory that is free; absent both, it is
            bounded by nine tenths of what scores and a prefill leave of that.
    """

    prompt: tyro.conf.Positional[tuple[str, ...]] = ()
    input: pathlib.Path | None = None
    output: pathlib.Path | None = None
    model: str = "qerl-tiny"
    adapter: pathlib.Path | None = None
    system_prompt: str | None = None
    weights: Weights = "nvfp4"
    dtype: Dtype = "bfloat16"
    max_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    seed: int = 0
    max_concurrent: int = 64
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float | None = None


@dataclasses.dataclass(frozen=True)
class Filter:
    """Measures how often a policy solves each problem of a config, and keeps a band.

    Attributes:
        config: The TOML file whose model, data and sampling settings are used.
        out: A .jsonl file for the problems that are kept; rates go to `<out>.measured`, from which
            a later call goes on.
        low: Lowest pass rate that is kept.
        high: Highest.
        samples: Completions per problem.
        reward: A completion passes where this function gives at least 1; absent means the config's
            first.
        adapter: A PEFT folder; absent means the bare base.
        batch_size: Problems sampled together.
    """

    config: tyro.conf.Positional[pathlib.Path]
    out: tyro.conf.Positional[pathlib.Path]
    low: float = 0.1
    high: float = 0.6
    samples: int = 8
    reward: str | None = None
    adapter: pathlib.Path | None = None
    batch_size: int = 32


@dataclasses.dataclass(frozen=True)
class Export:
    """Writes what a run has learned for others to read, and checks it against the trained policy.

    Attributes:
        run: A run folder.
        out: The folder to write.
        to: "peft" is the adapter; "merged" a whole 16-bit model; "nvfp4" that model packed again.
        base: To what the adapter is added: the "original" 16-bit weights, or the "packed" ones that
            it was trained on. Must be given where there are both.
        step: Of the checkpoint to take; absent means the final adapter, or the newest checkpoint.
        limit: Largest mean difference of log-probabilities, in nats; absent means what rounding
            explains.
    """

    run: tyro.conf.Positional[pathlib.Path]
    out: tyro.conf.Positional[pathlib.Path]
    to: Literal["peft", "merged", "nvfp4"]
    base: Annotated[Literal["original", "packed"] | None, tyro.conf.arg(name="from")] = None
    step: int | None = None
    limit: float | None = None


@dataclasses.dataclass(frozen=True)
class Quantize:
    """Writes a 4-bit folder of a 16-bit model, layer by layer; the same call goes on after a stop.

    Attributes:
        source: A 16-bit folder or hub name.
        target: The new folder.
        format: What linears are packed to.
        method: "rtn" rounds to nearest; "awq" finds scales and clipping by calibration.
        scale_rounding: Of MXFP4's scales: compressed-tensors' "nearest", or the OCP
            specification's "floor".
        double_quant: Whether NF4's scales are quantized too.
        dataset: For "awq", the rows to calibrate on: "arithmetic", a data set of the hub, or a
            .jsonl, .json or .parquet file with messages, a text, or a question and an answer.
        num_samples: Rows that are drawn from it.
        max_length: Tokens that are used of each.
        seed: Of the draw.
    """

    source: tyro.conf.Positional[str]
    target: tyro.conf.Positional[pathlib.Path]
    format: Literal["nvfp4", "mxfp4", "nf4"] = "nvfp4"
    method: Literal["rtn", "awq"] = "rtn"
    scale_rounding: Literal["nearest", "floor"] = "nearest"
    double_quant: bool = True
    dataset: str = "open-thoughts/OpenThoughts-114k"
    num_samples: int = 256
    max_length: int = 2048
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Eval:
    """Measures how often a policy is right on sets of problems, with confidence intervals.

    Results go to OUTPUT_DIR/<set>/; a call that finds them unfinished goes on after the last problem.

    Attributes:
        sets: "gsm8k", "math500", "aime24", "aime25", "amc23", "arithmetic", any data set of the hub, or
            a .jsonl, .json or .parquet file of {"question": ..., "answer": ...}. A text under "prompt" is
            given to the model as it is, without its chat template.
        model: Local folder or hub name; absent means the adapter's base, or the one in the package.
        adapter: A PEFT folder, or a run folder, whose adapter and settings are taken.
        base: Leave the adapter away: the policy before training, asked and judged alike.
        protocol: "paper" (temperature 0.6, top-p 0.95), "verl", or "run" (prompt, sampling and reward of
            the run). Absent means the run's where there is one, else the paper's.
        samples: N, completions per problem, instead of the protocol's; so are the next six.
        temperature: 0 is greedy.
        top_p: Keep the likeliest tokens up to this mass.
        max_tokens: Longest completion.
        system_prompt: A system message, or a name of `data.SYSTEM_PROMPTS`; "" for none.
        prompt_template: Text around the problem: "{prompt}" is filled in.
        reward: The function that is at least 1 where a completion is right.
        path: Where the set (one) lies if not on the hub: a folder or a file.
        split: Of the set, instead of the usual one.
        columns: Which columns hold the `prompt` and the `answer`.
        num_problems: Only so many, from the front.
        weights: How the linears are held.
        dtype: Of the activations.
        output_dir: Absent means `eval/` of the run folder, else `evals/`, and there the policy's name and
            the protocol, if one is given.
        max_concurrent: Most completions sampled at a time; fused decoding takes up to 128.
        seed: Of the samples.
    """

    sets: tyro.conf.Positional[tuple[str, ...]]
    model: str | None = None
    adapter: pathlib.Path | None = None
    base: bool = False
    protocol: Literal["paper", "verl", "run"] | None = None
    samples: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    system_prompt: str | None = None
    prompt_template: str | None = None
    reward: str | None = None
    path: str | None = None
    split: str | None = None
    columns: dict[str, str] | None = None
    num_problems: int | None = None
    weights: Weights | None = None
    dtype: Dtype | None = None
    output_dir: pathlib.Path | None = None
    max_concurrent: int = 128
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Report:
    """Writes a page about runs, and PNG files of its charts; runs that differ in the seed only share a line.

    Attributes:
        runs: Run folders.
        output_dir: Absent means `report/` of the run, or of the working directory for several.
    """

    runs: tyro.conf.Positional[tuple[pathlib.Path, ...]]
    output_dir: pathlib.Path | None = None


def main(argv: list[str] | None = None) -> int:
    """Runs a sub-command; bad input ends with one line on stderr and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    commands = {
        "train": _train,
        "plan": _plan,
        "generate": _generate,
        "filter": _filter,
        "export": _export,
        "quantize": _quantize,
        "eval": _eval,
        "compare": _compare,
        "replay": _replay,
        "report": _report,
        "env": _env,
    }
    # Of these there is no more to say without a file.
    plain = ("train", "plan", "compare", "replay", "env")
    asked = argv[1:2] if argv[:1] and argv[0] in plain else argv[:1]
    if asked in (["-h"], ["--help"]):
        _say(_USAGE)
        return 0
    if not argv or argv[0] not in commands:
        _say(_USAGE)
        return 2
    try:
        commands[argv[0]](argv[1:])
    except (ValueError, OSError, OverflowError, NotImplementedError) as error:
        sys.stderr.write(f"qerl {argv[0]}: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write(f"qerl {argv[0]}: interrupted\n")
        return 130
    return 0


_USAGE = """usage: qerl COMMAND ...

  train CONFIG.toml [--section.field VALUE ...]   train an adapter, or resume the run in output_dir
  plan CONFIG.toml [--device-memory 80GB] [--compile] [--section.field VALUE ...]
                                                  what the run will hold, and whether it fits
  generate PROMPT [--model M] [--adapter DIR]     print completions; or --input FILE --output OUT.jsonl
  filter CONFIG.toml OUT.jsonl [--low R]          keep the problems that are neither easy nor hopeless
  export RUN_FOLDER --to KIND OUT                 the adapter, or a model that it is merged into
  quantize MODEL DIR [--format F] [--method M]    write a 4-bit folder of a 16-bit model
  eval SET ... [--adapter RUN_FOLDER]             accuracy on benchmarks, with intervals
  compare EVAL_FOLDER EVAL_FOLDER                 difference of two policies on the same problems
  report RUN_FOLDER ...                           a page and PNG files of one or several runs
  replay RUN_FOLDER/non_finite/STEP.npz           a step that was skipped as not finite, once more
  env                                             versions and devices, for bug reports

qerl COMMAND --help shows the options; `qerl train CONFIG.toml --help` every field with its
value."""


def _config(command: str, argv: list[str]) -> RunConfig:
    """The config file that comes first, changed by what follows."""
    if not argv or argv[0].startswith("-"):
        raise ConfigError(
            f"missing the config file: qerl {command} CONFIG.toml [--section.field VALUE ...]"
        )
    cfg = config.load(argv[0])
    if cfg.noise is None and any(arg.startswith("--noise.") for arg in argv):
        cfg = dataclasses.replace(cfg, noise=NoiseConfig())
    if cfg.eval is None and any(arg.startswith("--eval.") for arg in argv):
        cfg = dataclasses.replace(cfg, eval=EvalConfig())
    flat = (tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff)
    prog = f"qerl {command} {argv[0]}"
    return tyro.cli(RunConfig, args=argv[1:], default=cfg, prog=prog, config=flat)


def _plan(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="qerl plan", add_help=False)
    parser.add_argument("--device-memory")
    parser.add_argument("--compile", action="store_true")
    options, rest = parser.parse_known_args(argv)
    cfg = _config("plan", rest)
    from pallas_kernels import runtime
    from qerl_jax import memory as plan

    size = options.device_memory
    limit = plan.device_memory() if size is None else plan.parse_size(size)
    made = plan.estimate(cfg, limit=limit)
    for line in made.lines(limit):
        _say(line)
    if options.compile:
        runtime.use_compilation_cache()
        memory = plan.compiled_update(cfg)
        _say(f"compiled  temporaries of one micro-batch {memory.temp_size_in_bytes / 1e9:.2f} GB")
    if limit is not None:
        made.require(limit)


def _train(argv: list[str]) -> None:
    cfg = _config("train", argv)
    from qerl_jax.tracking import report
    from qerl_jax.training.trainer import train

    train(cfg)
    _say(f"page in {report.write([cfg.output_dir])}")
    for line in report.lines(cfg.output_dir):
        _say(line)


def _generate(argv: list[str]) -> None:
    flat = (tyro.conf.FlagCreatePairsOff,)
    args = tyro.cli(Generate, args=argv, prog="qerl generate", config=flat)
    rows = _prompt_rows(args)
    _require_unicode(args.stop, "stop")
    from qerl_jax.data import datasets
    from qerl_jax.generation import completion_file, generator

    names = {field.name for field in dataclasses.fields(generator.Sampling)}
    options = {name: value for name, value in vars(args).items() if name in names}
    if "seed" in rows[0]:
        options["seed"] = [row["seed"] for row in rows]
    generator.Sampling(**options)  # what is wrong with them is known before a model is read

    system = datasets.SYSTEM_PROMPTS.get(args.system_prompt, args.system_prompt)
    opening = () if system is None else ({"role": "system", "content": system},)
    for number, row in enumerate(rows, 1):
        if opening and not isinstance(row["prompt"], str) and row["prompt"][0]["role"] == "system":
            raise ValueError(
                f"row {number}: has a system message already; leave out --system-prompt"
            )
    prompts = [
        (*opening, {"role": "user", "content": row["prompt"]})
        if isinstance(row["prompt"], str)
        else (*opening, *row["prompt"])
        for row in rows
    ]
    named = {name: getattr(args, name) for name in ("model", "adapter", "weights", "dtype")}
    limits = {
        name: getattr(args, name)
        for name in ("max_concurrent", "kv_cache_tokens", "kv_cache_fraction")
    }
    if args.output is not None:
        completion_file.write(args.output, named, rows, prompts, options, limits=limits, say=_say)
        return
    policy = generator.Generator.load(**named, **limits)
    if len(prompts) == args.n == 1:
        for piece in policy.stream(prompts[0], **options):
            sys.stdout.write(piece)
            sys.stdout.flush()
        _say("")
        return
    for done in policy.completions(prompts, **options):
        _say(done.text)


def _prompt_rows(args: Generate) -> list[dict[str, Any]]:
    """The prompts of the command line or of a file, each with its columns."""
    from qerl_jax.data import datasets

    if (args.input is None) == (not args.prompt):
        raise ValueError("prompt: give prompts, or --input with a file of them")
    if args.output is not None and args.output.suffix != ".jsonl":
        raise ValueError(f"--output: got {str(args.output)!r}; must be a .jsonl file")
    if args.output is not None and not args.output.parent.is_dir():
        raise ValueError(f"--output: got {str(args.output)!r}; there is no such folder")
    if args.output is not None and args.output.exists():
        raise ValueError(f"--output: {args.output} is there already; remove it, or give another")
    if args.input is None:
        _require_unicode(args.prompt, "prompt")
        return [{"prompt": text} for text in args.prompt]
    from qerl_jax.generation.completion_file import WRITTEN

    lines = [line for line in args.input.read_text("utf-8-sig").split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{args.input}: holds no prompt")
    if args.input.suffix != ".jsonl":
        return [{"prompt": line.strip("\r")} for line in lines]

    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{args.input}, row {number}: not JSON: {error}") from error
        _require_unicode(row, f"{args.input}, row {number}")
        prompt = row.get("prompt") if isinstance(row, dict) else None
        if not isinstance(prompt, str) and not datasets.is_chat(prompt):
            raise ValueError(
                f'{args.input}, row {number}: must have a "prompt", a text or a list of messages, each '
                'with "role" and "content"'
            )
        if taken := [name for name in WRITTEN if name in row and args.output is not None]:
            raise ValueError(
                f"{args.input}, row {number}: has a column {taken[0]!r}, which would be overwritten"
            )
        seed = row.get("seed", 0)
        if not isinstance(seed, int) or not 0 <= seed < 2**32:
            raise ValueError(
                f"{args.input}, row {number}: seed: got {seed!r}; must be an integer in [0, 2**32)"
            )
        if rows and ("seed" in row) != ("seed" in rows[0]):
            raise ValueError(f"{args.input}, row {number}: either all rows have a seed or none")
        rows.append(row)
    return rows


def _require_unicode(value: Any, where: str) -> None:
    """JSON and a command line may hold halves of characters, which no tokenizer and no file takes."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"{where}: holds {half!r}, half a character; must be Unicode text"
        ) from error


def _filter(argv: list[str]) -> None:
    args = tyro.cli(Filter, args=argv, prog="qerl filter")
    cfg = config.load(args.config)
    from pallas_kernels import runtime
    from qerl_jax.evaluation import pass_rates

    runtime.use_compilation_cache()
    kept, total = pass_rates.select(
        cfg,
        args.out,
        low=args.low,
        high=args.high,
        samples=args.samples,
        reward=args.reward,
        adapter=args.adapter,
        batch_size=args.batch_size,
        log=_say,
    )
    _say(f"{kept} of {total} problems have a pass rate in [{args.low}, {args.high}]: {args.out}")


def _export(argv: list[str]) -> None:
    args = tyro.cli(Export, args=argv, prog="qerl export")
    from pallas_kernels import runtime
    from qerl_jax.checkpoint import export

    runtime.use_compilation_cache()
    report = export.export(
        args.run, args.to, args.out, base=args.base, step=args.step, limit=args.limit
    )
    _say(f"{args.to} in {args.out}")
    _say(export.line(report))


def _quantize(argv: list[str]) -> None:
    args = tyro.cli(Quantize, args=argv, prog="qerl quantize")
    from pallas_kernels import runtime
    from qerl_jax.quantization.calibration import Calibration
    from qerl_jax.quantization.quantizer import Recipe, quantize

    runtime.use_compilation_cache()
    rows = Calibration(args.dataset, args.num_samples, args.max_length, args.seed)
    recipe = Recipe(args.format, args.method, args.scale_rounding, args.double_quant, rows)
    quantize(args.source, args.target, recipe, _say)


def _eval(argv: list[str]) -> None:
    args = tyro.cli(Eval, args=argv, prog="qerl eval")
    if not args.sets:
        raise ValueError("missing the sets: qerl eval SET ... [--adapter RUN_FOLDER]")
    if args.max_concurrent < 1:
        raise ValueError(f"max_concurrent: got {args.max_concurrent}; must be at least 1")
    if args.path is not None and len(args.sets) > 1:
        raise ValueError(f"--path is where one set lies; got {len(args.sets)} sets")
    from pallas_kernels import runtime
    from qerl_jax.checkpoint.policy import find_policy
    from qerl_jax.evaluation import benchmark
    from qerl_jax.evaluation.summary import lines

    runtime.use_compilation_cache()
    policy = find_policy(
        args.model, args.adapter, base=args.base, weights=args.weights, dtype=args.dtype
    )
    where = {name: getattr(args, name) for name in ("path", "split", "columns", "num_problems")}
    how = {
        "num_generations": args.samples,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "max_completion_length": args.max_tokens,
        "system_prompt": args.system_prompt,
        "prompt_template": args.prompt_template,
        "reward": args.reward,
    }
    sources = [
        (
            benchmark.source_of(name, policy, **where),
            benchmark.protocol_for(name, args.protocol, policy, **how),
        )
        for name in args.sets
    ]
    parent = policy.folder / "eval" if policy.folder else pathlib.Path("evals")
    name = policy.name if args.protocol is None else f"{policy.name}-{args.protocol}"
    folder = args.output_dir or parent / name
    summaries = benchmark.run(
        policy, sources, folder, seed=args.seed, max_concurrent=args.max_concurrent, log=_say
    )
    for summary in summaries.values():
        for line in lines(summary):
            _say(line)
    _say(f"results in {folder}")


def _compare(argv: list[str]) -> None:
    if len(argv) != 2 or argv[0].startswith("-"):
        raise ValueError("usage: qerl compare EVAL_FOLDER EVAL_FOLDER")
    from qerl_jax.evaluation.comparison import compare

    for name, comparison in compare(*argv).items():
        _say(f"{name}: {argv[0]} minus {argv[1]}, 95 % intervals of paired differences")
        for estimate, interval in comparison.differences.items():
            _say(f"  {estimate:8} {interval:+.3f}")
        _say(f"  settings that differ: {', '.join(comparison.changed) or 'none'}")


def _replay(argv: list[str]) -> None:
    if len(argv) != 1 or argv[0].startswith("-"):
        raise ValueError("usage: qerl replay RUN_FOLDER/non_finite/STEP.npz")
    from pallas_kernels import runtime
    from qerl_jax.training import replay

    runtime.use_compilation_cache()
    for line in replay.run(argv[0]):
        _say(line)


def _report(argv: list[str]) -> None:
    args = tyro.cli(Report, args=argv, prog="qerl report")
    if not args.runs:
        raise ValueError("missing the runs: qerl report RUN_FOLDER ...")
    from qerl_jax.tracking import report

    shown = [(run, report.lines(run)) for run in args.runs]
    _say(f"page in {report.write(args.runs, args.output_dir)}")
    for run, each in shown:
        for line in (os.fspath(run), *each) if len(shown) > 1 else each:
            _say(line)


def _env(argv: list[str]) -> None:
    if argv:
        raise ValueError("env: takes no arguments")
    import jax

    from pallas_kernels import runtime

    _say(f"python {platform.python_version()} on {platform.platform()}")
    for name in (
        "qerl-jax",
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "transformers",
        "datasets",
        "numpy",
    ):
        try:
            _say(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            _say(f"{name} not installed")
    for device in jax.local_devices():
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = "" if limit is None else f", {limit / 1e9:.0f} GB for XLA"
        _say(f"device {device.id}: {device.device_kind} ({device.platform}{memory})")
    _say(
        f"Hopper kernels: {'yes' if runtime.is_hopper() else 'no, NVFP4 products run through the reference'}"
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
