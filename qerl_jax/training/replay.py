"""Saves optimizer steps whose loss or gradient was not finite, and runs them again to find the cause."""

import dataclasses
import pathlib
import zipfile
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from qerl_jax import config
from qerl_jax.aqn import exploration
from qerl_jax.checkpoint.policy import load_base
from qerl_jax.model.transformer import trainable
from qerl_jax.planning import memory
from qerl_jax.rl import experience, update
from qerl_jax.system.files import writing

# The most files per run: the first ones show the cause, and a run that never recovers must not fill the disk.
_KEPT = 3
# Trees whose leaves are numbered in a file; the experience and the fixed log-probabilities have names.
_TREES = ("params", "noise")
_FIELDS = {field.name for field in dataclasses.fields(experience.Experience)}


def write(run_folder: str | pathlib.Path, failure: update.NonFinite) -> pathlib.Path | None:
    """Writes `<run_folder>/non_finite/step_<step>.npz`: rows, weights and noise of a skipped step.

    Only the first three steps of a run are written; returns the path, or None if nothing was written.
    """
    path = pathlib.Path(run_folder) / "non_finite" / f"step_{failure.step:06d}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(list(path.parent.glob("step_*.npz"))) >= _KEPT:
        return None
    arrays = {"step": np.int32(failure.step), "entropy_coef": np.float32(failure.entropy_coef)}
    values = {name: getattr(failure.experience, name) for name in _FIELDS}
    arrays |= {f"experience/{name}": x for name, x in values.items() if x is not None}
    arrays |= {f"fixed/{name}": value for name, value in failure.fixed.items()}
    for name in _TREES:
        leaves = jax.tree.leaves(getattr(failure, name))
        arrays |= {f"{name}/{i}": np.asarray(leaf) for i, leaf in enumerate(leaves)}
    partial = path.with_name(f".{path.name}")
    with writing(path):
        with partial.open("wb") as file:
            np.savez(file, **arrays)
        partial.replace(path)
    return path


def run(path: str | pathlib.Path) -> list[str]:
    """Loads the run's policy, repeats the step, and reports what is not finite. Dropout uses another random key.

    Args:
        path: A file that `write` wrote, in its run folder.

    Returns:
        The lines of the report.

    Raises:
        FileNotFoundError: If there is no such file, or no config.toml in its run folder.
        ValueError: If it is not a file of `write`.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    cfg = config.load_run(path.resolve().parents[1])
    arrays = _read(path)
    model, frozen, tokenizer = load_base(cfg.model, cfg.lora, cfg.seed)
    fresh, frozen = trainable(model, frozen, jax.random.key(0))
    rows = experience.Experience(**_under("experience", arrays))
    params = _filled(fresh, _under("params", arrays))
    leaves = _under("noise", arrays)
    noise = _filled(exploration.abstract_noise(cfg.noise, model), leaves) if leaves else None
    plan = memory.plan(cfg, model.arch, limit=memory.device_memory())
    updater = update.make_updater(plan.cfg, model, tokenizer.num_tokens, total_steps=1)
    fixed, coef = _under("fixed", arrays), float(arrays.get("entropy_coef", 0.0))
    policy, key = (params, frozen, noise), jax.random.key(0)
    loss, grads = update.replay_step(updater, policy, rows, fixed, key, coef)
    norm = np.float32(optax.tree.norm(grads))
    lines = [
        f"step {arrays['step']}: loss {np.float32(loss)}, grad_norm {norm}",
        *(f"gradient not finite: {name}" for name in _non_finite(grads)),
        *(f"weight not finite: {name}" for name in _non_finite(params)),
        *_bad_rows(rows, fixed),
    ]
    if np.isfinite(loss) and np.isfinite(norm):
        lines.append(
            "all is finite now: what was not came from the device (its memory, or a kernel that does not always "
            "compute the same), or from dropout"
        )
    return lines


def _read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a file that `write` wrote."""
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = dict(file)
    except (ValueError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: is not a step that a run has skipped: {error}") from error
    names = _under("experience", arrays).keys()
    if "step" not in arrays or not _FIELDS - {"judged", "noise", "versions"} <= names <= _FIELDS:
        raise ValueError(f"{path}: is not a step that a run has skipped")
    return arrays


def _bad_rows(rows: experience.Experience, fixed: dict[str, np.ndarray]) -> list[str]:
    """Reports the rows whose inputs to the step were not finite."""
    bad = {}
    for name, value in {"behaviour_logps": rows.behaviour_logps, **fixed}.items():
        bad[name] = np.unique(rows.row_of_token[rows.mask & ~np.isfinite(value)])
    bad["advantages"] = np.flatnonzero(~np.isfinite(rows.advantages))
    return [f"row {row}: {name} not finite" for name, indices in bad.items() for row in indices]


def _non_finite(tree: Any) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [jax.tree_util.keystr(path) for path, x in leaves if not jnp.isfinite(x).all()]


def _under(name: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    prefix = f"{name}/"
    return {key.removeprefix(prefix): x for key, x in arrays.items() if key.startswith(prefix)}


def _filled(like: Any, leaves: dict[str, np.ndarray]) -> Any:
    ordered = [jnp.asarray(leaves[str(index)]) for index in range(len(leaves))]
    return jax.tree.unflatten(jax.tree.structure(like), ordered)
