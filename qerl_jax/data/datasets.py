"""Problems for training and evaluation: rows of any source as prompts with named columns.

A problem is a prompt and the other columns of its row; rewards receive these by name. The
order in which training meets the problems is a function of a seed and the batch's number alone, so
that a run can resume at any batch without having read the ones before.
"""

import dataclasses
import functools
import glob
import json
import os
import pathlib
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qerl_jax.checked import ConfigError, require
from qerl_jax.config import DataConfig
from qerl_jax.data import answers, arithmetic, tokenizer
from qerl_jax.files import parse_json

# Short on purpose: with it every prompt of GSM8K fits in 256 tokens of Qwen2.5's chat (252 at
# most).
THINK_ANSWER_PROMPT = (
    "First reason step by step between <think> and </think>, then write only the final answer "
    "between <answer> and </answer>."
)
SYSTEM_PROMPTS = {
    "think-answer": THINK_ANSWER_PROMPT,
    # What `dapo_reward` reads.
    "answer-line": (
        "Solve the problem step by step. End with a line that says only 'Answer: ' and the answer."
    ),
    # What `code_reward` reads.
    "think-code": (
        "First reason step by step between <think> and </think>, then write a complete Python "
        "program that reads standard input and writes standard output, in one ```python block."
    ),
}
# Large enough that a run sees few problems twice, and quick to permute.
ARITHMETIC_PROBLEMS = 100_000
# By configuration.
_ARITHMETIC = {
    None: arithmetic.problem,
    "one-step": arithmetic.one_step,
    "mixed": arithmetic.mixed,
    "products": arithmetic.product,
    "secrets": arithmetic.secret,
}


@dataclasses.dataclass(frozen=True)
class Source:
    """A set of problems by its usual name.

    Attributes:
        hub: Name of the set on the Hugging Face hub.
        config: Configuration of the set there.
        prompt: Column of the problem.
        answer: Column of the answer; absent where rewards read another column.
        system_prompt: Name in `SYSTEM_PROMPTS` of the instruction that it is used with.
        max_prompt_characters: Longest problem in characters; longer ones are left out.
    """

    hub: str
    config: str | None
    prompt: str
    answer: str | None
    system_prompt: str | None = None
    max_prompt_characters: int | None = None


_BIGMATH = "open-r1/Big-Math-RL-Verified-Processed"
# Sets and limits are QeRL's (its published code), whose system prompts are longer.
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
    # To report on; `evaluation.protocols.SPLITS` says which split. Limits are for training sets.
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
_FIELD = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt, as text or as chat messages of role and content, and its row's other columns."""

    prompt: tokenizer.Prompt
    columns: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Problems(Sequence[Problem]):
    """A fixed number of problems, each read when it is asked for."""

    length: int
    read: Callable[[int], Problem]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int | slice) -> Problem | list[Problem]:
        chosen = range(self.length)[index]
        return self.read(chosen) if isinstance(chosen, int) else [self.read(i) for i in chosen]


def from_config(
    cfg: DataConfig, *, split: str, seed: int, num_problems: int | None = None
) -> Problems:
    r"""Loads the problems that a `[data]` section describes: procedural ones, or the rows of a data set.

    A row becomes a problem by its columns, the first that is there counting:

        prompt   the one that `columns` names; a named set's own; `prompt`; else `question` or
                 `problem`. Messages of a chat stay as they are, a text becomes one message of the
                 user. Only the text of a column `prompt` of no named set stays text, for policies
                 that continue it, unless a system prompt makes it a chat
        answer   the one that `columns` names; a named set's own; `answer`; else
                 `reward_model["ground_truth"]` (verl's rows), `ground_truth` or `solution`. An
                 answer with a line that starts with `####` (GSM8K's) is cut there: the rest of the
                 line without commas becomes `answer`, the whole `solution`. A `solution` with a
                 `\boxed{}` (MATH's) is cut to what the last one holds

    Every other column is kept as it is.

    Args:
        cfg: The section. Its `dataset` is "arithmetic", a name in `SETS`, another data set of the
            Hugging Face hub, a folder that `datasets` can read, or a .jsonl, .json or .parquet file
            (whatever the split).
        split: Split of the data set, instead of the section's; "train" or "test" for arithmetic.
        seed: Random seed of arithmetic problems; rows of data sets do not depend on it.
        num_problems: Number of problems to keep, from the first, instead of the section's.
            Arithmetic has 100,000 unless told.

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
    names = dataset.column_names
    prompt, answer = _columns(cfg, names, where)
    limit = cfg.max_prompt_characters or getattr(
        SETS.get(cfg.dataset), "max_prompt_characters", None
    )
    kept = _short_enough(dataset[prompt], limit, where) if limit else range(len(dataset))
    of_row = functools.partial(_problem, cfg, prompt, answer, cfg.dataset in SETS)
    return _problems(dataset, of_row, kept[:wanted], where)


def from_rows(
    cfg: DataConfig, rows: Sequence[Mapping[str, Any]], where: str
) -> tuple[Problems, bool]:
    """Makes problems of rows that are there already, by the columns that `from_config` reads.

    There is one difference: a text in a column `prompt` is a message of the user, too.

    Args:
        cfg: Its columns, system prompt, template and limits are used.
        rows: A `datasets.Dataset`, or a list of dicts, of which each has the column of the prompt.
        where: What errors call the rows.

    Returns:
        The problems, and whether the prompts of the rows are texts.

    Raises:
        ConfigError: If these are not such rows, or there are none.
        ValueError: If there is no column of the prompt, a row has no usable one, or some rows hold a
            text and others a chat.
    """
    is_table = hasattr(rows, "column_names")
    is_rows = is_table or (isinstance(rows, list | tuple) and all(map(_is_row, rows)))
    if not is_rows or isinstance(rows, Mapping) or not hasattr(rows, "__len__"):
        rule = "must be a list of dicts, or a datasets.Dataset of one split"
        raise ConfigError(f"{where}: got {reprlib.repr(rows)}; {rule}")
    require(len(rows) > 0, where, rows, "must have at least one row")
    names = rows.column_names if is_table else list(dict.fromkeys(n for row in rows for n in row))
    prompt, answer = _columns(dataclasses.replace(cfg, dataset=where), names, where)
    prompts = rows[prompt] if is_table else [row.get(prompt) for row in rows]
    for index, each in enumerate(prompts):
        rule = "must be text or messages of role and content"
        if isinstance(each, str) or is_chat(each):
            rule = "all prompts must be texts, or all chats, as that of row 0 is"
            if isinstance(each, str) == isinstance(prompts[0], str):
                continue
        raise ValueError(f"{where}, row {index}, column {prompt!r}: {rule}; got {each!r}")
    limit = cfg.max_prompt_characters
    kept = _short_enough(prompts, limit, where) if limit else range(len(rows))
    of_row = functools.partial(_problem, cfg, prompt, answer, True)
    problems = _problems(rows, of_row, kept[: cfg.num_problems], where)
    return problems, isinstance(prompts[0], str)


def _is_row(row: Any) -> bool:
    return isinstance(row, Mapping) and all(isinstance(name, str) for name in row)


def _problems(rows: Any, of_row: Callable, kept: Sequence[int], where: str) -> Problems:
    """The problems of the rows that are kept."""

    def read(index: int) -> Problem:
        try:
            row = rows[kept[index]]
        except UnicodeDecodeError as error:  # texts are decoded when they are read
            raise ValueError(f"{where}, row {kept[index]}: not UTF-8 text: {error}") from error
        return of_row(row, f"{where}, row {kept[index]}")

    read(0)  # so a row that cannot be read is found now, not in the middle of a run
    return Problems(len(kept), read)


def _columns(cfg: DataConfig, names: Sequence[str], where: str) -> tuple[str, str | None]:
    """The columns of prompt and answer."""
    prompt = _column("prompt", cfg, names, _PROMPT_COLUMNS, where)
    rule = "must have a column 'prompt' ('question', 'problem'), or data.columns must name it"
    require(prompt is not None, f"{where}: columns", sorted(names), rule)
    return prompt, _column("answer", cfg, names, (), where)


def system_prompt(cfg: DataConfig) -> str:
    """The system message of a `[data]` section, or its name in `SYSTEM_PROMPTS`; "" for none."""
    own = getattr(SETS.get(cfg.dataset), "system_prompt", None)
    return cfg.system_prompt if cfg.system_prompt is not None else own or ""


def batch(problems: Sequence[Problem], index: int, *, batch_size: int, seed: int) -> list[Problem]:
    """Gives batch number `index` of endless passes over the problems, each in an order of its own.

    Position p = index * batch_size + i, the i-th of the batch, is place p % n of pass p // n for n
    problems; a pass's order depends on (seed, pass) alone. What is left at the end of a pass shares
    its batch with the start of the next.

    Args:
        problems: The n problems.
        index: Number of the batch, from 0.
        batch_size: Number of problems per batch.
        seed: Random seed of the orders.

    Raises:
        ValueError: If there are no problems, `batch_size` is not positive, or `index` is negative.
    """
    require(
        problems and batch_size >= 1 and index >= 0,
        "problems, batch_size, index",
        (len(problems), batch_size, index),
        "must be at least 1, 1 and 0",
    )
    positions = range(index * batch_size, (index + 1) * batch_size)
    places = (divmod(position, len(problems)) for position in positions)
    return [problems[int(_order(len(problems), seed, epoch)[place])] for epoch, place in places]


def collate(
    problems: Sequence[Problem],
) -> tuple[list[str | list[tokenizer.Message]], dict[str, list]]:
    """Puts prompts and columns of problems into parallel lists, None where a problem lacks a column.

    Messages are copied, so a reward that changes its prompts does not change those of others.
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


def _arithmetic(cfg: DataConfig, split: str, seed: int, count: int) -> Problems:
    """The first procedural problems of a split."""
    others = (cfg.path, cfg.columns, cfg.max_prompt_characters)
    require(not any(others), "path, columns, max_prompt_characters", others, "arithmetic has none")
    rule = f"arithmetic has the configurations {list(filter(None, _ARITHMETIC))}, or none"
    require(cfg.name in _ARITHMETIC, "config", cfg.name, rule)

    def read(index: int) -> Problem:
        found = _ARITHMETIC[cfg.name](split, seed, index)
        row = {"question": found.question, "answer": str(found.answer)}
        return _problem(cfg, "question", "answer", True, row, f"{cfg.dataset}, row {index}")

    read(0)  # so that an unknown split is found now
    return Problems(count, read)


def load_rows(name: str, path: str | None, config: str | None, split: str):
    """Loads the rows of a data set, as a `datasets.Dataset`.

    Args:
        name: Name in `SETS`, or any set of the hub, folder or file.
        path: Folder or file that is read instead of the hub.
        config: Configuration of the data set, where it has several.
        split: Split of the data set.

    Raises:
        ValueError: If it is not there; says what was looked for.
    """
    import datasets  # slow to import, and not needed for arithmetic

    source, place = SETS.get(name), path or name
    folder = pathlib.Path(place).expanduser()
    has_rows = is_file(place)
    looks_local = has_rows or folder.is_absolute() or place.startswith((".", "~"))
    is_there = folder.exists() or not (looks_local or path)
    require(is_there, "data set", os.fspath(folder), "no such file or folder")
    rule = f"must be a folder, or a file that ends in {', '.join(_FILE_FORMATS)}"
    require(has_rows or not folder.is_file(), "data set", place, rule)
    # `datasets` ends in a bare StopIteration for an empty file.
    require(not has_rows or folder.stat().st_size > 0, "data set", place, "the file is empty")
    try:
        if has_rows:
            require(config is None, "config", config, "a file has no configurations")
            # `datasets` takes the name for a pattern: "rows[1].jsonl" would be rows1.jsonl.
            files = {split: glob.escape(os.path.abspath(folder))}
            form = _FILE_FORMATS[folder.suffix]
            rows = datasets.load_dataset(form, data_files=files, split=split)
            return _as_written(rows, folder) if form == "json" else rows
        hub = os.fspath(folder) if source is None or path else source.hub
        if config is None and source is not None and source.config is not None:
            # A copy on disk may have been made without the hub's configurations.
            known = datasets.get_dataset_config_names(hub) if path else [source.config]
            config = source.config if source.config in known else None
        return datasets.load_dataset(hub, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetGenerationError) as error:
        which = f"split {split!r}" + (f" of {config!r}" if config else "")
        is_far = isinstance(error, ConnectionError)
        remedy = "; without a network, give a copy on disk by `path`" if is_far else ""
        reason = (has_rows and _json_fault(folder)) or error.__cause__ or error
        raise ValueError(
            f"could not load the data set {place!r} ({which}): {reason}{remedy}"
        ) from error


def is_file(place: str) -> bool:
    """Whether a data set's name or path is that of a file with rows, which has no splits."""
    return pathlib.Path(place).suffix in _FILE_FORMATS


def _as_written(rows: Any, path: pathlib.Path) -> Any:
    """The rows of a JSON file with texts as they stand there.

    `datasets` makes times of a column in which all texts are dates: no answer would equal one.
    """
    fields = rows.features.arrow_schema
    names = [field.name for field in fields if "timestamp[" in str(field.type)]
    if not names:
        return rows
    text = path.read_text("utf-8-sig")
    try:
        whole = parse_json(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:  # a row on each line
        found = [parse_json(line) for line in text.split("\n") if line.strip()]
    for name in names:
        rows = rows.remove_columns(name).add_column(name, [row.get(name) for row in found])
    return rows


def _json_fault(path: pathlib.Path) -> str | None:
    """Where a file is no JSON, or holds something else than rows, and what is wrong there; None if nowhere."""
    if path.suffix not in (".json", ".jsonl"):
        return None
    with path.open(encoding="utf-8", errors="surrogateescape") as file:
        is_list = path.suffix == ".json" and file.read(1) == "["
        file.seek(0)
        # A file of lines may be large.
        for number, text in enumerate([file.read()] if is_list else file, 1):
            if not text.strip():
                continue
            try:
                found = parse_json(text)
            except json.JSONDecodeError as error:
                line = number + error.lineno - 1
                return f"line {line}, column {error.colno}: not JSON: {error.msg}"
            except ValueError as error:  # nested too deep
                return f"line {number}: {error}"
            for index, row in enumerate(found if is_list else [found]):
                if not isinstance(row, dict):
                    where = f"row {index}" if is_list else f"line {number}"
                    return f"{where}: got {reprlib.repr(row)}; must be an object {{...}}"
    return None


def _column(
    role: Literal["prompt", "answer"],
    cfg: DataConfig,
    names: Sequence[str],
    others: Sequence[str],
    where: str,
) -> str | None:
    """The column that the config appoints, else the named set's own, else the first of others."""
    appointed = (cfg.columns or {}).get(role)
    rule = f"{where} has no such column; it has {sorted(names)}"
    require(appointed in (None, *names), f"data.columns.{role}", appointed, rule)
    own = getattr(SETS.get(cfg.dataset), role, None)
    return next((name for name in (appointed, own, *others) if name in names), None)


def _short_enough(prompts: Iterable[Any], limit: int, where: str) -> Sequence[int]:
    """The rows whose prompt has at most `limit` characters."""
    messages = (_messages(prompt, "a prompt") for prompt in prompts)
    sizes = [sum(len(message["content"]) for message in prompt) for prompt in messages]
    kept = [row for row, size in enumerate(sizes) if size <= limit]
    require(kept, f"{where}: max_prompt_characters", limit, "no prompt is that short")
    return kept


def _problem(
    cfg: DataConfig,
    prompt_column: str,
    answer_column: str | None,
    is_message: bool,
    row: Mapping[str, Any],
    where: str,
) -> Problem:
    """A row as a problem, see `from_config`; `is_message` makes any text the user's message."""
    columns = dict(row)
    prompt = columns.pop(prompt_column)
    named = system_prompt(cfg)
    instruction = SYSTEM_PROMPTS.get(named, named)
    is_message |= prompt_column != "prompt" or bool(instruction)
    if is_message or not isinstance(prompt, str):
        prompt = _messages(prompt, f"{where}, column {prompt_column!r}")
    if instruction:
        require(
            prompt[0]["role"] != "system",
            where,
            prompt[0],
            'has a system message already; set data.system_prompt = ""',
        )
        prompt = ({"role": "system", "content": instruction}, *prompt)
    if cfg.prompt_template is not None:
        prompt = _fill(cfg.prompt_template, prompt, row)
    return Problem(prompt, _with_answer(columns, answer_column))


def is_chat(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, each with a role and a content that are texts."""
    return (
        isinstance(prompt, Sequence)
        and len(prompt) > 0
        and all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
    )


def _messages(prompt: Any, where: str) -> tuple[tokenizer.Message, ...]:
    """A prompt as messages, a text as the user's."""
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    require(is_chat(prompt), where, prompt, "must be text or messages of role and content")
    # Columns of structs fill keys that a message lacks with None: only the two are meant.
    return tuple({"role": m["role"], "content": m["content"]} for m in prompt)


def _fill(template: str, prompt: tokenizer.Prompt, row: Mapping[str, Any]) -> tokenizer.Prompt:
    if not isinstance(prompt, str):
        *earlier, last = prompt
        return (*earlier, {**last, "content": _fill(template, last["content"], row)})
    # Not str.format: templates ask for \boxed{} as it stands, and problems have braces, too.
    values = {**row, "prompt": prompt}
    return _FIELD.sub(lambda field: str(values.get(field[1], field[0])), template)


def _with_answer(columns: dict[str, Any], named: str | None) -> dict[str, Any]:
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        columns.setdefault("ground_truth", reward_model["ground_truth"])
    name = next((name for name in (named, *_ANSWER_COLUMNS) if name in columns), None)
    if name is not None:
        columns["answer"] = columns[name]
    answer = columns.get("answer")
    if not isinstance(answer, str):
        return columns
    if marked := re.findall(r"^####(.*)", answer, re.MULTILINE):
        columns["solution"] = answer
        columns["answer"] = marked[-1].strip().replace(",", "")
    elif name == "solution" and (boxed := answers.last_boxed(answer)) is not None:
        columns["answer"] = boxed
    return columns
