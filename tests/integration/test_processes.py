"""A run of several worker processes is the run of one: the same artifact, stopped, killed and resumed."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pyarrow.parquet as pq
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.generation.run import run_generation
from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubServer
from tests.faults.runs import check_each_is_there_once, overrides, stub_in_thread, write_prompts
from tests.integration.test_ray import Command
from tests.support.until import PATIENCE_S

REPEATS = 2


@pytest.fixture
def server() -> Iterator[StubServer]:
    with stub_in_thread(response_tokens=16) as server:
        yield server


def test_the_artifact_is_that_of_one_process(tmp_path: Path, server: StubServer) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 60)
    tables = []
    for processes in (1, 2):
        root = tmp_path / str(processes)
        result = run_generation(
            overrides(
                root,
                prompts,
                server.url,
                actor_rollout_ref__rollout__n=REPEATS,
                generation__processes=processes,
                generation__show_progress="false",
            )
        )
        assert (result.completed, result.failed) == (60 * REPEATS, 0)
        tables.append(pq.read_table(root / "trajectories.parquet").drop_columns(["metrics", "finished_at"]))
    assert tables[0].equals(tables[1])


def workers(command: Command) -> list[psutil.Process]:
    return command.family(lambda one: "rollstream.rollout.processes:main" in one.cmdline())


@pytest.mark.parametrize("kills", [3, pytest.param(30, marks=pytest.mark.soak)])
def test_workers_and_driver_killed(tmp_path: Path, server: StubServer, kills: int) -> None:
    """A worker that is killed is replaced; workers end with their driver; nothing is lost or there twice."""
    count = 100 * kills
    prompts = write_prompts(tmp_path / "prompts.jsonl", count)
    arguments = overrides(
        tmp_path / "run",
        prompts,
        server.url,
        actor_rollout_ref__rollout__n=REPEATS,
        generation__processes=2,
        generation__max_in_flight=8,
        generation__adaptive_in_flight="false",
    )
    each = 30
    server.latency = Latency("fixed", 0.2)  # slow while there are kills: nothing of it depends on the machine
    for round_ in range(kills):
        with Command(arguments, tmp_path) as command:
            command.wait_for(tmp_path / "run", (2 * round_ + 1) * each)
            family = workers(command)
            assert len(family) == 2
            family[0].kill()
            command.wait_for(tmp_path / "run", (2 * round_ + 2) * each)
            family = command.family()
            command.process.kill()
            command.process.communicate(timeout=240)
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
    with Command(arguments, tmp_path) as command:
        command.wait_for(tmp_path / "run", 2 * kills * each + 20)
        os.killpg(command.process.pid, signal.SIGINT)  # as from a terminal
        command.process.communicate(timeout=240)
        assert command.process.returncode == 130, command.log.read_text()[-3000:]
    server.latency = Latency()
    with Command(arguments, tmp_path) as command:
        output, _ = command.process.communicate(timeout=240)
        assert command.process.returncode == 0, command.log.read_text()[-3000:]
    result = orjson.loads(output)
    assert (result["completed"], result["failed"]) == (count * REPEATS, 0)
    check_each_is_there_once(tmp_path / "run", count, REPEATS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generation.processes=2"], r"processes=2: engine 'openvino' runs in the process that uses it"),
        (
            ["generation.processes=2", "actor_rollout_ref.rollout.server_urls=[http://127.0.0.1:1]"],
            r"--engine sglang, vllm or openai",
        ),
        (["generation.processes=2", "generation.executor=ray"], r"num_workers"),
        (["generation.processes=0"], r"generation\.processes"),
    ],
)
def test_where_processes_cannot_work_the_run_says_so(tmp_path: Path, words: list[str], message: str) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    more = [f"actor_rollout_ref.model.path={MODEL_PATH}", f"data.train_files={prompts}"]
    with pytest.raises(ConfigError, match=message):
        run_generation([*more, f"trainer.default_local_dir={tmp_path / 'run'}", *words])
    assert not (tmp_path / "run").exists()
