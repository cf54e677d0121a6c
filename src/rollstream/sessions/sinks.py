"""Where the sessions of `rollstream gateway serve` become durable: a run directory, or a rollout buffer."""

import asyncio
import hashlib
import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow.compute as pc

from rollstream.buffer.client import AsyncBufferClient, BufferClientError
from rollstream.buffer.items import ItemError
from rollstream.buffer.rollouts import rollout_item
from rollstream.data.prompts import PromptDataset
from rollstream.data.row import parse_row
from rollstream.data.values import BadRow
from rollstream.errors import DataError, TransientError
from rollstream.sessions.service import CreateSession, Ended, Place, SessionInfo, session_of
from rollstream.store.batch import read_tables
from rollstream.store.records import EncodingError
from rollstream.store.run import Run
from rollstream.store.run_dir import RunDirectory
from rollstream.store.summary import write_checkpoint
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import CALL_TIMES, Failure, PromptRow, Rollout, RolloutKey
from rollstream.web import HTTPError

logger = logging.getLogger(__name__)

_COLUMNS = ["index", "repeat", "prompt_key", "is_snapshot", "extra"]

_PASSING = (401, 403, 404, 405, 409)
"""A buffer's refusals that say nothing about the item."""


@dataclass(frozen=True, slots=True)
class SessionRows:
    """The prompt rows of sessions."""

    dataset: PromptDataset | None
    """Rows that sessions name; None: they come along."""
    prompt_column: str = "prompt"
    """Of rows that come along."""
    truth_column: str | None = None
    """Of the same, as of `parse_row`."""

    def read(self, asked: CreateSession) -> PromptRow:
        """The prompt row of a session. Raises `HTTPError`."""
        if self.dataset is not None:
            if asked.row is not None:
                raise HTTPError(400, "the rows are those of data.train_files: give instance_id", where="row")
            number, last = asked.instance_id, len(self.dataset) - 1
            if type(number) is not int or not 0 <= number <= last:
                text = f"instance_id is a row of data.train_files, from 0 to {last}, not {number!r:.50}"
                raise HTTPError(404, text, "not_found", "instance_id")
            try:
                return self.dataset.row(number)
            except DataError as error:
                raise HTTPError(400, str(error), where="instance_id") from error
        if asked.row is None:
            raise HTTPError(400, "the row is missing, as a line of a prompt file has it", where="row")
        try:
            columns = orjson.loads(orjson.dumps(asked.row))
            row, _ = parse_row(columns, 0, self.prompt_column, self.truth_column)
        except BadRow as error:
            raise HTTPError(400, f"row: {error}", where="row") from error
        if row.images:
            raise HTTPError(400, "the row names images, which nobody reads: send them in calls", where="row")
        return row


class RunSink:
    """A run directory. A session is one of the `n` rollouts of its row.

    Without a dataset rows come along with sessions; the first session of a row gives it its index. The ids of
    sessions are in the trajectories' `extra`; of each, eight bytes are held to find its rollout.

    Args:
        run: open.
        writer: to it, not started; this starts and closes it.
        rows: of the sessions.
        retry_failed: also sessions that name no row take rollouts that failed earlier.
    """

    def __init__(
        self, run: RunDirectory, writer: StoreWriter, rows: SessionRows, *, retry_failed: bool = False
    ) -> None:
        self.writer = writer
        self._run, self._session_rows, self._dataset = run, rows, rows.dataset
        self._n, self._keys = run.manifest.n, run.state.keys
        self._taken: set[RolloutKey] = set()
        self._ids: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        """Of finished sessions, as `_number` has them, by key."""
        self._indices: dict[str, int] = {}
        """Rows that came along, by prompt key."""
        self._next = -1
        """The next one's index; with a dataset there is none."""
        order = () if rows.dataset is None else rows.dataset.order
        self._owed = self._keys.owed(order, retry_failed=retry_failed)

    async def start(self) -> None:
        """Reads what is there. Raises `StorageError`, `DamageError`."""
        self.writer.start()
        await self.writer.seal()  # then all of it is in batches
        await asyncio.to_thread(self._read)

    def _read(self) -> None:
        for number in list(self._run.state.batches):
            for table in read_tables(self._run.paths.batch(number), _COLUMNS):
                final = table.filter(pc.invert(table["is_snapshot"]))
                for row in final.to_pylist():
                    if (session := session_of(orjson.loads(row["extra"]))) is not None:
                        self._note(row["index"], row["repeat"], session[0])
                    if self._dataset is None:
                        self._indices[row["prompt_key"]] = row["index"]
        if self._dataset is None:
            for failure in Run(self._run.paths.root, self._run.manifest).failures():
                self._indices.setdefault(failure.prompt_key, failure.index)
            self._next = max(self._indices.values(), default=-1) + 1

    def _note(self, index: int, repeat: int, id: str) -> None:
        at = index * self._n + repeat
        if at >= len(self._ids):
            self._ids = np.pad(self._ids, (0, max(at + 1, 1024, len(self._ids) * 3 // 2) - len(self._ids)))
        self._ids[at] = _number(id)

    def place(self, id: str, asked: CreateSession) -> Place:
        """See `SessionSink`. With a dataset, a session that names no row takes the next rollout that is owed."""
        if self._dataset is not None and asked.row is None and asked.instance_id is None:
            key = next((key for key in self._owed if key not in self._taken), None)
            if key is None:
                raise HTTPError(409, "every rollout of the run is done, failed or open", "all_done")
            row = self._dataset.row(key.index)
        else:
            row = self._session_rows.read(asked)
            if self._dataset is None:
                row.index = self._indices.get(row.prompt_key, self._next)
            elif row.index not in self._dataset.order:
                raise HTTPError(404, f"row {row.index} is not part of the run", "not_found", "instance_id")
            key = self._free_key(row.index)
            if row.index == self._next:
                self._indices[row.prompt_key] = row.index
                self._next += 1
        self._taken.add(key)
        return Place(row, key.repeat, asked.instance_id, is_key=True)

    def _free_key(self, index: int) -> RolloutKey:
        """A rollout of a row that is owed, else one that failed."""
        for retry_failed in (False, True):
            for key in self._keys.owed([index], retry_failed=retry_failed):
                if key not in self._taken:
                    return key
        text = f"all {self._n} rollouts of row {index} (actor_rollout_ref.rollout.n) are done or open"
        raise HTTPError(409, text, "all_done")

    def free(self, place: Place) -> None:
        """See `SessionSink`."""
        self._taken.discard(RolloutKey(place.row.index, place.repeat))

    async def write(self, id: str, place: Place, result: Rollout | Failure) -> None:
        """See `SessionSink`."""
        await self.writer.commit(result)
        if isinstance(result, Rollout):
            self._note(result.index, result.repeat, id)
        self.free(place)

    async def find(self, id: str) -> Ended | None:
        """See `SessionSink`. The rollout itself says what the session was finished with."""
        for at in np.flatnonzero(self._ids == _number(id)).tolist():
            index, repeat = divmod(at, self._n)
            rollout = await asyncio.to_thread(Run.open(self._run.paths.root).find, index, repeat)
            session = session_of(rollout.row["extra"])
            if session is not None and session[0] == id:
                info = SessionInfo(id, "finished", index=index, repeat=repeat, trajectories=rollout.siblings)
                info.reward = rollout.row["reward"]
                return Ended(info, session[1])
        return None

    async def close(self) -> None:
        """Makes batches of what is durable. Raises `StorageError`."""
        try:
            await self.writer.close()
        finally:
            await asyncio.to_thread(self.write_checkpoint)

    @property
    def _order(self) -> Collection[int]:
        return self._indices.values() if self._dataset is None else self._dataset.order

    def all_done(self) -> bool:
        """Whether every rollout of the rows is done or has failed, and there are any."""
        owed = self._keys.owed(self._order, retry_failed=False)
        return self._run.state.rows > 0 and next(owed, None) is None

    def write_checkpoint(self) -> None:
        """Writes `checkpoint.json`: it is for people and scripts that look on."""
        total = len(self._order) * self._n
        try:
            write_checkpoint(self._run.paths, self._run.manifest, self._run.state, total=total)
        except OSError as error:
            logger.warning("cannot write checkpoint.json: %s", error.strerror)


class BufferSink:
    """A rollout buffer. A session is an item, named by the session's id, so that it is stored once.

    Args:
        client: of the buffer; gives up soon.
        task_type: of the items; None: of the job that was started last.
        rows: of the sessions.
    """

    def __init__(self, client: AsyncBufferClient, rows: SessionRows, *, task_type: str | None = None) -> None:
        self._client, self._rows, self._task_type = client, rows, task_type

    def place(self, id: str, asked: CreateSession) -> Place:
        """See `SessionSink`. Seeds, where the run has one, are made of the session's id."""
        row, dataset = self._rows.read(asked), self._rows.dataset
        names = [row.columns.get("instance_id"), asked.instance_id, row.prompt_key]
        if dataset is None and asked.instance_id is not None:
            names = [asked.instance_id]
        instance_id = next(name for name in names if type(name) in (int, str) and name != "")
        row.index, repeat = (row.index, _seed(id)) if dataset is not None else (_seed(id), 0)
        return Place(row, repeat, instance_id)

    def free(self, place: Place) -> None:
        """See `SessionSink`."""

    async def write(self, id: str, place: Place, result: Rollout | Failure) -> None:
        """See `SessionSink`. One that failed leaves the id to the session that is begun again."""
        uid, row = f"session:{id}", place.row
        info: dict[str, Any] = {}
        if isinstance(result, Rollout):
            own = {"extra_info", CALL_TIMES, *row.columns}
            info = {key: value for key, value in result.final.extra.items() if key not in own}
        else:
            uid += f":failed:{result.failed_at}"
        assert place.instance_id is not None
        item = rollout_item(result, row, uid=uid, instance_id=place.instance_id, info=info)
        if self._task_type is not None:
            item["task_type"] = self._task_type
        try:
            await self._client.write(item)
        except (BufferClientError, ItemError) as error:
            if isinstance(error, BufferClientError) and error.status in _PASSING:
                raise TransientError(f"the buffer: {error}") from error
            raise EncodingError(f"the buffer does not take it: {error}") from error

    async def find(self, id: str) -> Ended | None:
        """See `SessionSink`. The buffer says that it has it, or had it, and no more."""
        try:
            (known,) = await self._client.known([f"session:{id}"])
        except BufferClientError as error:
            raise TransientError(f"the buffer: {error}") from error
        return Ended(SessionInfo(id, "finished"), None) if known else None


def _seed(id: str) -> int:
    return _number(id) >> 33


def _number(id: str) -> int:
    """Eight bytes that stand for an id; never 0."""
    return int.from_bytes(hashlib.blake2b(id.encode(), digest_size=8).digest(), "little") | 1
