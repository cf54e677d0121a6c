"""A run on Ray is the run that it is locally: the same artifact, stopped and resumed by the same command."""

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import psutil
import pyarrow.parquet as pq
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, RollstreamError
from rollstream.generation.run import as_config, generate, run_generation
from rollstream.store.run import Run
from rollstream.store.summary import read_status
from rollstream.testing.stub_faults import Latency
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.testing.text_rules import answer_by_text
from tests.faults.ray_nodes import working_pids
from tests.faults.runs import (
    check_each_is_there_once,
    check_same_rows,
    overrides,
    stub_in_thread,
    write_prompts,
)
from tests.integration.test_images import overrides as image_overrides
from tests.support.until import PATIENCE_S, wait_until
from tests.unit.chat.vision import IMAGE_PAD, load_model, png, write_model

ray = pytest.importorskip("ray")


@pytest.fixture(autouse=True)
def no_cluster_is_joined() -> None:
    """A test before this one may have failed within a cluster, which would be taken for this one's."""
    ray.shutdown()


TIMES = {"metrics", "finished_at"}
"""Columns that no two runs share."""


def sums(run_dir: Path, prompts: Path, **settings: object) -> list[str]:
    chosen: dict[str, object] = {
        "actor_rollout_ref.model.path": MODEL_PATH,
        "actor_rollout_ref.rollout.n": 2,
        "actor_rollout_ref.rollout.response_length": 48,
        "data.max_prompt_length": 128,
        "data.train_files": prompts,
        "trainer.default_local_dir": run_dir,
        "generation.seed": 5,
        "generation.show_progress": "false",
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return [f"{key}={value}" for key, value in chosen.items()]


@pytest.mark.slow
def test_the_artifact_is_that_of_a_local_run(tmp_path: Path) -> None:
    """Key by key and token for token, log-probs included, with an engine in each of two workers."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40)
    timeline = tmp_path / "trace" / "timeline.json"
    result = run_generation(
        sums(
            tmp_path / "ray",
            prompts,
            generation__executor="ray",
            actor_rollout_ref__rollout__agent__num_workers=2,
            ray_kwargs__ray_init__num_cpus=2,
            ray_kwargs__timeline_json_file=timeline,
        )
    )
    local = run_generation(sums(tmp_path / "local", prompts))
    assert result.completed == local.completed == 80
    check_same_rows(tmp_path / "ray", tmp_path / "local")
    engine_logs = sorted(path.parent.name for path in (tmp_path / "ray" / "logs").glob("*/engine-*.log"))
    assert engine_logs and set(engine_logs) <= {"worker-0", "worker-1"}  # one may have come too late
    assert orjson.loads(timeline.read_bytes())
    assert not ray.is_initialized()


async def test_images_need_not_be_where_the_workers_are(tmp_path: Path) -> None:
    """A path that only the driver's process can open; what is stored is as of a local run."""
    tokenizer, _ = load_model(write_model(tmp_path / "model"))
    (tmp_path / "shown.png").write_bytes(png(112, 56, "blue"))
    with (tmp_path / "shown.png").open("rb") as file:
        fd = fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 800)  # a number that is free in a worker
    rows = [
        {"prompt": "look at this <image>", "images": [f"/proc/self/fd/{fd}"]},
        {"prompt": "look at <image> and <image>", "images": [(tmp_path / "shown.png").as_uri(), "shown.png"]},
        {"prompt": "no <image> here", "images": ["missing.png"]},
        {"prompt": "look at that"},
    ]
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(map(orjson.dumps, rows)))
    try:
        async with StubServer(
            answer_by_text(tokenizer, lambda prompt: "and that"),
            model=StubModel(vocab_size=tokenizer.vocab_size, images=True, image_token_id=IMAGE_PAD),
        ) as server:
            words = [*image_overrides(tmp_path, server), "generation.seed=5", "actor_rollout_ref.rollout.n=3"]
            for name in ("local", "ray"):
                more = [f"trainer.default_local_dir={tmp_path / name}", f"generation.executor={name}"]
                if name == "ray":
                    more += ["ray_kwargs.ray_init.num_cpus=1"]
                result = await generate(as_config([*words, *more]))
                assert (result.completed, result.failed) == (9, 3)
    finally:
        os.close(fd)
    local, on_ray = (pq.read_table(tmp_path / name / "trajectories.parquet") for name in ("local", "ray"))
    assert on_ray.drop_columns(list(TIMES)).equals(local.drop_columns(list(TIMES)))
    assert f"/proc/self/fd/{fd}" in on_ray["messages"][0].as_py()
    failures = [
        sorted((one.index, one.repeat, one.stage, one.error) for one in Run.open(tmp_path / name).failures())
        for name in ("local", "ray")
    ]
    assert failures[0] == failures[1]
    assert "missing.png: no such file" in failures[1][0][3]


def test_what_cannot_be_joined_is_said(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 2)
    arguments = sums(tmp_path / "run", prompts, generation__executor="ray")
    with pytest.raises(ConfigError, match=r"ray_kwargs\.ray_init.*no_such_argument"):
        run_generation([*arguments, "+ray_kwargs.ray_init.no_such_argument=1"])
    with pytest.raises(ConfigError, match=r"num_workers"):
        run_generation([*arguments, "actor_rollout_ref.rollout.agent.num_workers=0"])


_LATE = {"ray::DashboardAgent", "ray::RuntimeEnvAgent"}
"""Of Ray's own processes; they notice a minute later that nobody is there."""


class Command:
    """`rollstream generate` in a session of its own, as in a terminal; its standard output is kept."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollstream.generation.main", "--json", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self.process.poll() is None:  # it failed to end as it should have: its cluster goes with it
            self.process.kill()
            self.process.wait()

    def wait_for(self, run_dir: Path, done: int) -> None:
        def has_done() -> bool:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with contextlib.suppress(RollstreamError, FileNotFoundError):  # it is not there yet
                return read_status(run_dir).completed >= done
            return False

        wait_until(has_done, every=0.05)

    def family(self, wanted: Callable[[psutil.Process], bool] = lambda one: True) -> list[psutil.Process]:
        """Processes below it that are there, and of which this is true."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if wanted(process):
                    found.append(process)
        return found


@pytest.mark.slow
def test_what_ray_says_is_in_the_log_file_and_not_on_the_terminal(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 80)
    run_dir = tmp_path / "run"
    with stub_in_thread(response_tokens=16, latency=Latency("fixed", 0.5)) as server:
        arguments = overrides(
            run_dir,
            prompts,
            server.url,
            generation__executor="ray",
            generation__max_in_flight=8,
            actor_rollout_ref__rollout__agent__num_workers=1,
            ray_kwargs__ray_init__num_cpus=1,
        )
        with Command(arguments, tmp_path) as command:
            command.wait_for(run_dir, 8)
            os.kill(working_pids(command.process.pid)[0], signal.SIGKILL)
            server.latency = Latency()
            output, _ = command.process.communicate(timeout=240)
    assert orjson.loads(output)["completed"] == 80  # and nothing else
    (log,) = (run_dir / "logs").glob("attempt-*.log")
    for said in ("raylet: A worker died", "Started a local Ray instance"):
        assert said in log.read_text()
        assert said not in command.log.read_text()


@pytest.mark.slow
def test_stopped_killed_and_resumed(tmp_path: Path) -> None:
    """Ctrl-C reaches the whole process group, as from a terminal; then kill -9 of the driver alone."""
    prompts = write_prompts(tmp_path / "prompts.jsonl", 80)
    with stub_in_thread(response_tokens=16, latency=Latency("fixed", 0.5)) as server:
        arguments = overrides(
            tmp_path / "run",
            prompts,
            server.url,
            actor_rollout_ref__rollout__n=2,
            generation__executor="ray",
            generation__max_in_flight=8,
            actor_rollout_ref__rollout__agent__num_workers=2,
            ray_kwargs__ray_init__num_cpus=2,
        )
        with Command(arguments, tmp_path) as first:
            first.wait_for(tmp_path / "run", 20)
            family = first.family()
            os.killpg(first.process.pid, signal.SIGINT)
            output, _ = first.process.communicate(timeout=240)
            assert first.process.returncode == 130, first.log.read_text()[-3000:]
        stopped = orjson.loads(output)
        assert 20 <= stopped["completed"] < 160
        assert stopped["failed"] == 0
        assert "dropped" not in first.log.read_text()  # what was in flight was finished
        assert psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []

        with Command(arguments, tmp_path) as second:
            second.wait_for(tmp_path / "run", stopped["completed"] + 20)
            family = second.family(lambda one: one.name() not in _LATE)
            second.process.kill()
            second.process.communicate(timeout=240)
        assert (
            psutil.wait_procs(family, timeout=PATIENCE_S)[1] == []
        )  # workers and cluster go with their driver

        server.latency = Latency()
        with Command(arguments, tmp_path) as third:
            output, _ = third.process.communicate(timeout=240)
            assert third.process.returncode == 0, third.log.read_text()[-3000:]
        result = orjson.loads(output)
    assert (result["completed"], result["artifact_rows"], result["failed"]) == (160, 160, 0)
    check_each_is_there_once(tmp_path / "run", 80, 2)
