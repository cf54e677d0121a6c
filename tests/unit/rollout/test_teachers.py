"""Teachers of a training: who is asked about which rollout, and what becomes of one whose teacher is away."""

import asyncio
import json
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError
from rollstream.rollout.annotate import Teacher
from rollstream.rollout.teachers import ERROR, NAME, Teachers
from rollstream.testing.stub_faults import Faults
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import STREAMS, Rollout
from tests.support.view_runs import rollout

PROMPT = 10
"""Tokens of the prompts that `rollout` makes."""
OWN = (MODEL_PATH / "tokenizer.json").read_bytes()


def stub(version: str = "default", **model: Any) -> StubServer:
    server = StubServer(model=StubModel(str(MODEL_PATH), **model))
    server.weight_version = version
    return server


def value(at: int, version: str = "default") -> float:
    """The stub's log-prob of the token at a position."""
    return -((crc32(version.encode()) + 31 * at) % 97) / 9


async def taught(teachers: Teachers, *rollouts: Rollout) -> list[Rollout]:
    await teachers.start(OWN)
    try:
        await asyncio.gather(*map(teachers.teach, rollouts))
    finally:
        await teachers.close()
    return list(rollouts)


async def test_values_stand_at_sampled_tokens_of_all_that_is_trained_on() -> None:
    last = rollout(1, 0, length=6, response_mask=[1, 1, 0, 0, 1, 0])
    snapshot, side = (rollout(1, 1, length=5).trajectories[0] for _ in range(2))
    snapshot.is_snapshot = side.is_snapshot = True
    side.extra = {"gateway": {"side_call": True}}
    whole = Rollout(1, 0, last.prompt_key, [side, snapshot, *last.trajectories], "sums")
    async with stub() as server:
        teachers = Teachers(server.url)
        await taught(teachers, whole)
        assert side.streams == {}
        assert snapshot.streams[NAME] == pytest.approx([value(PROMPT + at) for at in range(5)], abs=1e-6)
        wanted = [value(PROMPT + at) if at in (0, 1, 4) else 0.0 for at in range(6)]
        assert whole.final.streams[NAME] == pytest.approx(wanted, abs=1e-6)
        made = teachers.made[NAME]
        assert (made["engine"], made["mode"], made["temperature"]) == ("sglang", "raw", 1.0)
        asked = server.stats.requests
        await taught(Teachers(server.url), whole)  # as after a restart
        assert server.stats.requests == asked


async def test_each_row_names_its_teacher() -> None:
    rows = [
        rollout(at, 0, extra={"judge": name} if name else {}) for at, name in enumerate(["a", "b", "", None])
    ]
    async with stub("a") as one, stub("b") as other:
        teachers = Teachers({"a": one.url, "b": other.url}, column="judge")
        await taught(teachers, *rows)
        for row, name in zip(rows, ("a", "b"), strict=False):
            wanted = [value(PROMPT + at, name) for at in range(4)]
            assert row.final.streams[NAME] == pytest.approx(wanted, abs=1e-6)
        assert not any(STREAMS in row.final.extra or ERROR in row.final.extra for row in rows[2:])
        assert teachers.made[NAME]["model"].startswith("a: ")
        with pytest.raises(
            ConfigError, match=r"row 7 names the teacher 'c' \(column 'judge'\); there are: a, b"
        ):
            await taught(
                Teachers({"a": one.url, "b": other.url}, column="judge"), rollout(7, 0, extra={"judge": "c"})
            )


async def test_a_teacher_that_comes_back_costs_no_rollout_its_values() -> None:
    rows = [rollout(at, 0) for at in range(8)]
    async with stub() as server:
        teachers = Teachers(server.url, patience=600.0)
        await teachers.start(OWN)
        server.faults = Faults(broken_http=True)
        asking = [asyncio.create_task(teachers.teach(row)) for row in rows]
        asked = server.stats.health_checks
        while server.stats.health_checks < asked + 3:  # it is waited for
            assert not any(task.done() for task in asking)
            await asyncio.sleep(0.01)
        server.faults = Faults()
        await asyncio.gather(*asking)
        await teachers.close()
    assert all(len(row.final.streams[NAME]) == 4 and ERROR not in row.final.extra for row in rows)


async def test_who_stays_away_leaves_a_reason_and_no_zeros(caplog: pytest.LogCaptureFixture) -> None:
    rows = [rollout(at, 0, reward=1.0) for at in range(8)]
    async with stub() as server:
        teachers = Teachers(server.url, patience=0.3)
        await teachers.start(OWN)
        server.faults = Faults(broken_http=True)
        await asyncio.gather(*map(teachers.teach, rows))
        await teachers.close()
    for row in rows:
        assert STREAMS not in row.final.extra and "away for more than 0.3 s" in row.final.extra[ERROR]
        assert (row.final.reward, row.final.reward_extra) == (1.0, rollout(0, 0).final.reward_extra)
    assert caplog.text.count("has no teacher") == 5  # the others quietly


async def test_who_is_stopped_does_not_wait() -> None:
    row = rollout(0, 0)
    async with stub() as server:
        teachers = Teachers(server.url, patience=600.0)
        await teachers.start(OWN)
        server.faults, asked = Faults(broken_http=True), server.stats.health_checks
        asking = asyncio.create_task(teachers.teach(row))
        while server.stats.health_checks == asked:
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await teachers.close()
    assert not row.final.extra


async def test_one_that_a_teacher_cannot_take_fails_alone() -> None:
    async with stub(context_length=50) as server:
        short, long = await taught(Teachers(server.url), rollout(0, 0), rollout(1, 0, length=60))
    assert NAME in short.final.streams and ERROR not in short.final.extra
    assert NAME not in long.final.streams and "max_model_len 50" in long.final.extra[ERROR]


@pytest.mark.parametrize("given", [(), {"": "x", "b": ""}, {"a": ""}, ""])
def test_nobody_is_no_teacher(given: Any) -> None:
    with pytest.raises(ConfigError):
        Teachers(given)


async def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    content = json.loads(OWN)
    vocabulary = content["model"]["vocab"]
    first, second, *_ = (token for token, number in vocabulary.items() if number > 300)
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    teachers = Teachers(Teacher("hf", str(MODEL_PATH), tokenizer=str(tmp_path)))
    with pytest.raises(ConfigError, match="another vocabulary"):
        await teachers.start(OWN)
    await teachers.close()
