"""Tokenizers without transformers in this process.

transformers takes seconds to import, and more where PyTorch is installed. So another process reads a tokenizer's files
with it, while this one still imports JAX and starts the device, and returns what the package `tokenizers`, which is in
Rust and all that transformers encodes and decodes with, needs to do the same here. That is kept in ~/.cache/qerl_jax (or
XDG_CACHE_HOME) for the next run.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import tokenizers

from qerl_jax.system import files
from qerl_jax.system.process_pool import Failure, Pool

# Version of what is kept. Of Qwen2.5 that is 11 MB.
_FORMAT, _MOST_KEPT = 1, 16
# A tokenizer's files are texts, and models of SentencePiece; a folder's other files do not change it.
_SUFFIXES = {".json", ".jinja", ".txt", ".model", ".tiktoken"}
# CPU seconds to read one; the largest take about five.
_SECONDS = 120.0
# Address space, not memory: NumPy's libraries reserve some for each processor.
_ADDRESS_BYTES = 1 << 36


@dataclasses.dataclass(frozen=True)
class RustTokenizer:
    """What is used of a transformers tokenizer, with the names and results that it has there."""

    rust: tokenizers.Tokenizer
    name_or_path: str
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]
    all_special_tokens: list[str]
    all_special_ids: list[int]
    bos_token: str | None
    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    @classmethod
    def read(cls, folder: pathlib.Path, options: Mapping[str, Any]) -> Self | None:
        """Reads a folder; None if only transformers itself can use or refuse its tokenizer.

        `options` are those of `AutoTokenizer.from_pretrained`.
        """
        cached = _cache_file(folder, options)
        with contextlib.suppress(
            Exception
        ):  # there is none, or it is damaged: `tokenizers` raises plain exceptions
            digest, _, text = cached.read_bytes().partition(b"\n")
            if hashlib.sha256(text).hexdigest().encode() == digest:
                os.utime(cached)  # used now
                return cls._of(files.parse_json(text))
        (fields,) = shared_pool().map("read", [(str(folder), dict(options))])
        if fields is None or isinstance(fields, Failure):
            return None
        with contextlib.suppress(OSError):  # a disk that is full or read-only
            _write(cached, json.dumps(fields).encode())
        return cls._of(fields)

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Self:
        rust = tokenizers.Tokenizer.from_str(fields["rust"])
        rust.no_truncation()
        rust.no_padding()
        return cls(**fields | {"rust": rust})

    def __call__(
        self, texts: Sequence[str], *, add_special_tokens: bool, verbose: bool = False
    ) -> dict[str, list[list[int]]]:
        """Returns the ids of texts, which are encoded in parallel."""
        rows = self.rust.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return {"input_ids": [row.ids for row in rows]}

    def decode(
        self,
        ids: Sequence[int],
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        """Returns the text of ids; it never cleans up spaces."""
        return self.rust.decode([*map(int, ids)], skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self.rust.get_vocab(with_added_tokens=True)

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: number for number, token in self.added_tokens_decoder.items()}

    @property
    def added_tokens_decoder(self) -> dict[int, tokenizers.AddedToken]:
        return self.rust.get_added_tokens_decoder()

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.rust.id_to_token(int(number)) for number in ids]


def _cache_file(folder: pathlib.Path, options: Mapping[str, Any]) -> pathlib.Path:
    """Returns the file for a folder's tokenizer: its name has a hash of all that the tokenizer depends on."""
    versions = [importlib.metadata.version(name) for name in ("transformers", "tokenizers")]
    digest = hashlib.sha256(
        repr((_FORMAT, str(folder), sorted(options.items()), versions)).encode()
    )
    for path in sorted((*folder.glob("*"), *folder.glob("additional_chat_templates/*"))):
        if path.suffix in _SUFFIXES and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(folder)} {len(content)}\0".encode() + content)
    return files.cache_folder("tokenizers") / f"{digest.hexdigest()}.json"


def _write(path: pathlib.Path, text: bytes) -> None:
    """Writes a text under its hash, and removes the files of the folder that were used longest ago if there are many."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_whole(path, hashlib.sha256(text).hexdigest().encode() + b"\n" + text)
    used = sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
    for old in used[:-_MOST_KEPT]:
        old.unlink(missing_ok=True)


@functools.cache
def shared_pool() -> Pool:
    """Returns the shared pool of one process, which starts when it is first needed."""
    module = "qerl_jax.data.tokenizer_reader"
    return Pool(module, workers=1, seconds=_SECONDS, memory_bytes=_ADDRESS_BYTES)
