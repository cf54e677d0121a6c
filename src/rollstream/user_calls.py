"""Calling functions of the user's such that one that hangs, or raises what it likes, hurts itself only.

A plain function runs in a daemon thread: one that hangs is left behind, and neither blocks the event loop nor
keeps the interpreter from exiting (the executors of the standard library join their threads at exit). An
async one runs in a task of its own, so that nothing it raises, SystemExit and CancelledError included, ends
anything but itself; where it may block its event loop, that is one of its own in a daemon thread.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rollstream.errors import TransientError

T = TypeVar("T")

THREADS = 64
"""Calls of one plain function at once. Tools wait for the network more than they compute; some hundred
rollouts a worker call them in turn."""
MAX_LOST = 64
"""Calls of one function that may hang at once, left behind by their timeouts. A thread costs 8 MiB of address
space and some 30 KiB of memory; a function that hangs more often than this is broken, and then calls are
refused instead."""
CANCEL_GRACE = 1.0
"""Seconds for an async function to end once it is cancelled. Cleaning up takes milliseconds; one that goes on
is left behind."""
BLOCKED_AFTER = 1.0
"""Seconds without an answer after which an event loop counts as blocked. A healthy one answers in
milliseconds; async code that computes for a second between two awaits does not belong on a loop."""


@dataclass(slots=True)
class CallResult:
    """How a call ended: its value, or its error, whatever was raised; or neither, when it took too long."""

    value: Any = None
    error: BaseException | None = None
    timed_out: bool = False
    seconds: float = 0.0
    """How long it ran, waiting for a thread excluded; known to `UserCalls` only."""


class CallsRefusedError(Exception):
    """It was not called: too many earlier calls of the same name still hang."""


class DaemonThreads:
    """Daemon threads that are used again, as many as there are calls at once.

    Args:
        name: for debuggers.
        most: threads; further calls wait for their turn. None: any number.
    """

    def __init__(self, name: str, most: int | None = None) -> None:
        self._name, self._most = name, most
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._alive = 0
        self._idle = 0  # below 0: so many calls wait

    def start(self, function: Callable[[], Any]) -> "asyncio.Future[CallResult]":
        """Begins a call, in its turn. Its future never has an exception; cancelling that leaves the call running."""
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        future: asyncio.Future[CallResult] = loop.create_future()

        def settle(outcome: CallResult) -> None:
            if not future.done():
                future.set_result(outcome)

        def call() -> None:
            outcome = CallResult()
            try:
                outcome.value = context.run(function)
            except BaseException as error:  # SystemExit, too: it is a thread's, not the program's
                outcome.error = error
            with self._lock:
                self._idle += 1
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(settle, outcome)

        with self._lock:
            if self._idle > 0 or self._alive == self._most:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._alive += 1
            self._calls.put(call)
        return future

    def close(self) -> None:
        """Ends the threads, each when its call returns. Waits for none; nothing is started any more."""
        with self._lock:
            for _ in range(self._alive):
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread holds on to nothing


@dataclass(slots=True)
class _Callee:
    """What is known of the calls of one name."""

    slots: asyncio.Semaphore
    lost: "set[asyncio.Future[Any]]" = field(default_factory=set)
    """Calls, and threads of blocked event loops, that were left behind and still run."""

    def leave(self, running: "asyncio.Future[Any]") -> None:
        """Leaves something behind."""
        self.lost.add(running)
        running.add_done_callback(self.lost.discard)


class UserCalls:
    """Calls functions of the user's, plain or async, each within its time. Belongs to one event loop.

    Each function is known by a name, and has limits of its own (`THREADS`, `MAX_LOST`): one that hangs stops
    no other.
    """

    def __init__(self, kind: str, *, limit: int | None = None, own_loop: bool = False) -> None:
        """Args:
        kind: what is called, for messages and debuggers.
        limit: calls of one plain function at once (with `own_loop`, of an async one, too); None: `THREADS`.
        own_loop: run async functions on an event loop of their own, for functions that may block it.
        """
        self._kind = kind
        self._limit = limit
        self._threads = DaemonThreads(f"rollstream-{kind}")
        self._loop_thread = _LoopThread(f"rollstream-{kind}-loop") if own_loop else None
        self._functions: dict[str, _Callee] = {}
        self._closed = False

    @property
    def lost(self) -> int:
        """Calls that were left behind and still run."""
        return sum(len(function.lost) for function in self._functions.values())

    async def run(
        self,
        call: Callable[[], Any],
        *,
        name: str,
        seconds: float,
        read: Callable[[Any], Any] | None = None,
    ) -> CallResult:
        """Calls a function, and awaits what it returns if that can be awaited.

        Args:
            call: what to call; a `functools.partial` of an async function counts as one.
            name: whose function it is.
            seconds: how long it may take, waiting for a thread excluded.
            read: applied to what it returns, in the same place; its errors are the function's.

        Returns:
            How it ended; with `CallsRefusedError` when it was not called, because `MAX_LOST` of its name hang.

        Raises:
            CancelledError: the caller was cancelled; so is the call, if it is async.
            TransientError: all is closed.
        """
        function = self._functions.get(name)
        if function is None:
            function = self._functions[name] = _Callee(asyncio.Semaphore(self._limit or THREADS))
        if is_async(call):
            return self._refusal(name, function) or await self._run_async(call, read, function, seconds)
        async with function.slots:
            if refusal := self._refusal(name, function):
                return refusal
            running = self._threads.start(functools.partial(_call, call, read))
            outcome = await _finish(running, seconds, function, cancel=False)
        if not inspect.isawaitable(outcome.value):
            return outcome
        awaitable: Awaitable[Any] = outcome.value  # a plain function that wraps an async one
        inner = await self._run_async(lambda: awaitable, read, function, seconds - outcome.seconds)
        inner.seconds += outcome.seconds
        return inner

    def close(self) -> None:
        """Ends idle threads, and cancels tasks that were left behind. Waits for neither."""
        self._closed = True
        self._threads.close()
        if self._loop_thread is not None:
            self._loop_thread.close()
        for function in self._functions.values():
            for lost in function.lost:
                if isinstance(lost, asyncio.Task):
                    lost.cancel()

    def _refusal(self, name: str, function: _Callee) -> CallResult | None:
        if self._closed:
            raise TransientError(f"the {self._kind}s are closed")
        if (lost := len(function.lost)) < MAX_LOST:
            return None
        said = f"{name}: {lost} earlier calls still hang; it is not called until some of them end"
        return CallResult(error=CallsRefusedError(said))

    async def _run_async(
        self,
        call: Callable[[], Awaitable[Any]],
        read: Callable[[Any], Any] | None,
        function: _Callee,
        seconds: float,
    ) -> CallResult:
        if self._loop_thread is None:
            task = asyncio.create_task(_await(call, read))
            return await _finish(task, seconds, function, cancel=True)
        async with function.slots:
            running = self._loop_thread.submit(_await(call, read))
            outcome = await _finish(running, seconds, function, cancel=True)
            if outcome.timed_out and (blocked := await self._loop_thread.replace_if_blocked()):
                function.leave(blocked)
            return outcome


async def _finish(
    running: "asyncio.Future[CallResult]", seconds: float, function: _Callee, *, cancel: bool
) -> CallResult:
    """Waits for a call. One that is late, or whose caller is cancelled, is cancelled if it can be, or left behind."""
    began = time.monotonic()
    try:
        await asyncio.wait((running,), timeout=max(seconds, 0.0))
    finally:
        if timed_out := not running.done():
            try:
                if cancel and running.cancel():
                    await asyncio.wait((running,), timeout=CANCEL_GRACE)
            finally:
                if not running.done():
                    function.leave(running)
    if timed_out:
        outcome = CallResult(timed_out=True)
    else:
        outcome = CallResult(error=asyncio.CancelledError()) if running.cancelled() else running.result()
    outcome.seconds = time.monotonic() - began
    return outcome


class _LoopThread:
    """An event loop in a daemon thread; one that is blocked is left behind, and another takes its place."""

    def __init__(self, name: str) -> None:
        self._threads = DaemonThreads(name)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Future[Any]

    def submit(self, work: Any) -> "asyncio.Future[Any]":
        """Begins a coroutine, which is cancelled with the future."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._serving = self._threads.start(functools.partial(_serve, self._loop))
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def replace_if_blocked(self) -> "asyncio.Future[Any] | None":
        """Asks the loop for an answer; if there is none, what is done when its thread ends."""
        loop = self._loop
        try:
            async with asyncio.timeout(BLOCKED_AFTER):
                await self.submit(asyncio.sleep(0))
        except TimeoutError:
            if self._loop is loop:
                self._stop()
                return self._serving
        return None

    def close(self) -> None:
        """Ends the loop once it answers; what runs on it is cancelled."""
        self._stop()
        self._threads.close()

    def _stop(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        while True:
            try:
                loop.run_forever()
                break
            except (SystemExit, KeyboardInterrupt):
                # asyncio lets one that a task raises end the loop, besides giving it to whoever awaits the
                # task: other calls would wait for their timeouts.
                continue
        loop.run_until_complete(asyncio.sleep(0))  # what came just before the end begins, to be cancelled
        while tasks := asyncio.all_tasks(loop):
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.wait(tasks))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()


async def _await(call: Callable[[], Awaitable[Any]], read: Callable[[Any], Any] | None) -> CallResult:
    try:
        value = await call()
        return CallResult(read(value) if read else value)
    except BaseException as error:  # SystemExit and KeyboardInterrupt, too: they would end the event loop
        return CallResult(error=error)


def _call(call: Callable[[], Any], read: Callable[[Any], Any] | None) -> Any:
    value = call()
    return read(value) if read and not inspect.isawaitable(value) else value


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine, as far as can be told: also for partials and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  asks whether it is async, not whether it is there
    )


async def in_daemon_thread(function: Callable[..., T], *arguments: Any) -> T:
    """Runs a function off the event loop, in a thread that never keeps the process from ending.

    (`asyncio.to_thread` would: the loop waits for its threads when it closes.)
    """
    threads = DaemonThreads("rollstream-work")
    running = threads.start(functools.partial(function, *arguments))
    threads.close()
    outcome = await running
    if outcome.error is not None:
        raise outcome.error
    value: T = outcome.value
    return value
