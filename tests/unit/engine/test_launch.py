"""The engine of launched replicas: what is planned is started, watched, and started again."""

import asyncio
import errno
import os
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine import launch, launch_process
from rollstream.engine.launch import launch_plan
from rollstream.engine.launch_plan import LaunchRequest, ReplicaPlan
from rollstream.engine.launch_process import LocalLauncher, LocalProcess, reserve_port
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.registry import check_engine_config, create_engine
from rollstream.engine.replica import Replica
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError
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
        (SmallReplica, r"not healthy within 0\.5 s .*startup_timeout\)"),
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


@pytest.mark.parametrize("how", ["deaf", "ill"])
async def test_one_that_is_not_healthy_for_long_is_replaced(tmp_path: Path, how: str) -> None:
    async with launched(tmp_path, unhealthy_timeout=1.0) as engine:
        await engine.start()
        (tmp_path / "0" / how).touch()
        await until(lambda: "not healthy for 1 s" in engine.supervisors[0].cause)
        (tmp_path / "0" / how).unlink()
        await until(lambda: len(engine.ready) == 1)


async def test_a_supervisor_that_breaks_does_not_stop_what_others_serve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with launched(tmp_path, 2) as engine:
        await engine.start()

        async def broken(name: str) -> None:
            raise ZeroDivisionError("a bug")

        with monkeypatch.context() as patched:
            patched.setattr(engine, "remove_replica", broken)
            kill(tmp_path, 0)
            await until(lambda: engine.supervisors[0].is_given_up)
        assert "replica 0 is not looked after any more" in caplog.text
        assert await engine.health() and await ask(engine) == 8
        kill(tmp_path, 1)
        await until(lambda: "replica 1 is back" in caplog.text)
        assert await engine.health()


async def test_a_start_that_the_machine_refuses_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with launched(tmp_path, max_restarts=1000) as engine:
        await engine.start()

        def no_port(host: str) -> socket.socket:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as patched:
            patched.setattr(launch_process, "reserve_port", no_port)
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


def test_what_cannot_be_launched_shows_without_a_start(tmp_path: Path) -> None:
    def check(model_path: Any = MODEL_PATH, name: str = "sglang", **request: Any) -> None:
        check_engine_config(name, model_path=model_path, launch=LaunchRequest(**request))

    rollstream = {"server": "rollstream"}
    check(**rollstream)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"model_path": None, **rollstream}, r"needs actor_rollout_ref\.model\.path"),
        ({"model_path": "/no/such/model"}, "there is no folder"),
        ({"model_path": tmp_path, **rollstream}, r"has no openvino_model\.xml"),
        ({**rollstream, "args": {"engine_kwargs": {"num_thread": 1}}}, "did you mean 'num_threads'"),
        ({**rollstream, "python": "/no/python"}, r"launch\.python: /no/python is no program"),
        ({}, "this environment has no 'sglang'"),
        ({"model_path": "org/model", "devices_per_node": 99}, r"n_gpus_per_node is 99, but \d+ devices"),
        ({"name": "vllm", **rollstream}, "speaks to vllm"),
    ]
    for asked, message in wrong:
        with pytest.raises(ConfigError, match=message):
            check(**asked)
    with pytest.raises(ConfigError, match="unknown key in engine_kwargs"):
        create_engine(
            "sglang",
            model_path=MODEL_PATH,
            engine_kwargs={"x": 1},
            launch=LaunchRequest(**rollstream),
            log_dir=tmp_path,
        )
    assert not list(tmp_path.iterdir())


def plan(log_dir: Path, **request: Any) -> list[ReplicaPlan]:
    return launch_plan(
        "sglang",
        model_path=str(MODEL_PATH),
        max_model_len=512,
        request=LaunchRequest(**{"python": sys.executable, **request}),
        log_dir=log_dir,
    )


@pytest.fixture
def asked_anew() -> Iterator[None]:
    launch.machine_devices.cache_clear()
    yield
    launch.machine_devices.cache_clear()


@pytest.mark.usefixtures("asked_anew")
def test_a_broken_driver_is_no_machine_without_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for wanted in (None, 8):
        with pytest.raises(ConfigError, match=r"nvidia-smi -L` fails with exit code 18: Failed to init"):
            plan(tmp_path, server="auto", devices_per_node=wanted)
    assert len(plan(tmp_path, server="auto", devices_per_node=0)) == 1
    assert len(plan(tmp_path, server="rollstream")) == 1


def test_the_plan_is_what_is_launched(tmp_path: Path) -> None:
    plans = plan(tmp_path, server="rollstream", replicas=2, env={"A": "b"})
    assert [one.index for one in plans] == [0, 1]
    command = plans[1].command(7)
    assert command[0] == sys.executable
    assert command[command.index("--model") + 1] == str(MODEL_PATH)
    assert command[command.index("--log-dir") + 1] == str(tmp_path / "replica-1")
    assert command[-2:] == ["--port", "7"]
    assert plans[0].env["A"] == "b"
