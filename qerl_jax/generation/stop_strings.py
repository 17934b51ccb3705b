"""Finds stop strings, texts that end a completion, in the text of its tokens."""

import dataclasses
from collections.abc import Callable, Sequence

from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.system.checked import require

# Replaces invalid UTF-8 bytes in a decoded text.
_INVALID = "\ufffd"


@dataclasses.dataclass(frozen=True)
class StopStrings:
    """Ends a completion with the token that completes one of some strings.

    Attributes:
        strings: Texts, none of them empty; any of them ends a completion.
        decode: Converts tokens to text.

    Raises:
        ValueError: If a string is empty.
    """

    strings: tuple[str, ...]
    decode: Callable[[Sequence[int]], str]

    def __post_init__(self):
        if not all(self.strings):
            raise ValueError(f"stop strings: got {self.strings!r}; none may be empty")

    def end(self, tokens: Sequence[int], seen: int = 0) -> int | None:
        """Returns the smallest number of leading tokens whose text contains one of the strings; None if none does.

        Args:
            tokens: Tokens of one completion.
            seen: Number of leading tokens that are known to contain none.
        """
        # A new match can only be in the tail: the new text, and the `overlap` characters before it in which a
        # string may have begun. The overlap is at least 1, because a character may be several tokens and be split at
        # that point; U+FFFD (`_INVALID`) is not counted as a character.
        overlap = max(1, max(map(len, self.strings)) - 1)
        start, step = seen, 1
        while start > 0 and len(self.decode(tokens[start:seen]).replace(_INVALID, "")) < overlap:
            start, step = max(0, start - step), 2 * step
        text = self.decode(tokens[start:])
        # With byte-fallback tokens, an incomplete character also garbles the characters beside it when decoded.
        # So tokens before or after a string may hide it, and the text must be decoded for each number of tokens.
        if not (self._in(text) or _INVALID in text):
            return None
        ends = range(seen + 1, len(tokens) + 1)
        holds = lambda tokens: self._in(self.decode(tokens))
        return next((n for n in ends if holds(tokens[start:n]) and holds(tokens[:n])), None)

    def settled(self, text: str) -> str:
        """Returns the longest prefix of an unfinished text that is safe to stream.

        What is left out may be the beginning of a stop string.
        """
        begun = (n for s in self.strings for n in range(len(s) + 1) if text.endswith(s[:n]))
        return text[: len(text) - max(begun, default=0)]

    def _in(self, text: str) -> bool:
        return any(string in text for string in self.strings)


def with_stop_tokens(
    params: SamplingParams, tokenizer: Tokenizer, section: str = ""
) -> SamplingParams:
    """Returns sampling options whose stop strings that are special tokens are stop tokens: no text has these.

    `section` is a prefix of field names in errors.

    Raises:
        ConfigError: If a stop string holds a special token beside other text, or an id is of no token.
    """
    special, known = tokenizer.special_tokens, tokenizer.num_tokens
    ids = dict.fromkeys(
        [*params.stop_token_ids, *(special[s] for s in params.stop if s in special)]
    )
    rule = f"must be ids of the tokenizer, which has {known} tokens"
    require(all(i < known for i in ids), f"{section}stop_token_ids", list(ids), rule)
    strings = tuple(string for string in params.stop if string not in special)
    for string in strings:
        token = next((token for token in special if token in string), None)
        rule = f"holds the special token {token!r}, which is in no text: give it alone, as a stop token"
        require(token is None, f"{section}stop", string, rule)
    return dataclasses.replace(params, stop=strings, stop_token_ids=tuple(ids))


def text_before(
    text: str, tokens: Sequence[int], params: SamplingParams, decode: Callable[..., str]
) -> str:
    """Returns the text of a completion's tokens without the stop token or the stop string that ended it."""
    if len(tokens) and tokens[-1] in params.stop_token_ids:
        text = text.removesuffix(decode([int(tokens[-1])]))
    return text[: min((text.find(s) for s in params.stop if s in text), default=len(text))]
