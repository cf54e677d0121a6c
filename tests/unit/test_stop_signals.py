import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from rollstream import stop_signals
from rollstream.stop_signals import StopSignals, ending_on_sigterm
from tests.support.until import PATIENCE_S


@pytest.fixture(autouse=True)
def nobody_handles_it() -> Iterator[None]:
    """Tests before this one may have left handlers and masks, of Python or of a library in C."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def test_sigterm_runs_what_stands_in_finally() -> None:
    cleaned = []
    with pytest.raises(SystemExit) as ended, ending_on_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        finally:
            cleaned.append(signal.getsignal(signal.SIGTERM))
    assert ended.value.code == 143
    assert cleaned == [signal.SIG_DFL]  # a second one does not wait
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_somebody_elses_handler_stays() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with ending_on_sigterm():
            os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)
    with ending_on_sigterm():  # one that comes later stays, too
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    assert signal.signal(signal.SIGTERM, signal.SIG_DFL) is signal.SIG_IGN


def test_other_threads_cannot_have_handlers() -> None:
    passed = []

    def run() -> None:
        with ending_on_sigterm():
            passed.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert passed == [signal.SIG_DFL]


async def test_a_signal_that_comes_twice_at_once_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `timeout` sends it: to the process, and to its group."""
    monkeypatch.setattr(stop_signals, "TOGETHER_S", 60.0)
    hard: asyncio.Queue[int] = asyncio.Queue()
    signals = StopSignals(on_second=hard.put_nowait)
    signals.install()
    os.kill(os.getpid(), signal.SIGTERM)
    await signals.requested.wait()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0)  # each signal wakes the loop once
    assert (signals.signal, hard.empty()) == (signal.SIGTERM, True)
    monkeypatch.setattr(stop_signals, "TOGETHER_S", 0.0)
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(PATIENCE_S):
        assert await hard.get() == signal.SIGTERM


@pytest.mark.parametrize("nohup", [False, True])
async def test_a_closed_terminal_stops_what_nohup_does_not_protect(nohup: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        signals = StopSignals()
        signals.install()
        os.kill(os.getpid(), signal.SIGHUP)
        if nohup:
            os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            await signals.requested.wait()
        assert signals.signal == (signal.SIGTERM if nohup else signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


SERVER = """
import asyncio, re, threading, time, {loop}
from rollstream.stop_signals import StopSignals

async def main():
    signals = StopSignals()
    signals.install(ends_within={seconds})
    print("ready", flush=True)
    {held}

{loop}.run(main())
"""

HELD = {
    "by Python code": "[None for _ in iter(int, 1)]",
    "by a regex that keeps Python's lock": "re.match('(a*)*b', 'a' * 40)",
    "by a thread that does not end": (
        "threading.Thread(target=time.sleep, args=(600,)).start(); await signals.requested.wait()"
    ),
    "by a default executor's thread": (
        "asyncio.get_running_loop().run_in_executor(None, time.sleep, 600); await signals.requested.wait()"
    ),
}


def held_server(held: str, seconds: float, loop: str = "asyncio") -> subprocess.Popen[bytes]:
    program = SERVER.format(held=held, seconds=seconds, loop=loop)
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    return process


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("held", HELD)
def test_a_server_ends_within_its_time_whatever_holds_it(held: str, loop: str) -> None:
    with held_server(HELD[held], 0.3, loop) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == -signal.SIGALRM


def test_a_second_signal_ends_a_server_that_is_held() -> None:
    with held_server(HELD["by Python code"], 600) as process:
        process.send_signal(signal.SIGTERM)
        time.sleep(stop_signals.TOGETHER_S + 0.1)  # sooner it would be the same one
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
