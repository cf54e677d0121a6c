import json

import pytest

from rollstream.training.timing import StepTime, StepTimes


def step(number: int, **given: float) -> StepTime:
    return StepTime(number, **{"wait_s": 1.0, "train_s": 2.0, "weights_s": 1.0, "total_s": 5.0, **given})  # type: ignore[arg-type]


def test_shares_and_means() -> None:
    times = StepTimes()
    one = step(0, engine_busy_s=4.0)
    one.staleness = [0, 1, 1]
    times.add(one)
    two = step(1, wait_s=3.0, total_s=15.0, engine_busy_s=6.0)
    two.staleness = [2]
    times.add(two)
    assert dict(times.histogram) == {0: 1, 1: 2, 2: 1}
    last = times.last()
    assert last["rollstream/wait_s"] == 3.0
    assert last["rollstream/staleness_mean"] == last["rollstream/staleness_max"] == 2.0
    assert last["rollstream/engine_idle"] == pytest.approx(0.6)
    summary = json.loads(json.dumps(times.summary()))
    assert summary["steps"] == 2
    assert summary["total_s"] == 10.0
    assert summary["trainer_idle"] == pytest.approx((1 + 1 + 3 + 1) / 20)
    assert summary["engine_idle"] == pytest.approx(0.5)
    assert summary["staleness"] == {"0": 1, "1": 2, "2": 1}
    assert "0: 25 %, 1: 50 %, 2: 25 %" in times.table()
