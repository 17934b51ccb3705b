"""Renders chats as text with the chat template of a model.

A template is a program that comes with the weights. Jinja's sandbox limits what it can access, but it could still run
forever or write gigabytes. So templates are rendered in a process of their own, which is killed at its limits. The
process starts with the first chat, which takes 0.2 s, and renders a batch of chats per call.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax.system.process_pool import Failure, Pool

# CPU seconds for one batch; ordinary templates need about a ten-thousandth of that.
SECONDS = 10.0
MEMORY_BYTES = 1 << 30
_BATCH = 64


def render(
    template: str,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    names: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
    date: str | None = None,
    where: str = "chat template",
    pool: Pool | None = None,
) -> list[str]:
    """Renders each chat as text, as `apply_chat_template` of transformers does.

    Args:
        template: Source of the template, in Jinja.
        chats: Messages with role, content and whatever else the template reads; values must be plain JSON.
        names: Other variables of the template: special tokens such as `eos_token`, and options.
        add_generation_prompt: Whether the text ends with the start of the assistant's turn.
        date: The date that a template writes as today's, as "2026-07-26"; None for the current one, in UTC.
        where: Name of the template in errors.
        pool: Worker processes; None means the one process that all callers share.

    Returns:
        The texts, in the order of the chats.

    Raises:
        ValueError: If a chat has no message, or the template is not valid, raises, or exceeds its limits.
    """
    chats = [[dict(message) for message in chat] for chat in chats]
    if not all(chats):
        raise ValueError(f"{where}: got a chat without a message; must have at least one")
    if not chats:
        return []
    settings = {"add_generation_prompt": add_generation_prompt, **names}
    batches = [chats[start : start + _BATCH] for start in range(0, len(chats), _BATCH)]
    calls = [(template, batch, settings, date) for batch in batches]
    texts: list[str] = []
    try:
        results = (pool or shared_pool()).map("render_batch", calls)
    except TypeError as error:  # of json
        raise ValueError(f"{where}: messages must hold plain JSON: {error}") from error
    for result in results:
        if isinstance(result, Failure):
            raise ValueError(f"{where}: {_reason(result)}")
        texts += result
    return texts


def _reason(failure: Failure) -> str:
    if failure.reason == "timeout":
        return f"could not be rendered within {SECONDS:g} seconds; the template may be hostile"
    if failure.reason == "died":
        return "ended the process in which it was rendered; the template may be hostile"
    detail = " ".join(failure.detail.split())
    if detail.startswith("MemoryError"):
        return f"needs more than {MEMORY_BYTES >> 20} MiB of memory; the template may be hostile"
    return f"could not be rendered: {detail[:300]}"


@functools.cache
def shared_pool() -> Pool:
    """Returns the shared pool of one process, which starts when it is first needed."""
    module = "qerl_jax.data.template_renderer"
    return Pool(module, workers=1, seconds=SECONDS, memory_bytes=MEMORY_BYTES)
