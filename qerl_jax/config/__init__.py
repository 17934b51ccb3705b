"""The configuration of a run: its sections as dataclasses, their rules, and its TOML file.

May import `system`.
"""

from qerl_jax.config.grpo import (
    LOSS_TYPES,
    CorrectionConfig,
    DynamicSamplingConfig,
    EntropyConfig,
    GrpoConfig,
    LossType,
    MaskConfig,
    MismatchConfig,
    ReferenceConfig,
    SapoConfig,
    VespoConfig,
)
from qerl_jax.config.run_file import (
    RUN_FORMAT,
    can_load_run,
    dump,
    given_rows,
    load,
    load_run,
    packaged,
    read_table,
    write_run,
)
from qerl_jax.config.sections import (
    DENSE,
    AdaptiveNoiseConfig,
    BlockScales,
    CallFormat,
    Checkpointing,
    DataConfig,
    Drafts,
    Dtype,
    EvalConfig,
    Kernels,
    Linear,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    NoiseConfig,
    OptimConfig,
    PackedFormat,
    PromptTemplate,
    Remat,
    RepetitionPenalty,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    ToolsConfig,
    TopK,
    TopP,
    Weights,
    data_name,
)
from qerl_jax.config.tiers import Tier, about_tiers
from qerl_jax.system.checked import ConfigError, from_table, to_table
