"""Writes the results of evaluations as rows end, and continues evaluations that were stopped."""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console

from qerl_jax.evaluation.evaluator import Evaluator, judged
from qerl_jax.system.files import Progress
from qerl_jax.tracking import terminal

_SECONDS_BETWEEN_LINES = 10


class Results(contextlib.ExitStack):
    """The files of a set's results, as a context manager.

    A row is appended to `<path>.partial` when it has ended and was judged. When all have, one result for each problem is
    appended to `path`, in the order of the problems, and `<path>.partial` is removed. So a process that is killed loses
    only rows that had not ended.

    Args:
        path: The file of the results.
        identity: All that a result depends on, as a JSON value.
        **options: `frozen`, `settings` and `refusal` of `Progress`.

    Attributes:
        of_problems: The results of the first problems.
        rows: The rows of the others that have ended.
        identity: The identity with the frozen settings of the first call.

    Raises:
        Busy: If another process works on the set.
        ValueError: If a file is not of such a set, or has results of other settings.
    """

    def __init__(self, path: pathlib.Path, identity: dict[str, Any], **options: Any):
        super().__init__()
        partial = path.with_name(f"{path.name}.partial")
        of_rows = {name: value for name, value in options.items() if name != "settings"}
        with contextlib.ExitStack() as stack:
            self.rows = stack.enter_context(Progress(partial, identity, **of_rows))
            stack.callback(self._tidy)
            frozen = options.get("frozen") or {}
            options |= {"frozen": {name: self.rows.identity[name] for name in frozen}}
            self.of_problems = stack.enter_context(Progress(path, identity, **options))
            self.identity = self.of_problems.identity
            self.push(stack.pop_all())

    def _tidy(self) -> None:
        if not self.rows.values:
            self.rows.path.unlink(missing_ok=True)

    def finish(self, results: Iterable[Any]) -> None:
        """Appends the results of the other problems, and removes their rows."""
        self.of_problems.add(results)
        self.rows.values.clear()
        self._tidy()


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A set to measure.

    Attributes:
        evaluator: Its problems, and how they are sampled and judged.
        results: Its results so far.
        join: Computes results from the rows of some problems, in the order of these: one for each problem.
        line: Makes a line about the progress from its beginning, such as "12/64 completions".
        columns: The columns of a row (see `Evaluator.judge`) that are written; None for all.
    """

    evaluator: Evaluator
    results: Results
    join: Callable[[Sequence[dict[str, Any]]], Iterable[Any]]
    line: Callable[[str], str]
    columns: Sequence[str] | None = None

    def done(self) -> set[int]:
        """Returns the numbers of the samples that have a result, or a row.

        Raises:
            ValueError: If the rows are not those of an evaluation.
        """
        n, path = self.evaluator.sampler.params.n, self.results.rows.path
        numbers = [*range(n * len(self.results.of_problems.values))]
        try:
            numbers += [row["problem"] * n + row["sample"] for row in self.results.rows.values]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}: has a row that is not of an evaluation: {error}") from error
        return {*numbers}


def measure(
    variables: dict[str, Any],
    measurements: Sequence[Measurement],
    log: Callable[[str], None],
    *,
    quiet: bool = False,
) -> None:
    """Samples and judges the rows that sets lack, as one queue, and completes the results.

    Args:
        variables: The collections of the policy.
        measurements: The sets; see `judged`.
        log: Called with a line about every ten seconds, and when a set is complete.
        quiet: Whether to show no bar, where there is a terminal.
    """
    done = [one.done() for one in measurements]
    totals = [one.evaluator.num_rows for one in measurements]
    reported = time.monotonic()

    def progressed(index: int) -> None:
        nonlocal reported
        one, count, total = measurements[index], len(done[index]), totals[index]
        if count == total or time.monotonic() > reported + _SECONDS_BETWEEN_LINES:
            log(one.line(f"{count}/{total} completions"))
            reported = time.monotonic()
        if count == total:
            first = len(one.results.of_problems.values)
            rows = [row for row in one.results.rows.values if row["problem"] >= first]
            one.results.finish(one.join(rows) if rows else ())

    for index, one in enumerate(measurements):  # those that were stopped just before their end
        if len(done[index]) == totals[index] and one.results.rows.values:
            progressed(index)
    with contextlib.ExitStack() as stack:
        _, move = stack.enter_context(terminal.job("evaluation", Console(quiet=quiet)))
        rows = judged(variables, [one.evaluator for one in measurements], done)
        for index, row in stack.enter_context(contextlib.closing(rows)):
            one = measurements[index]
            one.results.rows.add([{name: row[name] for name in one.columns or row}])
            done[index].add(row["problem"] * one.evaluator.sampler.params.n + row["sample"])
            move(sum(map(len, done)) / sum(totals))
            progressed(index)
