"""Every error rollstream raises on purpose.

A message says what is wrong, where (file, key, row) and what to do about it. Two questions decide how an
error is treated: does trying again help (`TransientError`), and is it the rollout's own fault or the
engine's (`EngineUnavailableError` costs no rollout an attempt).
"""

import difflib
from collections.abc import Iterable


class RollstreamError(Exception):
    """Base of all errors that rollstream raises on purpose."""


class ConfigError(RollstreamError):
    """The configuration is wrong: unknown key, wrong type, impossible combination. Nothing was started."""


class DataError(RollstreamError):
    """A dataset, task or row cannot be used. Names the file and, where there is one, the row."""


class RunDirectoryError(RollstreamError):
    """The run directory cannot be used: not writable, locked, of another identity, of another format."""


class IdentityMismatchError(RunDirectoryError):
    """The run directory holds a run of another identity.

    Attributes:
        differences: `(key, value in the run directory, value asked for)`, one per difference.
    """

    def __init__(self, message: str, differences: list[tuple[str, object, object]]) -> None:
        super().__init__(message)
        self.differences = differences


class DamageError(RollstreamError):
    """Stored bytes are not what was written. Names the file and, in a journal, the offset."""


class StorageError(RollstreamError):
    """The run directory cannot take more bytes (disk full, I/O error). What was said to be done is safe."""


class StorageFullError(StorageError):
    """No room on the disk for this. What was acknowledged is safe; trying again later may succeed."""


class BufferFullError(RollstreamError):
    """The rollout buffer holds as much as it may; there is room again when something was read or dropped."""


class ConflictError(RollstreamError):
    """The request goes against what has happened meanwhile, such as acking a lease that was lost."""


class NotFoundError(RollstreamError):
    """There is no such lease, group or rollout. Names it."""


class TransientError(RollstreamError):
    """Trying again may help: a timeout, a busy server, a dropped connection. Charged as an attempt."""


class AttemptTimeoutError(TransientError):
    """An attempt at a rollout took longer than `generation.attempt_timeout`."""


class EngineError(RollstreamError):
    """The engine refused or broke this request (HTTP 400, ids outside its vocabulary); again won't help."""


class TransientEngineError(EngineError, TransientError):
    """The engine failed this request in a way that may pass (HTTP 5xx, truncated reply)."""


class EngineOverloadedError(TransientEngineError):
    """The engine is there and has too much to do (HTTP 429, 503). Also a sign to send it less at once."""


class EngineUnavailableError(EngineError):
    """No engine is there to ask. Costs no rollout an attempt: work waits until the engine is back."""


class EngineLostError(RollstreamError):
    """The engine stayed away longer than `generation.engine_timeout`. The run stops and can be resumed."""


class RewardError(RollstreamError):
    """Scoring a rollout failed or took too long. Its reward is null, never zero."""


class TrainingError(RollstreamError):
    """Batches for a trainer cannot be made, or not within what was asked for."""


class BatchTimeoutError(TrainingError, TimeoutError):
    """No batch within the time that the caller gave; it may still come."""


class GenerationFailedError(TrainingError):
    """Generation ended with an error, which is the cause (`__cause__`)."""


class GenerationStoppedError(TrainingError):
    """Generation was stopped, or not started, while someone waits for a batch."""


class StalenessError(TrainingError):
    """Nothing may be generated or trained on without going over `max_staleness`."""


class WeightUpdateError(TrainingError):
    """The engine did not take the new weights, or not in time. The engine's version is unknown then."""


class PlanEndedError(TrainingError):
    """The plan's last batch has been delivered; there is no further one."""


class DroppedGroupError(TrainingError):
    """A group that is not wanted after all, as a late one: it is replaced, and nothing has failed."""


class GroupFailedError(TrainingError):
    """Too few of a group's rollouts completed; the message has the cause of one that failed."""


def unknown_name(kind: str, name: object, known: Iterable[str]) -> ConfigError:
    """The error for a name that does not exist: it shows the nearest one, and all of them."""
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ConfigError(f"unknown {kind} {name!r}{hint} (known: {', '.join(names) or 'none'})")
