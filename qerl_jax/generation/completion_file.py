"""Completions of many prompts in a .jsonl file, from a job that may be killed and goes on when it is asked again."""

from __future__ import annotations

import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from qerl_jax.data.tokenizer import Prompt
from qerl_jax.files import Progress, content_hashes, to_line, write_whole
from qerl_jax.generation.generator import Generator

# What is written beside a prompt; log-probabilities are those at its temperature.
WRITTEN = ("completion", "finish_reason", "num_tokens", "cumulative_logprob")
_SECONDS_BETWEEN_LINES = 10


def write(
    path: pathlib.Path,
    policy: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    options: dict[str, Any],
    *,
    limits: dict[str, Any],
    say: Callable[[str], None],
) -> None:
    """Writes a row per completion.

    Until all are there they go to `<path>.partial`, from which a later call goes on.

    Args:
        path: The file; it appears at the end.
        policy: `model`, `adapter`, `weights` and `dtype` of `Generator.load`.
        rows: Columns that stand beside the completions of each prompt.
        prompts: As many.
        options: Of `Sampling`.
        limits: What else `Generator.load` takes.
        say: Is told how far it is.

    Raises:
        ValueError: Where other settings have left a partial file; also see `Generator`.
    """
    identity = _identity(policy, rows, prompts, options)
    progress = Progress(path.with_name(path.name + ".partial"), identity)
    samples = options["n"]
    first, wanted = len(progress.values), samples * len(rows)
    if first:
        say(f"{first}/{wanted} completions are in {progress.path}")
    try:
        if first < wanted:
            generator = Generator.load(**policy, **limits)
            completions = generator.completions(prompts, first_row=first, **options)
            told = time.monotonic()
            for index, done in enumerate(completions, first):
                logp = float(done.logps.sum())
                values = (done.text, done.finish_reason, len(done.tokens), logp)
                progress.add([rows[index // samples] | dict(zip(WRITTEN, values, strict=True))])
                if time.monotonic() > told + _SECONDS_BETWEEN_LINES:
                    say(f"{index + 1}/{wanted} completions")
                    told = time.monotonic()
    except BaseException:
        if not progress.values:
            progress.path.unlink()
        raise
    write_whole(path, "".join(map(to_line, progress.values)))
    progress.path.unlink()
    say(f"{wanted} completions in {path}")


def _identity(
    policy: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    prompts: Sequence[Prompt],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Everything that a row of the file depends on; of a model of the hub, its name."""
    asked = json.dumps([rows, prompts], ensure_ascii=False)
    prompts_hash = hashlib.sha256(asked.encode()).hexdigest()
    hashes = content_hashes({name: policy[name] for name in ("model", "adapter")})
    return policy | options | hashes | {"prompts.sha256": prompts_hash}
