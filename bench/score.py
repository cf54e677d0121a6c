"""What `rollstream score` costs beyond the reward itself, killed three times on its way and resumed.

    python -m bench.score [--quick] [--json FILE]

A run of synthetic rollouts is scored by a reward that computes for a millisecond. The command is killed
(SIGKILL) after each quarter of the rollouts, and started again. CPU is that of all its processes, those that were
killed included; the reward's own is that of the same calls in a plain loop.
"""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bench.report import parse_options, print_table, write_json
from rollstream.store.run import Run
from rollstream.store.scores import pass_folder
from tests.support.view_runs import large_run

_REWARD = """
import hashlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    text = solution_str.encode()
    for _ in range({rounds}):
        text = hashlib.sha256(text).digest() + text[:32]
    return {{"score": text[0] / 255, "first": text[1]}}
"""
_CALL_S = 0.001
_KILLS = 3
_PR_SET_CHILD_SUBREAPER = 36


def _cpu_of_calls(reward: Path, calls: int) -> float:
    """CPU seconds of a call, in a loop of so many."""
    namespace: dict[str, Any] = {}
    exec(reward.read_text(), namespace)
    began = time.process_time()
    for number in range(calls):
        namespace["compute_score"]("math", f"It is {number}.", "42", {})
    return (time.process_time() - began) / calls


def _write_reward(path: Path) -> None:
    path.write_text(_REWARD.format(rounds=1000))
    path.write_text(_REWARD.format(rounds=round(1000 * _CALL_S / _cpu_of_calls(path, 500))))


def _scored(folder: Path) -> int:
    return Run.open(folder).state().keys.done if (folder / "run.json").exists() else 0


def _run(folder: Path, rollouts: int) -> dict[str, Any]:
    root, reward = large_run(folder / "run", rollouts, sealed_rows=10_000), folder / "reward.py"
    _write_reward(reward)
    own = [_cpu_of_calls(reward, rollouts // 10)]
    command = [sys.executable, "-m", "rollstream.cli", "score", str(root), "--reward", str(reward)]
    command += ["--name", "anew", "--json"]
    before, began = os.times(), time.monotonic()
    for kill in range(1, _KILLS + 1):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wanted = rollouts * kill // (_KILLS + 1)
        while _scored(pass_folder(root, "anew")) < wanted and process.poll() is None:
            time.sleep(0.2)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with contextlib.suppress(ChildProcessError):  # those whose parent was killed
        while True:
            os.wait()
    after, seconds = os.times(), time.monotonic() - began
    own.append(_cpu_of_calls(reward, rollouts // 10))
    table = pq.read_table(root / "scores" / "anew.parquet", columns=["index", "repeat"])
    keys = set(zip(table["index"].to_pylist(), table["repeat"].to_pylist(), strict=True))
    assert len(keys) == len(table) == rollouts, "each rollout once"
    cpu = after.children_user + after.children_system - before.children_user - before.children_system
    reward_cpu = sum(own) / len(own) * rollouts
    return {
        "rollouts": rollouts,
        "killed": _KILLS,
        "s": seconds,
        "CPU s": cpu,
        "reward's CPU s": reward_cpu,
        "ratio": cpu / reward_cpu,
        "peak MB of a process": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
    }


def main() -> None:
    """Measures and prints."""
    options = parse_options(__doc__ or "")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory() as name:
        rows = [_run(Path(name), 4_000 if options.quick else 100_000)]
    print_table("scoring anew, killed and resumed", rows)
    write_json(options.json, "score", rows)


if __name__ == "__main__":
    main()
