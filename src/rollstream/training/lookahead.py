"""A data loader whose coming batches can be seen, without losing or reordering any."""

import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rollstream.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class _Failed:
    """Stands where the loader raised."""

    error: Exception


class AsyncDataLoaderWrapper:
    """Wraps a data loader: what was looked at comes all the same, in the same order, over ends of epochs.

    The sequence of batches that `next` yields is that of `for epoch: for batch in dataloader`, however far
    and often somebody looked ahead. An iteration (`iter(wrapper)`) ends with its epoch, as the loader's
    does; the next one goes on with what was seen of the next epoch already. A loader that is created anew for
    each epoch in another order (a seeded sampler) is asked once for each epoch; one that has to be told the
    epoch (`set_epoch`, its own or its sampler's) is told it here, when that epoch is first read.

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
        self._source: Iterator[Any] | None = None
        self._read_epoch = 0  # of what is read next
        self._read_any = False  # of that epoch
        self._buffer: deque[tuple[int, Any]] = deque()  # (epoch, batch)
        self._epoch = 0  # of the iteration under way
        self._ended = False  # there is nothing more to read
        self._current: list[Any] = []
        self.consumed = 0
        """Batches that `next` gave, over all epochs."""

    def __iter__(self) -> "AsyncDataLoaderWrapper":
        """Goes on where the last iteration ended; one that was left before its end goes on, too."""
        return self

    def __next__(self) -> Any:
        with self._lock:
            self._fill(self._buffer_size)
            if not self._buffer:
                raise StopIteration
            epoch, batch = self._buffer[0]
            if epoch != self._epoch:
                self._epoch = epoch  # the next iteration begins there
                raise StopIteration
            if isinstance(batch, _Failed):
                raise batch.error
            self._buffer.popleft()
            self._current = [batch]
            self.consumed += 1
            return batch

    def __len__(self) -> int:
        """Batches of one epoch, if the loader knows."""
        return len(self.dataloader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """What else the loader has (`batch_size`, `dataset`, `sampler`, …)."""
        if name == "dataloader":
            raise AttributeError(name)
        return getattr(self.dataloader, name)

    def set_epoch(self, epoch: int) -> None:
        """What trainers call before each epoch: the loader was told when the epoch was first read."""

    @property
    def epoch(self) -> int:
        """The epoch of the iteration under way."""
        return self._epoch

    def peek_ahead(self, n: int = 1) -> list[Any]:
        """The next `n` batches, over ends of epochs; fewer when there are no more. 0: the current one."""
        if n == 0:
            return list(self._current)
        return self.get_future_batches(0, n)

    def get_future_batches(self, start_offset: int, count: int) -> list[Any]:
        """`count` batches from `start_offset` on, 0 being what `next` gives; fewer when there are no more."""
        if start_offset < 0 or count < 0:
            raise ValueError(f"start_offset={start_offset}, count={count}: not negative")
        with self._lock:
            self._fill(start_offset + count)
            if count == 0:
                return []
            last = self._buffer[-1][1] if self._buffer else None
            if isinstance(last, _Failed) and len(self._buffer) <= start_offset + count:
                raise last.error  # fewer batches would look like the end
            seen = itertools.islice(self._buffer, start_offset, start_offset + count)
            return [batch for _, batch in seen]

    def state_dict(self) -> dict[str, Any]:
        """How many batches were given: JSON values. What was only looked at is given again."""
        with self._lock:
            return {"consumed": self.consumed, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after so many batches, which are read and thrown away: the loader must give the same again.

        Raises:
            DataError: there are not so many.
        """
        with self._lock:
            if self.consumed or self._buffer:
                raise ConfigError("load_state_dict comes before the first batch")
            while self.consumed < state["consumed"]:
                self._fill(1)
                if not self._buffer:
                    raise DataError(
                        f"the data loader has {self.consumed} batches; {state['consumed']} were given before"
                    )
                self._epoch, batch = self._buffer[0]
                if isinstance(batch, _Failed):
                    raise batch.error
                self._buffer.popleft()
                self.consumed += 1
            self._epoch = state["epoch"]

    def _fill(self, wanted: int) -> None:
        while len(self._buffer) < wanted and not self._ended:
            if self._epochs is not None and self._read_epoch >= self._epochs:
                self._ended = True
                return
            try:
                if self._source is None:
                    self._read_any = False
                    self._source = self._begin_epoch()
                self._buffer.append((self._read_epoch, next(self._source)))
                self._read_any = True
            except StopIteration:
                self._source = None
                self._read_epoch += 1
                self._ended = not self._read_any  # an empty epoch: so are all others
            except Exception as error:  # whoever looks ahead is not the one to hear of it
                self._buffer.append((self._read_epoch, _Failed(error)))
                self._ended = True

    def _begin_epoch(self) -> Iterator[Any]:
        for one in (self.dataloader, getattr(self.dataloader, "sampler", None)):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(self._read_epoch)
        return iter(self.dataloader)
