"""Tests rows of several turns: calls are read and answered, and replies are left out of the loss."""

import concurrent.futures
import contextlib
import dataclasses
import json
import time
import types

import jax
import numpy as np
import pytest

from qerl_jax.config import ToolsConfig
from qerl_jax.data.datasets import Problem
from qerl_jax.distributed import messages
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.generation import sampler as sampler_module
from qerl_jax.generation.prompts import with_observations
from qerl_jax.generation.sampler import Sampler
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.generation.scheduler import RowTokens
from qerl_jax.rewards import scoring
from qerl_jax.rl import rollouts
from qerl_jax.rl.experience import make_experience
from qerl_jax.tools import conversations
from qerl_jax.tools.environments import Toolboxes
from qerl_jax.training import metrics
from tests.qerl_jax.tools.test_tool_calls import qwen_tokenizer

LIMIT = 400
WIDTH = 1024  # what the template says of tools, letter by letter, too
HERE = "tests.qerl_jax.tools.environments_for_tests"
CHAT = [{"role": "user", "content": "Count."}]
tokens = pytest.fixture(scope="module")(qwen_tokenizer)
FOUR = SamplingParams(n=4, max_tokens=LIMIT)


def call(name, **arguments):
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


@contextlib.contextmanager
def tools_of(*names, **options):
    cfg = ToolsConfig(*names, **options)
    with contextlib.closing(Toolboxes(cfg)) as toolboxes:
        yield conversations.Tools(cfg, toolboxes, "hermes")


@pytest.fixture(scope="module")
def tools():
    limits = {"max_tool_calling_iterations": 2, "max_reply_tokens": 8, "seconds": 0.5}
    with tools_of((f"{HERE}:double",), f"{HERE}:Counter", **limits) as made:
        yield made


class Scripted:
    """An engine whose rows say given turns. Each turn ends with its stop token, unless it is marked as cut."""

    def __init__(self, tokens, scripts, limit=LIMIT):
        self.tokens, self.scripts, self.limit = tokens, scripts, limit

    def completions(self, variables, queue, temperature, *, turns, **_):
        self.prompts = [each.tokens for each in queue]
        for row, script in enumerate(self.scripts):
            made, given, ended = [], [], None
            for turn in script:
                cut = turn.endswith("|")
                ids = self.tokens.hf([turn.rstrip("|")], add_special_tokens=False)["input_ids"][0]
                ids += [] if cut else [self.tokens.stop_tokens[0]]
                made, given = made + ids, given + [False] * len(ids)
                ended = "length" if cut else "stop"
                reply = None if cut else turns(row, made)
                answer = [] if reply is None else reply.result()
                if not answer:
                    break
                if len(made) + len(answer) >= self.limit:
                    ended = "length"
                    break
                made, given = made + answer, given + [True] * len(answer)
            logps = -np.arange(len(made), dtype=np.float32)
            columns = (np.array(made, np.int32), logps, ended, None, np.array(given, bool))
            yield RowTokens(row, *columns)


def collect(tokens, tools, scripts, columns=({"start": 1},), limit=LIMIT):
    engine = Scripted(tokens, scripts, limit)
    params = SamplingParams(n=len(scripts) // len(columns), max_tokens=LIMIT)
    sampler = Sampler(engine, tokens, params, WIDTH)
    problems = [Problem(CHAT, each) for each in columns]
    key = jax.random.key(0)
    return rollouts.collect(dataclasses.replace(sampler, tools=tools), {}, problems, key)


ADD = call("add", times=2)


@pytest.fixture(scope="module")
def rollout(tokens, tools):
    scripts = [
        ["It is known."],
        [f"I count. {ADD}", call("double", x=4), "Done."],
        [ADD, ADD, ADD, "never said"],
        [f"<tool_call>oops</tool_call>{call('add', wrong=1)}", "cut|"],
    ]
    return collect(tokens, tools, scripts)


def test_what_was_said_is_messages_as_trl_has_them(rollout):
    first, second, third, fourth = rollout.conversations
    assert first.messages == ({"role": "assistant", "content": "It is known."},)
    assert [m["role"] for m in second.messages] == ["assistant", "tool"] * 2 + ["assistant"]
    made = [{"type": "function", "function": {"name": "add", "arguments": {"times": 2}}}]
    said = {"role": "assistant", "content": "I count.", "tool_calls": made}
    assert second.messages[0] == said
    assert second.messages[1] == {"role": "tool", "name": "add", "content": "3"}
    assert second.messages[3]["content"] == "8" and second.messages[4]["content"] == "Done."
    assert (second.calls, second.failures, second.turns, second.is_limited) == (2, 0, 3, False)
    assert (second.reward, second.public["count"]) == (3.0, 3)
    # Two turns are answered, the third call is not.
    assert (third.calls, third.turns, third.is_limited, third.reward) == (2, 3, True, 5.0)
    assert [m["name"] for m in fourth.messages[1:3]] == ["error", "add"]
    assert fourth.messages[1]["content"].startswith('{"error"')
    assert (fourth.calls, fourth.failures, fourth.reward) == (2, 2, 1.0)
    assert fourth.messages[2]["content"].endswith("(the rest is cut)")
    assert rollout.texts == ("It is known.", "Done.", "", "cut")
    assert rollout.stopped == (True, True, True, False)
    assert "[call] add(times=2)\n[add] 3\n" in conversations.transcript(second.messages)


def test_rows_of_another_host_come_with_its_conversations(rollout, tokens):
    """This host does not read their turns, but its rewards are told of them, after its own rows."""
    columns = (rollout.completion_ids, rollout.behaviour_logps, rollout.observation_mask)
    rows = enumerate(zip(*columns, strict=True))
    done = [RowTokens(n, ids, logps, "stop", given=mask) for n, (ids, logps, mask) in rows]
    order = [dataclasses.replace(done[n], is_own=n != 2) for n in (3, 0, 1, 2)]
    talks = dict(enumerate(rollout.conversations))

    class Pair(Hosts):
        def gathered(self, value):
            assert value == {n: talks[n] for n in (0, 1, 3)}
            return [value, messages.decode(messages.encode({2: talks[2]}))]

    class Talk(conversations.Conversations):
        def ended(self, row, tokens):
            assert row != 2
            future = concurrent.futures.Future()
            future.set_result(talks[row])
            return future

    engine = types.SimpleNamespace(completions=lambda *_, **__: iter(order))
    heard = []
    with pytest.MonkeyPatch.context() as patch, tools_of((f"{HERE}:double",)) as tools:
        patch.setattr(sampler_module, "Conversations", Talk)
        sampler = Sampler(engine, tokens, FOUR, WIDTH, tools=tools, hosts=Pair())
        note = lambda row, text: heard.append((row, text))
        problems, key = [Problem(CHAT, {})], jax.random.key(0)
        found = rollouts.collect(sampler, {}, problems, key, on_text=note)
    assert found.conversations == rollout.conversations and found.texts == rollout.texts
    assert heard == [(n, rollout.texts[n]) for n in (3, 0, 1, 2)]


def test_the_tokens_of_a_row_are_the_rendered_conversation(rollout, tokens):
    """The row has only turns that a template would write in the same way."""
    ids = rollout.completion_ids[2].tolist()
    messages = [*rollout.problems[0].prompt, *rollout.conversations[2].messages]
    text = tokens.render([messages], add_generation_prompt=False)[0].rstrip("\n")
    # The template puts a line's end before a call.
    text = text.replace("assistant\n\n<tool_call>", "assistant\n<tool_call>")
    (begun,) = tokens.render([rollout.problems[0].prompt])
    assert tokens.hf.decode(ids) == text[len(begun) :]


def test_the_environment_speaks_at_the_end_of_the_prompt(rollout, tokens, tools):
    assert rollout.problems[0].prompt == [{"role": "user", "content": "Count. From 1."}]
    shown = tokens.with_options(tools=tools.toolboxes.of({}).schemas)
    assert rollout.prompt_ids[0].tolist() == shown.encode([rollout.problems[0].prompt])[0]
    assert CHAT == [{"role": "user", "content": "Count."}]
    silent = collect(tokens, tools, [["a"]], ({"start": 0},))
    assert silent.problems[0].prompt == CHAT
    with pytest.raises(ValueError, match="max_prompt_length: got 9; 1 of 1 prompts with what"):
        with_observations(tools, [Problem(CHAT, {"start": 1})], tokens, 9)
    with pytest.raises(ValueError, match="speaks to chats"):
        conversations.observed(tools, [Problem("text", {"start": 1})])


def test_rows_of_several_environments_are_shown_their_own_tools(tokens):
    several = {"count": f"{HERE}:Counter", "game": "guess_number"}
    cfg = ToolsConfig(environments=several, seconds=0.5, max_tool_calling_iterations=2)
    columns = ({"environment": "count", "start": 1}, {"environment": "game", "secret": 3})
    guess = call("guess", number=3)
    with contextlib.closing(Toolboxes(cfg)) as boxes:
        tools = conversations.Tools.of(cfg, tokens, boxes)
        assert tools.call_format == "hermes"
        found = collect(tokens, tools, [[ADD, "Done."], [guess, "Done."]], columns)
        bad = [Problem(CHAT, columns[0]), Problem(CHAT, {"environment": "chess"})]
        with pytest.raises(ValueError, match="problem 1: environment: got 'chess'"):
            tools.encode(tokens, bad)
    first, second = map(tokens.hf.decode, found.prompt_ids)
    assert '"add"' in first and '"guess"' not in first
    assert '"add"' not in second and '"guess"' in second
    assert [talk.environment for talk in found.conversations] == ["Counter", "GuessNumber"]
    assert [talk.messages[1]["content"] for talk in found.conversations] == ["3", "correct"]
    _, per_function = rollouts.score(found, boxes.own_rewards(), None)
    np.testing.assert_array_equal(per_function, [[3, np.nan], [np.nan, 1]])


def test_nothing_is_learned_from_what_was_given(rollout):
    experience = make_experience(rollout, np.ones((1, 4)))
    assert experience.mask.tolist() == (~np.concatenate(rollout.observation_mask)).tolist()
    assert experience.completions.tolist() == np.concatenate(rollout.completion_ids).tolist()
    assert rollout.observation_mask[1].any() and not rollout.observation_mask[0].any()
    # A row that is cut in the middle of an answer ends with what the policy said before.
    assert np.diff(experience.offsets).tolist() == [len(ids) for ids in rollout.completion_ids]


def test_an_answer_that_does_not_fit_was_never_given(tokens, tools):
    (row,) = collect(tokens, tools, [[ADD, "never said"]], limit=60).conversations
    assert [m["role"] for m in row.messages] == ["assistant"] and row.is_limited
    assert (row.calls, row.failures) == (0, 0)


def test_half_a_character_of_a_tool_is_told_as_a_whole_one(tokens):
    """Neither the tokenizer nor the log of completions takes half a one."""
    scripts = [[call("halve", fails=fails), "Done."] for fails in (False, True)]
    with tools_of((f"{HERE}:halve",), seconds=5.0) as made:
        rows = collect(tokens, made, scripts, columns=({},)).conversations
    said = [row.messages[1]["content"] for row in rows]
    assert said == ["?", json.dumps({"error": "ValueError: ?"})]


def test_a_call_past_the_limit_counts_as_such_however_its_turn_has_ended(tokens, tools):
    """By the stop token, or by a stop string, behind which there is none."""
    talk = conversations.Conversations(tools, tokens, 2 * [Problem(CHAT, {})])
    (said,) = tokens.hf([ADD], add_special_tokens=False)["input_ids"]
    for row, end in enumerate(([tokens.stop_tokens[0]], [])):
        made = [*said, *end]
        while (reply := talk(row, made)) is not None:
            made += [*reply.result(), *said, *end]
        found = talk.ended(row, made).result()
        assert (found.calls, found.is_limited) == (2, True)


def test_a_thread_that_comes_to_a_row_before_it_is_abandoned_starts_no_process(tokens):
    with tools_of((), f"{HERE}:Counter", workers=1) as tools:
        talk = conversations.Conversations(tools, tokens, 2 * [Problem(CHAT, {})])
        (said,) = tokens.hf([call("stall")], add_special_tokens=False)["input_ids"]
        turn, waiting = [*said, tokens.stop_tokens[0]], []
        first = talk._rows[0].session
        first.abandon = lambda: waiting.extend((talk(1, turn), talk.ended(1, turn)))
        talk.abandon()
        for each in waiting:
            with pytest.raises(concurrent.futures.CancelledError):
                each.result()
        assert len(waiting) == 2 and tools.toolboxes.of({})._all == []


def test_rows_that_wait_for_a_call_make_none_once_sampling_has_failed(tokens):
    """Neither is their end waited for: one call hangs, and the others stand in line behind it."""
    with tools_of((), f"{HERE}:Counter", seconds=2.0, workers=1) as tools:
        toolbox = tools.toolboxes.of({})

        class Failing(Scripted):
            def completions(self, *arguments, turns, **_):
                (hangs,) = tokens.hf([call("stall")], add_special_tokens=False)["input_ids"]
                for row in (1, 2, 3):
                    turns(row, [*hangs, tokens.stop_tokens[0]])
                yield from super().completions(*arguments, turns=lambda *_: None)
                while not toolbox._all:
                    time.sleep(0.01)
                raise KeyboardInterrupt

        sampler = Sampler(Failing(tokens, [["Done."]]), tokens, FOUR, WIDTH, tools=tools)
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            rollouts.collect(sampler, {}, [Problem(CHAT, {})], jax.random.key(0))
        tools.toolboxes.executor.submit(len, "").result()
        assert time.monotonic() < began + 10 and len(toolbox._all) <= 2


def test_rewards_see_messages_and_environments(rollout):
    seen = {}

    def reward(completions, environments, start, **_):
        seen.update(completions=completions, start=start)
        return [environment.count for environment in environments]

    functions = [("mine", reward), ("Counter", scoring.environments_own("Counter"))]
    rewards, per_function = rollouts.score(rollout, functions, [1.0, 1.0])
    assert per_function.tolist() == [[1, 1], [3, 3], [5, 5], [1, 1]]
    assert rewards.shape == (1, 4) and seen["start"] == [1] * 4
    assert seen["completions"][1] == list(rollout.conversations[1].messages)


def test_metrics_tell_turns_and_calls(rollout):
    found = metrics.of_turns(rollout)
    lengths = [metrics._turn_lengths(given) for given in rollout.observation_mask]
    assert [len(each) for each in lengths] == [1, 3, 3, 2]
    expected = {
        "tools/call_frequency": 6 / 4,
        "tools/failure_frequency": 2 / 6,
        "tools/tokens": np.mean([given.sum() for given in rollout.observation_mask]),
        **{"turns/mean": 9 / 4, "turns/max": 3, "turns/limited": 1 / 4},
    }
    for turn, share in ((1, 1), (2, 3 / 4), (3, 2 / 4)):
        of_turn = [each[turn - 1] for each in lengths if len(each) >= turn]
        expected |= {f"turns/{turn}/share": share, f"turns/{turn}/mean_length": np.mean(of_turn)}
    assert found == pytest.approx(expected)
    assert metrics.of_turns(types.SimpleNamespace(conversations=None)) == {}


def test_the_log_of_completions_shows_turns(rollout):
    scored = rollouts.Scored(rollout, np.array([0]), np.ones((1, 4)), np.ones((4, 1)))
    row = metrics.completion_rows(scored, scored, np.zeros((1, 4)), {})[1]
    said = rollout.conversations[1].messages
    assert row["completion"] == conversations.transcript(said)
    assert json.loads(json.dumps(row["turns"])) == list(said) == row["turns"]
