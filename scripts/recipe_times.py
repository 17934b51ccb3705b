"""Estimates the training times of docs/recipes.md from measured rates: `python -m scripts.recipe_times` prints them.

All begin with the measured step of `gsm8k_qwen2.5_7b` on an H200, which has three parts: sampling with few rows,
sampling with many, and updates. Each part takes a model longer by the ratio of two rates that were measured on one kind
of card. What was not measured is interpolated: the time of a layer by its weights.
"""

import dataclasses
import json
import pathlib

import numpy as np

from qerl_jax.model import architecture
from scripts.reproduce import GSM8K_TRAIN

MEASURED = pathlib.Path(__file__).parents[1] / "docs" / "measured"
STEP = "GSM8K, 7B: a rollout of 512 and its 4 updates, 1 % at the limit"
# Seconds of that step's rollout in which at most 8 rows are left (docs/tried-and-rejected.md).
FEW_ROWS = 9.0
# Problems of a rollout.
PROMPTS = 64
_TIMED = ("3b", "7b", "14b", "32b")
# Recipes of models without measured rates, with the model's shape.
_SCALED = {
    "gsm8k_qwen2.5_0.5b": "qwen2.5-0.5b",
    "gsm8k_qwen2.5_1.5b": "qwen2.5-1.5b",
    "gsm8k_qwen3_4b": "qwen3-4b",
    "gsm8k_qwen3_8b": "qwen3-8b",
    "gsm8k_llama3.1_8b": "llama-3.1-8b",
}


@dataclasses.dataclass(frozen=True)
class Step:
    """Seconds of a rollout of 512 completions and its updates.

    Attributes:
        few: Sampling while at most 8 rows are left.
        many: Sampling before that.
        update: The four updates.
        rest: Rewards, and what lies between.
    """

    few: float
    many: float
    update: float
    rest: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.few + self.many + self.update + self.rest

    def times(self, few: float, many: float, update: float) -> "Step":
        """Returns the step of a model whose parts take so many times as long."""
        return Step(self.few * few, self.many * many, self.update * update, self.rest)


def steps() -> dict[str, Step]:
    """Returns the steps of the models with measured rates, by size. Only that of 7B was measured itself."""
    lines = _read("benchmarks.jsonl")
    rates = {
        line["name"]: line["value"]
        for line in lines
        if line["table"] == "decoding" and line["device"] == "NVIDIA H200"
    }
    (whole,) = (line for line in lines if line["name"] == STEP)
    rollout, update = whole["more"]["rollout s"], whole["more"]["update s"]
    rest = whole["value"] - rollout - update
    base = Step(FEW_ROWS, rollout - FEW_ROWS, update, rest)
    rate = lambda rows, size: rates[f"7B, {rows} rows"] / rates[f"{size}, {rows} rows"]
    # On an H200 neither 64 rows of 3B nor updates of 3B and 14B were timed.
    h100 = lambda row, part: _latest(row, "H100")[part] / _latest("7b-64", "H100")[part]
    h200 = lambda row: _latest(row, "H200")["update"] / _latest("7b-group", "H200")["update"]
    # 72B was timed with 4 rows of 1,024 tokens only.
    token = _latest("72b-step", "H200")["rollout"] / 1024 * rates["7B, 8 rows"] / 8
    return {
        "3B": base.times(rate(8, "3B"), h100("3b-64", "rollout"), h100("3b-64", "update")),
        "7B": base,
        "14B": base.times(rate(8, "14B"), rate(64, "14B"), h100("14b-64", "update")),
        "32B": base.times(rate(8, "32B"), rate(64, "32B"), h200("32b-step")),
        "72B": base.times(token, token, h200("72b-step")),
    }


def scaled(model: str, known: dict[str, Step]) -> Step:
    """Returns the step of a model that was not measured: for each part, the number of layers times that of one layer.

    A layer's time is interpolated by its weights. A layer smaller than 3B's is taken to be as slow as 3B's.
    """
    shapes = [architecture.KNOWN[f"qwen2.5-{size}"] for size in _TIMED]
    timed = [dataclasses.astuple(known[size.upper()]) for size in _TIMED]
    arch = architecture.KNOWN[model]
    few, many, update, _ = (
        arch.num_layers
        * np.interp(
            _weights(arch),
            [_weights(shape) for shape in shapes],
            [seconds / shape.num_layers for seconds, shape in zip(part, shapes, strict=True)],
        )
        for part in zip(*timed, strict=True)
    )
    return Step(few, many, update, known["7B"].rest)


def estimates() -> dict[str, str]:
    """Returns the cells of the page's column of times, by recipe. Recipes without an estimate are left out."""
    known = steps()
    of = lambda seconds, rollouts=PROMPTS: shown(seconds * round(GSM8K_TRAIN / rollouts))
    base = known["7B"]
    cells = {
        f"gsm8k_qwen2.5_{size.lower()}": f"{of(step.total)}, estimated"
        for size, step in known.items()
    }
    cells["gsm8k_qwen2.5_7b"] = of(base.total)
    for name, model in _SCALED.items():
        cells[name] = f"{of(scaled(model, known).total)}, scaled"
    for name in ("dr_grpo", "cispo"):
        cells[f"{name}_gsm8k_qwen2.5_7b"] = f"{of(base.total)}, estimated"
    # Log-probabilities before the update: a forward pass, half of its arithmetic.
    cells["gspo_gsm8k_qwen2.5_7b"] = f"{of(base.total + base.update / 2)}, estimated"
    # As many completions, of which between none and all are learned from.
    least, most = of(base.total - base.update), of(base.total)
    cells["dapo_gsm8k_qwen2.5_7b"] = f"{least.split()[0]} to {most}, estimated"
    # Rollouts of a quarter of the completions.
    quarter = base.few + (base.many + base.update + base.rest) / 4
    cells["lora_without_regret_gsm8k_qwen2.5_7b"] = f"{of(quarter, PROMPTS // 4)}, estimated"
    return cells


def parts() -> list[str]:
    """Returns the rows of the page's table of parts."""
    known = steps()
    whole = known | {name: scaled(name, known) for name in _SCALED.values()}
    return [
        f"| {name} | {step.few:.1f} s | {step.many:.1f} s | {step.update:.1f} s | {step.total:.1f} s | "
        f"{shown(step.total * round(GSM8K_TRAIN / PROMPTS))} |"
        for name, step in whole.items()
    ]


def shown(seconds: float) -> str:
    """Formats a time in minutes or hours, with two digits or one."""
    minutes = round(seconds / 60)
    hours = seconds / 3600
    return f"{minutes} min" if minutes < 60 else f"{hours:.{0 if hours >= 3 else 1}f} h"


def _weights(arch: architecture.Architecture) -> int:
    """Returns the weights of a layer's linears."""
    return sum(map(arch.linear_size, arch.linears()))


def _latest(row: str, card: str) -> dict:
    """Returns the last timed step of a row of `scripts/bench_step.py` on such a card."""
    return [x for x in _read("steps.jsonl") if x["row"] == row and card in x["device"]][-1]


def _read(name: str) -> list[dict]:
    return [json.loads(line) for line in (MEASURED / name).read_text().splitlines()]


if __name__ == "__main__":
    print(*parts(), "", sep="\n")
    print(*(f"{name}: {cell}" for name, cell in estimates().items()), sep="\n")
