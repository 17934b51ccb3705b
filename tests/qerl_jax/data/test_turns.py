"""Tests what a tokenizer learns from its chat template, on templates whose turns are known by reading them."""

import datetime
import json
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from qerl_jax.data import tokenizer
from tests.qerl_jax.data.test_tokenizer import CHAT, copy, ids_of, tiny  # noqa: F401 (fixtures)

END, START, TEXT_END = "<|im_end|>", "<|im_start|>", "<|endoftext|>"


def chatml(after, before=START + "{{ m.role }}\n", prompt=START + "assistant\n"):
    """A template of turns: what is before and after a turn's text, and the end of a prompt."""
    turns = "{% for m in messages %}" + before + "{{ m.content }}" + after + "{% endfor %}"
    return turns + "{% if add_generation_prompt %}" + prompt + "{% endif %}"


ADDED = "it is a stop token too"
LATER = "{% if loop.last %}" + END + "{% else %}" + START + "{% endif %}"
REASONING = START + "{{ m.role }}\n{{ m.reasoning_content }}" + END
CALLS = "{% for c in m.tool_calls %}" + END + "{{ c.function.name }}{% endfor %}" + END
NEEDS_SYSTEM = "{{ raise_exception('x') if messages[0].role != 'system' }}"
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}[I]{{ m.content }}[/I]{% else %}"
    " {{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)
# Template, whether <|im_end|> becomes a stop token, and what the note says if there is one.
CASES = {
    "the base of Qwen2.5": (chatml(END + "\n"), True, ADDED),
    "a space before the end": (chatml(" " + END), True, ADDED),
    "a stop token": (chatml(TEXT_END), False, ""),
    "a stop token after a turn's and its end": (chatml(END + "\n" + TEXT_END), True, ADDED),
    "a stop token after a word": (chatml("##" + TEXT_END), False, ""),
    "a needed system message": (NEEDS_SYSTEM + chatml(END), True, ADDED),
    "a content of parts": (
        chatml(END).replace("m.content", "m.content[0].text"),
        False,
        "drops the text",
    ),
    "white space": (chatml("\n\n"), False, ""),
    "an end between turns": (chatml("{% if not loop.last %}" + END + "{% endif %}"), False, ""),
    "another end of the last turn": (chatml(LATER), True, ADDED),
    "a word": (chatml("###END"), False, "warning: .* ends a turn with '###END', in which there"),
    "a word and a token": (chatml("##" + END), False, r"warning: .* with '##<\|im_end\|>', in"),
    "the end after the reasoning": (chatml(END, REASONING), False, "also written inside of turns"),
    "the end after each call": (chatml(CALLS), False, "also written inside of turns"),
    "no start of the turn": (chatml(TEXT_END, prompt=""), False, r"add_generation_.*assistant\\n'"),
    "turns without a start": (LLAMA2, False, ""),
    "a start after every turn": (chatml(END, prompt="") + START + "assistant\n", True, ADDED),
    "no answers": ("{{ messages[0].content }}", False, ""),
    "refused": (
        "{{ raise_exception('x') if messages[-1].role != 'user' }}{{ messages[-1].content }}",
        False,
        "",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_end_of_a_turn_is_a_stop_token_where_nothing_else_is(name, copy, tiny):  # noqa: F811
    folder, change = copy
    template, is_added, note = CASES[name]
    change(chat_template=template, eos_token=TEXT_END)
    tokens = tokenizer.load(folder)
    assert tokens.stop_tokens == ids_of(tiny, TEXT_END, *[END] * is_added)
    assert (421 in tokens.unused_ends) != is_added
    assert len(tokens.notes) == bool(note)
    assert all(re.search(note, line) and "\n" not in line for line in tokens.notes)


def test_a_template_may_say_the_only_end_which_pads_too(copy):  # noqa: F811
    folder, change = copy
    change(eos_token=None, pad_token=None)
    tokens = tokenizer.load(folder)
    assert (tokens.stop_tokens, tokens.pad_token) == ((421,), 421)


def test_templates_without_a_default_are_refused(copy):  # noqa: F811
    folder, change = copy
    templates = [{"name": name, "template": "x"} for name in ("tool_use", "rag")]
    change(chat_template=templates)
    with pytest.raises(ValueError, match=r"got \['rag', 'tool_use'\]; must have one that is cal"):
        tokenizer.load(folder)
    change(chat_template=[*templates, {"name": "default", "template": "{{ messages[0].content }}"}])
    assert tokenizer.load(folder).render([CHAT]) == ["Think."]


def test_texts_get_special_tokens_and_chats_those_of_the_template(copy, capsys):  # noqa: F811
    folder, change = copy
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"].append({"id": 426, "content": "<s>", "special": True} | flags)
    kinds = {"SpecialToken": "<s>", "Sequence": "A"}
    first, text = ({kind: {"id": name, "type_id": 0}} for kind, name in kinds.items())
    content["post_processor"] = {
        **{"type": "TemplateProcessing", "single": [first, text], "pair": [first, text]},
        "special_tokens": {"<s>": {"id": "<s>", "ids": [426], "tokens": ["<s>"]}},
    }
    path.write_text(json.dumps(content))
    change(bos_token="<s>", chat_template="{{ bos_token }}" + chatml(END))
    tokens = tokenizer.load(folder)
    texts = ["2+3=", "a", "<s>b", ""]
    hf = AutoTokenizer.from_pretrained(folder)
    theirs = hf(text=texts)["input_ids"]  # TRL: processing_class(text=prompts)
    assert tokens.encode(texts) == theirs and [ids[0] for ids in theirs] == [426] * 4
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        line.startswith("warning: a text begins with '<s>', and the tokenizer of")
        and "another" in line
    )
    tokens.encode(["a" + END])
    assert "warning: a text ends with a stop token" in capsys.readouterr().err
    chat = hf.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert tokens.encode(["a", CHAT, ""]) == [theirs[1], chat, theirs[3]] and chat.count(426) == 1
    assert tokens.ids(["2+3="]) == [theirs[0][1:]]  # as a completion


def test_messages_may_hold_numbers_of_numpy_and_no_other_objects(tiny):  # noqa: F811
    parts = [{"role": "user", "content": "a", "x": np.int64(5), "y": np.array([True])}]
    assert tiny.render([parts]) == tiny.render([[{"role": "user", "content": "a"}]])
    parts[0]["x"] = datetime.date(2026, 3, 1)
    with pytest.raises(ValueError, match="messages must hold plain JSON: .* date is not JSON"):
        tiny.render([parts])


def test_one_padding_token_beyond_the_embedding_is_not_used(copy):  # noqa: F811
    folder, change = copy
    change(pad_token="<pad>")
    tokens = tokenizer.load(folder)
    rows = tokens.pad_token
    assert tokens.num_tokens == len(tokens.hf.get_vocab()) == rows + 1
    fitted = tokens.fitted(rows, "tokenizer")
    assert (fitted.num_tokens, fitted.pad_token) == (rows, 421)
    assert fitted.encode([CHAT]) == tokens.encode([CHAT])
    with pytest.raises(ValueError, match=f"token: got '<pad>'; has no row .* {rows} tokens"):
        fitted.encode(["a<pad>"])
    with pytest.raises(ValueError, match=f"x: got .*has ids up to {rows}; .* only {rows - 1} rows"):
        tokens.fitted(rows - 1, "x")
