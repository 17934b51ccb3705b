"""Problems to train and evaluate on: rows of any source as prompts with named columns.

A problem is a prompt and whatever else its row holds; rewards receive those columns by name. The
order in which training meets the problems is a function of a seed and the batch's number alone, so
that a run can resume at any batch without having read the ones before.
"""

import dataclasses
import functools
import itertools
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import numpy as np

from qerl_jax import arithmetic

type Message = dict[str, str]
type Prompt = str | tuple[Message, ...]

# Short on purpose: with it every prompt of GSM8K fits in 256 tokens of Qwen2.5's chat (252 at
# most).
THINK_ANSWER_PROMPT = (
    "First reason step by step between <think> and </think>, then write only the final answer "
    "between <answer> and </answer>."
)
# Enough that a training run meets few problems twice, and quick to permute.
ARITHMETIC_PROBLEMS = 100_000

_HUB_NAMES = {"gsm8k": ("openai/gsm8k", "main")}
_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_PROMPT_COLUMNS = ("prompt", "question", "problem")
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt, as text or as chat messages of role and content, and its row's other columns."""

    prompt: Prompt
    columns: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Problems(Sequence[Problem]):
    """A fixed number of problems, each read when it is asked for."""

    length: int
    read: Callable[[int], Problem]

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Problem: ...
    @overload
    def __getitem__(self, index: slice) -> list[Problem]: ...
    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        chosen = range(self.length)[index]
        return self.read(chosen) if isinstance(chosen, int) else [self.read(i) for i in chosen]


def load(
    name_or_path: str,
    *,
    config: str | None = None,
    split: str = "train",
    system_prompt: str | None = None,
    prompt_suffix: str = "",
    seed: int = 0,
    num_problems: int | None = None,
) -> Problems:
    """Loads problems by name: procedural ones, or the rows of a data set.

    A row becomes a problem by its columns, the first that is there counting:

        prompt   `prompt` as it stands (text, or chat messages); else `question` or `problem`, as
                 one chat message of the user
        answer   `answer`; else `reward_model["ground_truth"]` (verl's rows), `ground_truth` or
                 `solution`. An answer with a line that starts with `####` (GSM8K's) is cut there:
                 the rest of the line without commas becomes `answer`, the whole `solution`

    Every other column is kept as it is.

    Args:
        name_or_path: "arithmetic", "gsm8k", another data set of the Hugging Face hub, a folder
            that `datasets` can read, or a .jsonl, .json or .parquet file (whatever the split).
        config: the data set's configuration, where it has several.
        split: the data set's split; "train" or "test" for arithmetic.
        system_prompt: a first message telling the model what to do. It turns a text prompt into a
            chat.
        prompt_suffix: text put after the prompt, or after its last message.
        seed: which arithmetic problems; rows of data sets do not depend on it.
        num_problems: read only so many, from the first. Arithmetic has 100,000 unless told.

    Raises:
        ValueError: if there is no such data set, folder, file, configuration or split, it is
            empty, `num_problems` is not positive, or a row has no usable prompt.
    """
    if num_problems is not None and num_problems < 1:
        raise ValueError(f"num_problems must be at least 1; got {num_problems}")
    if name_or_path == "arithmetic":
        if config is not None:
            raise ValueError(f"arithmetic has no configurations; got {config=}")
        length = ARITHMETIC_PROBLEMS if num_problems is None else num_problems
        rows = functools.partial(_arithmetic_row, split, seed)
    else:
        dataset = _load_dataset(name_or_path, config, split)
        length = len(dataset) if num_problems is None else min(num_problems, len(dataset))
        if length == 0:
            raise ValueError(f"{name_or_path}: the split {split!r} is empty")
        _prompt_column(dataset.column_names, name_or_path)
        rows = dataset.__getitem__

    def read(index: int) -> Problem:
        return _problem(rows(index), system_prompt, prompt_suffix, f"{name_or_path}, row {index}")

    read(0)  # a row that cannot be read shows now, not in the middle of a run
    return Problems(length, read)


def batch(problems: Sequence[Problem], index: int, *, batch_size: int, seed: int) -> list[Problem]:
    """Batch number `index` of endless passes over the problems, each in an order of its own.

    Position p = index * batch_size + i, the i-th of the batch, is place p % n of pass p // n for n
    problems; a pass's order depends on (seed, pass) alone. What is left at the end of a pass shares
    its batch with the start of the next.

    Args:
        problems: n of them.
        index: the batch's number, from 0.
        batch_size: problems per batch.
        seed: chooses the orders.

    Raises:
        ValueError: if there are no problems, `batch_size` is not positive, or `index` is negative.
    """
    if not problems or batch_size < 1 or index < 0:
        raise ValueError(
            "a batch needs problems, batch_size >= 1 and index >= 0; "
            f"got {len(problems)} problems, {batch_size=}, {index=}"
        )
    positions = range(index * batch_size, (index + 1) * batch_size)
    places = (divmod(position, len(problems)) for position in positions)
    return [problems[int(_order(len(problems), seed, epoch)[place])] for epoch, place in places]


def batches(
    problems: Sequence[Problem], *, batch_size: int, seed: int, start: int = 0
) -> Iterator[list[Problem]]:
    """Yields batch `start` and all that follow; see `batch`."""
    for index in itertools.count(start):
        yield batch(problems, index, batch_size=batch_size, seed=seed)


def collate(problems: Sequence[Problem]) -> tuple[list[str | list[Message]], dict[str, list]]:
    """Prompts and columns of problems as parallel lists, None where a problem lacks a column.

    Messages are copied: a reward that changes its prompts changes nobody else's.
    """
    prompts = [
        problem.prompt
        if isinstance(problem.prompt, str)
        else [dict(message) for message in problem.prompt]
        for problem in problems
    ]
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    columns = {name: [problem.columns.get(name) for problem in problems] for name in names}
    return prompts, columns


# Two passes meet in a batch at most.
@functools.lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)


def _arithmetic_row(split: str, seed: int, index: int) -> dict[str, Any]:
    problem = arithmetic.problem(split, seed, index)
    return {"question": problem.question, "answer": str(problem.answer)}


def _load_dataset(name_or_path: str, config: str | None, split: str):
    """The rows as a `datasets.Dataset`, or an error that says what was looked for."""
    import datasets  # slow to import, and not needed for arithmetic

    path = pathlib.Path(name_or_path).expanduser()
    is_file = path.suffix in _FILE_FORMATS
    looks_local = is_file or path.is_absolute() or name_or_path.startswith((".", "~"))
    if looks_local and not path.exists():
        raise ValueError(f"no such file or folder: {os.fspath(path)!r}")
    if is_file and path.stat().st_size == 0:  # `datasets` ends in a bare StopIteration here
        raise ValueError(f"{name_or_path}: the file is empty")
    try:
        if is_file:
            if config is not None:
                raise ValueError(f"a file has no configurations; got {config=}")
            files = {split: os.fspath(path)}
            return datasets.load_dataset(_FILE_FORMATS[path.suffix], data_files=files, split=split)
        hub_name, hub_config = _HUB_NAMES.get(name_or_path, (os.fspath(path), None))
        return datasets.load_dataset(hub_name, config or hub_config, split=split)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(
            f"could not load the data set {name_or_path!r} ({config=}, {split=}): "
            f"{error.__cause__ or error}"
        ) from error


def _prompt_column(names: Sequence[str], where: str) -> str:
    for name in _PROMPT_COLUMNS:
        if name in names:
            return name
    raise ValueError(
        f"{where}: no column 'prompt' (nor 'question' or 'problem'); it has {sorted(names)}"
    )


def _problem(
    row: Mapping[str, Any], system_prompt: str | None, prompt_suffix: str, where: str
) -> Problem:
    columns = dict(row)
    name = _prompt_column(list(columns), where)
    prompt = columns.pop(name)
    if isinstance(prompt, str) and (name != "prompt" or system_prompt is not None):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, str):
        prompt = _checked_messages(prompt, f"{where}, column {name!r}")
    if system_prompt is not None:
        if prompt[0]["role"] == "system":
            raise ValueError(f"{where}: has a system message already; system_prompt must be unset")
        prompt = ({"role": "system", "content": system_prompt}, *prompt)
    return Problem(_with_suffix(prompt, prompt_suffix), _with_answer(columns))


def _checked_messages(prompt: Any, where: str) -> tuple[Message, ...]:
    is_chat = isinstance(prompt, Sequence) and len(prompt) > 0
    if not is_chat or not all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
        for message in prompt
    ):
        raise ValueError(f"{where}: must be text or messages of role and content; got {prompt!r}")
    # Columns of structs fill keys that a message lacks with None: only the two are meant.
    return tuple({"role": m["role"], "content": m["content"]} for m in prompt)


def _with_suffix(prompt: Prompt, suffix: str) -> Prompt:
    if isinstance(prompt, str):
        return prompt + suffix
    *earlier, last = prompt
    return (*earlier, {**last, "content": last["content"] + suffix})


def _with_answer(columns: dict[str, Any]) -> dict[str, Any]:
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        columns.setdefault("ground_truth", reward_model["ground_truth"])
    for name in _ANSWER_COLUMNS:
        if name in columns:
            columns["answer"] = columns[name]
            break
    answer = columns.get("answer")
    if isinstance(answer, str) and "\n####" in answer:
        columns["solution"] = answer
        columns["answer"] = answer.rsplit("####", 1)[1].strip().replace(",", "")
    return columns
