"""Ports for servers on this machine, without two runs taking the same one."""

import random
import socket
import sys
from pathlib import Path

from rollstream.errors import EngineError

LOOPBACK = "127.0.0.1"
"""Where launched servers listen that only this machine has to reach."""

_LOWEST = 20_000
_ABOVE = 32_768
"""Below the kernel's usual range for outgoing connections, any of which could take the port before a server
that takes a minute to load does."""

_TRIES = 200

_LISTENING = "0A"
"""TCP_LISTEN, as the kernel's tables have it."""


class ReservedPort:
    """A port that nobody listens on, and that no other run on this machine takes meanwhile.

    Other runs see the reservation in the name of an abstract Unix socket, which goes with its process. Other
    programs do not: who listens in the end, `listening_inodes` says.

    Args:
        rng: chooses.
        host: the address of this machine that it is a port of.

    Raises:
        EngineError: there is none.
    """

    def __init__(self, rng: random.Random | None = None, host: str = LOOPBACK) -> None:
        rng = rng or random.Random()
        self.host = host
        for _ in range(_TRIES):
            number = rng.randrange(_LOWEST, _ABOVE)
            if (mark := _mark(number)) is None:
                continue
            if is_free(number, host):
                self.number = number
                self._mark: socket.socket | None = mark
                return
            mark.close()
        raise EngineError(
            f"no free port from {_LOWEST} to {_ABOVE - 1} on {host} was found in {_TRIES} tries"
        )

    def release(self) -> None:
        """Lets others have it. May be called twice."""
        if self._mark is not None:
            self._mark.close()
            self._mark = None


def _mark(number: int) -> socket.socket | None:
    """The reservation; None when another run has it."""
    mark = socket.socket(socket.AF_UNIX)
    if sys.platform == "linux":
        try:
            mark.bind(f"\0rollstream-port-{number}")
        except OSError:
            mark.close()
            return None
    return mark


def is_free(number: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen on a port of one of this machine's addresses now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do it, so that connections of a server before, which linger, are in nobody's way.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, number))
            probe.listen(1)
        except OSError:
            return False
        return True


def listening_inodes(port: int) -> set[str]:
    """The sockets that listen on a port of this machine, as the kernel numbers them (Linux)."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:  # no such kernel, or no IPv6
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def holds_socket(pid: int, inodes: set[str]) -> bool:
    """Whether a process has one of these sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        return any(str(link.readlink()) in wanted for link in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has just ended, or closed one
        return False
