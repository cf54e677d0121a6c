from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError, DataError
from rollstream.training.lookahead import AsyncDataLoaderWrapper


class Loader:
    """Another order each epoch, as of a seeded sampler; counts how often it is begun."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epochs = 0

    def __iter__(self) -> Any:
        epoch, self.epochs = self.epochs, self.epochs + 1
        return iter([f"{epoch}.{(i * 3 + epoch) % self.size}" for i in range(self.size)])

    def __len__(self) -> int:
        return self.size


def plain(size: int, epochs: int) -> list[list[Any]]:
    loader = Loader(size)
    return [list(loader) for _ in range(epochs)]


@given(
    st.integers(1, 6), st.integers(1, 4), st.integers(1, 7),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
)  # fmt: skip
@settings(deadline=None)
def test_nothing_is_lost_or_reordered_however_far_one_looks(
    size: int, epochs: int, buffer_size: int, looks: list[tuple[int, int]]
) -> None:
    loader = Loader(size)
    wrapper = AsyncDataLoaderWrapper(loader, buffer_size, epochs=epochs)
    expected = plain(size, epochs)
    flat = [batch for epoch in expected for batch in epoch]
    place, coming = 0, iter(looks)
    for epoch in range(epochs):
        seen = []
        for batch in wrapper:
            seen.append(batch)
            place += 1
            start, count = next(coming, (0, 0))
            assert wrapper.get_future_batches(start, count) == flat[place + start : place + start + count]
            assert wrapper.peek_ahead(count) == (flat[place : place + count] if count else [batch])
            assert wrapper.epoch == epoch
        assert seen == expected[epoch]
    assert list(wrapper) == []
    assert loader.epochs == epochs  # each was begun once


def test_an_endless_one() -> None:
    wrapper = AsyncDataLoaderWrapper([1, 2, 3])
    assert wrapper.peek_ahead(7) == [1, 2, 3, 1, 2, 3, 1]
    assert [list(wrapper) for _ in range(3)] == [[1, 2, 3]] * 3
    assert len(wrapper) == 3
    assert next(iter(wrapper)) == 1
    assert list(wrapper) == [2, 3]  # an iteration that was left goes on


def test_a_loader_that_has_to_be_told_its_epoch_is_told_before_it_is_read() -> None:
    class Told:
        epoch, drop_last = -1, True

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Any:
            return iter([10 * self.epoch, 10 * self.epoch + 1])

    wrapper = AsyncDataLoaderWrapper(Told(), buffer_size=5, epochs=3)
    assert wrapper.drop_last  # what else the loader has
    with pytest.raises(AttributeError):
        _ = wrapper.dataset
    seen = []
    for epoch in range(3):
        wrapper.set_epoch(epoch)  # as a trainer does, when the wrapper has read further already
        seen.append(list(wrapper))
    assert seen == [[0, 1], [10, 11], [20, 21]]


def test_an_empty_loader_ends_instead_of_turning_for_ever() -> None:
    wrapper = AsyncDataLoaderWrapper([])
    assert list(wrapper) == []
    assert wrapper.peek_ahead(3) == []
    assert wrapper.peek_ahead(0) == []


def test_an_iterator_is_refused_where_it_would_end_silently() -> None:
    with pytest.raises(ConfigError, match="read once"):
        AsyncDataLoaderWrapper(iter([1, 2]))
    assert list(AsyncDataLoaderWrapper(iter([1, 2]), epochs=1)) == [1, 2]
    with pytest.raises(ConfigError):
        AsyncDataLoaderWrapper([1], 0)


class Fails(Loader):
    """At one place of one epoch, once: iterated again it would go on, as if nothing had been lost."""

    def __init__(self, size: int, epoch: int, place: int) -> None:
        super().__init__(size)
        self.fails_at: tuple[int, int] | None = (epoch, place)

    def __iter__(self) -> Any:
        epoch = self.epochs
        batches = list(super().__iter__())
        if self.fails_at == (epoch, 0):
            self.fails_at = None
            raise OSError("disk")
        return self.give(epoch, batches)

    def give(self, epoch: int, batches: list[Any]) -> Any:
        for place, batch in enumerate(batches):
            if self.fails_at == (epoch, place):
                self.fails_at = None
                raise OSError("disk")
            yield batch


@given(st.integers(1, 5), st.integers(0, 2), st.integers(0, 4), st.integers(1, 7), st.data())
@settings(deadline=None)
def test_an_error_of_the_loader_keeps_its_place(
    size: int, epoch: int, place: int, buffer_size: int, data: st.DataObject
) -> None:
    place %= size
    wrapper = AsyncDataLoaderWrapper(Fails(size, epoch, place), buffer_size, epochs=3)
    flat = [batch for one in plain(size, 3) for batch in one][: epoch * size + place]
    taken: list[Any] = []
    while True:
        start, count = data.draw(st.tuples(st.integers(0, 4), st.integers(0, 4)))
        if count and len(taken) + start + count > len(flat):
            with pytest.raises(OSError, match="disk"):
                wrapper.get_future_batches(start, count)
        else:
            assert wrapper.get_future_batches(start, count) == flat[len(taken) :][start : start + count]
        try:
            taken.append(next(wrapper))
        except StopIteration:
            assert len(taken) % size == 0  # an epoch's end
        except OSError:
            break
    assert taken == flat
    with pytest.raises(OSError, match="disk"):  # it stays: an end would look like the whole
        next(wrapper)
    again = AsyncDataLoaderWrapper(Loader(size), buffer_size, epochs=3)
    again.load_state_dict(wrapper.state_dict())
    rest = [batch for one in plain(size, 3) for batch in one][len(flat) :]
    assert [batch for _ in range(4) for batch in again] == rest
    broken = AsyncDataLoaderWrapper(Fails(size, epoch, place), epochs=3)
    with pytest.raises(OSError, match="disk"):
        broken.load_state_dict({"consumed": len(flat) + 1, "epoch": epoch})


def test_a_loader_that_has_become_shorter_is_an_error() -> None:
    wrapper = AsyncDataLoaderWrapper([1], epochs=1)
    with pytest.raises(DataError, match="has 1 batches; 4 were given before"):
        wrapper.load_state_dict({"consumed": 4, "epoch": 0})
