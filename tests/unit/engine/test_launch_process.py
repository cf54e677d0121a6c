"""A replica as processes of this machine, found again when its guard is killed."""

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from rollstream.engine import launch_process
from rollstream.engine.launch_plan import ReplicaPlan
from rollstream.engine.launch_process import LocalLauncher, LocalProcess
from rollstream.errors import EngineError
from tests.unit.engine.launching import command_line, running, servers_of, small_server

SCATTERED = """
import ctypes, http.server, pathlib, subprocess, sys
folder, port = pathlib.Path(sys.argv[1]), int(sys.argv[sys.argv.index("--port") + 1])
wait = "import time; time.sleep(600)"
# In sessions of their own; the second as a process that writes its title over its environment looks.
for env in (None, {}):
    subprocess.Popen([sys.executable, "-I", "-c", wait, str(folder)], start_new_session=True, env=env)
http.server.ThreadingHTTPServer(("127.0.0.1", port), http.server.BaseHTTPRequestHandler).serve_forever()
"""


async def scattered(folder: Path) -> LocalProcess:
    """A replica of three processes in three sessions, seen to listen."""
    plan = ReplicaPlan(0, (), {}, (sys.executable, "-c", SCATTERED, str(folder)))
    process = await LocalLauncher(folder / "logs").start(plan)
    async with asyncio.timeout(60):
        while not (await process.is_listening() and len(servers_of(str(folder))) == 3):
            await asyncio.sleep(0.02)
    return process


async def test_nothing_of_a_replica_stays_when_its_guard_is_killed(tmp_path: Path) -> None:
    process = await scattered(tmp_path)
    try:
        assert await process.is_listening()
        os.kill(process.pid, signal.SIGKILL)
        assert await process.wait() == "was killed by SIGKILL"
        assert not running(str(tmp_path))
    finally:
        await process.stop()


async def test_who_waits_and_is_cancelled_does_not_keep_others_from_it(tmp_path: Path) -> None:
    process = await scattered(tmp_path)
    waiting = asyncio.ensure_future(process.wait())
    await asyncio.sleep(0)
    os.kill(process.pid, signal.SIGKILL)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await process.stop()
    assert not running(str(tmp_path))


async def test_another_replica_is_left_alone(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    first, second = [await scattered(folder) for folder in folders]
    os.kill(first.pid, signal.SIGKILL)
    await first.wait()
    assert not running(str(folders[0]))
    assert len(servers_of(str(folders[1]))) == 3
    await first.stop()
    await second.stop()
    assert not running(str(tmp_path))


async def test_what_the_machine_refuses_is_an_engine_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class NoPort:
        def __init__(self) -> None:
            raise OSError(errno.EMFILE, "Too many open files")

    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match=r"replica 7 could not be started: .*(Not a directory|File exists)"):
        await LocalLauncher(tmp_path / "file").start(small_server(tmp_path, 7))
    monkeypatch.setattr(launch_process, "ReservedPort", NoPort)
    with pytest.raises(EngineError, match=r"replica 7 could not be started: .*Too many open files"):
        await LocalLauncher(tmp_path / "logs").start(small_server(tmp_path, 7))


async def test_a_log_that_is_gone_is_said(tmp_path: Path) -> None:
    process = await LocalLauncher(tmp_path / "logs").start(small_server(tmp_path))
    try:
        for log in (tmp_path / "logs").iterdir():
            log.unlink()
        assert "its log cannot be read" in await process.last_words()
    finally:
        await process.stop()
    assert not command_line(process.pid)
