"""Several processes: one generates, all are told, and when one fails, the others say its cause."""

import contextlib
import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rollstream.errors import TrainingError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TRAININGS = itertools.count()
"""Every process begins the same ones; the failure of each has a key of its own in the job's store."""


def from_main(accelerator: Any, make: Callable[[], T]) -> T:
    """Calls `make` in the main process; every process gets its result.

    Raises:
        Exception: `make`'s own, in the main process.
        TrainingError: in the others: `make` failed there; with the cause's text.
    """
    if accelerator.num_processes == 1:
        return make()
    from accelerate.utils import broadcast_object_list

    box: list[Any] = [None, None]
    if accelerator.is_main_process:
        try:
            box[0] = make()
        except Exception as error:
            box[1] = f"{type(error).__name__}: {error}"
            broadcast_object_list(box, from_process=0)
            raise
    broadcast_object_list(box, from_process=0)
    if box[1] is not None:
        raise TrainingError(f"the main process failed: {box[1]}")
    made: T = box[0]
    return made


@contextlib.contextmanager
def failing_together(accelerator: Any) -> Iterator[None]:
    """Raises a `TrainingError` with the rank and cause of the process that failed first, if another did.

    The first process that fails writes the cause to the job's store. When it has ended, the launcher sends
    SIGTERM to the others, and their collective operations fail: they read the cause there.
    """
    key = f"rollstream/failed/{next(_TRAININGS)}"
    try:
        yield
    except (Exception, SystemExit) as error:
        if accelerator.num_processes > 1:
            mine = f"rank {accelerator.process_index} failed: {type(error).__name__}: {error}"
            if (first := _first_failure(key, mine)) != mine:
                raise TrainingError(first) from error
        raise


def _first_failure(key: str, mine: str) -> str:
    """The failure that was written first: perhaps this process's, which is written if there is none."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    if not dist.is_initialized():
        return mine
    try:
        store: Any = distributed_c10d._get_default_store()
        return str(store.compare_set(key, "", mine).decode())
    except RuntimeError as broken:  # the store has gone with the process that had it
        logger.warning("it is not known whether another process failed first: %s", broken)
        return mine
