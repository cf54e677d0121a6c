import asyncio
import os
import subprocess
import sys

from rollstream.serving.command import parent_ended

CHILD = """
import asyncio, os, sys
from rollstream.serving.command import parent_ended
print("ready", flush=True)
asyncio.run(parent_ended(int(sys.argv[1])))
print("ended", flush=True)
"""

PARENT = """
import os, subprocess, sys, threading
def start():
    subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
thread = threading.Thread(target=start)  # which ends before this process does
thread.start()
thread.join()
sys.stdin.read()
"""


async def test_it_waits_while_the_parent_lives() -> None:
    waiting = asyncio.create_task(parent_ended(os.getppid()))
    done, _ = await asyncio.wait({waiting}, timeout=0.05)
    assert not done
    waiting.cancel()


async def test_a_parent_that_ended_before_is_noticed() -> None:
    async with asyncio.timeout(20):
        await parent_ended(2**22 + 1)


def test_it_ends_with_the_process_and_not_with_the_thread_that_started_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    assert parent.stdout.readline() == "ended\n"
    parent.communicate()
