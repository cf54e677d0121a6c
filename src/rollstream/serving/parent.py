"""Ends with the process that started this one."""

import asyncio
import os
import sys

_POLL_S = 1.0
"""Where the kernel does not tell: twice a second would be no better for anybody."""


async def parent_ended(parent_pid: int) -> None:
    """Returns when the parent is gone.

    On Linux the kernel says so, by a file descriptor of the process. (Its signal for children,
    `PR_SET_PDEATHSIG`, comes also when only the *thread* ends that started them.)

    Args:
        parent_pid: `os.getppid()` as early as possible: a parent that ended before is noticed, too.
    """
    if sys.platform == "linux" and os.getppid() == parent_pid:
        try:
            descriptor = os.pidfd_open(parent_pid)
        except OSError:  # an old kernel, or it has just ended
            pass
        else:
            await _readable(descriptor)
            return
    while os.getppid() == parent_pid:  # noqa: ASYNC110  nothing here tells when it changes
        await asyncio.sleep(_POLL_S)


async def _readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
