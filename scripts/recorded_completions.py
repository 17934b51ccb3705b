"""Completions that were sampled before, as token ids, by step and group: of a run folder or of a file."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

from qerl_jax import config
from qerl_jax.checked import require
from qerl_jax.checkpoint import hf_folder
from qerl_jax.data import tokenizer
from qerl_jax.files import parse_json
from qerl_jax.tracking import logger


@dataclasses.dataclass(frozen=True)
class Row:
    """A completion and its prompt.

    Attributes:
        prompt: Ids of the prompt as the model saw it, chat template included.
        completion: Ids of the completion, with the token that ended it.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Recording:
    """Completions of several steps.

    Attributes:
        label: What tables call it.
        temperature: At which the completions were sampled; None where it is not known.
        steps: The groups of each step, and the completions of each group.
        same_length: Share of the completions whose text has as many tokens, encoded again, as were sampled; None
            where token ids were recorded. A text has other tokens than were sampled where the policy drew an
            unusual split of a word, or a special token inside of the text.
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

    A row of a file has `prompt` and `completion`, texts or lists of ids (a prompt may be a chat), and whole numbers `group`
    and `epoch`: rows of the same epoch and group were sampled together. What `qerl generate --input FILE --output OUT`
    writes is such a file, where the input's rows have a chat as `prompt`, `group` and `epoch`.

    Args:
        path: The folder or the file.
        label: Its name in tables; absent means the name of the folder or file.
        temperature: Of sampling; absent means that of the run's config, and unknown for a file.
        tokenizer_folder: Of the tokenizer; absent means that of the run's model. A file of texts needs it.

    Raises:
        FileNotFoundError: When there are no completions at the path, or no tokenizer where one is needed.
        ValueError: For rows of another form.
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
    """The steps of a run: texts are logged, so they are encoded again."""
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
            rule = "holds texts of tools, which the policy did not sample; use a run without tools"
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
        rule = "holds texts; name their tokenizer by --tokenizer"
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
    """Ids of prompts and completions; a row that stopped by a token gets the tokenizer's first such token."""
    prompts = {repr(row["prompt"]): row["prompt"] for row in rows}
    ids = dict(zip(prompts, tokens.encode(list(prompts.values())), strict=True))
    made = []
    for row, completion in zip(
        rows, tokens.encode([row["completion"] for row in rows]), strict=True
    ):
        stopped = row.get("stopped", row.get("finish_reason") == "stop")
        # Not where a text ended the row: then all of its tokens are there.
        if stopped and (_length(row) is None or len(completion) < _length(row)):
            completion = [*completion, tokens.stop_tokens[0]]
        made.append(Row(tuple(ids[repr(row["prompt"])]), tuple(completion)))
    return made


def _length(row: dict[str, Any]) -> int | None:
    """How many tokens were sampled: the name of a run, or of `qerl generate`."""
    return row.get("length", row.get("num_tokens"))


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
    return [parse_json(line) for line in path.read_bytes().splitlines() if line.strip()]
