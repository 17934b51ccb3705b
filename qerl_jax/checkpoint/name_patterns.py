"""Regular expressions from other people's adapters. They may keep `re` busy forever, so run this in worker
processes only."""

import re


def full_match(pattern: str, name: str) -> bool:
    """Whether a pattern matches a whole name."""
    return re.fullmatch(pattern, name) is not None
