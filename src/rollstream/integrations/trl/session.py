"""An environment's rollouts outside of a plan: evaluation, and a plain `rollout_func`."""

import asyncio
import concurrent.futures
import contextlib
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from rollstream.errors import GenerationFailedError, GenerationStoppedError, TrainingError
from rollstream.integrations.trl.environment import EnvironmentGroups
from rollstream.training.ahead import BatchesAhead
from rollstream.training.loop_thread import LoopThread
from rollstream.trajectory import PromptRow, Rollout

T = TypeVar("T")

_START_S = 600.0
"""For an engine to get ready: one that loads a large model takes minutes."""


class Running(Protocol):
    """The thread in which an environment runs, as other threads see it."""

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """Runs a coroutine there. Raises `GenerationStoppedError` when it has ended."""
        ...

    def raise_if_broken(self) -> None:
        """Raises `GenerationFailedError`, with the cause, or `GenerationStoppedError` when it has ended."""
        ...


class OfBatches:
    """The thread of batches that are generated ahead."""

    def __init__(self, batches: BatchesAhead) -> None:
        self._batches = batches

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        return self._batches._thread.submit(coroutine)

    def raise_if_broken(self) -> None:
        self._batches._buffer.raise_if_broken()


@contextlib.contextmanager
def cause_first(running: Running) -> Iterator[None]:
    """Whatever goes wrong in it after the thread has ended is raised as that end, with its cause.

    A loop that ends cancels what others have submitted, and is closed: their errors say no more than that.
    """
    running.raise_if_broken()
    try:
        yield
    except Exception:  # `concurrent.futures.CancelledError` is one
        running.raise_if_broken()
        raise


class EnvironmentThread:
    """Keeps an environment's engine and worker running in a thread of their own.

    Args:
        groups: not started.
    """

    def __init__(self, groups: EnvironmentGroups) -> None:
        self._groups = groups
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._thread = LoopThread("the rollout thread", on_end=self._note_end)
        self._error: BaseException | None = None
        self._has_ended = False

    def start(self, timeout: float = _START_S) -> None:
        """Returns when the engine serves. Raises what its start raises."""
        self._thread.start(self._run)
        try:
            self._ready.result(timeout)
        except TimeoutError:
            self.stop()
            raise GenerationFailedError(f"the engine was not ready within {timeout:g} s") from None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> "concurrent.futures.Future[T]":
        """See `Running`."""
        return self._thread.submit(coroutine)

    def raise_if_broken(self) -> None:
        """See `Running`."""
        if self._error is not None:
            raise GenerationFailedError(
                f"the rollout thread ended with {type(self._error).__name__}: {self._error}"
            ) from self._error
        if self._has_ended:
            raise GenerationStoppedError("the rollout thread was stopped")

    def stop(self, timeout: float = 30.0) -> bool:
        """Ends the engine; whether the thread ended within `timeout` seconds."""
        return self._thread.stop(timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    async def _run(self) -> None:
        try:
            await self._groups.start()
            self._ready.set_result(None)
            await asyncio.Event().wait()
        finally:
            await self._groups.close()

    def _note_end(self, error: BaseException | None) -> None:
        self._error, self._has_ended = error, True
        if not self._ready.done():
            self._ready.set_exception(error or GenerationStoppedError("the rollout thread was stopped"))


def run_rows(
    groups: EnvironmentGroups, running: Running, rows: Sequence[tuple[PromptRow, int]], timeout: float
) -> list[Rollout]:
    """Rollouts of rows and their repeats, from another thread than the environment's.

    Raises:
        TrainingError: a rollout failed (all did, where the environment forgives), they took longer than
            `timeout` seconds, or the environment's thread has ended, with the cause.
    """
    with cause_first(running):
        asked = running.submit(groups.run_rows(rows))
        try:
            return asked.result(timeout)
        except concurrent.futures.CancelledError:
            running.raise_if_broken()
            raise TrainingError(f"{len(rows)} rollouts were cut off") from None
        except TimeoutError:
            if asked.done():
                raise
            asked.cancel()
            raise TrainingError(f"{len(rows)} rollouts took longer than {timeout:g} s") from None
