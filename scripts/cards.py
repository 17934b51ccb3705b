"""Runs processes on the cards of a machine, several at a time, until a time is over: what the studies share."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from scripts import check_device


@dataclasses.dataclass(frozen=True)
class Job:
    """A process to run.

    Attributes:
        name: Names it, and the file of its output.
        command: A module and its arguments.
        memory: Share of the card's memory, unless the environment says another.
        environment: Further environment variables.
    """

    name: str
    command: Sequence[Any]
    memory: float = 0.8
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Queue:
    """Jobs on cards.

    Attributes:
        work: Folder of their outputs.
        cards: Number of cards. With several, a job sees only the one that it runs on.
        jobs: Number of jobs at a time.
        seconds: Time until `run` ends.
        patience: Seconds that a job may take to end once it is told to.
        tries: How often a job is begun that ends with an error.
        running: By name: the process, when it began, and its card.
        failed: Names of jobs that ended with an error each time.
        errors: How often each job ended with an error, by name.
        took: Seconds of each job that ended well, by name.
    """

    work: pathlib.Path
    cards: int
    jobs: int
    seconds: float
    patience: float = 10
    tries: int = 1
    running: dict[str, tuple[subprocess.Popen, float, int]] = dataclasses.field(
        default_factory=dict
    )
    failed: set[str] = dataclasses.field(default_factory=set)
    errors: dict[str, int] = dataclasses.field(default_factory=dict)
    took: dict[str, float] = dataclasses.field(default_factory=dict)
    began: float = dataclasses.field(default_factory=time.monotonic)

    def elapsed(self) -> float:
        """Seconds since the queue was made."""
        return time.monotonic() - self.began

    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - self.elapsed()

    def run(self, choose: Callable[[Queue], Job | None]) -> bool:
        """Runs jobs until none can begin and all have ended, or the time is over, when those in progress are ended.

        Args:
            choose: Gives the next job; None if none can begin now. It is asked whenever a job could begin.

        Returns:
            Whether all jobs that began have ended by themselves.
        """
        try:
            while True:
                while len(self.running) < self.jobs and self.left() > 0 and (job := choose(self)):
                    used = [card for *_, card in self.running.values()]
                    card = min(range(self.cards), key=used.count)
                    self.running[job.name] = self.launch(job, card), time.monotonic(), card
                if not self.running:
                    return True
                if self.left() <= 0:
                    print(f"the time is over; in progress: {', '.join(self.running)}", flush=True)
                    return False
                time.sleep(0.2)
                self._collect()
        finally:
            for process, *_ in self.running.values():
                process.terminate()
            for process, *_ in self.running.values():
                end(process, self.patience)
            self.running.clear()

    def _collect(self) -> None:
        """Takes the jobs that have ended out of `running`."""
        for name, (process, start, _) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            if process.returncode:
                self.errors[name] = self.errors.get(name, 0) + 1
                self.failed |= {name} if self.errors[name] >= self.tries else set()
                print(f"{name} FAILED: {last_line(self.work, name)}", flush=True)
            else:
                self.took[name] = time.monotonic() - start
                print(f"{name} {self.took[name]:.0f} s, {self.left():.0f} s left", flush=True)

    def launch(self, job: Job, card: int = 0) -> subprocess.Popen:
        """Starts a job on a card."""
        local = {"CUDA_VISIBLE_DEVICES": check_device.card(card, self.cards)}
        memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{job.memory:.3f}"}
        variables = memory | dict(os.environ) | job.environment | (local if self.cards > 1 else {})
        self.work.mkdir(parents=True, exist_ok=True)
        with (self.work / f"{job.name}.log").open("w") as log:
            how = {"stdout": log, "stderr": subprocess.STDOUT, "env": variables}
            return subprocess.Popen([sys.executable, "-m", *map(str, job.command)], **how)


def end(process: subprocess.Popen, patience: float = 10) -> None:
    """Ends a process that this script has started: asks it to end, and kills it after some seconds."""
    process.terminate()
    try:
        process.wait(patience)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_line(work: pathlib.Path, name: str) -> str:
    """The last line of a job's output that names an error, or else its last line."""
    lines = (work / f"{name}.log").read_text(errors="replace").strip().splitlines()
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (errors or lines or ["it printed nothing"])[-1]
