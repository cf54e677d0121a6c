"""Sandboxes: what a program sees and reaches, its limits, and the command lines of container engines.

bubblewrap is run; docker and podman are a program that writes down how it was called.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.errors import ConfigError, DataError
from rollstream.gateway.sandbox import (
    ExitStatus,
    Sandbox,
    SandboxOptions,
    check_sandbox,
    program_environment,
    run_in_sandbox,
)
from rollstream.scratch import remove_folder
from tests.support.programs import command_worker, program
from tests.unit.agent.rollouts import completed, make_row, says, started

PATIENCE_S = 60.0
LOCAL = ("none", "bubblewrap")


@pytest.fixture(params=LOCAL)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of sandbox that works here."""
    options = SandboxOptions(kind=request.param)
    try:
        check_sandbox(options)
    except ConfigError as error:
        pytest.skip(str(error))
    return str(request.param)


async def run(folder: Path, script: str, env: Mapping[str, str] | None = None, **options: Any) -> ExitStatus:
    """Runs a script of the shell in a sandbox."""
    sandbox = Sandbox(SandboxOptions(**options), folder)
    sandbox.start(None)
    return await sandbox.run(["sh", "-c", script], {**program_environment(), **(env or {})}, PATIENCE_S)


async def test_it_ends_like_its_command_and_its_output_is_bounded(tmp_path: Path, kind: str) -> None:
    script = "head -c 50000000 /dev/zero | tr '\\0' x; echo; echo api_key=hidden; echo last; exit 3"
    ended = await run(tmp_path, script, kind=kind)
    assert ended.code == 3
    assert ended.output.endswith("x\napi_key=***\nlast") and len(ended.output) < 10_000


async def test_a_program_has_an_empty_home_and_no_secrets(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    ended = await run(tmp_path, 'cd "$HOME" && ls -A && env && echo in > "$TMPDIR/file"', kind=kind)
    assert (tmp_path / "tmp" / "file").read_text() == "in\n"
    assert ended.code == 0 and "hf_secret" not in ended.output and "PATH=" in ended.output


@pytest.mark.parametrize(
    ("script", "limit", "words"),
    [
        ("for i in $(seq 40); do sleep 600 & done; wait", {"processes": 20}, "processes, and may have"),
        ("while :; do head -c 3000000 /dev/zero > f$((i=i+1)); done", {"disk": 20 << 20}, "folders have"),
        (
            f'exec {sys.executable} -c \'import subprocess, sys; a = b"x" * 60_000_000;'
            ' [subprocess.Popen([sys.executable, "-c", "import time; a = b\\"x\\" * 60_000_000;'
            " time.sleep(600)\"]) for _ in range(3)]; import time; time.sleep(600)'",
            {"memory": 150 << 20},
            "of memory",
        ),
        (
            f"exec {sys.executable} -c 'import mmap, time; a = [mmap.mmap(-1, 50 << 20) for _ in range(5)];"
            ' [b.write(b"x" * (50 << 20)) for b in a]; time.sleep(600)\'',
            {"memory": 150 << 20},
            "of memory",
        ),
        (
            f'exec {sys.executable} -c \'import os, time; a = [os.memfd_create("x") for _ in range(5)];'
            ' [os.write(b, b"x" * (50 << 20)) for b in a]; time.sleep(600)\'',
            {"memory": 150 << 20},
            "of memory",
        ),
    ],
    ids=["processes", "disk", "memory", "shared memory", "memfd"],
)
async def test_a_program_beyond_its_limits_is_ended(
    tmp_path: Path, kind: str, script: str, limit: dict[str, Any], words: str
) -> None:
    ended = await run(tmp_path, script, kind=kind, **limit)
    assert ended.code == 120 and words in ended.output and not ended.timed_out


@pytest.mark.parametrize("limit", [{"memory": 100 << 20}, {"disk": 1 << 20}], ids=["memory", "disk"])
async def test_one_process_cannot_go_beyond_a_limit_at_once(
    tmp_path: Path, kind: str, limit: dict[str, Any]
) -> None:
    script = (
        "import sys; open('f', 'wb').write(bytes(50 << 20)) if sys.argv[1] == 'disk' else bytes(500 << 20)"
    )
    ended = await run(tmp_path, f'{sys.executable} -c "{script}" {next(iter(limit))}', kind=kind, **limit)
    # A look at all of the folder may see the file at its limit before Python has said why it ends.
    assert ended.code != 0
    assert any(words in ended.output for words in ("MemoryError", "File too large", "and may have 1"))
    assert all(file.stat().st_size <= 1 << 20 for file in tmp_path.rglob("f"))


async def test_bubblewrap_shows_the_system_and_what_is_mounted_only(tmp_path: Path) -> None:
    check_or_skip("bubblewrap")
    shown, hidden = tmp_path / "shown", tmp_path / "hidden"
    for folder in (shown, hidden):
        folder.mkdir()
        (folder / "file").write_text("content")
    script = f"""
ls {hidden} 2>&1; cat {shown}/file; echo
touch {shown}/new /usr/new /new /dev/new 2>&1
cat /etc/shadow 2>&1; ls /root /home /etc/ssl/private 2>&1
(echo > /dev/tcp/127.0.0.1/1) 2>&1; ls /sys/class/net 2>&1
ps -e 2>/dev/null | wc -l; echo made > made; ls
"""
    root = tmp_path / "root"
    ended = await run(root, script, kind="bubblewrap", network="gateway", mounts=(str(shown),))
    assert "content" in ended.output and (root / "work" / "made").read_text() == "made\n"
    assert ended.output.count("Read-only file system") == 4
    assert ended.output.count("No such file or directory") >= 2
    assert "'/etc/ssl/private': No such file" in ended.output
    assert [str(path) for path in shown.iterdir()] == [str(shown / "file")]


async def test_a_program_in_bubblewrap_is_not_root_on_this_machine(tmp_path: Path) -> None:
    check_or_skip("bubblewrap")
    opened = "import os, sys; os.close(os.open(sys.argv[1], os.O_WRONLY))"
    script = f"""
for file in /proc/sys/kernel/core_pattern /proc/sys/vm/stat_interval; do
    {sys.executable} -c '{opened}' $file 2>/dev/null && echo opened $file
done
grep -E '^(Uid|Groups|CapBnd|CapEff|NoNewPrivs):' /proc/self/status
touch /dev/shm/file "$HOME/file" && echo result > ../io/result.json
"""
    root = tmp_path / "root"
    ended = await run(root, script, kind="bubblewrap", network="gateway")
    assert ended.code == 0 and "opened" not in ended.output
    status = {name: set(ids) for name, *ids in map(str.split, ended.output.splitlines())}
    assert "0" not in status["Uid:"] | status["Groups:"] and status["NoNewPrivs:"] == {"1"}
    assert status["CapBnd:"] == status["CapEff:"] == {"0" * 16}
    assert (root / "io" / "result.json").read_text() == "result\n"
    assert os.getuid() != 0 or (root / "home" / "file").stat().st_uid != 0


def check_or_skip(kind: Any) -> None:
    try:
        check_sandbox(SandboxOptions(kind=kind))
    except ConfigError as error:
        pytest.skip(str(error))


async def test_a_program_in_bubblewrap_reaches_its_model_and_nothing_else(tmp_path: Path) -> None:
    check_or_skip("bubblewrap")
    script = """
import socket, threading
answer = ask(row["prompt"])
both = []
threads = [threading.Thread(target=lambda: both.append(ask(row["prompt"]))) for _ in range(5)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
interfaces = [name for _, name in socket.if_nameindex()]
result(answer=answer, extra={"both": both, "interfaces": interfaces, "pid": os.getpid()})
"""
    worker = command_worker(await started(says("so")), program(tmp_path, script), sandbox="bubblewrap")
    *_, final = completed(await worker.run(make_row(), 0)).trajectories
    assert final.extra["gateway"]["answer"] == "so"
    assert final.extra["both"] == ["so"] * 5
    assert final.extra["interfaces"] == ["lo"]
    assert final.extra["pid"] < 20


async def test_a_reward_runs_its_test_on_what_a_program_left(tmp_path: Path, kind: str) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "solution.py").write_text("print('solved')")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (work / "hidden.py").symlink_to(elsewhere)
    ended = await run_in_sandbox(
        {"kind": kind},
        ["python", "hidden.py"],
        folder=work,
        files={"hidden.py": "import solution, os; print(os.environ['LEVEL'])"},
        env={"LEVEL": "hard"},
        seconds=PATIENCE_S,
    )
    assert (ended.code, ended.output) == (0, "solved\nhard")
    assert elsewhere.read_text() == "mine"


async def test_results_are_read_over_no_link(tmp_path: Path) -> None:
    sandbox = Sandbox(SandboxOptions(), tmp_path)
    sandbox.start(None)
    (tmp_path / "secret").write_text("mine")
    io = tmp_path / "io"
    (io / "link").symlink_to(tmp_path / "secret")
    (io / "folder").symlink_to(tmp_path)
    os.mkfifo(io / "pipe")
    (io / "large").write_bytes(bytes(101))
    (io / "plain").write_bytes(bytes(100))
    for path in ("io/link", "io/folder/secret", "io/pipe", "io/large", "io"):
        with pytest.raises(DataError):
            await sandbox.get(path, 100)
    assert await sandbox.get("io/none", 100) is None
    assert await sandbox.get("io/plain", 100) == bytes(100)


def test_any_folder_can_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "folder"
    here.mkdir()
    monkeypatch.chdir(here)  # which is put back
    for _ in range(1100):
        os.mkdir("d")  # noqa: PTH102 - its whole path would be too long
        os.chdir("d")
    os.chdir(tmp_path)
    remove_folder(here)
    assert not here.exists()


RECORDER = """#!{python}
import json, os, sys
with open({log!r}, "a") as log:
    log.write(json.dumps({{"words": sys.argv[1:], "env": dict(os.environ)}}) + "\\n")
"""


@pytest.mark.parametrize("engine", ["docker", "podman"])
@pytest.mark.parametrize("network", ["gateway", "host"])
async def test_container_engines_are_told_image_mounts_limits_and_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Any, network: Any
) -> None:
    log = tmp_path / "log"
    recorder = tmp_path / "bin" / engine
    recorder.parent.mkdir()
    recorder.write_text(RECORDER.format(python=sys.executable, log=str(log)))
    recorder.chmod(0o755)
    monkeypatch.setenv("PATH", f"{recorder.parent}:{os.environ['PATH']}")
    data = tmp_path / "data"
    data.mkdir()
    options = SandboxOptions(
        kind=engine,
        image="agents:1",
        mounts=(f"{data}:/data:rw",),
        network=network,
        memory=100 << 20,
        processes=50,
        cpu=9,
    )
    check_sandbox(options)
    root, socket = tmp_path / "root", tmp_path / "gateway"
    socket.touch()
    sandbox = Sandbox(options, root, secrets=["sesame"], socket=socket)
    inner = sandbox.start("http://127.0.0.1:1234")
    await sandbox.run(["my-agent", "--fast"], {"OPENAI_API_KEY": "sesame", "PATH": "/x"}, PATIENCE_S)
    calls = [orjson.loads(line) for line in log.read_text().splitlines()]
    (call,) = [call for call in calls if "my-agent" in call["words"]]
    words = " ".join(call["words"])
    assert "sesame" not in words and "agents:1" in words and words.endswith("my-agent --fast")
    assert ("none" in call["words"]) == (network == "gateway")
    assert (inner == "http://127.0.0.1:8383") == (network == "gateway")
    assert f"--memory {100 << 20}" in words and "--pids-limit 50" in words
    assert "--user 0:" not in words
    for folder in ("work", "io", "home", "tmp"):
        assert f"{root}/{folder}" in words
    assert f"type=bind,src={data},dst=/data " in f"{words} "
    assert "--env OPENAI_API_KEY " in words and call["env"]["OPENAI_API_KEY"] == "sesame"
    assert "--env PATH" not in words and "--ulimit cpu=9" in words
    name = call["words"][call["words"].index("--name") + 1]
    assert ["rm", "-f", name] in [call["words"] for call in calls]


@pytest.mark.parametrize("engine", ["bubblewrap", "podman"])
def test_a_sandbox_that_is_not_there_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, engine: Any
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    image = None if engine == "bubblewrap" else "x"
    with pytest.raises(ConfigError, match=f"install {engine}"):
        check_sandbox(SandboxOptions(kind=engine, image=image))
