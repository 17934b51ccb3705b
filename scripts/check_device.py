"""Runs every path that the README names on the device that JAX finds: `python -m scripts.check_device`.

It runs a committed list of cases (check_device_cases.py) with small random bases, in several processes that share the
device. A case trains for two or three rollouts and runs the other stages that it names; check_device_run.py has the
assertions. A case that does not finish counts as failed (red), like one that finds an error.

    python -m scripts.check_device --out checked.jsonl       # all; exit status 1 if one is red
    python -m scripts.check_device --smoke                   # a dozen cases
    python -m scripts.check_device --only weights=nf4 --only rows=33 --jobs 2
    python -m scripts.check_device --cards 2                 # the processes share two cards of a kind
    python -m scripts.check_device --smoke --devices 1 2 4   # each on 1, 2 and 4 devices of this machine
    python -m scripts.check_device --smoke --devices 4 --meshes   # each on every mesh of 4: data, fsdp, tensor
    python -m scripts.check_device --write-cases             # after a change of the factors
    PALLAS_KERNELS=portable python -m scripts.check_device   # with the Triton kernels instead of Hopper's

Most of the time is compilation; the rows of --out say how much, by stage, and how many programs. To save time XLA does
not autotune products (`QUICK_XLA`), which would compile each of them in several forms, but leaves them to cuBLAS;
--autotune turns this on. Compiled programs are kept in the folder of --keep for the next call with the same folder.
XLA_FLAGS are passed on to the processes; the flags set here come after them and win.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts import check_device_cases as cases
from scripts.check_device_cases import Case

ROOT = pathlib.Path(__file__).parents[1]
WORKER = (sys.executable, "-m", "scripts.check_device_run")
# These flags make XLA compile fast. It does not compile each product in dozens of tilings to time them, on a device
# that other processes use too. It uses no Triton products, which took half of the compile time of a gradient. And a
# process compiles on one processor.
QUICK_XLA = (
    "--xla_gpu_autotune_level=0",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_experimental_enable_fusion_autotuner=false",
    "--xla_gpu_force_compilation_parallelism=1",
)
# Share of a device's memory. The rest is for what XLA does not count, such as contexts and libraries.
_SHARED = 0.8

type Row = dict[str, Any]


def missing_packages() -> list[str]:
    """Packages that the project needs and that are not installed, except the hub's `datasets`, which no case uses."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.match(r"[\w-]+", line)[0] for line in project["dependencies"]]
    form = lambda name: name.lower().replace("_", "-")
    installed = {"datasets", *(form(item.name) for item in importlib.metadata.distributions())}
    return [name for name in names if form(name) not in installed]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases and prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    paths, numbers = {"type": pathlib.Path}, {"type": int, "nargs": "+"}
    switch, seconds = {"action": "store_true"}, {"type": float}
    for option, traits, text in (
        ("only", {"action": "append", "default": []}, "only cases whose name has this; repeatable"),
        ("cases", numbers, "only the cases with these numbers, such as those that failed before"),
        ("smoke", switch, "only a dozen cases of the list"),
        ("devices", numbers, "each case on each of these numbers of devices; default: 1"),
        ("meshes", switch, "each case on every mesh of --devices: data, fsdp and tensor"),
        ("out", paths, "write a JSON line for each case to this file"),
        ("jobs", {"type": int}, "processes; default: 14 for each card, if there are cores"),
        ("cards", {"type": int, "default": 1}, "NVIDIA cards; each case runs on one"),
        ("stagger", seconds | {"default": 0.5}, "seconds between the starts of processes"),
        ("seconds", seconds | {"default": 480}, "seconds after which everything is killed"),
        ("budget", seconds, "seconds after which no case starts; default: 50 before --seconds"),
        ("case-seconds", seconds | {"default": 240}, "time limit of a case, in seconds"),
        ("autotune", switch, "let XLA autotune its products"),
        ("keep", paths, "keep logs and the files of cases in this folder"),
        ("list", switch, "only print the names of cases"),
        ("write-cases", switch, "compute the list of cases again and write it"),
    ):
        parser.add_argument(f"--{option}", help=text, **traits)
    args = parser.parse_args(argv)
    if args.write_cases:
        cases.FILE.write_text(cases.text(cases.cover()))
        return 0
    listed = cases.read()
    if args.cases:
        listed = [case for case in listed if case["number"] in args.cases]
    listed = cases.smoke(listed) if args.smoke else listed
    if args.cards < 1 or (args.cards > 1 and args.devices):
        parser.error("--cards: must be at least 1, and 1 with --devices")
    if args.meshes and not args.devices:
        parser.error("--meshes: give the numbers of devices too, as in --devices 2 4")
    if args.devices:
        every = [cases.meshes(count)[: None if args.meshes else 1] for count in args.devices]
        meshes = [mesh for of_count in every for mesh in of_count]
        listed = [c | {"mesh": mesh} for mesh in meshes for c in listed if cases.fits(c, mesh)]
    chosen = select_cases(listed, args.only)
    if args.list or not chosen:
        print(*map(cases.name, chosen), sep="\n")
        return 0 if chosen else 2
    if missing := missing_packages():
        print(f"not installed: {', '.join(missing)}; without these every case would fail")
        return 2
    with tempfile.TemporaryDirectory(prefix="check_device_") as temporary:
        folder = args.keep or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        table = Table(args.out, len(chosen))
        most = max(1, min(14 * args.cards, (os.cpu_count() or 1) - 2))
        jobs = min(args.jobs or most, len(chosen))
        run(
            chosen,
            [*WORKER, str(folder)],
            environment(folder, -(-jobs // args.cards), autotune=args.autotune),
            folder,
            jobs=jobs,
            cards=args.cards,
            seconds=args.seconds,
            budget=args.seconds - 50 if args.budget is None else args.budget,
            case_seconds=args.case_seconds,
            stagger=args.stagger,
            on_ready=table.header,
            on_row=table.row,
        )
        return table.end()


def select_cases(listed: Sequence[Case], parts: Sequence[str]) -> list[Case]:
    """Selects the cases whose full name has all of these parts, the most expensive first."""
    has = lambda case, part: part in f"{cases.name(case, full=True)} "
    chosen = [case for case in listed if all(has(case, part) for part in parts)]
    return sorted(chosen, key=cases.cost, reverse=True)


def card(number: int, cards: int) -> str:
    """The card of one of several processes, of those that CUDA_VISIBLE_DEVICES names, as its value for the process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(cards)]
    if len(names) < cards:
        raise ValueError(f"--cards {cards}: CUDA_VISIBLE_DEVICES names {len(names)}: {visible}")
    return names[number % cards]


def environment(folder: pathlib.Path, jobs: int, *, autotune: bool) -> dict[str, str]:
    """Environment variables of the workers, `jobs` of which share a card: a share of its memory for each, and one
    compilation cache for all.
    """
    flags = [os.environ.get("XLA_FLAGS", ""), *(() if autotune else QUICK_XLA)]
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{_SHARED / jobs:.3f}",
        "XLA_FLAGS": " ".join(filter(None, flags)),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "QERL_TRACE_PROCESSES": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return {**os.environ, **variables, **dict.fromkeys(threads, "1")}


def run(
    chosen: Sequence[Case],
    command: Sequence[str],
    env: Mapping[str, str],
    folder: pathlib.Path,
    *,
    jobs: int,
    cards: int = 1,
    seconds: float,
    budget: float,
    case_seconds: float,
    stagger: float,
    on_ready: Callable[[str], None],
    on_row: Callable[[Row], None],
) -> None:
    """Distributes cases, in order, to worker processes, and restarts workers that end.

    A worker writes a line when it is ready. Then it reads a case per line and answers each with a line. Before the
    answer it may write lines that say which stage it is in ("at").

    Args:
        chosen: The cases.
        command: Command of a worker.
        env: Environment variables of a worker.
        folder: Folder for the workers' logs.
        jobs: Number of workers.
        cards: Number of cards among which they are divided.
        seconds: Running cases are killed after this time.
        budget: No other case starts after this many seconds.
        case_seconds: A worker is killed if a case takes longer than this, without the worker's start.
        stagger: Seconds between the starts of two workers. Later ones find in the cache what the first one compiled.
        on_ready: Called with the first line of the first worker.
        on_row: Called exactly once for each case, never twice at once.
    """
    waiting, lock, begun = list(chosen), threading.Lock(), time.monotonic()
    deadline, last_start = begun + seconds, begun + min(seconds, budget)
    workers: list[Worker] = []
    heard = False

    def ready(answer: Row) -> None:
        nonlocal heard
        with lock:
            if not heard:
                on_ready(answer["ready"])
            heard = True

    def serve(number: int) -> None:
        worker, log = None, folder / f"worker_{number}.log"
        time.sleep(number * stagger)
        while True:
            with lock:
                if not waiting:
                    break
                case = waiting.pop(0)
            started = time.monotonic()
            try:
                if started >= last_start:
                    raise NotRun(f"not run: {started - begun:.0f} s had passed")
                if worker is None:
                    variables = {"CUDA_VISIBLE_DEVICES": card(number, cards)} if cards > 1 else {}
                    worker = Worker(command, {**env, **variables}, log)
                    workers.append(worker)
                    ready(worker.listen(deadline - time.monotonic()))
                started = time.monotonic()
                row = worker.ask(json.dumps(case), min(case_seconds, deadline - started))
            except NotRun as error:
                row = {"ok": False, "not_run": True, "error": str(error)}
            except Exception as error:  # An answer that is not JSON counts as red too.
                what = str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
                row = {"ok": False, "error": what}
                if worker is not None:
                    worker.kill()
                    row |= worker.at
                    worker = None
                    row["log"] = log.read_text(errors="replace")[-20000:]
            row = {"seconds": round(time.monotonic() - started, 1)} | row
            with lock:
                on_row({"number": case["number"], "name": cases.name(case)} | row | {"case": case})

    thread = lambda number: threading.Thread(target=serve, args=(number,), daemon=True)
    threads = list(map(thread, range(jobs)))
    try:
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    finally:  # also on a keyboard interrupt
        for worker in workers:
            worker.kill()


class NotRun(Exception):
    """A case that was not run because the time was over."""


class Lost(Exception):
    """A worker that gave no answer."""


class Worker:
    """A worker process that answers lines, together with the processes that it starts.

    Args:
        command: Its command.
        env: Its environment variables.
        log: The file for its errors, which then also gets the stack of a process that hangs; None for ours.
    """

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], log: pathlib.Path | None = None
    ):
        with log.open("a") if log else contextlib.nullcontext() as file:
            how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": file, "env": env}
            self._process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **how)
        self._log, self._heard = log, b""
        self.at: Row = {}

    def ask(self, line: str, seconds: float) -> Row:
        """Sends a line and returns the answer. `at` is called with each message about the current stage.

        Raises:
            Lost: The process ended, or there was no answer in time.
        """
        self.at = {}
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Lost(self._ending()) from None
        return self.listen(seconds)

    def listen(self, seconds: float) -> Row:
        """Returns the next answer, like `ask`."""
        deadline = time.monotonic() + seconds
        while True:
            line = self._line(deadline)
            where = f" in stage {self.at['at']!r}" if self.at else ""
            if line is None:
                self._dump()
                raise Lost(f"killed{where}: no answer in {seconds:.0f} s")
            if not line:
                raise Lost(f"{self._ending()}{where}")
            answer = json.loads(line)
            if "at" not in answer:
                return answer
            self.at = answer

    def _line(self, deadline: float) -> bytes | None:
        """Returns the next line, b"" if the process has ended, or None if there is none in time."""
        # Not a Python file object: `select` does not see what its buffer holds.
        stream = self._process.stdout.fileno()
        while b"\n" not in self._heard:
            readable, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            read = os.read(stream, 1 << 16)
            if not read:
                return b""
            self._heard += read
        line, _, self._heard = self._heard.partition(b"\n")
        return line

    def _dump(self) -> None:
        """Makes a process that hangs write its stack to its log."""
        if self._log is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills the process and its children, once."""
        if self._process.returncode is not None and self._process.stdin.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # a line that the process did not read
            self._process.stdin.close()
        self._process.stdout.close()

    def _ending(self) -> str:
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "the process closed its output"
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"the process ended with {how}"


def answering() -> Callable[[Row], None]:
    """Prepares the process of a worker. Returns a function that answers with a row.

    What the process prints goes to stderr, because answers have stdout for themselves.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(row: Row) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    return answer


class Table:
    """The output: a header, a line for each case, the totals, and the failures."""

    def __init__(self, out: pathlib.Path | None, total: int):
        self._file = None if out is None else out.open("w")
        self._rows: list[Row] = []
        self._total, self._started = total, time.monotonic()
        self._about: Row = {}

    def header(self, environment_: str) -> None:
        """Writes versions, devices and date."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        waited = time.monotonic() - self._started
        print(f"{self._total} cases, {now}, the first process was ready after {waited:.0f} s")
        print(f"{environment_.strip()}\n\n{_HEAD}", flush=True)
        self._about = {"date": now[:10], **about(environment_)}

    def row(self, row: Row) -> None:
        """Writes the row of a case; in the file also the date, the device and the version of JAX."""
        self._rows.append(row)
        if not row.get("not_run"):
            print(line(row), flush=True)
        if self._file is not None:
            self._file.write(json.dumps(row | self._about) + "\n")
            self._file.flush()

    def end(self) -> int:
        """Writes the totals and each failure with its full name. Returns the exit status."""
        if self._file is not None:
            self._file.close()
        rows = sorted(self._rows, key=lambda row: row["number"])
        passed = [row for row in rows if row["ok"]]
        unrun = [row["number"] for row in rows if row.get("not_run")]
        red = [row for row in rows if not row["ok"] and not row.get("not_run")]
        fused = sum(bool(row.get("fused")) for row in passed)
        print(f"\n{time.monotonic() - self._started:.0f} s; fused decoding in {fused} cases")
        if unrun:
            print("not run:", *(f"{number:03d}" for number in unrun))
        if red:
            print("\nfailed:", *(f"{row['name']}\n     {row['error']}" for row in red), sep="\n")
        print(f"{len(passed)} passed, {len(red)} failed, {len(unrun)} not run", flush=True)
        return int(len(passed) < self._total)


def about(environment_: str) -> Row:
    """The first device, the version of JAX, the driver and the kernels, from what `qerl env` says."""
    patterns = {
        "device": r"(?m)^device 0: (.+?) \(",
        "jax": r"(?m)^jax (\S+)$",
        "driver": r"(?m)^NVIDIA driver (\S+)$",
        "kernels": r"(?m)^kernels: (.+)$",
    }
    results = {name: re.search(pattern, environment_) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in results.items() if match}


_HEAD = "      case  seconds     cpu  programs  cached  longest stage"


def line(row: Row) -> str:
    """Formats a case: verdict, number, wall and processor seconds, programs, longest stage."""
    stages = row.get("stages", [])
    start = f"{'ok  ' if row['ok'] else 'FAIL'}   {row['number']:03d} {row['seconds']:8.1f}"
    if stages:
        longest = max(stages, key=lambda stage: stage["seconds"])
        total = lambda name: sum(stage[name] for stage in stages)
        start += f"{total('cpu'):8.1f}{total('programs'):10d}{total('cached'):8d}"
        start += f"  {longest['name']} {longest['seconds']:.1f} s"
    return start if row["ok"] else f"{start}  {row['error'][:150]}"


if __name__ == "__main__":
    raise SystemExit(main())
