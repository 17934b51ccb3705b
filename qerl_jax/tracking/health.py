"""Warns about problems in the metrics of a run: what is wrong, the likely cause, and what to change."""

import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from qerl_jax.config import RunConfig

type Row = Mapping[str, Any]
type Check = Callable[[Health], str | None]

# Steps per mean, because single steps are noisier than most effects.
_WINDOW = 10
# Number of first steps without learning after which there is a warning.
_EARLY = 3
# There is a warning at the end of a run if a smaller share of its steps was learned from.
_FEW = 0.1


class Health:
    """Reads the metrics of a run, row by row, and returns warnings about problems, each once.

    A resumed run passes the earlier rows first, so that no warning is repeated.

    Attributes:
        steps: Number of rows with a rollout.
        taught: Number of these rows in which rewards differed and an update was made.
    """

    def __init__(self, usual_mismatch: float | None = None, ends: Mapping[int, str] | None = None):
        """Creates a health without rows.

        `usual_mismatch` is the largest mean difference of sampler and trainer that rounding explains, in nats; None if
        they differ on purpose. `ends` has the texts of special tokens that are named as ends, by id, for warnings.
        """
        self.usual_mismatch = usual_mismatch
        self.steps = self.taught = 0
        self._step = 0
        self._are_equal = self._are_graded = False
        # Steps in which a function gave only None, by its name; -inf if it ever gave a number.
        self._silent: dict[str, float] = {}
        self._values: dict[str, list[float]] = {}
        self._warned: set[Check] = set()
        self._ends = ends or {}

    @classmethod
    def of(
        cls, cfg: RunConfig, rows: Iterable[Row] = (), ends: Mapping[int, str] | None = None
    ) -> Self:
        """Returns the health of a run that has logged these rows; warnings about them count as given."""
        only_sampler_has_noise = cfg.noise is not None and cfg.noise.scope == "rollout"
        bound = {"bfloat16": 0.05, "float32": 1e-3}[cfg.model.dtype]
        health = cls(None if only_sampler_has_noise else bound, ends)
        for row in rows:
            health.see(row)
        return health

    @property
    def has_learned(self) -> bool:
        """Whether the run has learned from any step; True before the first step."""
        return self.taught > 0 or self.steps == 0

    def closing(self) -> str | None:
        """Returns the warning at the end of a run that hardly learned, or whose reward did not rise; else None."""
        if self.taught >= _FEW * self.steps:
            return _flat(self)
        if self.has_learned:
            return (
                f"warning: only {self.taught} of {self.steps} steps taught something: in the others no two completions "
                "of a prompt had different rewards, or no update was made. `qerl filter` finds problems that are "
                "solved sometimes"
            )
        steps = f"{self.steps} steps" if self.steps > 1 else "its only step"
        return f"warning: this run has learned nothing in {steps}. {cause(self)}"

    def see(self, row: Row) -> list[str]:
        """Adds a row of `metrics.jsonl`, and returns new warnings; usually none."""
        if "reward" not in row:  # an evaluation before the first step
            return []
        for name, value in row.items():
            if isinstance(value, int | float):
                values = self._values.setdefault(name, [])
                values.append(float(value))
                del values[_WINDOW:-_WINDOW]  # only the first and the last are needed
        self._count(row)
        warnings = []
        for check in _CHECKS:
            if check not in self._warned and (line := check(self)):
                self._warned.add(check)
                warnings.append(f"warning: step {row.get('step', '?')}: {line}")
        return warnings

    def _count(self, row: Row) -> None:
        """Counts a step, and whether it was learned from: rewards differed, and an update was made."""
        step = row.get("step", self._step + 1)
        updates, self._step = step - self._step, step
        idle = row.get("updates/empty", 0) + row.get("updates/non_finite", 0)
        self.steps += 1
        self.taught += row.get("frac_reward_zero_std", 0) < 1 and idle < max(1, updates)
        # Functions that returned the same number for all completions have a spread of 0.
        spreads = {match[1]: row[name] for name in row if (match := _SPREAD.fullmatch(name))}
        for name in spreads:
            is_silent = row.get(f"{name}/judged_ratio", 1) == 0
            self._silent[name] = self._silent.get(name, 0) + 1 if is_silent else -math.inf
        self._are_equal = bool(spreads) and not any(spreads.values())
        means = {name: row.get(f"{name}/mean") for name in spreads}
        self._are_graded = any(_are_graded(means[name], spreads[name]) for name in spreads)

    def course(self, name: str) -> tuple[float, float]:
        """Returns the means of the first and the last ten values of a metric; NaN if there are fewer than twenty."""
        values = self._values.get(name, [])
        if len(values) < 2 * _WINDOW:
            return math.nan, math.nan
        return statistics.fmean(values[:_WINDOW]), statistics.fmean(values[_WINDOW:])

    def recent(self, name: str) -> float:
        """Returns the mean of the last ten values of a metric; NaN if there are fewer."""
        values = self.last(name)
        return statistics.fmean(values) if values else math.nan

    def latest(self, name: str) -> float | None:
        """Returns the last value of a metric; None if there is none yet."""
        return (self.last(name, 1) or [None])[0]

    def last(self, name: str, count: int = _WINDOW) -> list[float]:
        """Returns the last `count` values of a metric; none if there are fewer."""
        values = self._values.get(name, [])
        return values[-count:] if len(values) >= count else []


# Comparisons with NaN are false, so no check below warns of a metric that is not known yet.


def _entropy(health: Health) -> str | None:
    # Not update/entropy, which covers only rows with a signal.
    first, last = health.course("entropy")
    if last <= 0.1 * first:
        return (
            f"entropy has collapsed, from {first:.3g} to {last:.3g} nats a token: completions of a "
            "prompt become equal, and nothing more is learned. Likely cause: a rate that is too high, or clipping "
            "that lets no rare token grow. Lower optim.learning_rate, raise grpo.epsilon_high (DAPO: 0.28) or set "
            "grpo.reference.beta > 0, and go on from an earlier checkpoint"
        )
    return None


def _length(health: Health) -> str | None:
    length, reward = health.course("completions/mean_length"), health.course("reward")
    if length[1] >= 2 * length[0] and reward[1] <= reward[0]:
        return (
            f"completions/mean_length has gone from {length[0]:.0f} to {length[1]:.0f} tokens, and reward has "
            f"not risen ({reward[0]:.3g} to {reward[1]:.3g}): the policy rambles. Likely cause: a loss in "
            'which long completions weigh less a token (grpo.loss_type = "grpo"), or completions that are cut off '
            'without a penalty. Take "dapo", or set rewards.soft_punish_cache'
        )
    return None


def _nothing(health: Health) -> str | None:
    early = not health.taught and health.steps >= _EARLY
    return f"nothing was learned in the first {_EARLY} steps. {cause(health)}" if early else None


def _flat(health: Health) -> str | None:
    """Returns the warning about a reward that did not rise from the first steps to the last; None if it did."""
    first, last = health.course("reward")
    if last <= first:
        return (
            f"warning: the reward has not risen: its mean is {first:.3g} over the first {_WINDOW} steps, and "
            f"{last:.3g} over the last {_WINDOW}. Read some completions in completions/. Likely cause: "
            "optim.learning_rate is too low or too high, the run is too short, the reward does not depend on what the "
            "policy writes, or it was near its best from the start"
        )
    return None


def _reward(health: Health) -> str | None:
    if health.taught and health.recent("frac_reward_zero_std") >= 1:
        return f"frac_reward_zero_std has been 1 for {_WINDOW} steps: nothing more is learned. {cause(health)}"
    return None


def cause(health: Health) -> str:
    """Returns why nothing was learned from the last steps, and what to change: the first cause that fits."""
    latest = lambda name: health.latest(name) or 0.0
    truncated, reward = latest("completions/clipped_ratio"), latest("reward")
    if latest("updates/non_finite"):
        return (
            "Likely cause: losses or gradients that are not numbers, so that updates are skipped. `qerl replay` of a "
            "file in non_finite/ says what was not finite"
        )
    if health.latest("completions/judged_ratio") == 0:
        return (
            "Likely cause: every reward function returned None for every completion. Print what they are given, "
            "and see whether the rows have the column that they read"
        )
    if latest("frac_reward_zero_std") < 1:
        return (
            "Likely cause: completions whose rewards differ are left out of the update, by grpo.mask_truncated_completions "
            "or by the masks of sampling ratios. Look at completions/clipped_ratio and sampling/masked_mean"
        )
    same = "In no group of completions did two rewards differ"
    if math.isnan(latest("entropy")):
        return (
            f"{same}. Likely cause: probabilities of the sampler that are not numbers (entropy is NaN), because "
            "weights of base or adapter are none, or noise is too large. A greater length does not help"
        )
    if truncated > 0.9:
        length = (
            f"{truncated:.0%} of the completions are cut off before their answer. Raise rollout.max_completion_length, or ask "
            "for shorter answers"
        )
        return f"{same}. Likely cause: {_about_missed_end(health) or length}"
    if (entropy := health.latest("entropy")) is not None and entropy < 0.01:
        return (
            f"{same}. Likely cause: the completions of a prompt are almost equal (entropy is {entropy:.2g}). "
            "Raise rollout.temperature"
        )
    if health._are_equal:
        return (
            f"{same}: all rewards are {reward:.3g}. Likely cause: a reward that cannot read the completions' "
            "form (texts, or chats of one message), or compares their text with an answer that is a number; rows without "
            "answers; or problems that are all too hard or too easy. Read some completions in "
            "completions/, and see what the reward makes of them; `qerl filter` finds problems that are solved sometimes"
        )
    if health._are_graded:
        return (
            f"{same}, but they differ from prompt to prompt, and are not all 0 or 1. Likely cause: a reward that reads "
            "only the row, and not the completion. Give it two different completions of a row, and see whether it "
            "tells them apart"
        )
    return (
        f"{same} (mean reward {reward:.3g}). Likely cause: problems that are always or never solved. Ask `qerl "
        "filter` for problems that are solved sometimes, give more problems, or raise rollout.num_generations"
    )


def _about_missed_end(health: Health) -> str | None:
    """Returns why completions run on to their limit if most of these hold a token that should have ended them."""
    share, end = (health.latest(f"completions/missed_end{part}") for part in ("_ratio", ""))
    if end is None or not share or share < 0.5:
        return None
    text = f" {health._ends[int(end)]!r}" if end in health._ends else ""
    return (
        f"{share:.0%} of the completions that are cut off hold the special token{text}, at which they do not end. Set "
        f"rollout.stop_token_ids = [{end:.0f}]; a greater length does not help"
    )


def _are_graded(mean: Any, spread: Any) -> bool:
    """Whether rewards of this mean and standard deviation differ, and cannot all be 0 or 1."""
    if not (isinstance(mean, int | float) and isinstance(spread, int | float) and spread > 0):
        return False
    # Zeros and ones have a variance of at least mean (1 - mean); numbers between them have a smaller one.
    return not 0 <= mean <= 1 or spread**2 < 0.99 * mean * (1 - mean)


def _truncation(health: Health) -> str | None:
    share = health.recent("completions/clipped_ratio")
    if share > 0.5:
        length = (
            "rollout.max_completion_length is too small, or the prompt does not lead to a stop token. Raise it, "
            "or set rewards.soft_punish_cache; grpo.mask_truncated_completions leaves them out of the loss"
        )
        return (
            f"completions/clipped_ratio has been {share:.0%} over {_WINDOW} steps: more than half of the completions are cut "
            f"off before their answer, and are judged without it. Likely cause: {_about_missed_end(health) or length}"
        )
    return None


def _cost_of_truncation(health: Health) -> str | None:
    names = ("truncated_tokens", "truncated_signal", "max_terminated_length")
    cost, gain, length = (health.recent(f"completions/{name}") for name in names)
    if cost >= 0.25 and gain <= cost / 4:
        return (
            f"completions/truncated_tokens has been {cost:.0%} over {_WINDOW} steps, and "
            f"completions/truncated_signal {gain:.0%}: completions that are cut off cost more than they teach. "
            "Likely cause: rollout.max_completion_length is far above what answers need, and some never end. "
            f"Lower it towards completions/max_terminated_length ({length:.0f} "
            "of late), or set rewards.soft_punish_cache"
        )
    return None


def _silence(health: Health) -> str | None:
    names = [name for name, steps in health._silent.items() if steps >= _EARLY]
    if names and health.latest("completions/judged_ratio") != 0:
        return (
            f"{', '.join(names)}: returned None for every completion of the first {_EARLY} steps, so the reward is that of "
            "the other functions. Likely cause: rows without the column or the answer that it reads"
        )
    return None


def _mismatch(health: Health) -> str | None:
    name = "sampling/sampling_logp_difference/mean"
    (first, last), bound, latest = health.course(name), health.usual_mismatch, health.latest(name)
    if bound is not None and latest is not None and latest > bound:
        return (
            f"{name} is {latest:.3g} nats, where {bound} is usual at most: sampler and trainer disagree. Likely "
            "cause: a kernel that computes wrongly on this card (python -m scripts.check_device finds it). "
            "[grpo.mismatch.correction] limits the harm"
        )
    if last >= max(3 * first, 0.02):  # a rise that stays below 0.02 does not matter
        return (
            f"{name} has grown from {first:.2g} to {last:.2g} nats: sampler and trainer see tokens more and more apart. "
            "Likely cause: weights that have grown to where 16 bits round them coarsely (a rate that is too high), "
            "or noise that grows against the norms. Lower optim.learning_rate or noise.sigma_start, or bound the "
            "harm with [grpo.mismatch.mask]"
        )
    return None


def _evaluation(health: Health) -> str | None:
    accuracy, (first, last) = health.last("eval/accuracy", 2), health.course("reward")
    if accuracy and not any(accuracy) and last > first:
        return (
            "eval/accuracy was 0 in the last two evaluations, though the reward has risen "
            f"({first:.3g} to {last:.3g}). Likely cause: eval.reward reads answers of another form than "
            'your rewards teach. Name your own function, such as eval.reward = "my_rewards.py:right", and look at '
            "completions/"
        )
    return None


def _non_finite(health: Health) -> str | None:
    if sum(count > 0 for count in health.last("updates/non_finite")) > _WINDOW // 2:
        return (
            f"updates/non_finite has been above 0 in more than half of {_WINDOW} steps: updates whose loss or gradient "
            "is not a number are skipped, and little is learned. Likely cause: log-probabilities that overflow (a rate "
            "that is too high, or noise that is too large), or a fault of a kernel. `qerl replay` of a file in "
            "non_finite/ says what was not finite; lower optim.learning_rate or noise.sigma_start"
        )
    return None


_CHECKS: tuple[Check, ...] = (
    *(_entropy, _length, _nothing, _reward, _truncation, _cost_of_truncation, _mismatch),
    *(_silence, _evaluation, _non_finite),
)
_SPREAD = re.compile(r"(rewards/.+)/std")
