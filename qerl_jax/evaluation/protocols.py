r"""Benchmark data sets, and the protocols of their evaluation.

A protocol is everything besides policy and problems that a score depends on: the prompt, the sampling, and the reward
function. Scores under different protocols are not comparable.
"""

import dataclasses
from typing import Any

from qerl_jax.config import PromptTemplate, ToolsConfig
from qerl_jax.generation.sampling_params import SamplingParams
from qerl_jax.system.checked import Checked

# The split of a benchmark on the hub, by its name in `datasets.SETS`.
SPLITS = dict.fromkeys(("gsm8k", "math500", "aime24", "aime25", "amc23"), "test") | {
    "aime24": "train"
}
# Sets with at most 40 problems, which need many samples of each.
_SMALL = ("aime24", "aime25", "amc23")
# verl's prompts (its data_preprocess scripts, Apache-2.0): scores are comparable only under the same prompt.
_VERL_HASHES = '{prompt} Let\'s think step by step and output the final answer after "####".'
_VERL_BOXED = "{prompt} Let's think step by step and output the final answer within \\boxed{}."
# The prompt around the AIME problems on which verl's DAPO recipe is tested.
_VERL_ANSWER_LINE = (
    "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


# `names` maps fields to the names of their options in `qerl eval`.
@dataclasses.dataclass(frozen=True)
class Protocol(Checked, names={"sampling.n": "samples"}):
    """The prompt, the sampling and the reward function for the problems of one set.

    Attributes:
        reward: Name of the reward function; a completion is right if it gives at least 1.
        sampling: Number and length of completions, and how they are sampled. Its seed is not used.
        system_prompt: The system prompt, as in `DataConfig`: None means that of the data set.
        prompt_template: Text around the problem, as in `DataConfig`.
        tools: The tools that the policy may call; None for none.
    """

    reward: str
    sampling: SamplingParams
    system_prompt: str | None = None
    prompt_template: PromptTemplate | None = None
    tools: ToolsConfig | None = None

    def _across(self):
        holds = self.sampling.temperature > 0 or self.sampling.n == 1
        rule = "greedy samples (temperature 0) of one problem are equal: must be 1"
        return [(holds, "sampling.n", rule)]

    def table(self) -> dict[str, Any]:
        """Returns the fields that a score depends on, those of `sampling` among them, as plain values."""
        fields = dataclasses.asdict(self)
        del fields["sampling"]
        return fields | {"n": self.sampling.n} | self.sampling.identity()


def paper(dataset: str) -> Protocol:
    """Returns QeRL's protocol: temperature 0.6, top-p 0.95, up to 4096 tokens, think and answer blocks.

    The paper averages several runs and does not say how many. Here there are 4 samples per problem, or 32 for sets of
    at most 40 problems. Answers to benchmarks (the answer block, else the box) are judged mathematically. For other
    sets the answer block is compared as text or number.

    Source: arXiv:2510.11696, section 4.
    """
    samples = 32 if dataset in _SMALL else 4
    sampling = SamplingParams(n=samples, temperature=0.6, top_p=0.95, max_tokens=4096)
    if dataset not in SPLITS:
        return Protocol("accuracy_reward", sampling)
    return Protocol("math_verify_reward", sampling, "think-answer")


def verl(dataset: str) -> Protocol:
    r"""Returns verl's protocol, with its prompts, its sampling and its scorers, which compare strings.

    GSM8K is sampled greedily, and completions end with `#### ` and a number ("strict" scoring;
    `verl_gsm8k_flexible_reward` is verl's other scorer). For AIME the prompt asks for a line `Answer:`. There are 32
    samples at temperature 1 and top-p 0.7 with up to 20480 tokens, as in the DAPO recipe, and the last such line in
    the last 300 characters is scored. AMC, for which verl has no scorer, is treated in the same way. The rows of
    "dapo_math" already contain this prompt. MATH-500 and all other sets are sampled greedily, and the box is compared
    in Hendrycks' form.

    Source: verl, docs/algo/baseline.md, examples/data_preprocess, recipe/dapo and
    verl/utils/reward_score.
    """
    greedy = SamplingParams(temperature=0.0, max_tokens=1024)
    if dataset == "gsm8k":
        return Protocol("verl_gsm8k_reward", greedy, "", _VERL_HASHES)
    samples = 32 if dataset in _SMALL else 1
    sampled = SamplingParams(n=samples, temperature=1.0, top_p=0.7, max_tokens=20480)
    if dataset in _SMALL:
        return Protocol("verl_aime_reward", sampled, "", _VERL_ANSWER_LINE)
    if dataset == "dapo_math":
        return Protocol("dapo_reward", sampled, "")
    return Protocol("verl_math_reward", greedy, "", _VERL_BOXED)
