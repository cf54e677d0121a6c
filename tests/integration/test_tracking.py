"""Whole runs that are tracked: every figure arrives, and no tracker is ever in the way."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import pytest

from rollstream.cli import main as cli
from rollstream.errors import ConfigError, RunDirectoryError
from rollstream.generation import run as run_module
from rollstream.generation import trackers
from rollstream.generation.run import as_config, generate, run_generation
from rollstream.generation.trackers import Staged, TrackedRun
from rollstream.store.run_dir import lock_run
from rollstream.store.validate import validate_run
from rollstream.testing.stub_faults import Latency
from tests.faults.runs import stub_in_thread
from tests.integration.test_generation import PAIRS, config, write_sums
from tests.support.until import until
from tests.unit.generation.test_trackers import Recorder
from tests.unit.integrations.tracking.test_tensorboard import scalars

REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return {}\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with stub_in_thread(response_tokens=16, latency=Latency("fixed", 0.05)) as server:
        yield server.url


@pytest.fixture
def run(tmp_path: Path, url: str) -> dict[str, Any]:
    files = write_sums(tmp_path / "sums.jsonl", PAIRS)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD.format("float(extra_info['a'] % 2)"))
    run = config(tmp_path / "run", files, custom_reward_function__path=str(reward))
    run["actor_rollout_ref"]["rollout"] |= {"name": "sglang", "server_urls": [url]}
    return run


def lines(run_dir: Path) -> list[dict[str, Any]]:
    content = (run_dir / "logs" / "metrics.jsonl").read_bytes()
    return [orjson.loads(line) for line in content.splitlines()]


def with_trackers(monkeypatch: pytest.MonkeyPatch, **trackers: object) -> None:
    monkeypatch.setattr(run_module, "load_trackers", lambda names: trackers)


def test_the_last_line_is_what_the_run_came_to(run: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    run["trainer"]["logger"] = ["jsonl", "tensorboard"]
    result = run_generation(run)
    last = lines(result.run_dir)[-1]
    assert (last["progress/done"], last["progress/total"], last["queue/in_flight"]) == (24, 24, 0)
    assert last["reward/mean_of_run"] == result.mean_reward == pytest.approx(last["reward/sums/mean"])
    assert last["reward/scored"] == 24
    assert last["queue/pending_rows"] == 0
    assert last["queue/saved_batches"] == len(list((result.run_dir / "batches").glob("*.parquet")))
    assert last["rate/rollouts_per_second"] > 0
    found = scalars(result.run_dir / "logs" / "tensorboard")
    assert found["progress/done"][-1] == (last["step"], 24.0)
    # A run with nothing left to do tells nobody anything.
    before = (result.run_dir / "logs" / "metrics.jsonl").read_bytes()
    run_generation(run)
    assert (result.run_dir / "logs" / "metrics.jsonl").read_bytes() == before
    assert validate_run(result.run_dir).sound


def test_a_tracker_that_cannot_work_is_refused_before_anything_is_made(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run["trainer"]["logger"] = ["console", "tensorbord"]
    with pytest.raises(ConfigError, match="did you mean 'tensorboard'"):
        run_generation(run)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("tensorboard", "trackio", "wandb", "mlflow", "swanlab"):
        run["trainer"]["logger"] = ["console", name]
        with pytest.raises(ConfigError, match=rf"pip install 'rollstream\[{name}\]'"):
            run_generation(run)
    run["trainer"]["logger"] = ["console"]
    run["generation"]["upload_artifact"] = True
    with pytest.raises(ConfigError, match=r"pip install 'rollstream\[wandb\]'"):
        run_generation(run)
    assert not (tmp_path / "run").exists()


def test_a_port_in_use_is_refused_before_anything_is_made(run: dict[str, Any], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        run["generation"]["metrics_port"] = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"generation\.metrics_port"):
            run_generation(run)
        path = tmp_path / "config.yaml"
        path.write_bytes(orjson.dumps(run))
        assert cli(["generate", "--config", str(path), "--dry-run"]) == 2
    assert not (tmp_path / "run").exists()
    assert cli(["generate", "--config", str(path), "--dry-run"]) == 0


class Late(Recorder):
    """Looks, when it writes what is left, whether the run directory is still the run's own."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__()
        self.run_dir = run_dir
        self.refused: str | None = None

    def close(self, *, succeeded: bool) -> None:
        try:
            lock_run(self.run_dir).release()
        except RunDirectoryError as error:
            self.refused = str(error)
        super().close(succeeded=succeeded)


def test_the_lock_is_held_until_trackers_have_ended(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write into the run directory, as `jsonl` and `tensorboard` do."""
    late = Late(tmp_path / "run")
    with_trackers(monkeypatch, late=late)
    assert run_generation(run).completed == 24
    assert late.ended is True
    assert late.refused is not None
    lock_run(tmp_path / "run").release()  # and given back then


async def test_metrics_are_there_while_the_run_goes_on(
    run: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    run["generation"]["metrics_port"] = 0
    run["actor_rollout_ref"]["rollout"]["n"] = 20
    run["generation"]["max_in_flight"] = 20
    pages: list[str] = []
    scraping: list[asyncio.Task[None]] = []

    async def scrape() -> None:
        said = next(record for record in caplog.records if "metrics for Prometheus" in record.getMessage())
        async with aiohttp.ClientSession() as client:
            while True:
                async with client.get(said.getMessage().split(": ")[1]) as answer:
                    pages.append(await answer.text())
                await asyncio.sleep(0.02)

    with caplog.at_level(logging.INFO, "rollstream"):
        result = await generate(
            as_config(run), on_ready=lambda: scraping.append(asyncio.ensure_future(scrape()))
        )
    scraping[0].cancel()
    await asyncio.gather(*scraping, return_exceptions=True)
    assert result.completed == 240
    values = [
        float(line.split()[1])
        for page in pages
        for line in page.splitlines()
        if line.startswith("rollstream_rollouts_completed_total")
    ]
    assert values == sorted(values)
    assert len(set(values)) > 2
    assert "rollstream_queue_cap 20.0" in pages[0]


class Uploads(Recorder):
    """Takes artifacts, or fails at it."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.taken: list[tuple[str, str, list[str]]] = []
        self.release = threading.Event()
        self.hang = False
        self.staged = False

    def upload(self, run: TrackedRun, file: Path, name: str) -> str:
        if self.error is not None:
            raise self.error
        if self.hang:
            self.release.wait(60)
        with zipfile.ZipFile(file) as archive:
            self.taken.append((run.run_id, name, archive.namelist()))
        return Staged(f"there/{name}") if self.staged else f"there/{name}"


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> Uploads:
    """What takes the artifacts of runs, whose trackers need not be installed."""
    uploads = Uploads()
    monkeypatch.setattr("rollstream.generation.upload.load_uploader", lambda: uploads)
    monkeypatch.setattr("rollstream.generation.plan.check_trackers", lambda names, *, upload: None)
    return uploads


@pytest.mark.parametrize("merged", [True, False])
def test_the_trajectories_are_uploaded(run: dict[str, Any], merged: bool, uploads: Uploads) -> None:
    run["generation"] |= {"upload_artifact": True, "final_merge": merged}
    result = run_generation(run)
    assert result.uploaded == "there/trajectories-generation"
    run_id = orjson.loads((result.run_dir / "run.json").read_bytes())["run_id"]
    expected = ["trajectories.parquet"] if merged else [f"batches/batch_00000{i}.parquet" for i in range(4)]
    assert uploads.taken == [(run_id, "trajectories-generation", [*expected, "checkpoint.json"])]
    with zipfile.ZipFile(result.run_dir / "trajectories.zip") as archive:
        assert orjson.loads(archive.read("checkpoint.json"))["completed"] == 24


def test_nothing_is_uploaded_twice(
    run: dict[str, Any], uploads: Uploads, caplog: pytest.LogCaptureFixture
) -> None:
    run["generation"]["upload_artifact"] = True
    uploads.error = ConnectionError("no network")
    failed = run_generation(run)
    assert (failed.exit_code, failed.uploaded, failed.artifact_rows) == (0, None, 24)
    assert f"rollstream export {failed.run_dir} --format zip --upload" in caplog.text
    uploads.error = None
    said = [run_generation(run).uploaded for _ in range(3)]
    assert (said, len(uploads.taken)) == (["there/trajectories-generation"] * 3, 1)

    run["generation"]["upload_artifact"] = "mine"
    uploads.staged = True  # nobody knows whether that will be sent
    assert [run_generation(run).uploaded for _ in range(2)] == ["there/mine"] * 2
    assert len(uploads.taken) == 3
    uploads.staged = False
    assert run_generation(run).uploaded == "there/mine"
    run["trainer"]["project_name"] = "another"
    run_generation(run)
    run["generation"]["final_merge"] = False  # the batches go up instead
    result = run_generation(run)
    assert len(uploads.taken) == 6
    note = result.run_dir / "logs" / "uploaded.json"
    for torn in (b"", b"[]", b'{"place": 5}'):
        note.write_bytes(torn)
        run_generation(run)
    assert len(uploads.taken) == 9

    next((result.run_dir / "batches").glob("*.parquet")).unlink()  # the artifact gives its rollouts back
    assert run_generation(run).generated == 0
    run_generation(run)
    assert len(uploads.taken) == 10


def test_each_shard_has_an_artifact_of_its_own(run: dict[str, Any], uploads: Uploads) -> None:
    run["generation"] |= {"upload_artifact": True, "shard": "1/3"}
    assert run_generation(run).uploaded == "there/trajectories-generation-1-of-3"


def test_an_export_that_fails_is_in_nobodys_way(run: dict[str, Any], uploads: Uploads) -> None:
    pytest.importorskip("tensordict")
    reward = Path(run["custom_reward_function"]["path"])
    reward.write_text(REWARD.format("1.0 if extra_info['a'] % 2 else 1 / 0"))
    run["generation"] |= {"upload_artifact": True, "export": ["dataproto", "jsonl"]}
    with pytest.raises(ConfigError, match=r"of 24 rows have no reward.*generation\.export_unscored"):
        run_generation(run)
    root = Path(run["trainer"]["default_local_dir"])
    rows = [orjson.loads(line) for line in (root / "trajectories.jsonl").read_bytes().splitlines()]
    assert (len(rows), len(uploads.taken)) == (24, 1)
    assert not (root / "trajectories.pkl").exists()

    from rollstream.integrations.verl.dataproto import read_dataproto

    scored = sum(row["reward"] is not None for row in rows)
    assert 0 < scored < 24
    run["generation"] |= {"export_unscored": "drop", "max_failed_share": 1.0}
    assert run_generation(run).exit_code == 0
    assert len(read_dataproto(root / "trajectories.pkl")) == scored
    run["generation"]["export_unscored"] = "keep"
    assert run_generation(run).exit_code == 0
    assert len(read_dataproto(root / "trajectories.pkl")) == 24


async def test_an_upload_that_hangs_ends_with_the_signal(
    run: dict[str, Any], uploads: Uploads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uploads.hang = True
    with_trackers(monkeypatch, wandb=uploads)
    monkeypatch.setattr(trackers, "FLUSH_STOPPED_S", 0.2)
    run["generation"]["upload_artifact"] = True
    stop = run_module.StopSignals()
    try:
        with caplog.at_level(logging.INFO, "rollstream"):
            task = asyncio.ensure_future(generate(as_config(run), stop=stop))
            await until(lambda: "uploading" in caplog.text)
            stop.signal = 15
            stop.requested.set()
            result = await task  # the upload hangs until the test ends
        assert (result.completed, result.uploaded) == (24, None)
        assert "the upload was stopped" in caplog.text
    finally:
        uploads.release.set()


@pytest.mark.slow
def test_wandb_offline_from_the_command_line(
    run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same run stopped and resumed goes on by the same id; the zip is an artifact of it."""
    pytest.importorskip("wandb")
    path = tmp_path / "config.yaml"
    run["trainer"]["logger"] = ["jsonl", "wandb"]
    run["generation"]["upload_artifact"] = True
    path.write_bytes(orjson.dumps(run))
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}

    def command(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "rollstream.generation.main", "--config", str(path), "--json", *words],
            env=env | {"WANDB_MODE": "offline"},
            capture_output=True,
            text=True,
            timeout=200,
        )

    done = command()
    assert done.returncode == 0, done.stderr
    said = orjson.loads(done.stdout)  # nothing of W&B's is in it
    assert "URL not available" not in done.stderr
    assert "wandb sync" in said["uploaded"]
    run_id = orjson.loads((tmp_path / "run" / "run.json").read_bytes())["run_id"]
    folders = list((tmp_path / "run" / "logs" / "wandb").glob(f"offline-run-*-{run_id}"))
    assert len(folders) == 2  # the run's, and the one of its artifact
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert cli(["export", str(tmp_path / "run"), "--format", "jsonl", "--upload"]) == 2
    assert cli(["export", str(tmp_path / "run"), "--format", "zip", "--upload", "no name"]) == 2
    assert validate_run(tmp_path / "run").sound
