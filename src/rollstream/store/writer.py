"""The writer: makes rollouts durable, many with one fdatasync, and seals them into batches.

    commit(): encode --> what waits --> one thread writes: append, fdatasync, mark done
                                          |  the journal is full (rows, bytes) or idle: close it, open the next
                                          v
                                        one thread seals: journal N -> batch N, delete journal N

All else happens in the event loop. A group is what has gathered while the last fdatasync ran: no commit waits
for company, and the number of syncs falls by itself when the disk is slow.

How it fails: an I/O error (a full disk) cuts the journal back to what was durable and breaks the writer
for good, as does anything unforeseen in one of its threads: every commit, waiting or to come, raises
`StorageError` with the first cause, and `failed` is resolved with it. Nothing that was said to be done is
touched.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

from rollstream.aio import finish_despite_cancellation
from rollstream.errors import StorageError
from rollstream.store.batch import seal_journal
from rollstream.store.journal import JournalFile, encode_frame, sync_folder
from rollstream.store.records import EncodedRollout, EncodedTurn, EncodingError, RecordCodec
from rollstream.store.run_dir import RunDirectory
from rollstream.store.turns import TurnFiles
from rollstream.trajectory import Failure, Rollout, RolloutKey

_SEGMENT_BYTES = 64 << 20
"""A journal is closed when its rollouts take this much uncompressed, even with few rows: sealing holds
them about three times over."""

_GROUP_ROLLOUTS = 1024
"""Rollouts of one group commit at most; bounds the bytes between two syncs."""

_LONGEST_TIMER_S = 1e7
"""Event loops refuse timers of infinite length."""


class _Pending(NamedTuple):
    record: EncodedRollout | EncodedTurn | Failure
    frame: bytes
    future: "asyncio.Future[None] | None"
    """None of a turn, which nobody waits for."""


class StoreWriter:
    """Commits rollouts and failures to an open run directory.

    `commit` may be called many times at once, from one event loop.

    Attributes:
        journal_rows: rows in the open journal: durable, not in a batch yet.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        save_batch_size: int,
        pull_timeout: float,
        segment_bytes: int = _SEGMENT_BYTES,
        on_sealed: Callable[[], object] = lambda: None,
    ) -> None:
        """`save_batch_size` rows, or `pull_timeout` seconds without a new rollout, make a batch.

        `on_sealed` is called after each batch, in the thread that seals.
        """
        self._run, self._paths, self._run_id = run, run.paths, run.manifest.run_id_bytes
        self._save_batch_size, self._segment_bytes = save_batch_size, segment_bytes
        self._pull_timeout = min(pull_timeout, _LONGEST_TIMER_S)
        self._on_sealed = on_sealed
        self._codec = RecordCodec()
        self._next_number = run.paths.next_number()
        self._journal: JournalFile | None = None
        self._journal_number = -1
        self.journal_rows = self._journal_bytes = 0
        self._failure_journal: JournalFile | None = None
        self._turns = TurnFiles(self._paths, self._run_id, run.state.turns)
        self._closed_rows: dict[int, int] = {}
        """Rows of the journals that are closed and wait to be sealed, by number."""
        self._waiting: deque[_Pending] = deque()
        self._rotates = False
        self._writing: asyncio.Task[None] | None = None
        self._sealing: set[asyncio.Task[bool]] = set()
        self._idle: asyncio.TimerHandle | None = None
        self._write_thread = ThreadPoolExecutor(1, "store-write")
        self._seal_thread = ThreadPoolExecutor(1, "store-seal")
        self._closed = False
        self._broken: StorageError | None = None
        self._failed: asyncio.Future[None] | None = None

    @property
    def pending_rows(self) -> int:
        """Durable rows that are in no batch yet, those being sealed included."""
        return self.journal_rows + sum(list(self._closed_rows.values()))

    @property
    def saved_batches(self) -> int:
        """Batches on disk."""
        return len(self._run.state.batches)

    @property
    def failed(self) -> "asyncio.Future[None]":
        """Never succeeds; raises `StorageError` as soon as the writer is broken."""
        assert self._failed is not None, "start() first"
        return self._failed

    def start(self) -> None:
        """Opens the journal and starts the threads. Call from the event loop that commits.

        What the opened journal held is durable when this returns. Raises `StorageError`.
        """
        state = self._run.state
        if state.open_journal is not None:
            self._journal_number, end, self.journal_rows, self._journal_bytes = state.open_journal
            path = self._paths.journal(self._journal_number)
            try:
                self._journal = JournalFile(path, self._run_id, resume_at=end)
            except OSError as error:
                raise StorageError(f"cannot write {path}: {error.strerror}") from error
        self._failed = asyncio.get_running_loop().create_future()
        for number in state.unsealed:
            self._seal_soon(number)
        self._start_timer()

    async def commit(self, record: Rollout | EncodedRollout | Failure) -> None:
        """Returns when the record is durable; raises as the future of `submit`."""
        await self.submit(record)

    def submit(self, record: Rollout | EncodedRollout | Failure) -> "asyncio.Future[None]":
        """Hands a record to the writer; the future is resolved when it is durable.

        It raises:
            EncodingError: this record cannot be stored; nothing of it was.
            StorageError: the writer is broken (disk full, I/O error) or closed.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            self._require_open()
            if isinstance(record, Rollout):
                record = self._codec.encode(record)
        except (EncodingError, StorageError) as error:
            future.set_exception(error)
            return future
        rows, body = 0, b""
        if isinstance(record, EncodedRollout):
            rows, body = record.rows, record.body
        else:
            body = self._codec.encode_failure(record)
        frame = encode_frame(record.index, record.repeat, rows, body)
        self._waiting.append(_Pending(record, frame, future))
        self._write_soon()
        return future

    def turns_of(self, key: RolloutKey) -> list[bytes]:
        """See `TurnStore`."""
        return self._turns.turns_of(key)

    def keep(self, turn: EncodedTurn) -> None:
        """See `TurnStore`. One that cannot be kept has broken the writer, which says so elsewhere."""
        if self._broken is None and not self._closed:
            self._waiting.append(_Pending(turn, b"", None))
            self._write_soon(seals_later=False)

    def _require_open(self) -> None:
        if self._broken is not None or self._closed:
            raise self._broken or StorageError(f"{self._paths.root} is closed")

    async def seal(self) -> None:
        """Seals everything that is durable; returns when it is in batches. Raises `StorageError`."""
        self._require_open()
        self._write_soon(rotate=True)
        await self._at_rest()
        if self._broken is not None:
            raise self._broken

    async def close(self, *, seal: bool = True) -> None:
        """Commits what is queued, seals unless told not to, and ends the threads. Idempotent.

        Without sealing it takes no longer than the syncs and the batch being written. When it returns or
        raises, the threads have ended, however often it was cancelled: only then may the lock be given back.

        Raises:
            StorageError: with `seal`, when not everything is in batches.
        """
        if self._failed is None or self._closed:
            return
        try:
            if seal:
                await self.seal()
        finally:
            self._closed = True
            await finish_despite_cancellation(self._end())

    async def _end(self) -> None:
        await self._at_rest()
        if self._idle is not None:
            self._idle.cancel()
        self._write_thread.shutdown()
        self._seal_thread.shutdown()
        for journal in (self._journal, self._failure_journal, self._turns):
            if journal is not None:
                journal.close()
        if not self.failed.done():
            self.failed.cancel()

    async def _at_rest(self) -> None:
        """Returns when nothing is being written or sealed."""
        while tasks := [*([self._writing] if self._writing else []), *self._sealing]:
            await asyncio.wait(tasks)

    # -- in the event loop

    def _write_soon(self, *, rotate: bool = False, seals_later: bool = True) -> None:
        if self._idle is not None and seals_later:
            self._idle.cancel()
            self._idle = None
        self._rotates = self._rotates or rotate
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())

    async def _write(self) -> None:
        """Writes what waits, group by group; closes the journal when it is full or that is asked for."""
        while self._waiting or self._rotates:
            group = self._next_group()
            written = await self._in_thread(self._write_thread, partial(self._write_group, group))
            for future in (pending.future for pending in group):
                if future is None or future.done():
                    continue
                if written:
                    future.set_result(None)
                else:
                    assert self._broken is not None
                    future.set_exception(self._broken)
            rotate = self._rotates and not self._waiting
            self._rotates = self._rotates and not rotate
            full = rotate or self._is_full(self.journal_rows, self._journal_bytes)
            if self.journal_rows and full and await self._in_thread(self._write_thread, self._close_journal):
                self._seal_soon(self._journal_number)
        self._writing = None
        self._start_timer()

    def _next_group(self) -> list[_Pending]:
        """Takes what is made durable together: what waits, until the journal is full."""
        rows, size, group = self.journal_rows, self._journal_bytes, list[_Pending]()
        while self._waiting and len(group) < _GROUP_ROLLOUTS:
            if self._is_full(rows, size) and self._broken is None:
                break
            group.append(self._waiting.popleft())
            if isinstance(record := group[-1].record, EncodedRollout):
                rows, size = rows + record.rows, size + record.raw_bytes
        return group

    def _is_full(self, rows: int, size: int) -> bool:
        return rows >= self._save_batch_size or size >= self._segment_bytes

    def _start_timer(self) -> None:
        if self.journal_rows and self._idle is None and self._broken is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._idle = loop.call_later(self._pull_timeout, partial(self._write_soon, rotate=True))

    def _seal_soon(self, number: int) -> None:
        task = asyncio.ensure_future(self._in_thread(self._seal_thread, partial(self._seal, number)))
        self._sealing.add(task)
        task.add_done_callback(self._sealing.discard)

    async def _in_thread(self, thread: ThreadPoolExecutor, work: Callable[[], None]) -> bool:
        """Whether the work was done. It is not once the writer is broken, and breaks it when it raises."""
        if self._broken is not None:
            return False
        try:
            await asyncio.get_running_loop().run_in_executor(thread, work)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            if self._broken is None:
                self._break(error)
            return False
        return True

    def _break(self, error: BaseException) -> None:
        if isinstance(error, StorageError):
            self._broken = error
        else:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            self._broken = StorageError(
                f"cannot write to {self._paths.root}: {reason}. What was counted as done is safe; "
                "free space (or mend the disk) and run the same command again."
            )
            self._broken.__cause__ = error
        if not self.failed.done():
            self.failed.set_exception(self._broken)
            self.failed.exception()  # commits and `close` raise it, too: no warning when nobody awaits this

    # -- in the thread that writes

    def _write_group(self, group: list[_Pending]) -> None:
        rollouts = [pending.frame for pending in group if isinstance(pending.record, EncodedRollout)]
        failures = [pending.frame for pending in group if isinstance(pending.record, Failure)]
        if rollouts:
            if self._journal is None:
                self._journal_number, self._next_number = self._next_number, self._next_number + 1
                self._journal = JournalFile(self._paths.journal(self._journal_number), self._run_id)
            self._journal.append(b"".join(rollouts))
        self._turns.write([pending.record for pending in group])
        if failures:
            if self._failure_journal is None:
                path = next(reversed(self._paths.failure_files()), self._paths.failures / "000000.rsj")
                end = path.stat().st_size if path.exists() else None
                self._failure_journal = JournalFile(path, self._run_id, resume_at=end)
            self._failure_journal.append(b"".join(failures))
        state = self._run.state
        for record in (pending.record for pending in group):
            if isinstance(record, Failure):
                state.keys.mark_failed(record.index, record.repeat)
            if not isinstance(record, EncodedRollout):
                continue
            if state.keys.mark_done(record.index, record.repeat):
                state.rewards.add(record.reward, record.scoring_failed)
            state.rows += record.rows
            self.journal_rows += record.rows
            self._journal_bytes += record.raw_bytes

    def _close_journal(self) -> None:
        """Closes the journal, to be sealed. The next one is opened when it is needed."""
        assert self._journal is not None
        self._journal.close()
        self._journal = None
        self._closed_rows[self._journal_number] = self.journal_rows
        self.journal_rows = self._journal_bytes = 0

    # -- in the thread that seals

    def _seal(self, number: int) -> None:
        journal, batch = self._paths.journal(number), self._paths.batch(number)
        report = seal_journal(journal, batch, self._run_id, self._run.manifest.logprobs)
        if report.damage or report.torn:
            raise StorageError(
                f"{journal} changed under the run ({report.damage or 'torn'}); its whole frames are in "
                f"{batch.name}. Run the same command again: it quarantines that file."
            )
        journal.unlink()
        sync_folder(journal.parent)
        self._closed_rows.pop(number, None)
        self._run.state.batches.append(number)
        self._on_sealed()
