"""Reads a run directory at any moment of its life (written, sealed, merged, copied), without a lock.

A finished rollout is in a journal, then in the batch of the same number, and in the end perhaps in the artifact
alone. Readers list the journals before the batches, so that one sealed meanwhile is seen as batch; a file that has
vanished since is looked for in its next form; a rollout that stands in several files is given once. A torn tail is
no damage. Damage is named, and costs the rollouts that it lies in. Nothing that `run.json` names is opened.
"""

import itertools
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.errors import DamageError, RunDirectoryError
from rollstream.store.arrow import column_values, to_arrow
from rollstream.store.batch import (
    KEY_COLUMNS,
    DamagedFileError,
    build_table,
    file_version,
    read_groups,
    whole_tables,
)
from rollstream.store.export.files import decode_row
from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, scan
from rollstream.store.keys import KeyStates, RunState
from rollstream.store.manifest import Manifest, require_manifest
from rollstream.store.merge import Artifact
from rollstream.store.paths import RunPaths, missing_batches
from rollstream.store.records import RecordCodec, RolloutRecord, scoring_failed
from rollstream.store.scores import Rewards
from rollstream.store.streams import LOOP, LoopStream, RewardStream, Stream
from rollstream.store.turns import read_places
from rollstream.trajectory import REWARD_STREAMS, Failure, Metrics, Rollout, Trajectory
from rollstream.untrusted import read_regular

ARTIFACT: Final = -1
"""Number of the file that is no batch."""

_FRAMES: Final = 256
"""Rollouts of a journal that are read together."""

_OF_ROLLOUT: Final = tuple(one.name for one in fields(Rollout) if one.name != "trajectories")
_OF_TRAJECTORY: Final = tuple(
    one.name for one in fields(Trajectory) if one.name not in ("policy_versions", "metrics")
)

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class FoundTrajectory:
    """A trajectory and where it was."""

    run: "Run"
    row: dict[str, Any]
    """With its JSON columns decoded."""
    source: str
    """The file, relative to the run."""
    siblings: int
    """Trajectories of its rollout."""


@dataclass(slots=True)
class SeenFile:
    """How much of a file has been read."""

    version: tuple[int, ...] = ()
    """The batch's when it was read; empty before."""
    journal: int = 0
    """Inode of the journal that it was."""
    end: int = FILE_HEADER_SIZE
    """How far the journal was read."""


@dataclass(slots=True)
class Seen:
    """Rows that `Run.follow` has given."""

    files: dict[int, SeenFile] = field(default_factory=dict)
    batches: list[int] | None = None
    """Numbers of the batches at the last look."""


def read_checkpoint(root: Path) -> dict[str, Any]:
    """The content of `checkpoint.json`; empty where there is none that can be read."""
    try:
        content = orjson.loads(read_regular(root / "checkpoint.json"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def promised_rollouts(root: Path) -> int:
    """Rollouts that `checkpoint.json` counts as done. Read it before the files that hold them."""
    completed = read_checkpoint(root).get("completed")
    return completed if isinstance(completed, int) else 0


def lost_rollouts(promised: int, done: int) -> list[str]:
    """A line about damage, if fewer rollouts are done than `checkpoint.json` counted."""
    line = f"checkpoint.json counts {promised} finished rollouts, of which {done} are here"
    return [line] * (done < promised)


class Run:
    """A run directory as it is while it is read.

    Attributes:
        scores: whose rewards are read; None: the run's own.
        damage: a line for each damaged file or stretch of one that was met so far.
        damaged: those files.
    """

    def __init__(self, root: Path, manifest: Manifest, scores: str | None = None) -> None:
        self.root, self.manifest, self.scores = root, manifest, scores
        self.paths = RunPaths(root)
        self.rewards = Rewards(root, scores)
        self.damage: list[str] = []
        self.damaged: set[Path] = set()

    @classmethod
    def open(cls, root: Path, scores: str | None = None) -> "Run":
        """Opens a run. `scores` names the scores to take as rewards; None takes the run's own.

        Raises:
            RunDirectoryError: there is no run, or no such scores.
        """
        return cls(root, require_manifest(root), scores)

    def rows(self, columns: Sequence[str], streams: Sequence[str] = ()) -> Iterator[pa.Table]:
        """Some columns of all rows; a rollout is whole in one table, and comes once.

        Args:
            columns: stored ones.
            streams: names of streams, whose values are further columns, such as `stream.teacher`: a list of a number
                for each response token, null where the stream has none; `step_rewards` and `token_rewards` are those
                of the rewards, `loop.NAME` those that agent loops gave.

        Raises:
            RunDirectoryError: there is no such stream.
            DamageError: a stream cannot be read.
        """
        joined = [
            RewardStream(name)
            if name in REWARD_STREAMS
            else LoopStream(name)
            if name.startswith(LOOP)
            else Stream(self.root, name)
            for name in streams
        ]
        further = [one.columns for one in joined]
        read = [*dict.fromkeys(itertools.chain(columns, *further))] if joined else columns
        for _, table in self._once(read, KeyStates(self.manifest.n)):
            chosen = table.select(columns)
            for stream in joined:
                chosen = chosen.append_column(f"stream.{stream.name}", stream.values_of(table))
            yield chosen

    def find(
        self, index: int | None = None, repeat: int = 0, trajectory: int | None = None
    ) -> FoundTrajectory:
        """Finds a trajectory, sealed or not; without `index` one of the first rollout in reading order.

        `trajectory` counts within the rollout; None is the final one.

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
        if index is None and not self.damage:
            raise RunDirectoryError(f"{self.root} holds no finished rollout yet")
        name = "a rollout" if index is None else f"rollout (index {index}, repeat {repeat})"
        if self.damage:
            raise DamageError(f"{name} was not found, and may lie in what is damaged: {self.damage[0]}")
        failed = (record for record in self.failures() if (record.index, record.repeat) == (index, repeat))
        error = next((f"it failed: {record.error}" for record in failed), None)
        why = error or f"it is not done, or not part of the run; see `rollstream status {self.root}`"
        raise RunDirectoryError(f"{name} is not in {self.root}: {why}")

    def state(self, without: Collection[Path] = ()) -> RunState:
        """Counts and keys of what is there (but for some files), and what is wrong with it."""
        promised = promised_rollouts(self.root)
        state, batches = RunState(KeyStates(self.manifest.n)), dict[Path, None]()
        for path, table in self._once(["reward"], state.keys, without):
            state.rows += len(table)
            state.rewards.add_rows(table)
            if path == self.paths.artifact:
                state.artifact_rows += len(table)
            elif path.suffix == ".rsj":
                state.journal_rows += len(table)
            else:
                batches[path] = None
        state.batches = [self.number(path) for path in batches if path not in self.damaged]
        state.damage = [*self.damage]
        if (unscored := state.keys.done - state.rewards.scored) > 0:
            failed = sum(map(_failed_rewards, self.unscored(["reward_extra"])))
            state.rewards.unscored = min(failed, unscored)  # there may be more of them by now
        for path in self.paths.failure_files():
            report = ScanReport()
            for frame in scan(path, self.manifest.run_id_bytes, report):
                state.keys.mark_failed(frame.index, frame.repeat)
            state.damage += [f"failed/{damage}" for damage in report.damage]
        state.turns = read_places(self.paths, self.manifest.run_id_bytes, state.keys.is_done, state.damage)
        if missing := missing_batches(self.paths):
            merged = Artifact(self.paths, self.manifest.run_id).holds(missing)
            names = [self.paths.batch(number).name for number in missing if number not in merged]
            state.damage += [f"batches/{name} is missing" for name in names]
        state.damage += lost_rollouts(promised, state.keys.done)
        return state

    def unscored(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Some columns of the final trajectories that have no reward."""
        for table in self.rows(["is_snapshot", "reward", *columns]):
            chosen = pc.and_(pc.is_null(table["reward"]), pc.invert(table["is_snapshot"]))
            yield table.filter(chosen).select(columns)

    def failures(self, state: RunState | None = None) -> Iterator[Failure]:
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
        """Yields the rows that are not in `seen`, with the number of their file, and adds them to `seen`.

        A rollout comes again when its journal became a batch: the caller knows those that it has. `coded` names
        columns of texts that may come as dictionary arrays.
        """
        files, artifact = self._files(), Artifact(self.paths, self.manifest.run_id)
        batches = [self.number(path) for path in files if path.suffix == ".parquet"]
        if seen.batches is None and artifact.is_current():
            for _, table in self._read([self.paths.artifact], columns, seen=seen, coded=coded):
                yield ARTIFACT, table
            if seen.files[ARTIFACT].version and self.paths.artifact not in self.damaged:
                for number in batches:  # their rows are the artifact's
                    with suppress(FileNotFoundError):
                        seen.files[number] = SeenFile(file_version(self.paths.batch(number)))
        elif seen.batches != batches and artifact.may_hold_others(batches):
            files.append(self.paths.artifact)
        for path, table in self._read(files, columns, seen=seen, coded=coded):
            yield self.number(path), table
        seen.batches = batches

    def number(self, path: Path) -> int:
        """The number of a journal or batch, or `ARTIFACT`."""
        return ARTIFACT if path == self.paths.artifact else int(path.stem.removeprefix("batch_"))

    def rows_of(self, number: int, indices: Array, columns: Sequence[str] | None) -> Iterator[pa.Table]:
        """Yields rows of some prompt rows (sorted) from what now holds a file's rows; others may be among them.

        The artifact comes last: batches may have been merged and deleted.
        """
        own = [] if number == ARTIFACT else [self.paths.batch(number), self.paths.journal(number)]
        for _, table in self._read([*own, self.paths.artifact], columns, indices=indices):
            yield table

    def rollouts(self, indices: Array, *, merged: bool = False) -> Iterator[Rollout]:
        """The rollouts of some prompt rows (sorted), each once; `merged`: also those that the artifact alone has."""
        given = set[tuple[int, int]]()
        files = [*self._files(), *([self.paths.artifact] if merged else [])]
        for path, table in self._read(files, None, indices=indices):
            chosen = np.isin(column_values(table["index"]), indices)
            rows = table.filter(to_arrow(chosen)).to_pylist()
            for key, parts in itertools.groupby(rows, key=lambda row: (row["index"], row["repeat"])):
                if key not in given:
                    given.add(key)
                    yield _rollout([decode_row(row, path) for row in parts])

    def _files(self) -> list[Path]:
        """The batches, and the journals that are none yet. These are listed first: one sealed meanwhile is a batch."""
        journals = self.paths.journal_numbers()
        batches = dict.fromkeys(self.paths.batch_numbers())
        waiting = [number for number in journals if number not in batches]
        return [*map(self.paths.batch, batches), *map(self.paths.journal, waiting)]

    def _once(
        self, columns: Sequence[str], keys: KeyStates, without: Collection[Path] = ()
    ) -> Iterator[tuple[Path, pa.Table]]:
        """Rows whose rollouts `keys` does not have as done, marked there, and where they are.

        They have the columns, too, that tell rollouts apart and get them rewards.
        """
        scored = ["finished_at"] if self.rewards.are_joined else []
        columns = [*dict.fromkeys([*KEY_COLUMNS, "is_snapshot", *scored, *columns])]
        seen, repeated = Seen(), Counter[Path]()
        files = [path for path in self._files() if path not in without]

        def new(table: pa.Table) -> pa.Table:
            chosen = keys.mark_done_many(column_values(table["index"]), column_values(table["repeat"]))
            return table if chosen.all() else table.filter(to_arrow(chosen))

        for path, table in self._read(files, columns, seen=seen):
            rows = new(table)
            yield path, rows
            if len(rows) < len(table) and path.parent == self.paths.batches:
                repeated[path] += len(table) - len(rows)
        for path, count in repeated.items():
            self._note(path, f"{path.name}: {count} of its trajectories stand in another batch")
        good = [self.number(path) for path in files if path.suffix == ".parquet" and path not in self.damaged]
        artifact = self.paths.artifact
        if artifact not in without and Artifact(self.paths, self.manifest.run_id).may_hold_others(good):
            for path, table in self._read([artifact], columns, seen=seen):
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
            version: tuple[int, ...] = ()
            try:
                if path.suffix == ".rsj":
                    wanted = None if indices is None else set(indices.tolist())
                    for records in self._journal(path, file, wanted):
                        table = build_table(records)
                        yield path, self.rewards.current(table if columns is None else table.select(columns))
                    continue
                version = file_version(path)
                if version == file.version:
                    continue
                file.end = FILE_HEADER_SIZE
                for table in whole_tables(self._groups(path, columns, indices, coded)):
                    yield path, self.rewards.current(table)
                file.version = version
            except DamageError as error:
                self._note(path, str(error))
                file.version = version
            except Exception as error:
                if FileNotFoundError not in map(type, (error, error.__cause__)):
                    raise
                if path.suffix == ".rsj":
                    waiting.appendleft(self.paths.batch(self.number(path)))
                elif path != self.paths.artifact:
                    waiting.append(self.paths.artifact)
        self.damage += [line for line in self.rewards.damage if line not in self.damage]

    def _groups(
        self, path: Path, columns: Sequence[str] | None, indices: Array | None, coded: Sequence[str]
    ) -> Iterator[pa.Table | DamagedFileError]:
        for table in read_groups(path, columns, indices, coded, self.manifest.run_id):
            if isinstance(table, DamagedFileError):
                self._note(path, str(table))
            yield table

    def _journal(self, path: Path, file: SeenFile, wanted: set[int] | None) -> Iterator[list[RolloutRecord]]:
        report, codec, records = ScanReport(), RecordCodec(), dict[tuple[int, int], RolloutRecord]()
        inode, size, _ = file_version(path)
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
        self.damaged.add(path)
        if line not in self.damage:
            self.damage.append(line)


def _failed_rewards(table: pa.Table) -> int:
    """Rows on which the reward function failed."""
    likely = table.filter(pc.match_substring(table["reward_extra"], '"error":'))
    return sum(scoring_failed(orjson.loads(text)) for text in likely["reward_extra"].to_pylist())


def _rollout(rows: Sequence[dict[str, Any]]) -> Rollout:
    trajectories = [
        Trajectory(
            **{name: row[name] for name in _OF_TRAJECTORY},
            policy_versions=[(run["start"], run["version"]) for run in row["policy_versions"]],
            metrics=Metrics(**row["metrics"]),
        )
        for row in rows
    ]
    return Rollout(trajectories=trajectories, **{name: rows[0][name] for name in _OF_ROLLOUT})
