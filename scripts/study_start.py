"""Measures what 4 bits and AQN change before learning: `python -m scripts.study_start BASE --out FILE.jsonl`.

BASE is from `scripts/warm_up.py`. The 16-bit policy answers held-out problems at temperature 1. Every other policy of
the study is compared with it on these same texts, so that different samples add no noise:

    KL(16 bit || other) and entropy per token, in nats, and the change of the entropy

The others are the base in each format, rounded as in the arms; the result of GPTQ with `--gptq FOLDER` (the study
leaves it in its work folder); and the 16-bit base with AQN of several sigmas. A line of the file is one policy, with 95
% intervals from resampled rows. Policies that the file has for this base are not measured again. Run it on a CPU
(JAX_PLATFORMS=cpu), where it takes some minutes: the kernels of a GPU compute with packed weights in 16 bits.
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from pallas_kernels import runtime
from qerl_jax.aqn import schedule as aqn
from qerl_jax.checkpoint import base_model
from qerl_jax.config import ModelConfig
from qerl_jax.data import arithmetic
from qerl_jax.generation.generator import Generator
from qerl_jax.model.transformer import noise_shapes
from qerl_jax.system.files import whole_lines
from scripts.measure_quantization import hidden_states, sums
from scripts.study_quantization import measured
from scripts.warm_up import MAX_TOKENS, Rows, asked, joined, sha256


def main() -> None:
    """Writes the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", help="folder of the 16-bit base")
    parser.add_argument("--gptq", help="folder of the base that GPTQ quantized")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--problems", type=int, default=256)
    parser.add_argument("--sigmas", nargs="+", type=float, default=[1e-3, 3e-3, 1e-2])
    parser.add_argument(
        "--draws", type=int, default=3, help="number of random draws of the noise, for each sigma"
    )
    args = parser.parse_args()
    reference = load(args.base, "bfloat16")
    rows = own_answers(args.base, reference[2], args.problems)
    compare = functools.partial(sums, reference, ids=rows.ids, live=rows.live)
    states = hidden_states(reference, rows.ids)
    itself = compare(reference, states=states)
    about = {"base": sha256(pathlib.Path(args.base)), "device": runtime.device_kind()}
    done = {line["policy"] for line in whole_lines(args.out) if line["base"] == about["base"]}
    for name, make in policies(args, reference):
        if name not in done:
            other = make()
            found = itself if other is reference else compare(other, states=states)
            short = lambda each: (
                [float(f"{x:.5g}") for x in each] if isinstance(each, list) else each
            )
            values = {field: short(each) for field, each in measured(found, itself).items()}
            line = json.dumps({"policy": name} | values | about)
            print(line, flush=True)
            with args.out.open("a") as file:
                file.write(line + "\n")


def load(folder: str, weights: str) -> tuple:
    """Loads a model as an arm does, computed in float32: model, base and tokenizer."""
    cfg = ModelConfig(folder, weights=weights, dtype="float32", block_scales="maximum")
    return base_model.load_base(cfg, None)


def own_answers(folder: str, tokens: Any, count: int) -> Rows:
    """Answers of the 16-bit policy to held-out problems, each sampled once."""
    generator = Generator.load(folder, weights="bfloat16", dtype="float32", max_concurrent=128)
    problems = [arithmetic.mixed("test", 0, index) for index in range(count)]
    chats = [asked(problem.question) for problem in problems]
    found = generator.completions(chats, temperature=1.0, max_tokens=MAX_TOKENS, seed=0)
    answers = [each.tokens.tolist() for each in found]
    return joined(tokens.encode(chats), answers, tokens.pad_token)


def policies(
    args: argparse.Namespace, reference: tuple
) -> Iterator[tuple[str, Callable[[], tuple]]]:
    """All policies: names, and functions that make them. The first is the 16-bit one itself."""
    yield "BF16", lambda: reference
    for weights in ("nf4", "mxfp4", "nvfp4"):
        yield weights.upper(), functools.partial(load, args.base, weights)
    if args.gptq:
        yield "NVFP4, GPTQ", functools.partial(load, args.gptq, "nvfp4")
    for sigma in args.sigmas:
        for draw in range(args.draws):
            yield (
                f"BF16, sigma {sigma:g}, draw {draw}",
                functools.partial(noisy, reference, sigma, draw),
            )


def noisy(reference: tuple, sigma: float, draw: int) -> tuple:
    """The 16-bit policy with one draw of AQN."""
    model, base, tokens = reference
    key = aqn.step_key(jax.random.key(draw), 0)
    noise = aqn.norm_noise(key, sigma, noise_shapes(model.arch))
    return model, added(base, noise), tokens


def added(base: dict[str, Any], noise: dict[str, Any]) -> dict[str, Any]:
    """A base whose norms include the noise, as in a rollout with AQN."""
    made = dict(base)
    for name, value in noise.items():
        own = base[name]
        made[name] = added(own, value) if isinstance(value, dict) else own.astype("float32") + value
    return made


if __name__ == "__main__":
    main()
