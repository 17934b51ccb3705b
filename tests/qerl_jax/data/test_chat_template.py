"""Tests chat templates: valid ones give the texts of transformers, and hostile ones do no harm."""

import time

import pytest
import transformers

from qerl_jax.data import chat_template, tokenizer
from qerl_jax.system.process_pool import Pool
from tests.qerl_jax.data.test_tokenizer import CHAT, TINY, copy, tiny  # noqa: F401 (fixtures)

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
# Each uses what templates of well-known models use.
HONEST = {
    "loop": "{%- for m in messages %}\n{{ m['role'] + ': ' + m.content }}\n{% endfor %}\nend",
    "special tokens": "{{ bos_token }}{{ messages[-1].content | trim }}{{ eos_token }}",
    "generation prompt": "{{ messages|length }}{% if add_generation_prompt %}?{% endif %}",
    "namespaces": "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + 1 %}"
    "{% if loop.first %}{% continue %}{% endif %}{{ ns.n }}{{ m.content.split(' ')[0].strip('T') }}"
    "{% endfor %}",
    "marked generation": "{% for m in messages %}{% generation %}{% set x = 1 %}{{ m.content }}"
    "{% endgeneration %}{{ x is defined }}{% endfor %}",
    "tools": "{{ tools is none }} {{ documents is defined }} {% if tools %}!{% endif %}",
    "json": "{{ messages | tojson }} {{ {'b': 1, 'a': '<é>'} | tojson(indent=2, sort_keys=true) }}",
    "macro": "{% macro say(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "date": "{{ strftime_now('%Y') }}",
    "tests": "{{ messages[0].content is string }}{{ messages is iterable }}{{ nothing is defined }}",
}


@pytest.mark.parametrize("name", HONEST)
def test_the_text_is_that_of_transformers(name):
    hf = transformers.AutoTokenizer.from_pretrained(TINY)
    for is_open in (True, False):
        options = {"chat_template": HONEST[name], "add_generation_prompt": is_open}
        expected = hf.apply_chat_template(CHAT, tokenize=False, **options, **TOKENS)
        given = chat_template.render(HONEST[name], [CHAT], TOKENS, add_generation_prompt=is_open)
        assert given == [expected]


def test_texts_of_many_chats_come_in_order():
    chats = [[{"role": "user", "content": f"{n} \ud800京"}] for n in range(150)]
    texts = chat_template.render("{{ messages[0].content }}", chats, {})
    assert texts == [chat[0]["content"] for chat in chats]
    assert chat_template.render("never read", [], {}) == []
    with pytest.raises(ValueError, match="must have at least one"):
        chat_template.render("{{ 1 }}", [[]], {})


HOSTILE = {
    "loops in loops": (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "within 0.5 seconds",
    ),
    "a loop in one step": ("{{ 7 ** 9999999999 }}", "within 0.5 seconds"),
    "gigabytes at once": ("{{ 'x' * 9999999999 }}", "more than 256 MiB of memory"),
    "gigabytes by doubling": (
        "{% set ns = namespace(x='x') %}{% for _ in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "more than 256 MiB of memory|within 0.5 seconds",  # whichever a busy machine meets first
    ),
    "gigabytes by a filter": ("{{ 'x' | center(9999999999) }}", "more than 256 MiB of memory"),
    "gigabytes by a format": ("{{ '%9999999999d' % 1 }}", "memory|raise"),
    "a list without end": ("{{ [0] * 9999999999 }}", "more than 256 MiB of memory"),
    "a long text": (
        "{% for _ in range(9999) %}{{ 'x' * 9990 }}{% endfor %}",
        "more than 4194304 char",
    ),
    "recursion": ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError: maximum"),
    "an error of its own": ("{{ raise_exception('roles\nalternate') }}", "roles alternate"),
    "bad syntax": ("{% for %}", "TemplateSyntaxError: "),
    "no such thing": ("{{ messages[9].content }}", "UndefinedError: "),
    "a way out": (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "SecurityError: .* '__class__'",
    ),
    "changes to its arguments": ("{{ messages.append(1) }}", "SecurityError: "),
    "another file": ("{% include '/etc/passwd' %}", "TypeError: no loader"),
    "a deep expression": ("{{ " + 5000 * "(" + "1" + 5000 * ")" + " }}", "RecursionError|ended"),
    "a deep list": ("{{ " + 90000 * "[" + " }}", "RecursionError|ended"),
}


@pytest.fixture(scope="module")
def small_pool():
    module = "qerl_jax.data.template_renderer"
    pool = Pool(module, workers=1, seconds=0.5, memory_bytes=1 << 28)
    yield pool
    pool.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_an_error_in_one_line(name, small_pool, monkeypatch):
    monkeypatch.setattr(chat_template, "SECONDS", 0.5)
    monkeypatch.setattr(chat_template, "MEMORY_BYTES", 1 << 28)
    template, said = HOSTILE[name]
    started = time.monotonic()
    with pytest.raises(ValueError, match=said) as error:
        chat_template.render(template, [CHAT], {}, where="chat template of m", pool=small_pool)
    assert str(error.value).startswith("chat template of m: ") and "\n" not in str(error.value)
    assert len(str(error.value)) < 400
    assert time.monotonic() - started < 30  # the clock of a busy machine, not a measurement
    assert chat_template.render("{{ 1 }}", [CHAT], {}, pool=small_pool) == ["1"]


def test_a_date_may_be_fixed():
    template = "{{ strftime_now('%d %b %Y') }}"
    assert chat_template.render(template, [CHAT], {}, date="2024-07-26") == ["26 Jul 2024"]


def test_nothing_is_rendered_in_this_process(tiny, monkeypatch):  # noqa: F811
    refuse = lambda *_, **__: pytest.fail("rendered here")
    monkeypatch.setattr(transformers.PreTrainedTokenizerBase, "apply_chat_template", refuse)
    assert tiny.encode([CHAT])


@pytest.mark.parametrize("template", [3, ["{{ 1 }}"], {"a": 1}, {"default": 3}])
def test_a_template_that_is_no_text_is_refused_when_it_is_loaded(template, copy):  # noqa: F811
    folder, change = copy
    change(chat_template=template)
    with pytest.raises(ValueError, match="template|cannot read"):
        tokenizer.load(folder)
