"""Converts text to token ids and back, with a Hugging Face tokenizer and its chat template."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from qerl_jax.data import chat_template
from qerl_jax.system.checked import require
from qerl_jax.system.files import read_json

# Variables of a template that rendering sets itself, so `chat_template_kwargs` must not.
_OWN_OPTIONS = ("messages", "add_generation_prompt", "tokenize")

type Message = dict[str, Any]  # with "role" and "content", and "tool_calls" if it calls tools
type Prompt = str | Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer, and the ids and the chat template that generation needs.

    Attributes:
        hf: The transformers tokenizer.
        stop_tokens: Ids that end a completion: the tokenizer's end-of-sequence token and those of
            generation_config.json, or of config.json if there is no such file.
        pad_token: Id that pads rows at the end; never trained on.
        num_tokens: Number of ids, from 0 on. Rows of the embedding beyond are never sampled or scored.
        chat_template: Source of the chat template, in Jinja; empty if the tokenizer has none, as that of a base model.
        template_options: Variables of the chat template besides the messages (`chat_template_kwargs`).
    """

    hf: Any
    stop_tokens: tuple[int, ...]
    pad_token: int
    num_tokens: int
    chat_template: str
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
        chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
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
            where=f"chat template of {self.hf.name_or_path}",
        )
        rendered = iter(texts)
        return [prompt if isinstance(prompt, str) else next(rendered) for prompt in prompts]

    def with_options(self, **options: Any) -> Self:
        """Returns the tokenizer with these variables of the chat template added or replaced."""
        merged = {**self.template_options, **options}
        return dataclasses.replace(self, template_options=merged)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Returns the ids of each prompt; no special tokens are added besides those that the template writes.

        Raises:
            ValueError: As for `render`.
        """
        texts = self.render(prompts)
        return self.hf(texts, add_special_tokens=False)["input_ids"] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of a completion, without special tokens."""
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load(
    folder: str | pathlib.Path, template_options: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Reads a tokenizer and its chat template, if it has one, from a local folder.

    Args:
        folder: The folder.
        template_options: Variables of the template besides the messages; it must use each of them.

    Raises:
        FileNotFoundError: If the folder has no tokenizer.
        ValueError: If the tokenizer cannot be read or has no end-of-sequence token, or its template does not use an
            option.
    """
    folder = pathlib.Path(folder)
    files = [folder / name for name in ("tokenizer.json", "tokenizer_config.json")]
    is_there = any(file.is_file() for file in files)
    require(is_there, "tokenizer", str(folder), "has no tokenizer.json", FileNotFoundError)
    # Without PyTorch, importing transformers prints a notice, which would be the first line of the output.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    # If config.json states no version, transformers warns that any large tokenizer has a fault of Mistral's.
    quiet = {} if config.get("model_type") == "mistral" else {"fix_mistral_regex": False}
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, **quiet)
    except Exception as error:  # transformers raises errors of many types for a broken file
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"tokenizer: transformers cannot read the one in {folder}: {reason}"
        ) from error
    template = hf.get_chat_template() if hf.chat_template else ""
    require(isinstance(template, str), f"{folder}: chat template", template, "must be a text")
    options = dict(template_options or {})
    rule = f"the chat template of {folder} does not use this name"
    for name in options:
        # A template silently ignores a name that it does not use.
        is_used = name not in _OWN_OPTIONS and name in template
        require(is_used, "model.chat_template_kwargs", name, rule)
    stops = [] if hf.eos_token_id is None else [hf.eos_token_id]
    stops += _stated_ends(folder)
    rule = "names no end-of-sequence token; completions would never stop"
    require(stops, "tokenizer", str(folder), rule)
    pad = hf.pad_token_id if hf.pad_token_id is not None else stops[0]
    largest = max(hf.get_vocab().values(), default=-1)
    return Tokenizer(hf, tuple(dict.fromkeys(stops)), pad, largest + 1, template, options)


def _stated_ends(folder: pathlib.Path) -> list[int]:
    """Returns the end-of-sequence ids in the model's configs, which transformers and vLLM use too."""
    places = [folder / name for name in ("generation_config.json", "config.json")]
    path = next((candidate for candidate in places if candidate.is_file()), None)
    listed = None if path is None else read_json(path).get("eos_token_id")
    ends = listed if isinstance(listed, list) else [] if listed is None else [listed]
    rule = "must be an id, or a list of ids"
    require(all(type(stop) is int for stop in ends), f"{path}: eos_token_id", listed, rule)
    return ends


def _plain(token: Any) -> str | list[str]:
    return list(map(str, token)) if isinstance(token, list | tuple) else str(token)
