"""`rollstream.generate(...)`: the rollouts of a run as an iterator, while it runs in a thread."""

import asyncio
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf

from rollstream.generation.runner import Config, as_config, in_memory
from rollstream.generation.runner import generate as run
from rollstream.scratch import ScratchFolder
from rollstream.trajectory import Rollout


def generate(
    config: Config = (),
    *,
    prompts: Iterable[Mapping[str, Any] | str] | None = None,
    reward: Callable[..., Any] | None = None,
) -> Iterator[Rollout]:
    """Runs a generation and gives each rollout as soon as it is durable, in the order in which they are completed.

    The run begins with the first rollout that is asked for. It does not wait for who iterates: rollouts that were
    not taken yet are held in memory. Closing the iterator (or leaving its loop and letting it go) ends the run.
    Without `trainer.default_local_dir` the run directory is a temporary one, which is removed at the end; with one,
    the same call continues, and rollouts that are there already are not given again.

    Args:
        config: overrides of `generation.yaml`.
        prompts: see `run_generation`.
        reward: see `run_generation`.

    Raises:
        RollstreamError: see `rollstream.errors`. A rollout that fails for good is left out.
    """
    tree = as_config(config)
    if not OmegaConf.is_interpolation(tree.trainer, "default_local_dir"):
        yield from _rollouts(tree, in_memory(tree, prompts, reward))
        return
    with ScratchFolder("run") as folder:
        tree.trainer.default_local_dir = str(folder.path / "run")
        yield from _rollouts(tree, in_memory(tree, prompts, reward))


def _rollouts(tree: Any, given: Any) -> Iterator[Rollout]:
    done: queue.SimpleQueue[Rollout | BaseException | None] = queue.SimpleQueue()
    loop = asyncio.new_event_loop()
    task = loop.create_task(run(tree, given=given, on_rollout=done.put))

    def work() -> None:
        try:
            loop.run_until_complete(task)
        except BaseException as error:
            done.put(error)
        else:
            done.put(None)
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())

    thread = threading.Thread(target=work, name="rollstream-generate", daemon=True)
    thread.start()
    try:
        while (one := done.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()
