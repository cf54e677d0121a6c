"""How a rollout, a turn and a failure become the bytes of a journal frame, and back.

The body is zstd(msgpack(map)); arrays travel as little-endian binary (int32 ids, int8 mask, float32
log-probs), free-form parts as JSON text, so that a frame is turned into Arrow columns without touching
single tokens in Python.
"""

import struct
import time
from array import array
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import msgspec
import orjson
import zstandard

from rollstream.errors import RollstreamError
from rollstream.trajectory import (
    Completion,
    Failure,
    Message,
    Metrics,
    Rollout,
    RolloutKey,
    Trajectory,
)

_COMPRESSION_LEVEL = -1
"""A frame lives until its batch is sealed; it is a fifth larger than at level 1, in a third of the time."""


MAX_BODY_BYTES = 1 << 29
"""Of one rollout, uncompressed: far beyond any real one, and safely within what a frame can hold."""


class EncodingError(RollstreamError):
    """A rollout holds something that cannot be stored (ids out of range, a value that is not JSON)."""


class TrajectoryRecord(msgspec.Struct, frozen=True):
    """A trajectory as stored: arrays are bytes, free-form parts are JSON text."""

    prompt_ids: bytes
    response_ids: bytes
    response_mask: bytes
    response_logprobs: bytes | None
    policy_versions: list[tuple[int, int]]
    messages: str
    is_snapshot: bool
    num_turns: int
    finish_reason: str
    reward: float | None
    reward_extra: str
    metrics: tuple[float, ...]
    extra: str


class RolloutRecord(msgspec.Struct, frozen=True):
    """A rollout as stored: all its trajectories in one frame."""

    index: int
    repeat: int
    prompt_key: str
    data_source: str
    ground_truth: str
    attempts: int
    trajectories: list[TrajectoryRecord]
    finished_at: float | None = None
    """Unix time, seconds: when it was encoded, unless the rollout says."""


class TurnRecord(msgspec.Struct, frozen=True):
    """An answer of the model in a rollout that is not finished, and what has led to it."""

    prompt_key: str
    after: bytes
    """Digest of the body of the turn before; empty for the first."""
    asked: bytes
    """Names what was asked: the same when it is asked again."""
    given_ids: list[int]
    given_messages: list[Message]
    """Between the answer before and this one."""
    completion: Completion
    state: Any
    """What else the loop keeps, with this turn."""
    metrics: Metrics
    """Of the rollout up to here; `total_s` is the time since it was begun."""


@dataclass(frozen=True, slots=True)
class EncodedTurn:
    """A turn that was encoded where it was made."""

    key: RolloutKey
    number: int
    """Counts within the rollout's attempt, from 0."""
    body: bytes
    """Of its frame, see `RecordCodec.encode_turn`."""


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """What statistics of a run are made of, for one rollout; small, so that it travels where tokens need not."""

    data_source: str
    response_lengths: tuple[int, ...]
    """Of its trajectories: tokens of the response, sampled or not."""
    at_limit: int
    """Trajectories that ended because there was no room for more tokens."""
    seconds: float
    """From dispatch to scored."""
    versions: tuple[int, int]
    """The lowest and the highest policy version that made its tokens."""


def rollout_facts(rollout: Rollout) -> RolloutFacts:
    """What is counted of a rollout."""
    versions = [version for one in rollout.trajectories for _, version in one.policy_versions] or [0]
    return RolloutFacts(
        data_source=rollout.data_source,
        response_lengths=tuple(one.response_length for one in rollout.trajectories),
        at_limit=sum(one.finish_reason == "length" for one in rollout.trajectories),
        seconds=float(rollout.final.metrics.total_s),
        versions=(min(versions), max(versions)),
    )


@dataclass(frozen=True, slots=True)
class EncodedRollout:
    """A rollout that was encoded where it was executed, so that whoever writes it need not."""

    index: int
    repeat: int
    rows: int
    """Its trajectories."""
    body: bytes
    """Of its frame, see `RecordCodec.encode`."""
    raw_bytes: int
    """Of the body before compression."""
    attempts: int
    reward: float | None
    """Of the final trajectory."""
    scoring_failed: bool
    sampled_tokens: int
    """Over all trajectories; so are the calls."""
    tool_calls: int
    tool_errors: int
    facts: RolloutFacts

    @property
    def key(self) -> RolloutKey:
        """Its `(index, repeat)`."""
        return RolloutKey(self.index, self.repeat)


_metric_values = attrgetter(*(one.name for one in fields(Metrics)))
_encoder = msgspec.msgpack.Encoder()
_rollout_decoder = msgspec.msgpack.Decoder(RolloutRecord)
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_turn_decoder = msgspec.msgpack.Decoder(TurnRecord)


def json_text(value: Any) -> str:
    """Free-form value as JSON text; numpy values and non-string keys are accepted."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS).decode()


def _trajectory_record(trajectory: Trajectory) -> TrajectoryRecord:
    length, logprobs = len(trajectory.response_ids), trajectory.response_logprobs
    if len(trajectory.response_mask) != length or (logprobs is not None and len(logprobs) != length):
        raise EncodingError(
            f"lengths differ: {length} response ids, {len(trajectory.response_mask)} mask values, "
            f"{'no' if logprobs is None else len(logprobs)} log-probs"
        )
    for name, values in trajectory.streams.items():
        if (count := len(values) if isinstance(values, Sized) else None) != length:
            raise EncodingError(f"the stream {name!r} has {count} values for {length} response ids")
    return TrajectoryRecord(
        prompt_ids=pack("i", trajectory.prompt_ids),
        response_ids=pack("i", trajectory.response_ids),
        response_mask=pack("b", trajectory.response_mask),
        response_logprobs=None if logprobs is None else pack("f", logprobs),
        policy_versions=[(int(start), int(version)) for start, version in trajectory.policy_versions],
        messages=json_text(trajectory.messages),
        is_snapshot=bool(trajectory.is_snapshot),
        num_turns=int(trajectory.num_turns),
        finish_reason=str(trajectory.finish_reason),
        reward=None if trajectory.reward is None else float(trajectory.reward),
        reward_extra=json_text(trajectory.reward_extra),
        metrics=tuple(map(float, _metric_values(trajectory.metrics))),
        extra=json_text(trajectory.extra),
    )


def _trajectory(record: TrajectoryRecord) -> Trajectory:
    logprobs = record.response_logprobs
    return Trajectory(
        prompt_ids=array("i", record.prompt_ids).tolist(),
        response_ids=array("i", record.response_ids).tolist(),
        response_mask=array("b", record.response_mask).tolist(),
        response_logprobs=None if logprobs is None else array("f", logprobs).tolist(),
        messages=orjson.loads(record.messages),
        finish_reason=record.finish_reason,
        policy_versions=[(start, version) for start, version in record.policy_versions],
        is_snapshot=record.is_snapshot,
        num_turns=record.num_turns,
        reward=record.reward,
        reward_extra=orjson.loads(record.reward_extra),
        metrics=Metrics(*record.metrics),
        extra=orjson.loads(record.extra),
    )


def pack(code: str, values: Sequence[float]) -> bytes:
    """Numbers as little-endian binary, by `struct`'s code. Raises `ValueError` for one that does not fit."""
    try:
        return struct.pack(f"<{len(values)}{code}", *values)
    except (struct.error, OverflowError) as error:
        raise ValueError(str(error)) from error


class RecordCodec:
    """Encodes and decodes frame bodies. Not thread-safe: one per thread."""

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_COMPRESSION_LEVEL)
        self._decompressor = zstandard.ZstdDecompressor()

    def encode(self, rollout: Rollout) -> EncodedRollout:
        """A rollout as a frame body, with what a run counts of it.

        Raises `EncodingError` when it holds something that cannot be stored.
        """
        try:
            if not rollout.trajectories:
                raise EncodingError("a rollout needs at least one trajectory")
            records = [_trajectory_record(trajectory) for trajectory in rollout.trajectories]
            record = RolloutRecord(
                index=rollout.index,
                repeat=rollout.repeat,
                prompt_key=rollout.prompt_key,
                data_source=rollout.data_source,
                ground_truth=json_text(rollout.ground_truth),
                attempts=rollout.attempts,
                trajectories=records,
                finished_at=time.time() if rollout.finished_at is None else rollout.finished_at,
            )
            raw = _encoder.encode(record)
            if len(raw) > MAX_BODY_BYTES:
                raise EncodingError(f"it takes {len(raw)} bytes, more than {MAX_BODY_BYTES}")
            metrics = [trajectory.metrics for trajectory in rollout.trajectories]
            return EncodedRollout(
                index=rollout.index,
                repeat=rollout.repeat,
                rows=len(records),
                body=self._compressor.compress(raw),
                raw_bytes=len(raw),
                attempts=rollout.attempts,
                reward=records[-1].reward,
                scoring_failed=scoring_failed(rollout.final.reward_extra),
                sampled_tokens=sum(record.response_mask.count(1) for record in records),
                tool_calls=sum(int(metric.tool_calls) for metric in metrics),
                tool_errors=sum(int(metric.tool_errors) for metric in metrics),
                facts=rollout_facts(rollout),
            )
        except (AttributeError, TypeError, ValueError, OverflowError, EncodingError) as error:
            raise EncodingError(
                f"rollout (index {rollout.index}, repeat {rollout.repeat}) cannot be stored: {error}"
            ) from error

    def decode_rollout(self, body: bytes) -> RolloutRecord:
        """The inverse of `encode`, up to the record; raises `ValueError` on anything else."""
        return _rollout_decoder.decode(self._decompress(body))

    def decode(self, body: bytes) -> Rollout:
        """A rollout as it was before `encode`."""
        record = self.decode_rollout(body)
        return Rollout(
            index=record.index,
            repeat=record.repeat,
            prompt_key=record.prompt_key,
            trajectories=[_trajectory(one) for one in record.trajectories],
            data_source=record.data_source,
            ground_truth=orjson.loads(record.ground_truth),
            attempts=record.attempts,
        )

    def encode_failure(self, failure: Failure) -> bytes:
        """A failure as a frame body."""
        error, traceback = _printable(failure.error), _printable(failure.traceback)
        record = replace(failure, error=error, traceback=traceback)
        return self._compressor.compress(_encoder.encode(record))

    def decode_failure(self, body: bytes) -> Failure:
        """The inverse of `encode_failure`; raises `ValueError` on anything else."""
        return _failure_decoder.decode(self._decompress(body))

    def encode_turn(self, turn: TurnRecord) -> bytes:
        """A turn as a frame body."""
        return self._compressor.compress(_encoder.encode(turn))

    def decode_turn(self, body: bytes) -> TurnRecord:
        """The inverse of `encode_turn`; raises `ValueError` on anything else."""
        return _turn_decoder.decode(self._decompress(body))

    def _decompress(self, body: bytes) -> bytes:
        try:
            if zstandard.frame_content_size(body) > MAX_BODY_BYTES:
                raise ValueError(f"a frame of more than {MAX_BODY_BYTES} bytes")
            return self._decompressor.decompress(body, max_output_size=MAX_BODY_BYTES)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from error


def scoring_failed(reward_extra: Mapping[str, Any]) -> bool:
    """Whether a rollout without reward is one whose reward function failed."""
    return "error" in reward_extra


def _printable(text: str) -> str:
    """Lone surrogates (from `os.fsdecode`, say) cannot be written as UTF-8; they are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()
