"""Converts text to token ids and back, with a Hugging Face tokenizer and its chat template."""

import dataclasses
import functools
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from qerl_jax.data import chat_template, rust_tokenizer, turns
from qerl_jax.data.rust_tokenizer import RustTokenizer
from qerl_jax.system.checked import require, tell
from qerl_jax.system.files import read_json

# Variables of a template that rendering sets itself, so `chat_template_kwargs` must not.
_OWN_OPTIONS = ("messages", "add_generation_prompt", "tokenize")
# In the names of special tokens that end a text or a turn: <|im_end|>, <|endoftext|>, <end_of_turn>, <|eot_id|>, </s>.
_END = re.compile(r"(?i)end|eo[stm]|sep|stop|return|^</s>$")

# With "role", "content" (a message with "tool_calls" may lack it), and all else that a template reads.
type Message = dict[str, Any]
type Prompt = str | Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer, and the ids and the chat template that generation needs.

    Attributes:
        hf: What encodes and decodes; a tokenizer of transformers if it has one that is not of its usual kind.
        stop_tokens: Ids that end a completion: the ends of sequence of the tokenizer, of generation_config.json and of
            config.json; and the token with which the chat template ends a turn, see `turns.end_of_turn`.
        pad_token: Id that pads rows at the end; never trained on.
        num_tokens: Number of ids, from 0 on. Rows of the embedding beyond are never sampled or scored.
        chat_template: Source of the chat template, in Jinja; empty if the tokenizer has none, as that of a base model.
        template_options: Variables of the chat template besides the messages (`chat_template_kwargs`).
        template_date: The date that a template writes as today's, as "2026-07-26"; None for the current one, in UTC.
        notes: Lines to show where chats are rendered: about the ends of turns, and the start of the assistant's.
    """

    hf: RustTokenizer | Any
    stop_tokens: tuple[int, ...]
    pad_token: int
    num_tokens: int
    chat_template: str
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    template_date: str | None = None
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens, which the text of a completion leaves out, by their text."""
        named = dict(zip(self.hf.all_special_tokens, self.hf.all_special_ids, strict=True))
        added = self.hf.added_tokens_decoder.items()
        return named | {token.content: number for number, token in added if token.special}

    @property
    def ends(self) -> list[str]:
        """The texts of the stop tokens."""
        return [*filter(None, self.hf.convert_ids_to_tokens(list(self.stop_tokens)))]

    @property
    def unused_ends(self) -> dict[int, str]:
        """Special tokens that are named as ends and are no stop tokens, by id."""
        ends = ((i, text) for text, i in self.special_tokens.items() if _END.search(text))
        return {i: text for i, text in ends if i not in self.stop_tokens}

    def render(self, prompts: Sequence[Prompt], *, add_generation_prompt: bool = True) -> list[str]:
        """Returns prompts as texts: applies the chat template to chats, and returns strings unchanged.

        Args:
            prompts: Texts and chats.
            add_generation_prompt: Whether a chat ends with the start of the assistant's turn.

        Raises:
            ValueError: If there is a chat and no template, or the template fails or exceeds its limits of time, memory
                or length.
        """
        names = {name: _plain(token) for name, token in self.hf.special_tokens_map.items()}
        chats = [without_none(prompt) for prompt in prompts if not isinstance(prompt, str)]
        rule = (
            "has no chat template, and the prompt is a chat: name a tokenizer that has one in "
            "model.tokenizer_name_or_path, or let the policy continue texts: data.apply_chat_template = false, and "
            "no data.system_prompt"
        )
        require(self.chat_template or not chats, "tokenizer", self.hf.name_or_path, rule)
        texts = chat_template.render(
            self.chat_template,
            chats,
            names | dict(self.template_options),
            add_generation_prompt=add_generation_prompt,
            date=self.template_date,
            where=f"chat template of {self.hf.name_or_path}",
        )
        rendered = iter(texts)
        return [prompt if isinstance(prompt, str) else next(rendered) for prompt in prompts]

    def with_options(self, **options: Any) -> Self:
        """Returns the tokenizer with these variables of the chat template added or replaced."""
        merged = {**self.template_options, **options}
        return dataclasses.replace(self, template_options=merged)

    def at_date(self, date: str) -> Self:
        """Returns the tokenizer with that date, as "2026-07-26", as today's in its chat template."""
        return dataclasses.replace(self, template_date=date)

    def encode(
        self, prompts: Sequence[Prompt], *, add_generation_prompt: bool = True
    ) -> list[list[int]]:
        """Returns the ids of each prompt; arguments and errors are those of `render` and `ids`.

        A text gets the special tokens that the tokenizer adds, such as Llama's begin of sequence, as in transformers
        and TRL. A chat has those that its template writes.
        """
        texts = self.render(prompts, add_generation_prompt=add_generation_prompt)
        ids: dict[int, list[int]] = {}
        for is_text in (True, False):
            rows = [row for row, prompt in enumerate(prompts) if isinstance(prompt, str) == is_text]
            encoded = self.ids([texts[row] for row in rows], add_special_tokens=is_text)
            ids |= zip(rows, encoded, strict=True)
            if is_text:
                self._tell_about(encoded)
        return [ids[row] for row in range(len(texts))]

    def _tell_about(self, rows: Sequence[Sequence[int]]) -> None:
        """Warns of texts with a second begin of sequence, or with an end, as the tokenizer may add it."""
        first, of = self.hf.bos_token_id, f"the tokenizer of {self.hf.name_or_path}"
        if first is not None and any([*row[:2]] == [first] * 2 for row in rows):
            tell(
                f"warning: a text begins with {self.hf.bos_token!r}, and {of} adds another: leave it out of the text"
            )
        if any(row and row[-1] in self.stop_tokens for row in rows):
            tell(
                f"warning: a text ends with a stop token, which {of} may add: a completion then begins after the end"
            )

    def ids(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Returns the ids of texts, by default as they are within a sequence, such as a completion.

        Raises:
            ValueError: If a text has a token beyond the embedding, see `fitted`.
        """
        if not texts:
            return []
        # Quiet: whether a text is too long for the model is not what the tokenizer's files say.
        options = {"add_special_tokens": add_special_tokens, "verbose": False}
        rows = self.hf(list(texts), **options)["input_ids"]
        largest = max(map(max, filter(None, rows)), default=0)
        rule = f"has no row in the embedding, which has {self.num_tokens} tokens"
        require(largest < self.num_tokens, "text: token", self.hf.decode([largest]), rule)
        return rows

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of a completion, without special tokens."""
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def fitted(self, rows: int, field: str) -> Self:
        """Returns the tokenizer for an embedding of that many rows; `field` names the tokenizer in the error.

        One padding token beyond them, as many recipes add it, is not used: a stop token pads then.

        Raises:
            ConfigError: If there are other tokens beyond, or that one ends completions.
        """
        if self.num_tokens <= rows:
            return self
        numbers = self.hf.get_vocab().values()
        beyond = [number for number in numbers if number >= rows]
        is_padding = beyond == [self.pad_token] and self.pad_token not in self.stop_tokens
        rule = f"has ids up to {self.num_tokens - 1}; the model's embedding has only {rows} rows"
        require(is_padding, field, self.hf.name_or_path, rule)
        largest = max(number for number in numbers if number < rows)
        return dataclasses.replace(self, pad_token=self.stop_tokens[0], num_tokens=largest + 1)


def load(
    folder: str | pathlib.Path,
    template_options: Mapping[str, Any] | None = None,
    template_date: str | None = None,
) -> Tokenizer:
    """Reads a tokenizer and its chat template, if it has one, from a local folder.

    Args:
        folder: The folder.
        template_options: Variables of the template besides the messages; it must use each of them.
        template_date: See `Tokenizer`.

    Raises:
        FileNotFoundError: If the folder has no tokenizer.
        ValueError: If the tokenizer cannot be read, or nothing says what ends a completion; if it has several
            templates, none of them the default; or its template does not use an option.
    """
    folder = pathlib.Path(folder)
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    is_there = any(file.is_file() for file in files)
    require(is_there, "tokenizer", str(folder), "has no tokenizer.json", FileNotFoundError)
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    # If config.json states no version, transformers warns that any large tokenizer has a fault of Mistral's.
    quiet = {} if config.get("model_type") == "mistral" else {"fix_mistral_regex": False}
    hf = RustTokenizer.read(folder, quiet) or _in_transformers(folder, quiet)
    # Without the file of its vocabulary, transformers makes one of special tokens, which encodes nothing.
    vocabulary = hf.get_vocab()
    words = vocabulary.keys() - {*hf.all_special_tokens, *hf.get_added_vocab()}
    rule = "has no file with a vocabulary, such as tokenizer.json"
    require(len(words) > 1, "tokenizer", str(folder), rule)
    template = hf.chat_template or ""
    if (
        not template and (folder / "chat_template.json").is_file()
    ):  # of a processor, as transformers 4 wrote it
        template = read_json(folder / "chat_template.json").get("chat_template") or ""
    if isinstance(template, Mapping):
        rule = 'must have one that is called "default"; rename that for chats'
        require("default" in template, f"{folder}: chat templates", sorted(template), rule)
        template = template["default"]
    require(isinstance(template, str), f"{folder}: chat template", template, "must be a text")
    options = dict(template_options or {})
    rule = f"the chat template of {folder} does not use this name"
    for name in options:
        # A template silently ignores a name that it does not use.
        is_used = name not in _OWN_OPTIONS and name in template
        require(is_used, "model.chat_template_kwargs", name, rule)
    ends = [] if hf.eos_token_id is None else [hf.eos_token_id]
    largest, stated = max(vocabulary.values(), default=-1), _stated_ends(folder)
    if none := sorted({stop for stop in stated if not 0 <= stop <= largest}):
        tell(
            f"warning: {folder}: eos_token_id names {none}, which are no tokens of the tokenizer: they end nothing"
        )
    stops = tuple(dict.fromkeys(ends + [stop for stop in stated if stop not in none]))
    tokens = Tokenizer(hf, stops, -1, largest + 1, template, options, template_date)
    if template:
        whose = f"the chat template of {hf.name_or_path}"
        end, notes = turns.end_of_turn(tokens.render, tokens.special_tokens, tokens.ends, whose)
        stops += () if end is None else (tokens.special_tokens[end],)
        tokens = dataclasses.replace(tokens, stop_tokens=stops, notes=tuple(notes))
    rule = "names no end-of-sequence token; completions would never stop"
    require(tokens.stop_tokens, "tokenizer", str(folder), rule)
    pad = hf.pad_token_id if hf.pad_token_id is not None else tokens.stop_tokens[0]
    return dataclasses.replace(tokens, pad_token=pad)


def begin() -> None:
    """Starts the processes that read tokenizers and render chats, which need seconds until they are ready."""
    rust_tokenizer.shared_pool().start()
    chat_template.shared_pool().start()


def _in_transformers(folder: pathlib.Path, options: Mapping[str, Any]) -> Any:
    """Reads a tokenizer with transformers in this process."""
    # Without PyTorch, importing transformers prints a notice, which would be the first line of the output.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **options)
    except Exception as error:  # transformers raises errors of many types for a broken file
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"tokenizer: transformers cannot read the one in {folder}: {reason}"
        ) from error


def without_none(value: Any) -> Any:
    """Returns a value without entries of tables that are None, which `datasets` adds to messages; as TRL does.

    Numbers and arrays of NumPy become those of Python.
    """
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, Mapping):
        return {name: without_none(item) for name, item in value.items() if item is not None}
    return [without_none(item) for item in value] if isinstance(value, list | tuple) else value


def _stated_ends(folder: pathlib.Path) -> list[int]:
    """Returns the end-of-sequence ids in the model's configs."""
    ends: list[int] = []
    for path in (folder / "generation_config.json", folder / "config.json"):
        listed = read_json(path).get("eos_token_id") if path.is_file() else None
        stated = listed if isinstance(listed, list) else [] if listed is None else [listed]
        rule = "must be an id, or a list of ids"
        require(all(type(stop) is int for stop in stated), f"{path}: eos_token_id", listed, rule)
        ends += stated
    return ends


def _plain(token: Any) -> str | list[str]:
    return list(map(str, token)) if isinstance(token, list | tuple) else str(token)
