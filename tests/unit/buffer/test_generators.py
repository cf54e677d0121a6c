"""Rollouts: real generator processes over a ledger in memory."""

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.buffer.generator_files import GeneratorFiles
from rollstream.buffer.generator_process import cut_log
from rollstream.buffer.generators import Rollouts, UnknownTaskError, with_token
from rollstream.buffer.ledger import LedgerSettings
from rollstream.buffer.rollout_record import RolloutRecord
from rollstream.engine.launch_guard import marked
from rollstream.errors import ConfigError, StorageError
from rollstream.rollout.retry import RetryPolicy

QUICK = RetryPolicy(max_attempts=3, delay=0.01, delay_max=0.02)
PATIENCE_S = 30.0


@dataclass
class MemoryLedger:
    """What rollouts need of a ledger."""

    records: dict[str, RolloutRecord] = field(default_factory=dict)
    items_written: int = 0
    tasks: list[tuple[str, int, int | None]] = field(default_factory=list)
    finished: dict[int | str, int] = field(default_factory=dict)
    broken: bool = False
    settings: LedgerSettings = field(default_factory=lambda: LedgerSettings(remember_uids=100))
    held: set[str] = field(default_factory=set)
    """Rollouts of which items are stored."""

    async def set_task(self, task_type: str, group_size: int, judge_from: int | None = None) -> None:
        self.tasks.append((task_type, group_size, judge_from))

    async def save_rollout(self, record: RolloutRecord) -> None:
        await asyncio.sleep(0)
        if self.broken:
            raise StorageError("no room")
        self.records[record.rollout_id] = RolloutRecord.from_dict(
            orjson.loads(orjson.dumps(record.to_dict()))
        )

    def rollouts(self) -> list[RolloutRecord]:
        return list(self.records.values())

    def finished_counts(self, rollout_id: str) -> dict[int | str, int]:
        return self.finished

    def has_groups(self, rollout_id: str) -> bool:
        return rollout_id in self.held

    def stats(self) -> "MemoryLedger":
        return self


class World:
    """A folder with generator files, a ledger, and rollouts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = MemoryLedger()
        self.notes = folder / "notes"
        (folder / "files").mkdir()

    def generator(self, body: str, task: str = "math") -> None:
        """A generator that writes its payload to a file `notes/PID`, and then does `body`."""
        self.notes.mkdir(exist_ok=True)
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        (self.folder / "files" / f"{task}_generator.py").write_text(
            f"import json, os, pathlib, subprocess, sys, time\n"
            f"TASK_TYPE = {task!r}\n"
            f"NOTES = pathlib.Path({str(self.notes)!r})\n"
            f"def run_rollout(data):\n"
            f"    note = NOTES / str(os.getpid())\n"
            f"    (NOTES / 'part').write_text(json.dumps(data))\n"
            f"    (NOTES / 'part').rename(note)\n"
            f"{indented}\n"
        )

    def rollouts(self, **more: Any) -> Rollouts:
        files = GeneratorFiles(self.folder / "files")
        files.check()
        given = {"buffer_url": "http://127.0.0.1:1", "crashes": QUICK, **more}
        return Rollouts(self.ledger, files, directory=self.folder / "dir", **given)

    def runs(self) -> list[int]:
        """Pids of the generators that began, oldest first."""
        notes = [note for note in self.notes.iterdir() if note.name.isdigit()]
        return [int(note.name) for note in sorted(notes, key=lambda note: note.stat().st_mtime_ns)]

    def payload_of(self, pid: int) -> dict[str, Any]:
        found = orjson.loads((self.notes / str(pid)).read_bytes())
        assert isinstance(found, dict)
        return found


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


PAYLOAD: dict[str, Any] = {"task_type": "math", "num_repeat_per_sample": "8", "input_file": "x", "n": 1}


async def test_a_rollout_runs_in_its_process_and_finishes(world: World) -> None:
    world.generator("print('hello from the generator')")
    rollouts = world.rollouts(token="s/e c")
    record = await rollouts.start({**PAYLOAD, "remote_buffer_url": "http://elsewhere:8889"})
    assert world.ledger.records[record.rollout_id].state == "running"  # durable before it begins
    assert world.ledger.tasks == [("math", 8, None)]
    await until(lambda: rollouts.record(record.rollout_id).state == "finished")
    (pid,) = world.runs()
    assert pid != os.getpid()
    data = world.payload_of(pid)
    assert data["remote_buffer_url"] == "http://rollstream:s%2Fe%20c@127.0.0.1:1"
    assert data["rollstream"] == {
        "rollout_id": record.rollout_id,
        "skip_instance_ids": [],
        "finished": [],
        "remember_uids": 100,
    }
    assert data["num_repeat_per_sample"] == "8" and data["skip_instance_ids"] == []
    assert rollouts.failures() == [] and rollouts.running is None
    log = world.folder / "dir" / "logs" / f"generator-{record.rollout_id}.log"
    assert "hello from the generator" in log.read_text()
    secret = world.folder / "dir" / "generators" / record.rollout_id / "payload.json"
    assert secret.stat().st_mode & 0o077 == 0
    again = await rollouts.start(PAYLOAD)
    assert again.rollout_id != record.rollout_id  # it was done: this is another one
    await rollouts.close()


async def test_the_same_payload_is_the_same_rollout_however_often_it_is_sent(world: World) -> None:
    world.generator("time.sleep(600)")
    rollouts = world.rollouts()
    records = await asyncio.gather(
        *(rollouts.start({**PAYLOAD, "skip_instance_ids": [i]}) for i in range(20)),
    )
    assert len({record.rollout_id for record in records}) == 1
    await until(world.runs)
    await rollouts.start(PAYLOAD)
    assert len(world.runs()) == 1 and len(world.ledger.records) == 1
    other = await rollouts.start({**PAYLOAD, "n": 2})
    await until(lambda: len(world.runs()) == 2)
    states = {record.rollout_id: record.state for record in rollouts.records()}
    assert states == {records[0].rollout_id: "stopped", other.rollout_id: "running"}
    await rollouts.close()
    assert rollouts.record(other.rollout_id).state == "running"  # to be gone on with


async def test_a_trainer_that_comes_again_with_other_ports_finds_its_rollout(world: World) -> None:
    world.generator("time.sleep(600)")
    rollouts = world.rollouts()
    first = {**PAYLOAD, "remote_engine_url": "http://a:1", "num_process": "4", "skip_instance_ids": [9]}
    record = await rollouts.start(first)
    await until(world.runs)
    # The server's own address is put in its place anyway.
    assert await rollouts.start({**first, "remote_buffer_url": "http://b:2"}) == record
    assert len(world.runs()) == 1
    moved = {**first, "remote_engine_url": "http://a:2", "num_process": 8, "skip_instance_ids": [9, 1]}
    again = await rollouts.start(moved)
    assert again.rollout_id == record.rollout_id and len(world.ledger.records) == 1
    await until(lambda: len(world.runs()) == 2)
    data = world.payload_of(world.runs()[1])
    assert (data["remote_engine_url"], data["num_process"]) == ("http://a:2", 8)
    assert data["skip_instance_ids"] == [9]  # 1 was completed since: the buffer counts it
    assert len(marked(f"buffer-{record.rollout_id}")) == 2  # the first one is gone
    await rollouts.close()


async def test_a_start_that_is_tried_again_after_the_end_does_not_do_it_twice(world: World) -> None:
    world.generator("pass")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    await until(lambda: rollouts.record(record.rollout_id).state == "finished")
    world.ledger.held = {record.rollout_id}
    again = await rollouts.start({**PAYLOAD, "remote_engine_url": "http://other:1"})
    assert (again.rollout_id, again.state) == (record.rollout_id, "finished")
    assert len(world.runs()) == 1
    world.ledger.held = set()  # all of it was delivered
    assert (await rollouts.start(PAYLOAD)).rollout_id != record.rollout_id
    await rollouts.close()


async def test_the_clock_does_not_say_which_rollout_is_the_newest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.generator("time.sleep(600)")
    rollouts = world.rollouts()
    old = await rollouts.start(PAYLOAD)
    with monkeypatch.context() as clock:
        clock.setattr("rollstream.buffer.generators.time.time", lambda: 1000.0)
        ids = {(await rollouts.start({**PAYLOAD, "n": 2})).rollout_id for _ in range(3)}
    assert len(ids) == 1 and old.rollout_id not in ids
    assert [one.rollout_id for one in rollouts.records()] == [old.rollout_id, *ids]
    await rollouts.close()
    again = world.rollouts()
    resumed = await again.resume()
    assert resumed is not None and {resumed.rollout_id} == ids
    await again.close()


async def test_a_generator_has_ended_before_the_next_rollout_is_the_one(world: World) -> None:
    world.generator("time.sleep(600)")
    rollouts = world.rollouts()
    old = await rollouts.start(PAYLOAD)
    await until(world.runs)
    alive: list[set[int]] = []
    save = world.ledger.save_rollout

    async def noting(record: RolloutRecord) -> None:
        alive.append(marked(f"buffer-{old.rollout_id}"))
        await save(record)

    world.ledger.save_rollout = noting  # type: ignore[method-assign]
    await rollouts.start({**PAYLOAD, "n": 2})
    assert alive[0] == set()  # what it writes late would be the new one's
    # A record that cannot be stored changes nothing: the one that ran goes on.
    world.ledger.broken = True
    with pytest.raises(StorageError):
        await rollouts.start({**PAYLOAD, "n": 3})
    world.ledger.broken = False
    assert rollouts.running is not None and rollouts.running.payload["n"] == 2
    await rollouts.close()


async def test_files_of_rollouts_that_are_forgotten_are_deleted(world: World) -> None:
    world.generator("print('x')")
    rollouts = world.rollouts()
    old = await rollouts.start(PAYLOAD)
    await until(lambda: rollouts.record(old.rollout_id).state == "finished")
    folder = world.folder / "dir"
    assert (folder / "generators" / old.rollout_id).exists()
    del world.ledger.records[old.rollout_id]
    new = await rollouts.start({**PAYLOAD, "n": 2})
    await until(lambda: rollouts.record(new.rollout_id).state == "finished")
    assert [one.name for one in (folder / "generators").iterdir()] == [new.rollout_id]
    assert [one.name for one in (folder / "logs").iterdir()] == [f"generator-{new.rollout_id}.log"]
    await rollouts.close()


async def test_starts_that_race_and_are_cut_off_leave_one_generator(world: World) -> None:
    world.generator("time.sleep(600)")
    rollouts = world.rollouts()
    await asyncio.gather(*(rollouts.start({**PAYLOAD, "n": i}) for i in range(4)))
    for i in range(6):  # whoever asked goes away while the answer is made
        asking = asyncio.create_task(rollouts.start({**PAYLOAD, "n": 100 + i}))
        await asyncio.sleep(0.01 * i)
        asking.cancel()
        await asyncio.wait({asking})
    last = await rollouts.start({**PAYLOAD, "n": 1000})
    mark = f"buffer-{last.rollout_id}"
    await until(lambda: len(marked(mark)) == 2)
    for record in rollouts.records():
        if record != last:
            assert not marked(f"buffer-{record.rollout_id}"), record
    await rollouts.close()
    rollouts = world.rollouts()
    await rollouts.resume()  # what was cut off before it was stopped is settled
    running = [record for record in rollouts.records() if record.state == "running"]
    assert running == [last]
    await rollouts.close()


async def test_stop_ends_all_that_the_generator_started_and_another_start_goes_on(world: World) -> None:
    world.generator(
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "(NOTES / 'grandchild').touch()\n"
        "time.sleep(600)"
    )
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    await until((world.notes / "grandchild").exists)
    mark = f"buffer-{record.rollout_id}"
    assert len(marked(mark)) >= 3
    stopped = await rollouts.stop(record.rollout_id)
    assert stopped.state == "stopped" and not marked(mark)
    assert await rollouts.stop(record.rollout_id) == stopped
    with pytest.raises(KeyError):
        await rollouts.stop("nobody")
    again = await rollouts.start(PAYLOAD)
    assert (again.rollout_id, again.state) == (record.rollout_id, "running")
    await until(lambda: len(world.runs()) == 2)
    await rollouts.close()
    assert not marked(mark)


async def test_a_generator_that_crashes_is_started_again(world: World) -> None:
    world.generator("if len([n for n in NOTES.iterdir() if n.name.isdigit()]) < 3: raise OSError('not yet')")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    await until(lambda: rollouts.record(record.rollout_id).state == "finished")
    assert len(world.runs()) == 3
    assert rollouts.record(record.rollout_id).crashes == 2
    assert rollouts.failures() == []
    await rollouts.close()


async def test_a_crash_loop_is_given_up_and_told_to_readers(world: World) -> None:
    world.generator("raise ValueError('the model has no tokenizer')")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    await until(lambda: rollouts.record(record.rollout_id).state == "failed")
    assert len(world.runs()) == 3
    (failure,) = rollouts.failures()
    assert failure.final and failure.crashes == 3
    assert failure.error == "ValueError: the model has no tokenizer"
    assert "in run_rollout" in failure.traceback and "math_generator.py" in failure.traceback
    assert "the model has no tokenizer" in str(failure) and "given up" in str(failure)
    # A restart of the server does not hide it.
    assert await world.rollouts().resume() is None
    assert world.rollouts().failures()[0].error == failure.error
    world.generator("pass")  # mended; the same payload goes on
    rollouts = world.rollouts()
    again = await rollouts.start(PAYLOAD)
    assert again.rollout_id == record.rollout_id and rollouts.failures() == []
    await until(lambda: rollouts.record(record.rollout_id).state == "finished")
    await rollouts.close()


async def test_a_failure_is_told_while_it_lasts_and_progress_ends_it(world: World) -> None:
    world.generator(
        "if len([n for n in NOTES.iterdir() if n.name.isdigit()]) < 2: os._exit(7)\ntime.sleep(600)"
    )
    rollouts = world.rollouts()
    await rollouts.start(PAYLOAD)
    await until(lambda: len(world.runs()) == 2)
    (failure,) = rollouts.failures()
    assert not failure.final and "exit code 7" in str(failure) and "started again" in str(failure)
    world.ledger.items_written += 1
    assert rollouts.failures() == []
    await rollouts.close()


async def test_progress_between_crashes_keeps_it_going(world: World) -> None:
    world.generator("raise OSError('again')")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)

    async def write() -> None:
        while True:
            world.ledger.items_written += 1
            await asyncio.sleep(0.005)

    writing = asyncio.create_task(write())
    await until(lambda: rollouts.record(record.rollout_id).crashes >= 4)
    writing.cancel()
    assert rollouts.record(record.rollout_id).state == "running"
    await rollouts.close()


async def test_what_no_restart_mends_fails_at_once(world: World) -> None:
    world.generator("from rollstream.errors import ConfigError\nraise ConfigError('input_file: none')")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    await until(lambda: rollouts.record(record.rollout_id).state == "failed")
    assert len(world.runs()) == 1
    assert rollouts.failures()[0].error == "ConfigError: input_file: none"
    await rollouts.close()


async def test_a_killed_generator_and_a_killed_guard_are_noticed(world: World) -> None:
    world.generator("print('my last words', flush=True)\ntime.sleep(600)")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    log = world.folder / "dir" / "logs" / f"generator-{record.rollout_id}.log"
    for count in (1, 2):
        await until(lambda count=count: len(world.runs()) == count)  # type: ignore[misc]
        await until(lambda count=count: log.read_text().count("my last words") == count)  # type: ignore[misc]
        family = marked(f"buffer-{record.rollout_id}")
        victim = world.runs()[-1]
        if count == 2:
            (victim,) = family - {victim}  # its guard
        os.kill(victim, signal.SIGKILL)
        await until(lambda count=count: rollouts.record(record.rollout_id).crashes == count)  # type: ignore[misc]
        found = rollouts.record(record.rollout_id)
        assert found.error == "its process was killed by SIGKILL"
        assert found.traceback is not None and "my last words" in found.traceback
    await until(lambda: len(world.runs()) == 3)
    assert len(marked(f"buffer-{record.rollout_id}")) == 2  # nobody is left of the earlier ones
    await rollouts.close()


async def test_a_restarted_server_goes_on_and_skips_what_is_complete(world: World) -> None:
    world.generator("time.sleep(600)")
    rollouts = world.rollouts()
    record = await rollouts.start({**PAYLOAD, "skip_instance_ids": [9]})
    await until(world.runs)
    await rollouts.close()
    world.ledger.finished = {7: 2, "7": 1}
    rollouts = world.rollouts()
    assert (await rollouts.resume()) == rollouts.record(record.rollout_id)
    await until(lambda: len(world.runs()) == 2)
    data = world.payload_of(world.runs()[1])
    assert data["skip_instance_ids"] == [9, 7, 7, "7"]
    assert data["rollstream"]["skip_instance_ids"] == [9]
    assert data["rollstream"]["finished"] == [[7, 2], ["7", 1]]
    assert world.ledger.tasks == [("math", 8, None)] * 2
    await rollouts.close()
    (world.folder / "files" / "math_generator.py").unlink()
    world.generator("pass", task="code")
    rollouts = world.rollouts()
    assert (await rollouts.resume()) is not None
    assert "known: code" in str(rollouts.failures()[0])
    assert rollouts.record(record.rollout_id).state == "failed"


async def test_what_is_asked_for_wrongly_changes_nothing(world: World) -> None:
    world.generator("time.sleep(600)")
    rollouts = world.rollouts()
    with pytest.raises(UnknownTaskError, match="known: math") as unknown:
        await rollouts.start({"task_type": "maths"})
    assert unknown.value.known == ["math"]
    wrong: list[dict[str, Any]] = [
        {},
        {"task_type": 7},
        {"task_type": "math", "num_repeat_per_sample": "0"},
        {"task_type": "math", "num_repeat_per_sample": True},
        {"task_type": "math", "skip_instance_ids": [1.5]},
    ]
    for payload in wrong:
        with pytest.raises(ConfigError):
            await rollouts.start(payload)
    world.ledger.broken = True
    with pytest.raises(StorageError):
        await rollouts.start(PAYLOAD)
    assert rollouts.records() == [] and rollouts.running is None and world.runs() == []
    await rollouts.close()


async def test_a_full_disk_changes_nothing_for_the_generator(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollstream.buffer.generators._SAVE_AGAIN_S", 0.05)
    world.generator("raise OSError('x')")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    world.ledger.broken = True
    await until(lambda: [one for one in rollouts.failures() if one.final])
    assert len(world.runs()) == 3 and rollouts.failures()[0].error == "OSError: x"
    assert rollouts.record(record.rollout_id).state == "running"
    world.ledger.broken = False
    await until(lambda: rollouts.record(record.rollout_id).state == "failed")
    assert rollouts.failures()[0].final
    await rollouts.close()


async def test_what_is_not_the_generators_fault_is_told_too(world: World) -> None:
    world.generator("raise OSError('x')")
    rollouts = world.rollouts()
    record = await rollouts.start(PAYLOAD)
    world.ledger.stats = None  # type: ignore[method-assign, assignment]
    async with asyncio.timeout(PATIENCE_S):
        while rollouts._is_supervised():
            await asyncio.sleep(0.02)
    del world.ledger.stats
    (failure,) = rollouts.failures()
    assert failure.final and "NoneType" in failure.error
    world.generator("time.sleep(600)")
    before = len(world.runs())
    assert (await rollouts.start(PAYLOAD)).rollout_id == record.rollout_id
    await until(lambda: len(world.runs()) > before)
    await rollouts.close()
    assert (await rollouts.start({**PAYLOAD, "n": 3})).state == "running"
    assert rollouts.running is None  # it begins with the next server


def test_a_log_is_cut_back_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    with log.open("ab") as writer:
        writer.write(b"a" * 900 + b"end")
        writer.flush()
        assert not cut_log(log, most=1000, kept=10)
        writer.write(b"b" * 200)
        writer.flush()
        assert cut_log(log, most=1000, kept=10)
        writer.write(b"more")
    assert log.read_bytes() == b"more"
    assert (tmp_path / "x.log.old").read_bytes() == b"b" * 10


def test_a_token_goes_into_the_url() -> None:
    assert with_token("http://127.0.0.1:8889", None) == "http://127.0.0.1:8889"
    assert with_token("http://[::1]:8889", "a@b:/c") == "http://rollstream:a%40b%3A%2Fc@[::1]:8889"
