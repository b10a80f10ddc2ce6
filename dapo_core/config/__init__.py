"""The configuration of a run: one frozen tree, defaults < file < `--set`."""

from dapo_core.config.fields import is_volatile, result_values
from dapo_core.config.loading import dump_config, known_keys, load_config, load_config_or_defaults, resolve_config
from dapo_core.config.sections import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluateConfig,
    MergeConfig,
    ModelConfig,
    OverlongConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SamplerConfig,
    ServeConfig,
    StoreConfig,
    TrainConfig,
)

__all__ = [
    "AlgorithmConfig",
    "Config",
    "DataConfig",
    "EvaluateConfig",
    "MergeConfig",
    "ModelConfig",
    "OverlongConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplerConfig",
    "ServeConfig",
    "StoreConfig",
    "TrainConfig",
    "dump_config",
    "is_volatile",
    "known_keys",
    "load_config",
    "load_config_or_defaults",
    "resolve_config",
    "result_values",
]
