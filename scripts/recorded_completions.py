"""Reads completions that were sampled before, as token ids by step and group, from a run folder or a file."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from qerl_jax import config
from qerl_jax.checkpoint import hf_folder
from qerl_jax.data import tokenizer
from qerl_jax.system.checked import require
from qerl_jax.system.files import parse_json
from qerl_jax.tracking import logger


@dataclasses.dataclass(frozen=True)
class Row:
    """A completion and its prompt.

    Attributes:
        prompt: Ids of the prompt as the model saw it, including the chat template.
        completion: Ids of the completion, including the token that ended it.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Recording:
    """Completions of several steps.

    Attributes:
        label: Name in tables.
        temperature: Sampling temperature; None if it is not known.
        steps: The groups of each step, and the completions of each group.
        same_length: Share of completions whose encoded text has as many tokens as were sampled; None if token ids were
            recorded. The numbers differ if the policy sampled an unusual split of a word, or a special token inside the
            text.
    """

    label: str
    temperature: float | None
    steps: dict[int, list[list[Row]]]
    same_length: float | None


def read(
    path: str | pathlib.Path,
    *,
    label: str | None = None,
    temperature: float | None = None,
    tokenizer_folder: str | None = None,
) -> Recording:
    """Reads a run folder of `qerl train`, or a JSONL file of completions.

    A row of a file has `prompt` and `completion`, as texts or lists of ids (a prompt may be a chat), and integers
    `group` and `epoch`. Rows with the same epoch and group were sampled together. `qerl generate --input FILE --output
    OUT` writes such a file if the rows of its input have a chat as `prompt`, `group` and `epoch`.

    Args:
        path: The folder or the file.
        label: Name in tables; absent means the name of the folder or file.
        temperature: Sampling temperature; absent means that of the run's config, and unknown for a file.
        tokenizer_folder: Folder of the tokenizer; absent means that of the run's model. A file of texts needs it.

    Raises:
        FileNotFoundError: There are no completions at the path, or no tokenizer although one is needed.
        ValueError: A row has another form.
    """
    path = pathlib.Path(path)
    label = label or path.resolve().name.removesuffix(".jsonl")
    if path.is_file():
        tokens = tokenizer.load(tokenizer_folder) if tokenizer_folder else None
        steps, same = _of_file(path, tokens)
        return Recording(label, temperature, steps, same)
    cfg = config.load_run(path)
    folder = tokenizer_folder or hf_folder.local_folder(
        cfg.model.tokenizer_name_or_path or cfg.model.model_name_or_path, weights=False
    )
    tokens = tokenizer.load(folder, cfg.model.chat_template_kwargs)
    steps, same = _of_run(path, tokens, cfg.rollout.num_generations)
    if temperature is None:
        temperature = cfg.rollout.temperature
    return Recording(label, temperature, steps, same)


def _of_run(
    folder: pathlib.Path, tokens: tokenizer.Tokenizer, group: int
) -> tuple[dict[int, list[list[Row]]], float]:
    """The steps of a run. A run logs texts, so they are encoded again."""
    files = logger.completion_files(folder)
    require(
        files,
        str(folder),
        "no completions/step_*.jsonl",
        "a run writes them with log_completions = true",
        FileNotFoundError,
    )
    steps, same = {}, []
    for step, file in files.items():
        rows = _rows(file)
        for row in rows:
            rule = "has texts of tools, which the policy did not sample; use a run without tools"
            require("turns" not in row, str(file), "turns", rule, ValueError)
        made = _encoded(tokens, rows)
        same += [len(a.completion) == b["length"] for a, b in zip(made, rows, strict=True)]
        steps[step] = [made[i : i + group] for i in range(0, len(made), group)]
    return steps, sum(same) / len(same)


def _of_file(
    path: pathlib.Path, tokens: tokenizer.Tokenizer | None
) -> tuple[dict[int, list[list[Row]]], float | None]:
    """The epochs of a file as steps."""
    rows = _rows(path)
    for number, row in enumerate(rows, 1):
        for name in ("prompt", "completion", "group", "epoch"):
            require(name in row, f"{path}, line {number}", sorted(row), f"needs {name}", ValueError)
    have_ids = all(_are_ids(row[name]) for row in rows for name in ("prompt", "completion"))
    if have_ids:
        made = [Row(tuple(row["prompt"]), tuple(row["completion"])) for row in rows]
    else:
        rule = "has texts; give their tokenizer with --tokenizer"
        require(tokens is not None, str(path), "no tokenizer", rule, FileNotFoundError)
        made = _encoded(tokens, rows)
    groups: dict[tuple[int, int], list[Row]] = {}
    for row, entry in zip(made, rows, strict=True):
        groups.setdefault((entry["epoch"], entry["group"]), []).append(row)
    steps: dict[int, list[list[Row]]] = {}
    for epoch, group in sorted(groups):
        steps.setdefault(epoch, []).append(groups[epoch, group])
    lengths = [(len(row.completion), _length(entry)) for row, entry in zip(made, rows, strict=True)]
    same = [made == sampled for made, sampled in lengths if sampled is not None]
    return steps, sum(same) / len(same) if same and not have_ids else None


def _encoded(tokens: tokenizer.Tokenizer, rows: Sequence[dict[str, Any]]) -> list[Row]:
    """Encodes prompts and completions. A row that ended with a stop token gets the tokenizer's first one."""
    prompts = {repr(row["prompt"]): row["prompt"] for row in rows}
    ids = dict(zip(prompts, tokens.encode(list(prompts.values())), strict=True))
    made = []
    for row, completion in zip(
        rows, tokens.encode([row["completion"] for row in rows]), strict=True
    ):
        stopped = row.get("stopped", row.get("finish_reason") == "stop")
        # If a stop text ended the row, all of its tokens are there already.
        if stopped and (_length(row) is None or len(completion) < _length(row)):
            completion = [*completion, tokens.stop_tokens[0]]
        made.append(Row(tuple(ids[repr(row["prompt"])]), tuple(completion)))
    return made


def _length(row: dict[str, Any]) -> int | None:
    """The number of sampled tokens, under the name that a run or `qerl generate` uses."""
    return row.get("length", row.get("num_tokens"))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [parse_json(line) for line in path.read_bytes().splitlines() if line.strip()]
