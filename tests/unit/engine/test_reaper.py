"""The reaper: what it runs, and all that this started, end with it, and it ends like what it runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.engine import reaper
from tests.support.processes import are_gone, command_line, holds_within
from tests.support.until import PATIENCE_S

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


def reaped(*command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        reaper.reaped(command, reaper.Bounds(grace=0.5)),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def family(folder: Path) -> tuple[subprocess.Popen[bytes], list[int]]:
    """A reaper over a server with a child and a daemon that ignore SIGTERM; all below it."""
    process = reaped(sys.executable, "-c", FAMILY, str(folder))
    assert holds_within(PATIENCE_S, lambda: (folder / "ready").exists() or process.poll() is not None)
    members = reaper.below(process.pid)
    assert len(members) >= 3
    return process, members


@pytest.mark.parametrize(
    ("script", "status"),
    [("exit 0", 0), ("exit 3", 3), ("kill -SEGV $$", -signal.SIGSEGV), ("kill -KILL $$", -signal.SIGKILL)],
)
def test_it_ends_like_its_command(script: str, status: int) -> None:
    process = reaped("sh", "-c", script)
    assert process.wait(PATIENCE_S) == status
    process.communicate()


def test_processes_that_end_while_they_are_listed_do_not_matter() -> None:
    """A shell that starts thousands: without care some 600 looks see one end between two reads."""
    process = subprocess.Popen(["sh", "-c", "while :; do true & /bin/true; done"], start_new_session=True)
    try:
        for _ in range(5000):
            reaper.below(process.pid)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_command_that_is_not_there_is_said() -> None:
    process = reaped("/no/such/program")
    assert process.wait(PATIENCE_S) == 127
    assert process.communicate()[1] == b"cannot run /no/such/program: No such file or directory\n"


@pytest.mark.parametrize("how", ["input", "sigterm"])
def test_nothing_below_it_is_left_when_it_is_told_to_stop(tmp_path: Path, how: str) -> None:
    process, members = family(tmp_path)
    assert process.stdin is not None
    if how == "input":
        process.stdin.close()
    else:
        process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert are_gone(members)


def test_what_a_dead_server_leaves_behind_goes(tmp_path: Path) -> None:
    process, members = family(tmp_path)
    os.kill(next(pid for pid in members if "(here / name)" in command_line(pid)), signal.SIGKILL)
    assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert are_gone(members)


def test_the_command_has_ordinary_signals_and_no_input() -> None:
    code = (
        "import signal, sys; assert sys.stdin.read() == ''; "
        "assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is signal.SIG_DFL; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"  # Python's, where not ignored
    )
    process = reaped(sys.executable, "-c", code)
    assert process.wait(PATIENCE_S) == 0, process.communicate()
