"""The sections of a recipe that the chain reads besides those of training."""

from tasks.config.chain import ChainConfig as ChainConfig
from tasks.config.chain import ModelConfig as ModelConfig
