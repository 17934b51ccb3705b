"""The command `generate`: completions of prompts, on the screen or in a file."""

import dataclasses
import pathlib
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Any

import tyro

import qerl_jax
from qerl_jax import config as configs
from qerl_jax.cli.common import DEVICES, Devices, log
from qerl_jax.config import Dtype, ToolsConfig, Weights
from qerl_jax.generation.sampling_params import EngineLimits, SamplingParams
from qerl_jax.system.checked import require, require_seed, require_unicode
from qerl_jax.system.files import parse_json

if TYPE_CHECKING:
    from qerl_jax.checkpoint.policy import PolicySource


@dataclasses.dataclass(frozen=True)
class _Sampling(SamplingParams):
    """The sampling options.

    Attributes:
        seed: Random seed for sampling.
    """

    seed: int = 0


def generate(
    prompt: tuple[str, ...] = (),
    /,
    *,
    sampling: Annotated[_Sampling, tyro.conf.arg(name="")],
    input: pathlib.Path | None = None,
    output: pathlib.Path | None = None,
    model: str | None = None,
    adapter: pathlib.Path | None = None,
    system_prompt: str | None = None,
    tools: pathlib.Path | None = None,
    weights: Weights | None = None,
    dtype: Dtype | None = None,
    limits: Annotated[EngineLimits, tyro.conf.arg(name="")],
    mesh: Devices = DEVICES,
) -> None:
    """Prints completions of prompts. A single one is printed as it is sampled; with tools, all turns are shown.

    Args:
        prompt: User messages. The policy of a run with `data.apply_chat_template = false`, or a model whose
            tokenizer has no chat template, continues them as they are.
        sampling: How completions are sampled.
        input: A file of prompts, instead of PROMPT: .jsonl with a "prompt" in each row, a text or chat
            messages (and a "seed", if each is to have its own); or any other text file with one prompt per
            line.
        output: A .jsonl file for the completions, one row each: the columns of `input`, and `completion`,
            `finish_reason`, `num_tokens`, and `cumulative_logprob` at the sampling temperature (as in
            training). Until all are there, they are in `<output>.partial`, from which a later call goes on.
            With tools `completion` is the last turn, and `turns` has all messages.
        model: Local folder or hub name; absent means the adapter's base, or the one in the package.
        adapter: A PEFT folder, or a run folder, whose adapter is taken. Of a run that has not ended it is the
            newest checkpoint.
        system_prompt: A system message, or the name of one: "think-answer", "answer-line" or "think-code".
        tools: A config (.toml) or a run folder, whose section [tools] names the tools that the policy may
            call. An environment begins with the columns of `input`.
        weights: Storage format of the linears; absent means that of the adapter's run, else "nvfp4".
        dtype: Data type of the activations; absent means that of the run, else "bfloat16".
        limits: How much is sampled at a time.
        mesh: The devices (docs/scale.md).

    Examples:
        qerl generate "What is (5-3)*3?" --adapter runs/quickstart
        qerl generate --input prompts.jsonl --output answers.jsonl --model Qwen/Qwen2.5-7B-Instruct --n 4
    """
    rows = read_rows(prompt, input, output)
    require_unicode(sampling.stop, "stop")
    seeds = {"seed": [row["seed"] for row in rows]} if "seed" in rows[0] else {}
    params = SamplingParams(**vars(sampling) | seeds)
    prompts = prompts_of(rows, system_prompt)
    called = None if tools is None else _tools_of(tools)
    if output is not None:
        from qerl_jax.api import completion_file
        from qerl_jax.checkpoint.policy import find_policy

        source = find_policy(model, adapter, weights=weights, dtype=dtype)
        _note_prompts_of_run(source, prompts)
        options = {"limits": limits, "log": log, "tools": called, "mesh": mesh}
        completion_file.write(output, source, rows, prompts, params, **options)
        return
    if mesh.data is None:  # no replica without a completion
        from qerl_jax.distributed.mesh import places

        mesh = dataclasses.replace(mesh, data=places(mesh, len(prompts) * params.n))
    options = {"weights": weights, "dtype": dtype, "mesh": mesh}
    policy = qerl_jax.load(model, adapter, **options, **vars(limits))
    _note_prompts_of_run(policy.source, prompts)
    if slow := policy.slow_because:
        _warn(slow)
    if called is not None:
        from qerl_jax.api.completion_file import columns_of
        from qerl_jax.tools.conversations import transcript

        policy, columns = policy.with_tools(called, log=_warn), columns_of(rows)
        for completion in policy.completions(prompts, params, columns=columns):
            log(transcript(completion.messages))
        return
    if len(prompts) > 1 or params.n > 1:
        for completion in policy.completions(prompts, params):
            log(completion.text)
        return
    for text in policy.stream(prompts[0], params):
        sys.stdout.write(text)
        sys.stdout.flush()
    log("")


def _warn(text: str) -> None:
    sys.stderr.write(text + "\n")


def _note_prompts_of_run(source: "PolicySource", prompts: list[Any]) -> None:
    """Says that a run's policy was trained with an instruction that texts do not get here."""
    from qerl_jax.data import datasets

    data = source.run and source.run.data
    if data is None or not any(isinstance(prompt, str) for prompt in prompts):
        return
    trained = "the policy was trained with"
    if system_prompt := datasets.system_prompt(data):
        option = f"--system-prompt {shlex.quote(system_prompt)}"
        _warn(f"{trained} a system prompt, and is asked without: {option} adds it")
    if data.prompt_template is not None:
        _warn(f"{trained} data.prompt_template, which is not added here: write it into the prompts")


def _tools_of(path: pathlib.Path) -> ToolsConfig:
    """The tools of a config or of a run folder."""
    cfg = configs.load_run(path) if path.is_dir() else configs.load(path)
    require(cfg.tools is not None, "--tools", str(path), "has no section [tools]")
    return cfg.tools


def prompts_of(rows: list[dict[str, Any]], system_prompt: str | None) -> list[Any]:
    """The prompt of each row, as a chat after a system message if one is asked for."""
    from qerl_jax.data import datasets

    if system_prompt is None:
        return [row["prompt"] for row in rows]
    system = datasets.SYSTEM_PROMPTS.get(system_prompt, system_prompt)
    chats = []
    for number, row in enumerate(rows, 1):
        chat = row["prompt"]
        chat = [{"role": "user", "content": chat}] if isinstance(chat, str) else chat
        if chat[0]["role"] == "system":
            raise ValueError(
                f"row {number}: has a system message already; leave out --system-prompt"
            )
        chats.append(({"role": "system", "content": system}, *chat))
    return chats


def read_rows(
    texts: tuple[str, ...], file: pathlib.Path | None, output: pathlib.Path | None
) -> list[dict[str, Any]]:
    """The prompts of the command line or of a file, each with its columns."""
    if (file is None) == (not texts):
        raise ValueError("prompt: give prompts, or --input with a file of them")
    if output is not None:
        require(output.suffix == ".jsonl", "--output", str(output), "must be a .jsonl file")
        require(output.parent.is_dir(), "--output", str(output), "there is no such folder")
        if output.exists():
            raise ValueError(f"--output: {output} is there already; remove it, or give another")
    if file is None:
        require_unicode(texts, "prompt")
        return [{"prompt": text} for text in texts]
    require("\0" not in str(file), "--input", str(file), "must hold no NUL character")
    require(file.exists(), "--input", str(file), "no such file")
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text: {error}") from error
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{file}: holds no prompt")
    if file.suffix != ".jsonl":
        return [{"prompt": line.strip("\r")} for line in lines]
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        rows.append(_row(line, f"{file}, row {number}", is_written=output is not None))
        if ("seed" in rows[-1]) != ("seed" in rows[0]):
            raise ValueError(f"{file}, row {number}: either all rows have a seed or none")
    return rows


def _row(line: str, where: str, *, is_written: bool) -> dict[str, Any]:
    """A line of a .jsonl file of prompts; `is_written` says that its columns go to an output file."""
    from qerl_jax.api.completion_file import WRITTEN
    from qerl_jax.data import datasets

    try:
        row = parse_json(line)
    except ValueError as error:
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
    require_seed(seed, f"{where}: seed")
    return row
