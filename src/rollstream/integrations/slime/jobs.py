"""Jobs: generators that are started, looked after and stopped.

One job runs at a time, as in slime: another payload replaces it. Its record is durable before its generator
starts, so it goes on after a restart of the server, or on another server of the same store.

    start --> record durable --> claimed --> process --+-- run_rollout returned --> finished
                                    ^                  +-- stop, other payload ---> stopped
                                    |                  +-- permanent error -------> failed
                                    +-- back-off <-----+-- crashed ---------------> failed, after six in a row

Each server has one loop. Every few seconds, and when something happens, it reconciles its own process with the
last record in the store: it starts or ends that. Only the server that claimed a job runs its generator.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from msgspec.structs import replace

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.store.base import JobRecord
from rollstream.buffer.store.sql import SqlStore
from rollstream.engine.reaper import STOP_TIMEOUT_S
from rollstream.errors import ConfigError, NotFoundError, StorageError, StorageFullError
from rollstream.integrations.slime.generator_files import GeneratorFiles
from rollstream.integrations.slime.generator_process import GeneratorEnd, GeneratorProcess
from rollstream.integrations.slime.hook_process import GeneratorFile
from rollstream.integrations.slime.payload_rules import PayloadRules
from rollstream.rollout.retry import RetryPolicy

_LOG = logging.getLogger(__name__)

CRASHES = RetryPolicy(max_attempts=6, delay=1.0, delay_max=60.0)
"""Crashes in a row without an item in between, and the pauses after them: a generator that cannot work is
given up after about half a minute."""

STALE_AFTER_S = 15.0
"""A claim that was not renewed for so long (five reconciliations) is another server's to take."""
_LOST_S = STALE_AFTER_S - STOP_TIMEOUT_S
"""Without the store for so long, a server ends its generator: it is gone before another server starts one."""

_HOW = ("remote_engine_url", "num_process")
"""These keys say how the work is done, not which: a trainer that was started again comes with other ports."""


@dataclass(slots=True, eq=False)
class _ClaimedJob:
    """A job that this server has claimed."""

    id: str
    payload: dict[str, Any]
    claimed: float
    process: GeneratorProcess | None = None
    ended: asyncio.Task[GeneratorEnd] | None = None
    items: int = 0
    """Items of the job that the store had when the process began."""
    in_a_row: int = 0
    """Crashes without an item in between."""
    not_before: float = 0.0


class Jobs:
    """The jobs of a server. `resume` begins, `close` ends.

    Args:
        buffer_url: Where generators reach this server; it may be set later, before `resume`.
        server_id: The same after a restart of this server, which then goes on with its job at once.
        issue_token: Makes a token for the generator of a job; None: it needs none.
    """

    def __init__(
        self,
        store: SqlStore,
        files: GeneratorFiles,
        *,
        directory: Path,
        buffer_url: str = "",
        rules: PayloadRules,
        server_id: str,
        group_defaults: GroupSettings,
        issue_token: Callable[[str], str | None] = lambda _job: None,
        tools_file: Path | None = None,
        crashes: RetryPolicy = CRASHES,
        reconcile_s: float = 3.0,
    ) -> None:
        self._store, self._files, self._rules = store, files, rules
        self._directory, self.buffer_url, self._server_id = directory, buffer_url, server_id
        self._group_defaults, self._issue_token, self._tools_file = group_defaults, issue_token, tools_file
        self._crashes, self._reconcile_s, self._random = crashes, reconcile_s, random.Random()
        self._changing, self._wake = asyncio.Lock(), asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._closed = False
        self._run: _ClaimedJob | None = None
        self._trouble = self._refused = ""

    async def resume(self) -> None:
        """Goes on with the job that ran, if there is one, and looks after jobs until `close`."""
        await self._try_to_reconcile()
        self._loop = asyncio.create_task(self._keep_reconciled(), name="jobs")

    async def close(self) -> None:
        """Ends the generator. Its job still counts as running, and goes on with the next `resume`."""
        self._closed = True
        self._wake.set()
        if self._loop is not None:
            await self._loop
        async with self._changing:
            await self._end_generator()

    async def start(self, payload: Any, shown_token: bool = False) -> tuple[JobRecord, list[str]]:
        """Starts a job, or goes on with the last one (see docs/buffer.md). Its record is durable at return.

        Raises `ConfigError`, or `StorageError`: then what ran before goes on.
        """
        try:
            payload, warnings = self._rules.check(payload, shown_token)
            payload["num_repeat_per_sample"] = self._group_defaults.for_job(payload).group_size
            await self._files.refresh()
            self._find_file(payload["task_type"])
        except ConfigError as error:
            if str(error) != self._refused:  # slime's client repeats a refused start for ever
                _LOG.warning("no job is started: %s", error)
            self._refused = str(error)
            raise
        self._refused = ""
        async with self._changing:
            jobs = await self._store.jobs()
            last = jobs[-1] if jobs else None
            left = last is not None and await self._store.has_groups(last.id)
            same = last if last is not None and _work(last.payload) == _work(payload) else None
            moved = same is None or any(same.payload.get(key) != payload.get(key) for key in _HOW)
            if same is not None and same.state == "running" and not moved:
                return same, warnings
            if same is not None and same.state == "finished" and left:
                why = f"job {same.id} has finished, and groups of it are left: until then nothing starts"
                return same, [*warnings, why]
            if same is not None and same.state != "finished":
                # What was completed since its first start, the store counts.
                payload["skip_instance_ids"] = same.payload["skip_instance_ids"]
                record = replace(same, payload=payload, state="running", crashes=0, error="", traceback="")
            else:
                record = JobRecord(
                    id=uuid4().hex[:12],
                    task=payload["task_type"],
                    payload=payload,
                    state="running",
                    started=time.time(),
                )
                if last is not None and left:
                    warnings.append(
                        f"job {last.id} has groups that nobody has read, and slime's reads leave them. "
                        f'POST /v1/read {{"job": "{last.id}"}} reads them, /v1/jobs/{last.id}/drop drops them'
                    )
            await self._end_generator()  # what it still writes is its own job's
            record = await self._store.save_job(record)
            self._wake.set()  # the loop starts it, and stops the one before
        _LOG.info(
            "job %s of task %r is started: %r", record.id, record.task, record.payload.get("input_file")
        )
        for warning in warnings:
            _LOG.warning("job %s: %s", record.id, warning)
        return record, warnings

    async def stop(self, job: str) -> JobRecord:
        """Ends a job's generator; what was written stays. Raises `NotFoundError`, `StorageError`."""
        async with self._changing:
            record = next((one for one in await self._store.jobs() if one.id == job), None)
            if record is None:
                raise NotFoundError(f"there is no job {job!r:.100}")
            if record.state != "running":
                return record
            if self._run is not None and self._run.id == job:
                await self._end_generator()
            return await self._store.save_job(replace(record, state="stopped"))

    def failures(self) -> list[dict[str, Any]]:
        """The failure that keeps the last job from getting on. A crash counts until an item comes."""
        last, run = self._store.last_job, self._run
        if last is None or last.state not in ("running", "failed"):
            return []
        if last.state == "failed" or (last.error and not (run is not None and self._has_progress(run))):
            return [self._failure(last)]
        if self._trouble:
            return [self._failure(replace(last, error=f"it cannot be looked after: {self._trouble}"))]
        return []

    def _failure(self, record: JobRecord) -> dict[str, Any]:
        """Why a job does not get on. `final`: it was given up; `log`: the path of its log, if that is here."""
        log, final = self.log_of(record), record.state == "failed"
        fate = "it was given up" if final else "it is started again"
        where = str(log) if log.exists() else ""
        message = (
            f"generator of task {record.task!r} (job {record.id}) failed {record.crashes} times, {fate}: "
        )
        message += record.error + (f"; log: {where}" if where else "")
        facts = {"error": record.error, "traceback": record.traceback, "crashes": record.crashes}
        return {
            **{"job": record.id, "task_type": record.task, **facts},
            **{"final": final, "log": where, "message": message},
        }

    def _has_progress(self, run: _ClaimedJob) -> bool:
        return run.ended is not None and self._store.items_of_job > run.items

    async def _keep_reconciled(self) -> None:
        while not self._closed:
            self._wake.clear()
            await self._try_to_reconcile()
            pause = self._reconcile_s
            if (run := self._run) is not None and run.ended is None:
                pause = max(0.0, min(pause, run.not_before - time.monotonic()))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._wake.wait()

    async def _try_to_reconcile(self) -> None:
        async with self._changing:
            try:
                await self._reconcile()
                self._trouble = ""
            except Exception as error:  # the store is away, or a bug: readers see it
                trouble = f"{type(error).__name__}: {error}"
                if trouble != self._trouble:
                    _LOG.error("jobs: %s", trouble, exc_info=not isinstance(error, StorageError))
                self._trouble = trouble
                if (run := self._run) is not None:
                    run.not_before = time.monotonic() + self._reconcile_s
                    if time.monotonic() - run.claimed > _LOST_S:
                        await self._end_generator()

    async def _reconcile(self) -> None:
        """Makes what runs here agree with the store."""
        records = await self._store.jobs()
        record = records[-1] if records else None
        for earlier in records[:-1]:
            if earlier.state == "running":
                await self._store.save_job(replace(earlier, state="stopped"))
        if record is None or record.state != "running" or not await self._claim(record):
            await self._end_generator()
            return
        if self._run is not None and (self._run.id, self._run.payload) != (record.id, record.payload):
            await self._end_generator()
        run = self._run = self._run or _ClaimedJob(record.id, record.payload, claimed=0.0)
        run.claimed = time.monotonic()
        if run.ended is None:
            if run.not_before <= time.monotonic():
                await self._begin(run, record)
        elif run.ended.done():
            await self._settle(run, record, run.ended.result())
        elif record.error and self._has_progress(run):
            await self._store.save_job(replace(record, error="", traceback=""))

    async def _claim(self, record: JobRecord) -> bool:
        try:
            return await self._store.claim_job(record.id, self._server_id, STALE_AFTER_S)
        except StorageFullError:
            if self._run is None:
                raise
            return True  # no other server can claim it now, either

    async def _begin(self, run: _ClaimedJob, record: JobRecord) -> None:
        run.items = self._store.items_of_job
        finished = await self._store.finished(record.id)
        try:
            file = self._find_file(record.task)
            # It is checked again: the operator may allow less than when the job was started.
            payload, _ = self._rules.check(record.payload, shown_token=True)
            skips = payload["skip_instance_ids"]
            own: dict[str, Any] = {"job": record.id, "skip_instance_ids": skips}
            if not self._rules.are_operators(payload.get("remote_engine_url")):
                own["folders"] = self._rules.folders
            if payload.get("tools"):
                own["tools_file"] = str(self._tools_file)
            changed = {"remote_buffer_url": self.buffer_url, "skip_instance_ids": skips + finished}
            run.process = await GeneratorProcess.start(
                file.path,
                {**payload, **changed, "rollstream": own},
                log=self.log_of(record),
                netrc=self._directory / "generator.netrc",
                token=self._issue_token(record.id),
                mark=f"{self._server_id}-{record.id}",
            )
        except ConfigError as error:
            await self._settle(run, record, GeneratorEnd(permanent=True, error=f"ConfigError: {error}"))
        except OSError as error:
            await self._settle(run, record, GeneratorEnd(error=f"its process cannot be started: {error}"))
        else:
            run.ended = asyncio.create_task(run.process.wait(), name=f"generator of job {record.id}")
            run.ended.add_done_callback(lambda _: self._wake.set())

    async def _settle(self, run: _ClaimedJob, record: JobRecord, end: GeneratorEnd) -> None:
        """Stores how a generator ended. Where that fails, the next reconciliation tries again."""
        if end.finished:
            await self._store.save_job(replace(record, state="finished"))
            self._run = None
            _LOG.info("job %s is finished", record.id)
            return
        in_a_row = 1 if self._has_progress(run) else run.in_a_row + 1
        is_over = end.permanent or in_a_row >= self._crashes.max_attempts
        crashed = replace(record, crashes=record.crashes + 1, error=end.error, traceback=end.traceback)
        if is_over:
            crashed = await self._store.save_job(replace(crashed, state="failed"))
            self._run = None
            _LOG.error(
                "%s%s", self._failure(crashed)["message"], "" if end.permanent else f"\n{end.traceback}"
            )
        else:
            await self._store.save_job(crashed)
            wait = self._crashes.wait(in_a_row, self._random)
            run.process, run.ended, run.in_a_row = None, None, in_a_row
            run.not_before = time.monotonic() + wait
            _LOG.warning("%s (in %.1f s)", self._failure(crashed)["message"], wait)

    async def _end_generator(self) -> None:
        if (run := self._run) is not None and run.process is not None:
            run.id = ""  # should this be cancelled, the next reconciliation goes on with it
            await run.process.stop()
            if run.ended is not None:
                await asyncio.wait({run.ended})
        self._run = None

    def _find_file(self, task: str) -> GeneratorFile:
        if (file := self._files.files.get(task)) is not None:
            return file
        known = ", ".join(sorted(self._files.files)) or "none; start the server with --generators"
        why = f"task_type: no generator file has TASK_TYPE = {task!r:.100}. Known: {known}"
        raise ConfigError("; ".join([why, *self._files.problems]))

    def log_of(self, record: JobRecord) -> Path:
        """The file on this machine that has what a job's generator prints."""
        return self._directory / "logs" / f"generator-{record.id}.log"


def _work(payload: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a payload that tells jobs apart."""
    return {key: value for key, value in payload.items() if key not in ("skip_instance_ids", *_HOW)}
