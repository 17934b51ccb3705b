"""Tests the report card of a run: every part agrees with the run's files."""

import json
import shlex

from qerl_jax import config
from qerl_jax.tracking import card, report
from qerl_jax.tracking.card import Machine
from tests.qerl_jax.tracking.test_report import make_run

H100 = Machine("NVIDIA H100", 2, {"jax": "0.11.2"}, 130.0)


def parts(folder, notes=(), **options):
    """Returns the texts of a card by their headings; the beginning has none."""
    first, *others = card.write(folder, H100, notes, **options).read_text().split("\n## ")
    return {"": first} | dict(each.split("\n\n", 1) for each in others)


def change_metrics(folder, changes):
    """Changes metrics of all steps."""
    path = folder / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines())
    changed = [row | changes if "reward" in row else row for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in changed))


def test_a_card_says_what_ran_and_what_came_of_it(tmp_path):
    found = parts(make_run(tmp_path / "mine"), ["update: micro-batches of 512 tokens"])
    assert found[""].startswith("# mine\n\nHeld-out accuracy went from 0.300 to 0.600. Reward w")
    assert "12 of 12 steps had rewards that differ, and made an update." in found[""]
    assert "| base | qerl-tiny, held in nvfp4 |" in found["What ran"]
    assert "| a rollout | 32 prompts x 8 completions of at most 44 tokens |" in found["What ran"]
    assert "| reward | `▁▂▂▃▄▄▅▅▆▇▇█` | 0.05 | 0.6 | 0.05 | 0.6 |" in found["Curves"]
    assert "KL" not in found["Curves"]  # it is 0 throughout
    assert "| device | 2 x NVIDIA H100 |\n| jax | 0.11.2 |" in found["On what"]
    assert found["Said at the start"].startswith("- update: micro-batches of 512 tokens\n")


def test_the_command_of_a_card_can_be_pasted_whatever_the_folder_is_called(tmp_path):
    folder = make_run(tmp_path / "my run")
    (row,) = (r for r in parts(folder)["What ran"].splitlines() if r.startswith("| again"))
    words = shlex.split(row.split("`")[1])
    assert words == ["qerl", "train", f"{folder}/config.toml", "--output-dir", "ANOTHER"]


def test_a_run_that_only_a_notebook_can_repeat_offers_no_command(tmp_path):
    rewards = config.RewardConfig(functions=("__main__:right",))
    what = parts(make_run(tmp_path / "reward", rewards=rewards))["What ran"]
    assert "| again | from your script or notebook, which defines `__main__:right` |" in what
    what = parts(make_run(tmp_path / "rows"), given_rows=1400)["What ran"]
    assert "| data | 1,400 rows from Python |" in what
    assert "| again | from your script or notebook, which defines the rows |" in what


def test_a_card_adds_up_what_the_phases_have_cost(tmp_path):
    cost = parts(make_run(tmp_path / "run"))["Time and cost"]
    # Twelve steps of 1 s and 2 s on two devices.
    assert "| rollouts | 12.0 | 33% |\n| updates | 24.0 | 67% |\n" in cost
    assert "- 72 device seconds (2 x NVIDIA H100)\n- first step 3.0 s, with compiling" in cost
    assert "- 12,000 tokens" in cost and "- the last process took 130 s" in cost


def test_a_card_repeats_the_warnings_of_the_run_and_of_its_start(tmp_path):
    folder = make_run(tmp_path / "run")
    assert parts(folder)["Warnings"].startswith("None.")
    found = parts(folder, ["warning: 1 of 49 problems have no answer", "update: one micro-batch"])
    assert found["Warnings"].strip() == "- warning: 1 of 49 problems have no answer"
    assert found["Said at the start"].strip() == "- update: one micro-batch"
    assert "Said at the start" not in parts(folder, ["warning: no answer"])
    change_metrics(folder, {"frac_reward_zero_std": 1.0})
    lines = parts(folder)["Warnings"].splitlines()
    assert lines[0].startswith("- warning: step 3: nothing was learned in the first 3 steps.")
    assert lines[1].startswith("- warning: this run has learned nothing in 12 steps.")


def test_a_card_of_a_run_without_rewards_opens_with_that_and_shows_what_was_written(tmp_path):
    folder = make_run(tmp_path / "run")
    idle = {"frac_reward_zero_std": 1.0, "completions/judged_ratio": 0.0, "reward": 0.0}
    change_metrics(folder, idle)
    row = {"prompt": "1+1?", "completion": "two", "reward": None}
    for path in (folder / "completions").iterdir():
        path.write_text(json.dumps(row) + "\n")
    found = parts(folder)
    opening = "# run\n\n**Learned nothing.** Likely cause: every reward function returned None"
    assert found[""].startswith(opening) and "Reward: none. 0 of 12 steps" in found[""]
    assert "| reward |" not in found["Curves"]
    assert "Step 1: no reward:\n\n```text\n1+1?\n\ntwo\n```" in found["Samples"]
    assert report.lines(folder)[0].split() == ["reward", "none"]


def test_where_all_rewards_are_equal_one_sample_stands_for_them(tmp_path):
    folder = make_run(tmp_path / "run")
    rewards = {"two": 0.5, "three": 0.5, "unjudged": None}
    rows = [{"prompt": "1+1?", "completion": text, "reward": x} for text, x in rewards.items()]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "completions" / "step_000012.jsonl").write_text(text)
    shown = parts(folder)["Samples"]
    assert "Step 1: highest reward, 1:" in shown and "Step 1: lowest reward, 0:" in shown
    assert "Step 12: every reward is 0.5:\n\n```text\n1+1?\n\ntwo\n```" in shown
    assert shown.count("Step 12") == 1 and "three" not in shown


def test_a_completion_cannot_end_its_fence_and_half_a_character_is_shown_by_its_number(tmp_path):
    folder = make_run(tmp_path / "run")
    row = {"prompt": "\ud83d 1+1?", "completion": "````\n# mine", "reward": 1.0}
    (folder / "completions" / "step_000012.jsonl").write_text(json.dumps(row) + "\n")
    shown = parts(folder)["Samples"]
    assert "`````text\n\\ud83d 1+1?\n\n````\n# mine\n`````" in shown
