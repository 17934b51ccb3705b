"""Regular expressions out of adapters that others made, which may keep `re` busy for ever; for worker processes only."""

import re


def full_match(pattern: str, name: str) -> bool:
    """Whether a pattern describes all of a name."""
    return re.fullmatch(pattern, name) is not None
