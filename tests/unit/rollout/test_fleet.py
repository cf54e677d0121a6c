"""What all workers count together only ever rises, whoever comes and goes."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import ask_load
from rollstream.rollout.fleet import Fleet, WorkerStatus


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=40))
def test_counts_and_generations_only_rise(events: list[tuple[int, int, bool]]) -> None:
    fleet = Fleet()
    totals, ids = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    expected = 0
    for worker, more, dies in events:
        totals[worker] += more
        expected += more
        fleet.tell(ids[worker] * 4 + worker, WorkerStatus(finished=totals[worker], gate_generation=more))
        before = fleet.generation
        if dies:
            fleet.forget(ids[worker] * 4 + worker)
            totals[worker], ids[worker] = 0, ids[worker] + 1
            assert fleet.generation > before
        assert fleet.finished == expected
    fleet.forget(99)  # nobody
    assert fleet.finished == expected


def test_whether_work_waits() -> None:
    fleet = Fleet()
    assert fleet.is_open and not fleet.all_wait
    fleet.tell(1, WorkerStatus(gate_open=False))
    fleet.tell(2, WorkerStatus())
    assert not fleet.is_open and not fleet.all_wait
    fleet.forget(2)
    assert fleet.all_wait


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
    own = Fleet()
    shared = Fleet(shared_engine=Shared())
    for worker, status in statuses.items():
        own.tell(worker, status)
        shared.tell(worker, status)
    assert await ask_load(own.engine) == EngineLoad(7, 1)
    assert await ask_load(shared.engine) == EngineLoad(7, 0)
    assert await ask_load(Fleet().engine) is None
