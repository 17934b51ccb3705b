"""Text to ids and back, over a Hugging Face tokenizer and its chat template."""

import dataclasses
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from qerl_jax.checked import require
from qerl_jax.data import chat_template
from qerl_jax.files import read_json

# What rendering sets by itself.
_OWN_OPTIONS = ("messages", "add_generation_prompt", "tokenize")

type Message = dict[str, Any]  # "role" and "content", and of calls "tool_calls"
type Prompt = str | Sequence[Message]


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer with what generation needs to know of it.

    Attributes:
        hf: The transformers tokenizer.
        stop_tokens: Ids that end a completion: the tokenizer's end of sequence and those of
            generation_config.json, or where there is no such file of config.json.
        pad_token: Fills rows after their end; never trained on.
        num_tokens: Ids are 0 ... num_tokens - 1; rows of the embedding beyond are never sampled or
            scored.
        chat_template: Source of the chat template, in Jinja.
        template_options: What the chat template is told beside the messages.
    """

    hf: Any
    stop_tokens: tuple[int, ...]
    pad_token: int
    num_tokens: int
    chat_template: str
    template_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def render(self, prompts: Sequence[Prompt], *, add_generation_prompt: bool = True) -> list[str]:
        """The texts the model sees: messages pass the chat template, a plain string stays as it is.

        Args:
            prompts: Texts and chats.
            add_generation_prompt: Whether a chat ends where the model's answer begins.

        Raises:
            ValueError: In one line, where the template fails, or does not keep to its limits.
        """
        names = {name: _plain(token) for name, token in self.hf.special_tokens_map.items()}
        rendered = iter(
            chat_template.render(
                self.chat_template,
                [prompt for prompt in prompts if not isinstance(prompt, str)],
                names | dict(self.template_options),
                add_generation_prompt=add_generation_prompt,
                where=f"chat template of {self.hf.name_or_path}",
            )
        )
        return [prompt if isinstance(prompt, str) else next(rendered) for prompt in prompts]

    def with_options(self, **options: Any) -> Self:
        """The tokenizer with more that the chat template is told."""
        merged = {**self.template_options, **options}
        return dataclasses.replace(self, template_options=merged)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Ids of each prompt; special tokens are those that the template writes.

        Raises:
            ValueError: As `render`.
        """
        texts = self.render(prompts)
        return self.hf(texts, add_special_tokens=False)["input_ids"] if texts else []

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without special tokens."""
        return self.hf.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def load(
    folder: str | pathlib.Path, template_options: Mapping[str, Any] | None = None
) -> Tokenizer:
    """Reads a tokenizer and its chat template from a local folder.

    Args:
        folder: Where they are.
        template_options: What the template is told beside the messages; it must read each of them.

    Raises:
        FileNotFoundError: When the folder has no tokenizer.
        ValueError: When it cannot be read, has no chat template, or one that does not read an option, or no
            end-of-sequence token.
    """
    folder = pathlib.Path(folder)
    require(
        any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")),
        "tokenizer",
        str(folder),
        "has no tokenizer.json",
        FileNotFoundError,
    )
    # Without PyTorch, importing transformers prints a notice that would be a newcomer's first line.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        hf = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # the readers of transformers raise whatever a file makes them raise
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(
            f"tokenizer: transformers cannot read the one in {folder}: {said}"
        ) from error
    require(
        hf.chat_template,
        "tokenizer",
        str(folder),
        "has no chat template; chat prompts need one (chat_template.jinja)",
    )
    template = hf.get_chat_template()
    require(isinstance(template, str), f"{folder}: chat template", template, "must be a text")
    options = dict(template_options or {})
    for name in options:
        # A template takes no notice of a name that it does not know.
        require(
            name not in _OWN_OPTIONS and name in template,
            "model.chat_template_kwargs",
            name,
            f"the chat template of {folder} does not use this name",
        )
    stops = [] if hf.eos_token_id is None else [hf.eos_token_id]
    stops += _stated_ends(folder)
    require(
        stops,
        "tokenizer",
        str(folder),
        "names no end-of-sequence token; completions would never stop",
    )
    pad = hf.pad_token_id if hf.pad_token_id is not None else stops[0]
    largest = max(hf.get_vocab().values(), default=-1)
    return Tokenizer(hf, tuple(dict.fromkeys(stops)), pad, largest + 1, template, options)


def _stated_ends(folder: pathlib.Path) -> list[int]:
    """Ids that end a completion by the model's configs, as transformers and vLLM take them."""
    places = [folder / name for name in ("generation_config.json", "config.json")]
    path = next((place for place in places if place.is_file()), None)
    listed = None if path is None else read_json(path).get("eos_token_id")
    ends = listed if isinstance(listed, list) else [] if listed is None else [listed]
    rule = "must be an id, or a list of ids"
    require(all(type(each) is int for each in ends), f"{path}: eos_token_id", listed, rule)
    return ends


def _plain(token: Any) -> str | list[str]:
    return list(map(str, token)) if isinstance(token, list | tuple) else str(token)
