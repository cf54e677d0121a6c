"""How everybody reads a run directory: also while it is written, sealed, merged or copied, and without a lock.

A finished rollout is in a journal, then in the batch of the same number, and in the end perhaps in the artifact
alone. Readers list the journals before the batches, so that one sealed meanwhile is seen as batch; a file that has
vanished since is looked for in its next form; a rollout that stands in several files is given once. A torn tail is
no damage. Damage is named, and costs the rollouts that it lies in. Nothing that `run.json` names is opened.
"""

import functools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.batch import (
    KEY_COLUMNS,
    DamagedFileError,
    belongs_to,
    build_table,
    column_values,
    open_parquet,
    read_group,
    reading,
    table_keys,
    to_arrow,
)
from rollstream.store.export.files import decode_row
from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, scan
from rollstream.store.keys import KeyStates
from rollstream.store.manifest import Manifest, require_manifest
from rollstream.store.merge import holds_other_batches, is_current, is_merged
from rollstream.store.paths import RunPaths, missing_batches
from rollstream.store.records import FailureRecord, RecordCodec, RolloutRecord
from rollstream.store.recovery import RunState, lost_rollouts, promised_rollouts
from rollstream.store.scores import Rewards

ARTIFACT: Final = -1
"""Number of the file that is no batch."""

_FRAMES: Final = 256
"""Rollouts of a journal that are read together."""
_SLAB: Final = 128
"""Row groups that are read together where no tokens and no texts are read: few calls, and little memory."""
_WIDE: Final = {
    *("prompt_ids", "response_ids", "response_mask", "response_logprobs"),
    *("messages", "ground_truth", "extra"),
}
_MOST_BYTES: Final = 1 << 28
"""Bytes of a row group in memory: it is written at some 8 MiB, or with one row that is larger."""
_MOST_VALUES: Final = 1 << 25
"""Values of a column in a row group: more tokens than `_MOST_BYTES` has."""
_MOST_REPEATED: Final = 1 << 32
_WIDE_TEXTS: Final = ("messages", "ground_truth", "extra")
"""Columns that are written without a dictionary: by one, the same text stands in many rows."""


Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """One trajectory, as a row with its JSON columns decoded, and where it was."""

    run: "Run"
    row: dict[str, Any]
    source: str
    siblings: int
    """Trajectories of its rollout."""


@dataclass(slots=True)
class SeenFile:
    version: tuple[int, ...] = ()
    """Of the batch when it was read; empty before."""
    journal: int = 0
    """Inode of the journal that it was."""
    end: int = FILE_HEADER_SIZE
    """How far the journal was read."""


@dataclass(slots=True)
class Seen:
    """What `Run.follow` has given already."""

    files: dict[int, SeenFile] = field(default_factory=dict)
    batches: list[int] | None = None
    """Numbers of the batches at the last look."""


class Run:
    """A run directory as it is while it is read.

    Attributes:
        scores: whose rewards are read; None: the run's own.
        damage: a line for each damaged file or stretch of one that was met so far.
    """

    def __init__(self, root: Path, manifest: Manifest, scores: str | None = None) -> None:
        self.root, self.manifest, self.scores = root, manifest, scores
        self.paths = RunPaths(root)
        self.rewards = Rewards(root, scores)
        self.damage: list[str] = []
        self._damaged: set[Path] = set()

    @classmethod
    def open(cls, root: Path, scores: str | None = None) -> "Run":
        """The run in a folder, with the rewards of some scores or (None) its own.

        Raises:
            RunDirectoryError: there is no run, or no such scores.
        """
        return cls(root, require_manifest(root), scores)

    def rows(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns of all rows; a rollout is whole in one table, and comes once."""
        for _, table in self._once(columns):
            yield table.select(columns)

    def find(
        self, index: int | None = None, repeat: int = 0, trajectory: int | None = None
    ) -> FoundTrajectory:
        """One trajectory, sealed or not; by default the first rollout's final one.

        Raises:
            RunDirectoryError: there is no such rollout.
            DamageError: the file that holds it, or may hold it, is damaged.
        """
        indices = None if index is None else np.array([index])
        for path, table in self._read([self.paths.artifact, *self._files()], None, indices=indices):
            if index is None:
                index, repeat = table["index"][0].as_py(), table["repeat"][0].as_py()
            wanted = (column_values(table["index"]) == index) & (column_values(table["repeat"]) == repeat)
            if not wanted.any():
                continue
            rows = table.filter(to_arrow(wanted)).to_pylist()
            if trajectory is not None and not 0 <= trajectory < len(rows):
                raise RunDirectoryError(
                    f"rollout (index {index}, repeat {repeat}) has {len(rows)} trajectories, numbered from 0"
                )
            row = decode_row(rows[-1 if trajectory is None else trajectory], path)
            return FoundTrajectory(self, row, str(path.relative_to(self.root)), len(rows))
        wanted_name = "no rollout" if index is None else f"rollout (index {index}, repeat {repeat})"
        if self.damage:
            raise DamageError(
                f"{wanted_name} was found, but there is damage: {self.damage[0]}. The same `rollstream generate` "
                "takes what is intact from there, and generates the other rollouts again"
            )
        if index is None:
            raise RunDirectoryError(f"{self.root} holds no finished rollout yet")
        failed = (one for one in self.failures() if (one.index, one.repeat) == (index, repeat))
        error = next((f"it failed: {one.error}" for one in failed), None)
        why = error or f"it is not done, or not part of the run; see `rollstream status {self.root}`"
        raise RunDirectoryError(f"{wanted_name} is not in {self.root}: {why}")

    def state(self) -> RunState:
        """Counts and keys of what is there, and what is wrong with it."""
        promised = promised_rollouts(self.root)
        state, batches = RunState(KeyStates(self.manifest.n)), dict[Path, None]()
        for path, table in self._once(["reward", "reward_extra"]):
            state.add_rows(table_keys(table))
            if path == self.paths.artifact:
                state.artifact_rows += len(table)
            elif path.suffix == ".rsj":
                state.journal_rows += len(table)
            else:
                batches[path] = None
        state.batches = [self.number(path) for path in batches if path not in self._damaged]
        state.damage = [*self.damage]
        for path in self.paths.failure_files():
            report = ScanReport()
            for frame in scan(path, self.manifest.run_id_bytes, report):
                state.keys.mark_failed(frame.index, frame.repeat)
            state.damage += [f"failed/{damage}" for damage in report.damage]
        state.damage += [
            f"batches/{name} is missing"
            for name in missing_batches(self.paths)
            if not is_merged(self.paths, self.manifest.run_id, name)
        ]
        state.damage += lost_rollouts(promised, state.keys.done)
        return state

    def failures(self, state: RunState | None = None) -> Iterator[FailureRecord]:
        """The rollouts that are still failed, oldest first; of one key the latest failure counts.

        Args:
            state: where the caller has it already.
        """
        keys = (state or self.state()).keys
        if not keys.failed:
            return
        codec, latest = RecordCodec(), dict[tuple[int, int], tuple[Path, int]]()
        for path in self.paths.failure_files():
            for frame in scan(path, self.manifest.run_id_bytes, ScanReport()):
                if not keys.is_done(frame.index, frame.repeat):
                    latest[frame.index, frame.repeat] = (path, frame.offset)
        for path in self.paths.failure_files():
            for frame in scan(path, self.manifest.run_id_bytes, ScanReport()):
                if latest.get((frame.index, frame.repeat)) == (path, frame.offset):
                    yield codec.decode_failure(frame.body)

    def follow(
        self, columns: Sequence[str], seen: Seen, coded: Sequence[str] = ()
    ) -> Iterator[tuple[int, pa.Table]]:
        """Rows that were not there when `seen` was last given, and the number of their file; it is updated.

        A rollout comes again when its journal became a batch: the caller knows those that it has. `coded` names
        columns of texts that may come as dictionary arrays.
        """
        files = self._files()
        batches = [self.number(path) for path in files if path.suffix == ".parquet"]
        if seen.batches is None and is_current(self.paths, self.manifest.run_id):
            yield from self._follow([self.paths.artifact], columns, seen, coded)
            if seen.files[ARTIFACT].version and self.paths.artifact not in self._damaged:
                for number in batches:  # their rows are the artifact's
                    with suppress(FileNotFoundError):
                        seen.files[number] = SeenFile(_version(self.paths.batch(number)))
        elif seen.batches != batches and holds_other_batches(self.paths, self.manifest.run_id, batches):
            files.append(self.paths.artifact)
        yield from self._follow(files, columns, seen, coded)
        seen.batches = batches

    def _follow(
        self, files: list[Path], columns: Sequence[str], seen: Seen, coded: Sequence[str]
    ) -> Iterator[tuple[int, pa.Table]]:
        for path, table in self._read(files, columns, seen=seen, coded=coded):
            yield self.number(path), table

    def number(self, path: Path) -> int:
        """The number of a journal or batch, or `ARTIFACT`."""
        return ARTIFACT if path == self.paths.artifact else int(path.stem.removeprefix("batch_"))

    def rows_of(self, number: int, indices: Array, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Rows of some prompt rows (sorted) where a file's number now leads; rows of others may be among them.

        The artifact comes last: a number is given again after batches were merged and deleted.
        """
        own = [] if number == ARTIFACT else [self.paths.batch(number), self.paths.journal(number)]
        for _, table in self._read([*own, self.paths.artifact], columns, indices=indices):
            yield table

    def _files(self) -> list[Path]:
        """The batches, and the journals that are none yet. These are listed first: one sealed meanwhile is a batch."""
        journals = self.paths.journal_numbers()
        batches = dict.fromkeys(self.paths.batch_numbers())
        waiting = [number for number in journals if number not in batches]
        return [*map(self.paths.batch, batches), *map(self.paths.journal, waiting)]

    def _once(self, columns: Sequence[str]) -> Iterator[tuple[Path, pa.Table]]:
        """Rows, each once, and where they are; also the columns that tell rollouts apart and get them rewards."""
        scored = [] if self.rewards.name is None else ["finished_at"]
        columns = [*dict.fromkeys([*KEY_COLUMNS, "is_snapshot", *scored, *columns])]
        keys, seen, repeated = KeyStates(self.manifest.n), Seen(), Counter[Path]()
        files = self._files()

        def new(table: pa.Table) -> pa.Table:
            index, repeat = (column_values(table[name]) for name in ("index", "repeat"))
            chosen = ~keys.are_done(index, repeat)
            keys.mark_done_many(index[chosen], repeat[chosen])
            return table if chosen.all() else table.filter(to_arrow(chosen))

        for path, table in self._read(files, columns, seen=seen):
            rows = new(table)
            yield path, rows
            if path.parent == self.paths.batches:
                repeated[path] += len(table) - len(rows)
        for path, count in (+repeated).items():
            self._note(path, f"{path.name}: {count} of its trajectories stand in another batch")
        good = [
            self.number(path) for path in files if path.suffix == ".parquet" and path not in self._damaged
        ]
        if holds_other_batches(self.paths, self.manifest.run_id, good):
            for path, table in self._read([self.paths.artifact], columns, seen=seen):
                if len(rows := new(table)):
                    yield path, rows

    def _read(
        self,
        files: Sequence[Path],
        columns: Sequence[str] | None,
        *,
        indices: Array | None = None,
        seen: Seen | None = None,
        coded: Sequence[str] = (),
    ) -> Iterator[tuple[Path, pa.Table]]:
        """Rows of some files, and where these have vanished of those that they became."""
        seen, waiting = seen or Seen(), deque(files)
        while waiting:
            path = waiting.popleft()
            file = seen.files.setdefault(self.number(path), SeenFile())
            try:
                if path.suffix == ".rsj":
                    wanted = None if indices is None else set(indices.tolist())
                    for records in self._journal(path, file, wanted):
                        table = build_table(records)
                        yield path, self.rewards.current(table if columns is None else table.select(columns))
                    continue
                version = _version(path)
                if version == file.version:
                    continue
                file.end = FILE_HEADER_SIZE
                for table in whole_tables(self._groups(path, columns, indices, coded)):
                    if len(table):
                        yield path, self.rewards.current(table)
                file.version = version
            except DamageError as error:
                self._note(path, str(error))
                if path.suffix != ".rsj":
                    file.version = version
            except Exception as error:
                if not is_gone(error):
                    raise
                if path.suffix == ".rsj":
                    waiting.appendleft(self.paths.batch(self.number(path)))
                elif path != self.paths.artifact:
                    waiting.append(self.paths.artifact)

    def _groups(
        self, path: Path, columns: Sequence[str] | None, indices: Array | None, coded: Sequence[str]
    ) -> Iterator[pa.Table | None]:
        for table in read_groups(path, columns, indices, coded, self.manifest.run_id):
            if isinstance(table, DamagedFileError):
                self._note(path, str(table))
                yield None
            else:
                yield table

    def _journal(self, path: Path, file: SeenFile, wanted: set[int] | None) -> Iterator[list[RolloutRecord]]:
        report, codec, records = ScanReport(), RecordCodec(), dict[tuple[int, int], RolloutRecord]()
        inode, size, _ = _version(path)
        if file.journal != inode or size < file.end:
            file.journal, file.end = inode, FILE_HEADER_SIZE
        for frame in scan(path, self.manifest.run_id_bytes, report, file.end):
            if wanted is not None and frame.index not in wanted:
                continue
            try:
                records.setdefault((frame.index, frame.repeat), codec.decode_rollout(frame.body))
            except ValueError as error:
                self._note(path, f"{path.name}: frame at offset {frame.offset}: {error}")
            if len(records) >= _FRAMES:
                yield [*records.values()]
                records.clear()
        if records:
            yield [*records.values()]
        file.end = max(file.end, report.end)
        for damage in report.damage:
            self._note(path, str(damage))

    def _note(self, path: Path, text: str) -> None:
        line = text if path.parent == self.root else f"{path.parent.name}/{text}"
        self._damaged.add(path)
        if line not in self.damage:
            self.damage.append(line)


def is_gone(error: BaseException) -> bool:
    """Whether a file was sealed or merged since it was listed: another look finds what became of it."""
    return FileNotFoundError in map(type, (error, error.__cause__))


def read_groups(
    path: Path,
    columns: Sequence[str] | None = None,
    indices: Array | None = None,
    coded: Sequence[str] = (),
    run_id: str | None = None,
) -> Iterator[pa.Table | DamagedFileError]:
    """The row groups of a Parquet file of trajectories, some together; for one that is damaged the error.

    Args:
        path: the file.
        columns: the names; None: all.
        indices: prompt rows, sorted: row groups that hold none of them are left out; None: all.
        coded: columns of texts that are given as dictionary arrays.
        run_id: whose the file has to be.

    Raises:
        DamageError: nothing of the file can be read, or it is of another run.
        StorageError, RunDirectoryError: as `open_parquet`.
    """
    footer, low, high = _footer(path, *_version(path))
    with (
        reading(path),
        pq.ParquetFile(
            pa.OSFile(str(path)),
            metadata=footer,  # from memory: it is large where there are many rows
            read_dictionary=coded,
            page_checksum_verification=True,
            pre_buffer=False,
        ) as file,
    ):
        if run_id is not None and not belongs_to(file, run_id):
            raise DamagedFileError(path, f"{path.name} belongs to another run")
        wanted = np.ones(len(low), bool)
        if indices is not None:
            wanted = np.searchsorted(indices, low) < np.searchsorted(indices, high, side="right")
        groups = np.flatnonzero(wanted).tolist()
        stored = {*file.schema_arrow.names}
        names = stored if columns is None else {*columns}
        # A format without the counts of tokens has them computed of each group.
        narrow = not names & _WIDE and names <= stored
        step = _SLAB if narrow else 1
        for start in range(0, len(groups), step):
            yield from _read_slab(file, path, groups[start : start + step], columns, narrow)


def _read_slab(
    file: pq.ParquetFile, path: Path, groups: list[int], columns: Sequence[str] | None, narrow: bool
) -> Iterator[pa.Table | DamagedFileError]:
    try:
        with reading(path):
            if narrow:
                table = file.read_row_groups(groups, columns=columns, use_threads=len(groups) > 1)
            else:
                table = read_group(file, groups[0], columns)
    except DamagedFileError as error:
        if len(groups) == 1:
            yield error
        else:
            for group in groups:
                yield from _read_slab(file, path, [group], columns, narrow)
    else:
        yield table.replace_schema_metadata(None)


def whole_tables(tables: Iterator[pa.Table | None]) -> Iterator[pa.Table]:
    """The same rows cut between rollouts; None is a stretch that is damaged, and costs the rollouts cut by it."""
    held: pa.Table | None = None
    cut = False
    for table in tables:
        if table is None:
            if held is not None and not held["is_snapshot"][-1].as_py():  # the end of its rollout is here
                yield held
            cut, held = True, None
            continue
        if cut:  # what comes before the first beginning of a rollout is the end of one that is damaged
            begins = np.flatnonzero(column_values(table["trajectory"]) == 0)
            if not len(begins):
                continue
            table, cut = table.slice(int(begins[0])), False
        if not len(table):
            continue
        whole = table if held is None else pa.concat_tables([held, table])
        index, repeat = (column_values(whole[name]) for name in ("index", "repeat"))
        last = int(np.argmax((index == index[-1]) & (repeat == repeat[-1])))
        yield whole.slice(0, last)
        held = whole.slice(last)
    if held is not None:
        yield held


def _version(path: Path) -> tuple[int, ...]:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@functools.lru_cache(maxsize=64)
def _footer(path: Path, *version: int) -> tuple[pq.FileMetaData, Array, Array]:
    """A file's footer, and the lowest and highest `index` of each row group."""
    with open_parquet(path) as file:
        footer = file.metadata
        for group in range(footer.num_row_groups):
            _check_size(path, footer.row_group(group))
    statistics = [footer.row_group(group).column(0).statistics for group in range(footer.num_row_groups)]
    both = [(0, 1 << 62) if one is None else (one.min, one.max) for one in statistics]
    low, high = np.array(both, np.int64).reshape(-1, 2).T
    return footer, low, high


def _check_size(path: Path, group: pq.RowGroupMetaData) -> None:
    """Raises `DamageError` for a row group that no rollout fills: a small file may hold very much."""
    wide = (group.column(at) for at in range(group.num_columns))
    if group.total_byte_size > _MOST_BYTES or any(
        column.num_values > _MOST_VALUES
        or (
            column.path_in_schema in _WIDE_TEXTS
            and "RLE_DICTIONARY" in column.encodings
            and column.total_uncompressed_size * group.num_rows > _MOST_REPEATED
        )
        for column in wide
    ):
        raise DamagedFileError(path, f"{path.name} has a row group that is larger than rows are")
