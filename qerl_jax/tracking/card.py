"""Writes the report card of a run, `report.md`: settings, machine, times and results, as Markdown."""

import dataclasses
import os
import pathlib
import re
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence

from qerl_jax.config import RunConfig, data_name
from qerl_jax.system.files import write_whole
from qerl_jax.tracking import report, terminal
from qerl_jax.tracking.health import Health, cause

FILE = "report.md"
_CURVES = (
    ("held-out accuracy", "eval/accuracy"),
    ("reward", "reward"),
    ("groups without signal", "frac_reward_zero_std"),
    ("entropy, nats per token", "entropy"),
    ("completion length, tokens", "completions/mean_length"),
    ("truncated completions", "completions/clipped_ratio"),
    ("KL to the reference", "kl"),
    ("AQN sigma", "aqn/sigma"),
    ("learning rate", "learning_rate"),
)
_PHASES = {
    "rollouts": "perf/rollout_time",
    "rewards": "perf/reward_time",
    "updates": "perf/update_time",
    "evaluations": "perf/eval_time",
}
_WIDTH = 40  # columns of a curve
_LONGEST = 1500  # characters of a sample


@dataclasses.dataclass(frozen=True)
class Machine:
    """The devices and packages that a run used, as its last process saw them.

    Attributes:
        device: Kind of the devices.
        devices: Number of devices that the run used.
        versions: Versions of packages, by name.
        seconds: Seconds from the start of the run's preparation in that process to the end of training.
    """

    device: str
    devices: int
    versions: Mapping[str, str]
    seconds: float


def write(
    run_folder: str | pathlib.Path,
    machine: Machine,
    notes: Iterable[str] = (),
    *,
    given_rows: int | None = None,
) -> pathlib.Path:
    """Writes the card of an ended run into its folder, and returns the path.

    Args:
        run_folder: A folder with `config.toml`, and `metrics.jsonl` with at least one row.
        machine: The devices and packages of the run.
        notes: Lines that were shown at the start of the run; those that begin with "warning:" are listed with the
            warnings.
        given_rows: Number of rows that were passed in Python; None if the config names the data.

    Raises:
        FileNotFoundError: If the folder has no metrics.
    """
    run = report.read(run_folder)
    health, notes = Health.of(run.cfg), list(notes)
    warnings = [note for note in notes if note.startswith("warning:")]
    others = [note for note in notes if note not in warnings]
    warnings += [line for row in run.rows for line in health.see(row)]
    warnings += filter(None, [health.closing()])
    parts = [
        f"# {run.cfg.run_name or run.folder.resolve().name}",
        _outcome(run, health),
        _section("What ran", _table(_settings(run.cfg, given_rows))),
        _section("Curves", _curves(run)),
        _section("Time and cost", _cost(run, machine)),
        _section("On what", _table({"device": _count(machine), **machine.versions})),
        _section("Warnings", _list(warnings) or "None."),
        _section("Said at the start", _list(others)),
        _section("Samples", _samples(run)),
        "All curves: `report/index.html`. `qerl report` of this folder also writes them as PNG files.",
    ]
    path = run.folder / FILE
    write_whole(path, "\n\n".join(filter(None, parts)) + "\n")
    return path


def _outcome(run: report.Run, health: Health) -> str:
    accuracy, reward = run.ordered("eval/accuracy"), run.ordered("reward")
    opening = "" if health.has_learned else f"**Learned nothing.** {cause(health)}.\n\n"
    lines = [
        f"Reward went from {reward[0]:.3f} to {reward[-1]:.3f}." if reward else "Reward: none.",
        f"{health.taught} of {health.steps} steps had rewards that differ, and made an update.",
    ]
    if len(accuracy) > 1:
        lines.insert(0, f"Held-out accuracy went from {accuracy[0]:.3f} to {accuracy[-1]:.3f}.")
    return opening + " ".join(lines)


def _settings(cfg: RunConfig, given_rows: int | None) -> dict[str, str]:
    shape = "all layers" if cfg.model.trainable == "full" else f"LoRA of rank {cfg.lora.rank}"
    config = os.fspath(pathlib.Path(cfg.output_dir) / "config.toml")
    noise = (
        cfg.noise
        and f"{cfg.noise.unit} sigma from {cfg.noise.sigma_start:g} to {cfg.noise.sigma_end:g}"
    )
    return {
        "base": f"{cfg.model.model_name_or_path}, held in {cfg.model.weights}",
        "what trains": f"{shape}, learning rate {cfg.optim.learning_rate:g}",
        "data": data_name(cfg, given_rows),
        "rewards": ", ".join(cfg.rewards.functions) or "of the environment",
        "loss": cfg.grpo.loss_type,
        "a rollout": f"{cfg.prompts_per_rollout} prompts x {cfg.rollout.num_generations} completions of at most "
        f"{cfg.rollout.max_completion_length} tokens",
        "noise (AQN)": noise or "none",
        "length": f"{cfg.max_steps} steps" if cfg.max_steps else f"{cfg.num_train_epochs:g} epochs",
        "seed": str(cfg.seed),
        "again": _again(cfg, config, has_rows=given_rows is not None),
    }


def _again(cfg: RunConfig, config: str, *, has_rows: bool) -> str:
    """Returns the command that repeats the run, or says what it needs: definitions in a script cannot be imported."""
    names = (*cfg.rewards.functions, *(cfg.tools.functions if cfg.tools else ()))
    needed = ["the rows"] * has_rows
    needed += [f"`{name}`" for name in names if "__main__" in name or "<" in name]
    if needed:
        return f"from your script or notebook, which defines {', '.join(needed)}"
    return f"`qerl train {shlex.quote(config)} --output-dir ANOTHER`"


def _curves(run: report.Run) -> str:
    rows = []
    for label, name in _CURVES:
        values = run.ordered(name)
        if any(values):
            course = terminal.curve(values, _WIDTH)
            ends = (f"{value:.4g}" for value in (values[0], values[-1], min(values), max(values)))
            rows.append((label, f"`{course}`", *ends))
    return _grid(("", "course", "first", "last", "lowest", "highest"), rows) if rows else ""


def _cost(run: report.Run, machine: Machine) -> str:
    """Returns the time of each phase over the whole run, from its metrics, and the total time of its last process."""
    sums = {label: sum(run.ordered(name)) for label, name in _PHASES.items()}
    total = sum(sums.values())
    rows = [(name, f"{s:,.1f}", f"{s / total:.0%}") for name, s in sums.items() if s]
    lines = [f"{machine.devices * total:,.0f} device seconds ({_count(machine)})"]
    first, *others = run.ordered("step_time") or [0.0]
    if others:
        rest = f"of the others the median is {statistics.median(others):,.1f} s"
        lines.append(f"first step {first:,.1f} s, with compiling; {rest}")
    if tokens := run.ordered("num_tokens"):
        lines.append(f"{tokens[-1]:,.0f} tokens, prompts included")
    if memory := run.ordered("perf/peak_memory_gb"):
        lines.append(f"at most {max(memory):.1f} GB of device memory")
    took = f"{machine.seconds:,.0f} s, with loading, compiling and saving"
    table = _grid(("phase", "seconds", "share"), rows) + "\n\n" if rows else ""
    return table + _list([*lines, f"the last process took {took}"])


def _samples(run: report.Run) -> str:
    """Returns the best and the worst completion of the first and the last logged step."""
    shown = []
    for title, text in report.samples([report.Group("", (run,))]):
        text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."
        # Longer than any fence in the text, so that a completion cannot end it.
        fence = "`" * max(3, *(len(ticks) + 1 for ticks in re.findall("`+", text) or [""]))
        shown.append(f"{title.capitalize()}:\n\n{fence}text\n{text}\n{fence}")
    return "\n\n".join(shown)


def _count(machine: Machine) -> str:
    return f"{machine.devices} x {machine.device}"


def _table(rows: Mapping[str, str]) -> str:
    return _grid(("", ""), ((name, text.replace("|", "&#124;")) for name, text in rows.items()))


def _grid(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table in Markdown."""
    lines = (" | ".join(row) for row in (columns, ["---"] * len(columns), *rows))
    return "\n".join(f"| {line} |" for line in lines)


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _section(heading: str, text: str) -> str:
    return f"## {heading}\n\n{text}" if text else ""
