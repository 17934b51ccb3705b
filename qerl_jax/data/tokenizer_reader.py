"""Reads tokenizers with transformers, in a process of its own, see `rust_tokenizer`."""

import importlib.metadata
import sys
from typing import Any

# transformers imports PyTorch where it is installed, which takes seconds, and which no tokenizer needs. This hides it.
sys.modules["torch"] = None  # type: ignore[assignment]
# transformers asks for it at its import, which then reads the lists of files of all installed packages. It needs it for
# packages that are not imported by their names, of which no tokenizer uses one.
importlib.metadata.packages_distributions = dict  # type: ignore[assignment]

from transformers import AutoTokenizer  # noqa: E402
from transformers.tokenization_utils_tokenizers import TokenizersBackend  # noqa: E402

# Methods of transformers that `RustTokenizer` repeats. Tokenizers of a few models have others.
_REPEATED = (
    *("__call__", "_encode_plus", "set_truncation_and_padding", "decode", "_decode"),
    *("get_vocab", "get_added_vocab", "added_tokens_decoder", "convert_ids_to_tokens"),
)
_FIELDS = (
    *("name_or_path", "chat_template", "special_tokens_map", "all_special_tokens"),
    *("all_special_ids", "bos_token", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def read(folder: str, options: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the fields of the `RustTokenizer` of a folder as JSON values; None if it needs transformers."""
    hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **options)
    kind = type(hf)
    if not isinstance(hf, TokenizersBackend) or hf.split_special_tokens:
        return None
    if any(getattr(kind, name) is not getattr(TokenizersBackend, name) for name in _REPEATED):
        return None
    fields = {name: getattr(hf, name) for name in _FIELDS}
    return {"rust": hf.backend_tokenizer.to_str(), **fields}
