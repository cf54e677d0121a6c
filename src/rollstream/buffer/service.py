"""The buffer without HTTP: store, hooks and jobs, what runs beside requests, and what is reported to readers."""

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rollstream import plugins
from rollstream.buffer.groups import GroupSettings, summarize_rewards
from rollstream.buffer.items import Encoding, Item, ItemError, parse_items, parse_nth, split_batch
from rollstream.buffer.reads import Reads, Scope, TaskPolicy
from rollstream.buffer.store.base import Change, Group, Limits, Taken
from rollstream.buffer.store.sql import Database, SqlStore
from rollstream.buffer.store.sqlite import SqliteDatabase
from rollstream.errors import (
    BufferFullError,
    ConfigError,
    RollstreamError,
    RunDirectoryError,
    StorageFullError,
)
from rollstream.store.lock import LockHeldError, RunLock
from rollstream.surrogates import replace_in_json
from rollstream.web import HTTPError

_LOG = logging.getLogger(__name__)

_Seconds = Annotated[float, Meta(ge=0.1, le=30 * 86_400)]

_SWEEP_S: Final = 0.5

_ROOM_S: Final = 1.0
"""A write without room checks this often whether its client is still there."""

_BIG: Final = 2**20
"""A body from this size on is parsed in a process of its own."""

_MANY_NUMBERS: Final = 2**15
"""Tokens in JSON are parsed there from this size of a body on: they take ten times as long as texts."""

_PARSE_S: Final = 60.0
"""For that process to parse a body."""

_NOT_READY: Final[Mapping[str, str]] = {
    "open": "they lack items (--group-size, or a job's group_size)",
    "judging": "is_valid_group of their task has not spoken yet",
    "leased": "readers have them that have not acked (GET /v1/leases)",
}
"""Why groups of a state cannot be read."""


class BufferOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a buffer is set up; see `rollstream buffer serve --help`."""

    directory: Path
    store: str | None = None
    """URL of a PostgreSQL database; None: SQLite in the directory."""
    generators: tuple[str, ...] = ()
    inputs: tuple[Path, ...] = ()
    engines: tuple[str, ...] = ()
    tools: Path | None = None
    settings: GroupSettings = GroupSettings()
    limits: Limits = Limits()
    max_groups_per_read: Annotated[int, Meta(ge=1)] | None = None
    lease_seconds: _Seconds = 600.0
    hook_seconds: _Seconds = 60.0


class Service:
    """One server's buffer. `token`: what clients have to show, if anything."""

    def __init__(self, options: BufferOptions, token: str | None) -> None:
        self.options = options
        slime = plugins.load("rollstream.generators", "slime")
        self.hooks = slime.GeneratorFiles(options.generators, options.hook_seconds)
        self._parser = slime.HookProcess(_PARSE_S)
        self.policy = TaskPolicy(options.settings, self.hooks)
        self.store = SqlStore(_database(options), self.policy, options.limits)
        self.reads = Reads(self.store, self.hooks, self.policy)
        tools: frozenset[str] = frozenset()
        if options.tools is not None:
            from rollstream.chat.tool_schema import load_tool_schemas

            tools = frozenset(tool["function"]["name"] for tool in load_tool_schemas(str(options.tools)))
        self.jobs = slime.Jobs(
            self.store,
            self.hooks,
            directory=options.directory,
            rules=slime.PayloadRules(
                options.inputs, options.engines, forbidden=options.directory, tools=tools
            ),
            # The same after a restart on this folder.
            server_id=f"{socket.gethostname()}:{options.directory.resolve()}",
            group_defaults=options.settings,
            issue_token=self._issue_token,
            tools_file=options.tools,
        )
        self.closing = False
        self.held_writes = 0
        self._token = token
        self._job_token: tuple[str, str] | None = None
        """The token of the last job's generator, and the job."""
        self._room = asyncio.Event()
        self._lock = RunLock(options.directory / "buffer.lock")
        self._tasks: list[asyncio.Task[None]] = []
        self._dropped_unread: Counter[str] = Counter()
        """Since a reader got something last."""
        self._full = ""
        """The error of the last write, if it found no room and nothing has left since."""
        self.store.changed = self._on_change

    async def open(self) -> None:
        """Takes the folder, reads the generator files, opens the store.

        Raises:
            ConfigError: An option is wrong, or a generator file cannot be used.
            RunDirectoryError: The folder is another server's, or of another format.
        """
        folder = self.options.directory
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):  # another account's, which has let this one in
            folder.chmod(0o700)
        try:
            self._lock.acquire()
        except LockHeldError as error:
            raise RunDirectoryError(
                f"{folder} is another server's: {error.holder}. Stop it, or take another --dir"
            ) from error
        try:
            if self.options.generators:
                await self.hooks.refresh()
                if self.hooks.problems:
                    raise ConfigError("\n".join(self.hooks.problems))
                for task, file in sorted(self.hooks.files.items()):
                    own = ", ".join(sorted(file.overridden)) or "none"
                    _LOG.info("task %r: %s, own hooks: %s", task, file.path, own)
            await self.store.open()
        except BaseException:
            await self.hooks.close()
            self._lock.release()
            raise

    async def begin(self, url: str) -> None:
        """Goes on with the job that ran. `url`: where generators reach this server."""
        # By a name of its own, `localhost`: HTTP clients that send the generator's token to a host send it to all
        # of its ports, and engines are mostly at 127.0.0.1.
        for host, own in (("0.0.0.0", "localhost"), ("127.0.0.1", "localhost"), ("[::]", "[::1]")):
            url = url.replace(f"://{host}:", f"://{own}:")
        self.jobs.buffer_url = url
        for work in (self._sweep(), self.reads.judge()):
            self._tasks.append(asyncio.create_task(work))
        await self.jobs.resume()

    def end_waits(self) -> None:
        """Whoever waits is answered now: the server stops."""
        self.closing = True
        self._room.set()
        self.reads.wake()

    async def close(self) -> None:
        """Ends generators, hooks and the store, whatever user code does."""
        for task in self._tasks:
            task.cancel()
        await self.hooks.close()
        await self._parser.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(RollstreamError):
            await self.jobs.close()
        await self.store.close()
        self._lock.release()

    # -- writing

    async def parse(self, body: bytes, encoding: Encoding) -> tuple[list[Item], int]:
        """Checks items, without stopping the event loop for long. Raises `ItemError`.

        Returns:
            The items, and how many lone surrogates in them were replaced by U+FFFD. Writers of msgpack have none.
        """
        try:
            return await self._parse(body, encoding), 0
        except ItemError:
            if encoding == "msgpack":
                raise
            mended, replaced = replace_in_json(body)
            if not replaced:
                raise
            return await self._parse(mended, encoding), replaced

    async def _parse(self, body: bytes, encoding: Encoding) -> list[Item]:
        """See `parse`.

        What takes long is parsed in another process, since a parser keeps Python's lock: large items, and tokens in
        JSON. Others have their turn between small ones.
        """
        has_tokens = encoding == "json" and b'"response_ids"' in body
        if len(body) < (_MANY_NUMBERS if has_tokens else _BIG):
            return parse_items(body, encoding)
        bodies = None if has_tokens else split_batch(body, encoding)
        if bodies is None or max(map(len, bodies)) >= _BIG:
            return list(await self._parser.parse(body, encoding))
        items: list[Item] = []
        parsed = 0
        for number, one in enumerate(bodies):
            items.append(parse_nth(number, one, encoding))
            parsed += len(one)
            if parsed >= _BIG:
                parsed = 0
                await asyncio.sleep(0)
        return items

    async def write(self, items: Sequence[Item], *, hold: Callable[[], bool] | None = None) -> list[bool]:
        """Stores items; which of them were new.

        Args:
            items: All are stored or none.
            hold: Waits for room in place of raising `BufferFullError`, until this tells that the client is gone.
        """
        while True:
            self._room.clear()
            try:
                return await self.store.write(items)
            except (BufferFullError, StorageFullError) as error:
                if not self._full:
                    _LOG.warning("writers wait until groups leave: %s", error)
                self._full = str(error)
                waits = hold is not None and isinstance(error, BufferFullError)
                if not waits or len(items) > self.options.limits.items:
                    raise
            self.held_writes += 1
            try:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_ROOM_S):
                        await self._room.wait()
            finally:
                self.held_writes -= 1
            if hold is not None and hold():
                raise ConnectionResetError
            if self.closing:
                raise closing_error()

    # -- reporting

    def scope(self) -> Scope:
        """The groups that a trainer on slime's wire gets.

        What the job that it started made, or came in for its task from outside: never another job's rest.
        """
        last = self.store.last_job
        return Scope(None, None) if last is None else Scope(last.task, (last.id, ""))

    def group_size(self, task: str | None, job: str | None = None) -> int:
        """The size of a job's groups; the last job's by default."""
        record = self.store.known_jobs.get(job) if job else self.store.last_job
        if record is not None and task not in (None, record.task):
            record = None
        return self.policy.settings(task or "", record).group_size

    def is_blocked(self, scope: Scope) -> bool:
        """Whether a generator or hook fails that would bring these groups."""
        failing = any(scope.has(job["task_type"], job["job"]) for job in self.jobs.failures())
        return failing or any(scope.task in (None, task) for task in self.reads.paused)

    async def failures(self, scope: Scope) -> list[dict[str, Any]]:
        """The failures that keep groups from readers: of jobs, of hooks."""
        found: list[dict[str, Any]] = [
            job for job in self.jobs.failures() if scope.has(job["task_type"], job["job"])
        ]

        def add(error: str, message: str, **facts: Any) -> None:
            found.append({"error": error, "message": message, "final": False, **facts})

        for task, why in self.reads.paused.items():
            if scope.task in (None, task):
                add(why, why, task_type=task)
        if self._full:
            add(self._full, f"writers wait until groups leave: {self._full}")
        groups = await self.store.groups(state="quarantined", task=scope.task, jobs=scope.jobs, limit=100)
        if groups:
            last, count = groups[-1], f"{len(groups)}{' or more' * (len(groups) == 100)}"
            error = (last.cause or "").strip().rpartition("\n")[2]
            why = f"{count} groups are quarantined, the last one by {last.reason}: {error}"
            why += " (GET /v1/groups?state=quarantined)"
            add(error, why, task_type=last.task, traceback=last.cause)
        return found

    async def notices(self, taken: Taken, scope: Scope) -> list[str]:
        """Why there may be nothing for a reader although nothing fails."""
        found = self.drop_notices()
        counts = (await self.store.stats()).groups
        if counts["ready"] and not self.is_blocked(scope):
            found.append(f"{counts['ready']} groups are ready, {taken.available} of them fit this read")
        if taken.stale:
            found.append(f"{taken.stale} groups are older than max_staleness allows")
        found += [
            f"{counts[state]} groups are {state}: {why}" for state, why in _NOT_READY.items() if counts[state]
        ]
        last = self.store.last_job
        if last is None or not scope.has(last.task, last.id):
            return found
        job = f"job {last.id} of task {last.task!r} "
        if last.state == "running":
            written, expected = self.store.items_of_job, f" of {last.expected}" if last.expected else ""
            job += f"has run for {max(0.0, time.time() - last.started):.0f} s and written {written}{expected} items"
            found.append(f"{job}; log: {self.jobs.log_of(last)}")
        elif taken.available:
            found.append(f"{job}is {last.state}: POST /v1/read with max_groups takes the last groups")
        elif not await self.store.has_groups(last.id):
            found.append(f"{job}is {last.state} and all of it has left the buffer")
        return found

    def drop_notices(self) -> list[str]:
        """The groups dropped since a reader got something last, by reason."""
        if not (counts := self._dropped_unread):
            return []
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
        where = "GET /v1/groups?state=dropped lists them"
        return [f"{counts.total()} groups were dropped since a read got some: {reasons}; {where}"]

    def note_read(self, groups: Sequence[Group], consumer: str | None) -> None:
        """Logs what a reader got."""
        if groups:
            rewards = [reward for group in groups for reward in group.rewards if reward is not None]
            mean = summarize_rewards([rewards], raw=True)["avg_reward"] if rewards else math.nan
            items = sum(group.n for group in groups)
            by = f" by {consumer}" if consumer else ""
            _LOG.info("read%s: %d groups, %d items, mean reward %.3f", by, len(groups), items, mean)
            self._dropped_unread.clear()

    # -- in the background

    def job_of_token(self, token: str) -> str | None:
        """The job whose generator has this token."""
        if self._job_token is None:
            return None
        known, job = self._job_token
        return job if secrets.compare_digest(known.encode(), token.encode(errors="replace")) else None

    def _issue_token(self, job: str) -> str | None:
        if self._token is None:
            return None
        self._job_token = secrets.token_urlsafe(32), job  # one job at a time
        return self._job_token[0]

    def _on_change(self, change: Change) -> None:
        self.reads.on_change(change)
        if change.room:
            self._room.set()
            self._full = ""
        for reason, count in change.dropped.items():
            self._dropped_unread[reason] += count

    async def _sweep(self) -> None:
        trouble = ""
        while True:
            more, error = 0, ""
            try:
                more = await self.store.sweep()  # it works in slices
            except RollstreamError as failure:
                error = str(failure)
                if error != trouble:
                    _LOG.error("%s", error)
            trouble = error
            await asyncio.sleep(0 if more else _SWEEP_S)


def closing_error() -> HTTPError:
    """For whoever waits when the server stops."""
    return HTTPError(503, "the server stops", "closing", headers={"retry-after": "1"})


def _database(options: BufferOptions) -> Database:
    if options.store is None:
        return SqliteDatabase(options.directory)
    if not options.store.startswith(("postgresql://", "postgres://")):
        raise ConfigError(
            f"--store: {options.store!r:.100} is no URL of a database: postgresql://host/database"
        )
    from rollstream.buffer.store.postgres import PostgresDatabase

    return PostgresDatabase(options.store)
