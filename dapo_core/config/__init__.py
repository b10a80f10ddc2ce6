"""The configuration of a run: one frozen tree, defaults < file < `--set`."""

from dapo_core.config.fields import is_volatile, result_values
from dapo_core.config.loading import (
    dump_config,
    known_fields,
    known_keys,
    load_config,
    load_config_or_defaults,
    resolve_config,
)
from dapo_core.config.operation import TimeLimitsConfig, WebhookConfig, is_http_address
from dapo_core.config.sections import (
    Config,
    DataConfig,
    EvaluateConfig,
    MergeConfig,
    ModelConfig,
    RunConfig,
    ServeConfig,
    StoreConfig,
)
from dapo_core.config.training import (
    AlgorithmConfig,
    CheckpointConfig,
    CustomRewardConfig,
    KLConfig,
    OverlongConfig,
    RewardConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    SamplerConfig,
    TrainConfig,
    ValidationConfig,
)

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "Config",
    "CustomRewardConfig",
    "DataConfig",
    "EvaluateConfig",
    "KLConfig",
    "MergeConfig",
    "ModelConfig",
    "OverlongConfig",
    "RewardConfig",
    "RolloutConfig",
    "RolloutCorrectionConfig",
    "RunConfig",
    "SamplerConfig",
    "ServeConfig",
    "StoreConfig",
    "TimeLimitsConfig",
    "TrainConfig",
    "ValidationConfig",
    "WebhookConfig",
    "dump_config",
    "is_http_address",
    "is_volatile",
    "known_fields",
    "known_keys",
    "load_config",
    "load_config_or_defaults",
    "resolve_config",
    "result_values",
]
