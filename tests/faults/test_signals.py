"""Ctrl-C and SIGTERM: stop, seal, say how to go on; a second Ctrl-C stops at once and loses nothing."""

import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from rollstream.stop_signals import TOGETHER_S
from rollstream.store.paths import RunPaths
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from rollstream.testing.stub_faults import Faults, Latency
from tests.faults.runs import Runner, has_rollouts, overrides, run_to_end, stub_in_thread, write_prompts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_seals_and_says_how_to_resume(tmp_path: Path, number: signal.Signals) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 120)
    paths = RunPaths(tmp_path / "run")
    with stub_in_thread(response_tokens=64, latency=Latency("fixed", 1.0)) as server:
        command = overrides(paths.root, prompts, server.url, generation__max_in_flight=16)
        runner = Runner(command, log=tmp_path / "stopped.log")
        assert runner.wait_until(lambda: has_rollouts(paths.root))
        runner.process.send_signal(number)
        assert runner.wait() == 128 + number
        output = runner.output()
        words = [sys.executable, "-m", "rollstream.generation.main", *command]
        assert f"resume with: {shlex.join(words)}\n" in output
        status = read_status(paths.root)
        assert 0 < status.completed < 120
        assert (status.pending_rows, status.saved_batches) == (0, 1)
        server.latency = Latency()
        run_to_end(command, tmp_path / "resumed.log")
    assert validate_run(paths.root).sound
    assert read_status(paths.root).completed == 120


def test_a_second_ctrl_c_stops_at_once_and_loses_nothing(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 40)
    paths = RunPaths(tmp_path / "run")
    with stub_in_thread(response_tokens=64, faults=Faults(hang=0.5)) as server:
        command = overrides(
            paths.root, prompts, server.url, generation__max_in_flight=16, generation__grace_period=1000
        )
        runner = Runner(command, log=tmp_path / "stopped.log")
        assert runner.wait_until(lambda: has_rollouts(paths.root))
        runner.process.send_signal(signal.SIGINT)
        assert runner.wait_until(lambda: "stopping:" in runner.output())
        before = read_status(paths.root).completed
        time.sleep(TOGETHER_S)  # sooner it would be the same one
        runner.process.send_signal(signal.SIGINT)
        assert runner.wait() == 130
        assert "stopped at once" in runner.output()
        assert read_status(paths.root).completed >= before > 0


def test_a_signal_while_the_engine_starts_leaves_nothing_behind(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 4)
    paths = RunPaths(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections and never answers
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        runner = Runner(overrides(paths.root, prompts, url), log=tmp_path / "stopped.log")
        assert runner.wait_until(lambda: "4 owed" in runner.output())
        runner.process.send_signal(signal.SIGINT)
        assert runner.wait() == 130
    assert "stopped before anything was generated" in runner.output()
    assert "Traceback" not in runner.output()
    assert not paths.has_data()
