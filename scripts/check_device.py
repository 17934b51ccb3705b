"""Runs every path that the README names on the device that JAX finds: `python -m scripts.check_device`.

Small random bases, a committed list of cases (check_device_cases.py), several processes that share the
device. A case trains for two or three rollouts and does what else it names; check_device_run.py says
what must hold of it. A case that did not come to its end is as red as one that found something wrong.

    python -m scripts.check_device --out checked.jsonl       # all; exit status 1 if one is red
    python -m scripts.check_device --only weights=nf4 --only rows=33 --jobs 2
    python -m scripts.check_device --write-cases             # after a change of the factors

Most of the time goes into compilation. Variables such as XLA_FLAGS reach the processes as they are.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scripts import check_device_cases as cases
from scripts.check_device_cases import Case

ROOT = pathlib.Path(__file__).parents[1]
WORKER = (sys.executable, "-m", "scripts.check_device", "--worker")
# Of a device's memory; the rest is for what XLA does not count, such as contexts and libraries.
_SHARED = 0.8

type Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the cases and prints the table; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", action="append", default=[], help="a part of the name, such as rows=33; all given"
    )
    parser.add_argument("--out", type=pathlib.Path, help="a .jsonl file, one line a case")
    parser.add_argument("--jobs", type=int, default=12, help="processes that share the device")
    parser.add_argument("--seconds", type=float, default=480, help="after which all is killed")
    parser.add_argument("--case-seconds", type=float, default=180, help="after which a case is")
    parser.add_argument("--keep", type=pathlib.Path, help="a folder for what cases leave, and logs")
    parser.add_argument("--list", action="store_true", help="print the names of cases only")
    parser.add_argument("--write-cases", action="store_true", help="write the list anew")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return work(args.worker)
    if args.write_cases:
        cases.FILE.write_text(cases.text(cases.cover()))
        return 0
    chosen = select_cases(cases.read(), args.only)
    if args.list or not chosen:
        print(*map(cases.name, chosen), sep="\n")
        return 0 if chosen else 2
    with tempfile.TemporaryDirectory(prefix="check_device_") as made:
        folder = args.keep or pathlib.Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        table = Table(args.out, len(chosen))
        run(
            chosen,
            [*WORKER, str(folder)],
            environment(folder, min(args.jobs, len(chosen))),
            folder,
            jobs=min(args.jobs, len(chosen)),
            seconds=args.seconds,
            case_seconds=args.case_seconds,
            on_ready=table.header,
            on_row=table.row,
        )
        return table.end()


def select_cases(found: Sequence[Case], parts: Sequence[str]) -> list[Case]:
    """The cases whose full name has all of these parts, longest first."""
    names = [f"{cases.name(case, full=True)} " for case in found]
    chosen = [
        case for case, name in zip(found, names, strict=True) if all(p in name for p in parts)
    ]
    return sorted(chosen, key=cases.cost, reverse=True)


def environment(folder: pathlib.Path, jobs: int) -> dict[str, str]:
    """Variables of the workers: a share of the device each, and one place for compiled programs."""
    given = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "xla"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{_SHARED / jobs:.3f}",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }
    return {**os.environ, **given}


def run(
    chosen: Sequence[Case],
    command: Sequence[str],
    env: Mapping[str, str],
    folder: pathlib.Path,
    *,
    jobs: int,
    seconds: float,
    case_seconds: float,
    on_ready: Callable[[str], None],
    on_row: Callable[[Row], None],
) -> None:
    """Gives out cases, in order, to processes that are started anew where they end.

    A process says a line when it is ready, then reads a case a line and answers each with a line.

    Args:
        chosen: Each is answered by exactly one call of `on_row`.
        command: Of a process.
        env: Its variables.
        folder: For the processes' logs.
        jobs: How many processes at a time.
        seconds: After which those that run are killed and no other case starts.
        case_seconds: After which a case's process is killed, its start aside.
        on_ready: Called with the first process's line.
        on_row: Called with each row; never twice at a time.
    """
    waiting, lock, deadline = list(chosen), threading.Lock(), time.monotonic() + seconds
    workers: list[Worker] = []
    heard = False

    def ready(line: str) -> None:
        nonlocal heard
        with lock:
            if not heard:
                on_ready(json.loads(line)["ready"])
            heard = True

    def serve(number: int) -> None:
        worker, log = None, folder / f"worker_{number}.log"
        while True:
            with lock:
                if not waiting:
                    break
                case = waiting.pop(0)
            started = time.monotonic()
            try:
                left = deadline - started
                if left <= 0:
                    raise Lost(f"not started within the {seconds:.0f} s of all")
                if worker is None:
                    worker = Worker(command, env, log)
                    workers.append(worker)
                    ready(worker.listen(deadline - time.monotonic()))
                started = time.monotonic()
                row = json.loads(
                    worker.ask(json.dumps(case), min(case_seconds, deadline - started))
                )
            except Exception as error:  # also an answer that is no JSON: whatever it was, it is red
                what = str(error) if isinstance(error, Lost) else f"{type(error).__name__}: {error}"
                row = {"ok": False, "error": what}
                if worker is not None:
                    worker.kill()
                    worker = None
                    row["log"] = log.read_text(errors="replace")[-4000:]
            row = {"seconds": round(time.monotonic() - started, 1)} | row
            with lock:
                on_row({"number": case["number"], "name": cases.name(case)} | row | {"case": case})

    threads = [
        threading.Thread(target=serve, args=(number,), daemon=True) for number in range(jobs)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:  # also when a user interrupts
        for worker in workers:
            worker.kill()


class Lost(Exception):
    """A process that gave no answer."""


class Worker:
    """A process that answers lines, with all processes that it starts."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: pathlib.Path):
        with log.open("a") as file:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
            )

    def ask(self, line: str, seconds: float) -> str:
        """The answer to a line.

        Raises:
            Lost: When the process ends, or there is none in time.
        """
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Lost(self._ending()) from None
        return self.listen(seconds)

    def listen(self, seconds: float) -> str:
        """The next line that it says, as `ask`."""
        stream = self._process.stdout
        readable, _, _ = select.select([stream], [], [], max(0.0, seconds))
        if not readable:
            raise Lost(f"killed: no answer in {seconds:.0f} s")
        line = stream.readline()
        if not line:
            raise Lost(self._ending())
        return line

    def kill(self) -> None:
        """Ends it and its children, once."""
        if self._process.returncode is not None and self._process.stdin.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # a line that it did not read
            self._process.stdin.close()
        self._process.stdout.close()

    def _ending(self) -> str:
        try:
            status = self._process.wait(10)
        except subprocess.TimeoutExpired:
            return "the process closed its output"
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return f"the process ended with {how}"


class Table:
    """What is shown and written: a header, a line for each case, the sums."""

    def __init__(self, out: pathlib.Path | None, total: int):
        self._file = None if out is None else out.open("w")
        self._rows: list[Row] = []
        self._total, self._started = total, time.monotonic()

    def header(self, environment_: str) -> None:
        """Versions and devices, and when."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
        print(f"{self._total} cases, {now}\n{environment_.strip()}\n", flush=True)

    def row(self, row: Row) -> None:
        """A case."""
        self._rows.append(row)
        print(line(row), flush=True)
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def end(self) -> int:
        """The sums; the exit status."""
        if self._file is not None:
            self._file.close()
        red = sorted((row for row in self._rows if not row["ok"]), key=lambda row: row["number"])
        if red:
            print("\nfailed:", *map(line, red), sep="\n")
        fused = sum(bool(row.get("fused")) for row in self._rows)
        print(f"\n{time.monotonic() - self._started:.0f} s; fused decoding in {fused} cases")
        print(f"{len(self._rows) - len(red)} passed, {len(red)} failed", flush=True)
        return int(bool(red) or len(self._rows) < self._total)


def line(row: Row) -> str:
    """A case in the table: verdict, seconds, sampler against trainer, effect of training, name, error."""

    def number(name: str) -> str:
        return f"{row[name]:8.1e}" if name in row else f"{'-':>8}"

    start = f"{'ok  ' if row['ok'] else 'FAIL'} {row['seconds']:6.1f} s"
    error = "" if row["ok"] else f"\n     {row['error']}"
    return f"{start} {number('difference')} {number('effect')}  {row['name']}{error}"


# A worker -------------------------------------------------------------------------------------------


def work(folder: pathlib.Path) -> int:
    """Runs the cases that come in, a line each, and answers each with a line."""
    # The package prints; answers go where nobody else writes.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from scripts import check_device_run

    def answer(row: Row) -> None:
        answers.write(json.dumps(row) + "\n")
        answers.flush()

    answer({"ready": check_device_run.qerl("env")})
    for text in sys.stdin:
        answer(run_case(json.loads(text), folder, check_device_run.run))
    return 0


def run_case(
    case: Case, folder: pathlib.Path, do: Callable[[Case, pathlib.Path], Mapping[str, Any]]
) -> Row:
    """The row of a case: what it found, or what it failed with."""
    import gc

    own = folder / f"case_{case['number']:03d}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    sys.stderr.write(f"\n=== {cases.name(case)}\n")
    started = time.monotonic()
    try:
        row = {"ok": True, **do(case, own)}
    except BaseException as error:
        sys.stderr.write(traceback.format_exc())
        if isinstance(error, KeyboardInterrupt):
            raise
        told = str(error).strip().split("\n")[0][:300]
        row = {
            "ok": False,
            "error": f"{type(error).__name__}: {told}",
            "traceback": traceback.format_exc()[-4000:],
        }
    gc.collect()  # what the next case finds in use is its own
    return {"seconds": round(time.monotonic() - started, 1), **row}


if __name__ == "__main__":
    raise SystemExit(main())
