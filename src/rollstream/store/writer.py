"""The writer: makes rollouts durable, many with one fdatasync, and seals them into batches.

    commit(): encode --queue--> writer thread: append, fdatasync, mark done, resolve
                              |  the journal is full (rows, bytes) or idle: close it, open the next
                              v
                        sealer thread: journal N -> batch N, delete journal N

One thread owns the open journal file, one the sealing; the keys' states are written by the writer thread
alone. A group is what has gathered while the last fdatasync ran: no commit waits for company, and the
number of syncs falls by itself when the disk is slow.

How it fails: an I/O error (a full disk) cuts the journal back to what was durable and breaks the writer
for good, as does anything unforeseen in one of its threads: every commit, waiting or to come, raises
`StorageError` with the first cause, and `failed` is resolved with it. Nothing that was said to be done is
touched. Nobody waits for a thread that is gone.
"""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from rollstream.errors import StorageError
from rollstream.store.batch import seal_journal
from rollstream.store.journal import JournalFile, encode_frame, sync_folder
from rollstream.store.records import EncodedRollout, EncodingError, RecordCodec
from rollstream.store.run_dir import RunDirectory
from rollstream.trajectory import Failure, Rollout

logger = logging.getLogger(__name__)

_SEGMENT_BYTES = 64 << 20
"""A journal is closed when its rollouts take this much uncompressed, even with few rows: sealing holds
them about three times over."""

_GROUP_ROLLOUTS = 1024
"""Rollouts of one group commit at most; bounds the bytes between two syncs."""


@dataclass(slots=True)
class _Pending:
    record: EncodedRollout | Failure
    frame: bytes
    future: asyncio.Future[None]


@dataclass(slots=True)
class _Rotate:
    done: threading.Event


class _Stop:
    pass


class StoreWriter:
    """Commits rollouts and failures to an open run directory.

    `commit` may be called many times at once, from one event loop.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        save_batch_size: int,
        pull_timeout: float,
        segment_bytes: int = _SEGMENT_BYTES,
    ) -> None:
        """`save_batch_size` rows, or `pull_timeout` seconds without a new rollout, make a batch."""
        self._run = run
        self._paths = run.paths
        self._run_id = run.manifest.run_id_bytes
        self._save_batch_size = save_batch_size
        self._pull_timeout = pull_timeout
        self._segment_bytes = segment_bytes
        self._codec = RecordCodec()
        self._queue: queue.SimpleQueue[_Pending | _Rotate | _Stop] = queue.SimpleQueue()
        self._seal_queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._sealed = threading.Condition()
        self._unsealed = len(run.state.unsealed)
        self._closed_rows: dict[int, int] = {}
        self._next_number = run.state.next_number
        self._journal: JournalFile | None = None
        self._journal_number = -1
        self._journal_bytes = 0
        self._closed = False
        self._failure_journal: JournalFile | None = None
        self._broken: StorageError | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._failed: asyncio.Future[None] | None = None
        self._threads: list[threading.Thread] = []
        self.journal_rows = 0
        """Rows in the open journal: durable, not in a batch yet."""

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
        self._loop = asyncio.get_running_loop()
        self._failed = self._loop.create_future()
        state = self._run.state
        if state.open_journal is not None:
            path = self._paths.journal(state.open_journal)
            try:
                self._journal = JournalFile(path, self._run_id, resume_at=state.open_end)
            except OSError as error:
                raise StorageError(f"cannot write {path}: {error.strerror}") from error
            self._journal_number = state.open_journal
            self.journal_rows, self._journal_bytes = state.journal_rows, state.journal_bytes
        for number in state.unsealed:
            self._seal_queue.put(number)
        for target in (self._write_forever, self._seal_forever):
            thread = threading.Thread(target=target, name=f"store{target.__name__}", daemon=True)
            thread.start()
            self._threads.append(thread)

    async def commit(self, record: Rollout | EncodedRollout | Failure) -> None:
        """Returns when the record is durable; raises as the future of `submit`."""
        await self.submit(record)

    def submit(self, record: Rollout | EncodedRollout | Failure) -> "asyncio.Future[None]":
        """Hands a record to the writer; the future is resolved when it is durable.

        It raises:
            EncodingError: this record cannot be stored; nothing of it was.
            StorageError: the writer is broken (disk full, I/O error) or closed.
        """
        assert self._loop is not None, "start() first"
        future: asyncio.Future[None] = self._loop.create_future()
        if self._broken is not None or self._closed:
            future.set_exception(self._broken or StorageError(f"{self._paths.root} is closed"))
            return future
        try:
            if isinstance(record, Rollout):
                record = self._codec.encode(record)
        except EncodingError as error:
            future.set_exception(error)
            return future
        if isinstance(record, EncodedRollout):
            frame = encode_frame(record.index, record.repeat, record.rows, record.body)
        else:
            frame = encode_frame(record.index, record.repeat, 0, self._codec.encode_failure(record))
        self._queue.put(_Pending(record, frame, future))
        return future

    async def seal(self) -> None:
        """Seals everything that is durable; returns when it is in batches. Raises `StorageError`."""
        await asyncio.to_thread(self._seal_all)

    async def close(self, *, seal: bool = True) -> None:
        """Commits what is queued, seals unless told not to, and ends the threads. Idempotent.

        Without sealing it takes no longer than the syncs and the batch being written. When it returns or
        raises, the threads have ended, however often it was cancelled: only then may the lock be given back.

        Raises:
            StorageError: with `seal`, when not everything is in batches.
        """
        if not self._threads:
            return
        try:
            if seal and self._broken is None:
                await self.seal()
        finally:
            self._closed = True
            await _to_the_end(self._end_threads)
            for journal in (self._journal, self._failure_journal):
                if journal is not None:
                    journal.close()
            if self._failed is not None and not self._failed.done():
                self._failed.cancel()
        if seal and self._broken is not None:
            raise self._broken

    def _end_threads(self) -> None:
        writer, sealer = self._threads
        self._queue.put(_Stop())
        writer.join()
        self._seal_queue.put(None)
        sealer.join()
        self._threads = []

    def _seal_all(self) -> None:
        if self._closed:
            raise self._broken or StorageError(f"{self._paths.root} is closed")
        rotated = _Rotate(threading.Event())
        self._queue.put(rotated)
        rotated.done.wait()
        with self._sealed:
            self._sealed.wait_for(lambda: self._unsealed == 0 or self._broken is not None)
        if self._broken is not None:
            raise self._broken

    # -- writer thread

    def _write_forever(self) -> None:
        try:
            self._write_until_stopped()
        except BaseException as error:
            self._break(error)
            self._refuse_until_stopped()
        # Nobody may wait for what came behind the stop.
        while not self._queue.empty():
            self._refuse(self._queue.get())

    def _refuse_until_stopped(self) -> None:
        while not isinstance(item := self._queue.get(), _Stop):
            self._refuse(item)

    def _refuse(self, item: "_Pending | _Rotate | _Stop") -> None:
        if isinstance(item, _Rotate):
            item.done.set()
        elif isinstance(item, _Pending):
            self._resolve([item], self._broken or StorageError(f"{self._paths.root} is closed"))

    def _write_until_stopped(self) -> None:
        last_commit = time.monotonic()
        carried: _Pending | _Rotate | _Stop | None = None
        while True:
            idle = max(0.0, last_commit + self._pull_timeout - time.monotonic())
            idle = min(idle, threading.TIMEOUT_MAX)
            try:
                waits = self.journal_rows and self._broken is None
                item = carried or self._queue.get(timeout=idle if waits else None)
            except queue.Empty:
                self._guarded(self._rotate)
                continue
            carried = None
            if isinstance(item, _Stop):
                return
            if isinstance(item, _Rotate):
                self._guarded(self._rotate)
                item.done.set()
                continue
            group = [item]
            while len(group) < _GROUP_ROLLOUTS:
                try:
                    following = self._queue.get_nowait()
                except queue.Empty:
                    break
                if not isinstance(following, _Pending):
                    carried = following
                    break
                group.append(following)
            self._commit_group(group)
            last_commit = time.monotonic()

    def _commit_group(self, group: list[_Pending]) -> None:
        at = 0
        try:
            while at < len(group) and self._broken is None:
                at = self._commit_segment(group, at)
        except BaseException as error:
            self._break(error)
        if self._broken is not None:
            self._resolve(group, self._broken)  # those that are durable were resolved before

    def _commit_segment(self, group: list[_Pending], start: int) -> int:
        """Commits from `start` until the journal is full; returns where to go on."""
        written: list[_Pending] = []
        rollouts: list[bytes] = []
        failures: list[bytes] = []
        rows, size = self.journal_rows, self._journal_bytes
        while start < len(group) and rows < self._save_batch_size and size < self._segment_bytes:
            pending = group[start]
            start += 1
            written.append(pending)
            if isinstance(pending.record, EncodedRollout):
                rollouts.append(pending.frame)
                rows += pending.record.rows
                size += pending.record.raw_bytes
            else:
                failures.append(pending.frame)
        try:
            if rollouts:
                self._append(self._open_journal(), rollouts)
            if failures:
                self._append(self._open_failure_journal(), failures)
        except OSError as error:
            self._break(error)
            return start
        state = self._run.state
        for pending in written:
            record = pending.record
            if isinstance(record, EncodedRollout):
                if state.keys.mark_done(record.index, record.repeat):
                    state.rewards.add(record.reward, record.scoring_failed)
                state.rows += record.rows
            else:
                state.keys.mark_failed(record.index, record.repeat)
        self.journal_rows, self._journal_bytes = rows, size
        self._resolve(written, None)
        if rows >= self._save_batch_size or size >= self._segment_bytes:
            self._guarded(self._rotate)
        return start

    @staticmethod
    def _append(journal: JournalFile, frames: list[bytes]) -> None:
        try:
            journal.append(b"".join(frames))
            journal.sync()
        except BaseException:
            journal.rollback()
            raise

    def _open_journal(self) -> JournalFile:
        if self._journal is None:
            number = self._next_number
            self._journal = JournalFile(self._paths.journal(number), self._run_id)
            self._journal_number = number
            self._next_number += 1
        return self._journal

    def _open_failure_journal(self) -> JournalFile:
        if self._failure_journal is None:
            files = self._paths.failure_files()
            path = files[-1] if files else self._paths.failures / "000000.rsj"
            end = path.stat().st_size if files else None
            self._failure_journal = JournalFile(path, self._run_id, resume_at=end)
        return self._failure_journal

    def _rotate(self) -> None:
        """Closes the journal and hands it to the sealer. The next one is opened when it is needed."""
        if self._journal is None or not self.journal_rows:
            return
        journal, self._journal = self._journal, None
        journal.close()
        self._closed_rows[self._journal_number] = self.journal_rows
        self.journal_rows = self._journal_bytes = 0
        with self._sealed:
            self._unsealed += 1
        self._seal_queue.put(self._journal_number)

    # -- sealer thread

    def _seal_forever(self) -> None:
        while (number := self._seal_queue.get()) is not None:
            if self._broken is None:
                self._guarded(partial(self._seal, number))
            with self._sealed:
                self._unsealed -= 1
                self._sealed.notify_all()

    def _seal(self, number: int) -> None:
        journal = self._paths.journal(number)
        report = seal_journal(journal, self._paths.batch(number), self._run_id)
        if report.damage or report.torn:
            raise StorageError(
                f"{journal} changed under the run ({report.damage or 'torn'}); its whole frames are in "
                f"{self._paths.batch(number).name}. Run the same command again: it quarantines that file."
            )
        journal.unlink()
        sync_folder(journal.parent)
        self._closed_rows.pop(number, None)
        self._run.state.batches.append(number)

    # -- both

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except BaseException as error:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if self._broken is not None:
            return
        if isinstance(error, StorageError):
            self._broken = error
        else:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
            self._broken = StorageError(
                f"cannot write to {self._paths.root}: {reason}. What was counted as done is safe; "
                "free space (or mend the disk) and run the same command again."
            )
            self._broken.__cause__ = error
        with self._sealed:
            self._sealed.notify_all()
        self._call_loop(self._fail_future, self._broken)

    def _fail_future(self, error: StorageError) -> None:
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _resolve(self, group: list[_Pending], error: Exception | None) -> None:
        if group:
            self._call_loop(_resolve_futures, [pending.future for pending in group], error)

    def _call_loop(self, callback: Callable[..., object], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            logger.debug("the event loop is closed; nobody waits for this commit any more")


async def _to_the_end(work: Callable[[], None]) -> None:
    """Runs `work` in a thread and waits for its end through any number of cancellations."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = cancelled or error
    task.result()
    if cancelled is not None:
        raise cancelled


def _resolve_futures(futures: list[asyncio.Future[None]], error: Exception | None) -> None:
    for future in futures:
        if future.done():
            continue
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
