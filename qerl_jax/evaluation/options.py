"""The options of `qerl eval` and `qerl_jax.evaluate`."""

import dataclasses
from typing import Any, Literal, get_args

from qerl_jax.config import Drafts, PromptTemplate, TopP
from qerl_jax.generation.sampling_params import Whole
from qerl_jax.system.checked import Checked, Count, NotNegative, Seed

_Name = Literal["paper", "verl", "run"]


@dataclasses.dataclass(frozen=True)
class EvalOptions(Checked):
    """How sets of problems are asked and judged.

    Attributes:
        protocol: "paper" (temperature 0.6, top-p 0.95), "verl" (verl's own words, sampling and scorers), or
            "run" (prompt and sampling of the run, judged by its `eval.reward`). Absent means the run's where
            there is one, else the paper's.
        samples: N, completions per problem. It replaces what the protocol says, as do `temperature`, `top_p`,
            `max_tokens`, `system_prompt`, `prompt_template` and `reward`.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Keep the likeliest tokens whose probabilities add up to this.
        max_tokens: Longest completion in tokens.
        system_prompt: A system message, or the name of one: "think-answer", "answer-line" or
            "think-code"; "" for none.
        prompt_template: Text around the problem: "{prompt}" is filled in.
        apply_chat_template: Whether a prompt that is a text passes the chat template; absent means as it was in
            training, if there is a run, else true. With a system prompt it always does.
        reward: The name of the function that is at least 1 where a completion is right.
        path: Where the set lies if not on the hub: a folder or a file. Only with one set.
        split: Split of the sets, instead of the usual one.
        columns: Which columns hold the `prompt` and the `answer`, such as: prompt question answer solution
        num_problems: How many problems to ask, from the front: shuffle a file that is sorted.
        max_concurrent: The most completions sampled at a time, by each replica. Absent means as many as fit if each
            needs a quarter of its limit, at most 512, and at most 64 if the device does not report its memory (a CPU
            does not); but 128 rather than 129 to 256 where fused layers decode.
        drafts: "auto" makes drafts where few completions are left (`rollout.drafts`); "always" even if they do
            not pay; "off" makes none.
        seed: Random seed for sampling, and for arithmetic problems.
    """

    protocol: _Name | None = None
    samples: Count | None = None
    temperature: NotNegative | None = None
    top_p: TopP | None = None
    max_tokens: Count | None = None
    system_prompt: str | None = None
    prompt_template: PromptTemplate | None = None
    apply_chat_template: bool | None = None
    reward: str | None = None
    path: str | None = None
    split: str | None = None
    columns: dict[str, str] | None = None
    num_problems: Count | None = None
    max_concurrent: Whole | None = None
    drafts: Drafts = "auto"
    seed: Seed = 0

    def _across(self):
        rule = 'must be "paper", "verl" or "run"'
        return [(self.protocol in (None, *get_args(_Name)), "protocol", rule)]

    def of_source(self) -> dict[str, Any]:
        """Returns the fields that say where problems come from and in which form they are asked, as in `DataConfig`."""
        return _present(self, "path", "split", "columns", "num_problems", "apply_chat_template")

    def of_sampling(self) -> dict[str, Any]:
        """Returns the fields that replace those of a protocol's `SamplingParams`, by its names."""
        fields = _present(self, "temperature", "top_p", "max_tokens", "drafts")
        return fields if self.samples is None else fields | {"n": self.samples}

    def of_protocol(self) -> dict[str, Any]:
        """Returns the fields that replace those of a `Protocol`."""
        return _present(self, "system_prompt", "prompt_template", "reward")


def _present(options: EvalOptions, *names: str) -> dict[str, Any]:
    """Returns the fields among these that are not None."""
    fields = {name: getattr(options, name) for name in names}
    return {name: value for name, value in fields.items() if value is not None}
