"""Writes completions of many prompts to a .jsonl file; the same call continues a job that was killed."""

import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from qerl_jax.api.policy import of_source
from qerl_jax.checkpoint.policy import ALONE, PolicySource
from qerl_jax.config import MeshConfig, ToolsConfig
from qerl_jax.data.tokenizer import Prompt
from qerl_jax.generation.sampling_params import EngineLimits, SamplingParams
from qerl_jax.system.checked import to_table
from qerl_jax.system.files import Progress, content_hashes, to_line, write_whole

# Columns added to a row. Log-probabilities are those at the sampling temperature; only jobs with tools write `turns`.
WRITTEN = ("completion", "finish_reason", "num_tokens", "cumulative_logprob", "turns")
_SECONDS_BETWEEN_LINES = 10


def write(
    path: pathlib.Path,
    source: PolicySource,
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    limits: EngineLimits,
    log: Callable[[str], None],
    tools: ToolsConfig | None = None,
    mesh: MeshConfig = ALONE,
) -> None:
    """Writes one row per completion.

    Until all completions are done, rows are appended to `<path>.partial`; a later call continues from that file.

    Each of `rows` holds the columns that are written with the completions of its prompt. With tools it also gets the
    messages, as `turns`. `log` is called with a progress line about every 10 seconds, and with a message if sampling is
    slower than it could be on this GPU.

    Raises:
        Busy: If another process writes this file.
        ValueError: If a partial file of other settings exists; also see `Policy.generate`.
    """
    partial = path.with_name(path.name + ".partial")
    identity = _identity(source, rows, prompts, params, tools)
    with Progress(partial, identity, frozen=source.frozen_date()) as progress:
        first, wanted = len(progress.values), params.n * len(rows)
        if first:
            log(f"{first}/{wanted} completions are in {progress.path}")
        try:
            if first < wanted:
                policy = of_source(source, limits, mesh=mesh, rows=wanted - first)
                policy = policy.dated(progress.identity)
                if slow := policy.slow_because:
                    log(slow)
                if tools is not None:
                    policy = policy.with_tools(tools, log=log)
                columns = None if tools is None else columns_of(rows)
                completions = policy.completions(prompts, params, columns=columns, first=first)
                reported = time.monotonic()
                for index, done in enumerate(completions, first):
                    turns = [] if done.messages is None else [done.messages]
                    sums = (len(done.token_ids), float(done.logprobs.sum()))
                    values = (done.text, done.finish_reason, *sums, *turns)
                    progress.add(
                        [rows[index // params.n] | dict(zip(WRITTEN, values, strict=False))]
                    )
                    if time.monotonic() > reported + _SECONDS_BETWEEN_LINES:
                        log(f"{index + 1}/{wanted} completions")
                        reported = time.monotonic()
        except BaseException:
            if not progress.values:
                progress.path.unlink()
            raise
        write_whole(path, "".join(map(to_line, progress.values)))
        progress.path.unlink()
        log(f"{wanted} completions in {path}")


def columns_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the columns with which environments are reset, without the prompt: they get it as the policy sees it."""
    return [{name: value for name, value in row.items() if name != "prompt"} for row in rows]


def _identity(
    source: PolicySource,
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    tools: ToolsConfig | None,
) -> dict[str, Any]:
    """Returns all that the output depends on, as plain JSON; a model of the hub is identified by its name."""
    inputs = json.dumps([rows, prompts], ensure_ascii=False)
    model = source.model
    identity = {
        "model": model.model_name_or_path,
        "adapter": source.adapter and str(source.adapter),
        "weights": model.weights,
        "dtype": model.dtype,
        "chat_template_date": model.chat_template_date,
        **content_hashes({"model": model.model_name_or_path, "adapter": source.adapter}),
        **vars(params),
        "tools": tools and to_table(tools),
        "prompts.sha256": hashlib.sha256(inputs.encode()).hexdigest(),
    }
    # Converted to what a reader of the JSON gets, so that the two can be compared.
    return json.loads(json.dumps(identity))
