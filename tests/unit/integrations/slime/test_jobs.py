"""Jobs: real generator processes, and a real store that can fail."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.store.base import JobRecord
from rollstream.buffer.store.sql import SqlStore, Tx
from rollstream.buffer.store.sqlite import SqliteDatabase
from rollstream.engine.reaper import marked
from rollstream.errors import ConfigError, NotFoundError, StorageError, StorageFullError
from rollstream.integrations.slime.hook_process import GeneratorFile
from rollstream.integrations.slime.jobs import Jobs
from rollstream.integrations.slime.payload_rules import PayloadRules
from rollstream.rollout.retry import RetryPolicy
from tests.support.stores import Clock, ClockedDatabase, FixedPolicy, item
from tests.support.until import until


class FailingDatabase(ClockedDatabase):
    away: Exception | None = None
    """What transactions raise."""
    lost: Exception | None = None
    """What reads raise, too."""

    def transaction(self, work: Callable[[Tx], Any], size: int = 0) -> Any:
        if error := self.lost or self.away:
            raise error
        return super().transaction(work, size)

    def read(self, work: Callable[[Tx], Any]) -> Any:
        if self.lost:
            raise self.lost
        return super().read(work)


class Files:
    """Finds generator files by their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, GeneratorFile] = {}
        self.problems: tuple[str, ...] = ()

    async def refresh(self) -> None:
        found = {path.name.removesuffix("_generator.py"): path for path in self.folder.glob("*_generator.py")}
        self.files = {task: GeneratorFile(path, b"", task) for task, path in found.items()}


class World:
    """A folder with generator files and an input file, a store, and servers that share it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder, folder / "notes"
        for name in ("files", "notes", "inputs"):
            (folder / name).mkdir()
        (folder / "inputs" / "x").touch()
        self.clock = Clock()
        self.database = FailingDatabase(SqliteDatabase(folder), self.clock)
        self.store = SqlStore(self.database, FixedPolicy())
        self.servers: list[Jobs] = []

    def generator(self, body: str, task: str = "math") -> None:
        """A generator that writes its payload to a file `notes/RUN`, and then does `body`."""
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        (self.folder / "files" / f"{task}_generator.py").write_text(
            f"import json, os, pathlib, subprocess, sys, time\n"
            f"NOTES = pathlib.Path({str(self.notes)!r})\n"
            f"def run_rollout(data):\n"
            f"    run = len([note for note in NOTES.iterdir() if note.name.isdigit()])\n"
            f"    (NOTES / 'part').write_text(json.dumps(data))\n"
            f"    (NOTES / 'part').rename(NOTES / str(run))\n"
            f"{indented}\n"
        )

    async def server(self, name: str = "a", inputs: str = "inputs", **more: Any) -> Jobs:
        """A server that has resumed. Of two with one name the later one is the other's restart."""
        files = Files(self.folder / "files")
        await files.refresh()
        directory = self.folder / name
        jobs = Jobs(
            self.store,
            files,  # type: ignore[arg-type]
            directory=directory,
            buffer_url="http://127.0.0.1:1",
            rules=PayloadRules([self.folder / inputs], forbidden=directory, tools=frozenset({"search"})),
            server_id=str(directory),
            group_defaults=GroupSettings(),
            crashes=RetryPolicy(max_attempts=3, delay=0.01, delay_max=0.02),
            reconcile_s=0.05,
            **more,
        )
        self.servers.append(jobs)
        await jobs.resume()
        return jobs

    def record(self, job: JobRecord) -> JobRecord:
        return self.store.known_jobs[job.id]

    def state(self, job: JobRecord) -> str:
        return self.record(job).state

    def alive(self, job: JobRecord, server: str = "a") -> set[int]:
        return marked(f"{self.folder / server}-{job.id}")

    def log(self, job: JobRecord) -> Path:
        return self.folder / "a" / "logs" / f"generator-{job.id}.log"

    @property
    def payloads(self) -> list[dict[str, Any]]:
        """Those of the runs so far."""
        notes = sorted(
            (note for note in self.notes.iterdir() if note.name.isdigit()), key=lambda n: int(n.name)
        )
        return [orjson.loads(note.read_bytes()) for note in notes]

    async def runs(self, count: int) -> dict[str, Any]:
        """Waits until so many runs have begun; the payload of the last one."""
        await until(lambda: len(self.payloads) == count)
        return self.payloads[-1]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    await world.store.open()
    yield world
    world.database.away = world.database.lost = None
    for jobs in world.servers:
        await jobs.close()
    await world.store.close()


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
    (seen,) = world.payloads
    seen_folder = seen["rollstream"]["folders"]["forbidden"]
    assert seen == {
        **{"task_type": "math", "num_repeat_per_sample": 8, "model": 1, "tools": ["search"]},
        **{"input_file": str((world.folder / "inputs" / "x").resolve()), "skip_instance_ids": [9]},
        "remote_buffer_url": "http://127.0.0.1:1",
        "rollstream": {
            **{"job": record.id, "skip_instance_ids": [9], "tools_file": "/etc/tools.yaml"},
            "folders": {"inputs": [str(world.folder / "inputs")], "forbidden": seen_folder},
        },
    }
    assert jobs.failures() == []
    assert f"hello token-of-{record.id}" in world.log(record).read_text()
    assert "elsewhere" not in repr(world.record(record))
    again, _ = await jobs.start(PAYLOAD)
    assert again.id != record.id and again.number == 2  # it was done: this is another one


async def test_the_same_payload_is_the_same_job_however_often_it_is_sent(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    answers = await asyncio.gather(*(jobs.start({**PAYLOAD, "skip_instance_ids": [i]}) for i in range(20)))
    (job,) = {record.id for record, _ in answers}
    await world.runs(1)
    await jobs.start({**PAYLOAD, "num_repeat_per_sample": 8})
    assert len(world.payloads) == len(world.store.known_jobs) == 1
    other, warnings = await jobs.start({**PAYLOAD, "num_epochs": 2})
    assert len(warnings) == 1 and "'num_epochs'" in warnings[0] and warnings[0] in caplog.text
    await world.runs(2)
    assert {one.id: one.state for one in await world.store.jobs()} == {job: "stopped", other.id: "running"}
    await jobs.close()
    assert world.state(other) == "running" and not world.alive(other)  # it goes on with the next server


async def test_a_trainer_that_comes_again_with_other_ports_finds_its_job(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    first = {**PAYLOAD, "remote_engine_url": "http://[::1]:1", "num_process": "4", "skip_instance_ids": [9]}
    record, _ = await jobs.start(first)
    await world.runs(1)
    assert (await jobs.start({**first, "remote_buffer_url": "http://b:2"}))[0] == record
    moved = {**first, "remote_engine_url": "http://[::1]:2", "num_process": 8, "skip_instance_ids": [9, 1]}
    again, _ = await jobs.start(moved)
    assert again.id == record.id and len(world.store.known_jobs) == 1
    data = await world.runs(2)
    assert (data["remote_engine_url"], data["num_process"]) == ("http://[::1]:2", 8)
    assert data["skip_instance_ids"] == [9]  # 1 was completed since: the store counts it
    assert len(world.alive(record)) == 2  # the first one is gone


async def test_a_start_that_is_tried_again_after_the_end_does_not_do_it_twice(world: World) -> None:
    world.generator("pass")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(lambda: world.state(record) == "finished")
    await world.store.write([item("u", task="math", job=record.id)])
    again, warnings = await jobs.start({**PAYLOAD, "remote_engine_url": "http://localhost:1"})
    assert (again.id, again.state, len(world.payloads)) == (record.id, "finished", 1)
    assert "groups of it are left" in warnings[0]
    other, warnings = await jobs.start({**PAYLOAD, "model": 2})
    assert f"job {record.id} has groups that nobody has read" in warnings[0]
    await until(lambda: world.state(other) == "finished")
    assert (await jobs.start({**PAYLOAD, "model": 2}))[0].id != other.id  # all of it was delivered


async def test_stop_ends_all_that_the_generator_started_and_another_start_goes_on(world: World) -> None:
    world.generator(
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "(NOTES / 'grandchild').touch()\n"
        "time.sleep(600)"
    )
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until((world.notes / "grandchild").exists)
    await until(lambda: len(world.alive(record)) >= 3)
    stopped = await jobs.stop(record.id)
    assert stopped.state == world.state(record) == "stopped" and not world.alive(record)
    assert await jobs.stop(record.id) == stopped and jobs.failures() == []
    with pytest.raises(NotFoundError):
        await jobs.stop("nobody")
    again, _ = await jobs.start(PAYLOAD)
    assert (again.id, again.state) == (record.id, "running")
    await world.runs(2)


async def test_a_generator_that_crashes_is_started_again(world: World) -> None:
    world.generator("if run == 0: os._exit(7)\nwhile not (NOTES / 'go').exists(): time.sleep(0.01)")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await world.runs(2)
    (failure,) = jobs.failures()
    assert (
        not failure["final"] and "exit code 7" in failure["message"] and "started again" in failure["message"]
    )
    await world.store.write([item("u", job=record.id)])
    assert jobs.failures() == []  # it lasts until an item comes,
    await until(lambda: world.record(record).error == "")  # for other servers, too
    (world.notes / "go").touch()
    await until(lambda: world.state(record) == "finished")
    assert world.record(record).crashes == 1


async def test_a_crash_loop_is_given_up_and_told_to_readers(world: World) -> None:
    world.generator("raise ValueError('the model has no tokenizer')")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await until(lambda: world.state(record) == "failed")
    (failure,) = jobs.failures()
    assert (failure["final"], failure["crashes"], len(world.payloads)) == (True, 3, 3)
    assert failure["error"] == "ValueError: the model has no tokenizer"
    assert "in run_rollout" in failure["traceback"] and "math_generator.py" in failure["traceback"]
    for part in ("math", record.id, "3 times", "given up", failure["error"], str(world.log(record))):
        assert part in failure["message"] and "\n" not in failure["message"]
    await jobs.close()
    jobs = await world.server()  # a restart of the server does not hide it
    assert jobs.failures() == [failure] and len(world.payloads) == 3
    world.generator("pass")  # mended; the same payload goes on
    again, _ = await jobs.start(PAYLOAD)
    assert (again.id, again.crashes) == (record.id, 0) and jobs.failures() == []
    await until(lambda: world.state(record) == "finished")


@pytest.mark.parametrize("whose", ["its own", "others'"])
async def test_progress_between_crashes_keeps_it_going(world: World, whose: str) -> None:
    """Items of the job are progress; what others write is none."""
    world.generator("while not (NOTES / f'go{run}').exists(): time.sleep(0.01)\nraise OSError('again')")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    owner = {"job": record.id} if whose == "its own" else {"task": "chess"}
    for run in range(3):
        await world.runs(run + 1)
        await world.store.write([item(f"u{run}", **owner)])
        assert bool(jobs.failures()) == (run > 0 and whose != "its own")
        (world.notes / f"go{run}").touch()
    if whose == "its own":
        await world.runs(4)
        assert world.state(record) == "running" and world.record(record).crashes == 3
    else:
        await until(lambda: world.state(record) == "failed")


async def test_what_no_restart_mends_fails_at_once_and_is_one_line_in_the_servers_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = await world.server()
    for error in ("ConfigError", "DataError"):
        caplog.clear()
        world.generator(f"from rollstream.errors import {error}\nraise {error}('input_file: none')")
        record, _ = await jobs.start({**PAYLOAD, "model": error})
        await until(lambda record=record: world.state(record) == "failed")  # type: ignore[misc]
        assert jobs.failures()[0]["error"] == f"{error}: input_file: none"
        await until(lambda: any(one.levelno >= logging.WARNING for one in caplog.records))
        (line,) = [one for one in caplog.records if one.levelno >= logging.WARNING]
        assert line.getMessage().count("\n") == 0 == bool(line.exc_info)
        assert "input_file: none" in line.getMessage()
    assert len(world.payloads) == 2


async def test_a_restarted_server_goes_on_with_what_is_still_allowed(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    record, _ = await jobs.start({"task_type": "math", "input_file": "x", "skip_instance_ids": [9]})
    await world.runs(1)
    await jobs.close()
    await world.store.write([item(f"u{n}", 7, job=record.id) for n in range(16)])
    jobs = await world.server()
    data = await world.runs(2)
    assert data["skip_instance_ids"] == [9, 7]
    own = data["rollstream"]
    assert (own["job"], own["skip_instance_ids"]) == (record.id, [9])
    assert data["num_repeat_per_sample"] == 16  # the server's, when it was started
    await jobs.close()
    jobs = await world.server(inputs="files")
    assert world.state(record) == "failed" and "ConfigError: input_file: " in jobs.failures()[0]["message"]
    await jobs.close()
    (world.folder / "files" / "math_generator.py").unlink()
    world.generator("pass", task="code")
    jobs = await world.server()
    with pytest.raises(ConfigError, match="Known: code"):
        await jobs.start(record.payload)
    assert len(world.payloads) == 2


async def test_what_is_wrong_changes_nothing(world: World) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    for wrong in (
        {"task_type": "maths"},
        {"num_repeat_per_sample": "0"},
        {"remote_engine_url": "http://evil"},
    ):
        with pytest.raises(ConfigError):
            await jobs.start({"task_type": "math", **wrong})
    world.database.away = StorageError("no room")
    with pytest.raises(StorageError):
        await jobs.start(PAYLOAD)
    world.database.away = None
    assert world.store.last_job is None and world.payloads == []
    await jobs.start({"task_type": "math", "remote_engine_url": "http://evil"}, True)


async def test_a_full_disk_changes_nothing_for_the_generator(world: World) -> None:
    world.generator("while not (NOTES / 'go').exists(): time.sleep(0.01)\nraise OSError('x')")
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await world.runs(1)
    world.database.away = StorageFullError("no room")
    world.clock.now += 100
    (world.notes / "go").touch()
    await until(jobs.failures)
    assert "StorageFullError: no room" in jobs.failures()[0]["message"]
    assert world.record(record).crashes == 0 and len(world.payloads) == 1
    world.database.away = None
    await until(lambda: world.state(record) == "failed")
    assert jobs.failures()[0]["error"] == "OSError: x" and world.record(record).crashes == 3


async def test_a_store_that_is_away_is_told_to_readers_and_passes(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.generator(WAIT)
    jobs = await world.server()
    record, _ = await jobs.start(PAYLOAD)
    await world.runs(1)
    world.database.lost = RuntimeError("a bug")
    await until(jobs.failures)
    (failure,) = jobs.failures()
    assert "RuntimeError: a bug" in failure["error"] and not failure["final"]
    assert caplog.text.count("jobs: RuntimeError: a bug") == 1  # once, with its traceback
    world.database.lost = None
    await until(lambda: not jobs.failures())
    assert len(world.payloads) == 1 and len(world.alive(record)) == 2
    world.database.lost = StorageError("no connection")
    await until(lambda: not world.alive(record))  # before another server may begin
    world.database.lost = None
    await world.runs(2)
    assert jobs.failures() == []


async def test_one_of_the_servers_that_share_a_store_runs_the_generator(world: World) -> None:
    world.generator(WAIT)
    servers = {"a": await world.server("a"), "b": await world.server("b")}
    record, _ = await servers["a"].start({**PAYLOAD, "remote_engine_url": "http://[::1]:1"})
    await world.runs(1)
    owner, other = ("a", "b") if world.alive(record, "a") else ("b", "a")
    assert not world.alive(record, other)
    # Any server takes what concerns the job.
    moved = {**PAYLOAD, "remote_engine_url": "http://[::1]:2"}
    assert (await servers[other].start(moved))[0].id == record.id
    assert (await world.runs(2))["remote_engine_url"] == "http://[::1]:2"
    assert len(world.alive(record, owner)) == 2 and not world.alive(record, other)
    await servers[other].stop(record.id)
    await until(lambda: not world.alive(record, owner))
    assert world.state(record) == "stopped"
    world.generator("raise OSError('broken')")
    failing, _ = await servers["a"].start({**PAYLOAD, "model": 2})
    await until(lambda: world.state(failing) == "failed")
    assert [servers[name].failures()[0]["error"] for name in "ab"] == ["OSError: broken"] * 2


async def test_a_stale_claim_is_adopted_and_a_lost_claim_ends_the_generator(world: World) -> None:
    world.generator(WAIT)
    a = await world.server("a")
    record, _ = await a.start(PAYLOAD)
    await world.runs(1)

    async def claim_for_another() -> None:
        world.clock.now += 16  # as if the server had slept
        while not await world.store.claim_job(record.id, "another", 15.0):
            world.clock.now += 16

    await claim_for_another()
    await until(lambda: not world.alive(record, "a"))
    world.clock.now += 14
    assert not await world.store.claim_job(record.id, "a third", 15.0) and len(world.payloads) == 1
    world.clock.now += 2
    await world.runs(2)
    assert len(world.alive(record, "a")) == 2 and world.state(record) == "running"
