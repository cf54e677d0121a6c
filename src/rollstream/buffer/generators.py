"""The rollouts of a buffer: which generator runs, since when, and what became of it.

One rollout runs at a time, as in slime: another payload replaces it. Its record is durable before its
generator is started, so it goes on by itself after a restart of the server (`resume`).

    start --> record durable --> process --+-- ended by itself --> finished
                                    ^      +-- stop -------------> stopped
                                    |      +-- hopeless ---------> failed
                                    +-- back-off <-- crashed --+-> failed, after too many without progress
"""

import asyncio
import logging
import random
import shutil
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlsplit, urlunsplit
from uuid import uuid4

from rollstream.buffer.generator_files import GeneratorFile, GeneratorFiles
from rollstream.buffer.generator_process import GeneratorEnd, GeneratorProcess
from rollstream.buffer.items import InstanceId
from rollstream.buffer.rollout_record import (
    REPEATS,
    RolloutFailure,
    RolloutRecord,
    RolloutState,
    near_misses,
    read_count,
    read_skips,
    read_task_type,
)
from rollstream.errors import ConfigError, StorageError
from rollstream.rollout.retry import RetryPolicy

_LOG = logging.getLogger(__name__)

CRASHES = RetryPolicy(max_attempts=6, delay=1.0, delay_max=60.0)
"""Crashes in a row without an item in between, the first one included, and the pauses after them: with these
a generator that cannot work is given up after about half a minute."""

_SAVE_AGAIN_S = 5.0
"""While the disk is full: how a rollout ended is known in memory meanwhile."""


class _Stats(Protocol):
    @property
    def items_written(self) -> int: ...


class _Settings(Protocol):
    @property
    def remember_uids(self) -> int: ...


class RolloutLedger(Protocol):
    """What rollouts need of the buffer's ledger."""

    @property
    def settings(self) -> _Settings:
        """Says how many uids of items that have left are known."""
        ...

    async def set_task(self, task_type: str, group_size: int, judge_from: int | None = None) -> None:
        """Makes a task the one of items that name none; `judge_from`: see `Ledger.set_task`."""
        ...

    async def save_rollout(self, record: RolloutRecord) -> object:
        """Makes a record durable; the newest one of an id counts."""
        ...

    def rollouts(self) -> Sequence[RolloutRecord]:
        """All records."""
        ...

    def finished_counts(self, rollout_id: str) -> Mapping[InstanceId, int]:
        """Groups by instance that are complete, or timed out, since the rollout began."""
        ...

    def has_groups(self, rollout_id: str) -> bool:
        """Whether items of a rollout are stored, leased ones included."""
        ...

    def stats(self) -> _Stats:
        """Says how many items were stored so far, among other things."""
        ...


class UnknownTaskError(ConfigError):
    """No generator file has this task type.

    Attributes:
        known: the task types there are.
    """

    def __init__(self, task_type: str, files: GeneratorFiles) -> None:
        known = sorted(files)
        there = (
            f"known: {', '.join(known)}" if known else "there are none: start the server with --generators"
        )
        problems = "".join(f"\n{problem}" for problem in files.problems)
        super().__init__(f"task_type: no generator file has TASK_TYPE = {task_type!r}; {there}{problems}")
        self.known = known


@dataclass(slots=True, eq=False)
class _Run:
    """A rollout that runs: owned by its task."""

    record: RolloutRecord
    file: GeneratorFile
    task: asyncio.Task[None] | None = None
    process: GeneratorProcess | None = None
    in_a_row: int = 0
    """Crashes without an item in between."""
    items_at_crash: int | None = None
    """What the ledger had when the generator crashed; None: it did not, or was told to go on since."""


class Rollouts:
    """Starts, supervises and stops the generators of a buffer. Lives in the server's event loop."""

    def __init__(
        self,
        ledger: RolloutLedger,
        files: GeneratorFiles,
        *,
        directory: Path,
        buffer_url: str,
        token: str | None = None,
        crashes: RetryPolicy = CRASHES,
        group_size: int = 1,
    ) -> None:
        """Args:
        ledger: keeps the records.
        files: looked at anew at each start, so that a file can be mended or added.
        directory: the server's; gets `generators/` and `logs/`.
        buffer_url: where generators reach this server.
        token: what they need to be let in; it is put into the URL as HTTP Basic's password, which clients
            of any kind send along.
        crashes: how often and after how long a crashed generator is started again.
        group_size: of a rollout whose payload has no `num_repeat_per_sample`.
        """
        self._ledger = ledger
        self._files = files
        self._directory = directory
        self._url = with_token(buffer_url, token)
        self._retry = crashes
        self._group_size = group_size
        self._jitter = random.Random()
        self._changing = asyncio.Lock()
        self._run: _Run | None = None
        self._closed = False

    async def start(self, payload: Mapping[str, Any]) -> RolloutRecord:
        """Starts a rollout, or leaves it running.

        A payload is for the last rollout if it is that one's but for `skip_instance_ids`, `num_process` and
        the addresses:

        - it runs: it goes on; its generator is started again if it has to be told another engine or number;
        - it was stopped or failed: it goes on where it was;
        - it is finished, and items of it are still to be delivered: nothing happens.

        Any other payload begins a new rollout, and stops the one that runs: what that has written stays.

        Args:
            payload: of `/start_rollout`.

        Returns:
            The record, durable; its generator is being started.

        Raises:
            UnknownTaskError: no generator file is for this task.
            ConfigError: a parameter is missing or wrong.
            StorageError: the record could not be stored; what ran before goes on.
        """
        task_type = read_task_type(payload)
        read_count(payload, REPEATS, 1)
        for warning in near_misses(payload):
            _LOG.warning("/start_rollout: %s", warning)
        read_skips(payload)
        # Goes on when who asked goes away: it must not be left half done.
        return await asyncio.shield(asyncio.ensure_future(self._start(task_type, payload)))

    async def _start(self, task_type: str, payload: Mapping[str, Any]) -> RolloutRecord:
        async with self._changing:
            last = self._last()
            if last is not None and not last.asks_the_same(payload):
                last = None
            if last is not None and last.state == "running" and self._is_supervised():
                if last.is_done_as(payload):
                    return last
            elif last is not None and last.state == "finished":
                if self._ledger.has_groups(last.rollout_id):
                    _LOG.warning(
                        "rollout %s has finished, and items of it are left: nothing is started for its "
                        "payload before they have left the buffer",
                        last.rollout_id,
                    )
                    return last
                last = None
            await asyncio.to_thread(self._files.refresh)  # it runs files that changed: the user's code
            if task_type not in self._files:
                raise UnknownTaskError(task_type, self._files)
            if last is not None:
                record = replace(last.with_payload(payload), state="running", crashes=0)
                record = replace(record, error=None, traceback=None)
            else:
                record = RolloutRecord(uuid4().hex[:12], task_type, dict(payload), "running", time.time())
                record = replace(record, number=1 + max((one.number for one in self.records()), default=0))
            # What the one that runs still writes belongs to it: it has ended before the next one's begins.
            before = self._run
            await self._cancel()
            try:
                await self._ledger.save_rollout(record)
            except StorageError:
                if before is not None and before.record.state == "running":
                    await self._begin(before.record)
                raise
            if before is not None and before.record.state == "running":
                await self._stop_record(before.record, but=record.rollout_id)
            for other in self.records():
                if other.rollout_id != record.rollout_id and self._ledger.has_groups(other.rollout_id):
                    _LOG.warning(
                        "rollout %s has groups that nobody has read; slime's reads give those of %s only. "
                        "Read them with {'rollout_id': ...} at /v1/read, or POST /v1/rollouts/%s/drop",
                        other.rollout_id,
                        record.rollout_id,
                        other.rollout_id,
                    )
            await asyncio.to_thread(self._delete_old_files, [one.rollout_id for one in self.records()])
            await self._begin(record)
            return record

    async def resume(self) -> RolloutRecord | None:
        """Goes on with the rollout that ran when the server ended; None: there is none.

        A generator file that is gone since makes it fail, visibly.
        """
        async with self._changing:
            running = [one for one in self._ledger.rollouts() if one.state == "running"]
            if not running:
                last = self._last()
                if last is not None and last.payload.get(REPEATS) is None:
                    await self._set_task(last)  # the default may be another than when it was started
                return None
            record = max(running, key=_order)
            for other in running:
                if other is not record:
                    await self._ledger.save_rollout(replace(other, state="stopped"))
            if record.task_type not in self._files:
                error = UnknownTaskError(record.task_type, self._files)
                record = replace(record, state="failed", error=str(error))
                await self._ledger.save_rollout(record)
                return record
            _LOG.info("rollout %s of task %r goes on", record.rollout_id, record.task_type)
            await self._begin(record)
            return record

    async def stop(self, rollout_id: str) -> RolloutRecord:
        """Ends a rollout's generator; what was written stays. One that has ended stays as it is.

        Raises:
            KeyError: there is no such rollout.
        """
        async with self._changing:
            record = self.record(rollout_id)
            if record.state != "running":
                return record
            await self._cancel()
            stopped = replace(self.record(rollout_id), state="stopped")
            await self._ledger.save_rollout(stopped)
            return stopped

    def record(self, rollout_id: str) -> RolloutRecord:
        """The record of a rollout. Raises `KeyError`."""
        for record in self.records():
            if record.rollout_id == rollout_id:
                return record
        raise KeyError(rollout_id)

    def records(self) -> list[RolloutRecord]:
        """All rollouts, oldest first."""
        return sorted(self._ledger.rollouts(), key=_order)

    async def refresh_files(self) -> None:
        """Looks at the generator files again: hooks that were mended count from here on.

        Raises:
            ConfigError: the folder is gone.
        """
        await asyncio.to_thread(self._files.refresh)

    @property
    def running(self) -> RolloutRecord | None:
        """The rollout that runs, if there is one."""
        return self._run.record if self._run is not None else None

    @property
    def last(self) -> RolloutRecord | None:
        """The rollout that was started last, whatever became of it."""
        return self._run.record if self._run is not None else self._last()

    def failures(self) -> list[RolloutFailure]:
        """What keeps the rollout from getting on; empty when all is well, or nothing was asked for.

        A crash counts as overcome when an item was stored since.
        """
        run = self._run
        if run is not None and run.record.state != "failed":
            if run.items_at_crash is None or self._ledger.stats().items_written > run.items_at_crash:
                return []
            return [self._failure(run.record, final=False)]
        last = run.record if run is not None else self._last()
        return [self._failure(last, final=True)] if last is not None and last.state == "failed" else []

    async def close(self) -> None:
        """Ends the generator; none begins any more. The next `resume` goes on with the rollout."""
        self._closed = True
        async with self._changing:
            await self._cancel()

    def _is_supervised(self) -> bool:
        run = self._run
        return (
            run is not None and run.record.state == "running" and run.task is not None and not run.task.done()
        )

    def _last(self) -> RolloutRecord | None:
        return max(self._ledger.rollouts(), key=_order, default=None)

    def _failure(self, record: RolloutRecord, *, final: bool) -> RolloutFailure:
        log = self._log_path(record)
        return RolloutFailure(
            record.rollout_id,
            record.task_type,
            record.error or "",
            record.traceback or "",
            record.crashes,
            final,
            str(log) if log.exists() else "",
        )

    def _log_path(self, record: RolloutRecord) -> Path:
        return self._directory / "logs" / f"generator-{record.rollout_id}.log"

    async def _begin(self, record: RolloutRecord) -> None:
        await self._cancel()
        if self._closed:  # it is durable, and begins with the next server
            return
        await self._set_task(record)
        run = self._run = _Run(record, self._files[record.task_type])
        run.task = asyncio.create_task(self._supervise(run), name=f"rollout {record.rollout_id}")

    async def _set_task(self, record: RolloutRecord) -> None:
        # A hook of the user's may find a group complete that is smaller than the default's.
        own = not self._files.hooks(record.task_type).is_default_verdict
        size = record.group_size(self._group_size)
        await self._ledger.set_task(record.task_type, size, judge_from=1 if own else None)

    async def _stop_record(self, record: RolloutRecord, but: str) -> None:
        if record.rollout_id == but:
            return
        try:
            await self._ledger.save_rollout(replace(record, state="stopped"))
        except StorageError as error:  # the next `resume` settles it
            _LOG.warning("that rollout %s was stopped: %s", record.rollout_id, error)

    def _delete_old_files(self, known: Sequence[str]) -> None:
        """Removes what is left of rollouts whose records are no longer kept. In a thread."""
        for folder in (self._directory / "generators").glob("*"):
            if folder.name not in known:
                shutil.rmtree(folder, ignore_errors=True)
        for log in (self._directory / "logs").glob("generator-*.log*"):
            if log.name.removeprefix("generator-").partition(".")[0] not in known:
                log.unlink(missing_ok=True)

    async def _cancel(self) -> None:
        run, self._run = self._run, None
        if run is not None and run.task is not None:
            run.task.cancel()
            await asyncio.wait({run.task})

    async def _supervise(self, run: _Run) -> None:
        """Runs the generator until it finishes, is given up, or the task is cancelled."""
        try:
            while True:
                items = self._ledger.stats().items_written
                end = await self._run_once(run)
                if end.finished:
                    _LOG.info("rollout %s is finished", run.record.rollout_id)
                    await self._leave(run, "finished")
                    return
                run.in_a_row = run.in_a_row + 1 if self._ledger.stats().items_written == items else 1
                run.record = replace(
                    run.record,
                    crashes=run.record.crashes + 1,
                    error=end.error,
                    traceback=end.traceback,
                )
                run.items_at_crash = self._ledger.stats().items_written
                if end.hopeless or run.in_a_row >= self._retry.max_attempts:
                    _LOG.error("%s\n%s", self._failure(run.record, final=True), end.traceback)
                    await self._leave(run, "failed")
                    return
                wait = self._retry.wait(run.in_a_row, self._jitter)
                _LOG.warning("%s (in %.1f s)", self._failure(run.record, final=False), wait)
                try:
                    await self._ledger.save_rollout(run.record)
                except StorageError as error:  # a full disk; that it crashed is known here
                    _LOG.warning("rollout %s: %s", run.record.rollout_id, error)
                await asyncio.sleep(wait)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # not the generator's: whoever reads next is told (R10)
            _LOG.exception("rollout %s is no longer supervised", run.record.rollout_id)
            run.record = replace(
                run.record,
                state="failed",
                crashes=run.record.crashes + 1,
                error=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(),
            )

    async def _leave(self, run: _Run, state: RolloutState) -> None:
        run.record = replace(run.record, state=state)
        while True:
            try:
                await self._ledger.save_rollout(run.record)
                break
            except StorageError as error:
                _LOG.warning("that rollout %s is %s: %s", run.record.rollout_id, state, error)
                await asyncio.sleep(_SAVE_AGAIN_S)
        if self._run is run:
            self._run = None

    async def _run_once(self, run: _Run) -> GeneratorEnd:
        record = run.record
        try:
            run.process = await GeneratorProcess.start(
                run.file.path,
                self._data(record),
                folder=self._directory / "generators" / record.rollout_id,
                log_path=self._log_path(record),
                mark=f"buffer-{record.rollout_id}",
            )
        except OSError as error:
            text = f"its process cannot be started: {error}"
            return GeneratorEnd(finished=False, hopeless=False, error=text, traceback="")
        try:
            return await run.process.wait()
        finally:
            await asyncio.shield(run.process.stop())

    def _data(self, record: RolloutRecord) -> dict[str, Any]:
        """What `run_rollout` is called with.

        `remote_buffer_url` is this server's own address: the payload's is where the trainer sees it.
        `skip_instance_ids` also has what is complete since the rollout began, once for each epoch; who knows
        better, by uids, finds the payload's own list in `rollstream`, and by instance what is complete, for
        groups whose uids are forgotten.
        """
        skips = record.skip_instance_ids
        done = self._ledger.finished_counts(record.rollout_id)
        return {
            **record.payload,
            REPEATS: record.payload.get(REPEATS, self._group_size),
            "remote_buffer_url": self._url,
            "skip_instance_ids": skips + [one for one, count in done.items() for _ in range(count)],
            "rollstream": {
                "rollout_id": record.rollout_id,
                "skip_instance_ids": skips,
                "finished": list(done.items()),
                "remember_uids": self._ledger.settings.remember_uids,
            },
        }


def _order(record: RolloutRecord) -> tuple[int, float]:
    """Of its start. The clock may have been set back since, so it decides nothing."""
    return record.number, record.started_at


def with_token(url: str, token: str | None) -> str:
    """A URL that has a token as the password of its user part."""
    if token is None:
        return url
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"rollstream:{quote(token, safe='')}@{parts.netloc}"))
