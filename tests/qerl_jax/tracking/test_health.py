"""Tests warnings about a run: each comes for its curve, once, and a healthy run has none."""

import math

import numpy as np
import pytest

from qerl_jax.tracking.health import Health

WELL = {
    "reward": 0.5,
    "entropy": 0.4,
    "completions/mean_length": 100.0,
    "completions/clipped_ratio": 0.1,
    # As much of the signal as of the tokens.
    "completions/truncated_tokens": 0.3,
    "completions/truncated_signal": 0.3,
    "completions/max_terminated_length": 300,
    "frac_reward_zero_std": 0.5,
    "sampling/sampling_logp_difference/mean": 0.004,
    "updates/non_finite": 0,
}


def watched(*stages, steps=15):
    """Returns a run's health and its warnings, if its rows are healthy except for the changes of each stage."""
    health = Health(ends={421: "<|im_end|>"})
    rows = [WELL | changes for changes in stages for _ in range(steps)]
    lines = [health.see({"step": step} | row) for step, row in enumerate(rows, 1)]
    return health, [line for of_step in lines for line in of_step]


def warnings_of(*stages):
    return watched(*stages)[1]


# What is wrong, what the warning says of it, and the remedy.
MISMATCH = "sampling/sampling_logp_difference/mean"
SICK = [
    ({"completions/truncated_tokens": 0.4, "completions/truncated_signal": 0.05},
     "completions/truncated_tokens has been ", "Lower it towards completions/max_terminated_length ("),
    ({"entropy": 0.03}, "entropy has collapsed, from 0.4 to 0.", "optim.learning_rate"),
    ({"completions/mean_length": 300.0}, "mean_length has gone from 100 to", "rewards.soft_punish_cache"),
    ({"frac_reward_zero_std": 1.0}, "frac_reward_zero_std has been 1", "qerl filter"),
    ({"completions/clipped_ratio": 0.7}, "clipped_ratio has been ", "rollout.max_completion_length"),
    ({"updates/non_finite": 2}, "updates/non_finite has been above 0 in more than half of 10 steps", "qerl replay"),
    ({MISMATCH: 0.05}, f"{MISMATCH} has grown from 0.004 to 0.0", "grpo.mismatch.mask"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "metric", "remedy"), SICK)
def test_a_sick_run_is_told_once_with_metric_cause_and_remedy(changes, metric, remedy):
    (line,) = warnings_of({}, changes, changes, {}, changes)
    assert line.startswith("warning: step ") and metric in line
    assert "Likely cause: " in line and remedy in line and "\n" not in line


def test_of_a_run_that_is_well_nothing_is_said():
    assert warnings_of({}, {}, {}) == []
    better = {"reward": 0.9, "completions/mean_length": 300.0, "entropy": 0.2}
    assert warnings_of({}, better) == []  # longer, and better for it


def test_an_accuracy_of_0_beside_a_reward_that_rises_is_told_once():
    none, better = {"eval/accuracy": 0.0}, {"reward": 0.9}
    (line,) = warnings_of({}, none, none | better)
    assert "eval/accuracy was 0" in line and "Likely cause: eval.reward" in line
    for after in ((none, none), (better,), (better | {"eval/accuracy": 0.1},)):
        assert warnings_of({}, *after) == []


def test_a_function_that_never_gives_a_number_is_told_once():
    silent = {"rewards/a/mean": 0.0, "rewards/a/std": 0.0, "rewards/a/judged_ratio": 0.0}
    both = {"rewards/b/std": 0.5} | silent
    (line,) = warnings_of(both)
    assert line.startswith("warning: step 3: rewards/a: returned None for every completion of the")
    some = silent | {"rewards/a/judged_ratio": 0.1}
    assert warnings_of(some, both) == []  # it gave some: the rows of other problems have no answer
    assert warnings_of({"rewards/a/std": 0.0}, both) == []


def test_nothing_is_said_of_single_steps():
    rng, health = np.random.default_rng(0), Health()
    for step in range(1, 200):
        row = dict(WELL)
        if rng.random() < 0.2:  # one step in five is far out
            row |= {name: value for changes, *_ in SICK for name, value in changes.items()}
            row["entropy"], row["frac_reward_zero_std"] = 0.0, 1.0
        assert health.see({"step": step} | row) == []


DEAD = WELL | {"frac_reward_zero_std": 1.0, "reward": 0.0, "updates/empty": 1}
ALL_CUT = {"completions/clipped_ratio": 1.0}


def test_a_run_that_never_learned_is_told_after_three_steps_and_at_its_end():
    health = Health()
    lines = [health.see({"step": step} | DEAD) for step in range(1, 15)]
    assert [len(each) for each in lines] == [0, 0, 1, *11 * [0]]
    assert lines[2][0].startswith("warning: step 3: nothing was learned in the first 3 steps. In n")
    assert health.closing().startswith("warning: this run has learned nothing in 14 steps. In no")
    assert (health.has_learned, health.steps, health.taught) == (False, 14, 0)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"completions/judged_ratio": 0.0}, "returned None for every completion"),
        (ALL_CUT, "100% of the completions are cut off before"),
        (
            ALL_CUT | {"completions/missed_end_ratio": 0.9, "completions/missed_end": 421},
            "90% of the completions that are cut off hold the special token '<|im_end|>', at which they do not end. "
            "Set rollout.stop_token_ids = [421]; a greater length does not help",
        ),
        (ALL_CUT | {"entropy": math.nan}, "of the sampler that are not numbers"),
        ({"entropy": 0.001}, "almost equal (entropy is 0.001)"),
        ({"rewards/a/std": 0.0, "rewards/b/std": 0.0}, "two rewards differ: all rewards are 0."),
        ({"rewards/a/std": 0.3, "rewards/b/std": 0.0}, "problems that are always or never solved"),
        # 4 of 16 are 1; and from -0.04 to 0.09.
        ({"rewards/a/mean": 0.25, "rewards/a/std": 0.44}, "are always or never solved"),
        ({"rewards/a/mean": 0.02, "rewards/a/std": 0.05}, "only the row, and not the completion"),
        ({"updates/non_finite": 1}, "losses or gradients that are not numbers"),
        ({"frac_reward_zero_std": 0.5}, "left out of the update, by grpo.mask_truncated"),
    ],
)
def test_the_cause_of_learning_nothing_is_named(changes, cause):
    health, (line,) = watched(DEAD | changes, steps=3)
    assert cause in line and cause in health.closing()


def test_the_end_of_a_run_counts_the_steps_that_taught_something():
    def after(*taught):
        health = Health()
        for step, each in enumerate(taught, 1):
            health.see({"step": step} | (WELL if each else DEAD))
        return health.closing()

    assert after() is None and after(*10 * [True]) is None and after(True, *9 * [False]) is None
    assert after(True, *10 * [False]).startswith("warning: only 1 of 11 steps taught something:")
    # Two updates of a rollout, of which one was made.
    health = Health()
    health.see({"step": 2, "updates/empty": 1} | WELL)
    assert health.has_learned and health.closing() is None


def test_rows_that_lack_metrics_or_hold_what_is_no_number_are_taken_as_they_come():
    health = Health()
    for row in ({"step": 0, "eval/accuracy": 0.1}, {"step": 1, "reward": 0.1}):
        assert health.see(row) == []
    for step in range(2, 40):
        assert health.see({"step": step, "reward": "x", "entropy": None}) == []
        assert health.see({"step": step, "reward": float("nan")}) == []


def test_memory_does_not_grow_with_the_run():
    health, _ = watched({}, steps=1000)
    assert {len(values) for values in health._values.values()} == {20}


def test_a_difference_beyond_rounding_is_told_at_the_first_step_that_has_it():
    found = {"sampling/sampling_logp_difference/mean": 0.2}
    assert Health().see({"step": 1} | WELL | found) == []  # on purpose
    health = Health(usual_mismatch=0.05)
    assert health.see({"step": 1} | WELL) == []
    (line,) = health.see({"step": 2} | WELL | found)
    assert "is 0.2 nats, where 0.05 is usual at most" in line and "Likely cause: " in line
    assert health.see({"step": 3} | WELL | found) == []


@pytest.mark.parametrize(("last", "is_flat"), [(0.44, True), (0.5, True), (0.6, False)])
def test_a_run_whose_reward_did_not_rise_says_so_at_its_end(last, is_flat):
    health, _ = watched({}, {"reward": last})
    expected = "warning: the reward has not risen: its mean is 0.5 over the first 10"
    assert (health.closing() or "").startswith(expected) == is_flat
    assert health.has_learned and (is_flat or health.closing() is None)
    assert watched({}, steps=19)[0].closing() is None  # too few to say
