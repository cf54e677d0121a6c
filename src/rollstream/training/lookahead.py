"""A data loader whose coming batches can be seen, without losing or reordering any."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Self

from rollstream.errors import ConfigError, DataError


class AsyncDataLoaderWrapper:
    """Wraps a data loader: what was looked at comes all the same, in the same order.

    An iteration is an epoch of the loader, which is begun when the iteration is, or when somebody looks ahead
    after the last one has ended; an iteration that was left before its end goes on. Nobody sees beyond the end
    of an epoch. What the loader raises is raised where it stands in the sequence, after all batches before it,
    and again by whoever asks further. Thread-safe.

    Args:
        dataloader: anything that can be iterated again and again: a `DataLoader`, a list. Its attributes
            (`sampler`, `set_epoch`, …) are the wrapper's, too.
        buffer_size: batches that are kept ready, >= 1; looking further reads more.

    Raises:
        ConfigError: it can be iterated only once (an iterator).
    """

    def __init__(self, dataloader: Iterable[Any], buffer_size: int = 5) -> None:
        if buffer_size < 1 or isinstance(dataloader, Iterator):
            raise ConfigError(f"buffer_size={buffer_size}: at least 1, of a loader that can be read again")
        self.dataloader = dataloader
        self._buffer_size = buffer_size
        self._lock = threading.RLock()
        self._source: Iterator[Any] | None = None  # of the epoch under way
        self._error: Exception | None = None  # what the loader raised, after all that is in the buffer
        self._buffer: deque[Any] = deque()
        self._current: list[Any] = []
        self.epoch = 0
        """Iterations that have ended."""
        self.consumed = 0
        """Batches that `next` gave, over all epochs."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        with self._lock:
            self._fill(self._buffer_size)
            if self._buffer:
                self._current = [self._buffer.popleft()]
                self.consumed += 1
                return self._current[0]
            if self._error is not None:
                raise self._error
            self._source = None
            self.epoch += 1
            raise StopIteration

    def __len__(self) -> int:
        """Batches of one epoch, if the loader knows."""
        return len(self.dataloader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def peek_ahead(self, n: int = 1) -> list[Any]:
        """The next `n` batches; fewer at the end of the epoch. 0: the current one."""
        return self.get_future_batches(0, n) if n else list(self._current)

    def get_future_batches(self, start_offset: int, count: int) -> list[Any]:
        """`count` batches from `start_offset` on, 0 being what `next` gives; fewer at the end of the epoch."""
        with self._lock:
            end = start_offset + count
            self._fill(end)
            if count and self._error is not None and len(self._buffer) < end:
                raise self._error  # fewer batches would look like the end
            return list(itertools.islice(self._buffer, start_offset, end))

    def state_dict(self) -> dict[str, Any]:
        """How many batches were given: JSON values. What was only looked at is given again."""
        with self._lock:
            return {"consumed": self.consumed, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after so many batches, which are read and thrown away: the loader must give the same again.

        Raises:
            DataError: its epochs have not so many.
        """
        while self.epoch < state["epoch"]:
            for _ in self:
                pass
        while self.consumed < state["consumed"] and self.epoch == state["epoch"]:
            next(self, None)
        if self.state_dict() != state:
            raise DataError(f"the data loader gives {self.state_dict()}; {state} was given before")

    def _fill(self, wanted: int) -> None:
        try:
            if self._source is None:
                self._source = iter(self.dataloader)
            while len(self._buffer) < wanted and self._error is None:
                self._buffer.append(next(self._source))
        except StopIteration:
            return
        except Exception as error:  # whoever looks ahead is not the one to hear of it
            self._error = error
