"""What a long job has found so far, in a file from which a later call goes on."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Any

from qerl_jax.tracking.logger import write_whole


class Progress:
    """A file whose first line says of what it is, and which then has a value per line, as JSON.

    Args:
        path: The file; made where it is not there.
        identity: All that a value depends on.

    Attributes:
        values: What is in the file.

    Raises:
        ValueError: Where the file is something else, or holds values of something else.
    """

    def __init__(self, path: pathlib.Path, identity: dict[str, Any]):
        self.path, self.values = path, []
        if found := whole_lines(path):
            before, *self.values = found
            if not isinstance(before, dict) or before.keys().isdisjoint(identity):
                raise ValueError(
                    f"{path}: must be what an earlier call has left; it is something else"
                )
            # Where nothing was found yet, the first call may have been a mistake.
            if (changed := changes(before, identity)) and self.values:
                raise ValueError(
                    f"{path} is what a call with other settings has left ({', '.join(changed)}): choose "
                    "another file, or remove that one"
                )
        write_whole(path, "".join(map(to_line, (identity, *self.values))))

    def add(self, values: Iterable[Any]) -> None:
        """Puts values at the end."""
        values = list(values)
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(map(to_line, values)))
        self.values += values


def whole_lines(path: pathlib.Path) -> list[Any]:
    """What a .jsonl file holds; none where it is not there.

    A kill may have cut the last line short, even within a character: it is left out.

    Raises:
        ValueError: For a line that is no JSON.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise ValueError(f"{path}: must be what an earlier call has left; {error}") from error


def changes(before: dict[str, Any], identity: dict[str, Any]) -> list[str]:
    """Names of the settings in which two calls differ."""
    return sorted(k for k in before | identity if before.get(k) != identity.get(k))


def to_line(value: Any) -> str:
    """A line of a .jsonl file."""
    return json.dumps(value, ensure_ascii=False) + "\n"
