"""Tests `Policy.generate`, its streams, and `qerl generate`, on the base in the package."""

import dataclasses
import functools
import json
import pathlib
import re

import jax
import numpy as np
import pytest

import qerl_jax
from pallas_kernels import runtime
from qerl_jax import config
from qerl_jax.api import completion_file
from qerl_jax.checkpoint import peft
from qerl_jax.checkpoint.policy import PolicySource, find_policy, load_base
from qerl_jax.cli import main
from qerl_jax.cli.generate import _note_prompts_of_run, prompts_of
from qerl_jax.config import LoraConfig, ToolsConfig
from qerl_jax.generation.sampling_params import EngineLimits, SamplingParams
from qerl_jax.model import fused_decode, transformer
from qerl_jax.system.files import Progress
from qerl_jax.tools.conversations import transcript
from qerl_jax.tools.stock_tools import calculator

QUICKSTART = pathlib.Path(__file__).parents[2] / "configs" / "quickstart.toml"
PROMPTS = ["What is (5-3)*3?", "What is 20+15?", "What is 31-12?", "What is 9*2+7?"]
LIMIT = {"max_tokens": 12}
SHORT = LIMIT | {"temperature": 1.5}
# The same for the command.
OPTIONS = ["--dtype", "float32", "--max-tokens", "12", "--temperature", "1.5"]
LOADED = "base: qerl-tiny, held in nvfp4\n"  # what the commands say of it


@functools.cache
def policy():
    return qerl_jax.load(dtype="float32", quiet=True)


def ask(prompts, limits=EngineLimits(), **options):
    """Returns the texts of all completions."""
    limited = dataclasses.replace(policy(), limits=limits)
    return [row.text for row in limited.completions(prompts, **options)]


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@functools.cache
def texts():
    return ask(PROMPTS, seed=range(4), **SHORT)


@pytest.mark.slow
def test_completions_come_in_the_order_of_the_prompts():
    rows = list(policy().completions(PROMPTS[:2], n=2, **SHORT))
    assert [row.text for row in rows] == ask(PROMPTS[:2], n=2, **SHORT)
    assert len({row.text for row in rows}) > 2
    for row in rows:
        assert row.text == policy().tokenizer.decode(row.token_ids)
        assert len(row.logprobs) == len(row.token_ids) <= 12
        stopped = row.token_ids[-1] in policy().tokenizer.stop_tokens
        assert row.finish_reason == ("stop" if stopped else "length")


@pytest.mark.slow
def test_slow_sampling_is_told_once_with_its_reason(monkeypatch, capsys):
    assert policy().slow_because is None  # no fast card
    with runtime.on(runtime.H200):
        assert "sampling goes without the fused layers" in policy().slow_because
    monkeypatch.setattr(fused_decode, "slow_because", lambda model, rows: f"slow: {rows} rows")
    few = dataclasses.replace(policy(), limits=EngineLimits(3))
    assert few.slow_because == "slow: 3 rows"
    words = ["generate", *PROMPTS[:2], "--dtype", "float32", "--max-tokens", "2"]
    assert main.main(words) == 0
    assert capsys.readouterr().err == f"{LOADED}slow: 128 rows\n"


@pytest.mark.slow
def test_a_prompt_with_its_own_seed_gets_the_same_text_in_any_company():
    moved = ask(PROMPTS[::-1], seed=range(3, -1, -1), **SHORT)
    assert moved == texts()[::-1] and len(set(moved)) == 4
    assert ask(PROMPTS, seed=7, **SHORT) != texts()
    with pytest.raises(ValueError, match="seed: got 2; must be one, or one for each"):
        ask(PROMPTS, seed=(1, 2))
    assert ask([]) == [] == policy().generate([])


@pytest.mark.slow
def test_a_bounded_cache_makes_prompts_wait_and_changes_no_text():
    assert ask(PROMPTS, EngineLimits(kv_cache_tokens=96), seed=range(4), **SHORT) == texts()
    # A row's own tokens count, not the bound that they are padded to.
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    longest = max(map(len, policy().tokenizer.encode(chats)))
    fits = EngineLimits(kv_cache_tokens=longest - 1 + SHORT["max_tokens"])
    assert ask(PROMPTS, fits, seed=range(4), **SHORT) == texts()
    with pytest.raises(ValueError, match="space for 32 tokens; a row may need"):
        ask(PROMPTS, EngineLimits(kv_cache_tokens=32), max_tokens=60)


def test_a_stream_shows_the_completion_piece_by_piece():
    for row, text in enumerate(texts()):
        pieces = list(policy().stream(PROMPTS[row], seed=[row], **SHORT))
        assert "".join(pieces) == text and all(pieces)
    assert len(list(policy().stream(PROMPTS[0], max_tokens=20, ignore_eos=True))) > 1


def test_a_stop_string_is_not_shown_not_even_its_beginning():
    whole = texts()[3]
    stop = whole[9:11]
    options = {"seed": [3], "stop": [stop, whole[3:9] + "never"]} | SHORT
    assert "".join(policy().stream(PROMPTS[3], **options)) == whole[: whole.index(stop)]
    (completion,) = policy().completions(PROMPTS[3:], **options)
    assert completion.text == whole[: whole.index(stop)]
    assert completion.finish_reason == "stop"
    decode = policy().tokenizer.decode
    assert stop in decode(completion.token_ids) and stop not in decode(completion.token_ids[:-1])


def test_ignoring_the_end_token_runs_to_the_limit():
    stops, options = policy().tokenizer.stop_tokens, {"seed": range(4), "temperature": 0.0} | LIMIT
    free = list(policy().completions(PROMPTS, **options))
    rows = list(policy().completions(PROMPTS, ignore_eos=True, **options))
    assert {row.finish_reason for row in free} == {"stop", "length"}
    for row, longer in zip(free, rows, strict=True):
        assert (row.token_ids[-1] in stops) == (row.finish_reason == "stop")
        assert longer.finish_reason == "length" and len(longer.token_ids) == 12
        np.testing.assert_array_equal(longer.token_ids[: len(row.token_ids)], row.token_ids)


@pytest.mark.parametrize(
    "field,value",
    [("n", 0), ("max_tokens", 0), ("temperature", -1.0), ("top_p", 0.0), ("stop", "text")]
    + [("seed", 2**32), ("seed", (1, -1)), ("seed", None), ("seed", 0.5)]
    + [("n", 2.0), ("max_tokens", 9.5), ("top_k", 2.5), ("drafts", "on"), ("stop", [1])]
    + [("seed", {1: 2})],
)
def test_an_impossible_option_names_itself(field, value):
    with pytest.raises(ValueError, match=f"{field}: got "):
        SamplingParams(**{field: value})


def test_numbers_of_numpy_count_as_pythons_do():
    params = SamplingParams(n=np.int64(2), max_tokens=np.int32(8), top_k=np.uint8(3))
    assert {type(each) for each in (params.n, params.max_tokens, params.top_k)} == {int}
    assert params == SamplingParams(n=2, max_tokens=8, top_k=3)


@pytest.mark.slow
def test_a_completion_ends_where_the_models_context_does():
    (whole,) = policy().completions(PROMPTS[:1], max_tokens=10_000, ignore_eos=True, temperature=0)
    (ids,) = policy().tokenizer.encode([({"role": "user", "content": PROMPTS[0]},)])
    assert len(ids) + len(whole.token_ids) == 256 and whole.finish_reason == "length"
    with pytest.raises(ValueError, match="tokens; the model was made for 256"):
        ask(["1" * 300])


def test_generate_writes_a_row_per_completion_beside_the_columns_of_its_prompt(tmp_path):
    prompts, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    rows = [{"prompt": text, "id": n, "seed": n} for n, text in enumerate(PROMPTS)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = ["--input", str(prompts), "--output", str(out)]
    assert main.main(["generate", *files, *OPTIONS]) == 0
    written = read(out)
    assert [row["completion"] for row in written] == texts()
    assert [{name: row[name] for name in rows[0]} for row in written] == rows
    assert all(row["num_tokens"] <= 12 and row["cumulative_logprob"] < 0 for row in written)


@pytest.mark.slow
def test_a_file_of_completions_goes_on_where_it_was_stopped(tmp_path, capsys, monkeypatch):
    command = ["generate", *PROMPTS, *OPTIONS, "--n", "2", "--output"]
    asked = lambda name, *more: main.main([*command, str(tmp_path / name), *more])
    assert asked("whole.jsonl") == 0
    *progress, last = capsys.readouterr().out.splitlines()
    assert last == f"8 completions in {tmp_path / 'whole.jsonl'}"
    # On a busy machine it tells how far it is.
    assert all(re.fullmatch("[1-8]/8 completions", line) for line in progress)

    add, left = Progress.add, [3]

    def stopping(self, values):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        add(self, values)

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "add", stopping)
        assert asked("out.jsonl") == 130
    partial = tmp_path / "out.jsonl.partial"
    assert capsys.readouterr().err == f"{LOADED}qerl generate: interrupted\n"
    assert not (tmp_path / "out.jsonl").exists() and len(partial.read_text().splitlines()) == 4

    assert asked("out.jsonl", "--top-k", "5", "--seed", "1") == 2
    assert "other settings (seed, top_k)" in capsys.readouterr().err
    with partial.open("ab") as file:
        file.write('{"prompt": "cut ü'.encode()[:-1])
    assert asked("out.jsonl") == 0
    assert f"3/8 completions are in {partial}" in capsys.readouterr().out
    actual, expected = (read(tmp_path / name) for name in ("out.jsonl", "whole.jsonl"))
    # Fewer prompts that are prefilled at a time may round otherwise.
    for row, wanted in zip(actual, expected, strict=True):
        wanted["cumulative_logprob"] = pytest.approx(wanted["cumulative_logprob"], abs=1e-4)
        assert row == wanted
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.jsonl", "whole.jsonl"]


def test_other_columns_beside_the_same_prompts_and_something_else_are_another_file(
    tmp_path, capsys
):
    source, params = find_policy(None, None), SamplingParams()
    rows = ([{"prompt": "a", "answer": n}] for n in range(2))
    one, other = (completion_file._identity(source, each, [], params, None) for each in rows)
    partial = tmp_path / "out.jsonl.partial"
    with Progress(partial, one) as progress:
        progress.add(["a row"])
    with pytest.raises(ValueError, match="settings .prompts.sha256.: choose another file"):
        Progress(partial, other)
    partial.write_text('{"mine": "only copy"}\n')
    assert main.main(["generate", "a", "--output", str(tmp_path / "out.jsonl")]) == 2
    assert str(partial) in capsys.readouterr().err and "only copy" in partial.read_text()


@pytest.mark.slow
def test_generate_streams_one_prompt_and_prints_the_completions_of_several(capsys):
    assert main.main(["generate", PROMPTS[1], *OPTIONS, "--seed", "1"]) == 0
    assert capsys.readouterr().out == "".join(policy().stream(PROMPTS[1], seed=1, **SHORT)) + "\n"
    assert main.main(["generate", *PROMPTS, *OPTIONS]) == 0
    expected = ask(PROMPTS, seed=0, **SHORT)
    assert capsys.readouterr().out == "".join(text + "\n" for text in expected)


def test_generate_takes_the_adapter_and_the_settings_of_a_run_folder(tmp_path, capsys):
    cfg = dataclasses.replace(config.load(QUICKSTART), lora=LoraConfig(4, 4.0))
    config.write_run(tmp_path, cfg)
    model, frozen, _ = load_base(cfg.model, cfg.lora)
    params = transformer.init_params(model, frozen, jax.random.key(0))
    # B of a new adapter is zero: it is made to matter.
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)
    peft.export_adapter(tmp_path / "adapter", params, cfg.lora, cfg.model.model_name_or_path)
    options = ["--max-tokens", "12", "--temperature", "0"]
    shown = []
    for adapter in (tmp_path, tmp_path / "adapter"):
        assert main.main(["generate", PROMPTS[0], "--adapter", str(adapter), *options]) == 0
        shown.append(capsys.readouterr().out)
    variables = {"params": params, "frozen": frozen}
    trained = dataclasses.replace(policy(), model=model, variables=variables)
    text = trained.generate(PROMPTS[0], temperature=0.0, **LIMIT)[0].text
    assert shown == [text + "\n"] * 2 and [text] != ask(PROMPTS[:1], temperature=0.0, **LIMIT)


# The base writes "<think>3+4=": a call that it makes without being taught.
CALLS = {"call_pattern": "<think>(?P<argument>[^=]*)=", "max_tool_calling_iterations": 1}
THINKS = ToolsConfig(("calculator",), max_reply_tokens=4, **CALLS)
TURNS = {"n": 2, "max_tokens": 60, "temperature": 0.5}


@functools.cache
def able():
    return policy().with_tools(THINKS)


@pytest.mark.slow
def test_a_policy_with_tools_gives_whole_conversations():
    rows = list(able().completions(PROMPTS[:2], **TURNS))
    assert {len(row.messages) for row in rows} == {1, 3}
    for row in rows:
        if len(row.messages) == 1:
            assert row.text == row.messages[0]["content"] and not row.given.any()
            continue
        question, answer, last = row.messages
        (call,) = question["tool_calls"]
        assert answer["content"] == calculator(**call["function"]["arguments"])
        assert row.text == last["content"]
        decode = policy().tokenizer.decode
        assert answer["content"] in decode(row.token_ids[row.given])
        assert decode(row.token_ids[np.flatnonzero(row.given)[-1] + 1 :]).endswith(row.text)
        assert not row.logprobs[row.given].any() and row.logprobs[~row.given].any()
    later = able().completions(PROMPTS[:2], first=1, **TURNS)
    for row, expected in zip(later, rows[1:], strict=True):
        np.testing.assert_array_equal(row.token_ids, expected.token_ids)
        assert (row.index, row.messages) == (expected.index, expected.messages)
    with pytest.raises(ValueError, match="tools: got .*; a stream calls no tools"):
        next(able().stream(PROMPTS[0]))
    for one, columns in ((policy(), [{}]), (able(), [{}, {}])):
        with pytest.raises(ValueError, match="columns: .* one for each of 1 prompts, and go with"):
            one.completions(PROMPTS[:1], columns=columns)


@pytest.mark.slow
def test_generate_calls_the_tools_of_a_config(tmp_path, capsys):
    cfg = dataclasses.replace(config.load(QUICKSTART), tools=THINKS)
    config.write_run(tmp_path, cfg)
    options = ["--n", "2", "--max-tokens", "60", "--temperature", "0.5", "--dtype", "float32"]
    asked = ["generate", *PROMPTS[:2], *options, "--tools"]
    expected = list(able().completions(PROMPTS[:2], **TURNS))
    assert main.main([*asked, str(tmp_path / "config.toml")]) == 0
    shown = "".join(transcript(row.messages) + "\n" for row in expected)
    captured = capsys.readouterr()
    assert captured.out == shown and "[calculator] " in shown
    assert "warning: tools: the chat template has no place for them" in captured.err
    out = tmp_path / "out.jsonl"
    assert main.main([*asked, str(tmp_path), "--output", str(out)]) == 0
    written = read(out)
    assert [row["turns"] for row in written] == [row.messages for row in expected]
    assert [row["completion"] for row in written] == [row.text for row in expected]
    assert main.main([*asked, str(QUICKSTART)]) == 2
    assert "has no section [tools]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv,message",
    [
        ([], "give prompts, or --input"),
        (["a", "--input", "b.txt"], "give prompts, or --input"),
        (["a", "--output", "b.csv"], "must be a .jsonl file"),
        (["a", "--output", "{folder}/none/b.jsonl"], "there is no such folder"),
        (["--input", "{folder}/none.jsonl"], "none.jsonl'; no such file"),
        (["a", "--output", "{folder}/rows.jsonl"], "is there already"),
        (["a\udc80"], r"prompt: holds '\udc80', half a character"),
        (["a", "--stop", "a\udc80"], r"stop: holds '\udc80', half a character"),
        (["a", "--top-p", "2"], "top_p: got 2.0"),
        (["a", "--adapter", "/nowhere"], "adapter: got '/nowhere'; has no adapter_config.json"),
        (["a", "--seed", "-1"], "seed: got -1; must be an integer in [0, 2**32)"),
        (["a", "--max-concurrent", "0"], "max_concurrent: got 0"),
        (["a", "--kv-cache-tokens", "0"], "kv_cache_tokens: got 0"),
        (["a", "--kv-cache-fraction", "1"], "kv_cache_fraction: got 1.0; must be in (0, 1)"),
        (["a", "--kv-cache-fraction", "0.5"], "this device does not report its memory: give kv"),
        (["a", *"--kv-cache-fraction 0.5 --kv-cache-tokens 9".split()], "beside kv_cache_tokens"),
    ],
)
def test_generate_says_what_is_wrong_before_it_reads_a_model(argv, message, tmp_path, capsys):
    (tmp_path / "rows.jsonl").touch()
    assert main.main(["generate", *(word.format(folder=tmp_path) for word in argv)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "row,message",
    [
        ('{"question": "b"}', 'row 2: must have a "prompt"'),
        ('{"prompt": []}', 'row 2: must have a "prompt"'),
        ('{"prompt": ["b"], "seed": 1}', 'row 2: must have a "prompt"'),
        ('{"prompt": "b"}', "row 2: either all rows have a seed or none"),
        ('{"prompt": "b", "seed": "1"}', "row 2: seed: got '1'; must be an integer"),
        ('{"prompt": "b", "seed": 4294967296}', "row 2: seed: got 4294967296; must be an integer"),
        (r'{"prompt": "b", "seed": 1, "note": "\ud83d"}', r"row 2: holds '\ud83d', half a"),
        ('{"prompt": [{"role": "user", "content": null}], "seed": 1}', 'must have a "prompt"'),
        ('{"prompt": "b", "seed": 1, "completion": "c"}', "row 2: has a column 'completion'"),
        ("{", "row 2: not JSON"),
    ],
)
def test_generate_refuses_a_row_by_its_number(row, message, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('\ufeff{"prompt": "a\u2028b", "seed": 0}\n' + row + "\n")
    out = tmp_path / "out.jsonl"
    assert main.main(["generate", "--input", str(path), "--output", str(out)]) == 2
    assert message in capsys.readouterr().err and not out.exists()


def test_a_prompt_that_cannot_be_sampled_leaves_no_output(tmp_path, capsys):
    out = tmp_path / "out.jsonl"
    assert main.main(["generate", "a", "1 + " * 200, "--output", str(out)]) == 2
    assert "prompt 1: got " in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_generate_says_which_instruction_of_the_run_a_prompt_lacks(capsys):
    cfg = config.load(QUICKSTART.with_name("gsm8k_qwen2.5_7b.toml"))
    source = PolicySource(cfg.model, run=cfg)
    chat = prompts_of([{"prompt": "2+2?"}], "think-answer")[0]
    _note_prompts_of_run(source, [chat])
    _note_prompts_of_run(PolicySource(cfg.model), ["2+2?"])
    assert capsys.readouterr().err == ""
    _note_prompts_of_run(source, ["2+2?"])
    said = capsys.readouterr().err
    assert "trained with a system prompt" in said and "--system-prompt think-answer" in said
    data = dataclasses.replace(cfg.data, system_prompt="", prompt_template="{prompt} Think.")
    _note_prompts_of_run(PolicySource(cfg.model, run=dataclasses.replace(cfg, data=data)), ["a"])
    assert "data.prompt_template" in capsys.readouterr().err
