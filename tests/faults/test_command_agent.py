"""Programs that misbehave: contained, their neighbours untouched, and nothing of them left."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstream.errors import ConfigError
from rollstream.gateway.sandbox import SandboxOptions, check_sandbox
from rollstream.testing.stub_faults import Latency
from rollstream.trajectory import Failure, Rollout
from tests.faults.runs import Runner, overrides, rows_of, stub_in_thread, write_prompts
from tests.support.processes import are_gone, holds_within, running
from tests.support.programs import command_worker, program
from tests.support.until import PATIENCE_S
from tests.unit.agent.rollouts import make_row, says, started

NEIGHBOURS = 3

DAEMONS = """
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
def spawn():
    for _ in range(5):
        child = subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE)
        child.stdout.readline()
    # A daemon: a session of its own, and its parent has ended.
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", deaf, __file__])
        os._exit(0)
    os.wait()
"""

ABUSES: dict[str, tuple[str, dict[str, Any], str]] = {
    "daemons": (DAEMONS + "spawn()", {}, ""),
    "deaf": (
        DAEMONS + "signal.signal(signal.SIGTERM, signal.SIG_IGN); spawn(); time.sleep(600)",
        {"timeout": 5.0},
        "took longer than 5 s",
    ),
    "its reaper": (DAEMONS + "spawn(); os.kill(os.getppid(), 9); time.sleep(600)", {}, "the program "),
    "connections": (
        """
import socket
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
held = []
for _ in range(1000):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex((host, int(port)))
    held.append(one)
time.sleep(1)
sys.exit(3)
""",
        {},
        "exit code 3",
    ),
    "foreign session": (
        """
import urllib.error
own = os.environ["OPENAI_API_KEY"]
url = os.environ["OPENAI_BASE_URL"].replace(own, own[:-4] + ("AAAA" if own[-4:] != "AAAA" else "BBBB"))
try:
    ask(row["prompt"], url)
except urllib.error.HTTPError as error:
    print(error.code)
    sys.exit(4)
""",
        {},
        "exit code 4: 404\nthe end of its output:\n404",
    ),
    "its folder": (
        "import shutil; shutil.rmtree(os.path.dirname(os.environ['ROLLSTREAM_ROW'])); os.rmdir(os.getcwd())",
        {"outcome": "result"},
        "wrote no file",
    ),
    "link": ("os.symlink('/etc/passwd', os.environ['ROLLSTREAM_RESULT'])", {}, "no file that is read"),
    "pipe": ("os.mkfifo(os.environ['ROLLSTREAM_RESULT'])", {}, "no regular file"),
    "huge result": ("result(answer='x' * 5_000_000)", {}, "at most 1048576 bytes"),
    "disk": (
        "[open(f'f{i}', 'wb').write(bytes(1 << 20)) for i in range(40)]; time.sleep(600)",
        {"limits": {"disk": 20}},
        "may have 20",
    ),
    "processes": (
        "[subprocess.Popen(['sleep', '600']) for _ in range(100)]; time.sleep(600)",
        {"limits": {"processes": 50}},
        "processes, and may have",
    ),
    "output": ("print('x' * 50_000_000); print('the end'); sys.exit(5)", {}, "the end"),
}
LARGE = {
    "a gigabyte": (
        "[sys.stdout.write('x' * 10_000_000) for _ in range(100)]; print('\\nthe end', flush=True); sys.exit(5)",
        {},
        "the end",
    ),
    "disk of its limit": (
        "[open(f'f{i}', 'wb').write(bytes(1 << 24)) for i in range(60)]; time.sleep(600)",
        {"limits": {"disk": 256}},
        "may have 256",
    ),
}
CASES = [
    *(pytest.param(*case, id=name) for name, case in ABUSES.items()),
    *(pytest.param(*case, id=name, marks=pytest.mark.soak) for name, case in LARGE.items()),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"])
@pytest.mark.parametrize(("abuse", "options", "words"), CASES)
async def test_a_program_that_misbehaves_is_contained(
    tmp_path: Path, sandbox: Any, abuse: str, options: dict[str, Any], words: str
) -> None:
    try:
        check_sandbox(SandboxOptions(kind=sandbox))
    except ConfigError as error:
        pytest.skip(str(error))
    if sandbox == "bubblewrap" and "os.rmdir(os.getcwd())" in abuse:
        pytest.skip("what is mounted cannot be removed")
    body = "".join(f"\n    {line}" for line in abuse.strip().splitlines())
    script = f"answer = ask(row['prompt'])\nif row['index'] == 0:{body}\nelse:\n    result(answer=answer)\n"
    command = program(tmp_path, script, "abused.py")
    engine = await started(says("so"))
    workers = [command_worker(engine, command, sandbox=sandbox, **options)] * (NEIGHBOURS + 1)
    if "timeout" in options:  # the neighbours have no such short one
        workers[1:] = [command_worker(engine, command, sandbox=sandbox)] * NEIGHBOURS
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(worker.run(make_row(index), 0)) for index, worker in enumerate(workers)]
    abuser, *neighbours = [task.result() for task in tasks]
    for result in neighbours:
        assert isinstance(result, Rollout), result.error
        assert result.trajectories[-1].extra["gateway"]["answer"] == "so"
    if words:
        assert isinstance(abuser, Failure) and words in abuser.error, abuser
    else:
        assert isinstance(abuser, Rollout), abuser.error
    assert running(command[-1]) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.soak)])
def test_a_killed_run_leaves_no_program_and_is_resumed(tmp_path: Path, kills: int) -> None:
    rows, repeats = 12, 2
    script = (
        DAEMONS + "answer = ask(row['prompt']); spawn(); ask(row['prompt']); result(answer=answer, reward=1)"
    )
    command = program(tmp_path, script, "killed.py")
    prompts = write_prompts(tmp_path / "prompts.jsonl", rows)
    run_dir, words = tmp_path / "run", ",".join([sys.executable, *command[1:]])
    with stub_in_thread(latency=Latency("fixed", 0.05)) as server:
        settings = overrides(
            run_dir,
            prompts,
            server.url,
            actor_rollout_ref__rollout__agent__default_agent_loop="command_agent",
            actor_rollout_ref__rollout__n=repeats,
            gateway__command=f"[{words}]",
            gateway__outcome="result",
            generation__max_in_flight=4,
            generation__show_progress="false",
        )
        killed = 0
        for number in range(kills):
            runner = Runner(settings, log=tmp_path / f"kill-{number}.log")
            target = server.stats.answered + 6
            if not runner.wait_until(lambda target=target: server.stats.answered >= target):  # type: ignore[misc]
                assert runner.process.returncode == 0, runner.output()[-3000:]
                break
            programs = running(command[-1])
            runner.kill()
            assert programs and are_gone(programs)
            killed += 1
            assert holds_within(PATIENCE_S, lambda: not running(command[-1]))
        last = Runner(settings, log=tmp_path / "last.log")
        assert last.wait() == 0, last.output()[-3000:]
    assert killed >= 2
    # Two conversations a rollout: two trajectories.
    table = check_pairs(run_dir)
    assert table == [(index, repeat) for index in range(rows) for repeat in range(repeats)]
    assert running(command[-1]) == []


def check_pairs(run_dir: Path) -> list[tuple[int, int]]:
    """The rollouts in the artifact, in order, each of which is there once with both its trajectories."""
    found = rows_of(run_dir, "index", "repeat", "trajectory", "attempts", "reward")
    assert all((row["attempts"], row["reward"]) == (1, 1.0) for row in found)
    assert [row["trajectory"] for row in found] == [0, 1] * (len(found) // 2)
    return [(row["index"], row["repeat"]) for row in found[::2]]
