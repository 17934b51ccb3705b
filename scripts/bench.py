"""Times what the project reports: `python -m scripts.bench NAME [options]`.

Each row of the result runs in a process of its own, which is killed at its time limit. With `--together N`, N processes
compile at a time, and are then measured in turn, round after round, while the others wait: a warm card is slower, and
rounds in turn make that the same for all. Each measurement is a JSON line in `--out`, with date, device and versions.
The last lines have the median of the rounds, and its ratio to that of the first value of the compared option.

    python -m scripts.bench decode --model 7b --base nvfp4 bfloat16 --rows 8 64 128
    python -m scripts.bench decode_layer training_layer product decode_attention
    python -m scripts.bench decode --rows 64 --env "" PALLAS_PAIRED_GATES=0  # the same with another environment
    python -m scripts.bench recipe --set rollout.max_concurrent=128
    python -m scripts.bench scaling --devices 1 2 4
    python -m scripts.bench --list                                           # the benchmarks and their options
    python -m scripts.bench all --tiny                                       # whether all run, on a CPU

Options that take several values are combined with each other. What is timed is used as a user could use it: no part of
the library is replaced by another.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import itertools
import json
import os
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from scripts.check_device import Lost, Worker, answering

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = ("bench_sampling", "bench_training", "bench_kernels")
# A copy within an H200 reaches 4.3 of its nominal 4.8 TB/s; other cards are taken to reach the same share.
REACHED = 4.3 / 4.8
# Operations per second that JAX reaches on an H200, in a product of 8192^3 in bfloat16.
BF16_RATE = 790e12

type Case = dict[str, Any]
# Called with each result; the last one of a round counts.
type Tell = Callable[[dict[str, Any]], None]


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """Something that is timed.

    Attributes:
        prepare: Compiles all that a case needs; returns a function that measures one round and tells the result. Its
            docstring says what is timed.
        axes: Options with several values, which are combined, and their defaults.
        settings: Options with one value, and their defaults.
        tiny: Values of options with which it runs on a CPU in seconds.
        shows: Columns of the table besides the options.
        metric: The column whose median is compared.
        compared: The axis whose first value is the baseline.
        rounds: Default number of rounds.
        timeout: Default limit of compiling and of a round, in seconds.
        environment: Environment variables of a case's process.
        disagreements: What is wrong with the rows of all cases beside each other, a line for each error.
    """

    prepare: Callable[[SimpleNamespace], Callable[[Tell], None]]
    axes: Mapping[str, Sequence[Any]]
    settings: Mapping[str, Any]
    tiny: Mapping[str, Any]
    shows: tuple[str, ...]
    metric: str
    compared: str = "base"
    rounds: int = 3
    timeout: int = 240
    environment: Callable[[Case], dict[str, str]] = lambda case: {}
    disagreements: Callable[[Sequence[dict[str, Any]]], list[str]] = lambda rows: []


def benchmarks() -> dict[str, Benchmark]:
    """All benchmarks by name."""
    modules = (importlib.import_module(f"scripts.{name}") for name in MODULES)
    return {name: one for module in modules for name, one in module.BENCHMARKS.items()}


def bandwidth() -> float:
    """Bytes per second that the device at hand reaches: an H200's on a CPU."""
    from pallas_kernels import runtime

    return runtime.device().bandwidth * REACHED


def about() -> dict[str, str]:
    """The date, the device and the versions of the software, which belong to every measurement."""
    import jax

    return {
        "date": datetime.date.today().isoformat(),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
    }


def cases(benchmark: Benchmark, options: Mapping[str, Any], *, tiny: bool = False) -> list[Case]:
    """The cases of a benchmark: all combinations of the values of its axes.

    Args:
        benchmark: The benchmark.
        options: Values by option, instead of its own; those of axes are lists.
        tiny: Whether the others are small enough for a CPU.
    """
    changed = {**(benchmark.tiny if tiny else {}), **options}
    axes = {"env": [""], **benchmark.axes}
    values = [changed.get(name, default) for name, default in axes.items()]
    settings = {name: changed.get(name, value) for name, value in benchmark.settings.items()}
    return [
        dict(zip(axes, chosen, strict=True)) | settings for chosen in itertools.product(*values)
    ]


class Child(Worker):
    """A process with environment variables that measures a case; it is killed if compiling or a round takes too long."""

    def __init__(self, name: str, case: Case, variables: Mapping[str, str], timeout: float):
        self.case, self._timeout = case, timeout
        environment = {**os.environ, **variables}
        paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        command = [sys.executable, "-m", "scripts.bench", name, "--child", json.dumps(case)]
        super().__init__(command, environment)
        self._deadline = time.monotonic() + timeout

    def wait_until_ready(self) -> bool:
        """Waits until the process has compiled all. False if it has ended."""
        return self._answers(lambda: self.listen(self._deadline - time.monotonic()))

    def measure(self) -> dict[str, Any] | None:
        """Lets the process measure a round. Returns its last row; None if there is none."""
        self._answers(lambda: self.ask("", self._timeout))
        return self.at.get("row")

    def _answers(self, answer: Callable[[], Any]) -> bool:
        try:
            answer()
        except Lost as error:
            print(error, flush=True)
            self.kill()
            return False
        return True


def measured(
    name: str, wave: Sequence[Case], benchmark: Benchmark, *, rounds: int, timeout: float
) -> Iterator[tuple[Case, int, dict[str, Any] | None]]:
    """Starts a process for each case, waits until all have compiled, and measures them in turn.

    Yields:
        A case, the number of the round, and what was measured; None if the process has failed or was killed.
    """
    shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if len(wave) > 1 else {}
    children = []
    try:
        for case in wave:
            variables = {**shared, **benchmark.environment(case)}
            variables |= dict(word.split("=", 1) for word in shlex.split(case["env"]))
            children.append(Child(name, case, variables, timeout))
        alive = [child for child in children if child.wait_until_ready()]
        yield from ((child.case, 0, None) for child in children if child not in alive)
        for number in range(1, rounds + 1):
            for child in list(alive):
                yield child.case, number, child.measure()
                if child.has_ended():
                    alive.remove(child)
    finally:
        for child in children:
            child.kill()


def run_child(name: str, case: Case) -> None:
    """Measures a case in this process: a round for each line of the input."""
    answer = answering()
    measure = benchmarks()[name].prepare(SimpleNamespace(**case))
    answer({"ready": name})
    for _ in sys.stdin:
        measure(lambda row: answer({"at": "a round", "row": about() | row}))
        answer({"ok": True})


def run(name: str, benchmark: Benchmark, chosen: Sequence[Case], args: argparse.Namespace) -> bool:
    """Measures the cases of a benchmark and prints the table. Returns whether all were measured, and agree."""
    told = [axis for axis in ("env", *benchmark.axes) if len({str(c[axis]) for c in chosen}) > 1]
    print(f"\n{name}: " + ", ".join(f"{k} {v}" for k, v in chosen[0].items() if k not in told))
    head = [*told, "round", *benchmark.shows]
    print(f"| {' | '.join(head)} |\n|{' --- |' * len(head)}", flush=True)
    values: dict[str, list[float]] = {}
    rows, good = [], True
    how = {"rounds": args.rounds or benchmark.rounds, "timeout": args.timeout or benchmark.timeout}
    for wave in itertools.batched(chosen, args.together):
        for case, number, result in measured(name, wave, benchmark, **how):
            label = [str(case[axis]) for axis in told]
            if result is None:
                good = False
                print(f"| {' | '.join(label)} | failed, or killed after {how['timeout']} s |")
                continue
            row = {"benchmark": name, **case, "round": number, **result}
            rows.append(row)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            cells = [*label, str(number), *(shown(row.get(column)) for column in benchmark.shows)]
            print(f"| {' | '.join(cells)} |", flush=True)
            values.setdefault(json.dumps(case), []).append(row[benchmark.metric])
    medians = {text: statistics.median(numbers) for text, numbers in values.items()}
    wrong = benchmark.disagreements(rows)
    print(*ratios(benchmark, medians, told), *wrong, sep="\n", flush=True)
    return good and not wrong


def ratios(benchmark: Benchmark, medians: Mapping[str, float], told: Sequence[str]) -> list[str]:
    """The median of each case, and its ratio to the same case with the first value of the compared option."""
    lines, first = [], {}
    compared = "env" if "env" in told else benchmark.compared
    for text, median in medians.items():
        case = json.loads(text)
        value = case.pop(compared, None)
        base, baseline = first.setdefault(json.dumps(case), (value, median))
        line = ", ".join(f"{axis} {case.get(axis, value)}" for axis in told) or "median"
        line += f": {benchmark.metric} {shown(median)}"
        if value != base:
            line += f", {median / baseline:.3f} of {base or 'no variable'}"
        lines.append(line)
    return lines


def shown(value: Any) -> str:
    """A cell of the table."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)


def add_options(parser: argparse.ArgumentParser, known: Sequence[Benchmark]) -> None:
    """Adds the options of some benchmarks; those that are not given are absent from the result."""
    options: dict[str, Any] = {"env": [""]}
    for benchmark in known:
        options |= {**benchmark.axes, **benchmark.settings}
    for name, value in options.items():
        more: dict[str, Any] = {"type": type(value)}
        if isinstance(value, list):
            more = {"type": type(value[0]) if value else str, "nargs": "*"}
        elif isinstance(value, bool):
            more = {"action": argparse.BooleanOptionalAction}
        more |= {"default": argparse.SUPPRESS, "help": f"default: {value}"}
        parser.add_argument(f"--{name.replace('_', '-')}", **more)


def listing(known: Mapping[str, Benchmark]) -> str:
    """The benchmarks with what they time, and their options."""
    lines = []
    for name, benchmark in known.items():
        lines.append(f"{name}: {benchmark.prepare.__doc__.strip().splitlines()[0]}")
        for option, value in {**benchmark.axes, **benchmark.settings}.items():
            words = " ".join(map(str, value)) if isinstance(value, list) else value
            lines.append(f"    --{option.replace('_', '-')} {words}".rstrip())
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the named benchmarks one after the other. Returns 1 if something was not measured."""
    known = benchmarks()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--together", type=int, default=1, help="processes that compile at a time")
    parser.add_argument("--rounds", type=int, help="measurements of each case")
    parser.add_argument("--timeout", type=float, help="seconds for compiling, and for each round")
    parser.add_argument("--out", type=pathlib.Path, help="append each row to this JSONL file")
    parser.add_argument("--tiny", action="store_true", help="so small that a CPU takes seconds")
    parser.add_argument("--list", action="store_true", help="only print benchmarks and options")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    common = {action.dest for action in parser._actions}
    words = list(sys.argv[1:] if argv is None else argv)
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    chosen = [name for name in known if name in names or "all" in names]
    add_options(parser, [known[name] for name in chosen or known])
    args = parser.parse_args(words[len(names) :])
    if args.list:
        print(listing({name: known[name] for name in chosen or known}))
        return 0
    if not chosen or set(names) - {*known, "all"}:
        parser.error(f"NAME: got {' '.join(names)!r}; must be all, or some of {', '.join(known)}")
    if args.child:
        run_child(chosen[0], json.loads(args.child))
        return 0
    if args.out:
        args.out.open("a").close()  # Fail now, not after minutes of measuring.
    options = {name: value for name, value in vars(args).items() if name not in common}
    good = True
    for name in chosen:
        benchmark = known[name]
        its = {"env", *benchmark.axes, *benchmark.settings}
        mine = {option: value for option, value in options.items() if option in its}
        good &= run(name, benchmark, cases(benchmark, mine, tiny=args.tiny), args)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
