"""One run of a generator: a process below a guard, its payload, its report and its log.

    server --(pipe)--> guard --> python -m rollstream.buffer.run_generator FILE … --> what it starts

The guard (`engine.launch_guard`) ends the generator and all below it when the server is gone, SIGKILL
included: two generators of one rollout would write every group twice.
"""

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollstream.engine import launch_guard
from rollstream.engine.launch_process import kill_left

_LOG = logging.getLogger(__name__)

_STOP_TIMEOUT_S = launch_guard.GRACE_S + 3.0
"""For the guard, which kills after its own grace; then its process group is killed."""

_LOG_BYTES = 32 << 20
"""A log is cut back to its last part when it is larger than this: generators of other frameworks print every
item, and run for weeks."""
_LOG_KEPT_BYTES = 1 << 20
_LOG_LOOK_S = 30.0

_LAST_LINES = 20
_LAST_BYTES = 16_384

FINISHED, CRASHED, HOPELESS = 0, 1, 2
"""Exit codes of `run_generator`: done; an error; an error that a restart does not mend."""


@dataclass(frozen=True, slots=True)
class GeneratorEnd:
    """How a run of a generator ended."""

    finished: bool
    hopeless: bool
    """A restart would end in the same way."""
    error: str
    """In one line; empty when it finished."""
    traceback: str


class GeneratorProcess:
    """A generator that runs. Made by `start`."""

    def __init__(
        self, process: asyncio.subprocess.Process, folder: Path, log_path: Path, offset: int, mark: str
    ) -> None:
        self._process = process
        self._folder = folder
        self._log_path = log_path
        self._log_offset = offset
        self._mark = mark

    @property
    def pid(self) -> int:
        """Of the guard, which leads the process group."""
        return self._process.pid

    @classmethod
    async def start(
        cls, file: Path, data: dict[str, Any], *, folder: Path, log_path: Path, mark: str
    ) -> "GeneratorProcess":
        """Starts a generator.

        Args:
            file: the generator file.
            data: what its `run_rollout` is called with.
            folder: of this rollout, for the payload and the report; only this user may look into it.
            log_path: gets what it writes, which is appended.
            mark: the same for every run of one rollout: what an earlier one left behind is ended first.

        Raises:
            OSError: the disk is full, or no process is left.
        """
        ended = asyncio.ensure_future(
            asyncio.to_thread(kill_left, mark, {}, f"an earlier generator of {file.name}")
        )
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            await asyncio.wait({ended})  # else it could find, and end, the next one with this mark
            raise
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        log_path.parent.mkdir(parents=True, exist_ok=True)
        payload, report = folder / "payload.json", folder / "report.json"
        report.unlink(missing_ok=True)
        _write_private(payload, orjson.dumps(data))
        with log_path.open("ab") as log:
            log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} run_rollout of {file}\n".encode())
            log.flush()
            offset = log.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", launch_guard.__file__, str(os.getpid())),
                *(sys.executable, "-m", "rollstream.buffer.run_generator", str(file.absolute())),
                *("--payload", str(payload.absolute()), "--report", str(report.absolute())),
                stdin=asyncio.subprocess.PIPE,  # held open as long as the generator is wanted
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", launch_guard.MARK: mark},
                start_new_session=True,
            )
        return cls(process, folder, log_path, offset, mark)

    async def wait(self) -> GeneratorEnd:
        """Returns when it has ended, and all that it started. Keeps its log short until then."""
        ended = asyncio.ensure_future(self._process.wait())
        try:
            while not (await asyncio.wait({ended}, timeout=_LOG_LOOK_S))[0]:
                await asyncio.to_thread(self._cut_log)
        finally:
            ended.cancel()
        code = await self._process.wait()
        if code < 0:  # it may have been the guard: then nobody looked after the others
            self._kill_group()
            await asyncio.to_thread(kill_left, self._mark, {}, f"generator {self.pid}")
        return await asyncio.to_thread(self._end, code)

    async def stop(self) -> None:
        """Ends it and everything it started. May be called twice, and after its end."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # which tells the guard
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await self._process.wait()
        except TimeoutError:
            self._kill_group()
            await self._process.wait()
        await asyncio.to_thread(kill_left, self._mark, {}, f"generator {self.pid}")

    def _kill_group(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _end(self, code: int) -> GeneratorEnd:
        if code == FINISHED:
            return GeneratorEnd(finished=True, hopeless=False, error="", traceback="")
        said = _read_report(self._folder / "report.json")
        how = _how(code)
        if said is None:
            words = self._last_words()
            return GeneratorEnd(finished=False, hopeless=False, error=how, traceback=words)
        error, traceback = said
        return GeneratorEnd(finished=False, hopeless=code == HOPELESS, error=error, traceback=traceback)

    def _last_words(self) -> str:
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                start = self._log_offset if self._log_offset <= size else 0
                log.seek(max(start, size - _LAST_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError as error:
            return f"(its log cannot be read: {error})"
        return "\n".join(lines[-_LAST_LINES:])

    def _cut_log(self) -> None:
        try:
            cut_log(self._log_path, most=_LOG_BYTES, kept=_LOG_KEPT_BYTES)
        except OSError as error:  # a full disk: the generator goes on, and the log is looked at again
            _LOG.warning("the log %s cannot be cut: %s", self._log_path, error)


def cut_log(path: Path, *, most: int, kept: int) -> bool:
    """Empties a log of more than `most` bytes; its last `kept` bytes go to `NAME.old`. Says whether it did.

    Its writers append, so they go on at its new end; what they write between the copy and the cut is lost.
    """
    if path.stat().st_size <= most:
        return False
    old = path.with_name(path.name + ".old")
    with path.open("rb") as log, old.open("wb") as copy:
        log.seek(-kept, os.SEEK_END)
        shutil.copyfileobj(log, copy)
    os.truncate(path, 0)
    return True


def _how(code: int) -> str:
    if code >= 0:
        return f"its process ended with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"its process was killed by {known.get(-code, f'signal {-code}')}"


def _read_report(path: Path) -> tuple[str, str] | None:
    try:
        report = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return None  # killed before or while it wrote
    return str(report["error"]), str(report["traceback"])


def _write_private(path: Path, content: bytes) -> None:
    """Writes a file that only this user may read: the payload has the buffer's token."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
