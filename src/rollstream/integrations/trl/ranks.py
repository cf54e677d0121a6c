"""Several processes: one generates, all are told, and when one fails, all fail with its cause."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rollstream.errors import TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILED = "rollstream/failed"
_HEARD = "rollstream/heard"

_TELL_S = 10.0
"""For the other processes to say that they have heard of a failure, before this one leaves."""


def from_main(accelerator: Any, make: Callable[[], T]) -> T:
    """What `make` returns in the main process, in every process.

    Raises:
        Exception: `make`'s own, in the main process.
        TrainingError: in the others: `make` failed there; with the cause's text.
    """
    if accelerator.num_processes == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    box: list[Any] = [None, None]
    cause: Exception | None = None
    if accelerator.is_main_process:
        try:
            box[0] = make()
        except Exception as error:
            cause = error
            box[1] = f"{type(error).__name__}: {error}"
    broadcast_object_list(box, from_process=0)
    if cause is not None:
        raise cause
    if box[1] is not None:
        raise TrainingError(f"the main process failed: {box[1]}")
    made: T = box[0]
    return made


@contextlib.contextmanager
def failing_together(accelerator: Any) -> Iterator[None]:
    """An error in one process ends the others with a `TrainingError` that names rank and cause.

    The first process that fails says so in the job's store and leaves the process group; whoever waits for it
    in a collective operation then fails at once, looks there, and raises what it reads. Bounded: the process
    that failed first waits some seconds for the others to have heard, no longer.
    """
    try:
        yield
    except BaseException as error:
        if accelerator.num_processes == 1 or isinstance(error, GeneratorExit):
            raise
        first = _first_failure(accelerator.process_index, error)
        if first is not None:
            raise TrainingError(first) from error
        raise


def _first_failure(rank: int, error: BaseException) -> str | None:
    """Tells the others; returns the failure of another rank that came before; None: this one is the first."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return None
    store: Any = distributed_c10d._get_default_store()
    mine = f"rank {rank} failed: {type(error).__name__}: {error}"
    try:
        first = store.compare_set(_FAILED, "", mine).decode()
        others = dist.get_world_size() - 1
        if first != mine:
            store.add(_HEARD, 1)
            return str(first)
        _leave()
        until = time.monotonic() + _TELL_S
        while store.add(_HEARD, 0) < others and time.monotonic() < until:
            time.sleep(0.05)
    except RuntimeError as broken:  # the store has gone with the process that had it
        logger.warning("rank %d could not tell the others of its failure: %s", rank, broken)
    return None


def _leave() -> None:
    """Ends this process's connections, so that no collective operation waits for it."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError, AttributeError):
        group._get_backend(torch.device("cpu")).abort()
    with contextlib.suppress(RuntimeError, AssertionError, ValueError):
        dist.destroy_process_group()
