"""Real runs in processes of their own, against the stub server, for the fault tests."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.demo import MODEL_PATH
from rollstream.store.export.files import read_rows
from rollstream.testing.stub_server import StubServer
from tests.support.until import PATIENCE_S
from tests.without_torch import without_torch

LONGEST_RUN_S = 240.0


@contextlib.contextmanager
def stub_in_thread(**fields: Any) -> Iterator[StubServer]:
    """A stub server in a thread of this process: a test may change its fields while a run goes on."""
    server, loop = StubServer(**fields), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        asyncio.run_coroutine_threadsafe(server.start(), loop).result(PATIENCE_S)
        yield server
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(PATIENCE_S)
        loop.close()


@contextlib.contextmanager
def stub_server(*options: str) -> Iterator[str]:
    """A stub server in its own process; gives its URL."""
    command = [sys.executable, "-m", "rollstream.testing.stub_server", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"]
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def write_prompts(path: Path, rows: int) -> Path:
    lines = [
        {
            "prompt": f"What is {i} + {i * 7 % 91}?",
            "data_source": "faults",
            "ground_truth": str(i + i * 7 % 91),
        }
        for i in range(rows)
    ]
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path


def overrides(run_dir: Path, prompts: Path, url: str, **settings: object) -> list[str]:
    chosen: dict[str, object] = {
        "actor_rollout_ref.model.path": MODEL_PATH,
        "actor_rollout_ref.rollout.name": "sglang",
        "actor_rollout_ref.rollout.server_urls": f"[{url}]",
        "actor_rollout_ref.rollout.response_length": 64,
        "data.max_prompt_length": 128,
        "data.train_files": prompts,
        "trainer.default_local_dir": run_dir,
        "generation.seed": 11,
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    return [f"{key}={value}" for key, value in chosen.items()]


def has_rollouts(root: Path) -> bool:
    """Whether a rollout is in a journal of the run: more than a file header and a bit."""
    return any(file_size(path) > 200 for path in (root / "journal").glob("*.rsj"))


def file_size(path: Path) -> int:
    """0 for a file that is gone: the run deletes journals while tests look at them."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def rows_of(run_dir: Path, *columns: str) -> list[dict[str, Any]]:
    """Of the artifact; all columns where none is named."""
    table = pq.read_table(run_dir / "trajectories.parquet", columns=list(columns) or None)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def check_same_rows(one: Path, other: Path) -> None:
    """Two runs' artifacts are equal, but for measured times and the last bits of log-probs.

    Those depend on which requests an engine computed together.
    """
    pairs = zip(*(read_rows(run / "trajectories.parquet") for run in (one, other)), strict=True)
    for row, same in pairs:
        for name in ("response_logprobs", "mean_logprob"):
            assert row.pop(name) == pytest.approx(same.pop(name), abs=1e-4)
        differing = {name for name in row.keys() | same.keys() if row.get(name) != same.get(name)}
        assert differing <= {"metrics", "finished_at"}


def check_each_is_there_once(run_dir: Path, rows: int, repeats: int) -> None:
    """R3, R5: every rollout, in order, and none has cost an attempt."""
    found = rows_of(run_dir, "index", "repeat", "attempts")
    assert found == [
        {"index": index, "repeat": repeat, "attempts": 1}
        for index in range(rows)
        for repeat in range(repeats)
    ]


class Runner:
    """`rollstream generate` in a process."""

    def __init__(
        self, arguments: Sequence[str], *, log: Path, preexec: Callable[[], None] | None = None
    ) -> None:
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rollstream.generation.main", *arguments],
                stdout=output,
                stderr=output,
                env={**without_torch(), "PYTHONUNBUFFERED": "1"},
                preexec_fn=preexec,
            )

    def wait(self) -> int:
        return self.process.wait(LONGEST_RUN_S)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(PATIENCE_S)

    def output(self) -> str:
        return self.log.read_text()

    def wait_until(self, condition: Callable[[], bool], *, every: float = 0.005) -> bool:
        """Polls, with `every=0` as fast as it can; False when the process ended first."""
        deadline = time.monotonic() + LONGEST_RUN_S
        while time.monotonic() < deadline:
            if condition():
                return True
            if self.process.poll() is not None:
                return False
            if every:
                time.sleep(every)
        raise TimeoutError(self.output()[-2000:])


def run_to_end(arguments: Sequence[str], log: Path) -> Runner:
    runner = Runner(arguments, log=log)
    assert runner.wait() == 0, runner.output()[-3000:]
    return runner
