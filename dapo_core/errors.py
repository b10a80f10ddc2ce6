"""Errors a user can act on: what happened, with numbers; what it means; and which key to change."""


def counted(number: int, noun: str) -> str:
    """Return the number with the noun in the singular or plural, for messages."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


class DapoError(Exception):
    """Base class of the project's errors. Subclasses take one message and are picklable."""

    is_lasting = True  # a retry fails the same way until the user changes something


class ConfigError(DapoError, ValueError):
    """The configuration is contradictory, misspelt or out of bounds. Raised before work starts."""


class DataError(DapoError, ValueError):
    """A dataset lacks columns or rows that training needs."""


class ModelError(DapoError, ValueError):
    """A model folder is incomplete or does not fit the configuration."""


class RewardError(DapoError, RuntimeError):
    """A scorer cannot be loaded, or failed on every response of a step."""


class RolloutError(DapoError, RuntimeError):
    """An engine failed to produce rollouts or to load new weights."""

    is_lasting = False


class WorkerDied(DapoError, RuntimeError):
    """The process of a policy rank or rollout worker died; training restarts from its last
    checkpoint.
    """

    is_lasting = False


class CheckpointError(DapoError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another configuration."""
