"""Problems for training and evaluation: prompts with named columns, from any source.

A problem is a prompt and the other columns of its row, which reward functions receive by name. The order of training
depends only on a seed and the index of the batch, so a run can resume at any batch without reading the earlier ones.
"""

import copy
import dataclasses
import functools
import glob
import importlib
import json
import os
import pathlib
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.config import DataConfig
from qerl_jax.data import answers, arithmetic, tokenizer
from qerl_jax.system import hub
from qerl_jax.system.checked import ConfigError, require, require_unicode
from qerl_jax.system.files import parse_json

SYSTEM_PROMPTS = {
    # Short: with it and Qwen2.5's chat template, the longest prompt of GSM8K has 252 tokens, so all fit into 256.
    "think-answer": (
        "First reason step by step between <think> and </think>, then write only the final answer "
        "between <answer> and </answer>."
    ),
    # The format that `dapo_reward` reads.
    "answer-line": (
        "Solve the problem step by step. End with a line that says only 'Answer: ' and the answer."
    ),
    # The format that `code_reward` reads.
    "think-code": (
        "First reason step by step between <think> and </think>, then write a complete Python "
        "program that reads standard input and writes standard output, in one ```python block."
    ),
}
# So many that a run sees few problems twice, and so few that a permutation is fast.
ARITHMETIC_PROBLEMS = 100_000
# Maps a configuration to its function.
_ARITHMETIC = {
    None: arithmetic.problem,
    "one-step": arithmetic.one_step,
    "mixed": arithmetic.mixed,
    "products": arithmetic.product,
    "secrets": arithmetic.secret,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set of the Hugging Face hub that has a short name here.

    Attributes:
        hub: Name on the hub.
        config: Configuration on the hub, or None.
        prompt: Column of the problem.
        answer: Column of the answer; None if rewards read another column.
        system_prompt: Default system prompt, a key of `SYSTEM_PROMPTS`, or None.
        max_prompt_characters: Longest problem in characters; longer ones are dropped.
    """

    hub: str
    config: str | None
    prompt: str
    answer: str | None
    system_prompt: str | None = None
    max_prompt_characters: int | None = None


_BIGMATH = "open-r1/Big-Math-RL-Verified-Processed"
# The training sets and their limits are those of QeRL's published code, whose system prompts are longer.
SETS = {
    "gsm8k": Source("openai/gsm8k", "main", "question", "answer"),
    "bigmath": Source(_BIGMATH, "level_3_4_5", "prompt", "solution", "think-answer", 1024),
    "bigmath_hard": Source(_BIGMATH, "level_4_5", "prompt", "solution", "think-answer", 1024),
    # Its prompts carry DAPO's own instruction to end with "Answer: ...".
    "dapo_math": Source(
        "open-r1/DAPO-Math-17k-Processed", "en", "source_prompt", "solution", None, 1024
    ),
    "miromind": Source(
        "miromind-ai/MiroMind-M1-RL-62K", None, "problem", "clean_answer", "answer-line", 1024
    ),
    "math": Source("DigitalLearningGmbH/MATH-lighteval", None, "problem", "answer", "think-answer"),
    # For evaluation, on the split that `evaluation.protocols.SPLITS` names; no problem is dropped.
    "math500": Source("HuggingFaceH4/MATH-500", None, "problem", "answer", "think-answer"),
    "aime24": Source("HuggingFaceH4/aime_2024", None, "problem", "answer", "think-answer"),
    "aime25": Source("math-ai/aime25", None, "problem", "answer", "think-answer"),
    "amc23": Source("math-ai/amc23", None, "question", "answer", "think-answer"),
    "verifiable_code": Source(
        "open-r1/verifiable-coding-problems-python_decontaminated-tested-shuffled",
        *(None, "problem", None, "think-code"),
    ),
}
_FILE_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_PROMPT_COLUMNS = ("prompt", "question", "problem")
_ANSWER_COLUMNS = ("answer", "ground_truth", "solution")
_LONG_NUMBER = re.compile(r"(?<![0-9.])[0-9]{16,}(?![0-9.eE])")
_FIELD = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt, and the other columns of its row.

    Attributes:
        prompt: What the policy gets: a text as it is, or messages, with all that their template reads.
        columns: The other columns.
        is_from_text: Whether the row gave a text of which `prompt` was made. Rewards then get texts.
        row: The number of the row in its data, from 0 on; None if it is not known.
        row_prompt: The prompt of the row itself, before a system prompt and a template; None if there is no row.
    """

    prompt: tokenizer.Prompt
    columns: dict[str, Any]
    is_from_text: bool = False
    row: int | None = dataclasses.field(default=None, compare=False)
    row_prompt: tokenizer.Prompt | None = dataclasses.field(default=None, compare=False)

    @property
    def as_given(self) -> tokenizer.Prompt:
        """The prompt in the form of its row, for rewards; messages are copied."""
        if isinstance(self.prompt, str):
            return self.prompt
        if self.is_from_text:
            return self.prompt[-1]["content"]
        return copy.deepcopy(list(self.prompt))


@dataclasses.dataclass(frozen=True)
class Problems(Sequence[Problem]):
    """A sequence of problems; each is read when it is indexed."""

    length: int
    read: Callable[[int], Problem]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: Any) -> Any:
        chosen = range(self.length)[index]
        return self.read(chosen) if isinstance(chosen, int) else [self.read(i) for i in chosen]


def from_config(
    cfg: DataConfig, *, split: str, seed: int, num_problems: int | None = None
) -> Problems:
    r"""Loads the problems that a `[data]` section describes: procedural ones, or the rows of a data set.

    The prompt and the answer of a problem come from the first of these columns that a row has:

        prompt   the column that `columns` names; that of the named set; `prompt`, `question` or
                 `problem`. Chat messages stay as they are, and a text becomes one user message,
                 unless `apply_chat_template` is false
        answer   the column that `columns` names; that of the named set; `answer`; `ground_truth`,
                 or `reward_model["ground_truth"]` as in verl's rows; `solution`. If an answer has a
                 line that starts with `####` (GSM8K), the rest of that line without commas becomes
                 `answer`, and the whole becomes `solution`. Of a `solution` with a `\boxed{}`
                 (MATH), the content of the last box becomes `answer`. Its form does not depend on the file:
                 see `answers.gold`

    All other columns are kept unchanged.

    Args:
        cfg: The section. Its `dataset` is "arithmetic", a name in `SETS`, another data set of the
            Hugging Face hub, a folder that `datasets` can read, or a .jsonl, .json or .parquet file
            (which is used for every split).
        split: Split of the data set, instead of the section's; "train" or "test" for arithmetic.
        seed: Random seed of arithmetic problems; rows of data sets do not depend on it.
        num_problems: Number of problems to use, from the first, instead of the section's number.
            The default is all rows, and 100,000 problems for arithmetic.

    Raises:
        ValueError: If there is no such data set, folder, file, configuration, split or column, no
            row is left, or a row has no usable prompt.
    """
    wanted = num_problems or cfg.num_problems
    if cfg.dataset == "arithmetic":
        return _arithmetic(cfg, split, seed, wanted or ARITHMETIC_PROBLEMS)
    where = cfg.path or cfg.dataset
    dataset = load_rows(cfg.dataset, cfg.path, cfg.name, split)
    require(len(dataset) > 0, where, split, "the split is empty")
    prompt, answer = _columns(cfg, dataset.column_names, where)
    limit = getattr(SETS.get(cfg.dataset), "max_prompt_characters", None)
    limit = cfg.max_prompt_characters or limit
    selected = _short_enough(dataset[prompt], limit, where) if limit else range(len(dataset))
    return _problems(cfg, dataset, (prompt, answer), selected[:wanted], where)


def from_rows(cfg: DataConfig, rows: Any, where: str) -> Problems:
    """Makes problems from rows in memory, as `from_config` does from a file.

    Args:
        cfg: Its data set and split are not used.
        rows: A `datasets.Dataset`, or a list of dicts, each with the prompt column.
        where: Name of the rows in errors.

    Raises:
        ConfigError: If `rows` is something else or empty.
        ValueError: If there is no prompt column, a row has no usable prompt, or some prompts are texts
            and others chats.
    """
    is_table = hasattr(rows, "column_names")
    is_rows = is_table or (isinstance(rows, list | tuple) and all(map(_is_row, rows)))
    if not is_rows or isinstance(rows, Mapping) or not hasattr(rows, "__len__"):
        rule = "must be a list of dicts, or a datasets.Dataset (or IterableDataset) of one split"
        raise ConfigError(f"{where}: got {' '.join(reprlib.repr(rows).split())}; {rule}")
    require(len(rows) > 0, where, rows, "must have at least one row")
    names = rows.column_names if is_table else list(dict.fromkeys(n for row in rows for n in row))
    prompt, answer = _columns(dataclasses.replace(cfg, dataset=where), names, where)
    prompts = rows[prompt] if is_table else [row.get(prompt) for row in rows]
    for index, value in enumerate(prompts):
        rule = "must be text or messages of role and content"
        if isinstance(value, str) or is_chat(value):
            rule = "all prompts must be texts, or all chats, as that of row 0 is"
            if isinstance(value, str) == isinstance(prompts[0], str):
                continue
        raise ValueError(f"{where}, row {index}, column {prompt!r}: {rule}; got {value!r}")
    limit = cfg.max_prompt_characters
    selected = _short_enough(prompts, limit, where) if limit else range(len(rows))
    return _problems(cfg, rows, (prompt, answer), selected[: cfg.num_problems], where)


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and all(isinstance(name, str) for name in row)


def _problems(
    cfg: DataConfig, rows: Any, columns: tuple[str, str | None], selected: Sequence[int], where: str
) -> Problems:
    """Makes problems of the rows with indices in `selected`, from their columns of prompt and answer."""

    def read(index: int) -> Problem:
        try:
            row = rows[selected[index]]
        except UnicodeDecodeError as error:  # texts are decoded when they are read
            raise ValueError(f"{where}, row {selected[index]}: not UTF-8 text: {error}") from error
        problem = _problem(cfg, *columns, row, f"{where}, row {selected[index]}")
        return dataclasses.replace(problem, row=selected[index])

    read(0)  # finds a row that cannot be read now, not in the middle of a run
    return Problems(len(selected), read)


def _columns(cfg: DataConfig, names: Sequence[str], where: str) -> tuple[str, str | None]:
    """Returns the names of the prompt column and the answer column (None if there is none).

    Each is the column that the config names, else that of the named set, else the first usual one that exists.
    """
    columns: list[Any] = []
    for role, others in (("prompt", _PROMPT_COLUMNS), ("answer", ())):
        appointed = (cfg.columns or {}).get(role)
        rule = f"{where} has no such column; it has {sorted(names)}"
        require(appointed in (None, *names), f"data.columns.{role}", appointed, rule)
        candidates = (appointed, getattr(SETS.get(cfg.dataset), role, None), *others)
        columns.append(next((name for name in candidates if name in names), None))
        rule = "must have a column 'prompt' ('question', 'problem'), or data.columns must name it"
        require(columns[0] is not None, f"{where}: columns", sorted(names), rule)
    return columns[0], columns[1]


def system_prompt(cfg: DataConfig) -> str:
    """Returns the system prompt of a `[data]` section, or its name in `SYSTEM_PROMPTS`; "" for none."""
    default = getattr(SETS.get(cfg.dataset), "system_prompt", None)
    return cfg.system_prompt if cfg.system_prompt is not None else default or ""


def batch(problems: Sequence[Problem], index: int, *, batch_size: int, seed: int) -> list[Problem]:
    """Returns batch number `index` of endless epochs over the problems, each shuffled anew.

    Item i of the batch has position p = index * batch_size + i. With n problems it is item p % n of
    epoch p // n, whose order depends only on (seed, epoch). The end of an epoch and the start of
    the next may be in one batch.

    Args:
        problems: The n problems.
        index: Index of the batch, from 0.
        batch_size: Number of problems per batch.
        seed: Random seed of the shuffles.

    Raises:
        ValueError: If there are no problems, `batch_size` is not positive, or `index` is negative.
    """
    count = len(problems)
    is_possible, numbers = count and batch_size >= 1 and index >= 0, (count, batch_size, index)
    rule = "must be at least 1, 1 and 0"
    require(is_possible, "problems, batch_size, index", numbers, rule)
    return [
        problems[int(_order(count, seed, position // count)[position % count])]
        for position in range(index * batch_size, (index + 1) * batch_size)
    ]


def collate(problems: Sequence[Problem]) -> tuple[list[tokenizer.Prompt], dict[str, list]]:
    """Returns the prompts and the columns of problems as lists, for rewards.

    Prompts have the form of their rows. A missing column is None. Messages are copied, so that a reward function that
    changes them does not change the problems.
    """
    prompts = [problem.as_given for problem in problems]
    names = dict.fromkeys(name for problem in problems for name in problem.columns)
    columns = {name: [problem.columns.get(name) for problem in problems] for name in names}
    return prompts, columns


# A batch needs the orders of two epochs, unless it is larger than an epoch.
@functools.lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(length)


def _arithmetic(cfg: DataConfig, split: str, seed: int, count: int) -> Problems:
    """Makes the first `count` procedural problems of a split."""
    others = (cfg.path, cfg.columns, cfg.max_prompt_characters)
    require(not any(others), "path, columns, max_prompt_characters", others, "arithmetic has none")
    rule = f"arithmetic has the configurations {list(filter(None, _ARITHMETIC))}, or none"
    require(cfg.name in _ARITHMETIC, "config", cfg.name, rule)

    def read(index: int) -> Problem:
        problem = _ARITHMETIC[cfg.name](split, seed, index)
        row = {"question": problem.question, "answer": str(problem.answer)}
        return _problem(cfg, "question", "answer", row, f"{cfg.dataset}, row {index}")

    read(0)  # finds an unknown split now
    return Problems(count, read)


def begin(cfg: DataConfig) -> None:
    """Starts to import what `load_rows` reads with, which takes seconds, while for example a device starts."""
    if cfg.dataset != "arithmetic":
        threading.Thread(target=importlib.import_module, args=("datasets",)).start()


def load_rows(name: str, path: str | None, config: str | None, split: str):
    """Loads the rows of a data set, as a `datasets.Dataset`.

    Args:
        name: Name in `SETS`, or any data set of the hub, folder or file.
        path: Folder or file that is read instead; None for none.
        config: Configuration of the data set, if it has several; None means the one in `SETS`.
        split: Split of the data set.

    Raises:
        ValueError: If it cannot be loaded; the error says what was looked for, and why it failed.
    """
    import datasets  # slow to import, and not needed for arithmetic

    source, location = SETS.get(name), path or name
    folder = pathlib.Path(location).expanduser()
    has_rows = is_file(location)
    looks_local = has_rows or folder.is_absolute() or location.startswith((".", "~"))
    is_there = folder.exists() or not (looks_local or path)
    require(is_there, "data set", os.fspath(folder), "no such file or folder")
    rule = f"must be a folder, or a file that ends in {', '.join(_FILE_FORMATS)}"
    require(has_rows or not folder.is_file(), "data set", location, rule)
    # For an empty file `datasets` would raise a bare StopIteration.
    require(not has_rows or folder.stat().st_size > 0, "data set", location, "the file is empty")
    try:
        if has_rows:
            require(config is None, "config", config, "a file has no configurations")
            # `datasets` reads the name as a pattern: "rows[1].jsonl" would mean rows1.jsonl.
            files = {split: glob.escape(os.path.abspath(folder))}
            form = _FILE_FORMATS[folder.suffix]
            rows = datasets.load_dataset(form, data_files=files, split=split)
            return _as_written(rows, folder) if form == "json" else rows
        name_there = os.fspath(folder) if source is None or path else source.hub
        if config is None and source is not None and source.config is not None:
            # A copy on disk may have been made without the hub's configurations.
            known = datasets.get_dataset_config_names(name_there) if path else [source.config]
            config = source.config if source.config in known else None
        with hub.quiet():
            return datasets.load_dataset(name_there, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        which = f"split {split!r}" + (f" of {config!r}" if config else "")
        is_far = isinstance(error, ConnectionError)
        remedy = "; without a network, give a copy on disk by `path`" if is_far else ""
        reason = hub.reason(error) if is_far else error.__cause__ or error
        reason = (has_rows and _json_fault(folder)) or reason
        if "Value is too" in str(reason):
            remedy = ": write whole numbers of more than 64 bits as texts"
        raise ValueError(
            f"could not load the data set {location!r} ({which}): {reason}{remedy}"
        ) from error


def is_file(location: str) -> bool:
    """Whether a data set's name or path names a file with rows, which has no splits."""
    return pathlib.Path(location).suffix in _FILE_FORMATS


def _as_written(rows: Any, path: pathlib.Path) -> Any:
    """Replaces timestamps and rounded whole numbers in the rows of a JSON file by the texts in that file.

    `datasets` turns a column of dates into timestamps, and rounds whole numbers of more than 64 bits, and those of more
    than 53 bits beside a fraction. A column of several types it reads as JSON, so a text of digits would become a
    number: a ValueError refuses a column with texts in some rows only.
    """
    kinds = {field.name: str(field.type) for field in rows.features.arrow_schema}
    names = [name for name, kind in kinds.items() if "timestamp[" in kind]
    mixed = [name for name, kind in kinds.items() if "arrow.json" in kind]
    real = [name for name, kind in kinds.items() if "double" in kind]
    if not names and not mixed and not real:
        return rows
    text = path.read_text("utf-8-sig")
    if not names and not mixed and not _LONG_NUMBER.search(text):
        return rows
    try:
        whole = parse_json(text)
        records = whole if isinstance(whole, list) else [whole]
    except ValueError:  # one row per line
        records = [parse_json(line) for line in text.split("\n") if line.strip()]
    for name in mixed:
        values = ((i, row.get(name)) for i, row in enumerate(records))
        texts = {isinstance(value, str): i for i, value in values if value is not None}
        if True in texts:
            shown = (f"row {i} has {records[i][name]!r}" for i in sorted(texts.values()))
            raise ValueError(f"column {name!r}: {' and '.join(shown)}: write all as texts, or none")
    for name in names:
        rows = rows.remove_columns(name).add_column(name, [row.get(name) for row in records])
    for name in real:
        if any(_is_rounded(row.get(name)) for row in records):
            column = [_with_digits(row.get(name)) for row in records]
            rows = rows.remove_columns(name).add_column(name, column)
    return rows


def _is_rounded(value: Any) -> bool:
    """Whether a value of a JSON file is, or contains, a whole number that a float64 may round."""
    if isinstance(value, list | dict):
        return any(map(_is_rounded, value.values() if isinstance(value, dict) else value))
    return type(value) is int and abs(value) >= answers.ROUNDED


def _with_digits(value: Any) -> Any:
    """Returns a value of a JSON file with its numbers as texts of all digits."""
    if isinstance(value, dict):
        return {name: _with_digits(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_with_digits(item) for item in value]
    return answers.gold_text(value) if type(value) in (int, float) else value


def _json_fault(path: pathlib.Path) -> str | None:
    """Returns where a file is not JSON or holds something other than rows, and what is wrong; None if it is fine."""
    if path.suffix not in (".json", ".jsonl"):
        return None
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        is_list = path.suffix == ".json" and file.read(1) == "["
        file.seek(0)
        # A file with one row per line may be large, so it is read line by line.
        for number, text in enumerate([file.read()] if is_list else file, 1):
            if not text.strip():
                continue
            try:
                # With its end of line, a row that is cut off would be wrong on the next line.
                value = parse_json(text.rstrip())
            except json.JSONDecodeError as error:
                line = number + error.lineno - 1
                return f"line {line}, column {error.colno}: not JSON: {error.msg}"
            except ValueError as error:  # nested too deep
                return f"line {number}: {error}"
            for index, row in enumerate(value if is_list else [value]):
                if not isinstance(row, dict):
                    where = f"row {index}" if is_list else f"line {number}"
                    return f"{where}: got {reprlib.repr(row)}; must be an object {{...}}"
    return None


def _short_enough(prompts: Iterable[Any], limit: int, where: str) -> Sequence[int]:
    """Returns the indices of the rows whose prompt has at most `limit` characters."""
    messages = (_messages(prompt, "a prompt") for prompt in prompts)
    sizes = [sum(len(message.get("content", "")) for message in prompt) for prompt in messages]
    selected = [row for row, size in enumerate(sizes) if size <= limit]
    require(selected, f"{where}: max_prompt_characters", limit, "no prompt is that short")
    return selected


def _problem(
    cfg: DataConfig,
    prompt_column: str,
    answer_column: str | None,
    row: Mapping[str, Any],
    where: str,
) -> Problem:
    """Makes a problem from a row, see `from_config`."""
    columns = dict(row)
    prompt = row_prompt = columns.pop(prompt_column)
    is_text = isinstance(prompt, str)
    for name in {prompt_column, *_FIELD.findall(cfg.prompt_template or "")} & row.keys():
        require_unicode(row[name], f"{where}, column {name!r}")
    named = system_prompt(cfg)
    require_unicode([named, cfg.prompt_template], "data.system_prompt, data.prompt_template")
    instruction = SYSTEM_PROMPTS.get(named, named)
    if cfg.apply_chat_template or instruction or not is_text:
        prompt = _messages(prompt, f"{where}, column {prompt_column!r}")
    if instruction:
        rule = 'has a system message already; set data.system_prompt = ""'
        require(prompt[0]["role"] != "system", where, prompt[0], rule)
        prompt = ({"role": "system", "content": instruction}, *prompt)
    if cfg.prompt_template is not None:
        prompt = _fill(cfg.prompt_template, prompt, row)
    return Problem(prompt, _with_answer(columns, answer_column), is_text, row_prompt=row_prompt)


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a non-empty list of messages: role and content are texts, or beside tool calls no content."""
    if not isinstance(prompt, Sequence) or not prompt:
        return False
    return all(
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str | None if message.get("tool_calls") else str)
        for message in prompt
    )


def _messages(prompt: Any, where: str) -> tuple[tokenizer.Message, ...]:
    """Returns a prompt as messages; a text becomes a user message."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    require(is_chat(prompt), where, prompt, "must be text or messages of role and content")
    return tuple(map(tokenizer.without_none, prompt))


def _fill(template: str, prompt: tokenizer.Prompt, row: Mapping[str, Any]) -> tokenizer.Prompt:
    if not isinstance(prompt, str):
        *earlier, last = prompt
        return (*earlier, {**last, "content": _fill(template, last.get("content", ""), row)})
    # str.format would fail on the braces of \boxed{} in a template.
    values = {**row, "prompt": prompt}
    return _FIELD.sub(lambda field: str(values.get(field[1], field[0])), template)


def _with_answer(columns: dict[str, Any], named: str | None) -> dict[str, Any]:
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        columns.setdefault("ground_truth", reward_model["ground_truth"])
    name = next((name for name in (named, *_ANSWER_COLUMNS) if name in columns), None)
    if name is None:
        return columns
    answer = columns["answer"] = columns[name]
    if not isinstance(answer, str):
        columns["answer"] = answers.gold(answer)
        return columns
    if marked := re.findall(r"^####(.*)", answer, re.MULTILINE):
        columns["solution"] = answer
        columns["answer"] = marked[-1].strip().replace(",", "")
    elif name == "solution" and (boxed := answers.last_boxed(answer)) is not None:
        columns["answer"] = boxed
    columns["answer"] = answers.gold(columns["answer"])
    return columns
