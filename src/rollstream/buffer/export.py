"""A buffer's items as a run directory, so that whatever reads runs reads them.

A group is a prompt row, and its number is the row's `index`; its items are the rollouts, and `repeat` counts them in
the order of their arrival. An item whose rollout failed is a failure of the run. What is no column of a run is in
`extra`: what the buffer knows of the item in `buffer`, its `extra_info`, and its other keys by their names.
"""

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

import rollstream
from rollstream.buffer.command import opened
from rollstream.buffer.items import TOKENS, ItemError, dump_item, parse_item
from rollstream.data.row import TRUTH_COLUMNS, UNKNOWN_SOURCE
from rollstream.data.values import content_digest
from rollstream.errors import ConfigError, RunDirectoryError, StorageError
from rollstream.scratch import ScratchFolder
from rollstream.store.batch import batch_metadata, build_table, file_rows, write_tables_durably
from rollstream.store.export.format import file_name
from rollstream.store.export.run import Export, check_output, write_export
from rollstream.store.journal import JournalFile, encode_frame
from rollstream.store.manifest import Manifest, new_manifest, write_manifest
from rollstream.store.paths import RunPaths
from rollstream.store.records import RecordCodec, RolloutRecord, TrajectoryRecord, json_text
from rollstream.trajectory import Failure, Metrics, sampled_stretches

_PAGE: Final = 256
"""Groups that are listed at a time."""

_TABLE_BYTES: Final = 8 << 20
"""Rollouts of so many bytes are written together: about a row group."""

_FIELDS: Final = {
    *("uid", "instance_id", "task_type", "job", "messages", "reward", "extra_info", "snapshots"),
    *("prompt_key", "metrics", "policy_version", "policy_versions", *TOKENS),
}
"""Keys of an item that are not copied to `extra`."""

_TRUTHS: Final = ("label", *TRUTH_COLUMNS)
"""Keys of `extra_info`: ours and slime's first."""

_UNKNOWN_METRICS: Final = dict.fromkeys((field.name for field in fields(Metrics)), np.nan)

_Start = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Version = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

Item = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BufferRun:
    """A buffer's items, written as a run."""

    paths: RunPaths
    manifest: Manifest
    items: int
    """Failed ones included."""
    notes: list[str]
    """Lines for people: they name the items that are not in it."""
    damage: list[str]


@contextlib.contextmanager
def buffer_as_run(
    address: str, *, state: str | None = None, job: str | None = None, parent: Path | None = None
) -> Iterator[BufferRun]:
    """A temporary run directory of what a buffer holds now, with one batch, whose rows are sorted as an artifact's.

    One group at a time is in memory. `address` is the buffer's folder, with or without its server, or the server's
    URL; `state` and `job` are those of the groups that are wanted. It is made in `parent`, by default the machine's
    temporary folder. Raises `RunDirectoryError` where there is no buffer, and what reading it and writing raise.
    """
    with ScratchFolder("buffer", parent) as folder, asyncio.Runner() as runner:

        async def open_buffer() -> Any:
            return await opened(address).__aenter__()

        buffer = runner.run(open_buffer())
        try:
            run = _Writer(runner, buffer, {"state": state, "job": job}).write(RunPaths(folder.path))
        finally:
            runner.run(buffer.__aexit__(None, None, None))
        yield run


def export_buffer(
    address: str,
    name: str,
    output: Path | None,
    options: Mapping[str, Any],
    *,
    force: bool = False,
    state: str | None = None,
    job: str | None = None,
) -> tuple[Export, BufferRun]:
    """Writes a buffer's trajectories in a format, and says what was written of what.

    `output` is by default the format's name in the buffer's folder; `options` are those of the format. Raises
    `ConfigError` where `output` must not be written or the format cannot hold these trajectories, and what
    `buffer_as_run` raises.
    """
    root = Path(address)
    if output is None and not root.is_dir():
        raise ConfigError(f"--output FILE: there is no folder {address} to write into")
    target = output or root / file_name(name)
    check_output(root, target, root / file_name(name), name, force=force)
    with buffer_as_run(address, state=state, job=job, parent=target.resolve().parent) as run:
        artifact = run.paths.batch(0)
        if not file_rows(artifact):
            raise RunDirectoryError("; ".join([f"{address} holds no such item", *run.notes, *run.damage]))
        try:
            rows = write_export(artifact, name, target, run.manifest, root=run.paths.root, options=options)
        except ConfigError as error:
            raise ConfigError(str(error).replace(str(artifact), address)) from error
        return Export(target, rows, None), run


class _Writer:
    """Writes the run directory, and counts what is not in it."""

    def __init__(self, runner: asyncio.Runner, buffer: Any, which: Mapping[str, str | None]) -> None:
        self._runner, self._buffer, self._which = runner, buffer, which
        self._counts: Counter[str] = Counter()
        self._damage: list[str] = []

    def write(self, paths: RunPaths) -> BufferRun:
        # It is not known which tokenizer made the ids.
        identity, versions = {"model.tokenizer": None}, {"rollstream": rollstream.__version__}
        manifest = new_manifest(n=1, identity=identity, dataset={}, versions=versions, config={})
        paths.batches.mkdir()
        paths.failures.mkdir()
        failures = list[bytes]()
        try:
            tables = _tables(self._rollouts(failures))
            write_tables_durably(paths.batch(0), tables, batch_metadata(manifest.run_id_bytes))
            journal = JournalFile(paths.failures / "000000.rsj", manifest.run_id_bytes)
            journal.append(b"".join(failures))
            journal.close()
        except OSError as error:
            raise StorageError(f"cannot write to {paths.root}: {error.strerror or error}") from error
        manifest = msgspec.structs.replace(manifest, n=max(1, self._counts["largest"]))
        write_manifest(paths.root, manifest)
        items = self._counts["items"]
        lines = {
            "gone": "groups have left, and their items are not kept any more (--archive-bytes)",
            "failed": f"of {items} items are of rollouts that failed: they are no rows",
            "text": f"of {items} items have messages and no tokens",
            "unmasked": "items have response_ids and no response_mask: their tokens are left out",
        }
        notes = [f"{self._counts[name]} {line}" for name, line in lines.items() if self._counts[name]]
        return BufferRun(paths, manifest, items, notes, self._damage)

    def _rollouts(self, failures: list[bytes]) -> Iterator[RolloutRecord]:
        """The rollouts; failed ones become frames of the journal of failures."""
        codec = RecordCodec()
        for group in self._groups():
            content = (
                self._runner.run(self._buffer.group(group["id"])) if group["bytes"] else {"group": group}
            )
            if not content["group"]["bytes"]:
                self._counts["gone"] += 1
                continue
            if content.get("problem"):
                self._damage.append(f"group {group['id']}: {content['problem']}")
                continue
            self._counts["largest"] = max(self._counts["largest"], len(content["items"]))
            for repeat, item in enumerate(content["items"]):
                record = _record(group, item, repeat)
                self._counts["items"] += 1
                if isinstance(record, Failure):
                    self._counts["failed"] += 1
                    body = codec.encode_failure(record)
                    failures.append(encode_frame(record.index, record.repeat, 0, body))
                    continue
                if not record.trajectories[-1].prompt_ids:
                    self._counts["text"] += 1
                    self._counts["unmasked"] += bool(item.get("response_ids"))
                yield record

    def _groups(self) -> Iterator[Item]:
        """Groups by number. Later ones than this call may be missing: a busy buffer never ends."""
        written, after = self._runner.run(self._buffer.stats())["store"]["items_written"], 0
        while groups := self._runner.run(self._buffer.groups(**self._which, after=after, limit=_PAGE)):
            yield from groups
            after = groups[-1]["id"]
            if all(group["position"] > written for group in groups):
                return


def _tables(rollouts: Iterable[RolloutRecord]) -> Iterator[pa.Table]:
    waiting, size = list[RolloutRecord](), 0
    for rollout in rollouts:
        waiting.append(rollout)
        size += sum(
            len(trajectory.messages) + len(trajectory.extra) + 10 * len(trajectory.response_mask)
            for trajectory in rollout.trajectories
        )
        if size >= _TABLE_BYTES:
            yield build_table(waiting)
            waiting, size = [], 0
    if waiting:
        yield build_table(waiting)


def _record(group: Item, item: Item, repeat: int) -> RolloutRecord | Failure:
    """An item's rollout. What the buffer did not check when it was written may be anything."""
    info, failure = item["extra_info"], item["extra_info"].get("failure")
    extra = {name: value for name, value in item.items() if name not in _FIELDS}
    snapshots: list[Item] = item.get("snapshots") or []
    try:
        for snapshot in snapshots:
            parse_item(dump_item({"instance_id": 0, "reward": None, **snapshot}, "msgpack"), "msgpack")
    except (ItemError, TypeError):
        extra["snapshots"], snapshots = snapshots, []
    known = {name: group[name] for name in ("instance_id", "task_type", "job", "state", "reason")}
    extra |= {"extra_info": info, "buffer": {"uid": item["uid"], **known}}
    key, messages = item.get("prompt_key"), [*snapshots, item][0]["messages"]
    if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{32}", key):
        key = content_digest({"prompt": messages[: _first_answer(messages)]}).hex()
    failed = failure if isinstance(failure, dict) else {"error": failure}
    attempts = _whole(info.get("attempts", failed.get("attempts")), 1)
    finished_at = _seconds(info.get("timestamp"))
    if failure is not None and failed.get("stage") != "reward":
        stage, error = str(failed.get("stage", "agent")), str(failed.get("error"))
        return Failure(group["id"], repeat, key, attempts, stage, error, "", finished_at or 0.0)
    rewarded = info.get("reward_extra")
    rewarded = rewarded if isinstance(rewarded, dict) else {}
    if failure is not None:
        item, rewarded = item | {"reward": None}, rewarded | {"error": failed.get("error")}
    final = _trajectory(item)
    final = msgspec.structs.replace(
        final,
        num_turns=_whole(info.get("num_turns"), final.num_turns),
        finish_reason=str(info.get("finish_reason") or final.finish_reason),
        reward_extra=json_text(rewarded),
        extra=json_text(extra),
    )
    source = info.get("data_source")
    return RolloutRecord(
        index=group["id"],
        repeat=repeat,
        prompt_key=key,
        data_source=source if isinstance(source, str) else UNKNOWN_SOURCE,
        ground_truth=json_text(next((info[name] for name in _TRUTHS if info.get(name) is not None), None)),
        attempts=attempts,
        trajectories=[*(_trajectory(snapshot, is_snapshot=True) for snapshot in snapshots), final],
        finished_at=finished_at,
    )


def _trajectory(item: Item, *, is_snapshot: bool = False) -> TrajectoryRecord:
    tokens = {
        name: np.asarray(item[name], dtype).tobytes()
        for name, (_, dtype) in TOKENS.items()
        if item.get(name) is not None
    }
    if "response_mask" not in tokens:  # which tokens were sampled is not known
        tokens = {}
    messages, version = item["messages"], item.get("policy_version")
    mask = tokens.get("response_mask", b"")
    turns = 1 + len(messages) - _first_answer(messages)
    calls = len(sampled_stretches(mask)) if mask else _answers(messages)
    versions = [] if version is None else [(0, version)]
    metrics = _UNKNOWN_METRICS | {"engine_calls": float(calls)}
    with contextlib.suppress(msgspec.ValidationError):
        known = msgspec.convert(item.get("metrics") or {}, dict[str, float])
        metrics |= {name: value for name, value in known.items() if name in metrics}
    with contextlib.suppress(msgspec.ValidationError):
        versions = msgspec.convert(item.get("policy_versions") or versions, list[tuple[_Start, _Version]])
    return TrajectoryRecord(
        prompt_ids=tokens.get("prompt_ids", b""),
        response_ids=tokens.get("response_ids", b""),
        response_mask=mask,
        response_logprobs=tokens.get("response_logprobs"),
        policy_versions=versions,
        messages=json_text(messages),
        is_snapshot=is_snapshot,
        num_turns=_whole(item.get("num_turns"), turns),
        finish_reason=str(item.get("finish_reason") or "unknown"),
        reward=item.get("reward"),
        reward_extra="{}",
        metrics=tuple(metrics.values()),
        extra="{}",
    )


def _answers(messages: list[Item]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def _first_answer(messages: list[Item]) -> int:
    roles = [message["role"] for message in messages]
    return roles.index("assistant") if "assistant" in roles else len(roles)


def _whole(value: Any, otherwise: int) -> int:
    return value if type(value) is int and 0 <= value < 2**31 else otherwise


def _seconds(value: Any) -> float | None:
    """A Unix time, which slime's items have as a text."""
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return seconds if 0 <= seconds < 2**36 else None  # what has a date
