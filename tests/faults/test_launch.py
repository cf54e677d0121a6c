"""Launched replicas: killed, away all at once, unable to start; and a rollstream that is killed itself."""

import contextlib
import random
import signal
import time
import urllib.request
from pathlib import Path
from uuid import uuid4

import orjson
import pytest

from rollstream.store.paths import RunPaths
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from tests.faults.launches import LAUNCH, Launched, has_begun, launch_overrides, stub_python
from tests.faults.runs import Runner, check_each_is_there_once, run_to_end, write_prompts

pytest.importorskip("openvino_genai")


@pytest.fixture
def launched() -> Launched:
    return Launched(uuid4().hex)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("rows", "least"), [(150, 2), pytest.param(500, 4, marks=pytest.mark.soak)])
def test_kills_of_replicas_cost_no_rollout_and_no_attempt(
    tmp_path: Path, launched: Launched, rows: int, least: int
) -> None:
    """Two kills at least, or four."""
    rng = random.Random(4)
    paths = RunPaths(tmp_path / "run")
    command = launch_overrides(
        paths.root,
        write_prompts(tmp_path / "prompts.jsonl", rows),
        launched,
        replicas=4,
        actor_rollout_ref__rollout__n=4,
        actor_rollout_ref__rollout__response_length=96,
        actor_rollout_ref__rollout__ignore_eos="true",
        generation__max_in_flight=64,
    )
    runner = Runner(command, log=tmp_path / "log")
    assert runner.wait_until(lambda: has_begun(paths.root))
    kills, next_kill = 0, 0.0
    while runner.process.poll() is None:
        # One is left to go on with; any process may be hit: a server, its reaper, or its worker.
        if time.monotonic() >= next_kill and len(serving := launched.serving()) > 1:
            launched.kill([rng.choice([*serving, *launched.reapers(), *launched.workers()])])
            kills += 1
            next_kill = time.monotonic() + rng.uniform(0.5, 2.5)
        time.sleep(0.05)
    print(f"{kills} kills\n{runner.output()}")
    assert runner.process.returncode == 0, runner.output()[-3000:]
    assert kills >= least
    assert read_status(paths.root).completed == 4 * rows
    check_each_is_there_once(paths.root, rows, 4)
    assert validate_run(paths.root).sound
    assert "is started again in" in runner.output()  # whether it is back in time depends on the next kills
    assert launched.are_gone()


def in_flight(launched: Launched) -> int:
    """Requests at all servers."""
    count = 0
    for port in launched.ports().values():
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{port}/stub/stats") as answer,
        ):
            count += orjson.loads(answer.read())["in_flight"]
    return count


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rows", "away"), [(500, 3), pytest.param(1500, 10, marks=pytest.mark.soak)])
def test_after_an_outage_of_all_the_run_goes_on_with_all_that_was_in_flight(
    tmp_path: Path, launched: Launched, rows: int, away: int
) -> None:
    paths = RunPaths(tmp_path / "run")
    command = launch_overrides(
        paths.root,
        write_prompts(tmp_path / "prompts.jsonl", rows),
        launched,
        replicas=4,
        generation__max_in_flight=32,
        generation__adaptive_in_flight="false",
        **{
            f"{LAUNCH}python": stub_python(tmp_path, "fixed:2"),  # there is work left, however slow this is
            f"{LAUNCH}args": "{}",
            f"{LAUNCH}restart_delay": away,
        },
    )
    runner = Runner(command, log=tmp_path / "log")
    for latency in ("fixed:2", "fixed:0.5"):
        assert runner.wait_until(lambda: len(launched.serving()) == 4 and in_flight(launched) > 24)
        (tmp_path / "latency").write_text(latency)  # of those that come then
        launched.kill(launched.servers())
        assert runner.wait_until(lambda: not launched.serving())
    assert runner.wait_until(lambda: in_flight(launched) > 24)
    assert runner.wait() == 0, runner.output()[-3000:]
    check_each_is_there_once(paths.root, rows, 1)
    assert validate_run(paths.root).sound


def test_a_replica_that_cannot_start_shows_the_end_of_its_log(tmp_path: Path, launched: Launched) -> None:
    (tmp_path / "broken").touch()
    paths = RunPaths(tmp_path / "run")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4)
    settings = {f"{LAUNCH}python": stub_python(tmp_path, "fixed:0"), f"{LAUNCH}args": "{}"}
    command = launch_overrides(paths.root, prompts, launched, replicas=2, **settings)
    runner = Runner(command, log=tmp_path / "log")
    assert runner.wait() == 1
    output = runner.output()
    assert "ended with exit code 9 before it was healthy" in output
    assert "  the end of its log:\n    devices \n    CUDA out of memory" in output
    assert "Traceback" not in output
    assert not launched.processes()
    assert not paths.has_data()
    (tmp_path / "broken").unlink()
    run_to_end(command, tmp_path / "mended.log")
    assert validate_run(paths.root).sound


def test_replicas_that_do_not_come_back_end_the_run_and_nothing_is_lost(
    tmp_path: Path, launched: Launched
) -> None:
    paths = RunPaths(tmp_path / "run")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 200)
    settings = {
        f"{LAUNCH}python": stub_python(tmp_path, "fixed:1"),
        f"{LAUNCH}args": "{}",
        f"{LAUNCH}max_restarts": 1,
    }
    command = launch_overrides(
        paths.root, prompts, launched, replicas=2, generation__max_in_flight=8, **settings
    )
    runner = Runner(command, log=tmp_path / "log")
    assert runner.wait_until(lambda: has_begun(paths.root))
    (tmp_path / "broken").touch()
    launched.kill(launched.servers())
    assert runner.wait() == 1
    output = runner.output()
    assert "error: no replica could be started again." in output
    assert output.rstrip().endswith("CUDA out of memory")
    assert not launched.processes()
    assert read_status(paths.root).failed == 0
    (tmp_path / "broken").unlink()
    (tmp_path / "latency").write_text("fixed:0")
    run_to_end(command, tmp_path / "mended.log")
    assert read_status(paths.root).completed == 200
    check_each_is_there_once(paths.root, 200, 1)


@pytest.mark.parametrize("how", ["SIGKILL", "SIGINT"])
def test_no_replica_outlives_rollstream_and_the_same_command_goes_on(
    tmp_path: Path, launched: Launched, how: str
) -> None:
    rows = 40 if how == "SIGKILL" else 400
    paths = RunPaths(tmp_path / "run")
    stubs = {f"{LAUNCH}python": stub_python(tmp_path, "fixed:0.5"), f"{LAUNCH}args": "{}"}
    command = launch_overrides(
        paths.root,
        write_prompts(tmp_path / "prompts.jsonl", rows),
        launched,
        replicas=2,
        actor_rollout_ref__rollout__ignore_eos="true",
        actor_rollout_ref__rollout__response_length=400,
        generation__max_in_flight=4,
        generation__grace_period=1,
        # Real servers have workers below them; they are slow to start, so once is enough.
        **({} if how == "SIGKILL" else stubs),
    )
    runner = Runner(command, log=tmp_path / "log")
    assert runner.wait_until(lambda: has_begun(paths.root)), runner.output()
    assert len(launched.servers()) == len(launched.reapers()) == 2
    assert runner.wait_until(lambda: len(launched.workers()) == (2 if how == "SIGKILL" else 0))
    number = signal.Signals[how]
    runner.process.send_signal(number)
    assert runner.wait() == (-number if how == "SIGKILL" else 128 + number)
    if how == "SIGINT":
        assert not launched.processes()  # it has waited for them
    assert launched.are_gone()
    if how == "SIGKILL":
        run_to_end([*command, "actor_rollout_ref.rollout.launch.replicas=1"], tmp_path / "resumed.log")
        assert read_status(paths.root).completed == rows
        assert validate_run(paths.root).sound
        assert not launched.processes()


def test_a_signal_while_replicas_load_leaves_none(tmp_path: Path, launched: Launched) -> None:
    paths = RunPaths(tmp_path / "run")
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4)
    runner = Runner(launch_overrides(paths.root, prompts, launched, replicas=2), log=tmp_path / "stopped.log")
    assert runner.wait_until(lambda: len(launched.servers()) == 2)
    runner.process.send_signal(signal.SIGINT)
    assert runner.wait() == 130
    assert "stopped before anything was generated" in runner.output()
    assert "Traceback" not in runner.output()
    assert launched.are_gone()
    assert not paths.has_data()
