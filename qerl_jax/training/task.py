"""The task of a run: loads its problems, rewards and tools, and checks that they can be used."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from qerl_jax import config
from qerl_jax.checkpoint import base_model
from qerl_jax.data import answers, datasets
from qerl_jax.data.tokenizer import Tokenizer
from qerl_jax.distributed.hosts import Hosts
from qerl_jax.generation import prompts
from qerl_jax.generation.sampling_params import from_section
from qerl_jax.generation.stop_strings import with_stop_tokens
from qerl_jax.model import transformer
from qerl_jax.planning import memory
from qerl_jax.rewards import imports, scoring, stock
from qerl_jax.rl import dynamic_sampling, rollouts
from qerl_jax.system.checked import require
from qerl_jax.system.early_calls import Ahead
from qerl_jax.tools import environments
from qerl_jax.tools.conversations import Tools
from qerl_jax.tools.shared_tools import SharedToolboxes
from qerl_jax.training.trace import Trace


@dataclasses.dataclass(frozen=True)
class Task:
    """The problems, rewards and tools of a run, and the policy without its weights.

    Attributes:
        model: The policy.
        tokenizer: Its tokenizer.
        problems: The problems whose prompts fit.
        functions: Names and functions of the rewards.
        weights: One weight per function.
        tools: Tools that the policy may call; None without tools.
        informative: Marks the groups of a scored rollout that dynamic sampling keeps, bool [P].
        total_steps: Optimizer steps of the whole run.
        notes: Lines to show at the start of the run.
        given_rows: Number of problems if the caller passed them instead of `cfg.data`; else None.
    """

    model: transformer.Transformer
    tokenizer: Tokenizer
    problems: Sequence[datasets.Problem]
    functions: list[scoring.Named]
    weights: list[float]
    tools: Tools | None
    informative: Callable[[rollouts.Scored], np.ndarray]
    total_steps: int
    notes: list[str]
    given_rows: int | None


def make_task(
    cfg: config.RunConfig,
    hosts: Hosts,
    problems: Sequence[datasets.Problem] | None,
    reward_functions: Sequence[stock.RewardFunction] | None,
    tools: Sequence[environments.Tool] | None,
    environment: environments.Tool | Mapping[str, environments.Tool] | None,
) -> Task:
    """Loads what a config names, and tries rewards and environments on the first two problems.

    The first of the hosts runs tools and rewards. The other arguments are those of `check`.

    Raises:
        ConfigError: For fields that cannot be used together, or with the base or the problems.
        RewardError: If a reward function fails on the first problems.
        ValueError: For data, a reward or an environment that cannot be used.
    """
    # In a thread, while data are read. What is wrong with these is told first.
    files = Ahead(lambda _: base_model.describe_files(cfg.model), workers=1)
    files.begin(["files"])
    functions, weights = _rewards(cfg, reward_functions)
    has_rows = problems is not None
    if not has_rows:
        _require_held_out(cfg)
        problems = datasets.from_config(cfg.data, split=cfg.data.split, seed=cfg.seed)
    ((arch, tokenizer),) = files.map(["files"])
    memory.require_context(cfg, arch)
    with_stop_tokens(from_section(cfg.rollout), tokenizer, "rollout.")
    has_chats = bool(problems) and not isinstance(problems[0].prompt, str)
    notes = list(tokenizer.notes) if has_chats else []
    talks = None
    if cfg.tools is not None:
        boxes = SharedToolboxes(cfg.tools, tools, environment, hosts)
        talks = Tools.of(cfg.tools, tokenizer, boxes, notes.append)
        _add_own_rewards(boxes, functions, weights)
    informative = informative_by(cfg, functions, weights, notes.append)
    notes += about_data(cfg, problems)
    problems = prompts.admit(
        problems,
        tokenizer,
        max_prompt_length=cfg.data.max_prompt_length,
        overlong=cfg.data.overlong_prompts,
        tools=talks,
        log=notes.append,
    )
    total_steps = cfg.total_steps(len(problems))
    notes += _about_epochs(cfg, total_steps)
    length = cfg.data.max_prompt_length
    _try(functions, problems, tokenizer, talks, total_steps, hosts, length)
    model = base_model.describe_model(cfg.model, arch, cfg.lora, cfg.mesh)
    rows = len(problems) if has_rows else None
    return Task(
        *(model, tokenizer, problems, functions, weights, talks, informative, total_steps),
        *(notes, rows),
    )


def _require_held_out(cfg: config.RunConfig) -> None:
    """Raises a ConfigError if the evaluation would use the rows of a file that is trained on."""
    source = cfg.data.path or cfg.data.dataset
    holds = cfg.eval is None or cfg.eval.dataset is not None or not datasets.is_file(source)
    rule = (
        f"must name held-out problems: {source} is a file, which has no other split, so the accuracy would be that of "
        "rows that are trained on. Name a file or a data set, or switch the evaluation off: --eval None"
    )
    require(holds, "eval.dataset", None, rule)


def _try(
    functions: Sequence[scoring.Named],
    problems: Sequence[datasets.Problem],
    tokenizer: Tokenizer,
    talks: Tools | None,
    total_steps: int,
    hosts: Hosts,
    max_prompt_length: int,
) -> None:
    """Resets environments with the first two problems, and tries the reward functions on these."""
    first = problems[:2]
    extras = Trace(0, total_steps).extras
    if talks is not None:
        prompts.with_observations(talks, first, tokenizer, max_prompt_length)
        extras |= talks.toolboxes.extras(len(first))
    if not hosts.leads:
        return
    try:
        scoring.check(functions, first, extras)
    except scoring.RewardError as error:
        cause = error.__cause__
        raise scoring.RewardError(f"{error}{_about_form(problems, cause)}") from cause


def about_data(cfg: config.RunConfig, problems: Sequence[datasets.Problem]) -> list[str]:
    """Returns warnings about data that is probably a mistake, or that cannot be learned from."""
    if not problems:
        return []
    count, drawn, notes = len(problems), cfg.prompts_per_rollout, []
    if count < drawn:
        notes.append(
            f"warning: there {'is 1 problem' if count == 1 else f'are {count} problems'}, and a rollout asks {drawn}: "
            "some are asked more than once in every step. Give more of them in data"
        )
    first = problems[0]
    # Generated problems always have answers.
    if "answer" not in first.columns or cfg.data.dataset == "arithmetic":
        return notes
    golds = [answers.gold(problem.columns.get("answer")) for problem in problems]
    lacking = [row for row, gold in enumerate(golds) if gold is None]
    floats = [row for row, gold in enumerate(golds) if isinstance(gold, float)]
    rounded = [row for row in floats if abs(golds[row]) >= answers.ROUNDED]
    for rows, fault, effect in (
        (lacking, "no answer", "a reward that compares with it cannot be earned there"),
        (rounded, "a float of 2**53 or more as answer", "its digits may be rounded; write texts"),
    ):
        if rows:
            named = ", ".join(map(str, rows[:5])) + (", ..." if len(rows) > 5 else "")
            notes.append(
                f"warning: {len(rows)} of {count} problems have {fault} (problem {named}, from 0 on): {effect}"
            )
    return notes


def _about_form(problems: Sequence[datasets.Problem], cause: BaseException | None) -> str:
    """Returns a remedy for a reward that fails as one does that expects chats and gets texts, or the reverse."""
    if not isinstance(cause, TypeError | AttributeError):
        return ""
    if not imports.place_of(cause) and scoring.about_arguments(cause):
        return ""  # it was not called at all
    form = "texts" if isinstance(problems[0].as_given, str) else "chats"
    return (
        f"; note: completions are {form}, because the prompts of the rows are {form}; "
        "qerl_jax.rewards.stock.completion_text reads both"
    )


def _about_epochs(cfg: config.RunConfig, total_steps: int) -> list[str]:
    """Returns a line about what `num_train_epochs` means if rollouts may take several rounds."""
    if cfg.num_train_epochs is None or not cfg.grpo.dynamic_sampling:
        return []
    rounds = total_steps // cfg.updates_per_rollout
    return [
        f"{cfg.num_train_epochs:g} epochs are {rounds} rounds of {cfg.prompts_per_rollout} problems: "
        f"{total_steps} optimizer steps, or fewer where rollouts take several rounds"
    ]


def _rewards(
    cfg: config.RunConfig, passed: Sequence[stock.RewardFunction] | None
) -> tuple[list[scoring.Named], list[float]]:
    """Returns the reward functions and their weights; the penalty for long completions comes last."""
    named = (cfg.rewards.functions, "rewards.functions")
    chosen, field = named if passed is None else (passed, "reward_funcs")
    functions = scoring.resolve(chosen, cfg.rewards.options, field)
    count, weights = len(functions), list(cfg.rewards.weights or [1.0] * len(functions))
    holds = count == len(weights) and (count > 0 or cfg.tools is not None)
    rule = f"must be one for each of {count} reward functions, of which there must be at least one"
    require(holds, "rewards.weights", len(weights), rule)
    cache = cfg.rewards.soft_punish_cache
    if cache is None:
        return functions, weights
    punish = stock.get_soft_overlong_punishment(cfg.rollout.max_completion_length, cache)
    functions.append((punish.__name__, punish))
    return functions, [*weights, cfg.rewards.soft_punish_weight]


def _add_own_rewards(
    boxes: environments.Toolboxes, functions: list[scoring.Named], weights: list[float]
) -> None:
    """Adds the rewards that environments compute for their rows, each with weight 1."""
    silent = [box.environment_name or "tools" for box in boxes if not box.owns_reward]
    rule = f"must name at least one: {', '.join(silent)} has no get_reward"
    require(bool(functions) or not silent, "rewards.functions", (), rule)
    of_environments, names = boxes.own_rewards(), [name for name, _ in functions]
    both = [name for name, _ in of_environments if name in names]
    require(not both, "rewards.functions", both, "must differ in name from the environments")
    functions += of_environments
    weights += [1.0] * len(of_environments)


def informative_by(
    cfg: config.RunConfig,
    functions: Sequence[scoring.Named],
    weights: Sequence[float],
    note: Callable[[str], None],
) -> Callable[[rollouts.Scored], np.ndarray]:
    """Makes the function that marks the groups of a scored rollout that dynamic sampling keeps, bool [P].

    `note` is called with a line that names the rewards by which groups are compared.

    Raises:
        ConfigError: For the name of a reward that the run does not have, or with dynamic sampling if all rewards
            judge only form or length.
    """
    names, sampling = [name for name, _ in functions], cfg.grpo.dynamic_sampling
    shaping, field = cfg.rewards.shaping, "grpo.dynamic_sampling.metric"
    metric, known = sampling and sampling.metric, ", ".join(names)
    rule = f"the rewards of this run are {known}"
    require(set(shaping or ()) <= {*names}, "rewards.shaping", shaping, rule)
    rule = f'must be "reward", or one of the rewards of this run: {known}'
    require(metric in (None, "reward", *names), field, metric, rule)
    shaping = stock.SHAPING if shaping is None else shaping
    chosen = {i: w for i, w in enumerate(weights) if names[i] not in shaping and w}
    if metric == "reward" or sampling is None:
        return dynamic_sampling.by_reward
    if metric is not None:
        chosen = {names.index(metric): 1.0}
    rule = (
        f"all rewards of this run shape form or length ({known}), so no group is better than another: name "
        f'one of them, or "reward"'
    )
    require(bool(chosen), field, metric, rule)
    judges = ", ".join(names[i] for i in chosen)
    note(f"dynamic sampling keeps groups whose completions differ in {judges}")
    return dynamic_sampling.by_functions(chosen)
