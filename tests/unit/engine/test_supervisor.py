"""One replica is kept running, with real processes."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.launch_plan import ReplicaPlan
from rollstream.engine.launch_process import LocalLauncher, LocalProcess
from rollstream.engine.ports import ReservedPort
from rollstream.engine.restarts import Restarts
from rollstream.engine.supervisor import Supervisor
from rollstream.errors import EngineError
from tests.unit.engine.launching import KWARGS, running, servers_of, small_server


class Watched:
    """A supervisor, what it told, and its task."""

    def __init__(self, folder: Path, launcher: Any = None, **changes: Any) -> None:
        self.folder = folder
        self.told: list[tuple[str, str]] = []
        self.refusal: EngineError | None = None
        self.excused = False
        settings: dict[str, Any] = {
            "restarts": Restarts(first=0.05, longest=0.2, most_failures=2),
            "startup_timeout": 60.0,
            "unhealthy_timeout": 60.0,
        }
        self.supervisor = Supervisor(
            small_server(folder),
            launcher or LocalLauncher(folder / "logs"),
            kwargs=KWARGS,
            take_in=self._tell("in"),
            leave_out=self._tell("out"),
            is_excused=lambda: self.excused,
            **(settings | changes),
        )
        self.task: asyncio.Task[None] | None = None

    def _tell(self, what: str) -> Callable[[str], Awaitable[None]]:
        async def tell(url: str) -> None:
            self.told.append((what, url))
            if what == "in" and self.refusal is not None:
                raise self.refusal

        return tell

    async def __aenter__(self) -> "Watched":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
        await self.supervisor.stop()
        assert not running(str(self.folder))

    async def serve(self) -> str:
        url = await self.supervisor.start()
        self.task = asyncio.create_task(self.supervisor.run())
        return url

    def kill_server(self) -> None:
        for pid in servers_of(str(self.folder)):
            os.kill(pid, signal.SIGKILL)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


async def test_a_killed_replica_comes_back_on_another_port(tmp_path: Path) -> None:
    async with Watched(tmp_path) as watched:
        first = await watched.serve()
        assert watched.supervisor.state == "serving"
        watched.kill_server()
        await watched.until(lambda: len(watched.told) == 2 and watched.supervisor.state == "serving")
        assert watched.told[0] == ("out", first)
        assert watched.told[1][0] == "in"
        assert watched.told[1][1] != first
        assert watched.supervisor.restarted == 1


async def test_a_killed_guard_takes_its_server_along_and_is_replaced(tmp_path: Path) -> None:
    async with Watched(tmp_path) as watched:
        await watched.serve()
        server = servers_of(str(tmp_path))
        for pid in set(running(str(tmp_path))) - set(server):
            os.kill(pid, signal.SIGKILL)
        await watched.until(lambda: len(watched.told) == 2 and watched.supervisor.state == "serving")
        assert not set(server) & set(running(str(tmp_path)))


async def test_one_that_cannot_start_shows_command_exit_code_and_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "broken").touch()
    async with Watched(tmp_path) as watched:
        with pytest.raises(EngineError) as raised:
            await watched.supervisor.start()
        message = str(raised.value)
        assert message.startswith("replica 0 ended with exit code 1 before it was healthy\n  command: ")
        assert str(tmp_path) in message
        assert message.endswith("    line 28\n    line 29\n    no such model")
        assert "line 11\n" in message  # twenty lines
        assert "line 10\n" not in message
        assert watched.told == []


async def test_one_that_is_not_ready_in_time_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "loading").touch()
    async with Watched(tmp_path, startup_timeout=0.5) as watched:
        with pytest.raises(EngineError, match=r"not healthy within 0\.5 s .*startup_timeout\)"):
            await watched.supervisor.start()
        assert not running(str(tmp_path))


@pytest.mark.parametrize("how", ["deaf", "ill"])
async def test_one_that_runs_and_is_not_healthy_for_long_is_replaced(tmp_path: Path, how: str) -> None:
    async with Watched(tmp_path, unhealthy_timeout=1.0) as watched:
        first = await watched.serve()
        watched.excused = True
        (tmp_path / how).touch()
        await asyncio.sleep(1.5)  # longer than it may be unhealthy when it is not excused
        assert (watched.told, watched.supervisor.state) == ([], "serving")
        watched.excused = False
        await watched.until(lambda: watched.told == [("out", first)])
        assert "not healthy for 1 s" in watched.supervisor.cause
        (tmp_path / how).unlink()
        await watched.until(lambda: watched.supervisor.state == "serving")


async def test_it_is_given_up_after_failed_starts_in_a_row(tmp_path: Path) -> None:
    async with Watched(tmp_path) as watched:
        await watched.serve()
        (tmp_path / "broken").touch()
        watched.kill_server()
        assert watched.task is not None
        async with asyncio.timeout(60):
            await watched.task
        assert watched.supervisor.state == "given up"
        assert watched.supervisor.restarted == 3  # two may fail
        assert "no such model" in watched.supervisor.cause
        assert not running(str(tmp_path))


async def test_one_that_is_refused_counts_as_a_failed_start(tmp_path: Path) -> None:
    async with Watched(tmp_path) as watched:
        await watched.serve()
        watched.refusal = EngineError("another kind of server")
        watched.kill_server()
        assert watched.task is not None
        async with asyncio.timeout(60):
            await watched.task
        assert watched.supervisor.state == "given up"
        assert watched.supervisor.cause == "another kind of server"


class _TakenOnce:
    """Gives out a port first that another program has taken meanwhile."""

    def __init__(self, folder: Path, taken: int) -> None:
        self._local = LocalLauncher(folder / "logs")
        self._log = folder / "taken.log"
        self._taken = taken
        self.starts = 0

    async def start(self, plan: ReplicaPlan) -> LocalProcess:
        self.starts += 1
        if self.starts > 1:
            return await self._local.start(plan)
        port = ReservedPort()
        port.release()
        port.number = self._taken
        return await LocalProcess.start(plan, port, self._log)


@pytest.mark.parametrize("kind", ["healthy", "no HTTP", "silent"])
async def test_another_programs_server_is_not_taken_for_ours(tmp_path: Path, kind: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if kind == "silent":
            await reader.read()  # until the other side is tired of waiting
        elif kind == "healthy":
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        else:
            writer.write(b"-ERR unknown command\r\n")
        writer.close()

    other = await asyncio.start_server(answer, "127.0.0.1", 0)
    taken = other.sockets[0].getsockname()[1]
    launcher = _TakenOnce(tmp_path, taken)
    async with other, Watched(tmp_path, launcher) as watched:
        url = await watched.supervisor.start()
        assert launcher.starts == 2
        assert url != f"http://127.0.0.1:{taken}"


async def test_a_stop_while_it_starts_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "loading").touch()
    async with Watched(tmp_path) as watched:
        starting = asyncio.create_task(watched.supervisor.start())
        await watched.until(lambda: bool(servers_of(str(tmp_path))))
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await watched.supervisor.stop()
        assert not running(str(tmp_path))
