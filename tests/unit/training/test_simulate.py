import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.cli import main
from rollstream.errors import ConfigError
from rollstream.training.simulate import Duration, Setup, compare, parse_duration, simulate

ONE = Duration("constant", 1.0)


@pytest.mark.parametrize(("generation", "training"), [(1.0, 2.0), (1.0, 1.0), (2.0, 1.0)])
def test_constant_times_are_as_one_computes_them(generation: float, training: float) -> None:
    setup = Setup(Duration("constant", generation), training, update_s=0.25, groups_per_step=4)
    synchronous = simulate(replace(setup, ahead=0, max_staleness=0))
    assert synchronous.step_s == pytest.approx(generation + training + 0.25)
    assert synchronous.staleness == {0: 1.0}
    flying = simulate(replace(setup, weights="in_flight"))
    assert flying.step_s == pytest.approx(max(generation, training + 0.25))
    assert flying.first_s == generation
    assert simulate(replace(setup, weights="pinned")) == flying
    drained = simulate(setup)
    assert drained.step_s == pytest.approx(max(generation, training) + 0.25)  # the engine idles meanwhile
    assert drained.staleness_max == 1


def test_nothing_is_begun_while_an_update_waits_for_an_idle_engine() -> None:
    one = simulate(Setup(ONE, 0.5, groups_per_step=8, slots=2))
    assert 0 < one.drain_s <= 1.0  # the two groups in flight, and not the six behind them


durations = st.one_of(
    st.builds(Duration, st.just("constant"), st.floats(0.1, 3)),
    st.builds(Duration, st.just("exponential"), st.floats(0.1, 3)),
    st.builds(Duration, st.just("pareto"), st.floats(0.1, 3), st.floats(1.2, 4)),
    st.builds(Duration, st.just("lognormal"), st.floats(0.1, 3), st.floats(0, 1.5)),
)


@given(
    durations, st.floats(0, 3), st.floats(0, 1), st.integers(1, 6), st.integers(1, 9), st.integers(0, 3),
    st.integers(0, 4), st.sampled_from(["plan", "first"]), st.sampled_from(["drain", "in_flight"]),
    st.sampled_from([0.0, 0.3]), st.integers(0, 99),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_and_no_time_is_lost(
    generation: Duration, training: float, update: float, groups: int, slots: int, most: int,
    ahead: int, order: str, weights: str, dropped: float, seed: int,
) -> None:  # fmt: skip
    setup = Setup(
        generation, training, update, groups, slots, most, ahead, order=order, weights=weights,  # type: ignore[arg-type]
        dropped=dropped, steps=30, seed=seed,
    )  # fmt: skip
    one = simulate(setup)
    assert one.staleness_max <= most
    assert sum(one.staleness.values()) == pytest.approx(1)
    assert one.step_s >= training + update - 1e-9
    assert one.step_s == pytest.approx(training + update + one.wait_s + one.drain_s)
    assert 0 <= one.engine_idle <= 1
    assert one == simulate(setup)  # no chance but the seed's


@given(durations, st.integers(0, 2**20))
@settings(max_examples=8, deadline=None)
def test_durations_have_the_mean_that_they_are_named_by(duration: Duration, seed: int) -> None:
    if duration.kind == "pareto" and duration.shape < 2.5:
        return  # its mean converges too slowly
    drawn = [duration.draw(seed, position) for position in range(20_000)]
    assert min(drawn) > 0
    assert sum(drawn) / len(drawn) == pytest.approx(duration.mean, rel=0.2)
    assert duration.draw(seed, 17) == drawn[17]


def test_durations_are_read() -> None:
    assert parse_duration("30") == Duration("constant", 30.0)
    assert parse_duration("exponential:2") == Duration("exponential", 2.0)
    assert parse_duration("lognormal:2:0.5") == Duration("lognormal", 2.0, 0.5)
    assert parse_duration("pareto:2") == Duration("pareto", 2.0, 2.5)
    for wrong in ("x", "normal:3", "pareto:1:1", "lognormal:1:-1", "constant:nan", "pareto:1:2:3", "pareto"):
        with pytest.raises(ConfigError):
            parse_duration(wrong)


def compared(generation: Duration, training_s: float, **others: Any) -> dict[str, Any]:
    return compare(Setup(generation, training_s, **{"groups_per_step": 8, "steps": 60, **others}))


def test_what_is_set_otherwise_stands_beside_it() -> None:
    assert compared(ONE, 60.0)["fewest_ahead"] == 0  # training takes nearly all
    assert compared(Duration("constant", 60.0), 1.0)["fewest_ahead"] == 0
    one = compared(ONE, 1.0)
    assert one["fewest_ahead"] == 1
    assert one["by_ahead"][0]["step_s"] == pytest.approx(2 * one["by_ahead"][1]["step_s"])
    held_back = compared(ONE, 1.0, ahead=1, max_staleness=0)
    assert held_back["speed_up"] == pytest.approx(1)
    slow_update = compared(Duration("constant", 100.0), 1.0, update_s=30.0)
    assert slow_update["fewest_ahead"] == 0
    assert slow_update["in_flight"]["step_s"] < 0.9 * slow_update["step_s"]
    tailed = compared(Duration("pareto", 1.0, 1.5), 1.0)
    assert tailed["first"]["step_s"] < 0.9 * tailed["in_flight"]["step_s"] < 0.9 * tailed["step_s"]
    assert 1 < tailed["first"]["staleness_max"] <= 4


@pytest.mark.parametrize("wrong", [{"training_s": -1.0}, {"slots": 0}, {"dropped": 1.0}, {"steps": 0}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        simulate(Setup(**{"generation": ONE, "training_s": 1.0, **wrong}))  # type: ignore[arg-type]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--generation", "pareto:2:2.5", "--training", "1", "--steps", "20", "--groups", "4"]
    assert main([*asked, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["setup"]["generation"] == {"kind": "pareto", "mean": 2.0, "shape": 2.5}
    assert values["setup"]["ahead"] == values["setup"]["max_staleness"] == 1
    assert values["staleness_max"] <= 1 and set(values["by_ahead"]) == {"0", "1", "2", "4"}
    assert main(asked) == 0
    assert "ahead 1, staleness <= 1" in capsys.readouterr().out
    assert main(["simulate", "--generation", "often", "--training", "1"]) == 2
    assert "'often' is not SECONDS" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [("--groups", "0"), ("--training", "nan"), ("--update", "-1")])
def test_the_command_refuses_what_cannot_be(option: str, value: str) -> None:
    assert main(["simulate", "--generation", "3", "--training", "1", option, value]) == 2
