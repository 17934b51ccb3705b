r"""Verifiable rewards: functions from completions to numbers, called by TRL's convention.

    f(prompts=..., completions=..., completion_ids=..., **columns, **extras) -> [number or None]

All arguments are lists of one entry per row; columns are the data set's own (`answer`, ...). A
completion is text for a text prompt and `[{"role": "assistant", "content": text}]` for a chat.
None means that the reward does not apply to the row. Functions may be `async`.
"""

import asyncio
import concurrent.futures
import decimal
import hashlib
import importlib
import importlib.util
import inspect
import pathlib
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from qerl_jax import data

type RewardFunction = Callable[..., Any]
type Named = tuple[str, RewardFunction]

_TAG = r"</?(?:think|answer)>"
_WELL_FORMED = re.compile(
    rf"\s*<think>(?:(?!{_TAG}).)*</think>\s*<answer>(?:(?!{_TAG}).)*</answer>\s*", re.DOTALL
)
_BETWEEN_BLOCKS = re.compile(r"</think>\s*<answer>")
_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_HASH_ANSWER = re.compile(r"####\s*([-+]?\$?[0-9.,]*[0-9])")
_NUMBER = re.compile(r"([-+]?)((?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]*)?|\.[0-9]+)")
_RESERVED = ("prompts", "completions", "completion_ids")


class RewardError(ValueError):
    """A reward function that raised, or returned something other than one number per row."""


def accuracy_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    """1 where the last `<answer>` block holds the row's answer, else 0; None without an answer.

    Numbers are compared by value ("$1,234.00" is "1234"), anything else as stripped text.
    """
    return [
        _judge(extract_answer(completion_text(completion)), expected)
        for completion, expected in zip(completions, answer, strict=True)
    ]


def gsm8k_hash_reward(completions: Sequence, answer: Sequence, **_) -> list[float | None]:
    """1 where the number after the last `####` is the row's answer, else 0 (GSM8K's own form)."""
    found = [_HASH_ANSWER.findall(completion_text(completion)) for completion in completions]
    return [
        _judge(numbers[-1] if numbers else None, expected)
        for numbers, expected in zip(found, answer, strict=True)
    ]


def format_reward(completions: Sequence, **_) -> list[float]:
    """1 for one `<think>` block, then one `<answer>` block, and only space around them; else 0."""
    return [float(_WELL_FORMED.fullmatch(completion_text(c)) is not None) for c in completions]


def soft_format_reward(completions: Sequence, **_) -> list[float]:
    """0.2 where a `<think>` block followed by an `<answer>` block occurs anywhere, else 0.

    QeRL adds it to accuracy (arXiv:2510.11696, its published code).
    """
    return [0.2 * _has_both_blocks(completion_text(c)) for c in completions]


def think_format_reward(completions: Sequence, **_) -> list[float]:
    """1 where the text begins with its only `<think>` and closes it, else 0 (TRL's reward)."""
    texts = [completion_text(c) for c in completions]
    return [
        float(t.startswith("<think>") and t.count("<think>") == 1 and "</think>" in t)
        for t in texts
    ]


def correct_and_well_formed_reward(
    completions: Sequence, answer: Sequence, **_
) -> list[float | None]:
    """1 where `accuracy_reward` and `format_reward` both give 1, else 0; None without an answer."""
    scores = zip(accuracy_reward(completions, answer), format_reward(completions), strict=True)
    return [None if correct is None else correct * formed for correct, formed in scores]


def token_hash_reward(completion_ids: Sequence, **_) -> list[float]:
    """A pseudo-random number in [0, 1) that depends on the row's token ids alone.

    For benchmarks with random weights: unequal completions get unequal rewards, so every group has
    a gradient, and the same tokens score the same in every process.
    """
    digests = [
        hashlib.blake2b(np.asarray(ids, dtype="<i8").tobytes(), digest_size=4).digest()
        for ids in completion_ids
    ]
    return [int.from_bytes(digest, "little") / 2**32 for digest in digests]


STOCK: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        accuracy_reward,
        correct_and_well_formed_reward,
        format_reward,
        gsm8k_hash_reward,
        soft_format_reward,
        think_format_reward,
        token_hash_reward,
    )
}


def completion_text(completion: str | Sequence[Mapping[str, str]]) -> str:
    """The text of a completion in either form: a string, or the last message of a chat."""
    return completion if isinstance(completion, str) else completion[-1]["content"]


def as_completion(prompt: str | Sequence[Mapping[str, str]], text: str) -> str | list[data.Message]:
    """A generated text in the form that belongs to its prompt: text, or an assistant's message."""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


def extract_answer(text: str) -> str | None:
    """What the last complete `<answer>` block holds, stripped; None where there is no block."""
    blocks = _ANSWER.findall(text)
    return blocks[-1].strip() if blocks else None


def resolve(names: Sequence[str | RewardFunction]) -> list[Named]:
    """Finds reward functions, each with the name that its metrics carry.

    Args:
        names: stock names (the keys of `STOCK`), import paths "package.module:function" or
            "folder/file.py:function", or functions themselves.

    Raises:
        ValueError: for an unknown name, a module that cannot be imported, something that cannot be
            called, or two functions of one name.
    """
    functions = [_resolve_one(name) for name in names]
    resolved = [(getattr(f, "__name__", type(f).__name__), f) for f in functions]
    repeated = {name for name, _ in resolved if [n for n, _ in resolved].count(name) > 1}
    if repeated:
        raise ValueError(f"reward functions must differ in name; repeated: {sorted(repeated)}")
    return resolved


def evaluate(
    functions: Sequence[Named],
    prompts: Sequence,
    completions: Sequence,
    completion_ids: Sequence[Sequence[int]],
    columns: Mapping[str, Sequence],
    extras: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Scores B completions with every function.

    Args:
        functions: names and functions, from `resolve`.
        prompts: B texts or lists of messages.
        completions: B texts or lists of messages; see `as_completion`.
        completion_ids: B sequences of token ids.
        columns: the data set's columns, B entries each.
        extras: further arguments passed as they are (`trainer_state`, `log_metric`, ...).

    Returns:
        float32 [B, number of functions]; NaN where a function returned None.

    Raises:
        RewardError: naming the function, if it raises, returns another number of values than B, or
            returns something that is not a finite number.
        ValueError: if a column or an extra has the name of another argument.
    """
    extras = extras or {}
    taken = [*_RESERVED, *columns]
    clashing = [name for name in columns if name in _RESERVED]
    clashing += [name for name in extras if name in taken]
    if clashing:
        raise ValueError(f"columns and extras must not repeat an argument's name: {clashing}")
    arguments = {
        "prompts": prompts,
        "completions": completions,
        "completion_ids": completion_ids,
        **columns,
        **extras,
    }

    def blame(name: str, error: Exception) -> RewardError:
        return RewardError(
            f"reward function {name!r} raised {type(error).__name__} on {len(prompts)} rows with "
            f"the columns {sorted(columns)}: {error}"
        )

    async def call_async(name: str, function: RewardFunction) -> Any:
        try:
            return await function(**arguments)
        except Exception as error:
            raise blame(name, error) from error

    results = {}
    for name, function in functions:
        if not _is_async(function):
            try:
                results[name] = function(**arguments)
            except Exception as error:
                raise blame(name, error) from error
    waiting = [(name, function) for name, function in functions if _is_async(function)]
    calls = [call_async(name, function) for name, function in waiting]
    results |= {name: values for (name, _), values in zip(waiting, _run(calls), strict=True)}
    scores = np.empty((len(prompts), len(functions)), np.float32)
    for column, (name, _) in enumerate(functions):
        scores[:, column] = _checked_values(name, results[name], len(prompts))
    return scores


def check(
    functions: Sequence[Named],
    problems: Sequence[data.Problem],
    extras: Mapping[str, Any] | None = None,
) -> None:
    """Calls every function once on placeholder completions, so that mistakes show before training.

    Raises:
        RewardError: as `evaluate` does.
        ValueError: as `evaluate` does.
    """
    prompts, columns = data.collate(problems)
    placeholder = "<think>0</think><answer>0</answer>"
    completions = [as_completion(prompt, placeholder) for prompt in prompts]
    completion_ids = [[0] for _ in problems]
    evaluate(functions, prompts, completions, completion_ids, columns, extras)


def _number(text: str) -> decimal.Decimal | None:
    """The value of a number as people write it: 1,234 or $5.00 or 27. or a typographic minus."""
    plain = text.strip().replace("\\$", "").replace("$", "").replace("\N{MINUS SIGN}", "-")
    match = _NUMBER.fullmatch(plain.strip())
    return decimal.Decimal(match[1] + match[2].replace(",", "")) if match else None


def _judge(given: str | None, expected: Any) -> float | None:
    if expected is None:
        return None
    if given is None:
        return 0.0
    given_number, expected_number = _number(given), _number(str(expected))
    if given_number is not None and expected_number is not None:
        return float(given_number == expected_number)
    return float(given.strip() == str(expected).strip())


def _has_both_blocks(text: str) -> bool:
    # The first place of each tag in turn decides, so this stays linear in the text: one pattern
    # with three wildcards would take seconds on a model that repeats its tags.
    _, think, rest = text.partition("<think>")
    between = _BETWEEN_BLOCKS.search(rest)
    return bool(think and between and "</answer>" in rest[between.end() :])


def _resolve_one(name: str | RewardFunction) -> RewardFunction:
    if not isinstance(name, str):
        function = name
    elif name in STOCK:
        return STOCK[name]
    elif ":" not in name:
        raise ValueError(
            f"no reward function {name!r}; there are {sorted(STOCK)}, or an import path such as "
            "'package.module:function' or 'file.py:function'"
        )
    else:
        path, _, attribute = name.rpartition(":")
        module = _import(path)
        if not hasattr(module, attribute):
            raise ValueError(f"reward function {name!r}: {path} has no {attribute!r}")
        function = getattr(module, attribute)
    if not callable(function):
        raise ValueError(f"reward function {name!r} cannot be called: {type(function).__name__}")
    return function


def _import(path: str):
    try:
        if not path.endswith(".py"):
            return importlib.import_module(path)
        spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        raise ValueError(
            f"could not import rewards from {path!r}: {type(error).__name__}: {error}"
        ) from error


def _is_async(function: RewardFunction) -> bool:
    either = (function, type(function).__call__)  # a function, or an object that is called
    return any(map(inspect.iscoroutinefunction, either))


def _run(calls: Sequence[Coroutine]) -> list:
    """What the coroutines return, run side by side."""
    if not calls:
        return []

    async def gather() -> list:
        return await asyncio.gather(*calls)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(gather())
    # A notebook's thread has a loop running already, which asyncio.run refuses to share.
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, gather()).result()


def _checked_values(name: str, values: Any, rows: int) -> list[float]:
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__"):
        raise RewardError(
            f"reward function {name!r} must return a list of {rows} values; "
            f"got {type(values).__name__}"
        )
    if len(values) != rows:
        raise RewardError(f"reward function {name!r} returned {len(values)} values for {rows} rows")
    return [
        float("nan") if value is None else _checked_value(name, row, value)
        for row, value in enumerate(values)
    ]


def _checked_value(name: str, row: int, value: Any) -> float:
    try:
        # float() also reads text: "1" is more likely a mistake than a reward.
        number = float("nan") if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not np.isfinite(number):
        raise RewardError(
            f"reward function {name!r} returned {value!r} for row {row}; "
            "it must be a finite number, or None where the reward does not apply"
        )
    return number
