"""The Hugging Face hub: which names may be names there, and why it did not deliver something, in one phrase."""

import contextlib
import logging
import os
import pathlib
import re
from collections.abc import Iterator

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")
# Names of errors of huggingface_hub, datasets and httpx, and what each means. The first that fits counts.
_REASONS = {
    "HFValidationError": "its names are NAME or OWNER/NAME, of letters, digits, '-', '_' and '.'",
    "GatedRepoError": "it is gated: accept its terms on its page there, then log in (hf auth login)",
    "RepositoryNotFoundError": "there is none of that name, or it is private: log in (hf auth login)",
    "RevisionNotFoundError": "it has no such revision",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and no copy of it is in the cache",
    "LocalEntryNotFoundError": "the hub cannot be reached, and no copy of it is in the cache",
    "ConnectError": "the hub cannot be reached",
    "ConnectionError": "the hub cannot be reached",
    "TimeoutException": "the hub does not answer",
    "HTTPStatusError": "the hub answers with an error",
}


def can_be_name(name: str) -> bool:
    """Whether something on the hub can have this name."""
    return _NAME.fullmatch(name) is not None


def is_local(name: str) -> bool:
    """Whether a name can only be that of a local file or folder, or is in a folder that exists."""
    path = pathlib.Path(name)
    is_inside = len(path.parts) > 1 and os.path.lexists(path.parent)
    return is_inside or os.path.lexists(path) or not can_be_name(name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Mutes the warnings of huggingface_hub about retries and missing tokens: an error says what matters."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def reason(error: BaseException | None) -> str:
    """Returns why the hub did not deliver something; for an unknown error its type and the first line of its text."""
    causes, text = [], f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if "outgoing traffic has been disabled" in str(error):
        return _REASONS["OfflineModeIsEnabled"]
    while error is not None and len(causes) < 10:
        causes += [kind.__name__ for kind in type(error).__mro__]
        error = error.__cause__ or error.__context__
    return next((words for name, words in _REASONS.items() if name in causes), text)
