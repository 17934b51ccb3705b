"""Tests reading tool calls from text, and writing replies with chat templates."""

import dataclasses

import pytest

from qerl_jax.checkpoint.hf_folder import TINY
from qerl_jax.data import tokenizer
from qerl_jax.tools import tool_calls
from qerl_jax.tools.tool_calls import Call

# The parts of Qwen2.5's and Llama 3.1's templates that speak of tools.
QWEN = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write calls between <tool_call></tool_call><|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role == "tool" %}{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ message.content }}
</tool_response>{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


ONE, WRITTEN = Call("f", {"x": 1}), '{"name": "f", "arguments": {"x": 1}}'
G = '{"name": "g", "parameters": {"x": ";"}}'


@pytest.mark.parametrize(
    ("text", "said", "calls"),
    [
        ("no call", "no call", []),
        ('So.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "So.", [ONE]),
        ('<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [ONE]),
        (f"<tool_call>{WRITTEN}</tool_call><tool_call>{WRITTEN}", "", [ONE, ONE]),
    ],
)
def test_hermes_calls_are_json_between_tags(text, said, calls):
    assert tool_calls.parse(text, "hermes") == (said, calls)


@pytest.mark.parametrize(
    ("body", "name", "error"),
    [
        ("f(1)", "", "the call is not valid JSON"),
        ("[1]", "", 'must be an object with a "name"'),
        ('{"arguments": {}}', "", 'must be an object with a "name"'),
        ('{"name": "f", "arguments": [1]}', "f", 'the "arguments" of f must be an object'),
        ('{"name": "f", "arguments": "x"}', "f", 'the "arguments" of f must be an object'),
        # Half a character, which a log cannot be written with.
        (r'{"name": "\ud800", "arguments": {}}', "", "the call is not valid JSON"),
        (r'{"name": "f", "arguments": {"x": ["\ud83d"]}}', "", "the call is not valid JSON"),
        (r'{"name": "f", "arguments": "{\"x\": \"\\ud800\"}"}', "f", 'the "arguments" of f must'),
    ],
)
def test_a_call_that_cannot_be_read_says_why(body, name, error):
    _, (call,) = tool_calls.parse(f"<tool_call>{body}</tool_call>", "hermes")
    assert call.name == name and error in call.error
    # Of several Llama calls, too.
    _, (first, second) = tool_calls.parse('{"name": "f"}; {"name": oops}', "llama3_json")
    assert first == Call("f", {}) and "not valid JSON" in second.error


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "f", "parameters": {"x": 1}}', [Call("f", {"x": 1})]),
        ('<|python_tag|>{"name": "f", "parameters": {}}', [Call("f", {})]),
        (f'{{"name": "f"}}; {G}', [Call("f", {}), Call("g", {"x": ";"})]),
        ("The answer is 3.", []),
        ("{1, 2} is a set", []),
    ],
)
def test_llama_calls_are_turns_of_json(text, calls):
    assert tool_calls.parse(text, "llama3_json") == ("" if calls else text, calls)


def test_a_pattern_reads_calls_of_one_argument_in_any_form():
    schemas = [tool_calls.schema(each) for each in (add, lone)]
    react = r"Action: (?P<name>\w+)\[(?P<argument>[^\]]*)\]"
    read = lambda text, tools=schemas: tool_calls.parse_pattern(text, react, tools)
    assert read("Thought. Action: lone[ 12 ]") == ("Thought.", [Call("lone", {"x": 12})])
    assert read("No action.") == ("No action.", [])
    assert "must be a number" in read("Action: lone[a]")[1][0].error
    deep = tool_calls.parse_pattern(5000 * "[", "(?P<argument>.+)", schemas[1:])
    assert "must be a number" in deep[1][0].error
    none = tool_calls.parse_pattern("Go.", r"Go(?P<argument>\d)?\.", schemas[1:])
    assert none[1][0].error == "x: got ''; must be a number"
    for name in ("add", "other"):
        assert f"{name} is no tool of one argument" in read(f"Action: {name}[1]")[1][0].error
    only = tool_calls.parse_pattern("What is 3?", r"What is (?P<argument>.*)\?", schemas[1:])
    assert only == ("", [Call("lone", {"x": 3})])


def test_the_format_of_calls_follows_from_the_template():
    assert tool_calls.detect(QWEN) == "hermes"
    assert tool_calls.detect('... "parameters" ... ipython ...') == "llama3_json"
    with pytest.raises(ValueError, match="tools.call_format: got None; .* no known format"):
        tool_calls.detect("{{ messages }}")


def add(a: int, b: int = 2) -> int:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b


def lone(x: int) -> int:
    """One argument.

    Args:
        x: It.
    """
    return x


def test_a_tool_is_shown_by_its_docstring_and_annotations():
    shown = tool_calls.schema(add)["function"]
    assert (shown["name"], shown["description"]) == ("add", "Adds.")
    assert shown["parameters"]["required"] == ["a"]
    with pytest.raises(ValueError, match="tool '<lambda>': cannot be shown to the policy"):
        tool_calls.schema(lambda a: a)


def qwen_tokenizer():
    """A small tokenizer with Qwen's template."""
    return dataclasses.replace(tokenizer.load(TINY), chat_template=QWEN)


tokens = pytest.fixture(scope="module")(qwen_tokenizer)


def test_an_answer_continues_a_turn_as_the_template_writes_the_whole(tokens):
    """Prompt, turn and answer are, token by token, the rendered conversation."""
    call = Call("add", {"a": 1})
    chat = [{"role": "user", "content": "Add."}]
    turn = {"role": "assistant", "content": "", "tool_calls": [call.to_message()]}
    results = [{"role": "tool", "name": "add", "content": c} for c in ("3", "4")]
    for count in (1, 2):
        given = tool_calls.answer(tokens, results[:count], after_stop=True)
        text = tokens.render([[*chat, turn]], add_generation_prompt=False)[0].rstrip("\n")
        (expected,) = tokens.encode([[*chat, turn, *results[:count]]])
        begun = tokens.hf([text], add_special_tokens=False)["input_ids"][0]
        assert begun + given == expected
        # A turn that a stop string ended has no token for its end yet.
        (stop,) = {begun[-1]}
        assert tool_calls.answer(tokens, results[:count], after_stop=False) == [stop, *given]


def test_tools_are_told_to_the_template(tokens):
    shown = tokens.with_options(tools=[tool_calls.schema(add)])
    (text,) = shown.render([[{"role": "user", "content": "Add."}]])
    assert '"name": "add"' in text and tokens.template_options == {}
