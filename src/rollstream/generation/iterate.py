"""`rollstream.generate(...)`: the rollouts of a run as an iterator, while it runs in a thread."""

import asyncio
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from omegaconf import DictConfig, OmegaConf

from rollstream.errors import ConfigError
from rollstream.generation.plan import InMemory
from rollstream.generation.run import Config, as_config, in_memory
from rollstream.generation.run import generate as run
from rollstream.scratch import ScratchFolder
from rollstream.trajectory import Rollout

if TYPE_CHECKING:
    from rollstream.rollout.executor import Executor

AHEAD = 256
"""Some steps of a usual training loop, and some hundred MB of long rollouts at most."""

_iterators: WeakSet[Generator[Rollout, None, None]] = WeakSet()
"""Those that may be open still."""


def _close_all() -> None:
    for rollouts in list(_iterators):
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
    _iterators.add(rollouts)
    return rollouts


def _generate(
    config: Config,
    prompts: Iterable[Mapping[str, Any] | str] | None,
    reward: Callable[..., Any] | None,
    ahead: int,
) -> Generator[Rollout, None, None]:
    tree: Any = as_config(config)
    with ExitStack() as stack:
        if OmegaConf.is_interpolation(tree.trainer, "default_local_dir"):
            folder = stack.enter_context(ScratchFolder("run"))
            tree.trainer.default_local_dir = str(folder.path / "run")
        thread = _RunThread(tree, in_memory(tree, prompts, reward), ahead)
        stack.callback(thread.close)
        while (result := thread.take()) is not None:
            if isinstance(result, BaseException):
                raise result
            yield result


class _RunThread:
    """A run in a thread, and its rollouts that were not taken yet: while `ahead` wait, the executor begins none."""

    def __init__(self, tree: DictConfig, given: InMemory, ahead: int) -> None:
        self._ahead = ahead
        self._rollouts: queue.SimpleQueue[Rollout | BaseException | None] = queue.SimpleQueue()
        self._executor: Executor | None = None
        self._loop = asyncio.new_event_loop()
        self._task = self._loop.create_task(
            run(tree, given=given, on_rollout=self._put, on_executor=self._attach)
        )
        self._thread = threading.Thread(target=self._work, name="rollstream-generate", daemon=True)
        self._thread.start()

    def take(self) -> Rollout | BaseException | None:
        """Waits for the next rollout; an error, or None, is the end. From the thread that iterates."""
        taken = self._rollouts.get()
        if self._rollouts.qsize() < self._ahead:
            self._loop.call_soon_threadsafe(self._pause_or_resume)
        return taken

    def close(self) -> None:
        """Ends the run, and its engine."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()
        self._loop.close()

    def _work(self) -> None:
        end: BaseException | None = None
        try:
            self._loop.run_until_complete(self._task)
        except BaseException as error:
            end = error
        try:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._rollouts.put(end)

    def _attach(self, executor: "Executor") -> None:
        self._executor = executor

    def _put(self, rollout: Rollout) -> None:
        self._rollouts.put(rollout)
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        if self._executor is not None:
            self._executor.pause(self._rollouts.qsize() >= self._ahead)
