"""Records what runs when in a rollout and its updates, and draws it as spans of time.

`watch` records while `scripts.bench_recipe` trains: chunks of sampling with their live rows, prefills, the host's work
on tokens, micro-batches of the update, and how busy the GPU is according to its driver. The recording can be drawn
later and elsewhere:

    python -m scripts.recipe_timeline TIMELINE.json docs/assets/recipe_step.svg
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

LANES = {"sample": "#3b6fb6", "host": "#9aa5b1", "update": "#c2633a"}
_POLL = 0.05  # seconds


@dataclasses.dataclass
class Timeline:
    """Spans of time, in seconds since the start.

    Attributes:
        spans: Lane, start, end and amount: live rows of a chunk, or tokens of a micro-batch.
        busy: Times, and the share of the moment before in which the GPU ran a kernel; empty if no driver reports it.
        marks: Times at which a rollout with its updates ended.
    """

    spans: list[tuple[str, float, float, int]] = dataclasses.field(default_factory=list)
    busy: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    marks: list[float] = dataclasses.field(default_factory=list)
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def idle(self, start: float, end: float) -> float | None:
        """The share of a span of time in which the GPU ran no kernel."""
        within = [share for at, share in self.busy if start <= at <= end]
        return 1 - sum(within) / len(within) if within else None

    def last(self) -> dict[str, Any]:
        """The last rollout with its updates, from its own start, as JSON."""
        start, end = [0.0, *self.marks][-2:]
        spans = [
            (lane, round(a - start, 4), round(b - start, 4), amount)
            for lane, a, b, amount in self.spans
            if start <= a and b <= end
        ]
        busy = [(round(at - start, 3), share) for at, share in self.busy if start <= at <= end]
        return {"seconds": round(end - start, 3), "spans": spans, "busy": busy}


@contextlib.contextmanager
def watch() -> Iterator[Timeline]:
    """Records what engine and update do inside a `with` block."""
    import jax

    from qerl_jax.generation import engine
    from qerl_jax.rl import update

    line = Timeline()
    method = "run" if hasattr(engine.Engine, "run") else "_run"  # an older library's
    run, accumulate = getattr(engine.Engine, method), update.accumulate

    def timed_run(self, *arguments, **more):
        chunks = run(self, *arguments, **more)
        while True:
            begun = line.now()
            brought = next(chunks, None)
            if brought is None:
                return
            line.spans.append(("sample", begun, line.now(), len(brought)))
            begun = line.now()
            yield brought
            line.spans.append(("host", begun, line.now(), len(brought)))

    def timed_accumulate(objective, sums, params, frozen, noise, batch, *rest):
        begun = line.now()
        made = jax.block_until_ready(
            accumulate(objective, sums, params, frozen, noise, batch, *rest)
        )
        tokens = (
            int(batch.mask.size) if hasattr(batch, "mask") else 0
        )  # an older library's has none
        line.spans.append(("update", begun, line.now(), tokens))
        return made

    with (
        mock.patch.object(engine.Engine, method, timed_run),
        mock.patch.object(update, "accumulate", timed_accumulate),
        _driver(line),
    ):
        yield line


@contextlib.contextmanager
def _driver(line: Timeline) -> Iterator[None]:
    """Samples how busy the GPU is, if its driver reports it."""
    try:
        import pynvml

        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        yield
        return
    over = threading.Event()

    def sample():
        while not over.wait(_POLL):
            line.busy.append((line.now(), pynvml.nvmlDeviceGetUtilizationRates(card).gpu / 100))

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join()


def draw(found: dict[str, Any], path: pathlib.Path) -> None:
    """Draws the result of `Timeline.last`: live rows above, then lanes, then how busy the GPU was."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    rows, lanes, busy = figure.subplots(3, 1, sharex=True, height_ratios=[3, 2, 1])
    for lane, start, end, amount in found["spans"]:
        lanes.broken_barh(
            [(start, end - start)], (list(LANES).index(lane) - 0.4, 0.8), color=LANES[lane]
        )
        if lane == "sample":
            rows.fill_between([start, end], amount, color=LANES[lane], linewidth=0)
    rows.set_ylabel("live rows")
    lanes.set_yticks(range(len(LANES)), LANES)
    lanes.invert_yaxis()
    if found["busy"]:
        busy.plot(*zip(*found["busy"], strict=True), color="#444444", linewidth=0.8)
    busy.set_ylabel("GPU busy")
    busy.set_ylim(0, 1.05)
    busy.set_xlabel("seconds")
    busy.set_xlim(0, found["seconds"])
    figure.savefig(path)


def main() -> None:
    """Draws a recorded step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recorded", type=pathlib.Path, help="file from `bench_recipe --timeline`")
    parser.add_argument("picture", type=pathlib.Path, help="an .svg or .png file")
    args = parser.parse_args()
    draw(json.loads(args.recorded.read_text()), args.picture)


if __name__ == "__main__":
    main()
