"""Renders chat templates; for worker processes only (see `chat_template`).

Source: the Jinja environment is that of transformers (`transformers/utils/chat_template_utils.py`), which is not
imported because that takes more than a second.
"""

import datetime
import functools
import json
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Maximum length of a chat's text, in characters.
LONGEST = 1 << 22


def render_batch(
    template: str, chats: list, settings: dict[str, Any], date: str | None
) -> list[str]:
    """Renders each chat as text; `settings` are the template's variables besides the messages.

    `date` is that of `strftime_now`; None means the current time in UTC, so that a machine's time zone does not matter.

    Raises:
        ValueError: If a chat's text is longer than `LONGEST`.
        jinja2.TemplateError: If the template is not valid or raises.
    """
    compiled, texts = _compiled(template), []
    now = datetime.datetime.fromisoformat(date) if date else datetime.datetime.now(datetime.UTC)
    settings = {"tools": None, "documents": None, "strftime_now": now.strftime, **settings}
    for messages in chats:
        parts, size = [], 0
        for part in compiled.generate(messages=messages, **settings):
            parts.append(part)
            size += len(part)
            if size > LONGEST:
                raise ValueError(f"a chat's text has more than {LONGEST} characters")
        texts.append("".join(parts))
    return texts


class _Generation(Extension):
    """The tag `generation`, with which templates mark the text of the model: its body is rendered unchanged."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=4)
def _compiled(template: str):
    """Compiles a template in the same environment as transformers."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment.from_string(template)
