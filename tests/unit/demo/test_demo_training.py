"""The learning rate of the training demo, which may be ended by its time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo_model.grpo import Plan, learning_rate

PLAN = Plan(steps=500, warm_up=60)


def test_it_goes_up_and_then_down_to_the_last_step() -> None:
    rates = [learning_rate(PLAN, step, 0.0) for step in range(501)]
    assert (rates[0], rates[30], rates[60], rates[280], rates[500]) == (0.0, 0.5, 1.0, 0.5, 0.0)
    stopped = Plan(steps=500, warm_up=60, stop_after=100)
    assert learning_rate(stopped, 80, 0.0) == 0.5
    assert learning_rate(stopped, 100, 0.0) == learning_rate(stopped, 101, 0.0) == 0.0


@given(st.floats(20.0, 1000.0), st.floats(0.0, 1.0))
def test_on_a_slow_machine_it_ends_with_the_time(pace: float, share: float) -> None:
    """`pace`: steps that fit into the time."""
    step = round(pace * share)
    rate = learning_rate(PLAN, step, share)
    assert 0.0 <= rate <= 1.0
    if step >= PLAN.warm_up and share > 0:
        end = min(500.0, step / share)
        assert rate == pytest.approx(max(0.0, (end - step) / max(1.0, end - 60)))
        assert rate <= learning_rate(PLAN, step, 0.0) + 1e-9
    assert learning_rate(PLAN, step, math.inf) <= rate or step < PLAN.warm_up
    assert learning_rate(PLAN, max(step, 60), 1.0) == 0.0
