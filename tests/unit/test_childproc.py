"""A child process answers, says how it ended, and ends with its parent whatever it is doing."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest

from rollstream.childproc import PICKLE, Channel, Child, ChildDiedError, Parent, packed, portable

HERE = __name__


def serve(number: int) -> None:
    """Does what it is asked to; without an event loop."""
    parent = Parent(number, packed(Any))
    while True:
        for order, value in parent.receive():
            if order == "hang":
                with parent.at_most(value):
                    time.sleep(60)
            if order == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            parent.send({"echo": value, "environment": os.environ.get("FOR_THE_CHILD")})


def serve_objects(number: int, word: str) -> None:
    async def answer() -> None:
        channel = await Channel.over(number)
        while True:
            try:
                await channel.send({word: 1 / await channel.receive()})
            except ZeroDivisionError as error:
                await channel.send(portable(error))

    asyncio.run(answer())


@pytest.mark.parametrize("size", [0, 5, 3_000_000])
async def test_it_is_asked_and_answers(size: int) -> None:
    child = await Child.start(
        f"{HERE}:serve", codec=packed(Any), env={**os.environ, "FOR_THE_CHILD": "is here"}
    )
    for _ in range(2):
        assert await child.ask(["echo", b"x" * size]) == {"echo": b"x" * size, "environment": "is here"}
    assert await child.close(10) == "ended with exit code 0"


async def test_messages_that_are_sent_at_once_come_whole() -> None:
    ours, theirs = [await Channel.over(end) for end in socket.socketpair()]
    messages = [bytes([letter]) * (3 << 20) for letter in b"abc"]
    sending = asyncio.gather(*map(ours.send, messages))
    assert [await theirs.receive() for _ in messages] == messages
    await sending
    ours.close()
    theirs.close()


async def test_what_it_raises_is_raised_with_its_traceback() -> None:
    child = await Child.start(f"{HERE}:serve_objects", "inverse")
    assert await child.ask(4) == {"inverse": 0.25}
    with pytest.raises(ZeroDivisionError) as caught:
        await child.ask(0)
    assert "in answer" in caught.value.__notes__[0]
    assert await child.ask(2) == {"inverse": 0.5}
    await child.close(10)


@pytest.mark.parametrize(("order", "how"), [("kill", "SIGKILL"), ("hang", "exit code 1")])
async def test_how_it_ended_is_said(order: str, how: str) -> None:
    child = await Child.start(f"{HERE}:serve", codec=PICKLE._replace(encode=packed(Any).encode))
    with pytest.raises(ChildDiedError, match=how) as caught:
        await child.ask([order, 0.2])
    assert ("Timeout" in caught.value.text and "in serve" in caught.value.text) == (order == "hang")
    with pytest.raises(ChildDiedError, match=how):
        await child.ask(["echo", 1])


async def test_one_that_does_not_answer_in_time_is_killed_at_close() -> None:
    child = await Child.start(f"{HERE}:serve", codec=packed(Any))
    await child.ask(["echo", 1])  # it runs: what it is sent, it takes
    with pytest.raises(TimeoutError):
        await child.ask(["hang", 60], timeout=0.5)
    assert await child.close(0.1) == "was killed by SIGKILL"


def test_it_ends_with_its_parent() -> None:
    """Also in the middle of something, and however the parent ends."""
    code = (
        "import asyncio\n"
        "from rollstream.childproc import Child, packed\n"
        "async def main():\n"
        f"    child = await Child.start('{HERE}:serve', codec=packed(object))\n"
        "    await child.ask(['echo', 1])\n"
        "    await child.send(['hang', 60])\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.communicate()
    assert psutil.wait_procs([child], timeout=30)[1] == []
