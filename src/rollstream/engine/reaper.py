"""A program between rollstream and a process that it starts: the process and all below it end with their owner.

    rollstream --(pipe)--> reaper --> server --> its workers …

The reaper runs one command, as the leader of a session and process group of its own, and ends

- when the command does, after what the command left behind is gone, too; in the same way, by exit code or
  signal, so that whoever waits for the reaper sees how the command ended;
- when its input ends: rollstream is gone, SIGKILL included, or wants it to stop;
- when it gets SIGTERM.

In the last two cases everything below it gets SIGTERM, `GRACE_S` to tidy up, and then SIGKILL. Children that
moved into sessions of their own or whose parents died are found, too: the kernel gives orphans to the reaper.
Should the reaper itself be killed, the kernel kills the command, and its owner looks for the others by `MARK`
in their environment.

It is run as a file, `python -I -S reaper.py OPTIONS COMMAND …`, with nothing but the standard library, so that
it starts in some 20 ms and any interpreter will do. OPTIONS are JSON, the fields of `Bounds`: a command that goes
over one is ended with all that is below it, and the reaper says so and ends with `OVER_LIMIT`.
"""

import ctypes
import json
import os
import re
import resource
import select
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

GRACE_S = 5.0
"""For a server to end in order: shared memory is given back. Its answers are lost anyway."""

STOP_TIMEOUT_S = GRACE_S + 3.0
"""For the reaper, which kills after its own grace; then its owner kills it."""

_LEFTOVERS_S = 1.0
"""For what a dead server leaves behind to end by itself: Python's resource tracker removes shared memory when
its process is gone."""

_KILL_LEFT_S = 5.0
"""For processes that are killed to be gone: one that holds a device's memory takes a second or two."""

MARK = "ROLLSTREAM_REPLICA"
"""Environment variable by which all processes below a reaper can be found, if it was killed itself: each start
has a value of its own."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

OVER_LIMIT = 120
"""Exit code for a command that went over a bound."""

_LOOK_S = 0.5
"""Between two looks at what a bounded command uses, at most."""

_SOON_S = 0.02
"""Between two looks, at least: a program writes to 1 GiB of memory in half a second."""

_MOST_FILES = 100_000
"""In a bounded folder."""


class Bounds:
    """Limits of a command and all that it starts; None is no limit. No dataclass: that takes 15 ms to import.

    Args:
        grace: seconds to tidy up after SIGTERM.
        memory: bytes, see `_memory_use`; for each process also of writable address space.
        processes: at once.
        disk: bytes in `folder`; also of one file at once.
        folder: where the command writes.
        cpu: seconds of each process.
        files: open at once in each process.
    """

    def __init__(
        self,
        *,
        grace: float = GRACE_S,
        memory: int | None = None,
        processes: int | None = None,
        disk: int | None = None,
        folder: str = "",
        cpu: int | None = None,
        files: int | None = None,
    ) -> None:
        self.grace, self.memory, self.processes = grace, memory, processes
        self.disk, self.folder, self.cpu, self.files = disk, folder, cpu, files


def reaped(command: Iterable[str], bounds: Bounds | None = None) -> list[str]:
    """The words that run a command below a reaper. Hold the other end of its input open."""
    options = json.dumps(vars(bounds or Bounds()))
    return [sys.executable, "-I", "-S", __file__, options, *command]


def main(options: str, command: list[str]) -> None:
    """Runs the command to its end, and ends like it."""
    bounds = Bounds(**json.loads(options))
    prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None
    if prctl is not None:
        prctl(_PR_SET_CHILD_SUBREAPER, 1)
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    asked: list[int] = []
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: asked.append(number))
    server = _start(command, prctl, bounds)
    watch = _Watch(bounds)
    status: int | None = None
    over = ""
    while status is None and not over:
        ready, _, _ = select.select([0, woken], [], [], watch.next_s)
        if woken in ready:
            os.read(woken, 4096)
        status = _reap(server)[0]
        if asked or 0 in ready:
            break
        if status is None:
            over = watch.look()
    grace = 0.0 if over else bounds.grace
    _end_all(server, grace=min(grace, _LEFTOVERS_S) if status is not None else grace, ask=status is None)
    if over:
        os.write(2, f"\nrollstream ended it: {over}\n".encode())
        os._exit(OVER_LIMIT)
    if status is None:
        os._exit(0)
    _end_like(status)


class _Watch:
    """Looks at what everything below this process uses, sooner where memory grows fast."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.next_s: float | None = _SOON_S if bounds.memory or bounds.processes or bounds.disk else None
        """Until the next look."""
        self._next_walk = 0.0
        self._seen = time.monotonic(), 0

    def look(self) -> str:
        """What is used beyond a limit; empty when nothing."""
        bounds, self.next_s = self.bounds, self.next_s and _LOOK_S
        pids = below(os.getpid()) if bounds.memory or bounds.processes else []
        if bounds.processes is not None and len(pids) > bounds.processes:
            return f"it has {len(pids)} processes, and may have {bounds.processes}"
        if bounds.memory is not None:
            if (used := _memory_use(pids)) > bounds.memory:
                return f"it uses {used >> 20} MiB of memory, and may use {bounds.memory >> 20}"
            (before, then), self._seen = self._seen, (time.monotonic(), used)
            if used > then:
                left_s = (bounds.memory - used) * (self._seen[0] - before) / (used - then)
                self.next_s = min(_LOOK_S, max(_SOON_S, left_s / 2))
        began = time.monotonic()
        if bounds.disk is not None and began >= self._next_walk:
            used, files = _disk_use(bounds.folder)
            # A folder with many files is looked at less often.
            self._next_walk = time.monotonic() + max(0.5, 20 * (time.monotonic() - began))
            if used > bounds.disk:
                return f"its folders have {used >> 20} MiB, and may have {bounds.disk >> 20}"
            if files > _MOST_FILES:
                return f"its folders have more than {_MOST_FILES} files"
        return ""


def _memory_use(pids: list[int]) -> int:
    """Bytes of memory that is no copy of a file on a disk; what processes share counts in each of them."""
    used = 0
    memfds: dict[int, int] = {}  # written to, they need not be mapped
    for pid in pids:
        status = _read(Path(f"/proc/{pid}/status"))
        used += sum(int(kilobytes) << 10 for kilobytes in re.findall(rb"Rss(?:Anon|Shmem):\s*(\d+)", status))
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # it has just ended
            continue
        for descriptor in descriptors:
            try:
                if str(descriptor.readlink()).startswith("/memfd:"):
                    file = descriptor.stat()
                    memfds[file.st_ino] = file.st_blocks * 512
            except OSError:  # it has just been closed
                continue
    return used + sum(memfds.values())


def _disk_use(folder: str) -> tuple[int, int]:
    """Bytes and files below a folder."""
    used = files = 0
    for root, folders, names in os.walk(folder):
        for name in (*folders, *names):
            files += 1
            try:
                used += os.lstat(os.path.join(root, name)).st_blocks * 512  # noqa: PTH118
            except OSError:  # it has just gone
                continue
        if files > _MOST_FILES:
            break
    return used, files


def _set_limits(bounds: Bounds) -> None:
    limits = {
        resource.RLIMIT_DATA: bounds.memory,
        resource.RLIMIT_FSIZE: bounds.disk,
        resource.RLIMIT_CPU: bounds.cpu,
        resource.RLIMIT_NOFILE: bounds.files,
    }
    for which, limit in limits.items():
        if limit is not None:
            _, most = resource.getrlimit(which)
            limit = limit if most == resource.RLIM_INFINITY else min(limit, most)
            resource.setrlimit(which, (limit, limit))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _start(command: list[str], prctl: object, bounds: Bounds) -> int:
    reaper = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        # Python ignores SIGPIPE and SIGXFSZ; what it ignores, its children do, too.
        for name in ("SIGCHLD", "SIGTERM", "SIGINT", "SIGHUP", "SIGPIPE", "SIGXFSZ"):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        if callable(prctl):
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != reaper:  # it ended before the kernel was told
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # the reaper's input is not the server's
        _set_limits(bounds)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot run {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def _reap(server: int) -> tuple[int | None, bool]:
    """Collects who has ended: the server's wait status, if it is among them, and whether anybody is left."""
    status = None
    try:
        while True:
            pid, found = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return status, True
            if pid == server:
                status = found
    except ChildProcessError:
        return status, False


def _end_all(server: int, *, grace: float, ask: bool) -> None:
    """Returns when nothing below this process runs any more."""
    if ask:
        kill(below(os.getpid()), signal.SIGTERM)
    deadline = time.monotonic() + grace
    while _reap(server)[1]:
        if time.monotonic() > deadline:
            # Again and again: whatever starts children while being killed is soon out of them.
            kill(below(os.getpid()), signal.SIGKILL)
        time.sleep(0.02)


def _end_like(status: int) -> None:
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the server's core, if any, is the one of interest
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):  # of those nobody can take a handler away
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def kill(pids: Iterable[int], number: int) -> None:
    """Sends a signal to those that are still there."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def below(root: int) -> list[int]:
    """The processes that descend from `root`, without it, but for some that start just now. Linux only."""
    parents: dict[int, list[int]] = {}
    is_listed = Path(f"/proc/{root}/task/{root}/children").exists()
    if not is_listed:  # a kernel without CONFIG_PROC_CHILDREN: at a cost that grows with all processes
        for entry in Path("/proc").glob("[0-9]*"):
            # The name, in parentheses, may hold anything; state and parent follow (proc_pid_stat(5)).
            if fields := _read(entry / "stat").rpartition(b")")[2].split():
                parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        children = parents.get(pid, [])
        if is_listed:
            children = _children(Path(f"/proc/{pid}/task"))
        found += children
        waiting += children
    return found


def _children(threads: Path) -> list[int]:
    """The children of a process, from the folder of its threads; none when it has just ended."""
    try:
        files = [thread / "children" for thread in threads.iterdir()]
    except OSError:
        return []
    return [int(child) for file in files for child in _read(file).split()]


def marked(mark: str) -> set[int]:
    """Processes whose environment has `MARK` with this value. Linux only; elsewhere nobody."""
    wanted = f"{MARK}={mark}".encode()
    entries = Path("/proc").glob("[0-9]*")
    return {int(entry.name) for entry in entries if wanted in _read(entry / "environ").split(b"\0")}


def _read(file: Path) -> bytes:
    """A file of a process; empty when that has just ended, or is another user's."""
    try:
        return file.read_bytes()
    except OSError:
        return b""


def kill_left(mark: str) -> None:
    """Kills what is left of a start whose reaper was killed: returns when it is gone, or after seconds."""
    deadline = time.monotonic() + _KILL_LEFT_S
    while time.monotonic() < deadline and (left := marked(mark)):
        kill(left, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
