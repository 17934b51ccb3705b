"""Kills and damages a short run at random moments, and compares what it comes to with a run that no one disturbs.

    python -m scripts.trial_faults --faults 100 --seed 0

A fault is a signal (SIGKILL, SIGTERM, SIGINT) at a random moment, or a kill after which a random bit of the newest
checkpoint is flipped, or one of its files cut short, where there is a checkpoint before it. Then the run is started
again. At its end metrics, completions and the adapter's bytes must be those of the undisturbed run. The script
prints a table, and ends with 1 where anything differed, was shown as a traceback, or was lost beyond the last save.
"""

import argparse
import collections
import pathlib
import random
import sys
import tempfile

from qerl_jax import config
from tests.faults import harness

_CODES = {"SIGTERM": 143, "SIGINT": 130}


def wrong(fault: harness.Fault) -> str | None:
    """What is wrong with how a run took a fault; None where nothing is."""
    if fault.code not in (0, _CODES.get(fault.kind, -9)):
        return f"exit code {fault.code}"
    if "Traceback" in fault.shown or "terminate" in fault.shown:
        return "more than a line was shown"
    if fault.kind in _CODES and fault.code and fault.saved != fault.logged:
        return f"step {fault.logged} was logged and {fault.saved} saved"
    is_damaged = fault.kind in ("flip", "truncate")
    return (
        "a whole checkpoint was not read" if fault.kept != fault.saved and not is_damaged else None
    )


def main() -> int:
    """Makes the trial; 0 where all held."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-steps", type=int, default=4)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as place:
        folders = [pathlib.Path(place) / name for name in ("whole", "disturbed")]
        # Each start does a few steps before its fault comes, and does some of them again.
        steps = {"max_steps": 6 * options.faults, "save_steps": options.save_steps}
        paths = []
        for folder in folders:
            paths.append(folder.with_suffix(".toml"))
            paths[-1].write_text(config.dump(harness.tiny(folder, **steps)))
        if (ended := harness.qerl("train", paths[0])).returncode:
            raise RuntimeError(f"the undisturbed run failed: {ended.stderr}")
        done, found = collections.Counter(), []
        for fault in harness.disturb(paths[1], folders[1], rng, options.faults):
            done[fault.kind] += 1
            if what := wrong(fault):
                found.append(f"{fault.kind} at step {fault.logged}: {what}")
            print(
                f"{fault.kind:9} logged {fault.logged:4} saved {fault.saved:4} kept {fault.kept:4}"
            )
        if (ended := harness.qerl("train", paths[1])).returncode:
            raise RuntimeError(f"the run could not be finished: {ended.stderr}")
        same = harness.results(folders[0]) == harness.results(folders[1])
    print(", ".join(f"{count} {kind}" for kind, count in done.items()))
    print(*found, sep="\n")
    print("results identical" if same else "RESULTS DIFFER")
    return int(bool(found) or not same)


if __name__ == "__main__":
    sys.exit(main())
