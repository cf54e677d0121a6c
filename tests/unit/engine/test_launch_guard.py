"""The guard: what it runs, and all that this started, end with it, and it ends like what it runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollstream.engine import launch_guard

GUARD = [sys.executable, "-I", "-S", launch_guard.__file__]

FAMILY = """
import os, subprocess, sys, time
from pathlib import Path
here = Path(sys.argv[1])
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w'); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", deaf.format(str(here / "child"))])
# A session of its own, and its parent ends at once.
subprocess.Popen(["sh", "-c", 'setsid "$0" -c "$1" &', sys.executable, deaf.format(str(here / "daemon"))])
while not all((here / name).exists() for name in ("child", "daemon")):
    time.sleep(0.01)
(here / "ready").touch()
time.sleep(600)
"""


def guarded(*command: str, parent: int | None = None) -> subprocess.Popen[bytes]:
    words = [*GUARD, str(os.getpid() if parent is None else parent), *command]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)


def family(folder: Path) -> subprocess.Popen[bytes]:
    """A guard over a server with a child and a daemon that ignore SIGTERM."""
    guard = guarded(sys.executable, "-c", FAMILY, str(folder))
    deadline = time.monotonic() + 60
    while not (folder / "ready").exists():
        assert guard.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    assert len(launch_guard.below(guard.pid)) >= 3
    return guard


def are_gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", -signal.SIGSEGV), ("kill -KILL $$", -signal.SIGKILL)],
)
def test_it_ends_like_its_command(script: str, status: int) -> None:
    guard = guarded("sh", "-c", script)
    assert guard.wait(20) == status
    guard.communicate()


def test_a_command_that_is_not_there_is_said() -> None:
    guard = guarded("/no/such/program")
    assert guard.wait(20) == 127
    _, said = guard.communicate()
    assert said == b"cannot run /no/such/program: No such file or directory\n"


@pytest.mark.parametrize("how", ["input", "sigterm"])
def test_nothing_below_it_is_left_when_it_is_told_to_stop(tmp_path: Path, how: str) -> None:
    guard = family(tmp_path)
    members = launch_guard.below(guard.pid)
    assert guard.stdin is not None
    if how == "input":
        guard.stdin.close()
    else:
        guard.send_signal(signal.SIGTERM)
    assert guard.wait(launch_guard.GRACE_S + 10) == 0
    assert are_gone(members)


def test_what_a_dead_server_leaves_behind_goes(tmp_path: Path) -> None:
    guard = family(tmp_path)
    members = launch_guard.below(guard.pid)
    server = next(pid for pid in members if FAMILY.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
    os.kill(server, signal.SIGKILL)
    assert guard.wait(20) == -signal.SIGKILL
    assert are_gone(members)


def test_a_parent_that_is_another_one_is_noticed() -> None:
    guard = guarded("sleep", "600", parent=1)
    (server,) = (launch_guard.below(guard.pid) or [0])[:1]
    assert guard.wait(20) == 0  # its input is still open
    assert server == 0 or are_gone([server])


def test_the_command_goes_with_the_guard() -> None:
    guard = guarded("sleep", "600")
    while not (members := launch_guard.below(guard.pid)):
        time.sleep(0.01)
    time.sleep(0.3)  # until the kernel has been told, which happens between fork and exec
    guard.kill()
    guard.wait()
    assert are_gone(members)


def ignored_signals() -> int:
    """Of this process: Python ignores SIGPIPE and SIGXFSZ, and who started it may have ignored others."""
    return int(Path("/proc/self/status").read_text().split("SigIgn:")[1].split()[0], 16)


def test_the_command_has_ordinary_signals_and_no_input() -> None:
    code = (
        "import signal, sys; assert sys.stdin.read() == ''; "
        "assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL; "
        "ignored = int(open('/proc/self/status').read().split('SigIgn:')[1].split()[0], 16); "
        f"assert ignored == {ignored_signals():#x}, hex(ignored)"
    )
    guard = guarded(sys.executable, "-c", code)
    assert guard.wait(20) == 0, guard.communicate()
