"""Kills and damages a short run at random moments, and compares its result with that of an undisturbed run.

    python -m tests.faults.trial --faults 100 --seed 0
    python -m tests.faults.trial --faults 6 --deterministic     # a GPU needs this for equal bits

`harness.disturb` makes the faults, and a full disk is one if a small file system can be mounted. The exit status is 1 if
metrics, completions or the adapter's bytes differ, a traceback was shown, or more was lost than since the last save.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

from qerl_jax import config
from tests.faults import harness

_CODES = {"SIGTERM": 143, "SIGINT": 130, harness.FULL: 2}
_DISK = "48m"
# Most seconds for one start, on a machine that may be busy.
_SECONDS = 3600
# Set if the script runs in its own namespaces.
_MOUNTS = "TRIAL_FAULTS_MOUNTS"


def wrong(fault: harness.Fault) -> str | None:
    """What is wrong with how a run handled a fault; None if nothing is."""
    if fault.code not in (0, _CODES.get(fault.kind, -9)):
        return f"exit code {fault.code}"
    if "Traceback" in fault.shown or "terminate" in fault.shown:
        return "more than one line was shown"
    is_full = fault.kind == harness.FULL
    if is_full and fault.code and "could not be written: No space left" not in fault.shown:
        return f"the message names no file that could not be written: {fault.shown[:200]!r}"
    if fault.kind in _CODES and not is_full and fault.code and fault.saved != fault.logged:
        return f"step {fault.logged} was logged and {fault.saved} saved"
    if fault.kept != fault.saved and fault.kind not in ("flip", "truncate"):
        return "a complete checkpoint was not read"
    return None


def differences(ours: pathlib.Path, theirs: pathlib.Path) -> str | None:
    """From which step on two runs differ, and how much their metrics differ; None if they are the same."""
    mine, other_results = map(harness.results, (ours, theirs))
    if mine == other_results:
        return None
    their_rows = other_results[0]
    for row, other in zip(mine[0], their_rows, strict=False):
        if row == other:
            continue
        apart = {
            name: abs(row[name] - other[name]) / max(abs(other[name]), 1e-6)
            for name in row.keys() & other.keys()
            if isinstance(row[name], float) and row[name] != other[name]
        }
        name = max(apart, key=apart.get, default=None)
        most = f", most in {name}: {row[name]} and {other[name]}" if name else ""
        return f"from step {row['step']} of {len(their_rows)} on{most}"
    return "in completions or the adapter only; all metrics are equal"


@contextlib.contextmanager
def _small_disk(place: pathlib.Path) -> Iterator[None]:
    """Mounts a small file system in memory."""
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "none", str(place)]
    subprocess.run(command, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(place)], check=False)


def main() -> int:
    """Runs the trial. Returns 0 if there was nothing wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-steps", type=int, default=4)
    parser.add_argument("--deterministic", action="store_true", help="set `deterministic = true`")
    options = parser.parse_args()
    rng, started = random.Random(options.seed), time.monotonic()
    kinds = harness.FAULTS
    with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
        # Every start compiles the same programs.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{place}/programs")
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        if _MOUNTS in os.environ:
            kinds += (harness.FULL,)
            stack.enter_context(_small_disk(pathlib.Path(place) / "disk"))
        folders = [pathlib.Path(place) / name for name in ("whole", "disk/disturbed")]
        # Each start makes a few steps before its fault, and repeats some of them.
        steps = {"max_steps": 5 * options.faults, "save_steps": options.save_steps}
        steps["deterministic"] = options.deterministic
        paths = [pathlib.Path(place) / f"{folder.name}.toml" for folder in folders]
        for folder, path in zip(folders, paths, strict=True):
            folder.parent.mkdir(exist_ok=True)
            path.write_text(config.dump(harness.tiny(folder, **steps)))
        if (ended := harness.qerl("train", paths[0], timeout=None)).returncode:
            raise RuntimeError(f"the undisturbed run failed: {ended.stderr}")
        done, found = collections.Counter(), []
        for fault in harness.disturb(paths[1], folders[1], rng, options.faults, kinds, _SECONDS):
            done[fault.kind] += 1
            if what := wrong(fault):
                found.append(f"{fault.kind} at step {fault.logged}: {what}")
            numbers = f"logged {fault.logged:4} saved {fault.saved:4} kept {fault.kept:4}"
            print(f"{fault.kind:9} {numbers} code {fault.code:4}", flush=True)
        if (ended := harness.qerl("train", paths[1], timeout=None)).returncode:
            raise RuntimeError(f"the run could not be finished: {ended.stderr}")
        apart = differences(folders[1], folders[0])
    print(", ".join(f"{count} {kind}" for kind, count in done.items()))
    print(f"{sum(done.values())} faults in {time.monotonic() - started:.0f} s")
    print(*found, sep="\n")
    print(f"RESULTS DIFFER {apart}" if apart else "results identical")
    return int(bool(found) or apart is not None)


if __name__ == "__main__":
    if _MOUNTS not in os.environ and harness.has_mounts():
        # Start again in new namespaces, where mounting may be allowed.
        again = ["unshare", "-rm", sys.executable, "-m", "tests.faults.trial", *sys.argv[1:]]
        os.execvpe(again[0], again, os.environ | {_MOUNTS: "1"})
    sys.exit(main())
