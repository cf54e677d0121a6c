"""The engine of launched replicas: pool and supervisors together, over stub servers in processes."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine import launch
from rollstream.engine.launch import launch_plan
from rollstream.engine.launch_plan import LaunchRequest, ReplicaPlan
from rollstream.engine.launch_process import LocalLauncher
from rollstream.engine.launched import LaunchedEngine
from rollstream.engine.registry import check_engine_config, create_engine
from rollstream.engine.sglang import ENGINE_KWARGS, SGLangEngine, SGLangReplica
from rollstream.errors import ConfigError, EngineError, EngineLostError, EngineUnavailableError
from rollstream.trajectory import SamplingParams
from tests.unit.engine.launching import running, servers_of, small_server

STUB = (sys.executable, "-m", "rollstream.testing.stub_server", "--response-tokens", "8")


def stub_plan(folder: Path, index: int) -> ReplicaPlan:
    # The folder stands in the command only to find its processes.
    return ReplicaPlan(index, (), {}, ("env", f"FOLDER={folder}", *STUB))


@asynccontextmanager
async def launched(folder: Path, plans: list[ReplicaPlan], **request: Any) -> AsyncIterator[LaunchedEngine]:
    settings: dict[str, Any] = {"restart_delay": 0.05, "max_restarts": 1}
    engine = LaunchedEngine(
        plans,
        LocalLauncher(folder / "logs"),
        make_pool=SGLangEngine,
        make_replica=lambda url: SGLangReplica(url, model_path=None, limits=None, kwargs=ENGINE_KWARGS),
        request=LaunchRequest(**(settings | request)),
        kwargs=ENGINE_KWARGS,
    )
    try:
        yield engine
    finally:
        await engine.close()
        assert not guards(engine)


def guards(engine: LaunchedEngine) -> list[int]:
    return [
        process.pid
        for supervisor in engine.supervisors
        if (process := supervisor._process) is not None  # type: ignore[attr-defined]
    ]


def kill(engine: LaunchedEngine, *indices: int) -> None:
    """The groups of some replicas, guards and all."""
    for index in indices:
        os.killpg(engine.supervisors[index]._process.pid, signal.SIGKILL)  # type: ignore[union-attr]


async def ask(engine: LaunchedEngine, name: str = "r") -> int:
    return len((await engine.generate([1, 2], SamplingParams(8), request_id=name)).token_ids)


async def until_serving(engine: LaunchedEngine, count: int, *, restarts: int = 0) -> None:
    """Right after a kill, who was killed still counts: `restarts` says how many have to have been noticed."""
    async with asyncio.timeout(120):
        while engine.serving != count or engine.restarts < restarts:
            await asyncio.sleep(0.02)


async def test_replicas_come_and_go_and_requests_are_served_by_who_is_there(tmp_path: Path) -> None:
    plans = [stub_plan(tmp_path, index) for index in range(3)]
    async with launched(tmp_path, plans) as engine:
        await engine.start()
        first = set(engine._pool.replicas)  # type: ignore[union-attr]
        assert len(first) == 3
        assert await ask(engine) == 8
        kill(engine, 0, 1)
        answers = await asyncio.gather(*(ask(engine, f"r{i}") for i in range(20)))
        assert answers == [8] * 20
        assert await engine.health()
        await until_serving(engine, 3, restarts=2)
        kill(engine, 0, 1, 2)
        await until_serving(engine, 0)
        with pytest.raises(EngineUnavailableError):
            await ask(engine)
        assert not await engine.health()
        await until_serving(engine, 3, restarts=5)
        assert await engine.health()
        assert await ask(engine) == 8
        assert engine.restarts == 5
        # Nothing that is gone is left in the pool, which was never empty.
        assert len(engine._pool.replicas) == 3  # type: ignore[union-attr]
        assert not first & set(engine._pool.replicas)  # type: ignore[union-attr]
    with pytest.raises(EngineUnavailableError, match="closed"):
        await ask(engine)
    await engine.close()


async def test_one_that_cannot_start_stops_the_others_and_fails_the_start(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    good.mkdir()
    bad.mkdir()
    (bad / "broken").touch()
    async with launched(tmp_path, [small_server(good, 0), small_server(bad, 1)]) as engine:
        with pytest.raises(EngineError, match=r"(?s)replica 1 ended with exit code 1.*no such model"):
            await engine.start()
        assert not running(str(tmp_path))


async def test_when_all_are_given_up_that_is_said_and_not_waited_for(tmp_path: Path) -> None:
    flag = tmp_path / "broken"
    script = (
        f"import os, sys; os.path.exists({str(flag)!r}) and sys.exit('out of memory'); "
        "import runpy; runpy.run_module('rollstream.testing.stub_server', run_name='__main__')"
    )
    plan = ReplicaPlan(0, (), {}, (sys.executable, "-c", script))
    async with launched(tmp_path, [plan]) as engine:
        await engine.start()
        flag.touch()
        kill(engine, 0)
        async with asyncio.timeout(60):
            while engine.supervisors[0].state != "given up":
                await asyncio.sleep(0.02)
        with pytest.raises(EngineLostError, match=r"no replica could be started again(?s:.*)out of memory"):
            await engine.health()
        with pytest.raises(EngineUnavailableError):
            await ask(engine)


async def test_a_supervisor_that_breaks_is_heard_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with launched(tmp_path, [stub_plan(tmp_path, 0)]) as engine:
        await engine.start()

        async def broken(url: str) -> None:
            raise ZeroDivisionError("a bug")

        engine.supervisors[0]._leave_out = broken
        kill(engine, 0)
        async with asyncio.timeout(60):
            while not engine._broken:
                await asyncio.sleep(0.02)
        assert "replica 0 is not looked after any more: ZeroDivisionError('a bug')" in caplog.text
        with pytest.raises(EngineLostError, match="a bug"):
            await engine.health()


async def test_a_supervisor_that_breaks_does_not_stop_a_run_that_others_serve(tmp_path: Path) -> None:
    async with launched(tmp_path, [stub_plan(tmp_path, index) for index in range(2)]) as engine:
        await engine.start()

        async def broken(url: str) -> None:
            raise ZeroDivisionError("a bug")

        engine.supervisors[0]._leave_out = broken
        kill(engine, 0)
        async with asyncio.timeout(60):
            while not engine._broken:
                await asyncio.sleep(0.02)
        assert await engine.health()
        kill(engine, 1)
        await until_serving(engine, 0)
        assert not await engine.health()  # and no error: the other one comes back
        await until_serving(engine, 1)
        assert await engine.health()


async def test_a_start_that_the_machine_refuses_counts_as_failed(tmp_path: Path) -> None:
    async with launched(tmp_path, [stub_plan(tmp_path, 0)], max_restarts=1000) as engine:
        await engine.start()
        logs = engine.supervisors[0]._launcher._log_dir  # type: ignore[attr-defined]
        away = logs.rename(tmp_path / "away")
        logs.touch()  # no folder any more: neither old log nor new one can be opened
        kill(engine, 0)
        async with asyncio.timeout(60):
            while not engine.supervisors[0]._restarts.failures:
                await asyncio.sleep(0.02)
        assert not await engine.health()
        logs.unlink()
        away.rename(logs)
        await until_serving(engine, 1)
        assert await ask(engine) == 8


async def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "loading").touch()
    async with launched(tmp_path, [small_server(tmp_path, index) for index in range(2)]) as engine:
        starting = asyncio.create_task(engine.start())
        async with asyncio.timeout(60):
            while len(servers_of(str(tmp_path))) < 2:
                await asyncio.sleep(0.02)
        starting.cancel()
        await engine.close()  # at the same time
        await asyncio.gather(starting, return_exceptions=True)
        assert not running(str(tmp_path))


def test_what_cannot_be_launched_shows_without_a_start(tmp_path: Path) -> None:
    def check(model_path: Any = MODEL_PATH, name: str = "sglang", **request: Any) -> None:
        check_engine_config(name, model_path=model_path, launch=LaunchRequest(**request))

    rollstream = {"server": "rollstream"}
    check(**rollstream)
    with pytest.raises(ConfigError, match=r"needs actor_rollout_ref\.model\.path"):
        check(None, **rollstream)
    with pytest.raises(ConfigError, match="there is no folder"):
        check("/no/such/model")
    with pytest.raises(ConfigError, match=r"has no openvino_model\.xml"):
        check(tmp_path, **rollstream)
    with pytest.raises(ConfigError, match="did you mean 'num_threads'"):
        check(**rollstream, args={"engine_kwargs": {"num_thread": 1}})
    with pytest.raises(ConfigError, match=r"launch\.python: /no/python cannot be run"):
        check(**rollstream, python="/no/python")
    with pytest.raises(ConfigError, match=r"no-such-package|has no 'sglang'"):
        check(python=sys.executable)
    with pytest.raises(ConfigError, match=r"n_gpus_per_node is 99, but \d+ devices"):
        check("org/model", devices_per_node=99)
    with pytest.raises(ConfigError, match="speaks to vllm"):
        check(name="vllm", **rollstream)
    with pytest.raises(ConfigError, match="unknown key in engine_kwargs"):
        create_engine(
            "sglang",
            model_path=MODEL_PATH,
            engine_kwargs={"x": 1},
            launch=LaunchRequest(server="rollstream"),
            log_dir=tmp_path,
        )
    assert not list(tmp_path.iterdir())


def test_a_broken_driver_is_no_machine_without_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(launch, "_machine_devices", launch._machine_devices.__wrapped__)  # not the cached one

    def plan(server: Any, devices: int | None) -> list[ReplicaPlan]:
        return launch_plan(
            "sglang",
            model_path=str(MODEL_PATH),
            max_model_len=None,
            request=LaunchRequest(server=server, devices_per_node=devices, python=sys.executable),
            log_dir=tmp_path,
        )

    for wanted in (None, 8):
        with pytest.raises(ConfigError, match=r"nvidia-smi -L` fails with exit code 18: Failed to init"):
            plan("auto", wanted)
    with pytest.raises(ConfigError, match="has no 'sglang'"):  # which is looked for last
        plan("auto", 0)
    assert len(plan("rollstream", None)) == 1


def test_the_plan_is_what_is_launched(tmp_path: Path) -> None:
    request = LaunchRequest(server="rollstream", replicas=2, env={"A": "b"})
    plans = launch_plan(
        "sglang", model_path=str(MODEL_PATH), max_model_len=512, request=request, log_dir=tmp_path
    )
    assert [plan.index for plan in plans] == [0, 1]
    command = plans[1].command(7)
    assert command[0] == sys.executable
    assert command[command.index("--model") + 1] == str(MODEL_PATH)
    assert command[command.index("--log-dir") + 1] == str(tmp_path / "replica-1")
    assert command[-2:] == ["--port", "7"]
    assert plans[0].env["A"] == "b"
