"""Starts replicas as processes of this machine, each below a reaper, with a log and a port of its own."""

import contextlib
import os
import random
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollstream.childproc import how_ended
from rollstream.engine.launch.plan import LOOPBACK, ReplicaPlan
from rollstream.engine.reaped import ReapedProcess
from rollstream.errors import EngineError

_SHOWN_LINES, _SHOWN_BYTES = 20, 16_384
"""Of a log's end."""

_PORTS = range(20_000, 32_768)
"""Below the kernel's usual range for outgoing connections; a firewall of a cluster has to let them through."""
_PORT_TRIES = 200


class LocalLauncher:
    """Starts replicas here. `log_dir` gets one log for each, which all its starts share."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._stamp = log_stamp()

    def place(self, plans: Sequence[ReplicaPlan]) -> Sequence[ReplicaPlan]:
        """The plans of all replicas there will be. Called once, before any start."""
        return plans

    async def start(self, plan: ReplicaPlan) -> "LocalProcess":
        """Starts one; it is not ready yet. Raises `EngineError` when it cannot."""
        return await LocalProcess.start(plan, self._log_dir / f"replica-{plan.index}-{self._stamp}.log")

    async def close(self) -> None:
        """Gives back what is held for replicas, all of which were stopped. May be called twice."""


class LocalProcess:
    """A replica that was started. Made by `start`."""

    def __init__(
        self, process: ReapedProcess, port: socket.socket, command: str, log: Path, log_offset: int
    ) -> None:
        self._process, self._port = process, port
        self._log, self._log_offset = log, log_offset
        host, number = port.getsockname()[:2]
        self.url = f"http://[{host}]:{number}" if ":" in host else f"http://{host}:{number}"
        self.what = f"{command} (pid {process.pid}, log {log})"
        """Its process and log, for messages."""

    @classmethod
    async def start(
        cls,
        plan: ReplicaPlan,
        log_path: Path,
        *,
        host: str = LOOPBACK,
        mark: str | None = None,
        node: Mapping[str, str] | None = None,
    ) -> "LocalProcess":
        """Starts a replica that listens on an address of this machine; its log is appended to.

        `mark`: see `reaper.MARK`; `node`: see `ReplicaPlan.command`. Raises `EngineError`.
        """
        with contextlib.ExitStack() as stack:
            try:
                port = stack.enter_context(reserve_port(host))
                command = shlex.join(words := plan.command(port.getsockname()[1], node))
                log_path.parent.mkdir(parents=True, exist_ok=True)
                with log_path.open("ab") as log:
                    log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')} {command}\n".encode())
                    offset = log.tell()
                    log.flush()
                    env = {**os.environ, "PYTHONUNBUFFERED": "1", **plan.env}
                    process = await ReapedProcess.start(words, env, mark=mark, stdout=log, stderr=log)
            except OSError as error:  # no descriptor, process or disk space is left, perhaps for a moment
                raise EngineError(f"replica {plan.index} could not be started: {error}") from error
            stack.pop_all()
        return cls(process, port, command, log_path, offset)

    @property
    def pid(self) -> int:
        """The reaper's, which leads the replica's process group."""
        return self._process.pid

    async def wait(self) -> str:
        """Returns when it has ended, with how: `ended with exit code 1`, `was killed by SIGKILL`."""
        return how_ended(await self._process.wait())

    async def last_words(self) -> str:
        """The end of what it wrote since it was started; empty when it wrote nothing. Asked before `stop`."""
        try:
            with self._log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offset, size - _SHOWN_BYTES))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError as error:  # what there is to say of the replica is worth more than its log
            return f"(its log cannot be read: {error})"
        return "\n".join(lines[-_SHOWN_LINES:])

    async def stop(self) -> None:
        """Ends it and everything it started. May be called twice, and after its end."""
        await self._process.end()
        self._port.close()


def log_stamp() -> str:
    """Tells the logs of this run from those of others."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def reserve_port(host: str, rng: random.Random | None = None) -> socket.socket:
    """A socket that holds a free port of one of this machine's addresses, until it is closed.

    Nobody else gets the port, but for a server that is given its number: such servers set SO_REUSEADDR, and so
    does the socket once it is bound. The socket itself never listens. Raises `EngineError`.
    """
    rng = rng or random.Random()
    for _ in range(_PORT_TRIES):
        port = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            port.bind((host, rng.choice(_PORTS)))
        except OSError:
            port.close()
            continue
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return port
    raise EngineError(f"no free port from {_PORTS[0]} to {_PORTS[-1]} on {host} in {_PORT_TRIES} tries")
