"""Chats as text through the chat template of a model.

A template is a program that comes with the weights. Jinja's sandbox limits what it can touch, but a template may
still run for ever or write gigabytes. So templates are rendered in their own process, which is killed at its
limits. It starts with the first chat, in a fifth of a second, and takes a batch of chats at a time.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from qerl_jax.process_pool import Failure, Pool

# For one batch, in seconds of processor time; ordinary templates take about a ten-thousandth of that.
SECONDS = 10.0
MEMORY_BYTES = 1 << 30
_BATCH = 64


def render(
    template: str,
    chats: Sequence[Sequence[Mapping[str, Any]]],
    names: Mapping[str, Any],
    *,
    add_generation_prompt: bool = True,
    where: str = "chat template",
    pool: Pool | None = None,
) -> list[str]:
    """The text of each chat, as `apply_chat_template` of transformers makes it.

    Args:
        template: Jinja's source.
        chats: Messages of role, content and whatever else the template reads; values must be plain JSON.
        names: Other variables of the template: special tokens such as `eos_token`, and options.
        add_generation_prompt: Whether the text ends where the model's answer begins.
        where: What errors call the template.
        pool: Processes for the work; absent means one that all callers share.

    Raises:
        ValueError: In one line, if the template is not valid, raises, or exceeds its limits.
    """
    chats = [[dict(message) for message in chat] for chat in chats]
    if not all(chats):
        raise ValueError(f"{where}: got a chat without a message; must have at least one")
    if not chats:
        return []
    settings = {"add_generation_prompt": add_generation_prompt, **names}
    batches = [chats[start : start + _BATCH] for start in range(0, len(chats), _BATCH)]
    calls = [(template, batch, settings) for batch in batches]
    texts: list[str] = []
    for given in (pool or shared_pool()).map("render_batch", calls):
        if isinstance(given, Failure):
            raise ValueError(f"{where}: {_reason(given)}")
        texts += given
    return texts


def _reason(failure: Failure) -> str:
    if failure.reason == "timeout":
        return f"could not be rendered within {SECONDS:g} seconds; the template may be hostile"
    if failure.reason == "died":
        return "ended the process in which it was rendered; the template may be hostile"
    said = " ".join(failure.detail.split())
    if said.startswith("MemoryError"):
        return f"needs more than {MEMORY_BYTES >> 20} MiB of memory; the template may be hostile"
    return f"could not be rendered: {said[:300]}"


@functools.cache
def shared_pool() -> Pool:
    """The process that renders; it starts when it is first needed."""
    module = "qerl_jax.data.template_renderer"
    return Pool(module, workers=1, seconds=SECONDS, memory_bytes=MEMORY_BYTES)
