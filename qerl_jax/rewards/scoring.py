r"""Calls reward functions, which map completions to numbers, with TRL's convention.

    f(prompts=..., completions=..., completion_ids=..., **columns, **extras) -> [number or None]

Prompts, completions, ids and columns are lists with one entry per row; columns are those of the data set
(`answer`, ...). Prompts have the form of the rows, texts or chats. A completion is text for a text and
`[{"role": "assistant", "content": text}]` for a chat.
None means that the reward does not apply to the row. Functions may be `async`. Extras are
`log_extra(column, values)`, `log_metric(name, value)` and arguments that the caller adds (`trainer_state`): a
function takes `**_` for those that it does not use.

A function may have an attribute `votes`: a function from [problems][N] answers to [problems][N] texts, which are
equal if two answers count as the same; maj@k uses it. It may have an attribute `begin`, which is called with the
completions and columns of a row as soon as the row ends. `begin` starts work in the background; the function uses the
results when it is called with all rows.
"""

import asyncio
import atexit
import concurrent.futures
import contextlib
import dataclasses
import functools
import inspect
import itertools
import json
import re
import reprlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.data import datasets, tokenizer
from qerl_jax.rewards import imports
from qerl_jax.rewards.stock import FACTORIES, STOCK, RewardFunction
from qerl_jax.system.checked import meant, require

type Named = tuple[str, RewardFunction]

# Columns of the completions log that every completion has.
COMPLETION_COLUMNS = ("prompt", "completion", "reward", "advantage", "length", "stopped")
# Time limit in seconds of the search for the row that a function fails on.
_SEARCH_SECONDS = 5.0
# Largest absolute value of a reward, so that the sum of squares over a rollout does not overflow in float32.
_LARGEST = 1e15
_REMEDY = "rename one by data.columns, or change the function"


class RewardError(ValueError):
    """A reward function that raised, or returned something other than one number per row."""


@dataclasses.dataclass
class Record:
    """Columns and metrics that reward functions log in one call of `evaluate`.

    Attributes:
        rows: B, the number of entries in a column.
        columns: Columns by name, of B entries each (`log_extra`); a later column replaces an earlier one of the
            same name.
        values: Metrics by name, each with all numbers logged for it (`log_metric`).
    """

    rows: int
    columns: dict[str, list] = dataclasses.field(default_factory=dict)
    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence) -> None:
        """Adds a column, with one entry per row, to the log of completions.

        Raises:
            ValueError: If the number of entries is wrong, the name is one of `COMPLETION_COLUMNS`, or an entry cannot
                be written as JSON.
        """
        where, count = f"log_extra({column!r})", len(values)
        require(column not in COMPLETION_COLUMNS, where, column, "is a column already")
        require(count == self.rows, where, count, f"must be {self.rows} values, one for each row")
        try:
            json.dumps(list(values), default=str)
        # Raised for keys of a dict that are not text, and for a dict that contains itself.
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{where}: cannot be written as JSON: {error}") from error
        self.columns[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to a metric. A metric under eval/, or with the name of a metric of the run, is not shown."""
        self.values.setdefault(name, []).append(float(value))


def as_completion(
    prompt: str | Sequence[Mapping[str, str]], text: str
) -> str | list[tokenizer.Message]:
    """Returns a generated text in the form of its prompt: as text, or as a list with one assistant message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def resolve(
    names: Sequence[str | RewardFunction],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    field: str = "reward function",
) -> list[Named]:
    """Finds reward functions, each with the name that its metrics get.

    Args:
        names: Stock names (the keys of `STOCK` and `FACTORIES`), import paths
            "package.module:function" or "folder/file.py:function", or functions themselves.
        options: Arguments of factories (functions that make reward functions), by name. An imported name is a factory
            if it has options here. Options of other names are ignored.
        field: Name of the field that holds `names`, for errors.

    Returns:
        (name, function) pairs in the order of `names`.

    Raises:
        ValueError: For an unknown name, a module that cannot be imported, an object that cannot be called, options
            that a factory rejects or needs, or two functions with the same name.
    """
    functions = [_resolve_one(name, options or {}, field) for name in names]
    resolved = [(getattr(f, "__name__", type(f).__name__), f) for f in functions]
    repeated = {name for name, _ in resolved if [n for n, _ in resolved].count(name) > 1}
    require(not repeated, field, sorted(repeated), "must differ in name")
    return resolved


def evaluate(
    functions: Sequence[Named],
    prompts: Sequence,
    completions: Sequence,
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence],
    extras: Mapping[str, Any] | None = None,
    record: Record | None = None,
    *,
    rows: Sequence[int | None] | None = None,
    remedy: str = _REMEDY,
) -> np.ndarray:
    """Scores B completions with every function.

    Args:
        functions: Names and functions, from `resolve`.
        prompts: Prompts of the B rows, as texts or lists of messages.
        completions: Completions of the B rows, as texts or lists of messages; see `as_completion`.
        completion_ids: Token ids of each completion.
        columns: Columns of the data set, of B entries each.
        extras: Further arguments, passed unchanged (`trainer_state`).
        record: Collects the arguments of `log_extra` and `log_metric`; made with B rows.
        rows: The row of the data of each completion, for errors; None where it is not known.
        remedy: What to do if the rows lack a column, for errors.

    Returns:
        float32 [B, number of functions]; NaN where a function returned None.

    Raises:
        RewardError: If a function raises, does not return B values, or returns a value that is neither None nor a
            finite number of at most 1e15; the error names the function.
        ValueError: If a column or an extra has the name of another argument.
    """
    count, rows = len(prompts), rows or [None] * len(prompts)
    record = Record(count) if record is None else record
    arguments: dict[str, Any] = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "log_extra": record.log_extra,
        "log_metric": record.log_metric,
    }
    names = (*arguments, *columns, *(extras or {}))
    clashing = [name for at, name in enumerate(names) if name in names[:at]]
    require(not clashing, "columns and extras", clashing, "must not repeat an argument's name")
    arguments |= {**columns, **(extras or {})}

    @contextlib.contextmanager
    def blaming(name: str, function: RewardFunction) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            location = imports.place_of(error)
            raise RewardError(
                f"reward function {name!r} raised {type(error).__name__} on {count} completions "
                f"with the columns {sorted(columns)}: {error}"
                + (f" ({location})" if location else about_arguments(error, remedy))
                + _first_failure(function, arguments, rows)
            ) from error

    async def call_async(name: str, function: RewardFunction) -> Any:
        with blaming(name, function):
            return await function(**arguments)

    results = {}
    for name, function in functions:
        if not _is_async(function):
            with blaming(name, function):
                results[name] = function(**arguments)
    waiting = {name: call_async(name, f) for name, f in functions if _is_async(f)}
    results |= zip(waiting, _run(list(waiting.values())), strict=True)
    scores = [_checked_values(name, results[name], rows) for name, _ in functions]
    return np.stack(scores, axis=1, dtype=np.float32)


def about_arguments(error: BaseException, of_column: str = _REMEDY) -> str:
    """Returns what to change if a function does not accept its arguments, or needs one that the rows do not have.

    The error must be of the call itself, and not of one inside the function. `of_column` is the remedy for a missing
    column.
    """
    if not isinstance(error, TypeError):
        return ""
    if re.search(r"got an unexpected keyword argument", str(error)):
        return "; a reward gets all columns by name: name those that it needs, and end its arguments with **_"
    if match := re.search(
        r"missing \d+ required (?:positional|keyword-only) arguments?: (.+)$", str(error)
    ):
        if re.search("'(prompt|completion)'", match[1]):
            return "; a reward gets `prompts` and `completions`: lists with an entry for each completion"
        return f"; the rows have no column {match[1]}: {of_column}"
    return ""


def _first_failure(
    function: RewardFunction, arguments: Mapping[str, Any], rows: Sequence[int | None]
) -> str:
    """Describes the first completion on which alone a function fails; "" if there is none, or the search takes too long.

    If it is the first of all, the text also says if the last one fails: then no single one is the cause.
    """
    count, until = len(rows), time.monotonic() + _SEARCH_SECONDS
    tried = itertools.takewhile(lambda _: time.monotonic() < until, range(count))
    failed = next((i for i in tried if _fails(function, _cut(arguments, count, i))), None)
    if failed is None:
        return ""
    single = _cut(arguments, count, failed)
    shown = {name: value[0] for name, value in single.items() if isinstance(value, list)}
    shown.pop("completion_ids", None)
    text = ", ".join(f"{name} {reprlib.repr(value)}" for name, value in shown.items())
    if failed == 0 < count - 1 and _fails(function, _cut(arguments, count, count - 1)):
        return f"; it fails on the first and the last completion, and {_named(0, rows)} has {text}"
    return f"; it fails on {_named(failed, rows)}, which has {text}"


def _named(index: int, rows: Sequence[int | None]) -> str:
    """Names a completion by its place, and by its row of the data if that is known."""
    row = "" if rows[index] is None else f" (row {rows[index]} of the data, from 0 on)"
    return f"completion {index + 1} of {len(rows)}{row}"


def _cut(arguments: Mapping[str, Any], rows: int, row: int) -> dict[str, Any]:
    """Returns the arguments for one row; what the function logs for it is dropped."""
    record = Record(1)
    selected = {
        name: [value[row]]
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == rows
        else value
        for name, value in arguments.items()
    }
    return selected | {"log_extra": record.log_extra, "log_metric": record.log_metric}


def _fails(function: RewardFunction, arguments: Mapping[str, Any]) -> bool:
    try:
        result = function(**arguments)
        if inspect.iscoroutine(result):
            _run([result])
    except Exception:
        return True
    return False


def environments_own(name: str) -> RewardFunction:
    """Makes a reward function that returns the rewards of environments of class `name` (`get_reward`).

    It returns None for rows of other classes, and if an environment gave no reward.
    """

    def reward(environments: Sequence[Any], **_) -> list[float | None]:
        return [item.get_reward() if item.of_class(name) else None for item in environments]

    return reward


def beginner(
    functions: Sequence[Named], problems: Sequence[datasets.Problem], group: int
) -> Callable[[int, str], None] | None:
    """Returns a function to call when a row ends, which calls `begin` of the reward functions that have one.

    Args:
        functions: The result of `resolve`.
        problems: The problems of a rollout.
        group: Completions per problem.

    Returns:
        begin(row, text), or None if no function has `begin`. It never raises: an error in a row appears when all rows
        are scored.
    """
    begins = [function.begin for _, function in functions if hasattr(function, "begin")]

    def begin(row: int, text: str) -> None:
        problem = problems[row // group]
        columns = {name: [value] for name, value in problem.columns.items()}
        for begin_one in begins:
            with contextlib.suppress(Exception):
                begin_one(completions=[as_completion(problem.as_given, text)], **columns)

    return begin if begins else None


def check(
    functions: Sequence[Named],
    problems: Sequence[datasets.Problem],
    extras: Mapping[str, Any] | None = None,
    *,
    before: str = "training",
    remedy: str = _REMEDY,
) -> None:
    """Calls every function once on placeholder completions of the problems, to find errors early.

    `before` says in errors what comes afterwards. Other arguments and errors are those of `evaluate`.
    """
    prompts, columns = datasets.collate(problems)
    text = "<think>0</think><answer>0</answer>"
    completions = [as_completion(prompt, text) for prompt in prompts]
    rows, ids = [problem.row for problem in problems], [[0] for _ in problems]
    try:
        evaluate(functions, prompts, completions, ids, columns, extras, rows=rows, remedy=remedy)
    except RewardError as error:
        text = f"{error} (tried before {before}, on {len(prompts)} rows with a made-up completion)"
        raise RewardError(text) from error.__cause__


def _resolve_one(
    name: str | RewardFunction, options: Mapping[str, Mapping[str, Any]], field: str
) -> RewardFunction:
    function = _find(name, field) if isinstance(name, str) else name
    require(callable(function), field, name, f"cannot be called: {type(function).__name__}")
    if isinstance(name, str) and (name in FACTORIES or name in options):
        return _make(name, function, options.get(name, {}))
    return function


def _make(name: str, factory: Any, options: Mapping[str, Any]) -> RewardFunction:
    field = f"rewards.options.{name}"
    require(name not in STOCK, field, dict(options), "it takes no options")
    try:
        function = factory(**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{field}: got {dict(options)}; {error}") from error
    require(callable(function), field, dict(options), f"what {name!r} makes cannot be called")
    return function


def _find(name: str, field: str) -> Any:
    known = STOCK | FACTORIES
    if name in known:
        return known[name]
    rule = f"must also name the function in the file: '{name}:FUNCTION'"
    require(not name.endswith(".py"), field, name, rule)
    require(
        ":" in name,
        field,
        name,
        f"must be one of {', '.join(sorted(known))}, or an import path such as 'package.module:function' or "
        f"'file.py:function'{meant(name, known)}",
    )
    path, _, attribute = name.rpartition(":")
    imports.require_file(path, field, name)
    try:
        module = imports.module(path)
    except Exception as error:
        location = imports.place_of(error)
        raise ValueError(
            f"could not import rewards from {path!r}: {type(error).__name__}: {error}"
            + (f" ({location})" if location else "")
        ) from error
    require(hasattr(module, attribute), field, name, f"{path} has no {attribute!r}")
    return getattr(module, attribute)


def _is_async(function: RewardFunction) -> bool:
    """Whether a reward function, or an object that is called as one, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _run(calls: Sequence[Coroutine]) -> list:
    """Runs coroutines concurrently and returns their results."""
    if not calls:
        return []

    async def gather() -> list:
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def run() -> list:
        # The search for the row that a function fails on may call this while the failed call still runs.
        if not _is_running.acquire(blocking=False):
            return asyncio.run(gather())
        try:
            return _loop().run_until_complete(gather())
        finally:
            _is_running.release()

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    # A notebook's thread already runs an event loop, and no other can run beside it.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(run).result()


_is_running = threading.Lock()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    """Returns the event loop for all steps, since clients, locks and semaphores stay bound to their first loop."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _checked_values(name: str, values: Any, rows: Sequence[int | None]) -> list[float]:
    is_list = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping)
    where, rule = f"reward function {name!r}", f"must return a list of {len(rows)} values"
    require(is_list, where, type(values).__name__, rule, RewardError)
    rule = f"must be one for each of {len(rows)} completions"
    require(len(values) == len(rows), f"{where}, values", len(values), rule, RewardError)
    return [
        float("nan") if value is None else _checked_value(f"{where}, {_named(index, rows)}", value)
        for index, value in enumerate(values)
    ]


def _checked_value(where: str, value: Any) -> float:
    number = float("nan")
    # float() also reads text: "1" is more likely a mistake than a reward.
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = number if isinstance(value, str | bytes) else float(value)
    rule = f"must be a finite number within +-{_LARGEST:g}, or None where the reward does not apply"
    require(abs(number) <= _LARGEST, where, value, rule, RewardError)
    return number
