"""Ports: free ones, and whose they are."""

import os
import random
import socket
import subprocess
import sys

import pytest

from rollstream.engine.ports import ReservedPort, holds_socket, listening_inodes
from rollstream.errors import EngineError


class _Always(random.Random):
    """Chooses among few ports."""

    def __init__(self, *numbers: int) -> None:
        super().__init__(0)
        self.numbers = numbers

    def randrange(self, *_: int) -> int:  # type: ignore[override]
        return self.choice(self.numbers)


def test_a_reserved_port_is_nobody_elses_until_it_is_released() -> None:
    first = ReservedPort()
    with pytest.raises(EngineError, match="no free port"):
        ReservedPort(_Always(first.number))
    code = (
        "import random, sys; from rollstream.engine.ports import ReservedPort; "
        f"r = random.Random(); r.randrange = lambda *_: {first.number}; ReservedPort(r)"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "no free port" in other.stderr
    first.release()
    first.release()
    again = ReservedPort(_Always(first.number))
    again.release()


def test_a_port_that_somebody_listens_on_is_not_taken() -> None:
    free = ReservedPort()
    free.release()
    with socket.create_server(("127.0.0.1", free.number)):
        with pytest.raises(EngineError, match="no free port"):
            ReservedPort(_Always(free.number))
        other = ReservedPort(_Always(free.number, free.number + 1))
        assert other.number != free.number
        other.release()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_who_listens_is_known() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        inodes = listening_inodes(port)
        assert inodes
        assert holds_socket(os.getpid(), inodes)
        assert not holds_socket(os.getppid(), inodes)
        assert not holds_socket(2**22 + 1, inodes)
        with socket.create_connection(("127.0.0.1", port)):
            assert listening_inodes(port) == inodes  # connections do not count
    assert not listening_inodes(port)
