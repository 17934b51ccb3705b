"""Measures the stages of a case of `scripts.check_device`, and what JAX compiled in each."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_TRACED = "/jax/core/compile/jaxpr_trace_duration"
_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILED = (
    "/jax/core/compile/backend_compile_duration"  # also for a program that is read from the cache
)
_READ = "/jax/compilation_cache/cache_hits"
_SHOWN = 3  # how many of the slowest programs are listed
_LOGGED_SECONDS = 0.5


@dataclasses.dataclass
class Stage:
    """Measurements of one stage of a case. Seconds are wall time unless stated otherwise.

    Attributes:
        name: Name of the stage, such as "train".
        seconds: Its duration.
        cpu: Processor seconds of this process and of its children that have ended.
        programs: Programs that were compiled.
        cached: Programs that were read from the cache.
        large: Programs whose compilation took more than a tenth of a second.
        trace: Seconds of tracing Python functions; nested ones count twice.
        lower: Seconds of lowering traced programs, in which Pallas kernels are made.
        compile: Seconds of compiling programs or reading them from the cache.
        longest: Seconds of lowering and compiling by program name.
    """

    name: str
    seconds: float = 0.0
    cpu: float = 0.0
    programs: int = 0
    cached: int = 0
    large: int = 0
    trace: float = 0.0
    lower: float = 0.0
    compile: float = 0.0
    longest: dict[str, float] = dataclasses.field(default_factory=dict)

    def row(self) -> dict[str, Any]:
        """The stage as JSON, rounded, with only its slowest programs."""
        table = dataclasses.asdict(self)
        longest = sorted(self.longest.items(), key=lambda item: -item[1])[:_SHOWN]
        table["longest"] = {name: round(seconds, 1) for name, seconds in longest if seconds > 0.1}
        return {k: round(v, 1) if isinstance(v, float) else v for k, v in table.items()}


class Stages:
    """The stages of a case in order. A JAX listener adds its measurements to the current one.

    Args:
        on_begin: Called at the start of a stage with the rows of the earlier stages and the new stage's name.
    """

    def __init__(self, on_begin: Callable[[list[dict[str, Any]], str], None] | None = None):
        self._on_begin = on_begin
        self._stages: list[Stage] = []
        _listen()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A context manager for one stage. The stage is kept even if it raises."""
        global _now
        if self._on_begin is not None:
            self._on_begin(self.rows(), name)
        stage = Stage(name)
        self._stages.append(stage)
        _now, started, cpu = stage, time.monotonic(), _cpu_seconds()
        try:
            yield
        finally:
            _now = None
            stage.seconds = time.monotonic() - started
            stage.cpu = _cpu_seconds() - cpu

    def rows(self) -> list[dict[str, Any]]:
        """The rows of the stages that have ended."""
        return [stage.row() for stage in self._stages]


def total(rows: list[dict[str, Any]], name: str) -> float:
    """The sum of one measurement over all stages."""
    return sum(row[name] for row in rows)


def _cpu_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


_now: Stage | None = None
_is_listening = False


def _listen() -> None:
    """Registers the JAX listeners, once per process, because they cannot be removed."""
    global _is_listening
    if _is_listening:
        return
    import jax

    jax.monitoring.register_event_duration_secs_listener(_on_duration)
    jax.monitoring.register_event_listener(_on_event)
    _is_listening = True


def _on_duration(event: str, seconds: float, **labels: Any) -> None:
    stage = _now
    if stage is None:
        return
    if event == _TRACED:
        stage.trace += seconds
        return
    if event not in (_LOWERED, _COMPILED):
        return
    name = str(labels.get("fun_name", "?"))
    stage.longest[name] = stage.longest.get(name, 0.0) + seconds
    if event == _LOWERED:
        stage.lower += seconds
        return
    stage.compile += seconds
    stage.programs += 1
    stage.large += seconds > 0.1
    if seconds > _LOGGED_SECONDS:
        sys.stderr.write(f"compiled {name}: {seconds:.1f} s\n")


def _on_event(event: str, **_: Any) -> None:
    if _now is not None and event == _READ:
        # Its duration event also counts it as a program.
        _now.cached += 1
        _now.programs -= 1
