"""What starts a replica and tells when it has ended: a protocol, and the way that does it on this machine."""

import asyncio
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from rollstream.engine import launch_guard
from rollstream.engine.launch_plan import ReplicaPlan
from rollstream.engine.ports import ReservedPort, holds_socket, is_free, listening_inodes
from rollstream.errors import EngineError

_LOG = logging.getLogger(__name__)

_SHOWN_LINES = 20
_SHOWN_BYTES = 16_384
"""Of a log's end, to find the last lines in."""

STOP_TIMEOUT_S = launch_guard.GRACE_S + 3.0
"""For the guard, which kills after its own grace; then it is killed itself."""

_KILL_LEFT_S = 5.0
"""For processes that are killed to be gone: one that holds a device's memory takes a second or two."""


class ReplicaProcess(Protocol):
    """A replica that was started, wherever it runs."""

    @property
    def url(self) -> str:
        """Where it listens, or will."""
        ...

    @property
    def what(self) -> str:
        """Its process and log, for messages."""
        ...

    async def wait(self) -> str:
        """Returns when it has ended, with how: `ended with exit code 1`, `was killed by SIGKILL`."""
        ...

    async def is_listening(self) -> bool:
        """Whether it, and nobody else, listens at `url`."""
        ...

    async def is_port_taken(self) -> bool:
        """Once it has ended: whether another program has its port."""
        ...

    async def last_words(self) -> str:
        """The end of what it wrote since it was started; empty when it wrote nothing."""
        ...

    async def stop(self) -> None:
        """Ends it and everything it started. May be called twice, and after its end."""
        ...


class Launcher(Protocol):
    """Starts replicas."""

    def place(self, plans: Sequence[ReplicaPlan]) -> Sequence[ReplicaPlan]:
        """The plans of all replicas there will be, from those that were made. Called once, before any start.

        Raises `ConfigError` when there is no place for them.
        """
        ...

    async def start(self, plan: ReplicaPlan) -> ReplicaProcess:
        """Starts one; it is not ready yet. Raises `EngineError` when it cannot."""
        ...

    async def close(self) -> None:
        """Gives back what it holds for replicas, all of which were stopped. May be called twice."""
        ...


class LocalLauncher:
    """Starts replicas as processes of this machine.

    Args:
        log_dir: gets one log for each replica, which all its starts share.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"

    def log_path(self, index: int) -> Path:
        """The log of a replica."""
        return self._log_dir / f"replica-{index}-{self._stamp}.log"

    def place(self, plans: Sequence[ReplicaPlan]) -> Sequence[ReplicaPlan]:
        return plans

    async def close(self) -> None:
        return

    async def start(self, plan: ReplicaPlan) -> "LocalProcess":
        try:
            port = ReservedPort()
            try:
                return await LocalProcess.start(plan, port, self.log_path(plan.index))
            except BaseException:
                port.release()
                raise
        except OSError as error:  # no descriptor, process or disk space is left, perhaps for a moment
            raise EngineError(f"replica {plan.index} could not be started: {error}") from error


class LocalProcess:
    """A replica below a guard of its own (see `launch_guard`). Made by `start`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        command: Sequence[str],
        port: ReservedPort,
        log_path: Path,
        log_offset: int,
        mark: str,
    ) -> None:
        self._process = process
        self._command = list(command)
        self._port = port
        self._log_path = log_path
        self._log_offset = log_offset
        self._mark = mark
        self._family: dict[int, int] = {}
        """Processes below the guard by pid, see `launch_guard.begun`: some overwrite their environment, with
        a title that they show in its place."""
        self._killing: asyncio.Future[None] | None = None

    @classmethod
    async def start(
        cls,
        plan: ReplicaPlan,
        port: ReservedPort,
        log_path: Path,
        *,
        mark: str | None = None,
        node: Mapping[str, str] | None = None,
    ) -> "LocalProcess":
        """Starts a replica on a port, which it takes over.

        Args:
            plan: what is started.
            port: where it will listen.
            log_path: its log, which is appended to.
            mark: the value of `launch_guard.MARK`, never used before; None takes one.
            node: see `ReplicaPlan.command`.
        """
        command = plan.command(port.number, node)
        mark = mark or uuid4().hex
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {shlex.join(command)}\n".encode())
            log.flush()
            offset = log.tell()
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", launch_guard.__file__, str(os.getpid()), *command),
                stdin=asyncio.subprocess.PIPE,  # held open as long as the replica is wanted
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **plan.env, launch_guard.MARK: mark},
                start_new_session=True,
            )
        return cls(process, command, port, log_path, offset, mark)

    @property
    def url(self) -> str:
        host = self._port.host
        return f"http://[{host}]:{self._port.number}" if ":" in host else f"http://{host}:{self._port.number}"

    @property
    def what(self) -> str:
        return f"{shlex.join(self._command)} (pid {self._process.pid}, log {self._log_path})"

    @property
    def pid(self) -> int:
        """Of the guard, which leads the replica's process group."""
        return self._process.pid

    async def wait(self) -> str:
        code = await self._process.wait()
        if code >= 0:
            return f"ended with exit code {code}"
        # It may have been the guard itself: then nobody looked after the others.
        await self._kill_left()
        known = {number.value: number.name for number in signal.Signals}
        return f"was killed by {known.get(-code, f'signal {-code}')}"

    async def is_listening(self) -> bool:
        return await asyncio.to_thread(self._is_listening)

    async def is_port_taken(self) -> bool:
        return not is_free(self._port.number, self._port.host)

    async def last_words(self) -> str:
        try:
            with self._log_path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offset, size - _SHOWN_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError as error:  # what there is to say of the replica is worth more than its log
            return f"(its log cannot be read: {error})"
        return "\n".join(lines[-_SHOWN_LINES:])

    async def stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()  # which tells the guard
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self.wait()
        except TimeoutError:
            self._kill_group()
            await self._process.wait()
            await self._kill_left()
        self._port.release()

    async def _kill_left(self) -> None:
        """Kills what a guard that was killed leaves behind, once."""
        if self._killing is None:
            self._kill_group()
            self._killing = asyncio.ensure_future(asyncio.to_thread(self._kill_family))
        await asyncio.shield(self._killing)

    def _kill_group(self) -> None:
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _kill_family(self) -> None:
        """What has the replica's mark, or was below the guard when the replica was last seen to listen."""
        kill_left(self._mark, self._family, self.what)

    def _is_listening(self) -> bool:
        if sys.platform != "linux":
            return True
        inodes = listening_inodes(self._port.number)
        members = launch_guard.below(self._process.pid)
        if not any(holds_socket(pid, inodes) for pid in members):
            return False
        self._family = launch_guard.begun(members)
        return True


def kill_left(mark: str, family: Mapping[int, int], what: str) -> None:
    """Kills what a replica has left behind on this machine: returns when it is gone, or after a few seconds.

    Args:
        mark: of its start.
        family: processes that were seen below its guard, see `launch_guard.begun`.
        what: whose, for a message.
    """
    deadline = time.monotonic() + _KILL_LEFT_S
    trouble: object = None
    while time.monotonic() < deadline:
        try:
            left = launch_guard.marked(mark) | launch_guard.still(family)
            if not left:
                return
            trouble = sorted(left)
            launch_guard.kill(left, signal.SIGKILL)
        except OSError as error:  # no descriptor is left to look at processes with, perhaps for a moment
            trouble = error
        time.sleep(0.02)
    _LOG.error("what %s left behind may still run: %s", what, trouble)
