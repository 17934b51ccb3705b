"""Tests votes: which answers to one problem a judge of mathematics counts as one."""

import pytest

from qerl_jax.evaluation.summary import summarize
from qerl_jax.rewards import math_judge, votes
from qerl_jax.rewards.stock import FACTORIES
from qerl_jax.system.process_pool import Failure


class Judges:
    """The judge in this process: it records what it is asked, and some answers make it busy."""

    def __init__(self, busy=()):
        self.asked, self.busy = [], busy

    def map(self, function, calls):
        self.asked += calls
        judge = getattr(math_judge, function)
        late = Failure("timeout")
        return [late if set(call) & set(self.busy) else judge(*call) for call in calls]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([r"\frac12", "0.5", "1/2", "7"], [r"\frac{1}{2}", r"\frac{1}{2}", r"\frac{1}{2}", "7"]),
        (["7", "0.5", r"\frac12"], ["7", "0.5", "0.5"]),
        (["x=5", "5", None, "5.0"], ["5", "5", None, "5"]),
        ([r"\sqrt{12}", r"2\sqrt{3}", "2"], [r"\sqrt{12}", r"\sqrt{12}", "2"]),
        (["12", "1,2", "2, 1"], ["12", "1,2", "1,2"]),
        (["1011_2", "1011", "1011_{2}"], ["1011_2", "1011", "1011_2"]),
        ([r"\boxed{5}", "5"], ["5", "5"]),
        ([None, None], [None, None]),
    ],
)
def test_answers_that_are_the_same_mathematics_are_one_vote(given, expected):
    assert votes.mathematical(Judges(), [given]) == [expected]


def test_problems_vote_apart_and_numbers_are_told_apart_without_a_judge():
    judges = Judges()
    given = [["5", "5.0", "7", "1,000"], ["1/2", "0.5"], ["0.5", None]]
    found = votes.mathematical(judges, given)
    assert found == [["5", "5", "7", "1000"], ["1/2", "1/2"], ["0.5", None]]
    assert judges.asked == [("1/2",), ("1/2", "0.5")]


def test_an_answer_that_keeps_the_judge_busy_votes_by_its_text():
    tower = "9^{9^{9}}"
    given = [["1/2", tower, "0.5", tower + " "]]
    found = votes.mathematical(Judges(busy=[tower]), given)
    assert found == [["1/2", tower, "1/2", tower]]


@pytest.mark.process
@pytest.mark.parametrize("name", ["get_math_verify_reward", "get_reasoning_accuracy_reward"])
def test_rewards_that_compare_mathematics_say_what_is_one_vote(name):
    reward = FACTORIES[name](workers=1)
    assert reward.votes([[r"\frac12", "0.5", "7"]]) == [[r"\frac{1}{2}", r"\frac{1}{2}", "7"]]


def test_the_majority_is_of_votes_not_of_spellings():
    record = {"right": [True, True, True, False, False], "lengths": [1] * 5, "unjudged": 0}
    record |= {"stopped": [True] * 5, "answers": [r"\frac12", "0.5", "1/2", "7", "7"]}

    def majority(**changes):
        estimates = summarize([record | changes] * 2, (5,))["estimates"]
        return {each["name"]: each["value"] for each in estimates}["maj@5"]

    assert majority(votes=["a", "a", "a", "7", "7"]) == 1
    assert majority() == 0  # of an evaluation before votes were written down
