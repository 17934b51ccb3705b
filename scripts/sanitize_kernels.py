"""Runs the kernels' GPU tests under NVIDIA's compute-sanitizer: `python -m scripts.sanitize_kernels`.

memcheck finds accesses beyond an array, racecheck threads of a block that read and write the same shared memory without
waiting for each other. Each test runs in a process of its own, under each tool, several at a time; a test that hangs or
breaks the tool costs only itself. It prints a row for each, and writes them to --out as JSON lines. A test counts as
clean if it passed, the tool said that it has looked, and found nothing. Exit status 1 if a test is not clean or was not
run.

racecheck looks at our kernels only, and the products that tests use as an oracle are left to XLA's Triton. It reports
hazards in cuBLAS's kernels, because it does not know all ways in which a kernel may wait for a copy; and where it is told
to leave those out, it ends with an "Internal Sanitizer Error".

    python -m scripts.sanitize_kernels --every 4               # every fourth test of each file
    python -m scripts.sanitize_kernels --tools racecheck --only 180-208 --seconds 120
    python -m scripts.sanitize_kernels --cards 2 --jobs 28
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from scripts.check_device import QUICK_XLA, ROOT, card

# Tests of every kernel of a decoding step and of an update.
_NAMES = "nvfp4_decode finished_linear_decode decode_tiles gated decode_attention nvfp4_prefill finished_linear_prefill"
FILES = tuple(f"tests/pallas_kernels/test_{name}.py" for name in _NAMES.split())
TOOLS = ("memcheck", "racecheck")
# Further options of a tool. The names of our kernels end so; "kns" is a part of a kernel's name.
_OPTIONS = {"racecheck": ("--kernel-name", "kns=mosaic_gpu_kernel")}
# XLA's flags for each tool: products by cuBLAS, or none by cuBLAS.
_BY_TRITON = ("--xla_gpu_triton_gemm_any=true", "--xla_gpu_cublas_fallback=false")
_XLA = {
    "memcheck": QUICK_XLA,
    "racecheck": (*(flag for flag in QUICK_XLA if "triton_gemm" not in flag), *_BY_TRITON),
}
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu")
# The tool's last line: "ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)".
_SUMMARY = re.compile(r"=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)")
_BROKEN = re.compile(r"Internal Sanitizer Error: .*")

type Row = dict[str, Any]


def collected(files: Sequence[str], only: str, every: int) -> list[str]:
    """The ids of the tests for a GPU in these files whose id has a text, every n-th of each file."""
    command = [*_PYTEST, "--collect-only", *files]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    chosen = []
    for file in files:
        of_file = [line for line in listed.splitlines() if line.startswith(f"{file}::")]
        chosen += [test for test in of_file if only in test][::every]
    return chosen


def verdict(status: int | None, text: str) -> str:
    """What the exit status and the output of a run say: "clean", or what is wrong. Without a status it was ended."""
    if status is None:
        return "ended: no time left"
    if broken := _BROKEN.search(text):
        return f"the tool failed: {broken[0]}"
    results = [int(number) for number in _SUMMARY.findall(text)]
    if any(results):
        return f"{sum(results)} found"
    if not re.search(r"\b1 passed\b", text):
        return f"the test did not pass: status {status}"
    return "clean" if results else f"the tool has no summary: status {status}"


def run(tool: str, test: str, number: int, args: argparse.Namespace, deadline: float) -> Row:
    """Runs a test under a tool. Returns its row; `number` determines its card."""
    local = {
        # Arrays are allocated one by one: memcheck finds no access beyond an array within a larger allocation.
        "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_FLAGS": " ".join(_XLA[tool]),
        "CUDA_VISIBLE_DEVICES": card(number, args.cards),
    }
    command = [args.program, "--tool", tool, *_OPTIONS.get(tool, ()), "--error-exitcode", "9"]
    command += [*_PYTEST, test]
    begin = time.monotonic()
    status, text = None, ""
    if (left := deadline - begin) > 0:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        how = pipes | {"cwd": ROOT, "env": os.environ | local, "start_new_session": True}
        process = subprocess.Popen(command, **how)
        try:
            text, _ = process.communicate(timeout=min(left, args.test_seconds))
            status = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # the tool and the test
            text, _ = process.communicate()
        text = text.decode(errors="replace")
    row = {"tool": tool, "test": test, "found": verdict(status, text)}
    row["seconds"] = round(time.monotonic() - begin, 1)
    if row["found"] != "clean":
        reported = (line for line in text.splitlines() if line.startswith("========= "))
        row |= {"report": "\n".join(reported)[:4000], "text": text[-2000:]}
    return row


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the tests and prints the table. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tools", nargs="+", default=TOOLS, choices=TOOLS)
    parser.add_argument("--files", nargs="+", default=FILES, help="files of tests")
    parser.add_argument("--only", default="", help="only tests whose id has this text")
    parser.add_argument("--every", type=int, default=1, help="every n-th test of each file")
    parser.add_argument("--jobs", type=int, default=14, help="number of processes")
    parser.add_argument("--cards", type=int, default=1, help="cards among which they are divided")
    parser.add_argument("--seconds", type=float, default=280, help="time limit")
    parser.add_argument("--test-seconds", type=float, default=120, help="time limit of a test")
    parser.add_argument("--program", default="compute-sanitizer", help="path of the tool")
    parser.add_argument("--out", type=pathlib.Path, help="write a JSON line for each to this file")
    args = parser.parse_args(argv)
    if shutil.which(args.program) is None:
        parser.error(f"--program {args.program}: no such program; it is part of the CUDA toolkit")
    deadline = time.monotonic() + args.seconds
    tests = collected(args.files, args.only, args.every)
    todo = [(tool, test) for test in tests for tool in args.tools]
    rows = []
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run, *item, number, args, deadline) for number, item in enumerate(todo)]
        for done in concurrent.futures.as_completed(runs):
            row = done.result()
            rows.append(row)
            text = f"{row['tool']:9} {row['seconds']:6.1f} s  {row['found']}  {row['test']}"
            print(text, flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    for tool in args.tools:
        clean = sum(row["tool"] == tool and row["found"] == "clean" for row in rows)
        print(f"{tool}: {clean} of {len(tests)} tests are clean")
    return int(not rows or any(row["found"] != "clean" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
