"""QeRL-JAX: reinforcement learning of language models on frozen 4-bit weights.

    import qerl_jax
    run = qerl_jax.train("run.toml", dataset=rows, reward_funcs=[my_reward])
    run.plot()
    run.policy().generate("What is 12 + 30?")

A name is imported when it is first used, and JAX with the first name that needs it. The functions
for your own training loop are in `qerl_jax.rl`.
"""

from importlib import metadata
from typing import TYPE_CHECKING, Any

from qerl_jax.system import lazy_names

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

_imported, _, _all = lazy_names.attach(__name__, __file__)
__all__ = ["__version__", *_all]


def __getattr__(name: str) -> Any:
    """Imports a public name, or reads the version, when it is first asked for."""
    if name == "__version__":
        return metadata.version("qerl-jax")
    return _imported(name)


def __dir__() -> list[str]:
    """Lists the public names."""
    return list(__all__)
