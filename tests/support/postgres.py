"""A real PostgreSQL server for tests, which can be killed and started again.

PostgreSQL must be installed (Debian: `apt-get install postgresql`); it refuses to run as root, so root runs it as
the user `postgres`. Its data is not synced to the disk: tests kill processes, not machines.
"""

import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.launch.local import reserve_port
from tests.support.until import PATIENCE_S

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "60",
    "shared_buffers": "32MB",
    "autovacuum_naptime": "5s",
}


class PostgresServer:
    """`start` it, `stop` it, `kill` it. `url` stays the same."""

    def __init__(self, *, durable: bool = False) -> None:
        self._bin = _bin_folder()
        self._settings = _SETTINGS | ({"fsync": "on", "full_page_writes": "on"} if durable else {})
        self._user: dict[str, Any] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="rollstream-postgres-"))
        if os.getuid() == 0:
            shutil.chown(self.folder, "postgres", "postgres")
            self._user = {"user": "postgres", "group": "postgres", "extra_groups": []}
        self._data = str(self.folder / "data")
        self._process: subprocess.Popen[bytes] | None = None
        self._reserved = reserve_port("127.0.0.1")
        self.port: int = self._reserved.getsockname()[1]
        self._run("initdb", "-D", self._data, "-U", "rollstream", "-A", "trust", "-E", "UTF8", "--locale=C")

    @property
    def url(self) -> str:
        return f"postgresql://rollstream:not-checked@127.0.0.1:{self.port}/postgres"

    def start(self) -> None:
        """Returns when it takes connections."""
        settings = [f"--{name}={value}" for name, value in {**self._settings, "port": self.port}.items()]
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self._data, *settings],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                **self._user,
            )
        until = time.monotonic() + PATIENCE_S
        ready = [
            str(self._bin / "pg_isready"),
            "-q",
            "-h",
            "127.0.0.1",
            "-p",
            str(self.port),
            "-d",
            "postgres",
        ]
        while subprocess.run(ready).returncode:
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"PostgreSQL did not start: {(self.folder / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def stop(self) -> None:
        self._end(signal.SIGQUIT)

    def kill(self) -> None:
        """Kill -9 of all its processes: what it has not told the kernel is gone."""
        self._end(signal.SIGKILL)

    def _end(self, how: signal.Signals) -> None:
        process = self._process
        assert process is not None
        children = []
        if how == signal.SIGKILL:
            process.send_signal(signal.SIGSTOP)  # else it starts new ones
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            children = [os.pidfd_open(int(pid)) for pid in listed]
            for child in children:
                signal.pidfd_send_signal(child, how)
        process.send_signal(how)
        process.wait(PATIENCE_S)
        self._process = None
        for child in children:
            select.select([child], [], [], PATIENCE_S)  # until it has ended
            os.close(child)
        Path(self._data, "postmaster.pid").unlink(missing_ok=True)

    def remove(self) -> None:
        if self._process is not None:
            self.stop()
        self._reserved.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._bin / program, *arguments],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            **self._user,
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")


def _bin_folder() -> Path:
    if found := shutil.which("initdb"):
        return Path(found).resolve().parent
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda one: int(one.parent.name))
    if not folders:
        raise RuntimeError(
            "these tests need PostgreSQL: no initdb on the path or in /usr/lib/postgresql/*/bin"
        )
    return folders[-1]


def new_schema() -> str:
    """A name that no other test has."""
    return f"t{uuid.uuid4().hex}"


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """One for all tests of the session; each uses a schema of its own."""
    server = PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.remove()
