"""Scores: rewards that a reward pass computed, beside those that rollouts were recorded with.

    scores/NAME.json      what computed them (`ScoreFacts`)
    scores/NAME.rsj       one frame a rollout, in the journal's format: the truth, also when all is scored
    scores/NAME.parquet   key, finished_at, reward and reward_extra of each trajectory, sorted by key; made of the
                          journal

A score belongs to the rollout that it was computed of: that of its key which was finished at its time. A rollout
that is generated again, since a damaged file lost it, is not scored until it is scored itself.

A run's own rewards are those that its rollouts were recorded with. Where its reward was changed in the middle
(`generation.rescore`), `run.json` names the scores of what was finished by then. The artifact has the run's own
rewards; batches and journals keep what was recorded.
"""

import asyncio
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollstream.errors import ConfigError, DamageError, RunDirectoryError, StorageError
from rollstream.store.batch import (
    KEY_COLUMNS,
    SCHEMA,
    column_values,
    commit_file,
    forget_old_digests,
    reading,
    recorded_digests,
    to_arrow,
    to_arrow_floats,
    to_arrow_texts,
)
from rollstream.store.journal import (
    FILE_HEADER_SIZE,
    JournalFile,
    ScanReport,
    encode_file_header,
    encode_frame,
    read_frame,
    scan,
    write_file_durably,
)
from rollstream.store.lock import RunLock
from rollstream.store.manifest import read_manifest
from rollstream.trajectory import RolloutKey
from rollstream.untrusted import open_regular, read_regular

_CONTENT = b"rollstream.scores"
"""Metadata key of an artifact: the scores that its rewards are of (`Rewards.content`)."""

logger = logging.getLogger(__name__)

SCORED_COLUMNS = [*KEY_COLUMNS, "finished_at"]
"""What rows need besides their rewards for others to be found."""

_COLUMNS = [*SCORED_COLUMNS, "reward", "reward_extra"]
_SCHEMA = pa.schema([SCHEMA.field(name) for name in _COLUMNS])
_REPEAT_BITS = 31
_ROWS = 1 << 14
"""Rows that are written together."""


class ScoredRollout(NamedTuple):
    """The scores of a rollout: the body of a frame."""

    finished_at: float | None
    """When the rollout was finished, as it is stored."""
    trajectories: list[tuple[float | None, str]]
    """Reward and `reward_extra` (JSON text) of each."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ScoredRollout)


class ScoreFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What computed some scores. Content of `scores/NAME.json`."""

    id: str
    """32 hexadecimal digits, in the header of the journal."""
    run_id: str
    reward: str
    """For people: the function and its file, or the rules."""
    digest: str
    """Changes when the rewards may (`source_digest` of the reward, and how snapshots are scored)."""
    created: str
    """UTC, ISO 8601."""


class ScorePaths:
    """Where the scores of a name are."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self.facts = folder / f"{name}.json"
        self.journal = folder / f"{name}.rsj"
        self.table = folder / f"{name}.parquet"
        self._lock = folder / f"{name}.lock"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of these scores. Raises `RunDirectoryError`: another has it, or nothing can be written."""
        lock = RunLock(self._lock)
        try:
            self._lock.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            raise RunDirectoryError(f"cannot write to {self._lock.parent}: {error.strerror}") from error
        try:
            yield
        finally:
            lock.release()


def score_folder(root: Path) -> Path:
    """Where a run's scores are."""
    return root / "scores"


def is_score_name(name: str) -> bool:
    """Whether scores can have this name."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name) is not None


def score_names(root: Path) -> list[str]:
    """The scores of a run that are complete."""
    found = score_folder(root).glob("*.parquet")
    return sorted(path.stem for path in found if is_score_name(path.stem))


def read_facts(path: Path) -> ScoreFacts | None:
    """What computed some scores; None where nothing says so. Raises `RunDirectoryError`."""
    try:
        facts = msgspec.json.decode(read_regular(path), type=ScoreFacts)
        bytes.fromhex(facts.id)
        return facts
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise RunDirectoryError(f"cannot read {path}: {error}; score under another --name") from error


def write_facts(path: Path, facts: ScoreFacts) -> None:
    """Writes what computed some scores, durably."""
    write_file_durably(path, orjson.dumps(msgspec.to_builtins(facts), option=orjson.OPT_INDENT_2))


def require_facts(paths: ScorePaths, run_id: str, reward: str, digest: str) -> ScoreFacts:
    """What computes these scores, noted now if they are new. Raises `ConfigError` where others have the name."""
    facts = read_facts(paths.facts)
    if facts is None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        facts = ScoreFacts(id=token_hex(16), run_id=run_id, reward=reward, digest=digest, created=created)
        paths.journal.unlink(missing_ok=True)  # without its facts nobody knows what it is
        write_facts(paths.facts, facts)
    if (facts.run_id, facts.digest) != (run_id, digest):
        raise ConfigError(
            f"the scores {paths.name!r} are of another run or reward ({facts.reward}, {facts.created}), or of what its "
            "file said then; choose another name"
        )
    return facts


class Rewards:
    """The rewards that a reader sees: a run's own, or those of a name.

    Args:
        root: the run directory.
        name: of scores; their rewards alone count then, and what they do not have is unscored.

    Raises:
        RunDirectoryError: there are no such scores.
    """

    def __init__(self, root: Path, name: str | None = None) -> None:
        manifest = read_manifest(root)
        own = None if manifest is None else manifest.scores
        self.name = name or own
        self._keeps_recorded = name is None
        self._path = ScorePaths(score_folder(root), self.name or "").table
        if self.name is not None and not self._path.exists():
            known = ", ".join(score_names(root)) or "none"
            raise RunDirectoryError(f"{root} has no complete scores {self.name!r}; there are: {known}")

    @property
    def content(self) -> str:
        """Names the scores and what is in them; empty where the recorded rewards are seen."""
        if self.name is None:
            return ""
        digests = recorded_digests(self._path).get(self._path.name, set())
        return f"{self.name}:{'+'.join(sorted(one[:16] for one in digests))}"

    def current(self, table: pa.Table) -> pa.Table:
        """Rows with these rewards.

        Args:
            table: with `SCORED_COLUMNS`, if it has `reward` or `reward_extra`, which are replaced.
        """
        if self.name is None or not {"reward", "reward_extra"}.intersection(table.column_names):
            return table
        return self._scores.apply(table, keeps_recorded=self._keeps_recorded)

    @cached_property
    def _scores(self) -> "_Scores":
        """Raises `RunDirectoryError`: it is no batch whose rollouts were to be generated again."""
        try:
            return _Scores(self._path)
        except DamageError as error:
            raise RunDirectoryError(
                f"{self._path}: {error}; scoring again under its name makes it anew"
            ) from error


def has_rewards(footer: pq.FileMetaData, rewards: Rewards) -> bool:
    """Whether an artifact was merged with these rewards."""
    found: bytes = (footer.metadata or {}).get(_CONTENT, b"")
    return found.decode() == rewards.content


def rewards_metadata(rewards: Rewards) -> dict[str, str]:
    """What the metadata of an artifact says of its rewards."""
    return {_CONTENT.decode(): rewards.content} if rewards.content else {}


class _Scores:
    """The rewards of a file, in memory: some 33 bytes a row, and each different `reward_extra` once."""

    def __init__(self, path: Path) -> None:
        with (
            reading(path),
            pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=["reward_extra"]) as file,
        ):
            table = file.read(use_threads=False).unify_dictionaries()
        self._keys = _packed(table)
        self._trajectory = column_values(table["trajectory"])
        self._finished = _finished(table)
        self._valid: npt.NDArray[np.bool_] = column_values(table["reward"].is_valid().cast(pa.uint8())) == 1
        self._reward = np.zeros(len(table))
        self._reward[self._valid] = column_values(table["reward"].drop_null())
        chunks = table["reward_extra"].chunks
        codes = [np.from_dlpack(one.indices) for one in chunks]
        self._codes = np.concatenate([np.zeros(0, np.int32), *codes])
        texts = chunks[0].dictionary if chunks else to_arrow_texts([])
        self._texts = pa.concat_arrays([texts, to_arrow_texts(["{}"])])

    def apply(self, table: pa.Table, *, keeps_recorded: bool) -> pa.Table:
        """Rows with these rewards; where there are none, as they are or null."""
        keys, trajectory = _packed(table), column_values(table["trajectory"])
        found = np.zeros(len(table), bool)
        places = np.zeros(len(table), np.int64)
        if len(self._keys):
            # The trajectories of a rollout stand together, from the first one on.
            at = np.minimum(np.searchsorted(self._keys, keys) + trajectory, len(self._keys) - 1)
            found = (self._keys[at] == keys) & (self._trajectory[at] == trajectory)
            found &= self._finished[at] == _finished(table)
            places[found] = at[found]
        if "reward" in table.column_names:
            known = found.copy()
            rewards = np.zeros(len(table))
            known[found] = self._valid[places[found]]
            rewards[known] = self._reward[places[known]]
            column = to_arrow(rewards, known)
            table = _replaced(table, "reward", found, column, keeps_recorded)
        if "reward_extra" in table.column_names:
            none = len(self._texts) - 1
            codes = np.full(len(table), none, np.int64)
            codes[found] = self._codes[places[found]]
            table = _replaced(table, "reward_extra", found, self._texts.take(to_arrow(codes)), keeps_recorded)
        return table


def _replaced(
    table: pa.Table, name: str, found: npt.NDArray[np.bool_], column: pa.Array, keeps_recorded: bool
) -> pa.Table:
    at = table.column_names.index(name)
    field = table.schema.field(at)
    if keeps_recorded:
        recorded = table[name].combine_chunks()
        if isinstance(recorded, pa.DictionaryArray):
            recorded = recorded.dictionary_decode()
        column = pc.if_else(to_arrow(found), column, recorded)
    if pa.types.is_dictionary(field.type):
        column = column.dictionary_encode()
    return table.set_column(at, field, column)


def _packed(table: pa.Table) -> npt.NDArray[np.int64]:
    index, repeat = (column_values(table[name]).astype(np.int64) for name in ("index", "repeat"))
    packed: npt.NDArray[np.int64] = index << _REPEAT_BITS | repeat
    return packed


def _finished(table: pa.Table) -> npt.NDArray[np.float64]:
    """When rows were finished; 0.0 where that is not known."""
    values = np.zeros(len(table))
    if "finished_at" in table.column_names:
        column = table["finished_at"]
        values[column_values(column.is_valid().cast(pa.uint8())) == 1] = column_values(column.drop_null())
    return values


@contextmanager
def _writing(path: Path) -> Iterator[Callable[[pa.Table], None]]:
    """Writes a file of scores durably, its checksum beside it; one that is there stays until the block ends well."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with pq.ParquetWriter(
            temporary, _SCHEMA, compression="zstd", write_page_checksum=True, use_dictionary=["reward_extra"]
        ) as writer:
            yield lambda table: writer.write_table(table.cast(_SCHEMA))
        commit_file(temporary, path)
        forget_old_digests(path)
    finally:
        temporary.unlink(missing_ok=True)


# --- the journal of scores


def encode_scores(scored: ScoredRollout) -> bytes:
    """The body of a rollout's frame."""
    return _encoder.encode(scored)


def decode_scores(body: bytes) -> ScoredRollout:
    """The inverse; raises `ValueError` on anything else."""
    return _decoder.decode(body)


class ScoreJournal:
    """The journal of scores. Frames that come while others are written become durable together."""

    def __init__(self, paths: ScorePaths, facts: ScoreFacts) -> None:
        self._path = paths.journal
        self._id = bytes.fromhex(facts.id)
        self._report = ScanReport()
        self._file: JournalFile | None = None
        self._waiting: list[tuple[bytes, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    def earlier(self) -> Iterator[tuple[RolloutKey, ScoredRollout]]:
        """The scores that are there. Read to the end before others are added."""
        if self._path.exists():
            for frame in scan(self._path, self._id, self._report):
                yield RolloutKey(frame.index, frame.repeat), decode_scores(frame.body)
        for damage in self._report.damage:
            logger.warning("%s: what it held is scored again", damage)

    def submit(self, key: RolloutKey, scored: ScoredRollout) -> "asyncio.Future[None]":
        """Adds a rollout's scores; the future is resolved when they are durable, or raises `StorageError`."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        frame = encode_frame(key.index, key.repeat, len(scored.trajectories), encode_scores(scored))
        self._waiting.append((frame, future))
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        return future

    async def _write(self) -> None:
        while self._waiting:
            group, self._waiting = self._waiting, []
            error: StorageError | None = None
            try:
                await asyncio.to_thread(self._append, b"".join(frame for frame, _ in group))
            except OSError as cause:
                error = no_room(self._path, cause)
            for _, future in group:
                if future.done():
                    continue
                if error is None:
                    future.set_result(None)
                else:
                    future.set_exception(error)
        self._writing = None

    def _append(self, data: bytes) -> None:
        if self._file is None:
            end = self._report.end if self._report.end >= FILE_HEADER_SIZE else None
            if end is None:
                self._path.unlink(missing_ok=True)
            self._file = JournalFile(self._path, self._id, resume_at=end)
        try:
            self._file.append(data)
            self._file.sync()
        except BaseException:
            self._file.rollback()
            raise

    def __enter__(self) -> "ScoreJournal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def no_room(path: Path, error: OSError) -> StorageError:
    """What a full disk is to someone who scores."""
    return StorageError(
        f"cannot write {path}: {error.strerror or error}. What was scored is safe; free space and run the same "
        "command again"
    )


def seal_scores(paths: ScorePaths, facts_id: str) -> Iterator[tuple[RolloutKey, ScoredRollout]]:
    """Makes the table of all that the journal holds; gives each rollout as it is written, by key.

    Of several frames of a rollout the last one counts. Memory: 24 bytes a frame. Raises `StorageError`.
    """
    keys, offsets = [], []
    for frame in scan(paths.journal, bytes.fromhex(facts_id), ScanReport()):
        keys.append(frame.index << _REPEAT_BITS | frame.repeat)
        offsets.append(frame.offset)
    packed, places = np.array(keys, np.int64), np.array(offsets, np.int64)
    del keys, offsets
    order = packed.argsort(kind="stable")
    last = np.append(np.diff(packed[order]) != 0, True)[: len(order)]
    try:
        with open_regular(paths.journal) as journal, _writing(paths.table) as write:
            rows: list[_Row] = []
            for offset in places[order[last]].tolist():
                frame = read_frame(journal, offset)
                scored = decode_scores(frame.body)
                rows += [
                    (frame.index, frame.repeat, at, scored.finished_at, *one)
                    for at, one in enumerate(scored.trajectories)
                ]
                if len(rows) >= _ROWS:
                    write(_table(rows))
                    rows = []
                yield RolloutKey(frame.index, frame.repeat), scored
            write(_table(rows))
    except OSError as error:
        raise no_room(paths.table, error) from error


def copy_scores(
    sources: Sequence[ScorePaths],
    target: ScorePaths,
    facts: ScoreFacts,
    index_of: Callable[[int], int | None] = lambda index: index,
) -> None:
    """Makes scores of those of several folders, sealed if any of those are; on disk when this returns.

    Args:
        sources: those to copy, of disjoint rollouts.
        target: where to; nothing is there.
        facts: of the copy.
        index_of: where a prompt row stands there; None leaves it out.
    """
    with target.journal.open("wb") as file:
        file.write(encode_file_header(bytes.fromhex(facts.id)))
        for source in sources:
            found = read_facts(source.facts)
            if found is None or not source.journal.exists():
                continue
            for frame in scan(source.journal, bytes.fromhex(found.id), ScanReport()):
                if (index := index_of(frame.index)) is not None:
                    file.write(encode_frame(index, frame.repeat, frame.rows, frame.body))
        file.flush()
        os.fdatasync(file.fileno())
    write_facts(target.facts, facts)
    if any(source.table.exists() for source in sources):
        deque(seal_scores(target, facts.id), maxlen=0)


_Row = tuple[int, int, int, float | None, float | None, str]
"""By `_COLUMNS`."""


def _table(rows: list[_Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(_COLUMNS)
    index, repeat, trajectory, finished_at, reward, extra = columns
    arrays = [
        to_arrow(np.array(index, np.int64)),
        to_arrow(np.array(repeat, np.int32)),
        to_arrow(np.array(trajectory, np.int32)),
        to_arrow_floats(finished_at),
        to_arrow_floats(reward),
        to_arrow_texts(extra),
    ]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)
