"""Completions of many prompts in a .jsonl file, from a job that may be killed and goes on when it is asked again."""

from __future__ import annotations

import hashlib
import json
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from qerl_jax.generator import Generator
from qerl_jax.log import write_whole
from qerl_jax.progress import Progress, to_line
from qerl_jax.tensor_files import digest, fingerprint
from qerl_jax.tokenizer import Prompt

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
    progress = Progress(path.with_name(path.name + ".partial"), _identity(policy, prompts, options))
    samples = options["n"]
    first, wanted = len(progress.values), samples * len(rows)
    if first:
        say(f"{first}/{wanted} completions are in {progress.path}")
    try:
        completions = Generator.load(**policy, **limits).completions(
            prompts, first_row=first, **options
        )
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
    policy: dict[str, Any], prompts: Sequence[Prompt], options: dict[str, Any]
) -> dict[str, Any]:
    """Everything that a completion depends on, as plain JSON."""
    model, adapter = (policy[name] and pathlib.Path(policy[name]) for name in ("model", "adapter"))
    asked = json.dumps(prompts, ensure_ascii=False)
    identity = policy | options
    identity |= {
        "adapter": adapter and str(adapter),
        "adapter.sha256": adapter and digest(adapter / "adapter_model.safetensors"),
        "model.sha256": fingerprint(model),
        "prompts.sha256": hashlib.sha256(asked.encode()).hexdigest(),
    }
    return json.loads(json.dumps(identity))
