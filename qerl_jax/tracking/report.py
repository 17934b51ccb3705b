"""What runs came to, from the files that they left: a page, PNG files, lines of text, a figure, a table."""

import dataclasses
import json
import math
import os
import pathlib
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from qerl_jax import config
from qerl_jax.config import RunConfig
from qerl_jax.files import whole_lines, write_whole
from qerl_jax.tracking import charts, logger, page
from qerl_jax.tracking.charts import Chart, Line
from qerl_jax.tracking.page import Passage, Table
from qerl_jax.tracking.terminal import curve

# Sections of charts: title, unit, metrics with the names of their lines, whether logarithmic.
_SECTIONS = (
    (
        "Learning",
        (
            ("Reward", "", (("reward", "mean"),), False),
            ("Held-out accuracy", "", (("eval/accuracy", "accuracy"),), False),
            ("Spread of rewards in a group", "", (("reward_std", "deviation"),), False),
            ("Groups without signal", "share", (("frac_reward_zero_std", "share"),), False),
        ),
    ),
    (
        "The policy",
        (
            ("Entropy", "nats per token", (("entropy", "entropy"),), False),
            ("AQN sigma", "", (("aqn/sigma", "sigma"),), True),
            (
                "Completion length",
                "tokens",
                (
                    ("completions/mean_length", "mean"),
                    ("completions/mean_terminated_length", "mean of those that end"),
                    ("completions/max_length", "longest"),
                ),
                False,
            ),
            ("Truncated completions", "share", (("completions/clipped_ratio", "share"),), False),
        ),
    ),
    (
        "The update",
        (
            ("Loss", "", (("loss", "loss"),), False),
            ("KL to the reference", "nats per token", (("kl", "KL"),), False),
            ("Gradient norm", "", (("grad_norm", "norm"),), False),
            ("Learning rate", "", (("learning_rate", "rate"),), False),
            (
                "Clip ratios",
                "share of tokens",
                (
                    ("clip_ratio/region_mean", "either"),
                    ("clip_ratio/low_mean", "low"),
                    ("clip_ratio/high_mean", "high"),
                ),
                False,
            ),
            (
                "Mismatch of sampler and trainer",
                "nats",
                (
                    ("sampling/sampling_logp_difference/mean", "mean"),
                    ("sampling/sampling_logp_difference/max", "largest"),
                ),
                True,
            ),
            (
                "Importance ratio",
                "",
                (
                    ("sampling/importance_sampling_ratio/mean", "mean"),
                    ("sampling/importance_sampling_ratio/min", "smallest"),
                    ("sampling/importance_sampling_ratio/max", "largest"),
                ),
                True,
            ),
        ),
    ),
    (
        "The machine",
        (
            (
                "Time per phase",
                "seconds",
                (
                    ("perf/rollout_time", "rollout"),
                    ("perf/reward_time", "reward"),
                    ("perf/update_time", "update"),
                ),
                False,
            ),
            (
                "Throughput",
                "tokens per second",
                (
                    ("perf/rollout_tokens_per_second", "rollout"),
                    ("perf/update_tokens_per_second", "update"),
                ),
                False,
            ),
            ("Peak memory", "GB", (("perf/peak_memory_gb", "peak"),), False),
        ),
    ),
)
_LINES = ("reward", "entropy", "completions/mean_length", "aqn/sigma")
# Fields in which runs of one group may differ.
_INCIDENTAL = ("seed", "output_dir", "run_name", "report_to")


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run folder holds.

    Attributes:
        folder: Path of the run folder.
        cfg: What its config.toml says, if it is there.
        rows: The rows of its metrics.jsonl.
    """

    folder: pathlib.Path
    cfg: RunConfig | None
    rows: list[dict[str, Any]]

    def values(self, name: str) -> dict[int, float]:
        """A metric by step, where it is a finite number."""
        return {
            row["step"]: float(row[name])
            for row in self.rows
            if isinstance(row.get(name), int | float) and math.isfinite(row[name])
        }


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs that differ in nothing but their seeds."""

    label: str
    runs: tuple[Run, ...]


def read(run_folder: str | pathlib.Path) -> Run:
    """Reads a run folder.

    Raises:
        FileNotFoundError: When it holds no metrics.
    """
    folder = pathlib.Path(run_folder)
    rows = logger.read_metrics(folder)
    if not rows:
        raise FileNotFoundError(
            f"no metrics.jsonl with rows in {run_folder}: not a run folder, or nothing logged yet"
        )
    path = folder / "config.toml"
    return Run(folder, config.load(path) if path.is_file() else None, rows)


def group(runs: Sequence[Run]) -> list[Group]:
    """Puts runs together whose configs differ in the seed only, in the order of their first one."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        key = os.fspath(run.folder)
        if run.cfg is not None:
            key = json.dumps(_settings(run.cfg), sort_keys=True)
        together.setdefault(key, []).append(run)
    names = [[run.folder.resolve().name for run in each] for each in together.values()]
    labels = [_common_name(each) for each in names]
    return [
        # A name that does not distinguish gives way to the path.
        Group(label if labels.count(label) == 1 else os.fspath(each[0].folder), tuple(each))
        for label, each in zip(labels, together.values(), strict=True)
    ]


def lines(run_folder: str | pathlib.Path) -> list[str]:
    """Draws the curves of a run as text, a line per metric with its first and last value; accuracy comes last.

    Raises:
        FileNotFoundError: When the folder holds no metrics.
    """
    run, shown = read(run_folder), []
    for name in _LINES:
        if values := list(run.values(name).values()):
            shown.append(f"{name:28} {values[0]:8.4g} {curve(values)} {values[-1]:.4g}")
    if accuracy := list(run.values("eval/accuracy").values()):
        shown.append(f"held-out accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    return shown


def table(run_folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Summarizes the metrics of a run, as rows that `pandas.DataFrame` takes.

    Returns:
        A row per metric that is a finite number at some step, with its name as "metric"; its value as
        "first", "lowest", "highest" and "last"; and the step of each as "first_step" and so on.

    Raises:
        FileNotFoundError: When the folder holds no metrics.
    """
    run = read(run_folder)
    names = dict.fromkeys(name for row in run.rows for name in row if name != "step")
    found = {name: values for name in names if (values := run.values(name))}
    rows = []
    for name, values in found.items():
        row: dict[str, Any] = {"metric": name}
        for end, (step, value) in charts.extremes(list(values), list(values.values())).items():
            row |= {end: value, f"{end}_step": step}
        rows.append(row)
    return rows


def curves(run_folders: Sequence[str | pathlib.Path]) -> Figure:
    """Draws the charts of the page of one or several runs into one figure.

    A notebook that has run `%matplotlib inline` shows it; `savefig` writes it to a file.

    Args:
        run_folders: At least one. Runs whose configs differ in the seed only become one line.

    Raises:
        FileNotFoundError: When a folder holds no metrics.
    """
    sections = _sections(group([read(each) for each in run_folders]))
    return charts.grid([chart for _, each in sections for chart in each])


def write(
    run_folders: Sequence[str | pathlib.Path], folder: str | pathlib.Path | None = None
) -> pathlib.Path:
    """Writes a page about one or several runs, and a PNG file of every chart beside it.

    Runs whose configs differ in the seed only become one line with a band from the smallest to the largest
    value.

    Args:
        run_folders: At least one.
        folder: Folder of the page. Absent means `report/` of the run, or of the working directory
            for several.

    Returns:
        The page, `<folder>/index.html`.

    Raises:
        FileNotFoundError: When a folder holds no metrics.
    """
    groups = group([read(each) for each in run_folders])
    if folder is None:
        folder = pathlib.Path(run_folders[0] if len(run_folders) == 1 else ".") / "report"
    folder = pathlib.Path(folder)
    sections = _sections(groups)
    text = page.render(
        " against ".join(each.label for each in groups) if len(groups) < 4 else "Runs compared",
        _subtitle(groups),
        _figures(groups[0].runs[0]) if len(groups) == 1 else [],
        [_runs_table(groups), _benchmarks_table(groups), _differences_table(groups)],
        sections,
        [("Completions", _samples(groups)), ("Settings", _configs(groups))],
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "index.html", text)
    for _, each in sections:
        for chart in each:
            charts.png(chart, folder / f"{chart.slug}.png")
    return folder / "index.html"


def _sections(groups: Sequence[Group]) -> list[tuple[str, list[Chart]]]:
    """Headings of the page and their charts."""
    sections = [(heading, _charts(panels, groups)) for heading, panels in _SECTIONS]
    sections.insert(1, ("Rewards by function", _charts(_reward_panels(groups), groups)))
    return sections


def _settings(cfg: RunConfig) -> dict[str, Any]:
    """The config as names of sections and fields, without what may differ within a group."""
    flat = {}
    for name, value in config.to_table(cfg).items():
        if isinstance(value, dict):
            flat |= {f"{name}.{field}": each for field, each in value.items()}
        elif name not in _INCIDENTAL:
            flat[name] = value
    return flat


def _common_name(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    shared = os.path.commonprefix(list(names)).rstrip("-_. ")
    for ending in ("-seed", "_seed", ".seed", "-s", "_s"):
        shared = shared.removesuffix(ending)
    return f"{shared or names[0]} ({len(names)} runs)"


def _line(label: str, metric: str, each: Group) -> Line | None:
    """A metric of a group: the mean of its runs, and what is known about its spread."""
    values = [v for run in each.runs if (v := run.values(metric))]
    if not values:
        return None
    steps = sorted(set().union(*values))
    at = {step: [v[step] for v in values if step in v] for step in steps}
    means = [statistics.fmean(at[step]) for step in steps]
    low = high = None
    if len(values) > 1:
        low, high = ([end(at[step]) for step in steps] for end in (min, max))
    elif metric == "eval/accuracy":
        ends = [each.runs[0].values(f"{metric}_{end}") for end in ("low", "high")]
        if all(set(steps) <= end.keys() for end in ends):
            low, high = ([end[step] for step in steps] for end in ends)
    columns = (column and tuple(column) for column in (means, low, high))
    return Line(label, tuple(steps), *columns)


def _charts(panels: Iterable, groups: Sequence[Group]) -> list[Chart]:
    """One group: a chart per panel, its metrics side by side. Several: a chart per metric, with all groups."""
    found = []
    for title, unit, metrics, log_axis in panels:
        if len(groups) == 1:
            drawn = {title: [_line(label, metric, groups[0]) for metric, label in metrics]}
        else:
            drawn = {
                title if len(metrics) == 1 else f"{title}: {label}": [
                    _line(each.label, metric, each) for each in groups
                ]
                for metric, label in metrics
            }
        found += [Chart(name, unit, tuple(filter(None, l)), log_axis) for name, l in drawn.items()]
    return [chart for chart in found if _says_something(chart.lines)]


def _says_something(each: Sequence[Line]) -> bool:
    """Whether anything is not zero: KL without a reference, for one, is not worth a chart."""
    return any(value != 0 for line in each for value in line.values)


def _reward_panels(groups: Sequence[Group]) -> list[tuple]:
    """A panel per reward function; none for a single one, which is the reward itself."""
    rows = (row for each in groups for run in each.runs for row in run.rows)
    metrics = {name for row in rows for name in row if name.startswith("rewards/")}
    names = sorted(name for name in metrics if name.endswith("/mean"))
    panels = [(name.split("/")[1], "", ((name, "mean"),), False) for name in names]
    return panels if len(panels) > 1 else []


def _subtitle(groups: Sequence[Group]) -> str:
    count = sum(len(each.runs) for each in groups)
    last = max(row["step"] for each in groups for run in each.runs for row in run.rows)
    text = f"{count} run{'s' * (count > 1)}, {last} optimizer steps"
    if any(len(each.runs) > 1 for each in groups):
        text += "; bands go from the smallest to the largest of the runs"
    return text


def _shown(run: Run, metric: str, reduce=lambda values: values[-1]) -> str:
    """The last value of a metric as text, or what `reduce` makes of all values."""
    values = list(run.values(metric).values())
    return charts.number(reduce(values)) if values else "–"


def _accuracy(run: Run) -> str:
    values = run.values("eval/accuracy")
    if not values:
        return "–"
    first, last = min(values), max(values)
    text = f"{values[first]:.3f} → {values[last]:.3f}"
    ends = [run.values(f"eval/accuracy_{end}").get(last) for end in ("low", "high")]
    return text if None in ends else f"{text} [{ends[0]:.3f}, {ends[1]:.3f}]"


def _figures(run: Run) -> list[tuple[str, str]]:
    """The numbers that matter most, as far as the run has them."""
    tokens = list(run.values("num_tokens").values())
    found = {
        "Held-out accuracy, 95 %": _accuracy(run),
        "Reward, last step": _shown(run, "reward"),
        "Median step": f"{_shown(run, 'step_time', statistics.median)} s",
        "Tokens seen": f"{tokens[-1]:,.0f}" if tokens else "–",
    }
    return [(name, value) for name, value in found.items() if not value.startswith("–")]


def _runs_table(groups: Sequence[Group]) -> Table:
    columns = ("run", "base", "data", "seed", "steps", "held-out accuracy", "reward", "step, s")
    return Table("Runs", columns, tuple(_runs_row(run) for each in groups for run in each.runs))


def _runs_row(run: Run) -> tuple[str, ...]:
    settings = ("–", "–", "–")
    if (cfg := run.cfg) is not None:
        base = f"{cfg.model.model_name_or_path} ({cfg.model.weights})"
        settings = (base, cfg.data.dataset, str(cfg.seed))
    return (
        run.folder.resolve().name,
        *settings,
        str(run.rows[-1]["step"]),
        _accuracy(run),
        _shown(run, "reward"),
        _shown(run, "step_time", statistics.median),
    )


def _benchmarks_table(groups: Sequence[Group]) -> Table:
    """What `qerl eval` has left in the run folders."""
    rows = []
    for run in (run for each in groups for run in each.runs):
        for path in sorted(run.folder.glob("eval/*/*/summary.json")):
            summary = json.loads(path.read_text())
            samples = summary["samples"]
            by_name = {each["name"]: _estimate(each) for each in summary["estimates"]}
            wanted = (f"{kind}@{samples}" for kind in ("mean", "pass", "maj"))
            policy = f"{run.folder.resolve().name}, {path.parents[1].name}"
            cells = (by_name.get(name, "–") for name in wanted)
            rows.append((policy, summary["name"], str(samples), *cells))
    return Table(
        "Evaluations",
        ("policy", "set", "N", "mean@N", "pass@N", "maj@N"),
        tuple(rows),
        "95 % intervals: [over problems and samples], (over samples of these problems alone).",
    )


def _estimate(estimate: dict[str, Any]) -> str:
    text = f"{estimate['value']:.3f}"
    for kind, (opening, closing) in (("over_problems", "[]"), ("over_samples", "()")):
        if (ends := estimate[kind]) is not None:
            text += f" {opening}{ends[0]:.3f}, {ends[1]:.3f}{closing}"
    return text


def _differences_table(groups: Sequence[Group]) -> Table:
    settings = [_settings(each.runs[0].cfg) if each.runs[0].cfg else {} for each in groups]
    fields = sorted(set().union(*settings))
    rows = [
        (field, *(str(each.get(field, "–")) for each in settings))
        for field in fields
        if len({json.dumps(each.get(field)) for each in settings}) > 1
    ]
    return Table("What differs", ("setting", *(each.label for each in groups)), tuple(rows))


def _samples(groups: Sequence[Group]) -> list[Passage]:
    """The best and the worst completion of the first and of the last logged step."""
    passages = []
    for each in groups:
        files = sorted((each.runs[0].folder / "completions").glob("step_*.jsonl"))
        for path in dict.fromkeys((*files[:1], *files[-1:])):
            rows = whole_lines(path)
            step = int(path.stem.removeprefix("step_"))
            for word, pick in (("highest", max), ("lowest", min)):
                row = pick(rows, key=lambda row: row["reward"])
                title = f"{each.label}, step {step}: {word} reward, {row['reward']:.3g}"
                passages.append(Passage(title, f"{_asked(row['prompt'])}\n\n{row['completion']}"))
    return passages


def _asked(prompt: str | list[dict[str, str]]) -> str:
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _configs(groups: Sequence[Group]) -> list[Passage]:
    return [
        Passage(f"{each.label}: config.toml", config.dump(each.runs[0].cfg))
        for each in groups
        if each.runs[0].cfg is not None
    ]
