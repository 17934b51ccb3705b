"""Tests text to ids and back with the tokenizer that ships with the package."""

import dataclasses
import itertools
import json
import logging
import pathlib
import shutil

import numpy as np
import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from qerl_jax.data import rust_tokenizer, tokenizer

TINY = pathlib.Path(tokenizer.__file__).parents[1] / "assets" / "tiny"
CHAT = [{"role": "system", "content": "Think."}, {"role": "user", "content": "What is 12 + 30?"}]


@pytest.fixture(scope="module")
def tiny():
    return tokenizer.load(TINY)


@pytest.fixture
def copy(tmp_path):
    """Makes a folder with the tiny tokenizer's files, and a function that changes its configuration."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, tmp_path)

    def change(**fields):
        path = tmp_path / "tokenizer_config.json"
        config = json.loads(path.read_text()) | fields
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return tmp_path, change


def ids_of(tiny, *marks):
    return tuple(tiny.hf.get_vocab()[mark] for mark in marks)


def test_tiny_stops_at_the_end_of_a_turn_and_pads_with_another_token(tiny):
    assert tiny.stop_tokens == ids_of(tiny, "<|im_end|>")
    assert (tiny.pad_token,) == ids_of(tiny, "<|endoftext|>")
    assert tiny.num_tokens == len(AutoTokenizer.from_pretrained(TINY))


def test_a_chat_is_rendered_with_its_generation_prompt(tiny):
    assert tiny.render([CHAT])[0] == (
        "<|im_start|>system\nThink.<|im_end|>\n"
        "<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_plain_string_is_encoded_as_it_is(tiny):
    text = "12 + 30 ="
    (ids,) = tiny.encode([text])
    assert tiny.hf.convert_ids_to_tokens(ids)[0] == "1"
    assert tiny.decode(ids) == text


def test_prompts_are_encoded_apart_and_without_padding(tiny):
    together = tiny.encode(["1", CHAT, "1 + 2"])
    assert together == [tiny.encode([prompt])[0] for prompt in ("1", CHAT, "1 + 2")]
    assert tiny.encode([]) == []
    hf = AutoTokenizer.from_pretrained(TINY)
    assert together[1] == hf.apply_chat_template(CHAT, add_generation_prompt=True)["input_ids"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_bos_token": True, "bos_token": "<|im_start|>"},
        {"tokenizer_class": "LlamaTokenizer"},
    ],
    ids=str,
)
def test_without_transformers_ids_and_texts_are_the_same(fields, copy):
    folder, change = copy
    change(**fields)
    ours, hf = tokenizer.load(folder).hf, AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, rust_tokenizer.RustTokenizer)
    texts = ["12+30=<answer> 42 .</answer><|im_end|>", " \té京 ", "", "a" * 300]
    for adds in (True, False):
        theirs = hf(texts, add_special_tokens=adds)["input_ids"]
        assert ours(texts, add_special_tokens=adds) == {"input_ids": theirs}
        for skip, row in itertools.product((True, False), theirs):
            options = {"skip_special_tokens": skip, "clean_up_tokenization_spaces": False}
            assert ours.decode(np.array(row), **options) == hf.decode(row, **options)
    for method in ("get_vocab", "get_added_vocab"):
        assert getattr(ours, method)() == getattr(hf, method)()
    assert ours.convert_ids_to_tokens([0, 421, 10**6]) == hf.convert_ids_to_tokens([0, 421, 10**6])
    for field in dataclasses.fields(ours)[1:]:
        assert getattr(ours, field.name) == getattr(hf, field.name), field.name


def test_a_tokenizer_that_was_read_before_is_read_without_transformers(copy, tmp_path, monkeypatch):
    """Until a file of it changes, or what was kept is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rust_tokenizer, "_MOST_KEPT", 2)
    folder, change = copy
    shared, asked = rust_tokenizer.shared_pool, []
    monkeypatch.setattr(rust_tokenizer, "shared_pool", lambda: asked.append(1) or shared())

    def read():
        asked.clear()
        return tokenizer.load(folder).hf, len(asked)

    (first, begun), (again, then) = read(), read()
    assert (begun, then) == (1, 0) and again.get_vocab() == first.get_vocab()
    assert dataclasses.replace(again, rust=None) == dataclasses.replace(first, rust=None)
    (kept,) = (tmp_path / "cache" / "qerl_jax" / "tokenizers").iterdir()
    for damaged in (kept.read_bytes()[:-9], kept.read_bytes().replace(b"42", b"43", 1), b"{}"):
        kept.write_bytes(damaged)
        assert read()[1] == 1 and read()[1] == 0
    for number in range(3):
        change(model_max_length=100 + number)
        assert read()[1] == 1
    assert len([*kept.parent.iterdir()]) == 2


def test_a_tokenizer_that_encodes_in_another_way_is_that_of_transformers(copy):
    folder, change = copy
    change(split_special_tokens=True)
    tokens, text = tokenizer.load(folder), "1<|im_end|>"
    assert isinstance(tokens.hf, PreTrainedTokenizerBase)
    assert len(tokens.ids([text])[0]) > 2 and tokens.decode(tokens.ids([text])[0]) == text


def test_decoding_drops_the_chat_marks_and_keeps_the_tags(tiny):
    text = "<think>12 + 30 , so</think>\n<answer> 42 .</answer>"
    (ids,) = tiny.encode([f"<|im_start|>{text}<|im_end|><|endoftext|>"])
    assert ids[-2:] == list(ids_of(tiny, "<|im_end|>", "<|endoftext|>"))
    assert tiny.decode(ids) == text


@pytest.mark.parametrize(
    "listed,extra",
    [([421, 7, 9], (7, 9)), (7, (7,)), (0, (0,)), ([], ()), (None, ()), ("absent", ())],
)
def test_ends_of_sequence_in_the_generation_config_are_stop_tokens(copy, listed, extra):
    folder, _ = copy
    config = {} if listed == "absent" else {"eos_token_id": listed}
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert tokenizer.load(folder).stop_tokens == (421, *extra)


def test_ends_of_sequence_in_both_configs_count(copy):
    folder, _ = copy
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [421, 7]}))
    assert tokenizer.load(folder).stop_tokens == (421, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    assert tokenizer.load(folder).stop_tokens == (421, 9, 7)


def test_a_tokenizer_without_its_vocabulary_is_refused(copy):
    folder, _ = copy
    (folder / "tokenizer.json").unlink()
    (folder / "config.json").write_text((TINY / "config.json").read_text())
    with pytest.raises(ValueError, match="tokenizer: got .*; has no file with a vocabulary"):
        tokenizer.load(folder)


def test_a_text_longer_than_the_tokenizers_files_say_is_encoded_quietly(copy, caplog, monkeypatch):
    folder, change = copy
    change(model_max_length=4)
    tokens = tokenizer.load(folder)  # and transformers, which sets up its logger
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    assert len(tokens.encode(["1+2=" * 9])[0]) > 4 and not caplog.records


def test_an_end_of_sequence_that_is_no_token_ends_nothing_and_is_named(copy, capsys):
    folder, _ = copy
    ends = {"eos_token_id": [-1, 7, 2**40, 426]}  # the ids end at 425
    (folder / "generation_config.json").write_text(json.dumps(ends))
    assert tokenizer.load(folder).stop_tokens == (421, 7)
    assert f"eos_token_id names {[-1, 426, 2**40]}, which are no tokens" in capsys.readouterr().err


@pytest.mark.parametrize("listed", ["</s>", {"a": 1}, [None], [[1]], True])
def test_an_end_of_sequence_that_is_no_id_is_refused(copy, listed):
    folder, _ = copy
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    with pytest.raises(ValueError, match="generation_config.json: eos_token_id.*must be an id"):
        tokenizer.load(folder)


def test_a_template_in_a_file_of_its_own_is_found(copy):
    folder, change = copy
    change(chat_template=None)
    text = json.dumps({"chat_template": "{{ messages[0].content }}?"})
    (folder / "chat_template.json").write_text(text)
    assert tokenizer.load(folder).render([CHAT]) == ["Think.?"]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert tokenizer.load(folder).render([CHAT, "x"]) == ["Think.!", "x"]


def test_the_chat_template_is_told_the_options(copy):
    folder, change = copy
    question = "{% if thinks is not defined or thinks %}?{% endif %}"
    change(chat_template="{{ messages[0].content }}" + question)
    assert tokenizer.load(folder).render([CHAT]) == ["Think.?"]
    quiet = tokenizer.load(folder, {"thinks": False})
    assert quiet.render([CHAT]) == ["Think."]
    assert quiet.encode([CHAT]) == tokenizer.load(folder).encode(["Think."])


@pytest.mark.parametrize("name", ["enable_thinking", "messages"])
def test_an_option_that_the_template_does_not_read_is_refused(copy, name):
    folder, _ = copy
    with pytest.raises(ValueError, match=f"chat_template_kwargs: got '{name}'; the chat template"):
        tokenizer.load(folder, {name: False})


def test_a_tokenizer_without_chat_template_takes_texts_and_says_what_chats_need(copy):
    folder, change = copy
    change(chat_template=None)
    plain = tokenizer.load(folder)
    assert plain.render(["x"]) == ["x"] and plain.encode(["x"]) == plain.encode(("x",))
    with pytest.raises(ValueError, match=f"{folder.name}'; has no chat template.*data.apply_chat"):
        plain.render(["x", CHAT])
    with pytest.raises(ValueError, match="chat_template_kwargs: got 'thinks'"):
        tokenizer.load(folder, {"thinks": False})


def test_an_incomplete_tokenizer_is_refused(copy):
    folder, change = copy
    change(eos_token=None, chat_template="{{ messages[0].content }}")
    with pytest.raises(ValueError, match="names no end-of-sequence token"):
        tokenizer.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=f"cannot read the one in .*{folder.name}"):
        tokenizer.load(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=f"{folder.name}'; has no tokenizer.json"):
        tokenizer.load(folder)
