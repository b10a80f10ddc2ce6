"""Errors a user can act on: each says what happened with numbers, what it means, and which key to change."""


class DapoError(Exception):
    """Base of every error this project raises on purpose. Subclasses take one message and are picklable."""

    is_lasting = True  # until the user changes something; the others may pass when tried again


class ConfigError(DapoError, ValueError):
    """The configuration contradicts itself, is misspelt or is out of bounds. Raised before work starts."""


class DataError(DapoError, ValueError):
    """A dataset lacks columns or rows that training needs."""


class ModelError(DapoError, ValueError):
    """A model folder is incomplete or does not fit the configuration."""


class RewardError(DapoError, RuntimeError):
    """A scorer cannot be loaded, or gave no word on any response of a step."""


class RolloutError(DapoError, RuntimeError):
    """An engine failed to produce rollouts or to take new weights."""

    is_lasting = False


class WorkerDied(DapoError, RuntimeError):
    """The process of a policy rank or rollout worker is gone; training continues from its last checkpoint."""

    is_lasting = False


class CheckpointError(DapoError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another configuration."""
