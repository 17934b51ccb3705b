"""The user's code of rewards and tools: a run warns if it has changed when the run is resumed."""

from collections.abc import Mapping, Sequence

from qerl_jax import config
from qerl_jax.rewards import imports, stock


def hashes(
    cfg: config.RunConfig, reward_functions: Sequence[stock.RewardFunction] | None
) -> dict[str, str]:
    """Returns hashes of the user's code of rewards and tools, by the paths that the config names.

    The code of a function in a file is the whole file; that of a function of a script or notebook is its own source.
    """
    paths = [*cfg.rewards.functions, *(cfg.tools.paths if cfg.tools else ())]
    by_path = {path: imports.source_hash(path) for path in paths}
    for path, function in zip(cfg.rewards.functions, reward_functions or (), strict=False):
        if path.startswith("__main__") or "<" in path:
            by_path[path] = imports.code_hash(function)
    return {path: code for path, code in by_path.items() if code is not None}


def about_changes(
    cfg: config.RunConfig, before: Mapping[str, str], now: Mapping[str, str]
) -> list[str]:
    """Returns a warning if the code of a reward or tool has changed since the run in the folder began."""
    changed = [path for path in now if before.get(path, now[path]) != now[path]]
    if not changed:
        return []
    return [
        f"warning: the code of {', '.join(changed)} has changed since the run in {cfg.output_dir} began: its steps "
        "so far are kept as they are. To train with the new code from the start, choose another output_dir, or "
        f"remove {cfg.output_dir}"
    ]
