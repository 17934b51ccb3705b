r"""Verifiable rewards: functions from completions to numbers, called by TRL's convention.

    f(prompts=..., completions=..., completion_ids=..., **columns, **extras) -> [number or None]

Prompts, completions, ids and columns are lists of one entry per row; columns are the data set's own
(`answer`, ...). A completion is text for a text prompt and `[{"role": "assistant", "content":
text}]` for a chat. None means that the reward does not apply to the row. Functions may be `async`.
Extras are `log_extra(column, values)`, `log_metric(name, value)` and what the caller adds
(`trainer_state`): a function takes `**_` for those that it does not use.

A function may have an attribute `votes`: a function from [problems][N] answers to [problems][N] texts, which are
equal where two answers count as the same; maj@k uses it. It may have an attribute `begin`, which is called with the
same arguments for a few rows, as soon as these end. It starts work in the background; the function uses the results
when it is called with all rows.
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
import reprlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax.checked import meant, require
from qerl_jax.data import datasets, tokenizer
from qerl_jax.rewards import imports
from qerl_jax.rewards.stock import FACTORIES, STOCK, RewardFunction

type Named = tuple[str, RewardFunction]

# Columns of the completions log that every completion has.
COMPLETION_COLUMNS = ("prompt", "completion", "reward", "advantage", "length", "stopped")
# Time limit of the search for the row that a function fails on.
_SEARCH_SECONDS = 5.0
# The largest reward: squares of as many as a rollout has are added up in float32.
_LARGEST = 1e15
_RESERVED = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")


class RewardError(ValueError):
    """A reward function that raised, or returned something other than one number per row."""


@dataclasses.dataclass
class Record:
    """What reward functions log beside their values, in one call of `evaluate`.

    Attributes:
        rows: B, the number of entries in a column.
        columns: Columns by name, of B entries each (`log_extra`); a later column replaces an earlier one of the
            same name.
        values: Metrics by name, each with every number logged (`log_metric`).
    """

    rows: int
    columns: dict[str, list] = dataclasses.field(default_factory=dict)
    values: dict[str, list[float]] = dataclasses.field(default_factory=dict)

    def log_extra(self, column: str, values: Sequence) -> None:
        """Adds a column to the log of completions.

        Raises:
            ValueError: If it does not have one entry per row, has the name of an existing column, or holds what
                cannot be written as JSON.
        """
        where, count = f"log_extra({column!r})", len(values)
        require(column not in COMPLETION_COLUMNS, where, column, "is a column already")
        require(count == self.rows, where, count, f"must be {self.rows} values, one for each row")
        try:
            json.dumps(list(values), default=str)
        # Keys of a table that are no text, or a table within itself.
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError(f"{where}: cannot be written as JSON: {error}") from error
        self.columns[column] = list(values)

    def log_metric(self, name: str, value: float) -> None:
        """Adds a number to a metric. A metric with the name of one of the run's own, or under eval/, is not shown."""
        self.values.setdefault(name, []).append(float(value))


def as_completion(
    prompt: str | Sequence[Mapping[str, str]], text: str
) -> str | list[tokenizer.Message]:
    """Puts a generated text into the form that belongs to its prompt: text, or an assistant's message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def resolve(
    names: Sequence[str | RewardFunction],
    options: Mapping[str, Mapping[str, Any]] | None = None,
    field: str = "reward function",
) -> list[Named]:
    """Finds reward functions, each with the name that its metrics carry.

    Args:
        names: Stock names (the keys of `STOCK` and `FACTORIES`), import paths
            "package.module:function" or "folder/file.py:function", or functions themselves.
        options: Arguments of factories (functions that make reward functions), by name. Stock factories need none;
            an imported name is a factory if it has options here. Options of other names are ignored.
        field: What errors call the names: where they were given.

    Raises:
        ValueError: For an unknown name, a module that cannot be imported, an object that cannot be called, options
            that a factory refuses, or two functions with the same name.
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
) -> np.ndarray:
    """Scores B completions with every function.

    Args:
        functions: Names and functions, from `resolve`.
        prompts: Prompts of the B rows, as texts or lists of messages.
        completions: Completions of the B rows, as texts or lists of messages; see `as_completion`.
        completion_ids: Token ids of each completion.
        columns: Columns of the data set, of B entries each.
        extras: Further arguments, passed as they are (`trainer_state`).
        record: Collects what functions log by `log_extra` and `log_metric`; made with B rows.

    Returns:
        float32 [B, number of functions]; NaN where a function returned None.

    Raises:
        RewardError: If a function raises, returns another number of values than B, or
            returns something that is not a finite number; the error names it.
        ValueError: If a column or an extra has the name of another argument.
    """
    extras = extras or {}
    record = Record(len(prompts)) if record is None else record
    names = (*_RESERVED, *columns, *extras)
    clashing = [name for at, name in enumerate(names) if name in names[:at]]
    require(not clashing, "columns and extras", clashing, "must not repeat an argument's name")
    arguments = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        "log_extra": record.log_extra,
        "log_metric": record.log_metric,
        **columns,
        **extras,
    }

    @contextlib.contextmanager
    def blaming(name: str, function: RewardFunction) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            place = imports.place_of(error)
            raise RewardError(
                f"reward function {name!r} raised {type(error).__name__} on {len(prompts)} rows "
                f"with the columns {sorted(columns)}: {error}"
                + (f" ({place})" if place else "")
                + _first_row(function, arguments, len(prompts))
            ) from error

    async def call_async(name: str, function: RewardFunction) -> Any:
        with blaming(name, function):
            return await function(**arguments)

    results = {}
    for name, function in functions:
        if not is_async(function):
            with blaming(name, function):
                results[name] = function(**arguments)
    waiting = {name: call_async(name, f) for name, f in functions if is_async(f)}
    results |= zip(waiting, _run(list(waiting.values())), strict=True)
    scores = [_checked_values(name, results[name], len(prompts)) for name, _ in functions]
    return np.stack(scores, axis=1, dtype=np.float32)


def _first_row(function: RewardFunction, arguments: Mapping[str, Any], rows: int) -> str:
    """The first row on which a function fails by itself, with the row's values; empty if the search takes long.

    If that is row 0, it also says whether the last row fails, too: then no single row is the cause.
    """
    until = time.monotonic() + _SEARCH_SECONDS
    tried = itertools.takewhile(lambda row: time.monotonic() < until, range(rows))
    row = next((row for row in tried if _fails(function, _cut(arguments, rows, row))), None)
    if row is None:
        return ""
    own = _cut(arguments, rows, row)
    shown = {name: value[0] for name, value in own.items() if isinstance(value, list)}
    shown.pop("completion_ids", None)
    text = ", ".join(f"{name} {reprlib.repr(value)}" for name, value in shown.items())
    last = rows - 1
    if row == 0 < last and _fails(function, _cut(arguments, rows, last)):
        return f"; it fails on rows 0 and {last}, and row 0 has {text}"
    return f"; it fails on row {row}, which has {text}"


def _cut(arguments: Mapping[str, Any], rows: int, row: int) -> dict[str, Any]:
    """The arguments for one row, whose logging is dropped."""
    record = Record(1)
    own = {
        name: [value[row]]
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == rows
        else value
        for name, value in arguments.items()
    }
    return own | {"log_extra": record.log_extra, "log_metric": record.log_metric}


def _fails(function: RewardFunction, arguments: Mapping[str, Any]) -> bool:
    try:
        result = function(**arguments)
        if inspect.iscoroutine(result):
            _run([result])
    except Exception:
        return True
    return False


def environments_own(name: str) -> RewardFunction:
    """The rewards that environments of the class `name` gave their rows (`get_reward`).

    The value is None where an environment gave none, and for rows of other classes.
    """

    def own(environments: Sequence[Any], **_) -> list[float | None]:
        return [each.get_reward() if each.of_class(name) else None for each in environments]

    return own


def beginner(
    functions: Sequence[Named], problems: Sequence[datasets.Problem], group: int
) -> Callable[[int, str], None] | None:
    """A function that tells reward functions about each row as it ends; None where no function has `begin`.

    Args:
        functions: From `resolve`.
        problems: The problems of a rollout.
        group: Completions of each problem.

    Returns:
        begin(row, text), which never raises: an error in a row appears when all rows are scored.
    """
    begins = [function.begin for _, function in functions if hasattr(function, "begin")]

    def begin(row: int, text: str) -> None:
        problem = problems[row // group]
        columns = {name: [value] for name, value in problem.columns.items()}
        for each in begins:
            with contextlib.suppress(Exception):
                each(completions=[as_completion(problem.prompt, text)], **columns)

    return begin if begins else None


def check(
    functions: Sequence[Named],
    problems: Sequence[datasets.Problem],
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Calls every function once on placeholder completions, so that mistakes show before training.

    Raises:
        RewardError: As `evaluate` does.
        ValueError: As `evaluate` does.
    """
    prompts, columns = datasets.collate(problems)
    completions = [
        as_completion(prompt, "<think>0</think><answer>0</answer>") for prompt in prompts
    ]
    evaluate(functions, prompts, completions, [[0] for _ in problems], columns, extras)


def _resolve_one(
    name: str | RewardFunction, options: Mapping[str, Mapping[str, Any]], field: str
) -> RewardFunction:
    found = _find(name, field) if isinstance(name, str) else name
    require(callable(found), field, name, f"cannot be called: {type(found).__name__}")
    makes = isinstance(name, str) and (name in FACTORIES or name in options)
    return _make(name, found, options.get(name, {})) if makes else found


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
    require(
        ":" in name,
        field,
        name,
        f"must be one of {', '.join(sorted(known))}, or an import path such as 'package.module:function' or "
        f"'file.py:function'{meant(name, known)}",
    )
    path, _, attribute = name.rpartition(":")
    imports.require_file(path, field, name)
    module = _import(path)
    require(hasattr(module, attribute), field, name, f"{path} has no {attribute!r}")
    return getattr(module, attribute)


def _import(path: str):
    try:
        return imports.module(path)
    except Exception as error:
        place = imports.place_of(error)
        raise ValueError(
            f"could not import rewards from {path!r}: {type(error).__name__}: {error}"
            + (f" ({place})" if place else "")
        ) from error


def is_async(function: RewardFunction) -> bool:
    """Whether a reward function, or an object that is called as one, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))


def _run(calls: Sequence[Coroutine]) -> list:
    """The results of the coroutines, which run concurrently."""
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
        # The search for the row that a function fails on runs beside the call that failed.
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
    """One event loop for all steps: clients, locks and semaphores that functions keep stay with that of their first
    use."""
    loop = asyncio.new_event_loop()
    atexit.register(loop.close)
    return loop


def _checked_values(name: str, values: Any, rows: int) -> list[float]:
    is_list = hasattr(values, "__len__") and not isinstance(values, str | bytes | Mapping)
    where, rule = f"reward function {name!r}", f"must return a list of {rows} values"
    require(is_list, where, type(values).__name__, rule, RewardError)
    rule = f"must be one for each of {rows} rows"
    require(len(values) == rows, f"{where}, values", len(values), rule, RewardError)
    return [
        float("nan") if value is None else _checked_value(name, row, value)
        for row, value in enumerate(values)
    ]


def _checked_value(name: str, row: int, value: Any) -> float:
    number = float("nan")
    # float() also reads text: "1" is more likely a mistake than a reward.
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        number = number if isinstance(value, str | bytes) else float(value)
    rule = f"must be a finite number within +-{_LARGEST:g}, or None where the reward does not apply"
    is_usable = abs(number) <= _LARGEST
    require(is_usable, f"reward function {name!r}, row {row}", value, rule, RewardError)
    return number
