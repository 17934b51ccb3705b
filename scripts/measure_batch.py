"""Runs the measurements that belong together, one after the other: `python -m scripts.measure_batch NAME --out FOLDER`.

A card that is lent for minutes should not wait for somebody to type. Each command has a time limit of its own, the next
one starts whatever became of the last, and all that they print goes to a file each. What they measure is written to
FOLDER; it is copied to docs/ by hand, after it has been looked at.

    python -m scripts.measure_batch checks --out measured                # every path, and the tests for a GPU
    python -m scripts.measure_batch sanitizer --out measured             # the kernels' tests, each access checked
    python -m scripts.measure_batch table --out measured                 # decoding, for docs/benchmarks.md
    python -m scripts.measure_batch h100 --out measured                  # tunes an H100, and times it before and after
    python -m scripts.measure_batch portable --out measured
    python -m scripts.measure_batch paper --out measured                 # the paper's tables of speed
    python -m scripts.measure_batch drafts --out measured --smollm2 FOLDER    # of scripts.make_smollm2
    python -m scripts.measure_batch gates --out measured --only 2 3           # some of its commands
    python -m scripts.measure_batch drafts --list
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

from pallas_kernels.nvfp4_matmul import config
from pallas_kernels.portable import tuning

# Seconds that a command has for ending after its time limit.
_GRACE = 15
_SEVEN = "--rows 7b-update --tokenizer qerl_jax/assets/tiny"
# Worked answers of up to 512 tokens by a small policy: text in which drafts find something.
_WORKED = (
    "--data.dataset gsm8k {gsm8k} --data.name None --data.num-problems 128 --data.max-prompt-length 320 "
    "--rollout.max-completion-length 512 --optim.per-device-train-batch-size 32 --rollout.temperature 0.6 "
    '--data.system-prompt "Solve the problem step by step. End with the final number."'
)


@dataclasses.dataclass(frozen=True)
class Command:
    """One measurement.

    Attributes:
        seconds: Its time limit.
        line: What is run, as arguments of `python -m`. {out} is the folder of results, {smollm2} that of the model,
            and {gsm8k} names a copy of GSM8K, if there is one.
        environment: Variables that are set for it.
    """

    seconds: int
    line: str
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The variables as a shell takes them."""
        return " ".join(f"{name}={value}" for name, value in self.environment.items())


_TESTS = "pytest -q -p no:cacheprovider -m gpu"
_ON_RUN = "--model {smollm2} --adapter {out}/worked --limit 512 --out {out}/drafts.jsonl"


def _of_kernels(kernels: str) -> list[Command]:
    """Products of few and of many rows, rollouts and an update of 7B by some kernels."""
    name = f"--kernels {kernels} --out {{out}}"
    many = [Command(280, "scripts.bench_wide --m 2048 8192 --out {out}/many_hopper.json")]
    if kernels != "hopper":
        many = [
            Command(120, f"scripts.bench_kernels {name}/many_{kernels}.json --m 2048 8192"),
            Command(120, f"scripts.bench_kernels {name}/dx_{kernels}.json --m 2048 8192 --dx"),
        ]
    return [
        Command(170, f"scripts.bench_kernels {name}/few_{kernels}.json --m 1 8 16 32 64 --no-bf16"),
        *many,
        Command(
            110,
            f"scripts.bench_rollouts {name}/rollouts_{kernels}.jsonl --model 7b --arms nvfp4 --batch 8 64 "
            "--together 2",
        ),
        Command(75, f"scripts.bench_step {name}/update_{kernels}.json {_SEVEN}"),
    ]


def _decoding(seconds: int, options: str, name: str = "rollouts") -> Command:
    """Decoding by some bases."""
    return Command(seconds, f"scripts.bench_rollouts {options} --out {{out}}/{name}.jsonl")


BATCHES = {
    # Of the portable kernels first, then the same of the others: give the same card all that is compared.
    "portable": [
        Command(
            250,
            "scripts.tune_kernels --kernels portable --models qwen2.5-7b --m 16 32 64 --again --seconds 235",
        ),
        *_of_kernels("portable"),
        *(
            Command(
                170,
                f"scripts.bench_kernels --kernels portable --out {{out}}/{name}_portable.json "
                f"--m 2048 8192 --rank 32 {option}",
            )
            for name, option in (("many_lora", ""), ("dx_lora", "--dx"))
        ),
        Command(
            300,
            "scripts.bench_kernels --values --kernels portable --m 1 8 16 33 64 128 2048",
        ),
        Command(
            150,
            "scripts.bench_rollouts --model 7b --arms nf4 mxfp4 --batch 8 64 --together 4 --out {out}/rollouts.jsonl",
        ),
        *_of_kernels("hopper"),
        *_of_kernels("reference"),
        Command(
            590,
            "scripts.check_device --seconds 585 --out {out}/checked_portable.jsonl",
            {"PALLAS_KERNELS": "portable"},
        ),
    ],
    "drafts": [
        Command(
            260,
            "qerl_jax train configs/smollm2_arithmetic.toml --model.model-name-or-path {smollm2} --eval None "
            f"{_WORKED} --max-steps 24 --save-steps 6 --output-dir {{out}}/worked",
        ),
        *(
            Command(
                250,
                f"scripts.bench_drafts {_ON_RUN} --rows {rows} --arms off auto --hasty --repeats 3",
            )
            for rows in (8, 16, 32, 64)
        ),
        Command(
            80,
            "scripts.bench_drafts --prices {smollm2} --rows 16 --limit 320 --repeats 3 --hasty "
            "--out {out}/prices.jsonl",
        ),
        Command(80, f"scripts.bench_drafts {_ON_RUN} --rows 1 --groups 1 --arms off auto --hasty"),
        Command(
            60,
            "scripts.bench_drafts --prices {smollm2} --rows 16 --arms off 64 --limit 320 --repeats 3 --hasty",
            {"PALLAS_PAIRED_GATES": "0"},
        ),
        Command(
            80,
            "scripts.bench_drafts --prices {smollm2} --rows 32 --arms off 0 64 --limit 320 --repeats 3 --hasty "
            "--out {out}/prices.jsonl",
        ),
        Command(
            130,
            "scripts.bench_drafts --prices 7b --rows 8 --limit 320 --repeats 2 --hasty --out {out}/prices.jsonl",
        ),
        Command(
            110,
            "scripts.bench_drafts --prices {smollm2} --rows 16 --limit 320 --profile --arms off 64",
        ),
    ],
    "checks": [
        Command(
            590, "scripts.check_device --seconds 585 --out {out}/checked.jsonl --keep {out}/kept"
        ),
        Command(330, f"{_TESTS} -n 10"),
    ],
    "sanitizer": [
        Command(290, "scripts.sanitize_kernels --every 3 --seconds 280 --out {out}/sanitized.jsonl")
    ],
    "table": [
        _decoding(150, "--model 7b --arms nvfp4 --batch 1 8 32 64 128 256 --together 3"),
        _decoding(120, "--model 14b --arms nvfp4 --batch 1 8 32 64 --together 4"),
        _decoding(200, "--model 32b --arms nvfp4 --batch 1 8 32 64 128 --together 3"),
        Command(90, "scripts.bench_layer --arms nvfp4 --m 8 64 128"),
        Command(
            150,
            "scripts.bench_step --rows 32b-step-auto --tokenizer qerl_jax/assets/tiny --out {out}/step.json",
        ),
    ],
    "h100": [
        *(
            command
            for model, rows, ms in (("7b", "8 64 128", "16 64 128"), ("32b", "32 64", "32 64"))
            for command in (
                _decoding(
                    130, f"--model {model} --arms nvfp4 --batch {rows} --together 3", "before"
                ),
                Command(
                    290,
                    f"scripts.tune_kernels --models qwen2.5-{model} --layers qkv o down --m {ms} --seconds 275",
                ),
                _decoding(
                    130, f"--model {model} --arms nvfp4 --batch {rows} --together 3", "after"
                ),
            )
        ),
        Command(
            200,
            "scripts.bench_step --rows 72b-step --tokenizer qerl_jax/assets/tiny --out {out}/step.json",
        ),
        _decoding(
            200,
            "--model 72b --arms nvfp4 nvfp4-unpaired --rank 16 --batch 4 --profile",
            "rollouts_72b",
        ),
        Command(
            150,
            "scripts.bench_step --rows 32b-step-auto 7b-update --tokenizer qerl_jax/assets/tiny --out {out}/steps.json",
        ),
    ],
    # What the paper's tables 3 and 5 to 9 have, for docs/paper-tables.md. The bases of a command fit 80 GB together.
    "paper": [
        _decoding(170, "--model 3b 7b --arms nvfp4 bfloat16 --batch 1 8 --together 8"),
        _decoding(150, "--model 14b --arms nvfp4 bfloat16 --batch 1 8 --together 2"),
        _decoding(110, "--model 32b --arms nvfp4 --batch 1 8 --together 2"),
        _decoding(200, "--model 3b 7b 14b 32b --arms nvfp4 --rank 16 64 --batch 1 --together 4"),
        _decoding(200, "--model 3b 7b 14b --arms bfloat16 --rank 16 64 --batch 1 --together 2"),
        _decoding(130, "--model 7b 14b --arms nf4 --rank 16 64 --batch 1 --together 4"),
        _decoding(200, "--model 32b --arms bfloat16 --rank 16 32 64 --batch 1"),
        *(
            Command(
                seconds,
                f"scripts.bench_step --rows {rows} --tokenizer qerl_jax/assets/tiny --out {{out}}/step.json",
            )
            for seconds, rows in (
                (360, "7b-16 7b-16-bf16 7b-64 7b-64-bf16"),
                (360, "3b-16 3b-16-bf16 3b-64 3b-64-bf16"),
                (200, "7b-16-nf4 7b-64-nf4"),
                (360, "14b-16 14b-16-bf16 14b-16-nf4"),
                (360, "14b-64 14b-64-bf16 14b-64-nf4"),
            )
        ),
    ],
    "gates": [
        Command(75, f"scripts.bench_step {_SEVEN} --out {{out}}/update.json"),
        Command(
            75,
            f"scripts.bench_step {_SEVEN} --out {{out}}/update_unpaired.json",
            {"PALLAS_PAIRED_GATES": "0"},
        ),
        Command(
            150,
            "scripts.bench_rollouts --model 7b --arms nvfp4 nvfp4-unpaired --batch 128 64 --out {out}/rollouts.jsonl",
        ),
    ],
}


def run(command: Command, out: pathlib.Path, number: int, places: dict[str, str]) -> bool:
    """Runs a command within its time, and says what it printed last. Returns whether it ended well.

    Args:
        command: The command.
        out: Folder of results; what the command prints goes to `NUMBER.log` in it.
        number: Its number in the batch, from 1.
        places: What {out}, {smollm2} and {gsm8k} stand for.
    """
    line = shlex.split(command.line.format(**places))
    words = filter(None, [f"{number}.", command.shown, shlex.join(line)])
    print("\n" + " ".join(words), flush=True)
    begin, log = time.perf_counter(), out / f"{number}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *line],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | command.environment,
            start_new_session=True,
        )
        try:
            status = str(process.wait(command.seconds))
        except subprocess.TimeoutExpired:
            # A training run saves its adapter on Ctrl-C.
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = f"ended after {command.seconds} s"
        except KeyboardInterrupt:  # it is in a session of its own, and would go on
            os.killpg(process.pid, signal.SIGKILL)
            raise
    print("".join(log.read_text(errors="replace").splitlines(keepends=True)[-25:]))
    print(f"status {status}, {time.perf_counter() - begin:.0f} s", flush=True)
    return status == "0"


def main(argv: list[str] | None = None) -> int:
    """Runs a batch. Returns the number of commands that did not end well, at most 100."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=BATCHES)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("measured"))
    parser.add_argument("--smollm2", default="smollm2", help="a folder of scripts.make_smollm2")
    parser.add_argument("--gsm8k", help="a copy of GSM8K on disk; default: the hub's")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of commands; default: all")
    parser.add_argument("--list", action="store_true", help="only print the commands")
    args = parser.parse_args(argv)
    gsm8k = "" if args.gsm8k is None else f"--data.path {args.gsm8k}"
    places = {"out": str(args.out), "smollm2": args.smollm2, "gsm8k": gsm8k}
    chosen = [
        (number, command)
        for number, command in enumerate(BATCHES[args.name], 1)
        if args.only is None or number in args.only
    ]
    if args.list:
        for number, command in chosen:
            words = filter(None, [command.shown, command.line.format(**places)])
            print(f"{number}. {command.seconds:3} s  {' '.join(words)}")
        print(f"{sum(command.seconds for _, command in chosen)} s at most")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    failed = sum(not run(command, args.out, number, places) for number, command in chosen)
    if tables := {"portable": tuning.TABLES, "h100": config.TABLES}.get(args.name):
        shutil.copytree(tables, args.out / "tuned", dirs_exist_ok=True)
    print(f"\n{failed} of {len(chosen)} did not end well")
    return min(failed, 100)


if __name__ == "__main__":
    sys.exit(main())
