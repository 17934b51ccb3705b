"""Reports the results of runs from their files: as a page, PNG files, lines of text, a figure, or a table."""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import re
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.figure import Figure

from qerl_jax import config
from qerl_jax.system.files import read_json, whole_lines, write_whole
from qerl_jax.tracking import charts, logger, page, terminal

# Charts by section: title, unit, whether the axis is logarithmic, and metrics by the label of their line.
# fmt: off
_SECTIONS = {
    "Learning": (
        ("Reward", "", False, {"mean": "reward"}),
        ("Held-out accuracy", "", False, {"accuracy": "eval/accuracy"}),
        ("Spread of rewards in a group", "", False, {"deviation": "reward_std"}),
        ("Groups without signal", "share", False, {"share": "frac_reward_zero_std"}),
    ),
    "The policy": (
        ("Entropy", "nats per token", False, {"of all tokens": "entropy", "of those that learn": "update/entropy"}),
        ("AQN sigma", "", True, {"sigma": "aqn/sigma"}),
        ("Completion length", "tokens", False, {
            "mean": "completions/mean_length",
            "mean of those that end": "completions/mean_terminated_length",
            "longest": "completions/max_length",
        }),
        ("Truncated completions", "share", False, {"share": "completions/clipped_ratio"}),
    ),
    "The update": (
        ("Loss", "", False, {"loss": "loss"}),
        ("KL to the reference", "nats per token", False, {"KL": "kl"}),
        ("Gradient norm", "", False, {"norm": "grad_norm"}),
        ("Learning rate", "", False, {"rate": "learning_rate"}),
        ("Clip ratios", "share of tokens", False, {
            "either": "clip_ratio/region_mean",
            "low": "clip_ratio/low_mean",
            "high": "clip_ratio/high_mean",
        }),
        ("Mismatch of sampler and trainer", "nats", True, {
            "mean": "sampling/sampling_logp_difference/mean",
            "99th percentile": "sampling/sampling_logp_difference/p99",
            "largest": "sampling/sampling_logp_difference/max",
        }),
        ("KL from sampler to trainer", "nats per token", True, {"k3": "sampling/kl_k3"}),
        ("Importance ratio", "", True, {
            "mean": "sampling/importance_sampling_ratio/mean",
            "smallest": "sampling/importance_sampling_ratio/min",
            "largest": "sampling/importance_sampling_ratio/max",
        }),
    ),
    "The machine": (
        ("Time per phase", "seconds", False, {
            "rollout": "perf/rollout_time",
            "reward": "perf/reward_time",
            "update": "perf/update_time",
            "evaluation": "perf/eval_time",
        }),
        ("Throughput", "tokens per second", False, {
            "rollout": "perf/rollout_tokens_per_second",
            "update": "perf/update_tokens_per_second",
        }),
        ("Peak memory", "GB", False, {"peak": "perf/peak_memory_gb"}),
    ),
}
# fmt: on
_LINES = ("reward", "entropy", "completions/mean_length", "aqn/sigma")
# Fields in which runs of one group may differ.
_INCIDENTAL = ("seed", "output_dir", "run_name", "report_to")


@dataclasses.dataclass(frozen=True)
class Run:
    """The contents of a run folder.

    Attributes:
        folder: Path of the run folder.
        cfg: The config in its config.toml; None without that file.
        rows: The rows of its metrics.jsonl.
    """

    folder: pathlib.Path
    cfg: config.RunConfig | None
    rows: list[dict[str, Any]]

    def values(self, name: str) -> dict[int, float]:
        """Returns a metric by step; steps without a finite number, or with the mean of nothing, are left out."""
        by_step = {row["step"]: terminal.measured(row, name) for row in self.rows}
        is_finite = lambda value: isinstance(value, int | float) and math.isfinite(value)
        return {step: float(value) for step, value in by_step.items() if is_finite(value)}

    def ordered(self, name: str) -> list[float]:
        """Returns what `values` does, without the steps."""
        return list(self.values(name).values())


@dataclasses.dataclass(frozen=True)
class Group:
    """Runs whose configs differ only in the seed and in names (`_INCIDENTAL`)."""

    label: str
    runs: tuple[Run, ...]


def read(run_folder: str | pathlib.Path) -> Run:
    """Reads a run folder.

    Raises:
        FileNotFoundError: If it has no metrics.
    """
    folder = pathlib.Path(run_folder)
    rows = logger.read_metrics(folder)
    if not rows:
        raise FileNotFoundError(
            f"no metrics.jsonl with rows in {run_folder}: not a run folder, or nothing logged yet"
        )
    path = folder / "config.toml"
    return Run(folder, config.load_run(folder) if path.is_file() else None, rows)


def group(runs: Sequence[Run]) -> list[Group]:
    """Groups runs whose configs differ only in the seed (or names), in the order of their first run."""
    together: dict[str, list[Run]] = {}
    for run in runs:
        settings = json.dumps(_settings(run), sort_keys=True)
        key = os.fspath(run.folder) if run.cfg is None else settings
        together.setdefault(key, []).append(run)
    groups = [Group(_common_name(members), tuple(members)) for members in together.values()]
    labels = [arm.label for arm in groups]
    paths = [os.fspath(arm.runs[0].folder) for arm in groups]
    return [
        # Names that are not unique are replaced by paths.
        arm if labels.count(arm.label) == 1 else dataclasses.replace(arm, label=path)
        for arm, path in zip(groups, paths, strict=True)
    ]


def lines(run_folder: str | pathlib.Path) -> list[str]:
    """Draws the curves of a run as text, a line per metric with its first and last value; accuracy comes last.

    Raises:
        FileNotFoundError: If the folder has no metrics.
    """
    run = read(run_folder)
    shown = []
    for name in _LINES:
        if values := run.ordered(name):
            shown.append(f"{name:28} {values[0]:8.4g} {terminal.curve(values)} {values[-1]:.4g}")
        elif any(name in row for row in run.rows):
            shown.append(f"{name:28}     none")
    if accuracy := run.ordered("eval/accuracy"):
        shown.append(f"held-out accuracy {accuracy[0]:.3f} -> {accuracy[-1]:.3f}")
    return shown


def table(run_folder: str | pathlib.Path) -> list[dict[str, Any]]:
    """Summarizes the metrics of a run, as rows that `pandas.DataFrame` takes.

    Returns:
        A row per metric that is a finite number at some step, with its name as "metric"; its value as
        "first", "lowest", "highest" and "last"; and the step of each as "first_step" and so on.

    Raises:
        FileNotFoundError: If the folder has no metrics.
    """
    run, rows = read(run_folder), []
    for name in dict.fromkeys(name for row in run.rows for name in row if name != "step"):
        if values := run.values(name):
            rows.append({"metric": name})
            for end, (step, value) in charts.extremes([*values], [*values.values()]).items():
                rows[-1] |= {end: value, f"{end}_step": step}
    return rows


def curves(run_folders: Sequence[str | pathlib.Path]) -> Figure:
    """Draws the charts of the page of one or several runs into one figure.

    A notebook that has run `%matplotlib inline` shows it; `savefig` writes it to a file.

    Args:
        run_folders: At least one. Runs whose configs differ in the seed only become one line.

    Raises:
        FileNotFoundError: If a folder has no metrics.
    """
    groups = group([read(folder) for folder in run_folders])
    return charts.grid(list(itertools.chain(*_sections(groups).values())))


def write(
    run_folders: Sequence[str | pathlib.Path],
    folder: str | pathlib.Path | None = None,
    *,
    with_pictures: bool = True,
) -> pathlib.Path:
    """Writes a page about one or several runs, and a PNG file of every chart beside it.

    Runs whose configs differ in the seed only become one line with a band from the smallest to the largest
    value.

    Args:
        run_folders: At least one.
        folder: Folder of the page. Absent means `report/` of the run, or of the working directory
            for several.
        with_pictures: Whether to write the PNG files, which takes seconds.

    Returns:
        The page, `<folder>/index.html`.

    Raises:
        FileNotFoundError: If a folder has no metrics.
    """
    groups = group([read(source) for source in run_folders])
    target = pathlib.Path(run_folders[0] if len(run_folders) == 1 else ".")
    folder = target / "report" if folder is None else pathlib.Path(folder)
    sections = _sections(groups)
    firsts = [(arm.label, arm.runs[0].cfg) for arm in groups]
    configs = [(f"{label}: config.toml", config.dump(cfg)) for label, cfg in firsts if cfg]
    text = page.render(
        " against ".join(source.label for source in groups) if len(groups) < 4 else "Runs compared",
        _subtitle(groups),
        _figures(groups[0].runs[0]) if len(groups) == 1 else {},
        _tables(groups),
        sections,
        {"Completions": samples(groups), "Settings": configs},
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "index.html", text)
    taken: dict[str, int] = {}
    for chart in itertools.chain(*sections.values()) if with_pictures else ():
        # A reward function may be called as a metric of the run: "reward".
        number = taken[chart.slug] = taken.get(chart.slug, 0) + 1
        charts.png(chart, folder / f"{chart.slug}{f'-{number}' * (number > 1)}.png")
    return folder / "index.html"


def _sections(groups: Sequence[Group]) -> dict[str, list[charts.Chart]]:
    """Returns the charts of the page by heading."""
    learning, *others = _SECTIONS.items()
    sections = (learning, ("Rewards by function", _reward_panels(groups)), *others)
    return {heading: _charts(panels, groups) for heading, panels in sections}


def _settings(run: Run) -> dict[str, Any]:
    """Returns the config as values by "section.field", without fields that may differ within a group."""
    table = {} if run.cfg is None else config.to_table(run.cfg)
    fields = {}
    for name, value in table.items():
        if isinstance(value, dict):
            fields |= {f"{name}.{field}": item for field, item in value.items()}
        elif name not in _INCIDENTAL:
            fields[name] = value
    return fields


def _common_name(runs: Sequence[Run]) -> str:
    names = [run.folder.resolve().name for run in runs]
    if len(names) == 1:
        return names[0]
    shared = re.sub(r"([-_.]seed)?([-_]s)?$", "", os.path.commonprefix(names).rstrip("-_. "))
    return f"{shared or names[0]} ({len(names)} runs)"


def _line(label: str, metric: str, arm: Group) -> charts.Line | None:
    """Returns a metric of a group as a line: the mean of its runs, and a band if the spread is known."""
    values = [v for run in arm.runs if (v := run.values(metric))]
    if not values:
        return None
    steps = tuple(sorted(set().union(*values)))
    at = [[v[step] for v in values if step in v] for step in steps]
    means, low, high = (tuple(map(reduce, at)) for reduce in (statistics.fmean, min, max))
    if len(values) > 1:
        return charts.Line(label, steps, means, low, high)
    # A single run's own confidence interval, which accuracy has.
    ends = [arm.runs[0].values(f"{metric}_{end}") for end in ("low", "high")]
    known = all(set(steps) <= end.keys() for end in ends)
    return charts.Line(label, steps, means, *(tuple(map(end.get, steps)) for end in ends if known))


def _charts(panels: Iterable, groups: Sequence[Group]) -> list[charts.Chart]:
    """Returns charts: for one group one per panel, with all metrics; for several one per metric, with all groups."""
    if len(groups) > 1:
        panels = [
            (title if len(metrics) == 1 else f"{title}: {label}", unit, log_axis, {"": metric})
            for title, unit, log_axis, metrics in panels
            for label, metric in metrics.items()
        ]
    figures = []
    for title, unit, log_axis, metrics in panels:
        pairs = itertools.product(metrics.items(), groups)
        drawn = [_line(label or arm.label, metric, arm) for (label, metric), arm in pairs]
        figures.append(charts.Chart(title, unit, tuple(filter(None, drawn)), log_axis))
    # A metric that is always 0, such as KL without a reference, gets no chart.
    return [chart for chart in figures if any(map(any, (line.values for line in chart.lines)))]


def _reward_panels(groups: Sequence[Group]) -> list[tuple]:
    """Returns a panel per reward function; none if there is only one, which is the reward itself."""
    rows = (row for arm in groups for run in arm.runs for row in run.rows)
    names = {name for row in rows for name in row if re.fullmatch("rewards/.*/mean", name)}
    panels = [(name.split("/")[1], "", False, {"mean": name}) for name in sorted(names)]
    return panels if len(panels) > 1 else []


def _subtitle(groups: Sequence[Group]) -> str:
    runs = [run for arm in groups for run in arm.runs]
    last = max(row["step"] for run in runs for row in run.rows)
    bands = "; bands go from the smallest to the largest of the runs" * (len(runs) > len(groups))
    return f"{len(runs)} run{'s' * (len(runs) > 1)}, {last} optimizer steps{bands}"


def _shown(run: Run, metric: str, reduce=lambda values: values[-1]) -> str:
    """Returns the last value of a metric as text, or `reduce` of all values."""
    values = run.ordered(metric)
    return charts.number(reduce(values)) if values else "–"


def _accuracy(run: Run) -> str:
    values = run.values("eval/accuracy")
    if not values:
        return "–"
    first, last = min(values), max(values)
    text = f"{values[first]:.3f} → {values[last]:.3f}"
    ends = [run.values(f"eval/accuracy_{end}").get(last) for end in ("low", "high")]
    return text if None in ends else f"{text} [{ends[0]:.3f}, {ends[1]:.3f}]"


def _figures(run: Run) -> dict[str, str]:
    """Returns the most important numbers that the run has."""
    tokens = run.ordered("num_tokens")
    figures = {
        "Held-out accuracy, 95 %": _accuracy(run),
        "Reward, last step": _shown(run, "reward"),
        "Median step": f"{_shown(run, 'step_time', statistics.median)} s",
        "Tokens seen": f"{tokens[-1]:,.0f}" if tokens else "–",
    }
    return {name: value for name, value in figures.items() if not value.startswith("–")}


def _tables(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Returns the tables of the page."""
    runs = [run for arm in groups for run in arm.runs]
    columns = ("run", "base", "data", "seed", "steps", "held-out accuracy", "reward", "step, s")
    evaluations = [
        _evaluation_row(run, path)
        for run in runs
        for path in sorted(run.folder.glob("eval/*/*/summary.json"))  # written by `qerl eval`
    ]
    note = "95 % intervals: [over problems and samples], (over samples of these problems alone)."
    settings = [_settings(arm.runs[0]) for arm in groups]
    differences = [
        (field, *(str(arm.get(field, "–")) for arm in settings))
        for field in sorted(set().union(*settings))
        if len({json.dumps(arm.get(field)) for arm in settings}) > 1
    ]
    tables = (
        ("Runs", columns, map(_run_row, runs), None),
        ("Evaluations", ("policy", "set", "N", "mean@N", "pass@N", "maj@N"), evaluations, note),
        ("What differs", ("setting", *(arm.label for arm in groups)), differences, None),
    )
    return [
        {"title": title, "columns": columns, "rows": list(rows), "note": note}
        for title, columns, rows, note in tables
    ]


def _run_row(run: Run) -> tuple[str, ...]:
    cfg, settings = run.cfg, ("–", "–", "–")
    if cfg is not None:
        base = f"{cfg.model.model_name_or_path} ({cfg.model.weights})"
        settings = (base, config.data_name(cfg, config.given_rows(run.folder)), str(cfg.seed))
    return (
        run.folder.resolve().name,
        *settings,
        str(run.rows[-1]["step"]),
        _accuracy(run),
        _shown(run, "reward"),
        _shown(run, "step_time", statistics.median),
    )


def _evaluation_row(run: Run, path: pathlib.Path) -> tuple[str, ...]:
    summary = read_json(path)
    try:
        by_name = {estimate["name"]: _estimate(estimate) for estimate in summary["estimates"]}
        samples = str(summary["samples"])
        cells = (by_name.get(f"{kind}@{samples}", "–") for kind in ("mean", "pass", "maj"))
        policy = f"{run.folder.resolve().name}, {path.parents[1].name}"
        return (policy, summary["name"], samples, *cells)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(f"{path}: is not the result of an evaluation: {error!r}") from error


def _estimate(estimate: dict[str, Any]) -> str:
    intervals = [
        f" {opening}{ends[0]:.3f}, {ends[1]:.3f}{closing}"
        for kind, (opening, closing) in (("over_problems", "[]"), ("over_samples", "()"))
        if (ends := estimate[kind]) is not None
    ]
    return f"{estimate['value']:.3f}" + "".join(intervals)


def _is_completion(row: Any) -> bool:
    """Whether a line of a completions file is a completion with a reward, or with none; other lines are left out."""
    if not isinstance(row, dict) or not isinstance(row.get("reward"), int | float | None):
        return False
    prompt = row.get("prompt")
    last = prompt[-1] if isinstance(prompt, list) and prompt else {"content": prompt}
    is_asked = isinstance(last, dict) and isinstance(last.get("content"), str)
    return is_asked and isinstance(row.get("completion"), str)


def _ends(rows: Sequence[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Returns the rows of highest and lowest reward, with words about these; one if they are equal, or none is judged."""
    judged = [row for row in rows if row["reward"] is not None]
    if not judged:
        return [("no reward", row) for row in rows[:1]]
    highest, lowest = (pick(judged, key=lambda row: row["reward"]) for pick in (max, min))
    if highest["reward"] == lowest["reward"]:
        return [(f"every reward is {highest['reward']:.3g}", highest)]
    named = (("highest", highest), ("lowest", lowest))
    return [(f"{words} reward, {row['reward']:.3g}", row) for words, row in named]


def samples(groups: Sequence[Group]) -> list[tuple[str, str]]:
    """Returns the best and the worst completion of the first and the last logged step, as pairs of a title and a text.

    It is only one if all rewards are equal, or if there are none.
    """
    passages = []
    for arm in groups:
        files = list(logger.completion_files(arm.runs[0].folder).items())
        for step, path in dict.fromkeys((*files[:1], *files[-1:])):
            where = f"{arm.label}, step {step}" if arm.label else f"step {step}"
            for words, row in _ends(list(filter(_is_completion, whole_lines(path)))):
                text = f"{terminal.asked(row['prompt'])}\n\n{row['completion']}"
                # The file may contain lone surrogates, as escapes; a page cannot.
                plain = text.encode(errors="backslashreplace").decode()
                passages.append((f"{where}: {words}", plain))
    return passages
