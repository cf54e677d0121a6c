"""Calling a tool's functions such that what they do hurts nobody else.

A plain function runs in a daemon thread: one that hangs is left behind, and neither blocks the event loop nor
keeps the interpreter from exiting (the executors of the standard library join their threads at exit). An
async one runs in a task of its own, so that nothing it raises, SystemExit and CancelledError included, ends
anything but itself.

A function that hangs too often is not called any more, while others are. Calls that end what others began
(`release`) are told apart from those: they neither wait for them, nor are they refused because of them.
"""

import asyncio
import functools
import inspect
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollstream import daemon_threads
from rollstream.daemon_threads import MAX_LOST, DaemonThreads, is_async
from rollstream.errors import TransientError

THREADS = 64
"""Calls of plain functions at once, and as many that end something. Tools wait for the network more than they
compute; some hundred rollouts a worker call them in turn."""
CANCEL_GRACE = 1.0
"""Seconds for an async function to end once it is cancelled. Cleaning up takes milliseconds; one that goes on
is left behind."""
MAX_LOST_IN_ALL = 4 * MAX_LOST
"""Calls that may hang at once, of all names together. A name or two that hang are broken; when this many do,
it is rather what they all need that is away (the network, a disk), and no result would say anything true."""
MAX_LOST_ENDS = 16 * MAX_LOST
"""Calls of one name that end something and may hang at once. What they do not end is never ended, so they are
given up only when it is they that are broken: more than the rollouts of a worker, which may end at once."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Outcome(daemon_threads.Outcome):
    """How a call ended."""

    timed_out: bool = False
    seconds: float = 0.0
    """How long it ran, waiting for its turn excluded."""


class CallsRefusedError(Exception):
    """It was not called: too many earlier calls of the same name still hang."""


@dataclass(slots=True)
class _Lane:
    """Calls that wait for each other."""

    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(THREADS))
    """Of plain functions."""
    lost: dict[str, set["asyncio.Future[Any]"]] = field(default_factory=dict)
    """Calls that were left behind and still run, by name."""


class Calls:
    """Calls functions, plain or async. Belongs to one event loop, from its first call on.

    Args:
        kind: What is called, for messages and debuggers.
    """

    def __init__(self, kind: str = "tool") -> None:
        self._kind = kind
        self._threads = DaemonThreads(f"rollstream-{kind}")
        self._calls = _Lane()
        self._ends = _Lane()
        self._closed = False

    @property
    def lost(self) -> int:
        """Calls that were left behind and still run."""
        return sum(len(lost) for lane in (self._calls, self._ends) for lost in lane.lost.values())

    async def run(
        self,
        call: Callable[[], Any],
        *,
        name: str,
        seconds: float,
        read: Callable[[Any], Any] | None = None,
        ends: bool = False,
    ) -> Outcome:
        """Calls a function, and awaits what it returns if that can be awaited.

        Args:
            call: What to call; a `functools.partial` of an async function counts as one.
            name: Whose function it is: `MAX_LOST` calls of one name may hang.
            seconds: How long it may take, waiting for a thread excluded.
            read: Applied to what it returns, in the same place; its errors are the function's.
            ends: Whether it ends what other calls began: it is made whatever those do.

        Returns:
            How it ended; with `CallsRefusedError` when it was not called, because those of its name hang.

        Raises:
            CancelledError: The caller was cancelled.
            TransientError: It was not called for no fault of its own: calls of other names hang, or all is
                closed. Never for one that ends something, which is refused as others are for their name.
        """
        if is_async(call):
            return self._refusal(name, ends) or await self._run_task(call, read, name, seconds, ends)
        outcome = await self._run_thread(functools.partial(_call, call, read), name, seconds, ends)
        if not inspect.isawaitable(outcome.value):
            return outcome
        awaitable: Awaitable[Any] = outcome.value  # a plain function that wraps an async one
        inner = await self._run_task(lambda: awaitable, read, name, seconds - outcome.seconds, ends)
        inner.seconds += outcome.seconds
        return inner

    def close(self) -> None:
        """Ends idle threads, and cancels tasks that were left behind. Waits for neither."""
        self._closed = True
        self._threads.close()
        for lane in (self._calls, self._ends):
            for lost in lane.lost.values():
                for each in lost:
                    if isinstance(each, asyncio.Task):
                        each.cancel()

    async def _run_task(
        self,
        call: Callable[[], Awaitable[Any]],
        read: Callable[[Any], Any] | None,
        name: str,
        seconds: float,
        ends: bool,
    ) -> Outcome:
        began = time.monotonic()
        task = asyncio.create_task(_await(call, read))
        try:
            await asyncio.wait({task}, timeout=max(seconds, 0.0))
        except asyncio.CancelledError:
            await self._cancel(task, name, ends)
            raise
        if not task.done():
            await self._cancel(task, name, ends)
            return Outcome(timed_out=True, seconds=time.monotonic() - began)
        outcome = Outcome(error=asyncio.CancelledError()) if task.cancelled() else task.result()
        outcome.seconds = time.monotonic() - began
        return outcome

    async def _run_thread(
        self, function: Callable[[], Any], name: str, seconds: float, ends: bool
    ) -> Outcome:
        async with self._lane(ends).slots:
            if refusal := self._refusal(name, ends):
                return refusal
            began = time.monotonic()
            call = self._threads.start(function)
            try:
                done, _ = await asyncio.wait({call.future}, timeout=seconds)
            except asyncio.CancelledError:
                self._threads.abandon(call)
                self._lose_after(began + seconds - time.monotonic(), call.future, name, ends)
                raise
            if not done:
                self._threads.abandon(call)
                self._lose(call.future, name, ends)
                return Outcome(timed_out=True, seconds=time.monotonic() - began)
            ended = call.future.result()
            return Outcome(ended.value, ended.error, seconds=time.monotonic() - began)

    def _lane(self, ends: bool) -> _Lane:
        return self._ends if ends else self._calls

    def _refusal(self, name: str, ends: bool) -> Outcome | None:
        if self._closed:
            said = f"the {self._kind}s are closed"
            if ends:
                return Outcome(error=CallsRefusedError(said))
            raise TransientError(said)
        lost = self._lane(ends).lost
        hanging = len(lost.get(name, ()))
        if hanging >= (MAX_LOST_ENDS if ends else MAX_LOST):
            said = f"{name}: {hanging} earlier calls still hang; it is not called until some of them end"
            return Outcome(error=CallsRefusedError(said))
        # One name can have more than MAX_LOST, from calls made at once; they count as those of one name.
        if not ends and sum(min(len(each), MAX_LOST) for each in lost.values()) >= MAX_LOST_IN_ALL:
            counts = ", ".join(f"{len(each)} of {other}" for other, each in sorted(lost.items()))
            raise TransientError(f"no {self._kind} is called while so many earlier calls hang: {counts}")
        return None

    async def _cancel(self, task: "asyncio.Task[Outcome]", name: str, ends: bool) -> None:
        task.cancel()
        self._lose_after(CANCEL_GRACE, task, name, ends)
        await asyncio.wait({task}, timeout=CANCEL_GRACE)

    def _lose_after(self, seconds: float, call: "asyncio.Future[Any]", name: str, ends: bool) -> None:
        """Takes a call for lost that has not ended in time, though its caller may have gone by then."""
        timer = asyncio.get_running_loop().call_later(seconds, self._lose, call, name, ends)
        call.add_done_callback(lambda _: timer.cancel())

    def _lose(self, call: "asyncio.Future[Any]", name: str, ends: bool) -> None:
        if call.done():
            return
        lost = self._lane(ends).lost
        hanging = lost.setdefault(name, set())
        hanging.add(call)
        if len(hanging) == (MAX_LOST_ENDS if ends else MAX_LOST):
            logger.error("%s: %d calls hang; it is not called until some of them end", name, len(hanging))

        def find(call: "asyncio.Future[Any]") -> None:
            hanging.discard(call)
            if not hanging:
                del lost[name]

        call.add_done_callback(find)


async def run_to_its_end(task: asyncio.Task[T]) -> T:
    """Waits for a task also while the caller is being cancelled, however often.

    Raises:
        CancelledError: The caller was cancelled; the task has ended all the same.
    """
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return task.result()


async def _await(call: Callable[[], Awaitable[Any]], read: Callable[[Any], Any] | None) -> Outcome:
    try:
        value = await call()
        return Outcome(value=read(value) if read else value)
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: they would end the event loop
        return Outcome(error=error)


def _call(call: Callable[[], Any], read: Callable[[Any], Any] | None) -> Any:
    value = call()
    return read(value) if read and not inspect.isawaitable(value) else value
