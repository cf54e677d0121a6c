"""R2 to R7 with verl's own loops: verl on a CPU, the shipped model behind `rollstream serve`.

Runs in an environment that has verl (`make test-verl`); skipped elsewhere. Starting verl's processes takes
most of the time, so each test looks at several things.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pyarrow.parquet as pq
import pytest

pytest.importorskip("verl")

import ray

from rollstream.cli import main
from rollstream.demo import MODEL_PATH
from rollstream.errors import DataError, RunDirectoryError
from rollstream.generation.run import run_generation
from rollstream.integrations.verl import compose as compose_module
from rollstream.integrations.verl.compose import compose_verl
from rollstream.integrations.verl.plugin import register
from rollstream.store.records import EncodedRollout, RecordCodec
from rollstream.store.run import Run
from rollstream.trajectory import Failure
from tests.faults.ray_nodes import working_pids
from tests.support.until import wait_until
from tests.without_torch import without_torch

HERE = Path(__file__).parent
PROXIES = ("ray::ReplicaServer", "ray::rollstream_server")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the shipped model."""
    command = [sys.executable, "-m", "rollstream.cli", "serve", "--port", "0", "--json", "--exit-with-parent"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=without_torch())
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """One for the runs in this process: they use it and leave it as it is."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=256 << 20,
        log_to_driver=False,
    )
    yield
    ray.shutdown()


def write_sums(path: Path, rows: int, **extra: Any) -> Path:
    lines = []
    for i in range(rows):
        a, b = 10 + i % 80, 11 + i * 7 % 80
        question = f"State the final answer to the following arithmetic problem: {a} + {b} ="
        lines.append(
            {
                "prompt": [{"role": "user", "content": question}],
                "data_source": "sums",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {key: value(i) for key, value in extra.items()},
            }
        )
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def arguments(run_dir: Path, prompts: Path, **settings: object) -> list[str]:
    chosen: dict[str, object] = {
        "actor_rollout_ref.model.path": MODEL_PATH,
        "actor_rollout_ref.rollout.response_length": 64,
        "data.max_prompt_length": 320,
        "data.train_files": prompts,
        "trainer.default_local_dir": run_dir,
        "generation.executor": "verl",
        "generation.seed": 11,
        "generation.show_progress": "false",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return [f"{key}={value}" for key, value in chosen.items()]


def by_url(url: str) -> dict[str, object]:
    return {
        "actor_rollout_ref__rollout__name": "sglang",
        "actor_rollout_ref__rollout__server_urls": f"[{url}]",
    }


def artifact(run_dir: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(run_dir / "trajectories.parquet").to_pylist()
    return rows


def durable(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> int:
    """Rollouts that `status` counts as done."""
    capsys.readouterr()
    main(["status", "--json", str(run_dir)])
    return int(orjson.loads(capsys.readouterr().out)["completed"])


def test_a_run_is_killed_and_goes_on(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """80 rollouts by verl's `single_turn_agent`, SIGKILL half-way; and what the tokens must be."""
    prompts = write_sums(tmp_path / "prompts.jsonl", 20)
    settings = {
        **by_url(url),
        "actor_rollout_ref__rollout__n": 4,
        "actor_rollout_ref__rollout__agent__num_workers": 1,
        "ray_kwargs__ray_init__num_cpus": 3,
        "generation__max_in_flight": 4,
    }
    words = arguments(tmp_path / "run", prompts, **settings)
    command = [sys.executable, "-m", "rollstream.cli", "generate", "--json", *words]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        journals = tmp_path / "run" / "journal"
        deadline = time.monotonic() + 400
        while sum(file.stat().st_size for file in journals.glob("*")) < 10_000:
            assert first.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.wait(20)
    before = durable(tmp_path / "run", capsys)
    assert 0 < before < 80

    edited = write_sums(tmp_path / "edited.jsonl", 21)
    with pytest.raises(RunDirectoryError, match=r"data.count: 20 -> 21"):
        run_generation(arguments(tmp_path / "run", edited, **settings))
    with pytest.raises(RunDirectoryError, match=r"verl\.overrides"):
        override = '["++actor_rollout_ref.rollout.custom2=1"]'
        run_generation(arguments(tmp_path / "run", prompts, **settings, generation__verl_overrides=override))

    second = subprocess.run(command, stdout=subprocess.PIPE, timeout=600, check=True)
    result = orjson.loads(second.stdout)
    assert result["completed"] == 80 and result["complete"]
    assert result["generated"] == 80 - before
    assert main(["validate", str(tmp_path / "run")]) == 0
    rows = artifact(tmp_path / "run")
    assert {(row["index"], row["repeat"]) for row in rows} == {(i, j) for i in range(20) for j in range(4)}

    same = {**settings, "generation__executor": "local", "generation__max_in_flight": 32}
    run_generation(arguments(tmp_path / "local", prompts, **same))
    ours = {(row["index"], row["repeat"]): row for row in artifact(tmp_path / "local")}
    for row in rows:
        own = ours[row["index"], row["repeat"]]
        for column in (
            *("prompt_key", "prompt_ids", "response_ids", "response_mask", "num_turns", "ground_truth"),
            *("finish_reason", "messages", "policy_versions"),
        ):
            assert row[column] == own[column], column
        assert row["response_logprobs"] == pytest.approx(own["response_logprobs"], abs=1e-3)


def test_tools_and_a_worker_that_dies(tmp_path: Path, cluster: None) -> None:
    """150 rollouts by verl's `tool_agent` with a function tool; each worker has an engine of its own."""
    prompts = write_sums(tmp_path / "prompts.jsonl", 150)
    killed: list[int] = []
    ended = threading.Event()

    def kill_one() -> None:
        while not ended.wait(0.02):
            if list((tmp_path / "run" / "journal").glob("*")) and (pids := working_pids()):
                os.kill(pids[0], signal.SIGKILL)
                killed.append(pids[0])
                return

    killer = threading.Thread(target=kill_one)
    killer.start()
    try:
        result = run_generation(
            arguments(
                tmp_path / "run",
                prompts,
                actor_rollout_ref__rollout__name="openvino",
                actor_rollout_ref__rollout__agent__num_workers=1,
                actor_rollout_ref__rollout__agent__default_agent_loop="tool_agent",
                actor_rollout_ref__rollout__multi_turn__function_tool_path=HERE / "tools.py",
                actor_rollout_ref__rollout__response_length=192,
                custom_reward_function__path=HERE / "loops.py",
                custom_reward_function__name="exact",
                generation__max_in_flight=8,
            )
        )
    finally:
        ended.set()
        killer.join()
    assert killed
    assert result.completed == 150 and result.failed == 0
    assert main(["validate", str(tmp_path / "run")]) == 0
    rows = artifact(tmp_path / "run")
    with_tool = [row for row in rows if 0 in row["response_mask"]]
    assert len(with_tool) >= 75
    for row in with_tool:
        assert row["num_turns"] >= 4
        assert len(row["response_ids"]) == len(row["response_mask"]) == len(row["response_logprobs"])
        assert all(
            p == 0 for p, m in zip(row["response_logprobs"], row["response_mask"], strict=True) if not m
        )
        roles = [message["role"] for message in orjson.loads(row["messages"])]
        assert roles[:3] == ["user", "assistant", "tool"]
    assert result.mean_reward is not None and result.mean_reward > 0.7


def test_seven_rows_two_workers_one_failure(tmp_path: Path, url: str, cluster: None) -> None:
    """A loop of the user's that raises for one row; an odd number of rows; what a loop is told."""
    prompts = write_sums(tmp_path / "prompts.jsonl", 7, fails=lambda i: i == 3)
    loops = tmp_path / "loops.yaml"
    loops.write_text("- name: picky\n  _target_: tests.compat.verl.loops.PickyLoop\n")
    result = run_generation(
        arguments(
            tmp_path / "run",
            prompts,
            **by_url(url),
            actor_rollout_ref__rollout__agent__num_workers=2,
            actor_rollout_ref__rollout__agent__default_agent_loop="picky",
            actor_rollout_ref__rollout__agent__agent_loop_config_path=loops,
            generation__max_failed_share=0.2,
        )
    )
    assert (result.completed, result.failed, result.exit_code) == (6, 1, 0)
    (failure,) = Run.open(tmp_path / "run").failures()
    assert (failure.index, failure.error) == (3, "ValueError: row 3 is not to my taste")
    assert "in run" in failure.traceback
    rows = artifact(tmp_path / "run")
    assert sorted(row["index"] for row in rows) == [0, 1, 2, 4, 5, 6]
    for row in rows:
        extra = orjson.loads(row["extra"])
        assert row["reward"] == extra["told_index"] == row["index"]
        assert {"raw_prompt", "data_source", "extra_info", "reward_model", "tools_kwargs"} <= set(
            extra["told"]
        )
        assert extra["verl_dropped"] == ["odd"]


def test_servers_that_verl_starts(
    tmp_path: Path, url: str, cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's take a GPU; rollstream's backend is started by verl in the same way."""
    register()
    monkeypatch.setattr(compose_module, "OWN_SERVERS", ("rollstream",))
    rollout = "actor_rollout_ref.rollout"
    own = [f"{rollout}.name=rollstream", f"{rollout}.nnodes=1", f"{rollout}.n_gpus_per_node=2"]
    overrides = [*own, f"+{rollout}.custom.urls=[{url}]"]
    result = run_generation(
        arguments(
            tmp_path / "run",
            write_sums(tmp_path / "prompts.jsonl", 5),
            actor_rollout_ref__rollout__agent__num_workers=1,
            generation__verl_overrides=orjson.dumps(overrides).decode(),
        )
    )
    assert (result.completed, result.failed) == (5, 0)
    for row in artifact(tmp_path / "run"):
        assert row["metrics"]["engine_calls"] == 1 and row["finish_reason"] in ("stop", "length")


async def test_a_stream_of_verls_own_classes(tmp_path: Path, url: str, cluster: None) -> None:
    """Without a run: verl's server manager and client, and a manager of loops that streams.

    Half-way the proxy before the servers is killed: it comes back, and no sample is the worse for it (R5).
    """
    from rollstream.config.load import compose, to_settings
    from rollstream.integrations.verl import (
        GenerationLoopManager,
        StreamingLLMServerClient,
        StreamingLLMServerManager,
    )

    register()
    words = arguments(
        tmp_path,
        tmp_path / "none.parquet",
        **by_url(url),
        actor_rollout_ref__rollout__agent__num_workers=1,
    )
    config = compose_verl(to_settings(compose(words)))
    config.actor_rollout_ref.rollout.update({"custom": {"urls": [url]}, "nnodes": 1, "n_gpus_per_node": 1})
    servers = await StreamingLLMServerManager.create(config)
    client = servers.get_client(client_cls=StreamingLLMServerClient)
    manager = await GenerationLoopManager.create(config, client)
    samples = [
        {"index": i, "raw_prompt": [{"role": "user", "content": f"1{i} + 2{i} ="}], "extra_info": {}}
        for i in (5, 3, 11, 0, 7, 2, 1)
    ]
    samples.insert(3, {"index": 8, "raw_prompt": ["text"]})
    got: list[EncodedRollout | Failure] = []
    (proxy,) = processes(*PROXIES)
    async for result in manager.stream(samples, max_in_flight=1):
        if not got:
            proxy.kill()
        got.append(result)
    assert processes(*PROXIES)[0].pid != proxy.pid
    assert sorted(result.index for result in got) == [0, 1, 2, 3, 5, 7, 8, 11]
    (failure,) = [result for result in got if isinstance(result, Failure)]
    assert failure.index == 8 and "want a list of messages" in failure.error
    assert isinstance(got[0], EncodedRollout)
    record = RecordCodec().decode_rollout(got[0].body)
    assert record.trajectories[0].response_ids

    with pytest.raises(DataError, match="an index of its own"):
        async with contextlib.aclosing(manager.stream([*samples, samples[0]])) as stream:
            await take_all(stream)
    with pytest.raises(DataError, match="an index of its own"):
        async with contextlib.aclosing(manager.stream([{"raw_prompt": []}])) as stream:
            await take_all(stream)
    async with contextlib.aclosing(manager.stream(samples)) as stream:
        await anext(stream)  # left early
    wait_until(lambda: not processes("ray::RayWorker"))
    servers.close()


async def take_all(stream: AsyncIterator[Any]) -> None:
    async with asyncio.timeout(120):
        async for _ in stream:
            pass


def test_nothing_of_verls_is_left(cluster: None) -> None:
    """The actors of the runs in this process ended with them, and those of the stream with its manager."""
    wait_until(lambda: not processes("ray::RayWorker", *PROXIES))


def processes(*names: str) -> list[psutil.Process]:
    """Actors that run below this process, by what Ray calls them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, IndexError):
            if process.cmdline()[0].startswith(names):
                found.append(process)
    return found
