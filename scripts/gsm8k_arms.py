"""The arms of the study on Qwen2.5 as data: what each changes, which runs a stage has, and the rates that are chosen.

docs/results.md has the rules that were registered before the first run of stage 2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# How weights of a base are stored. "16" is what BASE holds, and "nvfp4" is that rounded on load; the others are folders
# that `gsm8k_bases` makes. A name that ends with "-" gets the seed of the run: a fresh draw for each.
BASES = {
    "16": "bfloat16",
    "nvfp4": "nvfp4",
    "gptq": "nvfp4",
    "noise-": "bfloat16",
    "nf4": "bfloat16",
    "mxfp4": "bfloat16",
    "nvfp4-16": "bfloat16",
}
# Rates that are swept, the seeds of the sweep, and those that arms may have: no run of the sweep is part of a comparison.
RATES, SWEEP_SEEDS, SEEDS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3), (0, 1), (2, 3, 4, 5, 6, 7, 8, 9)
SWEEP_STEPS, STEPS, MORE_STEPS = 48, 160, 320
# First sigmas of AQN, in rising order: the first one that moves the policy by `DOSE` of what rounding does is taken.
SIGMAS, DOSE = (5e-2, 1e-1, 2e-1), 0.1

type Records = Mapping[str, Mapping[str, Any]]
_FULL = {"model": {"trainable": "full"}, "lora": None}


@dataclasses.dataclass(frozen=True)
class Arm:
    """A way to train.

    Attributes:
        title: Its name in tables.
        stage: The stage that runs it.
        base: A key of `BASES`.
        changes: Its changes to the common config, by section; None removes a section.
        noise: The estimator of its noise, "published" or "corrected"; "" for none.
        sigma: First sigma of its noise; None for the one that stage 0 chose. The last is a hundredth of it.
        temperature: Temperature of its rollouts; 0 for the one that stage 0 matched.
        rate_of: The arm whose sweep of rates decides its rate; "" for its own.
        rates: The rates of its own sweep.
        seeds: Number of its seeds; 8 for A to D if the rules add two.
        steps: Number of its optimizer steps.
    """

    title: str
    stage: int
    base: str = "16"
    changes: Mapping[str, Mapping[str, Any] | None] = dataclasses.field(default_factory=dict)
    noise: str = ""
    sigma: float | None = None
    temperature: float = 1.0
    rate_of: str = ""
    rates: Sequence[float] = RATES
    seeds: int = 6
    steps: int = STEPS

    @property
    def trains_all(self) -> bool:
        """Whether it trains all weights, without an adapter."""
        return self.changes.get("lora", {}) is None

    @property
    def needs_start(self) -> bool:
        """Whether stage 0 decides about it: by a dose of noise, or a temperature."""
        return not self.temperature or (bool(self.noise) and self.sigma is None)


_FULL_RATES = tuple(float(f"{rate / 10:g}") for rate in RATES)
_BY_BOX, _BY_CHANCE = (
    {"rewards": {"functions": [f"scripts.gsm8k_arms:{name}"]}}
    for name in ("has_box", "random_reward")
)
_FEW = {"stage": 4, "seeds": 2}
ARMS = {
    "A": Arm("16 bit", 2),
    "B": Arm("16 bit + AQN", 2, noise="published"),
    "C": Arm("NVFP4", 2, "nvfp4"),
    "D": Arm("NVFP4 + AQN (QeRL)", 2, "nvfp4", noise="published"),
    "E": Arm("16 bit + static noise", 3, "noise-", rate_of="A"),
    "F": Arm("16 bit, matched temperature", 3, temperature=0, rate_of="A"),
    "G": Arm("NVFP4, GPTQ", 3, "gptq", rate_of="C"),
    "H": Arm("NF4", 3, "nf4", rate_of="A", seeds=4),
    "I": Arm("MXFP4", 3, "mxfp4", rate_of="A", seeds=4),
    "J": Arm("16 bit, all weights", 3, changes=_FULL, rates=_FULL_RATES, seeds=4),
    "K": Arm("NVFP4, all weights", 3, "nvfp4-16", changes=_FULL, rate_of="J", seeds=4),
    "L": Arm("16 bit + AQN, corrected", noise="corrected", rate_of="B", **_FEW),
    "L4": Arm("NVFP4 + AQN, corrected", base="nvfp4", noise="corrected", rate_of="D", **_FEW),
    "M": Arm("16 bit, reward for a box", changes=_BY_BOX, rate_of="A", **_FEW),
    "N": Arm("16 bit, random reward", changes=_BY_CHANCE, rate_of="A", **_FEW),
    "B1": Arm("16 bit + AQN of 1e-2", noise="published", sigma=1e-2, rate_of="B", **_FEW),
    "D1": Arm("NVFP4 + AQN of 1e-2", base="nvfp4", noise="published", sigma=1e-2, rate_of="D", **_FEW),
    "C16": Arm("NVFP4 in 16 bits", base="nvfp4-16", rate_of="C", **_FEW),
    "F2": Arm("16 bit, temperature 1.2", temperature=1.2, rate_of="A", **_FEW),
    "A+": Arm("16 bit, longer", rate_of="A", steps=MORE_STEPS, **_FEW),
    "C+": Arm("NVFP4, longer", base="nvfp4", rate_of="C", steps=MORE_STEPS, **_FEW),
    "D+": Arm("NVFP4 + AQN, longer", base="nvfp4", noise="published", rate_of="D", steps=MORE_STEPS, **_FEW),
}  # fmt: skip
SWEPT = tuple(name for name, arm in ARMS.items() if not arm.rate_of)
# Arms whose sweep has the three best rates of the same base without noise, which `sweep` knows once that one's are done.
_NOISELESS = {"B": "A", "D": "C"}
# The bases that stage 0 measures.
MEASURED = ("16", "nvfp4", "noise-0", "noise-1", "gptq", "nf4", "mxfp4")


@dataclasses.dataclass(frozen=True)
class Piece:
    """One run.

    Attributes:
        arm: Its name in `ARMS`.
        rate: The highest learning rate.
        seed: Seed of problems, sampling, adapter and noise. Arms with the same seed get the same problems.
        steps: Number of optimizer steps.
    """

    arm: str
    rate: float
    seed: int
    steps: int

    @property
    def name(self) -> str:
        """The name of the run and of its record."""
        return f"{self.arm}_{self.rate:g}_{self.seed}_{self.steps}"

    @classmethod
    def named(cls, name: str) -> Piece:
        """Parses the name of a run."""
        arm, rate, seed, steps = name.split("_")
        return cls(arm, float(rate), int(seed), int(steps))

    @property
    def base(self) -> str:
        """The name of its base."""
        base = ARMS[self.arm].base
        return f"{base}{self.seed}" if base.endswith("-") else base

    @property
    def is_swept(self) -> bool:
        """Whether it is a run of a sweep of rates, which is not asked the test set."""
        return self.steps == SWEEP_STEPS


def weights(base: str) -> str:
    """How the linears of a base are stored."""
    return BASES.get(base) or BASES[base.rstrip("0123456789")]


def pieces(stage: int, records: Records) -> Iterator[Piece]:
    """The runs of a stage that are known, in the order in which they are made: all arms of a seed before the next."""
    is_known = lambda arm: not arm.needs_start or "start" in records
    if stage == 1:
        yield from (x for arm in SWEPT if is_known(ARMS[arm]) for x in sweep(records, arm))
        return
    for number, seed in enumerate(SEEDS):
        for name, arm in ARMS.items():
            rate = best_rate(records, name) if arm.stage == stage and number < arm.seeds else None
            if rate and is_known(arm):
                yield Piece(name, rate, seed, arm.steps)


def sweep(records: Records, arm: str) -> list[Piece]:
    """The runs of an arm's sweep that are known: one seed of each rate, then a second one of the best two rates."""
    rates: Sequence[float] = ARMS[arm].rates
    if arm in _NOISELESS:
        rates = sorted(_ranked(records, _NOISELESS[arm])[:3])
    first = [Piece(arm, rate, SWEEP_SEEDS[0], SWEEP_STEPS) for rate in rates]
    best = _ranked(records, arm, rates)[:2]
    return first + [Piece(arm, rate, SWEEP_SEEDS[1], SWEEP_STEPS) for rate in sorted(best)]


def best_rate(records: Records, arm: str) -> float | None:
    """The rate of an arm: of the two best ones of the sweep, that with the higher mean accuracy; None if not known.

    The accuracy is that of the validation problems at the end of a run. The lower of two equal rates is taken.
    """
    arm = ARMS[arm].rate_of or arm
    planned = sweep(records, arm)
    of_rate: dict[float, list[float]] = {}
    for piece in planned:
        if piece.name not in records:
            return None
        of_rate.setdefault(piece.rate, []).append(last_accuracy(records[piece.name]))
    means = {rate: statistics.mean(x) for rate, x in of_rate.items() if len(x) == len(SWEEP_SEEDS)}
    return max(means, key=lambda rate: (means[rate], -rate), default=None)


def _ranked(records: Records, arm: str, rates: Sequence[float] = ()) -> list[float]:
    """The rates of an arm's sweep by accuracy with the first seed, best first; none while runs are missing."""
    rates = rates or ARMS[arm].rates
    names = {rate: Piece(arm, rate, SWEEP_SEEDS[0], SWEEP_STEPS).name for rate in rates}
    if not {*names.values()} <= records.keys():
        return []
    return sorted(rates, key=lambda rate: (-last_accuracy(records[names[rate]]), rate))


def last_accuracy(record: Mapping[str, Any]) -> float:
    """Accuracy on the validation problems at the end of a run."""
    return record["accuracies"][-1]


def configured(
    piece: Piece,
    table: Mapping[str, Any],
    start: Mapping[str, Any] | None,
    local: Mapping[str, Any],
) -> dict[str, Any]:
    """The config of a run as a table: the common one, the changes of its arm, and `local` fields by section.

    Args:
        piece: The run.
        table: The common config.
        start: What stage 0 found: `sigma` and `temperature`. None if no arm needs it.
        local: Sections that say where things are; of highest rank.
    """
    arm = ARMS[piece.arm]
    changes: dict[str, Any] = {
        "model": {"weights": weights(piece.base)},
        "optim": {"learning_rate": piece.rate},
        "rollout": {"temperature": arm.temperature or start["temperature"]},
    }
    if arm.noise:
        sigma = arm.sigma or start["sigma"]
        stages = {"sigma_start": sigma, "sigma_end": float(f"{sigma / 100:g}"), "num_stages": 10}
        changes["noise"] = stages | {"estimator": arm.noise}
        # The estimator says which log-probabilities the ratio is taken against.
        changes["grpo"] = {"old_logprobs": None}
    # One device, however many there are: a run is to be the same on every machine.
    sections = {**table, "seed": piece.seed, "max_steps": piece.steps, "mesh": {"data": 1}}
    for level in (changes, arm.changes, local):
        for name, fields in level.items():
            if isinstance(fields, Mapping):
                fields = {**(sections.get(name) or {}), **fields}
                fields = {field: value for field, value in fields.items() if value is not None}
            sections[name] = fields
    return {name: fields for name, fields in sections.items() if fields is not None}


def chosen_sigma(divergences: Mapping[float, float], rounding: float) -> float:
    """The first sigma of AQN: the lowest of `SIGMAS` whose KL is at least `DOSE` of that of rounding, or the highest."""
    enough = (sigma for sigma in SIGMAS if divergences[sigma] >= DOSE * rounding)
    return next(enough, SIGMAS[-1])


def has_box(completions: Sequence[Any], **_: Any) -> list[float]:
    r"""Returns 1 for each completion with a `\boxed{}` that is not empty, right or wrong, else 0."""
    from qerl_jax.data import answers
    from qerl_jax.rewards.stock import completion_text

    return [float(bool(answers.last_boxed(completion_text(item)))) for item in completions]


def random_reward(prompts: Sequence[Any], completions: Sequence[Any], **_: Any) -> list[float]:
    """Returns 1 or 0 with equal chances, by a hash of prompt and completion: a run that goes on repeats no draw."""
    pairs = zip(prompts, completions, strict=True)
    return [float(hashlib.sha256(repr(pair).encode()).digest()[0] & 1) for pair in pairs]
