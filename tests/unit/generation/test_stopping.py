import os
import signal

import pytest

from rollstream.generation import stopping
from rollstream.generation.stopping import StopSignals


async def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` sends it: to the process, and to its group."""
    hard: list[int] = []
    signals = StopSignals(on_second=hard.append)
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    await signals.requested.wait()
    signals._receive(signal.SIGTERM)
    assert (signals.signal, hard) == (signal.SIGTERM, [])
    monkeypatch.setattr(stopping, "TOGETHER_S", 0.0)
    signals._receive(signal.SIGINT)
    assert hard == [signal.SIGTERM]
