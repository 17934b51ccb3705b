"""Sampling options under vLLM's names, for the generator and for `qerl generate`."""

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Annotated, get_args

from qerl_jax.config import Drafts, RepetitionPenalty, TopK, TopP
from qerl_jax.system.checked import Checked, Closed01, Count, NotNegative, Rule, is_seed

_texts = Rule(
    lambda texts: (
        not isinstance(texts, str) and all(isinstance(text, str) and text for text in texts)
    ),
    "must be texts, none empty",
)
_seeds = Rule(
    lambda seed: all(map(is_seed, seed)) if _is_list(seed) else is_seed(seed),
    "must be an integer in [0, 2**32), or one for each prompt",
)

_COUNTS = ("n", "max_tokens", "top_k")


def _is_list(seed: object) -> bool:
    return hasattr(seed, "__len__") and not isinstance(seed, dict)


@dataclasses.dataclass(frozen=True)
class SamplingParams(Checked):
    """How completions are sampled, by vLLM's names.

    Attributes:
        n: Completions per prompt.
        max_tokens: Longest completion in tokens; a completion ends where the model's context does, too.
        temperature: Sampling temperature; 0 takes the likeliest token (greedy).
        top_k: Keep the k likeliest tokens; 0 is off.
        top_p: Keep the likeliest tokens whose probabilities add up to this; 1 is off.
        min_p: Drop tokens below this fraction of the likeliest one's probability; 0 is off.
        repetition_penalty: Divides positive scores of tokens that were there before, and multiplies
            negative ones; 1 is off.
        stop: Texts before which a completion ends; they are not part of it.
        ignore_eos: Go on after the end token.
        drafts: "auto" makes drafts on a Hopper GPU where at most 32 rows are left that may get 512 tokens or more, and
            drafts are expected to pay (`rollout.drafts`); "off" makes none.
        seed: Random seed for sampling; or one for each prompt, which then gets the same completions beside
            any other prompts (another batch size rounds differently, which now and then changes a token).
    """

    n: Count = 1
    max_tokens: Count = 256
    temperature: NotNegative = 1.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: Closed01 = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    stop: Annotated[tuple[str, ...], _texts] = ()
    ignore_eos: bool = False
    drafts: Drafts = "auto"
    seed: Annotated[int | Sequence[int], _seeds] = 0

    def __post_init__(self):
        super().__post_init__()
        for name in _COUNTS:  # converts NumPy integers to int
            object.__setattr__(self, name, int(getattr(self, name)))

    def _across(self):
        drafts, rule = get_args(Drafts), "must be a whole number"
        whole = [(isinstance(getattr(self, name), Integral), name, rule) for name in _COUNTS]
        return [
            *whole,
            (self.drafts in drafts, "drafts", f"must be one of {', '.join(map(repr, drafts))}"),
        ]
