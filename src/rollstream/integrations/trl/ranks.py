"""Several processes: one generates, all are told, and when one fails, all fail with its cause."""

import concurrent.futures
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rollstream.errors import TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILED = "rollstream/failed"
_HEARD = "rollstream/heard"

_TELL_S = 10.0
"""For the other processes to say that they have heard of a failure, before this one leaves: the launcher ends
them when it has, and they have an engine to close first."""

_LISTEN_S = 0.5
"""Between the main process's looks at whether another one has failed, while it makes what all wait for."""


def from_main(accelerator: Any, make: Callable[[], T]) -> T:
    """What `make` returns in the main process, in every process.

    With several processes `make` runs in a thread of its own. When another process fails meanwhile, it is
    left to itself: whoever calls this ends what it waits for.

    Raises:
        Exception: `make`'s own, in the main process.
        TrainingError: in the others: `make` failed there; with the cause's text. In the main process:
            another one has failed, see `failing_together`.
    """
    if accelerator.num_processes == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    box: list[Any] = [None, None]
    cause: Exception | None = None
    if accelerator.is_main_process:
        making = _in_thread(make)
        _listen(making)
        try:
            box[0] = making.result()
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

    The first process that fails says so in the job's store and leaves the process group. The main process
    looks there while the others wait for it (`from_main`). Whoever waits in a collective operation fails when
    its connections to the first one end, looks there, and raises what it reads: at once where leaving ends
    them, else (DDP holds the group as long as the model is there) when that process has ended. Bounded: it
    waits some seconds for the others to have heard, no longer.
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


def _in_thread(make: Callable[[], T]) -> "concurrent.futures.Future[T]":
    """Calls it in a daemon thread, which keeps nobody from exiting, unlike those of an executor."""
    made: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="what all ranks wait for", daemon=True).start()
    return made


def _listen(making: "concurrent.futures.Future[Any]") -> None:
    """Returns when it is done.

    Raises:
        TrainingError: another process has failed meanwhile, and will not take what is made.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    while not concurrent.futures.wait([making], timeout=_LISTEN_S).done:
        if not dist.is_initialized():
            continue
        store: Any = distributed_c10d._get_default_store()
        if store.check([_FAILED]):
            raise TrainingError(store.get(_FAILED).decode())


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
    """Ends this process's connections, unless somebody else holds the group, so that nobody waits for it."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    group: Any = distributed_c10d._get_default_group()
    with contextlib.suppress(RuntimeError, AttributeError):
        group._get_backend(torch.device("cpu")).abort()
    with contextlib.suppress(RuntimeError, AssertionError, ValueError):
        dist.destroy_process_group()
