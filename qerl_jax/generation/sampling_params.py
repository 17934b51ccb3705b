"""How completions are sampled, by vLLM's names: the only place that has temperature, top-p, lengths and seeds.

Sections of a config and options of a command have TRL's names; `from_section` translates them.
"""

import dataclasses
from collections.abc import Sequence
from numbers import Integral
from typing import Annotated, Any, Self, get_args

from qerl_jax.config import Drafts, EvalConfig, RepetitionPenalty, RolloutConfig, TopK, TopP
from qerl_jax.system.checked import (
    SEED_RULE,
    Checked,
    Closed01,
    Count,
    NotNegative,
    Open01,
    Rule,
    is_seed,
    pythons,
)

_texts = Rule(
    lambda texts: (
        not isinstance(texts, str) and all(isinstance(text, str) and text for text in texts)
    ),
    "must be a list of texts, none empty",
)
_ids = Rule(
    lambda ids: all(isinstance(i, Integral) and not isinstance(i, bool) and i >= 0 for i in ids),
    "must be ids of tokens, in a list",
)
_seeds = Rule(
    lambda seed: all(map(is_seed, seed)) if _is_list(seed) else is_seed(seed),
    f"{SEED_RULE}, or one for each prompt",
)

_whole = Rule(
    lambda n: isinstance(n, Integral) and 1 <= n < 2**31, "must be at least 1, and a whole number"
)
# A number of rows or tokens.
Whole = Annotated[int, _whole]

_COUNTS = ("n", "max_tokens", "top_k")
# The fields for which a decoding program is compiled.
_COMPILED = ("top_k", "top_p", "min_p", "repetition_penalty")
# The most completions that are sampled at a time, by default, on a device that does not report its memory.
_MOST_UNREPORTED = 64
# TRL's names of fields that have another name there.
_TRL = {"n": "num_generations", "max_tokens": "max_completion_length"}


def _is_list(seed: object) -> bool:
    return hasattr(seed, "__len__") and not isinstance(seed, dict)


@dataclasses.dataclass(frozen=True)
class SamplingParams(Checked):
    """How completions are sampled, by vLLM's names.

    Attributes:
        n: Completions per prompt.
        max_tokens: Longest completion in tokens; a completion ends where the model's context does, too.
        temperature: Sampling temperature; 0 takes the likeliest token (greedy).
        top_k: Keep the k likeliest tokens; 0 is off, and so is -1, as in vLLM.
        top_p: Keep the likeliest tokens whose probabilities add up to this; 1 is off.
        min_p: Drop tokens below this fraction of the likeliest one's probability; 0 is off.
        repetition_penalty: Divides positive scores of tokens that were there before, and multiplies
            negative ones; 1 is off.
        stop: Texts before which a completion ends; they are not part of it. A text that is a special token is a stop
            token; no other may hold one.
        stop_token_ids: Ids of tokens that end a completion, besides the end tokens; the text leaves them out.
        ignore_eos: Go on after the end tokens.
        drafts: "auto" makes drafts on a Hopper GPU where at most 32 rows are left that may get 512 tokens or more, and
            drafts are expected to pay (`rollout.drafts`); "always" makes them even if not, "off" makes none.
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
    stop_token_ids: Annotated[tuple[int, ...], _ids] = ()
    ignore_eos: bool = False
    drafts: Drafts = "auto"
    seed: Annotated[int | Sequence[int], _seeds] = 0

    def __post_init__(self):
        super().__post_init__()
        for name in _COUNTS:  # converts NumPy integers to int
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "top_k", max(0, self.top_k))
        object.__setattr__(self, "stop_token_ids", tuple(map(int, self.stop_token_ids)))

    def _across(self):
        drafts, rule = get_args(Drafts), "must be a whole number"
        whole = [(isinstance(getattr(self, name), Integral), name, rule) for name in _COUNTS]
        return [
            *whole,
            (self.drafts in drafts, "drafts", f"must be one of {', '.join(map(repr, drafts))}"),
        ]

    def compiled(self) -> "SamplingParams":
        """Returns the parameters for which a decoding program is compiled; all others have their defaults."""
        return SamplingParams(**{name: getattr(self, name) for name in _COMPILED})

    def identity(self) -> dict[str, Any]:
        """Returns the fields that decide about a completion's distribution, as JSON: all but `n`, `drafts` and `seed`."""
        fields = {k: v for k, v in vars(self).items() if k not in ("n", "drafts", "seed")}
        return fields | {"stop": list(self.stop), "stop_token_ids": list(self.stop_token_ids)}


def from_section(section: RolloutConfig | EvalConfig, **others: Any) -> SamplingParams:
    """Translates a section of a config, which has TRL's names.

    Args:
        section: Fields that it has not, or that are None there, get their defaults.
        **others: Fields of `SamplingParams` that the section does not have.
    """
    names = {
        field.name: _TRL.get(field.name, field.name) for field in dataclasses.fields(SamplingParams)
    }
    values = {name: getattr(section, trl, None) for name, trl in names.items()}
    return SamplingParams(**{k: v for k, v in values.items() if v is not None} | others)


@dataclasses.dataclass(frozen=True)
class EngineLimits(Checked):
    """How much is sampled at a time.

    Attributes:
        max_concurrent: Completions sampled at a time, by each replica. Absent means as many as fit in the cache if
            each needs a quarter of its limit, at most 512, and at most 64 if the device does not report its memory (a
            CPU does not); but 128 rather than 129 to 256 where fused layers decode, which take no more.
        kv_cache_tokens: Capacity for keys and values, in tokens; completions wait while it is full.
        kv_cache_fraction: That capacity as a fraction of the free device memory. If both are absent, it is what
            `max_concurrent` completions can need, but at most nine tenths of what scores and a prefill leave of that
            memory.
    """

    max_concurrent: Whole | None = None
    kv_cache_tokens: Whole | None = None
    kv_cache_fraction: Open01 | None = None

    def __post_init__(self):
        super().__post_init__()
        for name, value in vars(self).items():  # converts numbers of NumPy to Python's
            object.__setattr__(self, name, pythons(value))

    @classmethod
    def of(cls, section: RolloutConfig) -> Self:
        """Returns the limits of a config's section, which has the same names."""
        return cls(
            **{field.name: getattr(section, field.name) for field in dataclasses.fields(cls)}
        )

    def on_this_device(self) -> Self:
        """Returns these limits, with `max_concurrent` if nothing else bounds the cache: no memory is reported, none given."""
        from pallas_kernels import runtime

        is_bounded = self != EngineLimits() or runtime.memory_stats() is not None
        return self if is_bounded else dataclasses.replace(self, max_concurrent=_MOST_UNREPORTED)

    def _across(self):
        fraction = self.kv_cache_fraction
        beside = "must be absent beside kv_cache_tokens"
        rules = [(None in (self.kv_cache_tokens, fraction), "kv_cache_fraction", beside)]
        if fraction is not None:
            from pallas_kernels import runtime  # imports JAX, which makes `qerl --help` slow

            rule = "this device does not report its memory: give kv_cache_tokens"
            rules.append((runtime.memory_stats() is not None, "kv_cache_fraction", rule))
        return rules
