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
from collections.abc import Iterator, Sequence
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
from rollstream.store.arrow import column_values, to_arrow, to_arrow_column, to_arrow_texts
from rollstream.store.batch import (
    KEY_COLUMNS,
    SCHEMA,
    commit_file,
    forget_old_digests,
    reading,
    recorded_digests,
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
from rollstream.store.keys import rollout_numbers
from rollstream.store.lock import locked
from rollstream.store.manifest import read_manifest
from rollstream.trajectory import RolloutKey
from rollstream.untrusted import open_regular, read_regular

logger = logging.getLogger(__name__)

SCORED_COLUMNS = [*KEY_COLUMNS, "finished_at"]
"""What rows need besides their rewards for others to be found."""

_SCHEMA = pa.schema([SCHEMA.field(name) for name in (*SCORED_COLUMNS, "reward", "reward_extra")])
_ROWS = 1 << 14
"""Rows that are written together."""
_CONTENT = b"rollstream.scores"
"""Metadata key of an artifact: the scores that its rewards are of (`Rewards.content`)."""


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

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Holds the lock of these scores. Raises `RunDirectoryError`: another has it, or nothing can be written."""
        folder = self.facts.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirectoryError(f"cannot write to {folder}: {error.strerror}") from error
        with locked(folder, f"{self.name}.lock"):
            yield


def score_folder(root: Path) -> Path:
    """Where a run's scores are."""
    return root / "scores"


def is_score_name(name: str) -> bool:
    """Whether scores can have this name."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name) is not None


def score_names(root: Path) -> list[str]:
    """The scores of a run that are complete."""
    return sorted(path.stem for path in score_folder(root).glob("*.parquet") if is_score_name(path.stem))


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


# --- reading


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
        self.name = name or (None if manifest is None else manifest.scores)
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
        return f"{self.name}:{'+'.join(sorted(digest[:16] for digest in digests))}"

    def are_in(self, footer: pq.FileMetaData) -> bool:
        """Whether an artifact was merged with these rewards, by its footer."""
        content: bytes = (footer.metadata or {}).get(_CONTENT, b"")
        return content.decode() == self.content

    def metadata(self) -> dict[str, str]:
        """What the metadata of an artifact says of its rewards."""
        return {_CONTENT.decode(): self.content} if self.content else {}

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


class _Scores:
    """The rewards of a file, in memory: some 33 bytes a row, and each different `reward_extra` once."""

    def __init__(self, path: Path) -> None:
        with (
            reading(path),
            pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=["reward_extra"]) as file,
        ):
            table = file.read(use_threads=False).unify_dictionaries()
        self._keys, self._trajectory, self._finished = _places(table)
        self._reward = column_values(table["reward"])
        chunks = table["reward_extra"].chunks
        codes = [np.from_dlpack(chunk.indices) for chunk in chunks]
        self._codes = np.concatenate([np.zeros(0, np.int32), *codes])
        texts = chunks[0].dictionary if chunks else to_arrow_texts([])
        self._texts = pa.concat_arrays([texts, to_arrow_texts(["{}"])])

    def apply(self, table: pa.Table, *, keeps_recorded: bool) -> pa.Table:
        """Rows with these rewards; where there are none, as they are or null."""
        keys, trajectory, finished = _places(table)
        known = np.zeros(len(table), bool)
        places = np.zeros(len(table), np.int64)
        if len(self._keys):
            # The trajectories of a rollout stand together, from the first one on.
            places = np.minimum(np.searchsorted(self._keys, keys) + trajectory, len(self._keys) - 1)
            known = (self._keys[places] == keys) & (self._trajectory[places] == trajectory)
            known &= self._finished[places] == finished
        if "reward" in table.column_names:
            rewards = np.full(len(table), np.nan)
            rewards[known] = self._reward[places[known]]
            column = to_arrow(np.nan_to_num(rewards), ~np.isnan(rewards))
            table = _replaced(table, "reward", known, column, keeps_recorded)
        if "reward_extra" in table.column_names:
            codes = np.full(len(table), len(self._texts) - 1, np.int64)
            codes[known] = self._codes[places[known]]
            table = _replaced(table, "reward_extra", known, self._texts.take(to_arrow(codes)), keeps_recorded)
        return table


def _replaced(
    table: pa.Table, name: str, known: npt.NDArray[np.bool_], column: pa.Array, keeps_recorded: bool
) -> pa.Table:
    at = table.column_names.index(name)
    field = table.schema.field(at)
    coded = pa.types.is_dictionary(field.type)
    if keeps_recorded:
        recorded = table[name].combine_chunks()
        column = pc.if_else(to_arrow(known), column, recorded.dictionary_decode() if coded else recorded)
    return table.set_column(at, field, column.dictionary_encode() if coded else column)


def _places(table: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float64]]:
    """Rollout, trajectory, and when it was finished (0.0 where that is not known) of each row."""
    finished = np.zeros(len(table))
    if "finished_at" in table.column_names:
        finished = np.nan_to_num(column_values(table["finished_at"]))
    numbers = rollout_numbers(column_values(table["index"]), column_values(table["repeat"]))
    return numbers, column_values(table["trajectory"]), finished


# --- the journal of scores, and the table that is made of it


def encode_scores(scored: ScoredRollout) -> bytes:
    """The body of a rollout's frame."""
    return _encoder.encode(scored)


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
                yield RolloutKey(frame.index, frame.repeat), _decoder.decode(frame.body)
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
                error = _no_room(self._path, cause)
            for future in (future for _, future in group if not future.done()):
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
        self._file.append_durably(data)

    def __enter__(self) -> "ScoreJournal":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def _no_room(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}. What was scored is safe; free space and run the same "
        "command again"
    )


def seal_scores(paths: ScorePaths, facts_id: str) -> Iterator[tuple[RolloutKey, ScoredRollout]]:
    """Makes the table of all that the journal holds; gives each rollout as it is written, by key.

    Of several frames of a rollout the last one counts. Memory: 20 bytes a frame. Raises `StorageError`.
    """
    scanned = scan(paths.journal, bytes.fromhex(facts_id), ScanReport())
    frames = np.fromiter(
        ((frame.index, frame.repeat, frame.offset) for frame in scanned),
        np.dtype([("index", np.int64), ("repeat", np.int32), ("offset", np.int64)]),
    )
    frames = frames[np.lexsort((frames["offset"], frames["repeat"], frames["index"]))]
    is_last = np.append(np.diff(rollout_numbers(frames["index"], frames["repeat"])) != 0, True)[: len(frames)]
    temporary = paths.table.with_name(f"{paths.table.name}.tmp")
    rows: list[tuple[int, int, int, float | None, float | None, str]] = []
    try:
        with (
            open_regular(paths.journal) as journal,
            pq.ParquetWriter(
                temporary,
                _SCHEMA,
                compression="zstd",
                write_page_checksum=True,
                use_dictionary=["reward_extra"],
            ) as writer,
        ):
            for offset in frames["offset"][is_last].tolist():
                frame = read_frame(journal, offset)
                scored = _decoder.decode(frame.body)
                for number, reward in enumerate(scored.trajectories):
                    rows.append((frame.index, frame.repeat, number, scored.finished_at, *reward))
                if len(rows) >= _ROWS:
                    writer.write_table(_table(rows))
                    rows = []
                yield RolloutKey(frame.index, frame.repeat), scored
            writer.write_table(_table(rows))
        commit_file(temporary, paths.table)
        forget_old_digests(paths.table)
    except OSError as error:
        raise _no_room(paths.table, error) from error
    finally:
        temporary.unlink(missing_ok=True)


def _table(rows: Sequence[Sequence[object]]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(_SCHEMA)
    arrays = [to_arrow_column(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=_SCHEMA)


def copy_scores(sources: Sequence[ScorePaths], target: ScorePaths, facts: ScoreFacts) -> None:
    """Makes scores of those of several folders, of disjoint rollouts, sealed if any of those are; on disk at the end.

    `facts` are those of the copy; nothing is at `target`.
    """
    with target.journal.open("wb") as file:
        file.write(encode_file_header(bytes.fromhex(facts.id)))
        for source in sources:
            found = read_facts(source.facts)
            if found is not None and source.journal.exists():
                for frame in scan(source.journal, bytes.fromhex(found.id), ScanReport()):
                    file.write(encode_frame(frame.index, frame.repeat, frame.rows, frame.body))
        file.flush()
        os.fdatasync(file.fileno())
    write_facts(target.facts, facts)
    if any(source.table.exists() for source in sources):
        deque(seal_scores(target, facts.id), maxlen=0)
