"""Errors a user can act on: each says what happened with numbers, what it means, and which key to change."""


class DapoError(Exception):
    """Base of every error this project raises on purpose. Subclasses take one message and are picklable."""


class ConfigError(DapoError, ValueError):
    """The configuration contradicts itself, is misspelt or is out of bounds. Raised before work starts."""


class DataError(DapoError, ValueError):
    """A dataset lacks columns or rows that training needs."""


class ModelError(DapoError, ValueError):
    """A model folder is incomplete or does not fit the configuration."""


class NotEnoughSignal(DapoError, RuntimeError):
    """Dynamic sampling drew its bound of batches and kept too few groups."""


class RewardError(DapoError, RuntimeError):
    """A scorer cannot be loaded, or gave no word on any response of a step."""


class RolloutError(DapoError, RuntimeError):
    """An engine failed to produce rollouts or to take new weights."""


class WorkerDied(DapoError, RuntimeError):
    """The process of a policy rank or rollout worker is gone; training continues from its last checkpoint."""


class CheckpointError(DapoError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another configuration."""


class ServeError(DapoError, RuntimeError):
    """A model server could not be started, or ended before it answered."""

    summary: str = ""  # the message without the server's last lines


class ServerDied(ServeError):
    """A model server was killed while it started, or ended after it had answered."""


class StageTimedOut(DapoError, TimeoutError):
    """A stage was ended because it took longer than its flow.time_limits allow."""


class StoreError(DapoError, OSError):
    """The artifact store cannot be written, or a stage left something in it that cannot be kept."""


class RunSkipped(DapoError, RuntimeError):
    """A run that is nobody's wish of this moment gives way: it came too late, or others hold what it needs."""


class ChildProcessFailed(DapoError, RuntimeError):
    """A child process ended with an error; the message carries its exit status, last lines and log path."""

    exit_code: int | None = None  # minus the signal that killed it; None when it never ran
    summary: str = ""  # the message without the last lines, for where these were shown already
