"""The generation thread: begins groups as the buffer has room for them, and hands them back.

    buffer.admit() -> generate, with retries -> filters -> buffer.finish() | buffer.drop()
                            |
                            +-> the group failed: buffer.drop(), or, by `on_group_failure`, buffer.fail(cause)

It ends by `stop`, or because generation cannot go on; then everyone who waits hears why.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Sequence, Sized
from concurrent.futures import Future
from typing import Any, Literal, TypeVar

from rollstream.errors import (
    DroppedGroupError,
    EngineLostError,
    GenerationFailedError,
    GroupFailedError,
    TrainingError,
)
from rollstream.rollout.retry import RetryPolicy, find_unavailable, is_transient
from rollstream.training.generator import GroupGenerator
from rollstream.training.group_buffer import Begun, GroupBuffer
from rollstream.training.loop_thread import LoopThread

logger = logging.getLogger(__name__)

T = TypeVar("T")

OnGroupFailure = Literal["fail", "drop_and_refill"]
"""`fail`: the first group that fails ends generation; `drop_and_refill`: the plan's next one replaces it."""

_CLOSE_S = 20.0
"""For a generator to release what it holds; a server that is told to end gets about as long elsewhere."""


class GenerationThread:
    """Fills a buffer.

    Args:
        buffer: takes the groups.
        generator: makes them, in this thread's event loop.
        max_groups_in_flight: groups at once at most; None: as many as the buffer lets begin.
        group_timeout: seconds for one group, retries and the waits before them included; None: no limit.
        retry: for errors that may pass; an engine that is away is waited for, within `group_timeout`.
        on_group_failure: what a group that failed for good does to the others.
        max_failures: groups that may fail one after the other; one more ends generation.
        max_drops: groups that filters may throw away one after the other; one more ends generation.
    """

    def __init__(
        self,
        buffer: GroupBuffer,
        generator: GroupGenerator,
        *,
        max_groups_in_flight: int | None,
        group_timeout: float | None,
        retry: RetryPolicy,
        on_group_failure: OnGroupFailure,
        max_failures: int,
        max_drops: int,
    ) -> None:
        self._buffer = buffer
        self._generator = generator
        self._in_flight_max = max_groups_in_flight
        self._group_timeout = group_timeout
        self._retry = retry
        self._on_group_failure = on_group_failure
        self._max_failures = max_failures
        self._max_drops = max_drops
        self._failures = 0  # one after the other, as the drops
        self._drops = 0
        self._jitter = random.Random()
        self._in_flight = 0
        self._room = asyncio.Event()
        self._ready: Future[None] = Future()
        self._thread = LoopThread("the generation thread", on_end=self._ended)
        self.generation_s = 0.0
        """Seconds in which at least one group was being generated."""
        self._busy_since = 0.0

    def start(self, timeout: float) -> None:
        """Starts the generator; returns when it is ready.

        Raises:
            Exception: the generator's own, if it does not start; `TrainingError` if it takes too long.
        """
        self._buffer.on_room = lambda: self._thread.call_soon(self._room.set)
        self._thread.start(self._main)
        try:
            self._ready.result(timeout)
        except TimeoutError:
            if self._ready.done():
                raise
            late = TrainingError(f"the generator did not start within {timeout:g} s; {self.describe()}")
            self._buffer.fail(late)  # nothing will ever come
            self._thread.stop(0.0)
            raise late from None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "Future[T]":
        """Runs a coroutine in the generator's event loop. Raises `GenerationStoppedError`."""
        return self._thread.submit(coroutine)

    def call_soon(self, function: Callable[[], object]) -> None:
        """Calls a function in the generator's event loop; nothing happens when it has ended."""
        self._thread.call_soon(function)

    def stop(self, timeout: float) -> bool:
        """Cuts off what is in flight, closes the generator; whether that took at most `timeout` seconds."""
        self._buffer.stop()
        return self._thread.stop(timeout)

    def describe(self) -> str:
        """What the thread does, for an error message."""
        return self._thread.describe()

    def busy_seconds(self) -> float:
        """Seconds so far in which at least one group was being generated."""
        since = self._busy_since
        return self.generation_s + (time.monotonic() - since if since else 0.0)

    def _ended(self, error: BaseException | None) -> None:
        if not self._ready.done():
            self._ready.set_exception(error or TrainingError("generation was stopped before it began"))
        if error is not None:
            self._buffer.fail(error)

    async def _main(self) -> None:
        try:
            await self._run()
        except BaseException as error:
            try:
                await self._close()
            except Exception as closing:  # `error` is why it ends, and the cause that counts
                logger.warning(
                    "the generator did not close after %s: %s: %s",
                    *(type(error).__name__, type(closing).__name__, closing),
                )
            raise

    async def _run(self) -> None:
        await self._generator.start()
        self._ready.set_result(None)
        try:
            async with asyncio.TaskGroup() as groups:
                try:
                    await self._pump(groups)
                except Exception as error:  # the plan's
                    self._buffer.fail(error)
                    raise
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise first from first.__cause__

    async def _close(self) -> None:
        # In the task that started it: what it opened may be bound to that.
        self._thread.leave_alone()
        async with asyncio.timeout(_CLOSE_S):
            await self._generator.close()

    async def _pump(self, groups: asyncio.TaskGroup) -> None:
        while True:
            self._room.clear()
            while self._in_flight_max is None or self._in_flight < self._in_flight_max:
                begun = self._buffer.admit()
                if begun is None:
                    break
                if self._in_flight == 0:
                    self._busy_since = time.monotonic()
                self._in_flight += 1
                groups.create_task(self._one(begun))
            await self._room.wait()

    async def _one(self, begun: Begun) -> None:
        try:
            await self._generate(begun)
        except Exception as error:
            self._buffer.fail(error)  # at once: the others, and the generator, may take long to end
            raise
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self.generation_s += time.monotonic() - self._busy_since
                self._busy_since = 0.0
            self._room.set()

    async def _generate(self, begun: Begun) -> None:
        attempts, waits = 1, 0
        try:
            async with asyncio.timeout(self._group_timeout) as limit:
                while True:
                    try:
                        rollouts = await self._call(begun)
                        break
                    except (EngineLostError, DroppedGroupError):
                        raise
                    except Exception as error:
                        if find_unavailable(error) is None:  # an engine that is away is charged to nobody
                            if attempts >= self._retry.max_attempts or not is_transient(error):
                                raise
                            attempts += 1
                        waits += 1
                        wait = self._retry.wait(waits, self._jitter)
                        logger.warning(
                            "group %d: %s: %s; again in %.1f s",
                            *(begun.planned.position, type(error).__name__, error, wait),
                        )
                        await asyncio.sleep(wait)
            dropped = self._buffer.finish(begun, rollouts, attempts=attempts)
        except (SystemExit, KeyboardInterrupt) as error:  # of the user's code: they would tear the loop down
            raise TrainingError(f"the generator raised {type(error).__name__}({error})") from error
        except EngineLostError:
            raise  # no other group would fare better
        except DroppedGroupError as reason:
            self._buffer.drop(begun, failed=False)
            dropped = str(reason)
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                late = TrainingError(
                    f"group {begun.planned.position} (prompt {begun.planned.index}) took longer than "
                    f"{self._group_timeout:g} s (group_timeout)"
                )
                late.__cause__ = error.__context__ or error
                error = late
            self._failed(begun, error)
            return
        self._failures = 0
        self._drops = self._drops + 1 if dropped else 0
        if self._drops > self._max_drops:
            raise TrainingError(
                f"{self._drops} groups were thrown away one after the other, the last one because {dropped}: "
                "nothing is left to train on"
            )

    async def _call(self, begun: Begun) -> Sequence[Any]:
        try:
            rollouts = await self._generator.generate(begun.planned)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # It would end this task without a trace, and the group would never come.
            raise RuntimeError("the generator let a CancelledError of its own escape") from error
        if isinstance(rollouts, Sized) and len(rollouts):
            return rollouts
        raise GroupFailedError(
            f"the generator returned {rollouts!r:.100} for group {begun.planned.position} (prompt "
            f"{begun.planned.index}): a group is a sequence of rollouts, one at least (raise "
            "DroppedGroupError for a group that is not wanted)"
        )

    def _failed(self, begun: Begun, error: Exception) -> None:
        """Lets one group go, or ends generation by raising."""
        if self._on_group_failure == "fail":
            raise error
        self._failures += 1
        if self._failures > self._max_failures:
            raise GenerationFailedError(
                f"{self._failures} groups failed one after the other, the last one with "
                f"{type(error).__name__}: {error}"
            ) from error
        logger.warning(
            "group %d (prompt %d) failed and is replaced: %s: %s",
            *(begun.planned.position, begun.planned.index, type(error).__name__, error),
        )
        self._buffer.drop(begun, failed=True)


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    for error in errors.exceptions:
        return _first(error) if isinstance(error, BaseExceptionGroup) else error
    return errors
