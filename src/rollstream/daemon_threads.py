"""Calling plain functions of the user's off the event loop, such that one that hangs hurts itself only.

The executors of the standard library join their threads at exit, so a function that hangs would keep the
interpreter from exiting; daemon threads don't.
"""

import asyncio
import contextlib
import contextvars
import functools
import inspect
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

MAX_LOST = 64
"""Calls that may hang at once, left behind by their timeouts. A thread costs 8 MiB of address space and some
30 KiB of memory; a function that hangs more often than this is broken, and then calls are refused instead."""


@dataclass(slots=True)
class Outcome:
    """How a call ended: its value, or its error, whatever was raised."""

    value: Any = None
    error: BaseException | None = None


@dataclass(slots=True, eq=False)
class ThreadCall:
    """A call in a thread."""

    function: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    context: contextvars.Context = field(default_factory=contextvars.copy_context)
    future: "asyncio.Future[Outcome]" = field(init=False)
    """Done when the call is, also when it was abandoned; never has an exception."""
    finished: bool = False
    abandoned: bool = False

    def __post_init__(self) -> None:
        self.future = self.loop.create_future()


class DaemonThreads:
    """Daemon threads that are used again, as many as there are calls. That of an abandoned call ends with it.

    Belongs to one event loop. `name` is the threads', for debuggers.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[ThreadCall | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._alive = 0
        self._idle = 0
        self._lost = 0

    @property
    def lost(self) -> int:
        """Abandoned calls that still run."""
        return self._lost

    def start(self, function: Callable[[], Any]) -> ThreadCall:
        """Begins a call at once."""
        call = ThreadCall(function, asyncio.get_running_loop())
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._alive += 1
            self._calls.put(call)
        return call

    def abandon(self, call: ThreadCall) -> None:
        """Gives up waiting for a call."""
        with self._lock:
            if not call.finished and not call.abandoned:
                call.abandoned = True
                self._lost += 1

    def close(self) -> None:
        """Ends the threads, each when its call returns. Waits for none; nothing is started any more."""
        with self._lock:
            for _ in range(self._alive):
                self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            outcome = Outcome()
            try:
                outcome.value = call.context.run(call.function)
            except BaseException as error:  # SystemExit, too: it is a thread's, not the program's
                outcome.error = error
            with self._lock:
                call.finished = True
                abandoned = call.abandoned
                if abandoned:
                    self._lost -= 1
                    self._alive -= 1
                else:
                    self._idle += 1
            deliver(call.loop, call.future, outcome)
            del call, outcome  # an idle thread holds on to nothing
            if abandoned:
                return


def deliver(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", outcome: Any) -> None:
    """Sets a future's result from another thread, unless it is done or its loop is closed."""

    def set_result() -> None:
        if not future.done():
            future.set_result(outcome)

    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits there any more
        loop.call_soon_threadsafe(set_result)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine, as far as can be told: also for partials and callable objects."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  asks whether it is async, not whether it is there
    )
