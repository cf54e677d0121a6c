"""Jobs: real generator processes, and a store in memory."""

import asyncio
import logging
import os
import signal
import stat
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import orjson
import pytest
from rollstream.buffer.hook_process import GeneratorFile

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.jobs import JobFailure, Jobs
from rollstream.buffer.payload_rules import PayloadRules
from rollstream.buffer.store.base import JobRecord
from rollstream.engine.launch_guard import marked
from rollstream.errors import ConfigError, NotFoundError, StorageError, StorageFullError
from rollstream.rollout.retry import RetryPolicy

QUICK = RetryPolicy(max_attempts=3, delay=0.01, delay_max=0.02)
PATIENCE_S = 30.0


@dataclass
class MemoryStore:
    """What jobs need of a store. Servers that share it share a database."""

    records: dict[str, JobRecord] = field(default_factory=dict)
    claims: dict[str, tuple[str, float]] = field(default_factory=dict)
    done: list[int | str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    """Jobs of which groups are left."""
    items_written: int = 0
    away: Exception | None = None
    """What writing calls raise."""
    lost: Exception | None = None
    """What all calls raise."""

    def _check(self, *errors: Exception | None) -> None:
        for error in (self.lost, *errors):
            if error is not None:
                raise error

    async def save_job(self, record: JobRecord) -> JobRecord:
        await asyncio.sleep(0)
        self._check(self.away)
        number = self.records[record.id].number if record.id in self.records else len(self.records) + 1
        self.records[record.id] = record = msgspec.structs.replace(record, number=number)
        return record

    async def live_jobs(self) -> list[JobRecord]:
        jobs = await self.jobs()
        return [one for one in jobs if one is jobs[-1] or one.state == "running"]

    async def jobs(self) -> list[JobRecord]:
        await asyncio.sleep(0)
        self._check()
        return sorted(self.records.values(), key=lambda record: record.number)

    async def claim_job(self, job: str, server: str, stale_after_s: float) -> bool:
        self._check(self.away)
        owner, renewed = self.claims.get(job, (server, 0.0))
        if owner != server and time.monotonic() - renewed < stale_after_s:
            return False
        self.claims[job] = server, time.monotonic()
        return True

    async def finished(self, job: str) -> list[int | str]:
        self._check()
        return list(self.done)

    async def has_groups(self, job: str) -> bool:
        self._check()
        return job in self.held


class Files:
    """Finds generator files by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, GeneratorFile] = {}
        self.problems: tuple[str, ...] = ()

    async def refresh(self) -> None:
        found = {path.name.removesuffix("_generator.py"): path for path in self.folder.glob("*_generator.py")}
        self.files = {task: GeneratorFile(path, task, frozenset()) for task, path in found.items()}


class World:
    """A folder with generator files and inputs, a store, and servers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryStore()
        self.notes = folder / "notes"
        self.servers: list[Jobs] = []
        for name in ("files", "notes", "inputs"):
            (folder / name).mkdir()

    def generator(self, body: str, task: str = "math") -> None:
        """A generator that writes its payload to a file `notes/PID`, and then does `body`."""
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        (self.folder / "files" / f"{task}_generator.py").write_text(
            f"import json, os, pathlib, subprocess, sys, time\n"
            f"NOTES = pathlib.Path({str(self.notes)!r})\n"
            f"def run_rollout(data):\n"
            f"    runs = len([note for note in NOTES.iterdir() if note.name.isdigit()]) + 1\n"
            f"    (NOTES / 'part').write_text(json.dumps(data))\n"
            f"    (NOTES / 'part').rename(NOTES / str(os.getpid()))\n"
            f"{indented}\n"
        )

    async def server(self, name: str = "a", **more: Any) -> Jobs:
        """A server that has resumed. Of two with one name the later one is the other's restart."""
        host = Files(self.folder / "files")
        await host.refresh()
        rules = PayloadRules(
            [self.folder / "inputs"], forbidden=self.folder / name, tools=frozenset({"search"})
        )
        given = {"crashes": QUICK, "look_s": 0.05, "rules": rules, "group_defaults": GroupSettings(), **more}
        directory = self.folder / name
        jobs = Jobs(
            self.store,
            host,  # type: ignore[arg-type]
            directory=directory,
            buffer_url="http://127.0.0.1:1",
            server_id=str(directory),
            **given,
        )
        self.servers.append(jobs)
        await jobs.resume()
        return jobs

    def state(self, record: JobRecord) -> str:
        return self.store.records[record.id].state

    def alive(self, record: JobRecord, server: str = "a") -> set[int]:
        return marked(f"{self.folder / server}-{record.id}")

    def log(self, record: JobRecord) -> Path:
        return self.folder / "a" / "logs" / f"generator-{record.id}.log"

    def runs(self) -> list[int]:
        """Pids of the generators that began, oldest first."""
        notes = [note for note in self.notes.iterdir() if note.name.isdigit()]
        return [int(note.name) for note in sorted(notes, key=lambda note: note.stat().st_mtime_ns)]

    def payload_of(self, pid: int) -> dict[str, Any]:
        found = orjson.loads((self.notes / str(pid)).read_bytes())
        assert isinstance(found, dict)
        return found


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    world.store.away = world.store.lost = None
    for jobs in world.servers:
        await jobs.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.02)


PAYLOAD: dict[str, Any] = {"task_type": "math", "num_repeat_per_sample": "8", "input_file": "x", "model": 1}
WAIT = "time.sleep(600)"


async def test_a_job_runs_in_its_process_and_finishes(world: World) -> None:
    world.generator("print('hello', os.environ.get('ROLLSTREAM_BUFFER_TOKEN'))")
    jobs = await world.server(issue_token=lambda job: f"token-of-{job}", tools_file=Path("/etc/tools.yaml"))
    given = {**PAYLOAD, "remote_buffer_url": "http://u:p@elsewhere:8889", "rollstream": {"tools_file": "/x"}}
    record, warnings = await jobs.start({**given, "tools": ["search"], "skip_instance_ids": [9]})
    assert (record.task, record.number, warnings) == ("math", 1, [])
    assert world.state(record) == "running"  # durable before it begins
    await until(lambda: world.state(record) == "finished")
    (pid,) = world.runs()
    data = world.payload_of(pid)
    assert data == {
        **{"task_type": "math", "num_repeat_per_sample": 8, "model": 1, "tools": ["search"]},
        **{"input_file": str((world.folder / "inputs" / "x").resolve()), "skip_instance_ids": [9]},
        "remote_buffer_url": "http://127.0.0.1:1",
        "rollstream": {"job": record.id, "skip_instance_ids": [9], "tools_file": "/etc/tools.yaml"},
    }
    assert jobs.failures() == []
    assert f"hello token-of-{record.id}" in world.log(record).read_text()
    assert stat.S_IMODE(world.log(record).stat().st_mode) == 0o600
    assert "elsewhere" not in repr(world.store.records)
    again, _ = await jobs.start(PAYLOAD)
    assert again.id != record.id and again.number == 2  # it was done: this is another one


async def test_the_same_payload_is_the_same_job_however_often_it_is_sent(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    answers = await asyncio.gather(*(jobs.start({**PAYLOAD, "skip_instance_ids": [i]}) for i in range(20)))
    (job,) = {record.id for record, _ in answers}
    await until(world.runs)
    await jobs.start({**PAYLOAD, "num_repeat_per_sample": 8})
    assert len(world.runs()) == 1 and len(world.store.records) == 1
    other, _ = await jobs.start({**PAYLOAD, "model": 2})
    await until(lambda: len(world.runs()) == 2)
    assert {one.id: one.state for one in await world.store.jobs()} == {job: "stopped", other.id: "running"}
    await jobs.close()
    assert world.state(other) == "running" and not world.alive(other)  # it goes on with the next server


async def test_a_trainer_that_comes_again_with_other_ports_finds_its_job(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    first = {**PAYLOAD, "remote_engine_url": "http://[::1]:1", "num_process": "4", "skip_instance_ids": [9]}
    record, _ = await jobs.start(first)
    await until(world.runs)
    assert (await jobs.start({**first, "remote_buffer_url": "http://b:2"}))[0] == record
    moved = {**first, "remote_engine_url": "http://[::1]:2", "num_process": 8, "skip_instance_ids": [9, 1]}
    again, _ = await jobs.start(moved)
    assert again.id == record.id and len(world.store.records) == 1
    await until(lambda: len(world.runs()) == 2)
    data = world.payload_of(world.runs()[1])
    assert (data["remote_engine_url"], data["num_process"]) == ("http://[::1]:2", 8)
    assert data["skip_instance_ids"] == [9]  # 1 was completed since: the store counts it
    assert len(world.alive(record)) == 2  # the first one is gone


async def test_a_start_that_is_tried_again_after_the_end_does_not_do_it_twice(world: World) -> None:
    world.generator("pass")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(lambda: world.state(record) == "finished")
    world.store.held = {record.id}
    again, warnings = await jobs.start({**PAYLOAD, "remote_engine_url": "http://localhost:1"})
    assert (again.id, again.state, len(world.runs())) == (record.id, "finished", 1)
    assert "groups of it are left" in warnings[0]
    other, warnings = await jobs.start({**PAYLOAD, "model": 2})
    assert f"job {record.id} has groups that nobody has read" in warnings[0]
    await until(lambda: world.state(other) == "finished")
    assert (await jobs.start({**PAYLOAD, "model": 2}))[0].id != other.id  # all of it was delivered


async def test_a_misspelt_parameter_is_warned_of(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    _, warnings = await jobs.start({**PAYLOAD, "num_epochs": 2})
    assert len(warnings) == 1 and "'num_epoch'" in warnings[0] and warnings[0] in caplog.text


async def test_the_clock_does_not_say_which_job_is_the_newest(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    old, _ = await jobs.start(PAYLOAD)
    with monkeypatch.context() as clock:
        clock.setattr("rollstream.buffer.jobs.time.time", lambda: 1000.0)
        ids = {(await jobs.start({**PAYLOAD, "model": 2}))[0].id for _ in range(3)}
    assert len(ids) == 1 and old.id not in ids
    await jobs.close()
    jobs = await world.server()
    assert jobs.last is not None and {jobs.last.id} == ids


async def test_a_generator_has_ended_before_the_next_job_is_the_one(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    old, _ = await jobs.start(PAYLOAD)
    await until(world.runs)
    alive: list[set[int]] = []
    save = world.store.save_job

    async def noting(record: JobRecord) -> JobRecord:
        alive.append(world.alive(old))
        return await save(record)

    world.store.save_job = noting  # type: ignore[method-assign]
    new, _ = await jobs.start({**PAYLOAD, "model": 2})
    assert alive[0] == set()  # what it writes late would be the new one's
    await until(lambda: len(world.runs()) == 2)
    # A record that cannot be stored changes nothing: the one that ran goes on.
    world.store.away = StorageFullError("no room")
    with pytest.raises(StorageError):
        await jobs.start({**PAYLOAD, "model": 3})
    world.store.away = None
    await until(lambda: len(world.runs()) == 3)
    assert world.payload_of(world.runs()[-1])["model"] == 2 and world.state(new) == "running"


async def test_starts_that_race_and_are_cut_off_leave_one_generator(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    await asyncio.gather(*(jobs.start({**PAYLOAD, "model": i}) for i in range(4)))
    for i in range(6):  # the client goes away while the answer is made
        starting = asyncio.create_task(jobs.start({**PAYLOAD, "model": 100 + i}))
        await asyncio.sleep(0.01 * i)
        starting.cancel()
        await asyncio.wait({starting})
    last, _ = await jobs.start({**PAYLOAD, "model": 1000})
    await until(lambda: len(world.alive(last)) == 2)
    for record in await world.store.jobs():
        assert record.id == last.id or not world.alive(record)
    running = [record.id for record in await world.store.jobs() if record.state == "running"]
    assert running == [last.id]


async def test_stop_ends_all_that_the_generator_started_and_another_start_goes_on(world: World) -> None:
    world.generator(
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "(NOTES / 'grandchild').touch()\n"
        "time.sleep(600)"
    )
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until((world.notes / "grandchild").exists)
    assert len(world.alive(record)) >= 3
    stopped = await jobs.stop(record.id)
    assert stopped.state == world.state(record) == "stopped" and not world.alive(record)
    assert await jobs.stop(record.id) == stopped and jobs.failures() == []
    with pytest.raises(NotFoundError):
        await jobs.stop("nobody")
    again, _ = await jobs.start(PAYLOAD)
    assert (again.id, again.state) == (record.id, "running")
    await until(lambda: len(world.runs()) == 2)


async def test_a_generator_that_crashes_is_started_again(world: World) -> None:
    world.generator("if runs < 3: raise OSError('not yet')")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(lambda: world.state(record) == "finished")
    assert len(world.runs()) == 3 and world.store.records[record.id].crashes == 2
    assert jobs.failures() == []


async def test_a_crash_loop_is_given_up_and_told_to_readers(world: World) -> None:
    world.generator("raise ValueError('the model has no tokenizer')")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(lambda: world.state(record) == "failed")
    assert len(world.runs()) == 3
    (failure,) = jobs.failures()
    assert failure.final and failure.crashes == 3
    assert failure.error == "ValueError: the model has no tokenizer"
    assert "in run_rollout" in failure.traceback and "math_generator.py" in failure.traceback
    assert (
        failure.error in str(failure)
        and "given up" in str(failure)
        and str(world.log(record)) in str(failure)
    )
    await jobs.close()
    jobs = await world.server()  # a restart of the server does not hide it
    assert jobs.failures() == [failure] and len(world.runs()) == 3
    world.generator("pass")  # mended; the same payload goes on
    again, _ = await jobs.start(PAYLOAD)
    assert (again.id, again.crashes) == (record.id, 0) and jobs.failures() == []
    await until(lambda: world.state(record) == "finished")


async def test_a_failure_lasts_until_an_item_comes(world: World) -> None:
    world.generator("if runs < 2: os._exit(7)\ntime.sleep(600)")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(lambda: len(world.runs()) == 2)
    (failure,) = jobs.failures()
    assert not failure.final and "exit code 7" in str(failure) and "started again" in str(failure)
    world.store.items_written += 1
    assert jobs.failures() == []
    await until(lambda: world.store.records[record.id].error == "")  # for other servers, too


async def test_progress_between_crashes_keeps_it_going(world: World) -> None:
    world.generator("raise OSError('again')")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)

    async def write() -> None:
        while True:
            world.store.items_written += 1
            await asyncio.sleep(0.005)

    writing = asyncio.create_task(write())
    await until(lambda: world.store.records[record.id].crashes >= 5)
    writing.cancel()
    assert world.state(record) == "running"


async def test_what_no_restart_mends_fails_at_once_and_is_one_line_in_the_servers_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = await world.server()
    for error in ("ConfigError", "DataError"):
        caplog.clear()
        world.generator(f"from rollstream.errors import {error}\nraise {error}('input_file: none')")
        record, _ = await jobs.start({**PAYLOAD, "model": error})
        await until(lambda record=record: world.state(record) == "failed")  # type: ignore[misc]
        assert jobs.failures()[0].error == f"{error}: input_file: none"
        (line,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert (
            "\n" not in line.getMessage()
            and line.exc_info is None
            and "input_file: none" in line.getMessage()
        )
    assert len(world.runs()) == 2


async def test_a_killed_generator_and_a_killed_guard_are_noticed(world: World) -> None:
    world.generator("print('my last words', flush=True)\ntime.sleep(600)")
    jobs = await world.server(crashes=RetryPolicy(9, 0.01, 0.02))
    record, _ = await jobs.start(PAYLOAD)
    for count, (victim, number) in enumerate(
        [("generator", signal.SIGKILL), ("guard", signal.SIGKILL), ("guard", signal.SIGTERM)], 1
    ):
        await until(lambda count=count: len(world.runs()) == count)  # type: ignore[misc]
        await until(lambda count=count: world.log(record).read_text().count("my last words") == count)  # type: ignore[misc]
        generator = world.runs()[-1]
        (guard,) = world.alive(record) - {generator}
        os.kill(generator if victim == "generator" else guard, number)
        await until(lambda count=count: world.store.records[record.id].crashes == count)  # type: ignore[misc]
        found = world.store.records[record.id]
        how = "ended with exit code 0" if number == signal.SIGTERM else "was killed by SIGKILL"
        assert (found.state, found.error) == ("running", f"its process {how}")
        assert found.traceback == "my last words"
    await until(lambda: len(world.runs()) == 4)
    assert len(world.alive(record)) == 2  # nobody is left of the earlier ones


async def test_a_restarted_server_goes_on_and_skips_what_is_complete(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    record, _ = await jobs.start({"task_type": "math", "skip_instance_ids": [9]})
    await until(world.runs)
    await jobs.close()
    world.store.done = [7, 7, "7"]
    jobs = await world.server()
    await until(lambda: len(world.runs()) == 2)
    data = world.payload_of(world.runs()[1])
    assert data["skip_instance_ids"] == [9, 7, 7, "7"]
    assert data["rollstream"] == {"job": record.id, "skip_instance_ids": [9]}
    assert data["num_repeat_per_sample"] == 16  # the server's, when it was started
    await jobs.close()
    (world.folder / "files" / "math_generator.py").unlink()
    world.generator("pass", task="code")
    jobs = await world.server()
    assert "Known: code" in str(jobs.failures()[0]) and world.state(record) == "failed"


async def test_what_the_operator_allows_no_more_does_not_go_on(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(world.runs)
    await jobs.close()
    jobs = await world.server(rules=PayloadRules([world.folder / "files"], forbidden=world.folder / "a"))
    assert world.state(record) == "failed" and "ConfigError: input_file: " in str(jobs.failures()[0])
    assert len(world.runs()) == 1


async def test_what_is_wrong_changes_nothing(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    with pytest.raises(ConfigError, match=r"'maths'. Known: math"):
        await jobs.start({"task_type": "maths"})
    wrong: list[Any] = [
        {},
        {"task_type": 7},
        {"task_type": "math", "num_repeat_per_sample": "0"},
        {"task_type": "math", "group_timeout_seconds": "soon"},
        {"task_type": "math", "skip_instance_ids": [1.5]},
        {"task_type": "math", "input_file": "/etc/passwd"},
        {"task_type": "math", "remote_engine_url": "http://evil"},
    ]
    for payload in wrong:
        with pytest.raises(ConfigError):
            await jobs.start(payload)
    world.store.away = StorageError("no room")
    with pytest.raises(StorageError):
        await jobs.start(PAYLOAD)
    world.store.away = None
    assert world.store.records == {} and jobs.last is None and world.runs() == []
    await jobs.start({"task_type": "math", "remote_engine_url": "http://evil"}, True)


async def test_a_full_disk_changes_nothing_for_the_generator(world: World) -> None:
    world.generator("while not (NOTES / 'go').exists(): time.sleep(0.01)\nraise OSError('x')")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(world.runs)
    looks: list[str] = []
    read = world.store.jobs

    async def counting() -> list[JobRecord]:
        looks.append("")
        return await read()

    world.store.jobs = counting  # type: ignore[method-assign]
    world.store.away = StorageFullError("no room")
    await until(lambda: len(looks) > 5)
    assert len(world.alive(record)) == 2 and jobs.failures() == []
    (world.notes / "go").touch()
    await until(jobs.failures)
    assert "StorageFullError: no room" in str(jobs.failures()[0])
    assert world.store.records[record.id].crashes == 0 and len(world.runs()) == 1
    world.store.away = None
    await until(lambda: world.state(record) == "failed")
    assert jobs.failures()[0].error == "OSError: x" and world.store.records[record.id].crashes == 3


async def test_a_store_that_is_away_is_told_to_readers_and_passes(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(world.runs)
    world.store.lost = RuntimeError("a bug")
    await until(jobs.failures)
    (failure,) = jobs.failures()
    assert "RuntimeError: a bug" in failure.error and not failure.final
    assert caplog.text.count("jobs: RuntimeError: a bug") == 1  # once, with its traceback
    world.store.lost = None
    await until(lambda: not jobs.failures())
    assert len(world.runs()) == 1 and len(world.alive(record)) == 2


async def test_a_server_that_lost_the_store_ends_its_generator_before_another_may_begin(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(world.runs)
    world.store.lost = StorageError("no connection")
    begun = time.monotonic()
    await until(lambda: not world.alive(record))
    assert time.monotonic() - begun < 15
    world.store.lost = None
    await until(lambda: len(world.runs()) == 2)
    assert jobs.failures() == []


async def test_of_servers_that_share_a_store_one_runs_the_generator(world: World) -> None:
    world.generator(WAIT)
    a, b = await world.server("a"), await world.server("b")
    record, _ = await a.start({**PAYLOAD, "remote_engine_url": "http://[::1]:1"})
    await until(world.runs)
    owner, other = ("a", "b") if world.alive(record, "a") else ("b", "a")
    assert not world.alive(record, other)
    servers = {"a": a, "b": b}
    # Any server takes what concerns the job.
    assert (await servers[other].start({**PAYLOAD, "remote_engine_url": "http://[::1]:1"}))[0] == record
    await servers[other].start({**PAYLOAD, "remote_engine_url": "http://[::1]:2"})
    await until(lambda: len(world.runs()) == 2)
    assert world.payload_of(world.runs()[1])["remote_engine_url"] == "http://[::1]:2"
    assert len(world.alive(record, owner)) == 2 and not world.alive(record, other)
    await servers[other].stop(record.id)
    await until(lambda: not world.alive(record, owner))
    assert world.state(record) == "stopped"


async def test_a_stale_claim_is_adopted_and_a_lost_claim_ends_the_generator(world: World) -> None:
    world.generator(WAIT)
    a = await world.server("a")
    record, _ = await a.start(PAYLOAD)
    await until(world.runs)
    b = await world.server("b")
    assert not world.alive(record, "b") and b.last is not None and b.last.id == record.id
    world.store.claims[record.id] = (str(world.folder / "b"), time.monotonic())  # as if a had slept
    await until(lambda: not world.alive(record, "a"))
    await until(lambda: len(world.runs()) == 2)
    assert len(world.alive(record, "b")) == 2
    await b.close()
    world.store.claims[record.id] = (str(world.folder / "b"), time.monotonic() - 16)
    await until(lambda: len(world.runs()) == 3)
    assert len(world.alive(record, "a")) == 2 and world.state(record) == "running"


async def test_another_server_sees_the_failure_and_replaces_the_job(world: World) -> None:
    world.generator("raise OSError('broken')")
    a = await world.server("a")
    b = await world.server("b")
    record, _ = await a.start(PAYLOAD)
    await until(lambda: [one for one in b.failures() if one.final] and a.failures())
    assert b.failures()[0].error == "OSError: broken"
    world.generator(WAIT)
    new, _ = await b.start({**PAYLOAD, "model": 2})
    await until(lambda: len(world.alive(new, "a") | world.alive(new, "b")) == 2)
    await until(lambda: not a.failures())  # at its next look
    assert world.state(record) == "failed"


async def test_old_logs_are_deleted(world: World) -> None:
    world.generator("pass")
    logs = world.folder / "a" / "logs"
    logs.mkdir(parents=True)
    for i in range(70):
        (logs / f"generator-{i}.log").touch()
        os.utime(logs / f"generator-{i}.log", (i, i))
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(lambda: world.state(record) == "finished")
    assert {one.name for one in logs.iterdir()} == {
        world.log(record).name,
        *(f"generator-{i}.log" for i in range(20, 70)),
    }


def test_a_failure_says_in_one_line_what_where_and_what_now() -> None:
    text = str(JobFailure("j1", "math", "OSError: no", "…", 3, final=False, log="/x/y.log"))
    assert "\n" not in text
    for part in ("math", "j1", "3 times", "started again", "OSError: no", "/x/y.log"):
        assert part in text
