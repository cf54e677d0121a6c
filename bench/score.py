"""What `rollstream score` costs beyond the reward itself, killed on its way and resumed.

    python -m bench.score [--quick] [--rollouts N] [--kills K] [--reward-ms MS]

A run of synthetic rollouts is scored by a reward that computes for a while. The command is killed with SIGKILL
after each part of the rollouts, and started again. CPU is of all its processes together, those that were killed
included; the reward's own CPU is that of the same calls in a plain loop.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from tests.support.view_runs import large_run

_REWARD = """
import hashlib

def compute_score(data_source, solution_str, ground_truth, extra_info):
    text = solution_str.encode()
    for _ in range({rounds}):
        text = hashlib.sha256(text).digest() + text[:32]
    return {{"score": text[0] / 255, "first": text[1]}}
"""
_COMMAND = "import sys; from rollstream.cli import main; sys.exit(main())"

_PR_SET_CHILD_SUBREAPER = 36


def _calls_cpu(reward: Path, calls: int) -> float:
    """CPU seconds of so many calls in a loop."""
    namespace: dict[str, object] = {}
    exec(reward.read_text(), namespace)
    score = namespace["compute_score"]
    assert callable(score)
    began = time.process_time()
    for number in range(calls):
        score(data_source="math", solution_str=f"It is {number}.", ground_truth="42", extra_info={})
    return time.process_time() - began


def _rounds(folder: Path, milliseconds: float) -> int:
    """Rounds that take about so long."""
    probe = folder / "probe.py"
    probe.write_text(_REWARD.format(rounds=1000))
    return max(1, round(milliseconds / (_calls_cpu(probe, 200) / 200 * 1000) * 1000))


def _scored(journal: Path) -> int:
    return journal.stat().st_size if journal.exists() else 0


def main() -> None:
    """Runs it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rollouts", type=int)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--reward-ms", type=float, default=1.0)
    options = parser.parse_args()
    rollouts = options.rollouts or (4_000 if options.quick else 100_000)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        root = large_run(folder / "run", rollouts, sealed_rows=10_000)
        reward = folder / "reward.py"
        reward.write_text(_REWARD.format(rounds=_rounds(folder, options.reward_ms)))
        calls = min(rollouts, 20_000)
        own = _calls_cpu(reward, calls) / calls * rollouts
        journal = root / "scores" / "anew.rsj"
        command = [sys.executable, "-c", _COMMAND, "score", str(root), "--reward", str(reward)]
        command += ["--name", "anew"]
        before, began = os.times(), time.monotonic()
        for part in range(options.kills):
            # A frame has some 60 bytes.
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
            wanted = rollouts * 60 * (part + 1) // (options.kills + 1)
            while _scored(journal) < wanted and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(signal.SIGKILL)
            process.wait()
            print(f"killed with {_scored(journal)} bytes of scores on disk", flush=True)
        subprocess.run(command, check=True)
        with contextlib.suppress(ChildProcessError):  # those whose parent was killed
            while True:
                os.wait()
        after = os.times()
        cpu = sum(after[at] - before[at] for at in (2, 3))
        table = pq.read_table(root / "scores" / "anew.parquet", columns=["index", "repeat"])
        keys = set(zip(table["index"].to_pylist(), table["repeat"].to_pylist(), strict=True))
        assert len(keys) == len(table) == rollouts, "each rollout once"
        print(
            f"{rollouts} rollouts, killed {options.kills} times, each scored once: {time.monotonic() - began:.0f} s; "
            f"CPU {cpu:.1f} s, the reward's own {own:.1f} s ({own / rollouts * 1e6:.0f} us a call): {cpu / own:.2f}"
        )


if __name__ == "__main__":
    main()
