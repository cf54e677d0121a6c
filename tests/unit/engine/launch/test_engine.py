"""The engine of launched replicas: what is planned is started, watched, and started again."""

import asyncio
import errno
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.launch import local
from rollstream.engine.launch.engine import LaunchedEngine
from rollstream.engine.launch.local import LocalLauncher, LocalProcess, reserve_port
from rollstream.engine.launch.plan import LaunchRequest, ReplicaPlan
from rollstream.engine.replica import Replica
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import SamplingParams
from tests.support.launching import SmallReplica, servers_of, small_server
from tests.support.processes import running
from tests.support.until import until


@asynccontextmanager
async def launched(
    folder: Path, count: int = 1, *, make_replica: Callable[[str], Replica] = SmallReplica, **request: Any
) -> AsyncIterator[LaunchedEngine]:
    """An engine of small servers, each with a folder `0`, `1`, …"""
    plans = []
    for index in range(count):
        (folder / str(index)).mkdir(exist_ok=True)
        plans.append(small_server(folder / str(index), index))
    settings: dict[str, Any] = {"restart_delay": 0.05, "restart_delay_max": 0.2, "max_restarts": 1}
    engine = LaunchedEngine(
        plans,
        LocalLauncher(folder / "logs"),
        make_replica=make_replica,
        request=LaunchRequest(**(settings | request)),
    )
    try:
        yield engine
    finally:
        await engine.close()
        assert not running(str(folder))


def kill(folder: Path, *indices: int) -> None:
    """The servers of some replicas."""
    for index in indices:
        for pid in servers_of(str(folder / str(index))):
            os.kill(pid, signal.SIGKILL)


async def ask(engine: LaunchedEngine, name: str = "r") -> int:
    return len((await engine.generate([1, 2], SamplingParams(8), request_id=name)).token_ids)


async def test_replicas_come_and_go_and_requests_are_served_by_the_others(tmp_path: Path) -> None:
    async with launched(tmp_path, 3) as engine:
        await engine.start()
        first = engine.replicas
        assert len(first) == 3 and await ask(engine) == 8
        kill(tmp_path, 0, 1)
        assert await asyncio.gather(*(ask(engine, f"r{i}") for i in range(20))) == [8] * 20
        assert await engine.health()
        await until(lambda: engine.restarts == 2 and engine.replica_counts() == (3, 3))
        kill(tmp_path, 0, 1, 2)
        await until(lambda: engine.replica_counts() == (0, 3))
        with pytest.raises(EngineUnavailableError):
            await ask(engine)
        await until(lambda: engine.restarts == 5 and engine.replica_counts() == (3, 3))
        assert await engine.health() and await ask(engine) == 8
        # Each start has a port of its own, and nothing that is gone is left in the pool.
        assert len(engine.replicas) == 3 and not {*first} & {*engine.replicas}
    with pytest.raises(EngineUnavailableError, match="closed"):
        await ask(engine)
    await engine.close()


async def test_a_restarted_replica_gets_the_current_weights(tmp_path: Path) -> None:
    made: list[SmallReplica] = []

    def make(url: str) -> SmallReplica:
        made.append(SmallReplica(url))
        return made[-1]

    async with launched(tmp_path, make_replica=make) as engine:
        await engine.start()
        await engine.update_weights("/step3", 3)
        kill(tmp_path, 0)
        await until(lambda: engine.restarts == 1 and len(engine.ready) == 1)
        assert made[-1].loads == [3]


class Another(SmallReplica):
    async def describe(self) -> Any:
        await super().describe()
        raise EngineError("another model")


@pytest.mark.parametrize(
    ("make_replica", "message"),
    [
        (SmallReplica, r"not healthy within 0\.5 s"),
        (Another, r"another model\n  command: "),
    ],
)
async def test_one_that_is_not_ready_in_time_or_something_else_fails_the_start(
    tmp_path: Path, make_replica: type[SmallReplica], message: str
) -> None:
    timeout = 0.5 if make_replica is SmallReplica else 60.0
    async with launched(tmp_path, make_replica=make_replica, startup_timeout=timeout) as engine:
        if make_replica is SmallReplica:
            (tmp_path / "0" / "loading").touch()
        with pytest.raises(EngineError, match=message):
            await engine.start()


async def test_one_that_is_not_healthy_for_long_is_replaced(tmp_path: Path) -> None:
    async with launched(tmp_path, unhealthy_timeout=0.5) as engine:
        await engine.start()
        (tmp_path / "0" / "ill").touch()
        await until(lambda: "not healthy for 0.5 s" in engine.supervisors[0].cause)
        (tmp_path / "0" / "ill").unlink()
        await until(lambda: len(engine.ready) == 1)


async def test_a_start_that_the_machine_refuses_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launched(tmp_path, max_restarts=1000) as engine:
        await engine.start()

        def no_port(host: str) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(local, "reserve_port", no_port)
            kill(tmp_path, 0)
            await until(lambda: "Too many open files" in engine.supervisors[0].cause)
        await until(lambda: len(engine.ready) == 1)
        assert await ask(engine) == 8


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async with launched(tmp_path, 2) as engine:
        for index in range(2):
            (tmp_path / str(index) / "loading").touch()
        starting = asyncio.create_task(engine.start())
        await until(lambda: len(servers_of(str(tmp_path))) == 2)
        starting.cancel()
        await engine.close()  # at the same time
        await asyncio.gather(starting, return_exceptions=True)
        assert not running(str(tmp_path))


async def test_what_a_replica_started_in_other_sessions_goes_when_its_reaper_is_killed(
    tmp_path: Path,
) -> None:
    code = (
        "import subprocess, sys, time; wait = 'import time; time.sleep(600)'; "
        "subprocess.Popen([sys.executable, '-c', wait, sys.argv[1]], start_new_session=True); time.sleep(600)"
    )
    plan = ReplicaPlan(0, (), {}, (sys.executable, "-c", code, str(tmp_path)))
    process = await LocalProcess.start(plan, tmp_path / "log")
    await until(lambda: len(servers_of(str(tmp_path))) == 2)
    os.kill(process.pid, signal.SIGKILL)
    assert await process.wait() == "was killed by SIGKILL"
    assert not running(str(tmp_path))
    await process.stop()


def test_a_reserved_port_is_for_the_server_that_is_given_its_number() -> None:
    with (
        reserve_port("127.0.0.1", random.Random(1)) as port,
        reserve_port("127.0.0.1", random.Random(1)) as other,
    ):
        number = port.getsockname()[1]
        assert other.getsockname()[1] != number  # though it chose the same
        with socket.socket() as stranger, pytest.raises(OSError):
            stranger.bind(("127.0.0.1", number))
        with socket.socket() as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", number))
            server.listen(1)
