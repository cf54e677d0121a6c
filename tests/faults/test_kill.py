"""R3: SIGKILL at any instant loses nothing, repeats at most what was in flight, and changes no token."""

import random
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest

from rollstream.store.paths import RunPaths
from rollstream.store.validate import validate_run
from tests.faults.runs import Runner, file_size, overrides, run_to_end, stub_server, write_prompts

N, IN_FLIGHT = 3, 32
TOKEN_COLUMNS = [
    "index",
    "repeat",
    "trajectory",
    "prompt_ids",
    "response_ids",
    "response_mask",
    "response_logprobs",
]


def served(url: str) -> int:
    with urllib.request.urlopen(f"{url}/stub/stats") as reply:
        return int(orjson.loads(reply.read())["answered"])


def durable_bytes(paths: RunPaths) -> int:
    return sum(file_size(path) for path in paths.journals.glob("*.rsj"))


def phases(paths: RunPaths, rng: random.Random) -> dict[str, Callable[[], bool]]:
    """When to kill, by what is being done. Each is polled until it holds."""
    started: list[float] = []
    moment = rng.uniform(0.0, 0.5)
    begun, opening_moment = time.monotonic(), rng.uniform(0.5, 3.0)

    def generating() -> bool:
        if durable_bytes(paths) and not started:
            started.append(time.monotonic())
        return bool(started) and time.monotonic() - started[0] > moment

    least: list[int] = []

    def committing() -> bool:
        now = durable_bytes(paths)
        least[:] = [min(now, *least)] if least else [now]  # what an earlier run left may be sealed first
        return now > least[0]

    return {
        "generating": generating,
        "committing": committing,
        "sealing": lambda: any(paths.batches.glob("*.tmp")),
        "opening": lambda: time.monotonic() - begun > opening_moment,
        "merging": lambda: (paths.root / "trajectories.parquet.tmp").exists(),
    }


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("rows", "midway", "number"), [(150, 2, 8), pytest.param(500, 21, 30, marks=pytest.mark.soak)]
)
def test_kills_lose_nothing_and_repeat_at_most_what_was_in_flight(
    tmp_path: Path, rows: int, midway: int, number: int
) -> None:
    """So many kills: one of each kind, so many more midway, and for the rest while it merges."""
    rng = random.Random(20)
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    settings: dict[str, object] = {
        "actor_rollout_ref__rollout__n": N,
        "generation__max_in_flight": IN_FLIGHT,
        "generation__save_batch_size": 10,  # many seals, so that one is seen for certain
        "generation__show_progress": "false",
    }
    with stub_server("--response-tokens", "64", "--latency", "lognormal:0.15,0.5") as url:
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        run_to_end(overrides(whole, prompts, url, **settings), tmp_path / "whole.log")
        first = served(url)
        assert first == rows * N

        paths = RunPaths(killed)
        command = overrides(killed, prompts, url, **settings)
        plan = ["generating"] * 11 + ["committing"] * 4 + ["sealing"] * 4 + ["opening"] * 2
        rng.shuffle(plan)
        del plan[midway:]
        # Popped first: one of each for certain, since the first two leave nearly all to the others.
        plan += ["generating", "sealing", "opening", "committing"]
        kills: dict[str, int] = {}
        while sum(kills.values()) < number:
            phase = plan.pop() if plan else "merging"
            runner = Runner(command, log=tmp_path / f"kill-{sum(kills.values())}.log")
            if runner.wait_until(phases(paths, rng)[phase], every=0):
                runner.kill()
                kills[phase] = kills.get(phase, 0) + 1
            else:  # it ended before it was seen in this phase; then only merging is left to be killed
                assert runner.process.returncode == 0, runner.output()[-2000:]
                plan.clear()
                paths.artifact.unlink()
        run_to_end(command, tmp_path / "last.log")
        repeated = served(url) - first - rows * N

    assert sum(kills.values()) == number
    assert set(kills) == {"generating", "committing", "sealing", "opening", "merging"}
    assert 0 < repeated <= IN_FLIGHT * (number - kills["merging"])
    result = validate_run(killed)
    assert result.sound, result.problems
    assert not paths.damaged_files()
    ours = pq.read_table(paths.artifact, columns=TOKEN_COLUMNS)
    theirs = pq.read_table(whole / "trajectories.parquet", columns=TOKEN_COLUMNS)
    assert list(zip(ours["index"].to_pylist(), ours["repeat"].to_pylist(), strict=True)) == [
        (index, repeat) for index in range(rows) for repeat in range(N)
    ]
    assert ours.equals(theirs)
