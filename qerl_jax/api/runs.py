"""Training on data and rewards that are Python objects, and the run that it makes."""

import dataclasses
import itertools
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from qerl_jax import config as configs
from qerl_jax.api import jobs
from qerl_jax.api.policy import Policy, load
from qerl_jax.api.settings import Config, divide_tools, run_config, several
from qerl_jax.config import RunConfig, ToolsConfig
from qerl_jax.data import datasets
from qerl_jax.data.datasets import Problem
from qerl_jax.rewards.stock import RewardFunction
from qerl_jax.system.checked import require
from qerl_jax.tools.environments import Tool
from qerl_jax.tracking import logger
from qerl_jax.tracking.health import Health
from qerl_jax.training import trainer

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure

type Callback = Callable[[int, dict[str, Any]], bool | None]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run and its folder, from `train` or `load_run`.

    >>> run.metrics["reward"].shape
    (2,)
    >>> figure = run.plot()
    >>> answer = run.policy().generate("What is 1+1?", max_tokens=8)[0].text

    Attributes:
        folder: The run folder: `config.toml`, `metrics.jsonl`, `completions/`, `checkpoints/`,
            and at the end of the run `adapter/` (or `model/`), `report.md` and `report/index.html`.
    """

    folder: pathlib.Path

    @property
    def config(self) -> RunConfig:
        """The config of the run."""
        return configs.load_run(self.folder)

    @property
    def metrics(self) -> "pandas.DataFrame":
        """The metrics that are logged so far: a row per step, a column per metric, NaN where one is absent."""
        import pandas  # slow to import

        rows = logger.read_metrics(self.folder)
        return pandas.DataFrame(rows, columns=None if rows else ["step"]).set_index("step")

    @property
    def has_learned(self) -> bool:
        """Whether any step so far taught the policy something: rewards differed, and an update was made."""
        return Health.of(self.config, logger.read_metrics(self.folder)).has_learned

    def plot(self) -> "Figure":
        """Draws the charts of the run into one figure, which a notebook shows and `savefig` writes."""
        from qerl_jax.tracking import report

        return report.curves([self.folder])

    def summary(self) -> str:
        """The main curves as text: one line per metric, with its first and last value."""
        from qerl_jax.tracking import report

        return "\n".join(report.lines(self.folder))

    def policy(self, *, best: bool = False, **options: Any) -> Policy:
        """Loads the trained policy: the base with the adapter of the run, or of its newest checkpoint until it ends.

        Args:
            best: Whether to take the adapter of the best evaluation (`best/`) instead of the last.
            **options: See `qerl_jax.load`.

        Raises:
            FileNotFoundError: Where the run has saved nothing yet.
        """
        return load(adapter=self.folder / "best" if best else self.folder, **options)

    def export(self, out: str | os.PathLike, **options: Any) -> dict[str, Any]:
        """Writes what the run has learned for other programs; see `qerl_jax.export`."""
        return jobs.export(self, out, **options)

    def report(self, output_dir: str | os.PathLike | None = None) -> pathlib.Path:
        """Writes a page about the run, and returns its path; see `qerl_jax.report`."""
        return jobs.report(self, output_dir=output_dir)

    def __fspath__(self) -> str:
        return os.fspath(self.folder)


def load_run(folder: str | os.PathLike) -> Run:
    """Opens the folder of a run that has ended or is still going on.

    >>> qerl_jax.load_run(run.folder) == run
    True

    Raises:
        FileNotFoundError: When it is no run folder.
        ConfigError: When another version has written it in another format.
    """
    folder = pathlib.Path(folder)
    if not (folder / "config.toml").is_file():
        raise FileNotFoundError(f"no config.toml in {folder}: not a run folder")
    configs.load_run(folder)
    return Run(folder)


def train(
    config: Config,
    dataset: Iterable[Mapping[str, Any]] | Sequence[Problem] | None = None,
    reward_funcs: str | RewardFunction | Sequence[str | RewardFunction] | None = None,
    callbacks: Callback | Sequence[Callback] | None = None,
    *,
    tools: Tool | Sequence[Tool] | Mapping[str, Any] | ToolsConfig | None = None,
    environment_factory: Tool | Mapping[str, Tool] | None = None,
    quiet: bool = False,
    **overrides: Any,
) -> Run:
    """Trains an adapter, or goes on with the run in `output_dir`.

    >>> rows = [{"prompt": f"What is {a}+{b}?", "answer": a + b} for a in range(8) for b in range(8)]
    >>> def exact(completions, answer, **_):
    ...     return [float(c.endswith(f"{a}</answer>")) for c, a in zip(completions, answer)]
    >>> settings = {
    ...     "output_dir": "runs/mine",
    ...     "max_steps": 2,
    ...     "model": {"model_name_or_path": "qerl-tiny", "dtype": "float32"},
    ...     "data": {"max_prompt_length": 48},
    ...     "rollout": {"num_generations": 4, "max_completion_length": 32},
    ... }
    >>> run = qerl_jax.train(settings, rows, reward_funcs=[exact, "format_reward"], quiet=True)
    >>> list(run.metrics.index)
    [1, 2]

    Rows: a row's column "prompt" (else "question" or "problem") is a chat, a list of messages, or a
    text. A text is a message of the user and passes the chat template, after the system prompt and
    inside the template of `data`, if there are such. (TRL gives a text to the model without a chat
    template. For a policy that continues texts set `data.apply_chat_template` to False, or give
    `Problem(prompt=text, columns={...})`: a problem is taken as it is.) The column "answer" and all
    others go to the rewards by their names.

    Rewards have TRL's signature, `f(prompts, completions, completion_ids, **columns)`, and return a
    number or None per completion. Completions have the form of the prompts in the rows, as in TRL:
    texts for texts, and `[{"role": "assistant", "content": text}]` for chats.

    Args:
        config: A `RunConfig`, a table of its fields and sections, or the path of a TOML file. It need
            not say what the other arguments say: `data.dataset`, `rewards.functions`.
        dataset: The rows to train on: a list of dicts, a `datasets.Dataset`, or a `datasets.IterableDataset`, of
            which the first `data.num_problems` rows are read, or as many as `max_steps` steps ask for. A run that is
            resumed must be given the same ones. Absent means the set that `data` names.
        reward_funcs: Functions, names of stock rewards, or import paths "package.module:function"; one,
            or a list. Absent means those that `rewards` names. The config of the run notes where a
            function was defined; from a notebook it cannot be loaded again.
        callbacks: One or several functions that are called as f(step, metrics) after every step, once it is
            logged; and as step 0 after the evaluation before training, with only its metrics. If one returns
            False, the run ends with that step, and its adapter is written. If one raises, `train` raises the
            same; the run then goes on from its last checkpoint.
        tools: Functions that the policy may call while it answers, names of stock ones ("calculator",
            "python"), or import paths; or a table of the config's section `tools`, whose `functions` may be
            such; or a `ToolsConfig`. See docs/environments.md.
        environment_factory: A class, or its import path, whose methods the policy may call. Each row has an
            object of it, which keeps the row's state: `reset(**row)` begins a row, and `get_reward()`, if
            there is one, judges it. Or several such classes by name: each row then gives its name in the
            column "environment".
        quiet: Show nothing on the terminal; all files are still written.
        **overrides: Fields of the config to change: `max_steps=10`, `optim={"learning_rate": 1e-4}`,
            `eval=None`.

    Returns:
        The run.

    Raises:
        ConfigError: For an impossible argument or field, by its name; nothing is written.
        RewardError: When a reward function fails, by its name.
        Busy: When another run works in `output_dir`.
        DiskError: When the disk does not take what is written; the run goes on from what was saved before.
        KeyboardInterrupt: For SIGINT or SIGTERM while it trains, once the last whole step is saved.
    """
    on_step = _on_step(several(callbacks, "callbacks"))
    functions = None if reward_funcs is None else _functions(reward_funcs)
    section, objects = divide_tools(tools)
    if section:
        overrides |= {"tools": section}
    cfg = run_config(
        config,
        overrides,
        has_rows=dataset is not None,
        functions=functions,
        tools=objects,
        environment=environment_factory,
    )
    cfg, problems = (cfg, None) if dataset is None else _problems(cfg, dataset)
    trainer.train(
        cfg,
        problems=problems,
        reward_functions=functions,
        tools=objects,
        environment_factory=environment_factory,
        on_step=on_step,
        quiet=quiet,
    )
    return Run(pathlib.Path(cfg.output_dir))


def _functions(reward_funcs: Any) -> list:
    functions = several(reward_funcs, "reward_funcs")
    require(len(functions) > 0, "reward_funcs", reward_funcs, "must be at least one function")
    for index, function in enumerate(functions):
        holds = isinstance(function, str) or callable(function)
        rule = "must be a function, a name of a stock reward, or an import path"
        require(holds, f"reward_funcs[{index}]", function, rule)
    return functions


def _on_step(callbacks: Sequence[Callback]) -> Callback:
    """Returns a function that calls all callbacks, and returns False if one of them does."""
    for index, callback in enumerate(callbacks):
        require(callable(callback), f"callbacks[{index}]", callback, "must be a function")

    def on_step(step: int, metrics: dict[str, Any]) -> bool:
        answers = [callback(step, metrics) for callback in callbacks]
        # A comparison of numpy's numbers gives numpy's False, which is another object.
        return not any(isinstance(go_on, bool | np.bool_) and not go_on for go_on in answers)

    return on_step


def _problems(cfg: RunConfig, dataset: Any) -> tuple[RunConfig, Sequence[Problem]]:
    """Returns the config and the problems of rows, or of problems, which are taken as they are."""
    dataset = _first_rows(cfg, dataset)
    is_list = isinstance(dataset, list | tuple) and len(dataset) > 0
    if not (is_list and all(isinstance(row, Problem) for row in dataset)):
        return cfg, datasets.from_rows(cfg.data, dataset, "dataset")
    if isinstance(dataset[0].prompt, str):
        # Noted in the run's config, so that the policy is asked in the same way later.
        data = dataclasses.replace(cfg.data, system_prompt="", apply_chat_template=False)
        cfg = dataclasses.replace(cfg, data=data)
    return cfg, dataset


def _first_rows(cfg: RunConfig, dataset: Any) -> Any:
    """Returns the first rows of a stream, which may have no end: as many as the run asks for; others unchanged."""
    is_stream = isinstance(dataset, Iterable) and not hasattr(dataset, "__len__")
    # An iterator could not be read again when the run is resumed.
    if not is_stream or isinstance(dataset, Iterator):
        return dataset
    count = cfg.data.num_problems
    if count is None and cfg.max_steps is not None:
        rounds = cfg.grpo.dynamic_sampling.max_rounds if cfg.grpo.dynamic_sampling else 1
        count = -(-cfg.max_steps // cfg.updates_per_rollout) * cfg.prompts_per_rollout * rounds
    rule = "must say how many rows of a stream are read, where no max_steps says it"
    require(count is not None, "data.num_problems", None, rule)
    return list(itertools.islice(dataset, count))
