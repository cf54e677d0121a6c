"""Child processes below a reaper: how they are started and ended."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable, Mapping
from typing import Any
from uuid import uuid4

from rollstream.engine import reaper


class ReapedProcess:
    """A command below a reaper of its own. Made by `start`."""

    def __init__(self, process: asyncio.subprocess.Process, mark: str) -> None:
        self._process, self._mark = process, mark

    @classmethod
    async def start(
        cls,
        words: Iterable[str],
        env: Mapping[str, str],
        *,
        mark: str | None = None,
        bounds: reaper.Bounds | None = None,
        **options: Any,
    ) -> "ReapedProcess":
        """Starts a command in a session of its own.

        `env` is its whole environment, but for the mark (see `reaper.MARK`; None takes one); `options` are those
        of `asyncio.create_subprocess_exec`. Raises `OSError`.
        """
        mark = mark or uuid4().hex
        process = await asyncio.create_subprocess_exec(
            *reaper.reaped(words, bounds),
            stdin=asyncio.subprocess.PIPE,  # held open as long as the command is wanted
            env={**env, reaper.MARK: mark},
            start_new_session=True,
            **options,
        )
        return cls(process, mark)

    @property
    def pid(self) -> int:
        """The reaper's, which leads the process group."""
        return self._process.pid

    async def wait(self) -> int:
        """The exit code, once the command and everything that it started have ended; below 0 the signal."""
        code = await self._process.wait()
        if code < 0:  # it may have been the reaper: then nobody looked after the others
            await self._kill_left()
        return code

    async def end(self, seconds: float = reaper.STOP_TIMEOUT_S) -> int:
        """Ends it and everything that it started; returns the exit code. May be called twice, and after its end.

        The reaper has so many seconds to do so; then all are killed.
        """
        self.kill()
        try:
            async with asyncio.timeout(seconds):
                return await self.wait()
        except TimeoutError:
            await self._kill_left()
            return await self._process.wait()

    def kill(self) -> None:
        """Has the reaper end all; does not wait for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def _kill_left(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(reaper.kill_left, self._mark)
