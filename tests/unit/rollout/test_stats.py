"""What all workers count together only ever rises, whoever comes and goes."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import Counts, ask_load
from rollstream.rollout.stats import WorkerStats, WorkerStatus


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=40))
def test_counts_and_generations_only_rise(events: list[tuple[int, int, bool]]) -> None:
    stats = WorkerStats()
    totals, ids = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    expected = 0
    for worker, more, dies in events:
        totals[worker] += more
        expected += more
        stats.update(ids[worker] * 4 + worker, WorkerStatus(Counts(finished=totals[worker]), returns=more))
        before = stats.returns
        if dies:
            stats.remove(ids[worker] * 4 + worker)
            totals[worker], ids[worker] = 0, ids[worker] + 1
            assert stats.returns > before
        assert stats.counts.finished == expected
    stats.remove(99)  # nobody
    assert stats.counts.finished == expected


async def test_loads_are_added_up_unless_workers_share_an_engine() -> None:
    @dataclass
    class Shared:
        async def load(self) -> EngineLoad:
            return EngineLoad(running=7, queued=0)

    statuses = {
        1: WorkerStatus(load=EngineLoad(3, 1)),
        2: WorkerStatus(load=EngineLoad(4, 0)),
        3: WorkerStatus(),
    }
    own = WorkerStats()
    shared = WorkerStats(shared_engine=Shared())
    for worker, status in statuses.items():
        own.update(worker, status)
        shared.update(worker, status)
    assert await ask_load(own.engine) == EngineLoad(7, 1)
    assert await ask_load(shared.engine) == EngineLoad(7, 0)
    assert await ask_load(WorkerStats().engine) is None
