"""A data loader whose coming batches can be seen, without losing or reordering any."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from rollstream.errors import ConfigError, DataError


class AsyncDataLoaderWrapper:
    """Wraps a data loader: what was looked at comes all the same, in the same order, over ends of epochs.

    The sequence of batches that `next` yields is that of `for epoch: for batch in dataloader`, however far
    and often somebody looked ahead. An iteration (`iter(wrapper)`) ends with its epoch; the next one goes on
    with what was seen of the next epoch already. The loader is begun once for each epoch, and told the epoch
    then if it has to be (`set_epoch`, its own or its sampler's).

    What the loader raises is raised where it stands in the sequence, after all batches before it, and again
    by whoever asks further: what would follow is not known. (A new wrapper goes on from `state_dict`.)

    Thread-safe.

    Args:
        dataloader: anything that can be iterated again and again: a `DataLoader`, a list.
        buffer_size: batches that are kept ready, >= 1; looking further reads more.
        epochs: epochs there are; None: no end. Looking beyond the last one gives fewer batches.

    Raises:
        ConfigError: it can be iterated only once (an iterator), and is asked for more than one epoch.
    """

    def __init__(self, dataloader: Iterable[Any], buffer_size: int = 5, *, epochs: int | None = None) -> None:
        if buffer_size < 1:
            raise ConfigError(f"buffer_size={buffer_size}: at least 1")
        if isinstance(dataloader, Iterator) and epochs != 1:
            raise ConfigError("an iterator can be read once: give the data loader itself, or epochs=1")
        self.dataloader = dataloader
        self._buffer_size = buffer_size
        self._epochs = epochs
        self._lock = threading.RLock()
        self._source = self._read()
        self._read_epoch = 0  # of what was read last
        self._error: Exception | None = None  # what the loader raised, after all that is in the buffer
        self._buffer: deque[tuple[int, Any]] = deque()  # (epoch, batch)
        self._current: list[Any] = []
        self.epoch = 0
        """The epoch of the iteration under way."""
        self.consumed = 0
        """Batches that `next` gave, over all epochs."""

    def __iter__(self) -> "AsyncDataLoaderWrapper":
        """Goes on where the last iteration ended; one that was left before its end goes on, too."""
        return self

    def __next__(self) -> Any:
        with self._lock:
            self._fill(self._buffer_size)
            if not self._buffer and self._error is None:
                raise StopIteration
            epoch = self._buffer[0][0] if self._buffer else self._read_epoch
            if epoch != self.epoch:
                self.epoch = epoch  # the next iteration begins there
                raise StopIteration
            return self._take()

    def __len__(self) -> int:
        """Batches of one epoch, if the loader knows."""
        return len(self.dataloader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """The loader's other attributes (`batch_size`, `dataset`, `sampler`, …)."""
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def set_epoch(self, epoch: int) -> None:
        """Does nothing: the loader was told when the epoch was first read. Trainers call it before each epoch."""

    def peek_ahead(self, n: int = 1) -> list[Any]:
        """The next `n` batches, over ends of epochs; fewer when there are no more. 0: the current one."""
        return self.get_future_batches(0, n) if n else list(self._current)

    def get_future_batches(self, start_offset: int, count: int) -> list[Any]:
        """`count` batches from `start_offset` on, 0 being what `next` gives; fewer when there are no more."""
        with self._lock:
            end = start_offset + count
            self._fill(end)
            if count and self._error is not None and len(self._buffer) < end:
                raise self._error  # fewer batches would look like the end
            return [batch for _, batch in itertools.islice(self._buffer, start_offset, end)]

    def state_dict(self) -> dict[str, Any]:
        """How many batches were given: JSON values. What was only looked at is given again."""
        with self._lock:
            return {"consumed": self.consumed, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after so many batches, which are read and thrown away: the loader must give the same again.

        Raises:
            DataError: there are not so many.
        """
        with self._lock:
            while self.consumed < state["consumed"]:
                self._fill(1)
                if not self._buffer and self._error is None:
                    raise DataError(
                        f"the data loader has {self.consumed} batches; {state['consumed']} were given before"
                    )
                self._take()
            self.epoch = state["epoch"]

    def _take(self) -> Any:
        if not self._buffer:
            assert self._error is not None
            raise self._error
        _, batch = self._buffer.popleft()
        self._current = [batch]
        self.consumed += 1
        return batch

    def _fill(self, wanted: int) -> None:
        try:
            while len(self._buffer) < wanted and self._error is None:
                self._buffer.append(next(self._source))
        except StopIteration:
            return
        except Exception as error:  # whoever looks ahead is not the one to hear of it
            self._error = error

    def _read(self) -> Iterator[tuple[int, Any]]:
        while self._epochs is None or self._read_epoch < self._epochs:
            for told in (self.dataloader, getattr(self.dataloader, "sampler", None)):
                if callable(set_epoch := getattr(told, "set_epoch", None)):
                    set_epoch(self._read_epoch)
            empty = True
            for batch in self.dataloader:
                empty = False
                yield self._read_epoch, batch
            if empty:
                return  # so are all others
            self._read_epoch += 1
