"""Tests configs: what a file may say, what is refused, and the words of the errors."""

import ast
import copy
import dataclasses
import pathlib
import re

import numpy as np
import pytest

from qerl_jax import config
from qerl_jax.config import ConfigError, RunConfig
from qerl_jax.config import rules as config_rules
from qerl_jax.rewards import scoring
from qerl_jax.system import checked
from qerl_jax.training import load
from qerl_jax.training.trainer import train
from tests.faults import harness

CONFIGS = pathlib.Path(__file__).parents[3] / "configs"
MINIMAL = {
    "output_dir": "run",
    "max_steps": 10,
    "model": {"model_name_or_path": "qerl-tiny"},
    "data": {"dataset": "arithmetic"},
    "rewards": {"functions": ["accuracy_reward"]},
}
# Every field differs from its default, so that a field lost on the way out and in shows.
# fmt: off
FULL = RunConfig(
    output_dir='runs/a "quoted"\nname', num_train_epochs=1.5, seed=7, save_steps=10, save_total_limit=1,
    log_completions=False, deterministic=True, report_to=("tensorboard", "trackio"), run_name="one",
    model=config.ModelConfig(
        "base", "tokenizer", "bfloat16", "float32", True, "layer", adapter_name_or_path="adapter",
        chat_template_kwargs={"enable_thinking": False}, chat_template_date="2026-07-26",
        kernels="reference", block_scales="maximum"),
    data=config.DataConfig(
        "gsm8k", path="folder", name="main", split="test", system_prompt="Be brief.\n",
        max_prompt_length=100, overlong_prompts="drop", num_problems=7, max_prompt_characters=500,
        columns={"prompt": "question"}, prompt_template="{prompt}!"),
    rewards=config.RewardConfig(
        ("accuracy_reward", "a.b:c"), (1.0, 0.1), soft_punish_cache=16, soft_punish_weight=0.5,
        options={"a.b:c": {"x": 1}}, shaping=("c",)),
    lora=config.LoraConfig(
        4, 8.5, 0.25, True, ("q_proj",), {"q_proj": 2}, {r"layers\.0\..*": 3.5}, True),
    rollout=config.RolloutConfig(
        num_generations=4, generation_batch_size=32, max_concurrent=6, kv_cache_tokens=4096,
        compact=False, max_completion_length=64, temperature=0.7, top_k=20, top_p=0.95, min_p=0.05,
        repetition_penalty=1.1, stop=("</answer>",), stop_token_ids=(7, 9), ignore_eos=True, drafts="off"),
    grpo=config.GrpoConfig(
        loss_type="dr_grpo", epsilon=0.1, epsilon_high=0.28, delta=2.5, advantage_estimator="rloo",
        importance_sampling_level="sequence", scale_rewards="batch", mask_truncated_completions=True,
        multi_objective_aggregation="normalize_then_sum", num_iterations=2, old_logprobs="recompute",
        top_entropy_quantile=0.2, reference=config.ReferenceConfig(1e-3, "synced", "k1", True, 0.5, 64),
        dynamic_sampling=config.DynamicSamplingConfig("accuracy_reward", 3),
        mismatch=config.MismatchConfig(
            config.CorrectionConfig("sequence_mask", 2.0, 0.5), config.MaskConfig(1.01, 0.98, "geometric"), 0.5),
        entropy=config.EntropyConfig(0.01, True, 0.001, 0.1, 0.002, 0.3)),
    mesh=config.MeshConfig(2, 2),
    tools=config.ToolsConfig(
        ("calculator",), "guess_number", None, {"high": 10}, 3, 64, 2.5, 2, call_format="hermes"),
    optim=config.OptimConfig(
        3e-5, "linear", 0.05, 0.1, 0.8, 0.999, 1e-6, 0.01, 1.0, 2, 4, 1000, False, "adamw_8bit"),
    noise=config.NoiseConfig(
        5e-2, 5e-4, 5, "linear", "paper", "both", True, per="group", unit="relative",
        adaptive=config.AdaptiveNoiseConfig(0.7, "reward", 1.05)),
    eval=config.EvalConfig("validation", 16, "format_reward", 0.6, 0.95, 25, 4, "math500", "here"))
# What excludes a field of FULL.
OTHER = dataclasses.replace(
    FULL,
    model=dataclasses.replace(FULL.model, trainable="full", adapter_name_or_path=None),
    mesh=config.MeshConfig(2), lora=config.LoraConfig(), num_train_epochs=None, max_steps=16,
    grpo=config.GrpoConfig("sapo", old_logprobs="recompute", sapo=config.SapoConfig(2.0, 3.0)),
    rollout=dataclasses.replace(
        FULL.rollout, generation_batch_size=None, steps_per_generation=16, kv_cache_tokens=None, kv_cache_fraction=0.5),
    tools=config.ToolsConfig(
        ("calculator",), environments={"game": "guess_number", "mine": "my.py:Game"},
        environment_options={"game": {"high": 10}}, call_pattern="(?P<argument>.*)"))
# And what excludes a field of both.
THIRD = dataclasses.replace(
    FULL,
    data=dataclasses.replace(FULL.data, system_prompt=None, apply_chat_template=False),
    grpo=config.GrpoConfig("vespo", old_logprobs="recompute", vespo=config.VespoConfig(1.0, 1.0, 2.0, 1.0)),
    mesh=config.MeshConfig(2, tensor=2))
# fmt: on


def build(**changes):
    """Builds MINIMAL with fields replaced; a field of a section is named section__field, and ... removes one."""
    result = copy.deepcopy(MINIMAL)
    for name, value in changes.items():
        *sections, field = name.split("__")
        target = result
        for section in sections:
            target = target.setdefault(section, {})
        if value is ...:
            del target[field]
        else:
            target[field] = value
    return config.from_table(RunConfig, result)


# Rollouts that end before all rows have; neither goes with the tools of the others.
LEAVES = (
    build(rollout__carry=3, noise__estimator="corrected"),
    build(rollout__stop_share=0.9, noise__estimator="published"),
)


def test_a_minimal_file_gets_the_defaults():
    cfg = build()
    assert cfg.lora == config.LoraConfig() and cfg.grpo == config.GrpoConfig()
    assert cfg.optim == config.OptimConfig() and cfg.rewards.functions == ("accuracy_reward",)
    assert cfg.noise is None and cfg.eval is None
    assert build(noise={}).noise == config.NoiseConfig()


@pytest.mark.parametrize("cfg", [FULL, OTHER, THIRD, *LEAVES, build(), build(noise={}, eval={})])
def test_a_config_survives_being_written_and_read(cfg, tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config.dump(cfg))
    assert config.load(path) == cfg
    assert config.load(str(path)) == cfg


def test_the_full_config_differs_from_the_defaults_everywhere():
    """This guards the round trip above: a field that is added later must be set in one of these configs too."""

    def compare(cls, parts):
        for field in dataclasses.fields(cls):
            values = [getattr(part, field.name) for part in parts]
            assert {repr(value) for value in values} != {repr(field.default)}, field.name
            if inner := checked.sections(cls).get(field.name):
                compare(inner, [value for value in values if value is not None])

    compare(RunConfig, (FULL, OTHER, THIRD, *LEAVES))


def test_whole_numbers_are_accepted_for_floats_and_become_floats():
    cfg = build(lora__alpha=16, rewards__weights=[2], num_train_epochs=1, max_steps=...)
    values = (cfg.lora.alpha, cfg.rewards.weights[0], cfg.num_train_epochs)
    assert values == (16.0, 2.0, 1.0)
    assert {type(value) for value in values} == {float}


def test_numbers_of_numpy_become_pythons():
    def of(real, whole, truth):
        options = {"accuracy_reward": {"of": [whole(3)]}}
        lora = {"rank": whole(8), "rank_pattern": {"down_proj": whole(4)}}
        changes = {"optim__learning_rate": real, "log_completions": truth(False), "lora": lora}
        return build(**changes, rewards__options=options)

    cfg = of(np.logspace(-6, -4, 3)[0], np.int64, np.bool_)
    assert cfg == of(1e-6, int, bool)
    assert config.dump(cfg)  # TOML has no other numbers
    assert type(cfg.optim.learning_rate) is float and type(cfg.lora.rank) is int


# Fields that count something: none of them may be 0.
COUNTS = """
    max_steps save_steps save_total_limit data.max_prompt_length data.num_problems
    data.max_prompt_characters lora.rank rollout.generation_batch_size rollout.max_concurrent
    grpo.num_iterations grpo.reference.sync_steps grpo.dynamic_sampling.max_rounds
    rewards.soft_punish_cache rollout.steps_per_generation optim.per_device_train_batch_size
    optim.gradient_accumulation_steps mesh.data mesh.fsdp mesh.tensor eval.num_problems
    eval.num_generations
"""
# What a field may not have: field and value, fields beside it, and words of the rule.
REFUSED = r"""
output_dir = '' | must not be empty
num_train_epochs = 0.0; max_steps = ... | must be positive
seed = -1 | must be an integer in [0, 2**32)
model.model_name_or_path = '' | must not be empty
model.weights = 'int4' | 'nvfp4', 'mxfp4', 'nf4', 'bfloat16', 'float32'
model.dtype = 'float16' | one of 'bfloat16', 'float32'
data.overlong_prompts = 'cut' | 'error', 'drop'
data.columns = {'q': 'x'} | which column is "prompt"
data.columns = 'x' | must be a section
data.prompt_template = '?' | must contain "{prompt}"
rewards.options = {'other': {'x': 1}} | must be of functions that are used: accuracy_reward
rewards.functions = 'f' | must be a list
lora.alpha = 0.0 | must be positive
lora.dropout = 1.0 | must be in [0, 1)
lora.dropout = -0.1 | must be in [0, 1)
rollout.num_generations = 1 | must be at least 2
rollout.generation_batch_size = -8 | at least 1
rollout.generation_batch_size = 24; optim.gradient_accumulation_steps = 2
    | optim.per_device_train_batch_size * optim.gradient_accumulation_steps = 16
rollout.max_completion_length = 0 | at least 1
grpo.mask_truncated_completions = True; rollout.ignore_eos = True
    | rollout.ignore_eos = true, under which no completion ends
rollout.kv_cache_tokens = 1023 | must hold a row of data.max_prompt_length + rollout.max_completion_length = 1024
rollout.kv_cache_fraction = 1.0 | in (0, 1)
rollout.kv_cache_fraction = 0.5; rollout.kv_cache_tokens = 4096 | must be absent where kv_cache_tokens is given
rollout.carry = -1 | must be at least 0
rollout.carry = 999999999 | must make at most 1048576
rollout.carry = 8; noise.scope = 'both' | must be 0 with noise.scope = "both"
rollout.carry = 8; noise.per = 'group' | must be 0 unless noise.per = "rollout"
rollout.carry = 8; grpo.old_logprobs = 'recompute' | must be 0 with grpo.old_logprobs = "recompute"
rollout.carry = 8; noise.estimator = 'published' | or noise.estimator = "published"
rollout.carry = 8; tools.functions = ('calculator',) | must be 0 with a [tools] section
rollout.stop_share = 1.0 | must be in (0, 1)
rollout.stop_share = 0.9; rollout.carry = 8 | must be absent with rollout.carry
rollout.stop_share = 0.9; tools.functions = ('calculator',) | must be absent with a [tools] section
rollout.repetition_penalty = 0.0 | be positive
rollout.temperature = 0.0 | must be positive
rollout.top_k = -2 | must be at least -1
rollout.top_p = 0.0 | must be in (0, 1]
rollout.top_p = 1.5 | must be in (0, 1]
rollout.min_p = -0.5 | must be in [0, 1]
rollout.min_p = 1.5 | must be in [0, 1]
grpo.loss_type = 'ppo' | 'grpo', 'bnpo', 'dr_grpo', 'dapo', 'cispo'
tools.environment_options = {'high': 3}; tools.functions = ('calculator',) | needs tools.environment
tools.environments = {'a': 'guess_number'}; tools.environment = 'guess_number'
    | must be absent where tools.environment is given
tools.environments = {} | must name at least one
tools.call_pattern = '(?P<argument>.)'; tools.functions = ('a',); tools.call_format = 'hermes'
    | must be absent where tools.call_format
lora.target_modules = () | must name at least one of
lora.rank_pattern = {'q_proj': 0} | at least 1 and at most
lora.alpha_pattern = {'q_proj': 0.0} | must be positive
lora.rank_pattern = {'*q': 4} | regular expressions
grpo.delta = 3.0; grpo.loss_type = 'sapo' | must be absent with grpo.loss_type = "sapo"
grpo.mismatch.correction.mode = 'sequence_mask'; grpo.loss_type = 'vespo'; grpo.old_logprobs = 'recompute'
    | "token_truncate" or "token_mask"
grpo.entropy.coef = 2.0; grpo.entropy.adaptive = True | coef_max = 1.0, because it begins there
grpo.top_entropy_quantile = 1.5 | [0, 1]
grpo.epsilon = 0.0 | must be in (0, 1)
grpo.epsilon = 1.0 | must be in (0, 1)
grpo.epsilon_high = 0.0 | must be > 0
grpo.delta = 1.2 | must exceed 1 + epsilon_high = 1.2
grpo.delta = -1.0 | or be 0 for none
grpo.mismatch.correction.clip_min = 3.0 | must be below clip_max = 3.0
grpo.mismatch.mask.ratio_max = 1.0 | must be above 1
grpo.mismatch.off_policy_threshold = 0.0 | must be positive
grpo.delta = 1.25; grpo.epsilon_high = 0.25 | must exceed 1 + epsilon_high = 1.25
noise.per = 'token'; noise.scope = 'both' | needs noise.scope = "rollout"
noise.estimator = 'published'; noise.scope = 'both' | needs noise.scope = "rollout"
noise.estimator = 'clean' | 'corrected', 'published'
noise.adaptive.metric = 'kl'; noise.adaptive.target = 0.01; noise.scope = 'both' | needs noise.scope = "rollout"
grpo.reference.beta = -0.1 | must not be negative
grpo.importance_sampling_level = 'row' | 'token', 'sequence'
grpo.scale_rewards = 'all' | 'group', 'batch', 'none'
grpo.old_logprobs = 'noisy' | 'behaviour', 'recompute'
grpo.mismatch.correction.mode = 'clip' | 'token_truncate', 'token_mask', 'sequence_truncate', 'sequence_mask'
grpo.mismatch.correction.clip_max = 0.0 | must be positive
grpo.reference.kl_estimator = 'k4' | 'k1', 'k2', 'k3'
grpo.reference.kl_estimator = 'k1' | as a loss it is noise of mean 0 unless grpo.reference.bias_correction = true
rollout.repetition_penalty = 1.1 | set grpo.old_logprobs = "recompute"
grpo.reference.policy = 'adapter' | needs model.adapter_name_or_path
grpo.reference.mixup_alpha = 1.5 | must be in [0, 1]
grpo.advantage_estimator = 'gae' | 'grpo', 'rloo'
grpo.advantage_estimator = 'rloo' | needs grpo.scale_rewards = "none" or "batch"
rewards.soft_punish_cache = 513 | must not exceed rollout.max_completion_length = 512
rewards.soft_punish_weight = 0.0 | must be positive
rollout.steps_per_generation = 2; rollout.generation_batch_size = 16
    | must be absent where generation_batch_size is given
model.adapter_name_or_path = 'a'; model.trainable = 'full'; model.weights = 'bfloat16' | needs model.trainable
model.trainable = 'head' | 'lora', 'full'
model.trainable = 'full' | packed weights have no gradient
model.trainable = 'full'; model.weights = 'bfloat16'; lora.rank = 8 | has no adapter for a [lora] section to describe
optim.learning_rate = 0.0 | must be positive
optim.learning_rate = '1e-5' | must be of type float
optim.lr_scheduler_type = 'step' | 'cosine', 'linear', 'constant'
optim.warmup_ratio = 1.0 | must be in [0, 1)
optim.min_lr_ratio = 1.1 | must be in [0, 1]
optim.min_lr_ratio = 0.1; optim.lr_scheduler_type = 'constant' | with lr_scheduler_type = "constant", under which
optim.adam_beta1 = 1.0 | must be in [0, 1)
optim.adam_beta2 = -0.1 | must be in [0, 1)
optim.adam_epsilon = 0.0 | must be positive
optim.weight_decay = -0.1 | must not be negative
optim.max_grad_norm = 0.0 | must be positive
optim.max_tokens_per_microbatch = 1023 | data.max_prompt_length + rollout.max_completion_length = 1024
optim.max_tokens_per_microbatch = 4096; grpo.loss_type = 'bnpo' | with grpo.loss_type = "bnpo"
mesh.data = 9 | must not exceed the 8 rows of a rollout
mesh.fsdp = 2; model.trainable = 'full'; model.weights = 'bfloat16' | goes with an adapter
model.gradient_checkpointing = 'none'; mesh.fsdp = 2 | would keep the weights that layers gather: take "auto"
mesh.fsdp = 2; mesh.tensor = 4 | must be absent with mesh.tensor = 4
mesh.tensor = 2; model.trainable = 'full'; model.weights = 'bfloat16' | goes with an adapter
model.gradient_checkpointing = 'none'; mesh.tensor = 2 | with mesh.tensor "none" would keep the weights
noise.sigma_start = 0.0 | must be positive
noise.sigma_end = 0.0 | must be in (0, sigma_start = 0.01]
noise.sigma_end = 0.1 | must be in (0, sigma_start = 0.01]
noise.num_stages = 2 | must be at least 3
noise.schedule = 'step' | 'exponential', 'linear'
noise.exponent = 'eq8' | 'code', 'paper'
noise.scope = 'trainer' | 'rollout', 'both'
eval.temperature = -1.0 | must not be negative
eval.top_p = 0.0 | must be in (0, 1]
eval.eval_steps = -1 | must not be negative
eval.num_generations = 4; eval.temperature = 0.0 | 1 at temperature 0
eval.path = 'here' | needs eval.dataset
max_steps = True | must be of type int
max_steps = 10.0 | must be of type int
lora.rank = True | must be of type int
lora.alpha = True | must be of type float
lora.train_norms = 1 | must be of type bool
data.path = 3 | must be of type str
model = 'qerl-tiny' | must be a section
noise = True | must be a section
model.chat_template_kwargs = {'tools': None} | must hold texts, numbers,
rewards.options = {'accuracy_reward': {'of': [{1: 2}]}} | must hold texts, numbers,
"""
# The same where the message is about something else: its beginning, and words of the rule.
BAD = r"""
max_steps = ... | max_steps, num_train_epochs: got (None, None) ... exactly one of the two
num_train_epochs = 1.0 | max_steps, num_train_epochs: got (10, 1.0) ... exactly one
noise.estimator = 'published'; grpo.old_logprobs = 'recompute'
    | noise.estimator, grpo.old_logprobs: got ('published', 'recompute') ... at most one of the two
noise.estimator = 'corrected'; grpo.old_logprobs = 'recompute'; grpo.mismatch = {'correction': {}}
    | noise.estimator, grpo.old_logprobs: got ('corrected', 'recompute') ... at most one of the two
seed = 4294967296 | seed: got 4294967296 ... must be an integer in [0, 2**32)
data.columns = {'prompt': 1} | data.columns.prompt: got 1 ... must be of type str
rewards.options = {'f': 1} | rewards.options.f: got 1 ... must be a section
rewards.functions = [] | rewards.functions: got () ... must name at least one function
rewards.functions = ['f', 1] | rewards.functions[1]: got 1 ... must be of type str
rewards.weights = [1.0, 2.0] | rewards.weights: got (1.0, 2.0) ... per function (1)
rewards.weights = [True] | rewards.weights[0]: got True ... must be of type float
rollout.num_generations = 3
    | optim.per_device_train_batch_size * optim.gradient_accumulation_steps: got 8 ... must be a multiple of rollout.num_generations = 3
rollout.stop = ['a', ''] | rollout.stop: got ('a', '') ... none empty
tools = {} | tools.functions: got () ... must name at least one tool
tools.environments = {'a': 'b:C'}; tools.environment_options = {'high': 3}
    | tools.environment_options: got {'high': 3} ... must be a table for each name of tools.environments: a
tools.environments = {'a': 'b:C'}; tools.environment_options = {'a': 3}
    | tools.environment_options: got {'a': 3} ... must be a table for each name of tools.environments: a
tools.functions = ('a',); tools.call_pattern = 'call' | tools.call_pattern: got 'call' ... (?P<
tools.functions = ('a',); tools.call_pattern = '(?P<argument>' | tools.call_pattern: got '(?P<argument>' ... (?P<
lora.target_modules = ('lm_head',) | lora.target_modules[0]: got 'lm_head' ... 'q_proj'
grpo.loss_type = 'cispo' | grpo.epsilon_high: got None ... 5 is usual
grpo.entropy = {'adaptive': True, 'coef': 0.15, 'coef_min': 0.2, 'coef_max': 0.1}
    | grpo.entropy.coef: got 0.15 ... must lie between coef_min = 0.2 and coef_max = 0.1
grpo.entropy = {} | grpo.entropy.coef: got 0.0 ... must be positive, unless
grpo.sapo.temperature_pos = 2.0 | grpo.sapo: got {'temp ... needs grpo.loss_type = "sapo"
grpo.vespo = {} | grpo.vespo: got {'k_pos': 2.0 ... needs grpo.loss_type = "vespo"
grpo.mismatch = {}
    | grpo.mismatch.off_policy_threshold: got None ... must be given where grpo.mismatch has neither a correction nor a mask
noise.per = 'sequence'; noise.scope = 'both'
    | optim.share_prompts: got True ... must be false with noise.per = "sequence"
noise.adaptive = {'target': 0.5, 'rate': 1.0} | noise.adaptive.rate: got 1.0 ... must be above 1
grpo.mismatch = {'correction': {}}
    | grpo.mismatch.correction: got {'mode': 'token_truncate', 'clip_max': 3.0} ... needs grpo.old_logprobs = "recompute"
grpo.num_iterations = 3 | max_steps: got 10 ... must be a multiple of the 3 optimizer steps made from each rollout
rollout.generation_batch_size = 32
    | max_steps: got 10 ... must be a multiple of the 4 optimizer steps made from each rollout
rollout.steps_per_generation = 3; optim.gradient_accumulation_steps = 2
    | optim.per_device_train_batch_size * rollout.steps_per_generation: got 24 ... must be a multiple of the optimizer batch
model.trainable = 'full'; model.weights = 'bfloat16'; grpo.reference = {}
    | grpo.reference.policy: got None ... must be "synced" with model.trainable = "full"
report_to = ('mlflow',) | report_to[0]: got 'mlflow' ... must be one of 'tensorboard', 'wandb'
"""


def cases(text):
    """Reads the rows of a table as changes by field, and a text."""
    for row in re.split(r"\n(?! )", text.strip()):
        assignments, words = re.split(r"\s+\| ", row, maxsplit=1)
        pairs = (assignment.split(" = ", 1) for assignment in assignments.split("; "))
        yield {field: ast.literal_eval(value) for field, value in pairs}, words


def refusal(changes):
    """Returns the error about a config with these changes."""
    with pytest.raises(ConfigError) as error:
        build(**{field.replace(".", "__"): value for field, value in changes.items()})
    return str(error.value)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [*(({name: 0}, "at least 1") for name in COUNTS.split()), *cases(REFUSED)],
    ids=str,
)
def test_a_value_that_a_field_may_not_have_is_refused(changes, rule):
    (field, value), *_ = changes.items()
    assert refusal(changes).startswith(f"{field}: got {value!r}") and rule in refusal(changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        *cases(BAD),
        ({"rollout.temperature": float("nan")}, "rollout.temperature: got nan ... must be finite"),
        ({"lora.alpha": float("inf")}, "lora.alpha: got inf ... must be finite"),
        ({"rewards.weights": [float("nan")]}, "rewards.weights[0]: got nan ... must be finite"),
        ({"model.chat_template_kwargs": {"f": print}}, "model.chat_template_kwargs: got {'f': <built-in function print>} ... must hold texts"),
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_value_is_an_error_that_names_field_value_and_rule(changes, words):
    beginning, rule = words.split(" ... ")
    message = refusal(changes)
    assert message.startswith(beginning) and rule in message


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        (FULL.lora, {"rank": 0}, "lora.rank: got 0; must be at least 1"),
        (FULL.lora, {"dropout": float("nan")}, "lora.dropout: got nan; must be in [0, 1)"),
        (FULL.noise, {"sigma_end": 1.0}, "noise.sigma_end: got 1.0; must be in (0, sigma"),
        (FULL.rollout, {"kv_cache_fraction": 1.0}, "fraction: got 1.0; must be in (0, 1)"),
        (FULL, {"seed": -1}, "seed: got -1; must be an integer in [0, 2**32)"),
    ],
)
def test_a_config_that_is_made_in_python_is_checked_too(section, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        dataclasses.replace(section, **changes)


@pytest.mark.parametrize(
    ("changes", "beginning", "end"),
    [
        ({"max_step": 10}, "the top level has output_dir, model, ", "; did you mean max_steps?"),
        ({"lora.rnk": 8}, "[lora] has rank, alpha, dropout, train_norms", "; did you mean rank?"),
        ({"nois": {}}, "the top level has", "; did you mean noise?"),
        ({"learning_rate": 1e-5}, "", "; did you mean optim.learning_rate?"),
        ({"unlike": 1}, "", "report_to, run_name"),
    ],
)
def test_an_unknown_field_is_named_with_those_there_are_and_one_it_is_like(changes, beginning, end):
    message = refusal(changes)
    assert message.startswith(f"{[*changes][0]}: unknown field; {beginning}")
    assert message.endswith(end)


@pytest.mark.parametrize("name", ["model", "output_dir", "data.dataset", "rewards.functions"])
def test_a_missing_field_is_named_with_its_section(name):
    section = f"[{name.split('.')[0]}]" if "." in name else "the top level"
    assert refusal({name: ...}) == f"{name}: missing; {section} needs it"


@pytest.mark.parametrize("name", config_rules.RENAMED)
def test_an_earlier_name_of_a_field_is_refused_with_the_present_one(name):
    new = config_rules.RENAMED[name]
    assert refusal({name: 0.5}) == f"{name}: is now {new}"
    # What is named exists.
    kind = RunConfig
    for part in re.search(r"\w+(\.\w+)+", new)[0].split("."):
        fields = {field.name for field in dataclasses.fields(kind)}
        assert part in fields
        kind = checked.sections(kind).get(part)


@pytest.mark.parametrize("content", [b"max_steps = ", b"a = 1\na = 2", b'output_dir = "\xff"'])
def test_an_unreadable_file_is_a_config_error_that_names_it(content, tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{re.escape(str(path))}: not valid TOML"):
        config.load(path)
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(ConfigError, match=f"{re.escape(str(path))}.*no such file"):
            config.load(path)


def test_sizes_follow_from_the_batches():
    rollout = {"num_generations": 4, "generation_batch_size": 48}
    optim = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    cfg = build(max_steps=12, rollout=rollout, optim=optim, grpo={"num_iterations": 2})
    assert (cfg.train_batch_size, cfg.generation_batch_size) == (8, 48)
    assert cfg.prompts_per_rollout == cfg.updates_per_rollout == 12
    assert build().generation_batch_size == build().train_batch_size == 8
    # TRL: per_device_train_batch_size * steps_per_generation.
    assert build(max_steps=12, rollout__steps_per_generation=4).generation_batch_size == 32
    assert build(max_steps=12, rollout__steps_per_generation=4).updates_per_rollout == 4


@pytest.mark.parametrize(
    ("epochs", "problems", "steps"),
    [
        (1.0, 100, 200),  # 2 prompts a rollout: 50 rollouts of 4 steps
        (2.0, 100, 400),
        (0.5, 100, 100),
        (1.0, 7, 16),  # 3.5 rollouts are 4
        (0.001, 100, 4),  # never less than one rollout
    ],
)
def test_epochs_become_steps_of_whole_rollouts(epochs, problems, steps):
    rollout = {"num_generations": 8, "generation_batch_size": 16}
    changes = {"max_steps": ..., "num_train_epochs": epochs, "rollout": rollout}
    cfg = build(**changes, grpo__num_iterations=2)
    assert cfg.total_steps(problems) == steps
    assert build(max_steps=30).total_steps(problems) == 30


@pytest.mark.parametrize("name", config.packaged())
def test_every_config_of_the_project_is_valid(name):
    config.load(name)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("dapo_*.toml")), ids=lambda path: path.stem)
def test_a_dapo_recipe_punishes_length_by_half_of_what_a_right_answer_is_worth(path):
    """DAPO's equations 7 and 13 give -1 at most, where answers score 1 or -1."""
    rewards = config.load(path).rewards
    (function,) = scoring.resolve(rewards.functions)
    right, wrong = function[1](completions=["<answer>7</answer> Answer: 7", "8"], answer=["7", "7"])
    (weight,) = rewards.weights or (1.0,)
    if rewards.soft_punish_cache is None:
        assert config.load(path).grpo.mask_truncated_completions
    else:
        assert rewards.soft_punish_weight == 0.5 * weight * (right - wrong)


# --- what is allowed but seldom meant


GSPO = {"grpo__importance_sampling_level": "sequence", "grpo__epsilon": 3e-4}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        # Ratios per token, and GSPO as its paper has it, need no warning.
        ({}, []),
        (GSPO | {"grpo__loss_type": "grpo"}, []),
        # Sums over tokens weigh rows by length: the field, its value and the remedy are named.
        *(
            (GSPO | {"grpo__loss_type": loss_type}, [("grpo.loss_type", loss_type, '"grpo"')])
            for loss_type in ("dapo", "bnpo", "dr_grpo")
        ),
        (GSPO | {"grpo__loss_type": "luspo"}, []),
        ({"grpo__loss_type": "luspo"}, [("grpo.loss_type", "luspo", '"sequence"')]),
        # Noise in ratios of so narrow a range clips before anything is learned.
        (
            GSPO | {"grpo__loss_type": "grpo", "noise": {}},
            [("noise.estimator", "corrected", '"published"')],
        ),
        (GSPO | {"grpo__loss_type": "grpo", "noise__estimator": "published"}, []),
        (GSPO | {"grpo__loss_type": "grpo", "noise": {}, "grpo__old_logprobs": "recompute"}, []),
        (GSPO | {"grpo__loss_type": "grpo", "noise__scope": "both"}, []),
        (GSPO | {"grpo__loss_type": "grpo", "noise": {}, "grpo__epsilon": 0.2}, []),
    ],
)
def test_sequence_ratios_that_are_not_gspo_are_warned_of(changes, named):
    lines = config_rules.advice(build(**changes))
    assert len(lines) == len(named)
    for line, (field, value, remedy) in zip(lines, named, strict=True):
        assert line.startswith(f"warning: {field}: got")
        assert value in line and remedy in line.rsplit(": set ")[1]


@pytest.mark.parametrize(
    ("rollout", "start"),
    [
        ({}, None),
        ({"top_k": -1, "top_p": 1.0, "min_p": 0.0}, None),
        ({"top_p": 0.9}, "rollout.top_p: got 0.9; the ratio is that of the probabilities before"),
        ({"top_k": 20, "min_p": 0.1}, "rollout.top_k, rollout.min_p: got 20, 0.1; the ratio is"),
    ],
)
def test_truncated_sampling_says_in_one_line_what_the_ratio_is(rollout, start):
    lines = config_rules.advice(build(**{f"rollout__{name}": x for name, x in rollout.items()}))
    assert [line.startswith(f"warning: {start}") for line in lines] == [True] * bool(start)


@pytest.mark.parametrize(
    ("changes", "old", "cap"),
    [
        ({}, None, 3.0),
        ({"grpo__old_logprobs": "behaviour"}, "behaviour", 3.0),
        ({"noise": {}}, None, 3.0),
        ({"noise__estimator": "corrected"}, "behaviour", 3.0),
        ({"noise__estimator": "corrected", "noise__scope": "both"}, "behaviour", 3.0),
        ({"noise__estimator": "published"}, "recompute", None),
        ({"noise": {}, "grpo__old_logprobs": "recompute"}, "recompute", None),
    ],
)
def test_the_estimator_sets_the_log_probabilities_of_the_ratio_and_with_them_its_cap(
    changes, old, cap
):
    objective = build(**changes).objective
    assert objective == dataclasses.replace(config.GrpoConfig(), old_logprobs=old)
    assert objective.ratio_cap == cap


RECIPES = """
loss_type = 'grpo'; importance_sampling_level = 'sequence'; epsilon = 3e-4; epsilon_high = 4e-4; old_logprobs = 'recompute'
    | gspo
loss_type = 'cispo'; epsilon_high = 5.0 | cispo
loss_type = 'dr_grpo'; scale_rewards = 'none'; mask_truncated_completions = False | dr_grpo
"""


@pytest.mark.parametrize(("objective", "name"), list(cases(RECIPES)))
def test_a_recipe_of_another_loss_differs_from_that_of_grpo_by_its_objective(objective, name):
    path = CONFIGS / f"{name}_gsm8k_qwen2.5_7b.toml"
    other = config.to_table(config.load(path))
    grpo = config.to_table(config.load(CONFIGS / "gsm8k_qwen2.5_7b.toml"))
    assert dict(other.pop("grpo").items() - grpo.pop("grpo").items()) == objective
    differences = {k: v for k, v in other.items() if v != grpo[k]}
    assert differences == {"output_dir": f"runs/{name}_gsm8k_qwen2.5_7b"}
    assert not config_rules.advice(config.load(path))


def test_lora_without_regret_has_few_ranks_on_all_linears_and_ten_times_the_rate_of_full_tuning():
    cfg = config.load(CONFIGS / "lora_without_regret_gsm8k_qwen2.5_7b.toml")
    assert cfg.lora == config.LoraConfig(rank=1, alpha=32.0)
    assert (cfg.optim.learning_rate, cfg.train_batch_size, cfg.noise) == (1e-5, 32, None)
    grpo, ours = (
        config.to_table(config.load(CONFIGS / "gsm8k_qwen2.5_7b.toml")),
        config.to_table(cfg),
    )
    changed = {*("output_dir", "lora", "rollout", "optim", "noise")}
    assert {name for name in grpo if grpo[name] != ours.get(name)} == changed


def test_a_config_of_the_package_can_be_named_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gsm8k_qwen2.5_7b", "paper/gsm8k_qwen2.5_7b"):
        assert config.load(name) == config.load(CONFIGS / f"{name}.toml")
    assert {*config.packaged()} == {
        str(path.relative_to(CONFIGS))[: -len(".toml")] for path in CONFIGS.rglob("*.toml")
    }
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "my.toml").touch()
    assert config.load("quickstart").output_dir == "runs/quickstart"
    for name, words in (
        ("gsm8k_qwen2.5_7", "nor a config of the package; did you mean gsm8k_qwen2.5_7b?"),
        ("unlike", "nor a config of the package; these are accuracy_1.5b, bench_7b, bigmath_hard"),
        (
            "paper/gsm8k_qwen2.5_8b",
            "nor a config of the package; did you mean paper/gsm8k_qwen2.5_",
        ),
        ("configs/quickstart.toml", "no such file; the package has it as quickstart"),
        ("configs/paper/gsm8k_qwen2.5_7b.toml", "the package has it as paper/gsm8k_qwen2.5_7b"),
        ("quickstart.toml", "got 'quickstart.toml'; no such file; the package has it as"),
        ("elsewhere/quickstart", "got 'elsewhere/quickstart'; no such file"),
        ("myy.toml", "got 'myy.toml'; no such file; did you mean my.toml?"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            config.load(name)
    (tmp_path / "quickstart").rmdir()
    (tmp_path / "quickstart").write_text("seed = 1\n")
    assert config.read_table("quickstart") == {"seed": 1}  # a file goes before


def test_a_run_that_is_to_be_repeated_exactly_makes_no_drafts(monkeypatch, tmp_path):
    def make_sampler(*of, **options):
        raise InterruptedError(of[2].drafts)

    monkeypatch.setattr(load.rollouts, "make_sampler", make_sampler)
    for deterministic, drafts in ((False, "auto"), (True, "off")):
        cfg = harness.tiny(tmp_path / drafts, deterministic=deterministic)
        with pytest.raises(InterruptedError, match=drafts):
            train(cfg, quiet=True)
