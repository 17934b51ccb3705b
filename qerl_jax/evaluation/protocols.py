r"""Sets for reported results, and the protocols of their evaluation.

A protocol is everything that a score depends on, besides policy and problems: the prompt, the
sampling, and what counts as right. Scores under different protocols are not comparable.
"""

import dataclasses

from qerl_jax.checked import Checked, Closed01, Count, NotNegative
from qerl_jax.config import PromptTemplate, ToolsConfig, TopK, TopP

# Where the names of `datasets.SETS` hold problems to report on: the split that the hub calls so.
SPLITS = {
    "gsm8k": "test",
    "math500": "test",
    "aime24": "train",
    "aime25": "test",
    "amc23": "test",
}
# Sets with at most so many problems need several samples of each.
_SMALL = ("aime24", "aime25", "amc23")
# verl's own words (its data_preprocess scripts, Apache-2.0): a score is only as comparable as its prompt.
_VERL_HASHES = '{prompt} Let\'s think step by step and output the final answer after "####".'
_VERL_BOXED = "{prompt} Let's think step by step and output the final answer within \\boxed{}."
# The words around the rows of AIME that its DAPO recipe is tested on.
_VERL_ANSWER_LINE = (
    "Solve the following math problem step by step. The last line of your response should be of the "
    "form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{prompt}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


# `names` are what `qerl eval` calls a field.
@dataclasses.dataclass(frozen=True)
class Protocol(
    Checked, names={"num_generations": "samples", "max_completion_length": "max_tokens"}
):
    """How one set is asked, sampled and judged.

    Attributes:
        reward: The function that is at least 1 where a completion is right.
        num_generations: N, completions per problem.
        temperature: Sampling temperature; 0 is greedy.
        top_p: Keep the likeliest tokens whose probabilities add up to this; 1 is off.
        top_k: Keep the k likeliest tokens; 0 is off.
        min_p: Drop tokens below this fraction of the likeliest one's probability; 0 is off.
        max_completion_length: Longest completion in tokens, the stop token included.
        system_prompt: The system message, as `datasets.load` takes it: None is the set's own.
        prompt_template: Text around the problem, as `datasets.load` takes it.
        stop: Strings that end a completion, beside the end token.
        tools: What the policy may call.
    """

    reward: str
    num_generations: Count = 1
    temperature: NotNegative = 0.6
    top_p: TopP = 0.95
    top_k: TopK = 0
    min_p: Closed01 = 0.0
    max_completion_length: Count = 4096
    system_prompt: str | None = None
    prompt_template: PromptTemplate | None = None
    stop: tuple[str, ...] | None = None
    tools: ToolsConfig | None = None

    def _across(self):
        holds = self.temperature > 0 or self.num_generations == 1
        rule = "greedy samples (temperature 0) of one problem are equal: must be 1"
        return [(holds, "num_generations", rule)]


def paper(dataset: str) -> Protocol:
    """QeRL's protocol: temperature 0.6, top-p 0.95, up to 4096 tokens, think and answer blocks.

    The paper averages several runs and does not say how many: here 4 samples of each problem, 32
    where a set has at most 40 problems. Mathematics judges the benchmarks (answer block, else box);
    of other sets the answer block is compared as text or number.

    Source: arXiv:2510.11696, section 4.
    """
    if dataset not in SPLITS:
        return Protocol("accuracy_reward", 4)
    samples = 32 if dataset in _SMALL else 4
    return Protocol("math_verify_reward", samples, system_prompt="think-answer")


def verl(dataset: str) -> Protocol:
    r"""verl's protocol: its words, its sampling and its scorers, which compare strings.

    GSM8K is greedy and ends in `#### ` and a number ("strict"; `verl_gsm8k_flexible_reward` is the other
    way to score it). AIME is asked for a line `Answer:`, sampled 32 times at temperature 1 and top-p
    0.7 with up to 20480 tokens, as in the DAPO recipe, and scored by the last such line among the last
    300 characters; so is AMC, for which verl has no scorer. The rows of "dapo_math" hold these words
    themselves. MATH-500, and any other set, is greedy and ends in a box, compared in Hendrycks' form.

    Source: verl, docs/algo/baseline.md, examples/data_preprocess, recipe/dapo and
    verl/utils/reward_score.
    """
    greedy = {"temperature": 0.0, "top_p": 1.0, "max_completion_length": 1024, "system_prompt": ""}
    if dataset == "gsm8k":
        return Protocol("verl_gsm8k_reward", prompt_template=_VERL_HASHES, **greedy)
    sampled = greedy | {"temperature": 1.0, "top_p": 0.7, "max_completion_length": 20480}
    if dataset in _SMALL:
        return Protocol("verl_aime_reward", 32, prompt_template=_VERL_ANSWER_LINE, **sampled)
    if dataset == "dapo_math":
        return Protocol("dapo_reward", **sampled)
    return Protocol("verl_math_reward", prompt_template=_VERL_BOXED, **greedy)
