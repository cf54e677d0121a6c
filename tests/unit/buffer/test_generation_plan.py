import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.generation_plan import EpochOrder, Plan, Work, check_distinct, make_uid
from rollstream.buffer.items import MAX_TEXT_ID
from rollstream.errors import DataError

IDS = st.lists(st.integers(-3, 12) | st.sampled_from(["7", "a", "ü" * 900]), unique_by=lambda i: (type(i), i))


@given(ids=IDS, repeats=st.integers(1, 4), epochs=st.integers(1, 4), data=st.data())
def test_the_plan_has_every_repeat_of_every_epoch_that_is_not_skipped_once(
    ids: list[int | str], repeats: int, epochs: int, data: st.DataObject
) -> None:
    skips = Counter(data.draw(st.lists(st.sampled_from([*ids, "other"]), max_size=8)))
    plan = Plan("r", ids, repeats, epochs, skips)
    works = list(plan.work())
    assert len(works) == len(plan)
    assert len({work.uid for work in works}) == len(works)
    assert all(len(work.uid) <= MAX_TEXT_ID for work in works)
    found = Counter((work.row, work.epoch) for work in works)
    assert found == {
        (row, epoch): repeats
        for row, instance_id in enumerate(ids)
        for epoch in range(min(skips[instance_id], epochs), epochs)
    }
    assert [work.uid for work in plan.work()] == [work.uid for work in works]
    assert [work.epoch for work in works] == sorted(work.epoch for work in works)


def test_uids_tell_numbers_from_texts_and_rollouts_apart() -> None:
    uids = [make_uid("r", one, 0, 0) for one in (7, "7", '"7"')] + [make_uid("s", 7, 0, 0)]
    assert len(set(uids)) == 4


def test_two_rows_with_one_id_are_named() -> None:
    check_distinct([7, "7", 8])
    with pytest.raises(DataError, match="'x' is that of rows 1 and 3"):
        check_distinct([7, "x", 8, "x"])


@given(
    rows=st.integers(1, 3),
    epochs=st.integers(1, 4),
    repeats=st.integers(1, 3),
    slots=st.integers(1, 12),
    seed=st.randoms(use_true_random=False),
)
def test_an_epoch_begins_when_the_one_before_has_left(
    rows: int, epochs: int, repeats: int, slots: int, seed: object
) -> None:
    works = list(Plan("r", list(range(rows)), repeats, epochs, Counter()).work())
    written: list[Work] = []

    async def run() -> None:
        order, taking, left = EpochOrder(), asyncio.Lock(), iter(works)

        async def slot() -> None:
            while True:
                async with taking:
                    if (work := next(left, None)) is None:
                        return
                    await order.enter(work)
                for _ in range(seed.randrange(6)):  # type: ignore[attr-defined]
                    await asyncio.sleep(0)
                written.append(work)
                order.leave(work)

        async with asyncio.timeout(10):
            await asyncio.gather(*(slot() for _ in range(slots)))

    asyncio.run(run())
    assert Counter(work.uid for work in written) == Counter(work.uid for work in works)
    for row in range(rows):
        found = [work.epoch for work in written if work.row == row]
        assert found == sorted(found)
