"""Matches regular expressions from untrusted adapters. They may keep `re` busy forever, so use it in worker
processes only."""

import re


def full_match(pattern: str, name: str) -> bool:
    """Whether a pattern matches the whole of a name."""
    return re.fullmatch(pattern, name) is not None
