"""QeRL-JAX: reinforcement learning of language models on frozen 4-bit weights.

    import qerl_jax
    run = qerl_jax.train("run.toml", dataset=rows, reward_funcs=[my_reward])
    run.plot()
    run.policy().generate("What is 12 + 30?")

A name is imported when it is first used, and JAX with the first name that needs it. The functions
for your own training loop are in `qerl_jax.rl`.
"""

import importlib
from importlib import metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qerl_jax import rl
    from qerl_jax.api.jobs import evaluate, export, plan, quantize, report
    from qerl_jax.api.policy import CompletionOutput, Policy, RequestOutput, load
    from qerl_jax.api.runs import Run, load_run, train
    from qerl_jax.config import (
        AdaptiveNoiseConfig,
        CorrectionConfig,
        DataConfig,
        DynamicSamplingConfig,
        EntropyConfig,
        EvalConfig,
        GrpoConfig,
        LoraConfig,
        MaskConfig,
        MeshConfig,
        MismatchConfig,
        ModelConfig,
        NoiseConfig,
        OptimConfig,
        ReferenceConfig,
        RewardConfig,
        RolloutConfig,
        RunConfig,
        SapoConfig,
        ToolsConfig,
        VespoConfig,
    )
    from qerl_jax.data.datasets import Problem
    from qerl_jax.evaluation.options import EvalOptions
    from qerl_jax.generation.sampling_params import SamplingParams
    from qerl_jax.system.checked import ConfigError

    __version__: str

# The module of each public name. The imports above list the same names for editors and type checkers.
_MODULES = {
    "api.jobs": ("evaluate", "export", "plan", "quantize", "report"),
    "api.policy": ("CompletionOutput", "Policy", "RequestOutput", "load"),
    "api.runs": ("Run", "load_run", "train"),
    "system.checked": ("ConfigError",),
    "config": (
        "AdaptiveNoiseConfig",
        "CorrectionConfig",
        "DataConfig",
        "DynamicSamplingConfig",
        "EntropyConfig",
        "EvalConfig",
        "GrpoConfig",
        "LoraConfig",
        "MaskConfig",
        "MeshConfig",
        "MismatchConfig",
        "ModelConfig",
        "NoiseConfig",
        "OptimConfig",
        "ReferenceConfig",
        "RewardConfig",
        "RolloutConfig",
        "RunConfig",
        "SapoConfig",
        "ToolsConfig",
        "VespoConfig",
    ),
    "data.datasets": ("Problem",),
    "evaluation.options": ("EvalOptions",),
    "generation.sampling_params": ("SamplingParams",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = ["__version__", "rl", *sorted(_PLACES)]


def __getattr__(name: str) -> Any:
    """Imports a public name, or reads the version, when it is first asked for."""
    if name == "__version__":
        return metadata.version("qerl-jax")
    if name == "rl":
        return importlib.import_module("qerl_jax.rl")
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Lists the public names."""
    return list(__all__)
