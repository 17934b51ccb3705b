"""Completions of many prompts in a .jsonl file; the job may be killed, and the same call goes on."""

import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from qerl_jax.checked import to_table
from qerl_jax.checkpoint.policy import ALONE, PolicySource
from qerl_jax.config import MeshConfig, ToolsConfig
from qerl_jax.data.tokenizer import Prompt
from qerl_jax.files import Progress, content_hashes, to_line, write_whole
from qerl_jax.generation.generator import Generator
from qerl_jax.generation.sampling_params import SamplingParams

# What is written beside a prompt; log-probabilities are those at its temperature, turns those with tools.
WRITTEN = ("completion", "finish_reason", "num_tokens", "cumulative_logprob", "turns")
_SECONDS_BETWEEN_LINES = 10


def write(
    path: pathlib.Path,
    source: PolicySource,
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    limits: dict[str, Any],
    log: Callable[[str], None],
    tools: ToolsConfig | None = None,
    mesh: MeshConfig = ALONE,
) -> None:
    """Writes a row per completion.

    Until all are there they go to `<path>.partial`, from which a later call goes on.

    Args:
        path: The file; it appears at the end.
        source: The policy that samples.
        rows: Columns that stand beside the completions of each prompt.
        prompts: The prompts, one for each of `rows`.
        params: How they are sampled.
        limits: `max_concurrent`, `kv_cache_tokens` and `kv_cache_fraction` of `Generator`.
        log: Is called with a line about the progress, now and then.
        tools: What the policy may call; a row then has its messages, too, as `turns`.
        mesh: The devices.

    Raises:
        ValueError: Where other settings have left a partial file; also see `Generator`.
    """
    partial = path.with_name(path.name + ".partial")
    progress = Progress(partial, _identity(source, rows, prompts, params, tools))
    first, wanted = len(progress.values), params.n * len(rows)
    if first:
        log(f"{first}/{wanted} completions are in {progress.path}")
    try:
        if first < wanted:
            held = {"mesh": mesh, "rows": wanted - first, "quiet": False}
            completions = Generator.of(source, tools, log, **held, **limits).completions(
                prompts,
                columns=None if tools is None else columns_of(rows),
                first_row=first,
                **vars(params),
            )
            told = time.monotonic()
            for index, done in enumerate(completions, first):
                values = (
                    done.text,
                    done.finish_reason,
                    len(done.tokens),
                    float(done.logps.sum()),
                )
                said = dict(zip(WRITTEN, values, strict=False))
                if done.conversation is not None:
                    said["turns"] = list(done.conversation.messages)
                progress.add([rows[index // params.n] | said])
                if time.monotonic() > told + _SECONDS_BETWEEN_LINES:
                    log(f"{index + 1}/{wanted} completions")
                    told = time.monotonic()
    except BaseException:
        if not progress.values:
            progress.path.unlink()
        raise
    write_whole(path, "".join(map(to_line, progress.values)))
    progress.path.unlink()
    log(f"{wanted} completions in {path}")


def columns_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the columns with which each row's environment is reset, without the prompt.

    The environment gets the prompt as the policy sees it.
    """
    return [{name: value for name, value in row.items() if name != "prompt"} for row in rows]


def _identity(
    source: PolicySource,
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    tools: ToolsConfig | None,
) -> dict[str, Any]:
    """Everything that a row of the file depends on, as plain JSON; of a model of the hub, its name."""
    asked = json.dumps([rows, prompts], ensure_ascii=False)
    model = source.model
    identity = {
        "model": model.model_name_or_path,
        "adapter": source.adapter and str(source.adapter),
        "weights": model.weights,
        "dtype": model.dtype,
        **content_hashes({"model": model.model_name_or_path, "adapter": source.adapter}),
        **vars(params),
        "tools": tools and to_table(tools),
        "prompts.sha256": hashlib.sha256(asked.encode()).hexdigest(),
    }
    # As it will be read.
    return json.loads(json.dumps(identity))
