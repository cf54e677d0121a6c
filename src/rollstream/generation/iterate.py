"""`rollstream.generate(...)`: the rollouts of a run as an iterator, while it runs in a thread."""

import asyncio
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from omegaconf import OmegaConf

from rollstream.errors import ConfigError
from rollstream.generation.run import Config, as_config, in_memory
from rollstream.generation.run import generate as run
from rollstream.scratch import ScratchFolder
from rollstream.trajectory import Rollout

if TYPE_CHECKING:
    from rollstream.rollout.executor import Executor

AHEAD = 256
"""Some steps of a usual training loop, and some hundred MB of long rollouts at most."""
_given: WeakSet[Generator[Rollout, None, None]] = WeakSet()
"""The iterators that may be open still."""


def _close_all() -> None:
    for rollouts in list(_given):
        with suppress(ValueError):  # another thread iterates over it
            rollouts.close()


# `atexit` is too late: by then the thread pools, with which a run writes, take nothing more.
threading._register_atexit(_close_all)  # type: ignore[attr-defined]


def generate(
    config: Config = (),
    *,
    prompts: Iterable[Mapping[str, Any] | str] | None = None,
    reward: Callable[..., Any] | None = None,
    ahead: int = AHEAD,
) -> Generator[Rollout, None, None]:
    """Runs a generation and gives each rollout as soon as it is durable, in the order in which they are completed.

    The run begins with the first rollout that is asked for. It goes on while a rollout is worked on, until `ahead`
    of them wait to be taken: then none is begun until some are. Closing the iterator (or leaving its loop and
    letting it go) ends the run and its engine. Without `trainer.default_local_dir` the run directory is a temporary
    one, which is removed at the end; with one, the same call continues, and rollouts that are there already are not
    given again.

    Args:
        config: overrides of `generation.yaml`.
        prompts: see `run_generation`.
        reward: see `run_generation`.
        ahead: rollouts that wait in memory, at most, besides those that were in flight by then.

    Raises:
        RollstreamError: see `rollstream.errors`. A rollout that fails for good is left out.
    """
    if ahead < 1:
        raise ConfigError(f"ahead must be at least 1 (it is {ahead})")
    rollouts = _generate(config, prompts, reward, ahead)
    _given.add(rollouts)
    return rollouts


def _generate(
    config: Config,
    prompts: Iterable[Mapping[str, Any] | str] | None,
    reward: Callable[..., Any] | None,
    ahead: int,
) -> Generator[Rollout, None, None]:
    tree = as_config(config)
    if not OmegaConf.is_interpolation(tree.trainer, "default_local_dir"):
        yield from _rollouts(tree, in_memory(tree, prompts, reward), ahead)
        return
    with ScratchFolder("run") as folder:
        tree.trainer.default_local_dir = str(folder.path / "run")
        yield from _rollouts(tree, in_memory(tree, prompts, reward), ahead)


class _Waiting:
    """Rollouts that were not taken yet. While there are `ahead` of them, the executor begins none."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ahead: int) -> None:
        self._loop = loop
        self._ahead = ahead
        self._rollouts: queue.SimpleQueue[Rollout | BaseException | None] = queue.SimpleQueue()
        self._executor: Executor | None = None

    def attach(self, executor: "Executor") -> None:
        """Takes what begins the rollouts. From the run's thread, as `put` is."""
        self._executor = executor

    def put(self, rollout: Rollout) -> None:
        self._rollouts.put(rollout)
        self._pause_or_resume()

    def end(self, error: BaseException | None = None) -> None:
        """Nothing comes any more."""
        self._rollouts.put(error)

    def take(self) -> Rollout | BaseException | None:
        """Waits for the next one; an error, or None, is the end. From the thread that iterates."""
        taken = self._rollouts.get()
        if self._rollouts.qsize() < self._ahead:
            self._loop.call_soon_threadsafe(self._pause_or_resume)
        return taken

    def _pause_or_resume(self) -> None:
        if self._executor is not None:
            full = self._rollouts.qsize() >= self._ahead
            if full != self._executor.paused:
                self._executor.paused = full


def _rollouts(tree: Any, given: Any, ahead: int) -> Generator[Rollout, None, None]:
    loop = asyncio.new_event_loop()
    waiting = _Waiting(loop, ahead)
    task = loop.create_task(run(tree, given=given, on_rollout=waiting.put, on_executor=waiting.attach))

    def work() -> None:
        error: BaseException | None = None
        try:
            loop.run_until_complete(task)
        except BaseException as ended:
            error = ended
        try:
            loop.run_until_complete(loop.shutdown_asyncgens())
        finally:
            waiting.end(error)

    thread = threading.Thread(target=work, name="rollstream-generate", daemon=True)
    thread.start()
    try:
        while (one := waiting.take()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
