"""The command `generate`: completions of prompts, on the screen or in a file."""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import tyro

from qerl_jax.checked import is_seed, require
from qerl_jax.cli.common import log, require_unicode
from qerl_jax.config import Dtype, Weights
from qerl_jax.generation.sampling_params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Generate(SamplingParams):
    """Prints completions: of one prompt as it is sampled, of several one after the other.

    Attributes:
        seed: Random seed for sampling.
        prompt: User messages.
        input: A file of prompts instead: .jsonl with a "prompt" per row, a text or chat messages
            (and, if each is to have its own, a "seed"); or any other text file with one per line.
        output: A .jsonl file for the completions, one row each, beside the columns of `input`: `completion`,
            `finish_reason`, `num_tokens`, and `cumulative_logprob` at the temperature (as training has it). Until
            all are there they are in `<output>.partial`, from which a later call goes on.
        model: Local folder or hub name; absent means the adapter's base, or the one in the package.
        adapter: A PEFT folder, or a run folder, whose adapter is taken.
        system_prompt: A system message, or a name of `datasets.SYSTEM_PROMPTS`, such as "think-answer".
        weights: How the linears are held; absent means as in the adapter's run, else "nvfp4".
        dtype: Data type of the activations; absent means that of the run, else "bfloat16".
        max_concurrent: Completions sampled at a time.
        kv_cache_tokens: Capacity for keys and values, in tokens; completions wait while there is none left.
        kv_cache_fraction: That capacity as a fraction of the device memory that is free; absent both, it
            is bounded by nine tenths of what scores and a prefill leave of that.
    """

    seed: int = 0
    prompt: tyro.conf.Positional[tuple[str, ...]] = ()
    input: pathlib.Path | None = None
    output: pathlib.Path | None = None
    model: str | None = None
    adapter: pathlib.Path | None = None
    system_prompt: str | None = None
    weights: Weights | None = None
    dtype: Dtype | None = None
    max_concurrent: int = 64
    kv_cache_tokens: int | None = None
    kv_cache_fraction: float | None = None

    def __post_init__(self):
        # Nothing is checked yet: an error within tyro would be a box of several lines.
        pass

    def sampling_params(self, seed: int | list[int]) -> SamplingParams:
        """The sampling options, checked; `seed` is one, or one per prompt."""
        names = (field.name for field in dataclasses.fields(SamplingParams))
        return SamplingParams(**{name: getattr(self, name) for name in names} | {"seed": seed})


def generate(argv: list[str]) -> None:
    """Prints completions, or writes them to a file."""
    flat = (tyro.conf.FlagCreatePairsOff,)
    args = tyro.cli(Generate, args=argv, prog="qerl generate", config=flat)
    rows = _rows(args)
    require_unicode(args.stop, "stop")
    has_seeds = "seed" in rows[0]
    params = args.sampling_params([row["seed"] for row in rows] if has_seeds else args.seed)
    prompts = _prompts(rows, args.system_prompt)
    from qerl_jax.checkpoint.policy import find_policy
    from qerl_jax.generation import completion_file
    from qerl_jax.generation.generator import Generator

    source = find_policy(args.model, args.adapter, weights=args.weights, dtype=args.dtype)
    names = ("max_concurrent", "kv_cache_tokens", "kv_cache_fraction")
    limits = {name: getattr(args, name) for name in names}
    if args.output is not None:
        completion_file.write(args.output, source, rows, prompts, params, limits=limits, log=log)
        return
    generator = Generator.of(source, **limits)
    if len(prompts) == params.n == 1:
        for text in generator.stream(prompts[0], **vars(params)):
            sys.stdout.write(text)
            sys.stdout.flush()
        log("")
        return
    for completion in generator.completions(prompts, **vars(params)):
        log(completion.text)


def _prompts(rows: list[dict[str, Any]], system_prompt: str | None) -> list[tuple]:
    """The chat of each row, after a system message if one is asked for."""
    from qerl_jax.data import datasets

    system = datasets.SYSTEM_PROMPTS.get(system_prompt, system_prompt)
    opening = () if system is None else ({"role": "system", "content": system},)
    user = lambda text: ({"role": "user", "content": text},)
    chats = [
        user(row["prompt"]) if isinstance(row["prompt"], str) else row["prompt"] for row in rows
    ]
    for number, chat in enumerate(chats, 1):
        if opening and chat[0]["role"] == "system":
            raise ValueError(
                f"row {number}: has a system message already; leave out --system-prompt"
            )
    return [(*opening, *chat) for chat in chats]


def _rows(args: Generate) -> list[dict[str, Any]]:
    """The prompts of the command line or of a file, each with its columns."""
    output = args.output
    if (args.input is None) == (not args.prompt):
        raise ValueError("prompt: give prompts, or --input with a file of them")
    if output is not None:
        require(output.suffix == ".jsonl", "--output", str(output), "must be a .jsonl file")
        require(output.parent.is_dir(), "--output", str(output), "there is no such folder")
        if output.exists():
            raise ValueError(f"--output: {output} is there already; remove it, or give another")
    if args.input is None:
        require_unicode(args.prompt, "prompt")
        return [{"prompt": text} for text in args.prompt]
    lines = [line for line in args.input.read_text("utf-8-sig").split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{args.input}: holds no prompt")
    if args.input.suffix != ".jsonl":
        return [{"prompt": line.strip("\r")} for line in lines]

    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{args.input}, row {number}"
        rows.append(_row(line, where, is_written=output is not None))
        if ("seed" in rows[-1]) != ("seed" in rows[0]):
            raise ValueError(f"{where}: either all rows have a seed or none")
    return rows


def _row(line: str, where: str, *, is_written: bool) -> dict[str, Any]:
    """A line of a .jsonl file of prompts; `is_written` says that its columns go to an output file."""
    from qerl_jax.data import datasets
    from qerl_jax.generation.completion_file import WRITTEN

    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error}") from error
    require_unicode(row, where)
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str) and not datasets.is_chat(prompt):
        raise ValueError(
            f'{where}: must have a "prompt", a text or a list of messages, each with "role" and "content"'
        )
    if is_written and (taken := [name for name in WRITTEN if name in row]):
        raise ValueError(f"{where}: has a column {taken[0]!r}, which would be overwritten")
    seed = row.get("seed", 0)
    require(is_seed(seed), f"{where}: seed", seed, "must be an integer in [0, 2**32)")
    return row
