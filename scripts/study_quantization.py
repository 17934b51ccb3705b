"""Measures the cost of four bits for a real model: `python -m scripts.study_quantization FOLDER DATA --out FILE.jsonl`.

FOLDER is SmolLM2-135M-Instruct from `scripts.make_smollm2`, or another 16-bit model. DATA is a file of GSM8K's training
rows (.parquet or .jsonl with question and answer).

The package that holds SmolLM2 stores it in 4 bits (Q4_1), with 16 values for 32 neighbours. This favours formats with
16 values. So all layers are first trained in 16 bits on some rows, with a fixed seed, which moves the weights off that
grid. Both bases are studied, "packaged" and "trained". Each is quantized in every format with every method, calibrated
on several draws of rows, and compared with itself in 16 bits:

    gsm8k   on held-out rows of the data, as chats: KL(16 bit || 4 bit) and perplexity of the answers
    own     on answers that the 16-bit model samples to held-out questions: KL and entropy of the policy

A line of the file is one model on one set, with 95 % intervals from resampled rows. Results that are in the file are
not computed again. `--table FILE.jsonl` prints the table for the docs. `--errors FILE.json` keeps the error of every
linear beside that of round-to-nearest.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pallas_kernels import runtime
from qerl_jax.checkpoint import hf_folder
from qerl_jax.data import datasets, tokenizer
from qerl_jax.generation.generator import Generator
from qerl_jax.quantization.calibration import Calibration
from qerl_jax.quantization.quantizer import Recipe, quantize
from qerl_jax.system import files
from scripts.measure_quantization import Sums, hidden_states, load, sums
from scripts.warm_up import Rows, fit, joined

METHODS = {
    "nearest": ("rtn", "maximum"),
    "nearest, searched": ("rtn", "search"),
    "awq": ("awq", "search"),
    "gptq": ("gptq", "search"),
    "awq+gptq": ("awq+gptq", "search"),
}
_RESAMPLED = 2000


def main() -> None:
    """Runs the study, or prints its table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", help="folder of a 16-bit model")
    parser.add_argument("data", nargs="?", help="file of rows with question and answer")
    parser.add_argument("--out", type=pathlib.Path, help="write the lines to this file")
    parser.add_argument(
        "--errors",
        type=pathlib.Path,
        help="write the errors of all linears, for draw 0, to this file",
    )
    parser.add_argument(
        "--table", type=pathlib.Path, metavar="JSONL", help="only print the table of this file"
    )
    parser.add_argument("--bases", nargs="+", default=["packaged", "trained"])
    parser.add_argument("--formats", nargs="+", default=["nvfp4", "mxfp4", "nf4"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument(
        "--draws", type=int, default=5, help="number of random draws of the calibration rows"
    )
    parser.add_argument("--samples", type=int, default=256, help="number of calibration rows")
    parser.add_argument(
        "--held-out", type=int, default=256, help="number of rows for the comparison"
    )
    parser.add_argument("--length", type=int, default=512, help="tokens per row")
    parser.add_argument(
        "--answer-tokens", type=int, default=256, help="limit of tokens of a sampled answer"
    )
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--batch", type=int, default=32, help="rows per step")
    parser.add_argument("--rate", type=float, default=1e-4, help="highest learning rate")
    parser.add_argument("--work", type=pathlib.Path, help="keep the trained base in this folder")
    args = parser.parse_args()
    if args.table:
        print(table([json.loads(line) for line in args.table.read_text().splitlines()]))
        return
    if not (args.folder and args.data and args.out):
        parser.error("FOLDER, DATA and --out are needed")
    runtime.use_compilation_cache()
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        pool, held_out = split(args.data, args.held_out, work)
        for base in args.bases:
            folder = pathlib.Path(args.folder)
            if base == "trained":
                folder = work / "trained"
                if not folder.is_dir():
                    train(args.folder, folder, pool, args)
            study(base, folder, pool, held_out, args)


def split(
    data: str, held_out: int, work: pathlib.Path
) -> tuple[pathlib.Path, list[dict[str, str]]]:
    """Sets rows aside for the comparison. The others go to a file, for calibration and training."""
    found = datasets.load_rows(data, None, None, "train")
    order = np.random.default_rng(0).permutation(len(found)).tolist()
    rows = [{name: found[i][name] for name in ("question", "answer")} for i in order]
    pool = work / "pool.jsonl"
    pool.write_text("".join(json.dumps(row) + "\n" for row in rows[held_out:]))
    return pool, rows[:held_out]


def train(source: str, target: pathlib.Path, pool: pathlib.Path, args) -> None:
    """Trains all layers of a base in 16 bits on rows of the pool, and writes the result as a model folder."""
    tokens = tokenizer.load(hf_folder.local_folder(source, weights=False))
    chosen = [json.loads(line) for line in pool.read_text().splitlines()]
    rows = of_chats(tokens, chosen[-args.steps * args.batch :], args.length)
    fit(source, target, rows, steps=args.steps, batch=args.batch, rate=args.rate)


def of_chats(tokens: tokenizer.Tokenizer, rows: list[dict[str, str]], length: int) -> Rows:
    """Questions and answers as chats. The tokens of answers count."""
    questions = tokens.encode([({"role": "user", "content": row["question"]},) for row in rows])
    answers = tokens.encode([row["answer"] for row in rows])
    return joined(questions, answers, tokens.pad_token, length)


def study(base: str, folder: pathlib.Path, pool: pathlib.Path, held_out, args) -> None:
    """Adds the lines of one base to the file."""
    began = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    done = (
        [json.loads(line) for line in args.out.read_text().splitlines()]
        if args.out.is_file()
        else []
    )
    is_done = {(line["base"], line["format"], line["method"], line["draw"]) for line in done}
    reference = load(str(folder), "float32")
    tokens = reference[2]
    own = own_answers(str(folder), tokens, held_out, args, pool.with_name(f"own_{base}.json"))
    sets = alike({"gsm8k": of_chats(tokens, held_out, args.length), "own": own})
    states = {name: hidden_states(reference, rows.ids) for name, rows in sets.items()}
    compare = lambda other, name: sums(
        reference, other, sets[name].ids, sets[name].live, states[name]
    )
    itself = {name: compare(reference, name) for name in sets}
    print(f"{base}: answers and the 16-bit model in {time.monotonic() - began:.0f} s", flush=True)

    def add(what: dict[str, Any], found: dict[str, Sums], more: dict[str, Any]) -> None:
        for name in sets:
            line = what | {"set": name} | measured(found[name], itself[name]) | more
            with args.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)

    device = {"device": runtime.device_kind(), "jax": jax.__version__}
    if (base, "bfloat16", "", 0) not in is_done:
        add({"base": base, "format": "bfloat16", "method": "", "draw": 0}, itself, device)
    for form, method, draw in runs(args):
        if (base, form, method, draw) in is_done:
            continue
        name, scales = METHODS[method]
        rows = Calibration(str(pool), args.samples, args.length, seed=draw)
        with tempfile.TemporaryDirectory() as place:
            target = pathlib.Path(place) / "packed"
            recipe = Recipe(form, name, scales, calibration=rows)
            report = quantize(
                str(folder), target, recipe, lambda line: None, with_sensitivity=False
            )
            # Unpacked to float32, so that one program computes all models.
            other = load(str(target), "float32")
        start = time.monotonic()
        found = {name: compare(other, name) for name in sets}
        seconds = report["seconds"], time.monotonic() - start
        print(
            f"{form} {method} {draw}: quantized in %.1f s, compared in %.1f s" % seconds, flush=True
        )
        if args.errors and draw == 0:
            keep_errors(args.errors, f"{base}, {form}, {method}", report)
        what = {"base": base, "format": form, "method": method, "draw": draw}
        add(what, found, {"bytes": report["bytes"], "seconds": report["seconds"]} | device)


def runs(args) -> Iterator[tuple[str, str, int]]:
    """Format, method and draw of each quantized model. Methods without calibration have one draw.

    All methods come before the next draw, so that an unfinished study compares them too.
    """
    for draw in range(args.draws):
        for form in args.formats:
            for method in args.methods:
                if draw == 0 or METHODS[method][0] != "rtn":
                    yield form, method, draw


def alike(sets: dict[str, Rows]) -> dict[str, Rows]:
    """Pads the rows of all sets to one width, so that one program computes them."""
    width = max(rows.ids.shape[1] for rows in sets.values())
    wide = lambda x: np.pad(x, ((0, 0), (0, width - x.shape[1])))
    return {name: Rows(wide(rows.ids), wide(rows.live)) for name, rows in sets.items()}


def own_answers(
    folder: str,
    tokens: tokenizer.Tokenizer,
    rows: list[dict[str, str]],
    args: argparse.Namespace,
    kept: pathlib.Path,
) -> Rows:
    """Answers that the 16-bit model samples to the held-out questions at temperature 1. The file `kept` stores them."""
    if not kept.is_file():
        dtype = "bfloat16" if runtime.platform() == "gpu" else "float32"
        generator = Generator.load(folder, weights="bfloat16", dtype=dtype)
        limits = {"temperature": 1.0, "max_tokens": args.answer_tokens, "seed": 0}
        found = generator.completions([row["question"] for row in rows], **limits)
        files.write_whole(kept, json.dumps([each.tokens.tolist() for each in found]))
    answers = json.loads(kept.read_text())
    prompts = tokens.encode([({"role": "user", "content": row["question"]},) for row in rows])
    return joined(prompts, answers, tokens.pad_token, args.length + args.answer_tokens)


def measured(found: Sums, itself: Sums) -> dict[str, Any]:
    """Compares a model with the 16-bit one: means per token, with intervals from resampled rows."""
    picked = np.random.default_rng(0).integers(
        len(found.tokens), size=(_RESAMPLED, len(found.tokens))
    )
    tokens = found.tokens[picked].sum(axis=1)

    def interval(values: np.ndarray, of: Callable[[np.ndarray], np.ndarray] = np.asarray) -> list:
        means = of(values[picked].sum(axis=1) / tokens)
        low, high = np.quantile(means, [0.025, 0.975])
        return [float(of(values.sum() / found.tokens.sum())), float(low), float(high)]

    return {
        "rows": len(found.tokens),
        "tokens": int(found.tokens.sum()),
        "kl": interval(found.kl),
        "perplexity": interval(found.nll, np.exp),
        "entropy": interval(found.entropy),
        "entropy_change": interval(found.entropy - itself.entropy),
    }


def keep_errors(path: pathlib.Path, name: str, report: dict[str, Any]) -> None:
    """Adds the errors of all linears to a JSON file: of their outputs with calibration, otherwise of their weights."""
    kept = json.loads(path.read_text()) if path.is_file() else {}
    of = "outputs" if "outputs" in report["layers"][0] else "weights"
    short = lambda x: (
        [float(f"{each:.5g}") for each in x] if isinstance(x, list | tuple) else float(f"{x:.5g}")
    )
    kept[name] = {
        linear: [short(layer[of][linear]) for layer in report["layers"]]
        for linear in report["layers"][0][of]
    }
    lines = [f"{json.dumps(name)}: {json.dumps(errors)}" for name, errors in kept.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def table(lines: list[dict[str, Any]]) -> str:
    """The Markdown table of docs/quantization.md: means over the draws, their range, and intervals over rows."""
    head = "base, format, method | KL, GSM8K | draws | perplexity | entropy | KL, own answers | draws | entropy"
    rows = [f"| {head} |", "|" + " --- |" * 8]
    groups: dict[tuple, dict[str, list]] = {}
    for line in lines:
        key = line["base"], line["format"], line["method"]
        groups.setdefault(key, {}).setdefault(line["set"], []).append(line)
    for key, sets in groups.items():
        mean = lambda name, field, sets=sets: np.mean([each[field] for each in sets[name]], axis=0)
        perplexity = f"{mean('gsm8k', 'perplexity')[0]:.2f}"
        if key[1] == "bfloat16":
            entropies = [f"{mean(name, 'entropy')[0]:.2f}" for name in ("gsm8k", "own")]
            cells = ["0", "", perplexity, entropies[0], "0", "", entropies[1]]
        else:
            change = f"{mean('gsm8k', 'entropy_change')[0]:+.3f}"
            own = _interval(mean("own", "entropy_change"), "+.3f")
            cells = [*_kl(sets["gsm8k"]), perplexity, change, *_kl(sets["own"]), own]
        rows.append("| " + " | ".join([", ".join(filter(None, key)), *cells]) + " |")
    return "\n".join(rows)


def _kl(draws: list[dict[str, Any]]) -> tuple[str, str]:
    """The mean with its interval over rows, and the range over draws, which is empty for one draw."""
    found = np.array([line["kl"] for line in draws])
    means = found[:, 0]
    of_draws = f"{means.min():.4f} to {means.max():.4f}" if len(draws) > 1 else ""
    return _interval(found.mean(axis=0), ".4f"), of_draws


def _interval(values: np.ndarray, form: str) -> str:
    mean, low, high = (format(value, form) for value in values)
    return f"{mean} ({low} to {high})"


if __name__ == "__main__":
    main()
