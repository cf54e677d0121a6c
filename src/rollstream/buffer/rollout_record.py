"""What the buffer knows of a rollout that `/start_rollout` asked for: persisted, so that it resumes.

The states of a record:

    running --+-- the generator ended by itself ---------------------> finished
        ^     +-- asked to, or replaced by another payload -----------> stopped --+
        |     +-- a cause that no restart mends, or too many crashes --> failed --+
        +----------------- the same payload is started again ---------------------+

Pure.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollstream.buffer.groups import MAX_GROUP_SIZE
from rollstream.errors import ConfigError

RolloutState = Literal["running", "finished", "stopped", "failed"]
"""Only a running one has a generator process, or is about to."""

MAX_COUNT = MAX_GROUP_SIZE
"""Of repeats, epochs, processes: what is above it is a mistake."""

_SKIP = "skip_instance_ids"
"""Says what is done already and so grows: it does not make another rollout."""

REPEATS = "num_repeat_per_sample"
"""Items of a group."""

_PARAMETERS = frozenset(
    {
        "remote_engine_url", "remote_buffer_url", "input_file", "task_type", REPEATS, "num_epoch",
        "sampling_params", "num_process", _SKIP, "tokenizer_path",
    }
)  # fmt: skip
"""Of slime's payload. A generator file may have others of its own."""

_HOW = ("remote_engine_url", "num_process")
"""How the work is done, not which: a trainer that was started again comes with other ports."""

_APART = frozenset((_SKIP, "remote_buffer_url", *_HOW))
"""In these the payloads of one rollout may differ. For `remote_buffer_url` the server puts its own."""


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """One call of `run_rollout`, over all restarts of its generator."""

    rollout_id: str
    task_type: str
    payload: dict[str, Any]
    """As `/start_rollout` got it."""
    state: RolloutState
    started_at: float
    """Unix time, seconds."""
    crashes: int = 0
    """Ends of its generator that were not wanted."""
    error: str | None = None
    """The cause of the last crash, in one line."""
    traceback: str | None = None
    """The same in full, where the generator could still say it; else the end of what it wrote."""
    number: int = 0
    """Later rollouts have larger ones, whatever the clock says."""

    def group_size(self, default: int) -> int:
        """`num_repeat_per_sample` of the payload, if it says so."""
        return read_count(self.payload, REPEATS, default)

    @property
    def skip_instance_ids(self) -> list[int | str]:
        """Of the payload: instances that are done, once for each epoch."""
        return read_skips(self.payload)

    def asks_the_same(self, payload: Mapping[str, Any]) -> bool:
        """Whether another payload is for this rollout.

        It may differ in what is done already, in the addresses and in `num_process`.
        """
        return _what(self.payload) == _what(payload)

    def with_payload(self, payload: Mapping[str, Any]) -> "RolloutRecord":
        """The rollout with what another payload of it says about how it is done.

        What was done before is as it was said first: what was completed since is counted by the buffer.
        """
        merged = {key: value for key, value in payload.items() if key != _SKIP}
        if _SKIP in self.payload:
            merged[_SKIP] = self.payload[_SKIP]
        return replace(self, payload=merged)

    def is_done_as(self, payload: Mapping[str, Any]) -> bool:
        """Whether its generator need not be told anything new by another payload of it."""
        return all(self.payload.get(key) == payload.get(key) for key in _HOW)

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> "RolloutRecord":
        """From `to_dict`; what a later version may add is left out."""
        return cls(**{name: stored[name] for name in cls.__slots__ if name in stored})


@dataclass(frozen=True, slots=True)
class RolloutFailure:
    """A rollout whose generator does not get on: what a reader who waits in vain is told."""

    rollout_id: str
    task_type: str
    error: str
    traceback: str
    crashes: int
    final: bool
    """Whether it was given up; if not, the generator is started again."""
    log: str = field(default="")
    """The generator's log, if it has one."""

    def __str__(self) -> str:
        fate = "it was given up" if self.final else "it is started again"
        times = "once" if self.crashes == 1 else f"{self.crashes} times"
        where = f"; log: {self.log}" if self.log else ""
        return (
            f"generator of task {self.task_type!r} (rollout {self.rollout_id}) failed {times}, {fate}: "
            f"{self.error}{where}"
        )


def read_count(payload: Mapping[str, Any], key: str, default: int, *, most: int = MAX_COUNT) -> int:
    """A whole number from 1 to `most` that may be written as text, as slime's trainer does.

    Raises:
        ConfigError: it is something else.
    """
    value = payload.get(key)
    if value is None:
        return default
    number: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 19:
        number = int(value)
    if number is None or not 1 <= number <= most:
        raise ConfigError(f"{key}: {value!r:.100}, want a whole number from 1 to {most}")
    return number


def read_skips(payload: Mapping[str, Any]) -> list[int | str]:
    """`skip_instance_ids`: instances that are done. Raises `ConfigError`."""
    skips = payload.get(_SKIP)
    if skips is None:
        return []
    if not isinstance(skips, list) or not all(type(one) in (int, str) for one in skips):
        raise ConfigError(f"{_SKIP}: {skips!r:.100}, want a list of instance ids (whole numbers or texts)")
    return list(skips)


def read_task_type(payload: Mapping[str, Any]) -> str:
    """`task_type`. Raises `ConfigError`."""
    task_type = payload.get("task_type")
    if not isinstance(task_type, str) or not task_type:
        raise ConfigError(f"task_type: {task_type!r:.100}, want the TASK_TYPE of a generator file, as text")
    return task_type


def near_misses(payload: Mapping[str, Any]) -> list[str]:
    """A line for each key that nobody knows and that is nearly a parameter: misspelt, it would do nothing."""
    lines = []
    for key in payload:
        close = [] if key in _PARAMETERS else difflib.get_close_matches(key, _PARAMETERS, n=1, cutoff=0.85)
        if close and close[0] not in payload:
            lines.append(f"{key!r:.100} is no parameter that the buffer knows; did you mean {close[0]!r}?")
    return lines


def _what(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in payload.items() if key not in _APART}
