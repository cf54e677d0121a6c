"""Scores: rewards that a reward pass computed, beside those that rollouts were recorded with.

    scores/NAME.run/      a run directory, whose rollouts are those that were scored, without their tokens and texts
    scores/NAME.parquet   key, finished_at, reward and reward_extra of each trajectory, sorted by key: columns of its
                          artifact

    streams/              the same for numbers per token (`rollstream.store.streams`)

A score belongs to the rollout that it was computed of: that of its key which was finished at its time. A rollout
that is generated again, since a damaged file lost it, is not scored until it is scored itself.

In a training a function that sees whole groups scores rollouts after they were recorded, and so does a trainer that
has reward functions of its own: those rewards stand in the notes of its store (`training/`).

A run's own rewards are those that its rollouts were recorded with. Where its reward was changed in the middle
(`generation.rescore`), `run.json` names the scores of what was finished by then. The artifact has the run's own
rewards; batches and journals keep what was recorded.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollstream.errors import DamageError, RunDirectoryError, StorageError
from rollstream.store.arrow import column_values, to_arrow, to_arrow_texts
from rollstream.store.batch import (
    KEY_COLUMNS,
    SCHEMA,
    forget_old_digests,
    read_tables,
    reading,
    recorded_digests,
    write_tables_durably,
)
from rollstream.store.journal import FILE_HEADER_SIZE, ScanReport, scan, sync_folder
from rollstream.store.keys import rollout_numbers
from rollstream.store.manifest import read_manifest

SCORED_COLUMNS = [*KEY_COLUMNS, "finished_at"]
"""What rows need besides their rewards for others to be found."""

SidecarKind = Literal["scores", "streams"]
"""Numbers for each trajectory, or for each token: the name of their folder."""

_SCHEMA = pa.schema([SCHEMA.field(name) for name in (*SCORED_COLUMNS, "reward", "reward_extra")])
_CONTENT = b"rollstream.scores"
"""Metadata key of an artifact: the scores that its rewards are of (`Rewards.content`)."""


def sidecar_table(root: Path, name: str, kind: SidecarKind = "scores") -> Path:
    """The file of some scores, or of a stream."""
    return root / kind / f"{name}.parquet"


def pass_folder(root: Path, name: str, kind: SidecarKind = "scores") -> Path:
    """The run directory of the pass that computes them."""
    return root / kind / f"{name}.run"


GivenRewards = tuple[float | None, list[tuple[float | None, str]]]
"""When a rollout was finished, and of each of its trajectories the reward, and what else it says as JSON."""


def notes_path(root: Path) -> Path:
    """Where the notes of a training are in its store; another run directory has no such file."""
    return root / "training" / "000000.rsj"


def _judged_path(root: Path) -> Path:
    return root / "training" / "judged"


def note_judged(root: Path) -> None:
    """Says that the notes of a training have rewards, so that others need not be read for them."""
    if not (path := _judged_path(root)).exists():
        path.touch()
        sync_folder(path.parent)


def is_sidecar_name(name: str) -> bool:
    """Whether scores and streams can have this name."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", name) is not None


def sidecar_names(root: Path, kind: SidecarKind = "scores") -> list[str]:
    """The scores or streams of a run that are complete."""
    return sorted(path.stem for path in (root / kind).glob("*.parquet") if is_sidecar_name(path.stem))


class Rewards:
    """The rewards that a reader sees: a run's own, or those of a name.

    Args:
        root: the run directory.
        name: of scores; their rewards alone count then, and what they do not have is unscored.
        by_trainer: with the rewards of a trainer's own functions, which it gives anew to a batch that it gets again.

    Raises:
        RunDirectoryError: there are no such scores.
    """

    def __init__(self, root: Path, name: str | None = None, *, by_trainer: bool = True) -> None:
        manifest = read_manifest(root)
        self.name = name or (None if manifest is None else manifest.scores)
        self._keeps_recorded = name is None
        self._judged: _Judged | None = None
        if self.name is None and manifest is not None and _judged_path(root).exists():
            self._judged = _Judged(notes_path(root), manifest.run_id_bytes, by_trainer=by_trainer)
        self._path = sidecar_table(root, self.name or "")
        if self.name is not None and not self._path.exists():
            known = ", ".join(sidecar_names(root)) or "none"
            raise RunDirectoryError(f"{root} has no complete scores {self.name!r}; there are: {known}")

    @property
    def are_joined(self) -> bool:
        """Whether they are not simply those that stand in the rows."""
        return self.name is not None or self._judged is not None

    @property
    def damage(self) -> list[str]:
        """A line for each stretch of a training's notes that cannot be read: rewards may stand in it."""
        return [] if self._judged is None else self._judged.damage

    @property
    def content(self) -> str:
        """Names the scores and what is in them; empty where the recorded rewards are seen."""
        if self._judged is not None:
            return f"judged:{self._judged.path.stat().st_size}"
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
        if not {"reward", "reward_extra"}.intersection(table.column_names):
            return table
        if self._judged is not None:
            return self._judged.apply(table)
        if self.name is None:
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
        self._places = rollout_places(table)
        self._reward = column_values(table["reward"])
        chunks = table["reward_extra"].chunks
        codes = [np.from_dlpack(chunk.indices) for chunk in chunks]
        self._codes = np.concatenate([np.zeros(0, np.int32), *codes])
        texts = chunks[0].dictionary if chunks else to_arrow_texts([])
        self._texts = pa.concat_arrays([texts, to_arrow_texts(["{}"])])

    def apply(self, table: pa.Table, *, keeps_recorded: bool) -> pa.Table:
        """Rows with these rewards; where there are none, as they are or null."""
        places, known = find_places(self._places, table)
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


class _JudgedGroup(msgspec.Struct, tag="judged"):
    """A note of a training that has rewards, see `training.store.Judged`."""

    position: int
    by_trainer: bool = False


class _JudgedRewards(_JudgedGroup, tag="judged", kw_only=True):
    rewards: dict[int, GivenRewards]


class _Judged:
    """The rewards that a training's notes have, as far as they are written; of what was read only the rest is."""

    def __init__(self, path: Path, run_id: bytes, *, by_trainer: bool) -> None:
        self.path, self._run_id, self._by_trainer = path, run_id, by_trainer
        self.damage: list[str] = []
        self._end = FILE_HEADER_SIZE
        self._notes: dict[int, bytes] = {}
        """By the position of the group: read in full where its rows are."""
        self._group = msgspec.msgpack.Decoder(_JudgedGroup)
        self._rewards = msgspec.msgpack.Decoder(_JudgedRewards)

    def apply(self, table: pa.Table) -> pa.Table:
        """Rows with these rewards; where there are none, as they are."""
        self._read_on()
        index, repeat, trajectory, finished = (column_values(table[name]).tolist() for name in SCORED_COLUMNS)
        groups = {
            one: self._rewards.decode(self._notes[one]).rewards for one in {*index} & self._notes.keys()
        }
        rewards, known = np.full(len(table), np.nan), np.zeros(len(table), bool)
        extras = ["{}"] * len(table)
        for at, key in enumerate(zip(index, repeat, strict=True)):
            when, given = groups.get(key[0], {}).get(key[1], (None, []))
            if when == finished[at] and trajectory[at] < len(given):
                reward, extras[at] = given[trajectory[at]]
                rewards[at], known[at] = np.nan if reward is None else reward, True
        if "reward" in table.column_names:
            column = to_arrow(np.nan_to_num(rewards), ~np.isnan(rewards))
            table = _replaced(table, "reward", known, column, keeps_recorded=True)
        if "reward_extra" in table.column_names:
            table = _replaced(table, "reward_extra", known, to_arrow_texts(extras), keeps_recorded=True)
        return table

    def _read_on(self) -> None:
        report = ScanReport()
        for frame in scan(self.path, self._run_id, report, self._end):
            with suppress(msgspec.ValidationError):  # another kind of note
                note = self._group.decode(frame.body)
                if self._by_trainer or not note.by_trainer:
                    self._notes[note.position] = frame.body
        self._end = max(self._end, report.end)
        lines = [f"training/{damage}" for damage in report.damage]
        self.damage += [line for line in lines if line not in self.damage]


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


Places = tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float64]]


def rollout_places(table: pa.Table) -> Places:
    """Rollout, trajectory, and when it was finished (0.0 where that is not known) of each row."""
    finished = np.zeros(len(table))
    if "finished_at" in table.column_names:
        finished = np.nan_to_num(column_values(table["finished_at"]))
    numbers = rollout_numbers(column_values(table["index"]), column_values(table["repeat"]))
    return numbers, column_values(table["trajectory"]), finished


def find_places(places: Places, table: pa.Table) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Where the trajectories of a table stand among `places`, which are sorted by key, and whether they do."""
    keys, trajectory, finished = rollout_places(table)
    known, at = np.zeros(len(table), bool), np.zeros(len(table), np.int64)
    if len(places[0]):
        # The trajectories of a rollout stand together; the first ones may be in another part of the file.
        first = np.minimum(np.searchsorted(places[0], keys), len(places[0]) - 1)
        at = np.clip(first + trajectory - places[1][first], 0, len(places[0]) - 1)
        known = (places[0][at] == keys) & (places[1][at] == trajectory) & (places[2][at] == finished)
    return at, known


def publish_sidecar(
    artifact: Path,
    table: Path,
    schema: pa.Schema = _SCHEMA,
    columns: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    said: Mapping[str, pa.DataType] = MappingProxyType({}),
) -> None:
    """Makes the file of some scores, or of a stream, of the artifact of their pass. Raises `StorageError`.

    `columns` says which columns of the artifact have another name in the file; those that are `said` are in its
    `reward_extra`.
    """
    names = [(columns or {}).get(name, name) for name in schema.names]

    def made(part: pa.Table) -> pa.Table:
        chosen = part.select(names).rename_columns(schema.names)
        texts = [orjson.loads(text) for text in part["reward_extra"].to_pylist()] if said else []
        for name, kind in said.items():
            chosen = chosen.append_column(name, pa.array([one.get(name) for one in texts], kind))
        return chosen

    try:
        tables = map(made, read_tables(artifact, [*names, *(["reward_extra"] if said else [])]))
        whole = pa.schema([*schema, *(pa.field(name, kind) for name, kind in said.items())])
        write_tables_durably(table, tables, dict(metadata or {}), whole)
        forget_old_digests(table)
    except OSError as error:
        raise StorageError(
            f"cannot write {table}: {error.strerror or error}. What is done is safe"
        ) from error
