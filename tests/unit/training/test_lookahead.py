from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import ConfigError, DataError
from rollstream.training.lookahead import AsyncDataLoaderWrapper


class Loader:
    """Another order each epoch, as of a seeded sampler; may fail at one place of one epoch, once."""

    drop_last = True

    def __init__(self, size: int, fails_at: tuple[int, int] | None = None) -> None:
        self.size = size
        self.epochs = 0
        self.fails_at = fails_at

    def __iter__(self) -> Any:
        epoch, self.epochs = self.epochs, self.epochs + 1
        for i in range(self.size):
            if self.fails_at == (epoch, i):
                self.fails_at = None
                raise OSError("disk")
            yield f"{epoch}.{(i * 3 + epoch) % self.size}"

    def __len__(self) -> int:
        return self.size


looks = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30)


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 7), looks)
@settings(deadline=None)
def test_nothing_is_lost_or_reordered_however_far_one_looks(
    size: int, epochs: int, buffer_size: int, drawn: list[tuple[int, int]]
) -> None:
    loader, plain = Loader(size), Loader(size)
    wrapper, coming = AsyncDataLoaderWrapper(loader, buffer_size), iter(drawn)
    for epoch in range(epochs):
        expected, seen = list(plain), list[Any]()
        for batch in wrapper:
            seen.append(batch)
            start, count = next(coming, (0, 0))
            rest = expected[len(seen) :]
            assert wrapper.get_future_batches(start, count) == rest[start : start + count]
            assert wrapper.peek_ahead(count) == (rest[:count] if count else [batch])
            assert wrapper.epoch == epoch
        assert seen == expected
    assert loader.epochs == epochs and wrapper.consumed == epochs * size


def test_it_stands_for_the_loader() -> None:
    wrapper = AsyncDataLoaderWrapper(Loader(3))
    assert len(wrapper) == 3 and wrapper.drop_last
    with pytest.raises(AttributeError):
        _ = wrapper.dataset
    assert wrapper.peek_ahead(0) == [] and len(wrapper.peek_ahead(2)) == 2
    next(iter(wrapper))
    assert len(list(wrapper)) == 2  # an iteration that was left goes on
    assert list(AsyncDataLoaderWrapper([])) == []


def test_what_cannot_be_read_again_is_refused() -> None:
    with pytest.raises(ConfigError):
        AsyncDataLoaderWrapper(iter([1, 2]))
    with pytest.raises(ConfigError):
        AsyncDataLoaderWrapper([1], 0)


@given(st.integers(1, 5), st.integers(0, 2), st.integers(0, 4), st.integers(1, 7), st.integers(0, 6))
@settings(deadline=None)
def test_an_error_of_the_loader_keeps_its_place_and_a_new_one_goes_on(
    size: int, epoch: int, place: int, buffer_size: int, ahead: int
) -> None:
    place %= size
    wrapper, plain = AsyncDataLoaderWrapper(Loader(size, (epoch, place)), buffer_size), Loader(size)
    flat, taken = [batch for _ in range(3) for batch in plain], list[Any]()
    with pytest.raises(OSError, match="disk"):
        for _ in range(3):
            for batch in wrapper:
                taken.append(batch)
                if len(taken) % size and (len(taken) // size, len(taken) % size + ahead) <= (epoch, place):
                    wrapper.peek_ahead(ahead)
    assert taken == flat[: epoch * size + place]
    for again in (wrapper.__next__, wrapper.peek_ahead):
        with pytest.raises(OSError, match="disk"):  # it stays: an end would look like the whole
            again()
    resumed = AsyncDataLoaderWrapper(Loader(size), buffer_size)
    resumed.load_state_dict(wrapper.state_dict())
    assert [batch for _ in range(3 - epoch) for batch in resumed] == flat[len(taken) :]


def test_a_loader_that_has_become_shorter_is_an_error() -> None:
    for state in ({"consumed": 4, "epoch": 0}, {"consumed": 1, "epoch": 3}):
        with pytest.raises(DataError):
            AsyncDataLoaderWrapper([1]).load_state_dict(state)
