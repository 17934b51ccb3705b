"""Tests replays of hand-made completions with known results, their prices, and reading of runs and files."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.data import tokenizer
from qerl_jax.generation import draft_search
from scripts import draft_replay as drafts
from scripts import recorded_completions, study_drafts
from scripts.draft_replay import Controller, Fixed, replay
from scripts.recorded_completions import Recording, Row
from scripts.study_drafts import Prices
from scripts.suffix_automaton import Draft


def row(completion, prompt=(900, 901)):
    return Row(tuple(prompt), tuple(completion))


def walk(groups, name, policy=None, before=()):
    """Replays groups as step 2, after the groups of step 1."""
    known = drafts.past({1: list(before), 2: groups}, 2, groups, recent=1)
    return replay(groups, [name], known, policy or Fixed(4))


def test_identical_siblings_in_lockstep_give_each_other_nothing_and_ended_ones_everything():
    group = [row(range(20))] * 4
    live = walk([group], "siblings")
    assert live.drafted.sum() == 0 and live.tokens_per_call == 1
    # 4 tokens and the one after them, four times.
    ended = walk([group], "ended")
    assert ended.emitted.tolist() == [5] * 16 and ended.accepted.tolist() == [4] * 16
    assert ended.live.tolist() == [4] * 4 and ended.positions.tolist() == [20] * 4


def test_a_row_drafts_from_siblings_what_they_have_said_and_no_more():
    # The second row says from its token 3 on what the first said from its token 0 on.
    group = [row([1, 2, 3, 4, 5, 6, 7, 8]), row([20, 21, 22, 1, 2, 3, 4, 5])]
    found = walk([group], "siblings", Fixed(2))
    of_second = found.call, found.position, found.drafted, found.accepted, found.emitted
    rows = np.stack(of_second, 1)[found.call < 6][1::2].tolist()  # then the first is alone
    assert rows == [
        *([call, call, 0, 0, 1] for call in range(4)),
        [4, 4, 2, 2, 3],  # 1 was said: 2 and 3 are drafted, and 4 is drawn
        [5, 7, 1, 1, 1],  # the first has said 5 by now: it is drafted, and ends the row
    ]


def test_rows_without_a_common_token_are_never_drafted():
    groups = [[row(range(i, i + 10)) for i in (0, 20)], [row(range(40, 50)), row(range(60, 70))]]
    for name in ("siblings", "own", "batch", "prompt", "earlier"):
        found = walk(groups, name)
        assert found.drafted.sum() == 0 and len(found.call) == 40, name


@pytest.mark.parametrize("most", [1, 2, 4, 8])
def test_a_completion_that_was_said_before_takes_a_call_for_each_full_draft(most):
    said = [row(range(30))]
    found = walk([said], "earlier", Fixed(most), before=[said])
    calls = -(-30 // (most + 1))
    assert len(found.call) == calls and found.emitted.sum() == 30
    other = [row(range(30), prompt=[7])]
    assert walk([said], "earlier", Fixed(most), before=[other]).drafted.sum() == 0
    assert len(walk([said], "history", Fixed(most), before=[other]).call) == calls


def test_acceptance_counts_only_tokens_that_were_tried():
    # One row ends inside of its draft, the other differs in its third token.
    rows, before = [row([1, 2]), row([1, 2, 9])], [[row([1, 2, 3, 4])]]
    found = study_drafts.statistics(walk([rows], "earlier", Fixed(4), before=before))
    assert found["acceptance"] == [1.0, 1.0, 0.0, *[None] * 5]
    assert found["tokens_per_call"] == 2.5 and found["without_draft"] == 0


def test_the_prompt_drafts_what_a_completion_copies_of_it():
    found = walk([[row([50, 11, 12, 13, 14, 51], prompt=[10, 11, 12, 13, 14, 15])]], "prompt")
    # 11 is not foreseen; then 12, 13, 14 come true and 15 does not.
    assert found.emitted.tolist() == [1, 1, 4] and found.accepted.tolist() == [0, 0, 3]
    assert found.drafted.tolist() == [0, 0, 4] and found.match.tolist() == [0, 0, 1]


def test_replays_emit_every_token_once_whatever_is_drafted():
    rng = np.random.default_rng(0)
    groups = [
        [row(rng.integers(0, 3, rng.integers(1, 30)).tolist(), prompt=[0, 1, i]) for _ in range(4)]
        for i in range(3)
    ]
    prices = Prices((1, 100), (1.0, 3.0))
    known = drafts.past({1: groups, 2: groups}, 2, groups, recent=1)
    rules = [
        Fixed(0),
        Fixed(3),
        drafts.ByMatch(),
        Controller(prices.time),
        Controller(prices.time, 8),
    ]
    for rule in rules:
        found = replay(groups, drafts.SOURCES, known, rule)
        assert found.emitted.sum() == sum(len(each.completion) for g in groups for each in g)
        assert (found.accepted <= found.drafted).all() and (found.emitted >= 1).all()
        assert found.live[0] == 12


def test_acceptance_is_learned_from_what_was_said_instead():
    learned, draft = drafts.Acceptance(), Draft(4, [1, 2, 3], [0.5, 0.5, 0.5])
    np.testing.assert_allclose(learned.chances("own", draft), [0.5, 0.25, 0.125])
    for _ in range(8):
        learned.learn("own", draft, [1, 9, 3])  # the third token was never tried
    # All three are of one kind: 16 were tried and 8 came true; then (8 + 2 * 0.5) / (16 + 2).
    np.testing.assert_allclose(learned.chances("own", draft), [0.5, 0.25, 0.125])
    learned.learn("own", draft, [1, 2, 3])
    np.testing.assert_allclose(learned.chances("own", draft)[0], 12 / 21)
    np.testing.assert_allclose(learned.chances("batch", draft)[0], 0.5)


def test_the_controller_takes_the_likeliest_tokens_and_none_where_they_do_not_pay():
    found = [Draft(1, [1, 2], [0, 0]), Draft(), Draft(1, [1, 2], [0, 0])]
    chances = [np.array([0.9, 0.8]), np.array([]), np.array([0.3, 0.1])]
    # 3 tokens for 1 ms, and a position more takes 0.1 ms: it must give 0.3 tokens and more.
    dear = Prices((3, 13), (1.0, 2.0))
    assert Controller(dear.time)(found, chances) == [2, 0, 0]
    cheap, dearest = Prices((3, 13), (1.0, 1.01)), Prices((3, 13), (1.0, 10.0))
    assert Controller(cheap.time)(found, chances) == [2, 0, 2]
    assert Controller(dearest.time)(found, chances) == [0, 0, 0]


def test_prices_by_hand():
    prices = Prices((1, 8, 16), (1.0, 2.0, 4.0))
    assert prices.time([8, 12, 16, 24]).tolist() == [2.0, 3.0, 4.0, 6.0]
    ended = walk([[row(range(20))] * 4], "ended")  # 5 tokens a call of every row
    assert ended.tokens_per_call == 5
    # 2 rows with 4 drafted tokens are 10 positions, 2.5 ms; without drafts they take 8/7 ms.
    np.testing.assert_allclose(prices.speedup(ended, 2), 5 * (8 / 7) / 2.5)
    np.testing.assert_allclose(prices.speedup(ended, 2, draft=4), prices.speedup(ended, 2))
    # Nothing is drafted, but 9 positions of each row are charged: 18 of 2 rows, 4.5 ms.
    none = walk([[row(range(20))] * 4], "siblings")
    assert prices.speedup(none, 2) == 1
    np.testing.assert_allclose(prices.speedup(none, 2, draft=8), (8 / 7) / 4.5)
    # A call with drafts takes 1 ms more, one without takes none.
    slow = Prices(prices.rows, prices.ms, overhead=1.0)
    np.testing.assert_allclose(slow.speedup(ended, 2), 5 * (8 / 7) / 3.5)
    assert slow.speedup(none, 2) == 1


def test_steps_of_both_models_are_those_that_were_measured():
    for model, ratio in (("7B", 1.27), ("32B", 1.39)):
        prices = study_drafts.measured(model)
        assert prices.rows == (1, 8, 16, 32, 64, 128)
        assert round(float(prices.time(32) / prices.time(8)), 2) == ratio


def test_a_step_without_drafts_takes_as_long_as_it_was_measured():
    groups = [[row(range(20 * i, 20 * i + 9 + i)) for i in range(8)]]
    sample = study_drafts.Sample(groups, drafts.past({1: groups}, 1, groups, recent=1))
    prices = study_drafts.measured("32B")
    assert study_drafts.long_step(["earlier"], sample, prices, drafts.Acceptance()) == 103.7


@pytest.fixture
def run(tmp_path):
    """Makes a run folder of two steps of one problem and two completions."""
    folder = tmp_path / "run"
    (folder / "completions").mkdir(parents=True)
    (folder / "config.toml").write_text(
        'output_dir = "runs/x"\nmax_steps = 2\n[model]\nmodel_name_or_path = "qerl-tiny"\n'
        '[data]\ndataset = "arithmetic"\n[rewards]\nfunctions = ["accuracy_reward"]\n'
        "[rollout]\nnum_generations = 2\ntemperature = 0.8\n"
    )
    entry = {"prompt": [{"role": "user", "content": "1+1?"}], "completion": "1+1=2"}
    length = len(tokenizer.load(TINY).encode(["1+1=2"])[0])
    ended, cut = {"length": length + 1, "stopped": True}, {"length": length, "stopped": False}
    for step in (1, 2):
        lines = [json.dumps(entry | how) + "\n" for how in (ended, cut)]
        (folder / f"completions/step_{step:06d}.jsonl").write_text("".join(lines))
    return folder


def test_a_run_folder_is_read_by_its_own_tokenizer(run):
    tokens = tokenizer.load(TINY)
    found = recorded_completions.read(run)
    ids = tuple(tokens.encode(["1+1=2"])[0])
    prompt = tuple(tokens.encode([[{"role": "user", "content": "1+1?"}]])[0])
    group = [Row(prompt, (*ids, tokens.stop_tokens[0])), Row(prompt, ids)]
    assert found == Recording("run", 0.8, {1: [group], 2: [group]}, 1.0)


def test_lines_and_tables_of_a_run(run, tmp_path, capsys, monkeypatch):
    out = tmp_path / "lines.jsonl"
    argv = ["study_drafts", f"tiny={run}", "--out", str(out), "--groups", "1"]
    monkeypatch.setattr("sys.argv", argv)
    study_drafts.main()
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(lines) == 2 * 9 * 6  # steps, sources, rules
    of = {(line["step"], line["source"], line["rule"]): line for line in lines}
    # What was said in step 1 is there in step 2: 8 tokens and one more in one call.
    assert of[1, "earlier", "8"]["tokens_per_call"] == 1
    assert of[2, "earlier", "8"]["tokens_per_call"] > 5
    assert of[2, "earlier", "controller"]["speedup"]["32B"]["8"] > 2
    printed = capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["study_drafts", "--table", str(out)])
    study_drafts.main()
    assert capsys.readouterr().out in printed


def test_a_file_of_ids_needs_no_tokenizer_and_one_of_texts_does(tmp_path):
    file = tmp_path / "mine.jsonl"
    entry = {"prompt": [1], "completion": [2, 3], "group": 0, "epoch": 5}
    file.write_text(json.dumps(entry) + "\n" + json.dumps(entry | {"group": 1}) + "\n")
    each = [[Row((1,), (2, 3))], [Row((1,), (2, 3))]]
    assert recorded_completions.read(file) == Recording("mine", None, {5: each}, None)
    file.write_text(json.dumps(entry | {"prompt": "a", "completion": "b"}) + "\n")
    with pytest.raises(FileNotFoundError, match="--tokenizer"):
        recorded_completions.read(file)
    ended = {"prompt": "a", "completion": "1", "finish_reason": "stop", "num_tokens": 2}
    file.write_text(json.dumps(entry | ended) + "\n" + json.dumps(entry | ended) + "\n")
    found = recorded_completions.read(file, temperature=0.5, tokenizer_folder=str(TINY))
    ((one, two),) = found.steps[5]
    assert one == two and one.completion[-1] == tokenizer.load(TINY).stop_tokens[0]
    assert found.same_length == 1 and found.temperature == 0.5 and len(one.completion) == 2
    file.write_text(json.dumps({"prompt": [1], "completion": [2], "group": 0}) + "\n")
    with pytest.raises(ValueError, match="line 1.*needs epoch"):
        recorded_completions.read(file)


def test_runs_without_completions_or_with_tools_are_refused(run):
    file = run / "completions/step_000002.jsonl"
    line = json.loads(file.read_text().splitlines()[0]) | {"turns": []}
    file.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match="without tools"):
        recorded_completions.read(run)
    for each in (run / "completions").iterdir():
        each.unlink()
    with pytest.raises(FileNotFoundError, match="log_completions"):
        recorded_completions.read(run)


@pytest.mark.slow
def test_the_engine_source_finds_matches_as_long_as_the_engine_does():
    draw = np.random.default_rng(0)
    text = lambda n: tuple(draw.integers(0, 4, n).tolist())
    groups = [[Row(prompt, text(30)) for _ in range(2)] for prompt in (text(5), text(3))]
    last = [[text(20)], []]
    known = dataclasses.replace(drafts.past({}, 0, groups, 8), last=last)
    rows = [row for group in groups for row in group]
    subject, at = drafts.EngineSource(groups, known), [0] * 4
    for _ in range(12):
        said = [row.completion[: at[n]] for n, row in enumerate(rows)]
        held = np.full((4, 40), -1, np.int32)
        for n, row in enumerate(rows):
            whole = (*row.prompt, *said[n])
            held[n, : len(whole)] = whole
        prompts = [group[0].prompt for group in groups]
        ended = [
            [*itertools.chain(*((*prompt, *each, -1) for each in texts))]
            for prompt, texts in zip(prompts, last, strict=True)
        ]
        ended = [
            one + [*itertools.chain(*((*prompt, *said[n], -1) for n in pair if at[n] == 30))]
            for one, pair, prompt in zip(ended, ((0, 1), (2, 3)), prompts, strict=True)
        ]
        ended = np.array([each + [-1] * (160 - len(each)) for each in ended])[[0, 0, 1, 1]]
        texts = draft_search.Texts(ended, np.array([0, 0, 1, 1]))
        lengths = np.array([len(row.prompt) + at[n] for n, row in enumerate(rows)])
        found = draft_search.search(held, lengths, texts)
        for n in range(4):
            assert subject.draft(n, ()).match == found.match[n]
        for n, row in enumerate(rows):
            step = int(draw.integers(0, 6))
            tokens = row.completion[at[n] : at[n] + step]
            subject.emit(n, tokens)
            at[n] += len(tokens)
    assert 30 in at
