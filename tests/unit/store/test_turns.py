"""R2, R3: turns through kills at any instant, against a reference in memory."""

import asyncio
import errno
import os
import random
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from rollstream.errors import StorageError
from rollstream.store import turns as turns_module
from rollstream.store.paths import RunPaths
from rollstream.store.records import EncodedTurn, RecordCodec, TurnRecord
from rollstream.store.run import Run
from rollstream.store.summary import read_status
from rollstream.store.validate import validate_run
from rollstream.store.writer import StoreWriter
from rollstream.trajectory import Completion, Failure, Metrics, RolloutKey
from tests.unit.store.fabric import N, failure, flip, open_dir, rollout, writing
from tests.unit.store.test_run import looking

ROLLOUTS = 6


def turn(key: RolloutKey, number: int, mark: int) -> EncodedTurn:
    completion = Completion([mark], None, "stop")
    record = TurnRecord("k", b"", b"", [], [], completion, None, Metrics())
    return EncodedTurn(key, number, RecordCodec().encode_turn(record))


def read(root: Path) -> dict[RolloutKey, list[bytes]]:
    """Bodies by rollout, as the next process finds them."""
    with open_dir(root) as run:
        writer = StoreWriter(run, save_batch_size=100, pull_timeout=60)
        keys = [RolloutKey(index, repeat) for index in range(ROLLOUTS) for repeat in range(N)]
        found = {key: bodies for key in keys if (bodies := writer.turns_of(key))}
        assert len(run.state.turns) == len(found)
        return found


class Life:
    """Rollouts that take turns, begin anew, are done and fail.

    Attributes:
        past: the turns that each rollout had, one list after each step.
        done: where in its past a rollout was done.
    """

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.past: defaultdict[RolloutKey, list[list[bytes]]] = defaultdict(lambda: [[]])
        self.done: dict[RolloutKey, int] = {}
        self.marks = 0

    def step(self, writer: StoreWriter) -> None:
        key = RolloutKey(self.chance.randrange(ROLLOUTS), self.chance.randrange(N))
        if key in self.done:
            return
        past, what = self.past[key], self.chance.random()
        if what < 0.9:
            number = self.chance.randrange(len(past[-1]) + 1) if what < 0.1 else len(past[-1])
            self.marks += 1
            one = turn(key, number, self.marks)
            past.append([*past[-1][:number], one.body])
            writer.keep(one)
        elif what < 0.95 or key.repeat:
            past.append([])
            self.done[key] = len(past) - 1
            writer.submit(rollout(key.index, key.repeat))
        else:
            past.append([])
            writer.submit(failure(key.index))

    def killed(self, found: dict[RolloutKey, list[bytes]], run: Run, durable: dict[RolloutKey, int]) -> None:
        """Compares what is there with what may be, and goes on from it."""
        keys = run.state().keys
        for key, past in self.past.items():
            bodies = found.get(key, [])
            if keys.is_done(key.index, key.repeat):
                assert key in self.done and bodies == []
            else:
                assert self.done.get(key, len(past)) > durable.get(key, 0)
                assert bodies in past[durable.get(key, 0) : self.done.get(key)], key
                self.done.pop(key, None)
            self.past[key] = [bodies]
        self.done = dict.fromkeys(self.done, 0)


@pytest.mark.parametrize("seed", range(12))
async def test_kills_leave_the_first_turns_of_each_rollout(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns_module, "_FILE_BYTES", 500)
    life, root, chance = Life(seed), tmp_path / "0", random.Random(seed)
    for kill in range(1, 7):
        copy, left = tmp_path / str(kill), [-1]

        def look(copy: Path = copy, left: list[int] = left, root: Path = root) -> None:
            left[0] -= 1
            if left[0] == 0:
                shutil.copytree(root, copy)

        with writing(root, save_batch_size=1000) as (_, writer), looking(look):
            for _ in range(chance.randrange(40)):
                life.step(writer)
                if chance.random() < 0.3:
                    await asyncio.sleep(0)
            await writer._at_rest()
            durable = {key: len(past) - 1 for key, past in life.past.items()}
            synced = 0 if writer._turns._file is None else writer._turns._file.end
            left[0] = chance.randrange(1, 8)
            for _ in range(chance.randrange(30)):
                life.step(writer)
                if chance.random() < 0.3:
                    await asyncio.sleep(0.001)
            await writer._at_rest()
            left[0] = max(left[0], 1) if not copy.exists() else -1
            look()
            if not copy.exists():
                shutil.copytree(root, copy)
            number = writer._turns._number
            await writer.close(seal=False)
        last = copy / "turns" / f"{number:06d}.rsj"
        if (
            synced
            and last.exists()
            and chance.random() < 0.5
            and number == max(RunPaths(copy).turn_numbers())
        ):
            size = chance.randint(min(synced, last.stat().st_size), last.stat().st_size)
            if not life.done and not list((copy / "failed").iterdir()):
                last.write_bytes(last.read_bytes()[:size])
        assert validate_run(copy).sound
        found = read(copy)
        assert read_status(copy).half_done == len(found)
        life.killed(found, Run.open(copy), durable)
        root = copy
    with writing(root, save_batch_size=4) as (run, writer):
        for index in range(ROLLOUTS):
            for repeat in range(N):
                await writer.commit(rollout(index, repeat))
        await writer.close()
        assert not run.state.turns
        assert run.paths.turn_numbers() == []
    assert read_status(root).half_done == 0


async def test_what_failed_has_none_and_damage_costs_the_turns_behind_it(tmp_path: Path) -> None:
    keys = [RolloutKey(index, 0) for index in range(3)]
    with writing(tmp_path, save_batch_size=100) as (_, writer):
        for number in range(4):
            for key in keys:
                writer.keep(turn(key, number, number))
        await writer.commit(Failure(0, 0, "k", 1, "agent", "no", "", 1.0))
        await writer.close()
    found = read(tmp_path)
    assert {key: len(bodies) for key, bodies in found.items()} == dict.fromkeys(keys[1:], 4)
    file = tmp_path / "turns" / "000000.rsj"
    flip(file, 0.6)
    assert [problem.partition(":")[0] for problem in validate_run(tmp_path).problems] == ["turns/000000.rsj"]
    after = read(tmp_path)
    assert sorted(map(len, after.values())) in ([1, 4], [2, 4], [3, 4])
    assert all(bodies == found[key][: len(bodies)] for key, bodies in after.items())
    assert validate_run(tmp_path).sound
    assert [path.name for path in (tmp_path / "damaged").iterdir()] == ["000000.rsj"]


async def test_a_full_disk_breaks_the_writer_and_leaves_the_turns_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    key = RolloutKey(0, 0)
    with writing(tmp_path, save_batch_size=100) as (_, writer):
        writer.keep(turn(key, 0, 0))
        await writer._at_rest()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", full)
            writer.keep(turn(key, 1, 1))
            with pytest.raises(StorageError, match="No space left"):
                await writer.failed
        writer.keep(turn(key, 2, 2))
        await writer.close(seal=False)
    assert {key: len(bodies) for key, bodies in read(tmp_path).items()} == {key: 1}
