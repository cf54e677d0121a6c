"""Figures of a run, against the plain words for them."""

import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.evaluate import read_runs, summarize
from rollstream.store.columns import RunColumns
from rollstream.store.run import Run
from rollstream.trajectory import Metrics
from rollstream.view.overview import compare, edges, group_figures, mean_interval, overview
from tests.support.view_runs import rollout, write_run

_REWARDS = st.lists(
    st.tuples(st.integers(0, 5), st.none() | st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0])),
    min_size=1,
    max_size=24,
)


def columns_of(root: Path, rewards: list[tuple[int, float | None]]) -> RunColumns:
    numbers: dict[int, int] = defaultdict(int)
    records = []
    for index, reward in rewards:
        records.append(
            rollout(index, numbers[index], reward=reward, length=3 + index, source=f"s{index % 3}")
        )
        numbers[index] += 1
    columns = RunColumns([Run.open(write_run(root, records, n=24, prompts=6))])
    columns.refresh()
    return columns


@settings(max_examples=30, deadline=None)
@given(_REWARDS)
def test_groups_are_what_python_says(
    tmp_path_factory: pytest.TempPathFactory, rewards: list[tuple[int, float | None]]
) -> None:
    columns = columns_of(tmp_path_factory.mktemp("groups") / "run", rewards)
    groups = group_figures(columns)
    expected: dict[int, list[float | None]] = defaultdict(list)
    for index, reward in rewards:
        expected[index].append(reward)
    assert groups["index"].tolist() == sorted(expected)
    for at, index in enumerate(sorted(expected)):
        scored = [one for one in expected[index] if one is not None]
        assert (groups["size"][at], groups["scored"][at]) == (len(expected[index]), len(scored))
        assert groups["solved"][at] == sum(one >= 0.5 for one in scored)
        if scored:
            assert groups["mean"][at] == pytest.approx(statistics.mean(scored))
        if len(scored) > 1:
            assert groups["spread"][at] == max(scored) - min(scored)
        assert np.isnan([groups["mean"][at], groups["spread"][at]]).tolist() == [not scored, len(scored) < 2]
    said: Any = overview(columns, groups, 0.5)
    several = [some for some in expected.values() if len([one for one in some if one is not None]) > 1]
    nothing = sum(len({one for one in some if one is not None}) == 1 for some in several)
    assert said["groups"]["no_signal"] == nothing  # a group of one has nothing to differ from
    everything = [one for _, one in rewards if one is not None]
    mean, interval = mean_interval(columns, groups)
    assert mean == (pytest.approx(statistics.mean(everything)) if everything else None)
    assert interval is None or interval[0] <= mean <= interval[1]
    if everything:
        assert sum(said["histograms"]["reward"]["counts"]) == len(everything)
    assert said["histograms"]["tokens"]["edges"][0] <= 3 + min(expected)
    assert sum(one["count"] for one in said["sources"].values()) == len(rewards)


@given(st.floats(-1e9, 1e9), st.floats(0, 1e9), st.booleans())
def test_edges_are_round_and_enclose(low: float, width: float, whole: bool) -> None:
    low, high = (float(round(low)), float(round(low + width))) if whole else (low, low + width)
    found = edges(low, high, whole=whole)
    assert found[0] <= low and high < found[-1]
    assert 2 <= len(found) <= 30
    assert (np.diff(found) > 0).all()


@settings(max_examples=15, deadline=None)
@given(_REWARDS, _REWARDS)
def test_a_comparison_is_of_the_prompts_that_both_scored(
    tmp_path_factory: pytest.TempPathFactory,
    a: list[tuple[int, float | None]],
    b: list[tuple[int, float | None]],
) -> None:
    folder = tmp_path_factory.mktemp("compare")

    def means(rewards: list[tuple[int, float | None]]) -> dict[int, float]:
        found: dict[int, list[float]] = defaultdict(list)
        for index, reward in rewards:
            if reward is not None:
                found[index].append(reward)
        return {index: statistics.mean(some) for index, some in found.items()}

    said, columns = compare(columns_of(folder / "a", a), columns_of(folder / "b", b))
    both = sorted(means(a).keys() & means(b).keys())
    assert columns["index_a"].tolist() == columns["index_b"].tolist() == both
    differences = [means(b)[index] - means(a)[index] for index in both]
    assert columns["difference"].tolist() == pytest.approx(differences)
    assert said["won"] + said["lost"] + said["tied"] == said["prompts"] == len(both)
    assert said["only_a"] == len({index for index, _ in a} - {index for index, _ in b})


def test_a_prompt_that_is_in_a_dataset_twice_is_one_prompt(tmp_path: Path) -> None:
    def run(name: str, rewards: list[float]) -> RunColumns:
        records = [rollout(index, 0, reward=reward) for index, reward in enumerate(rewards)]
        for one in records:
            one.prompt_key = f"{one.index // 2:032x}"  # 0, 0, 1
        columns = RunColumns([Run.open(write_run(tmp_path / name, records, n=1))])
        columns.refresh()
        return columns

    said, columns = compare(run("a", [0.0, 1.0, 0.0]), run("b", [1.0, 1.0, 1.0]))
    assert columns["mean_a"].tolist() == [0.5, 0.0] and columns["index_a"].tolist() == [0, 2]
    assert (said["prompts"], said["only_a"], said["only_b"], said["won"]) == (2, 0, 0, 2)


def test_groups_of_one_prompt_depend_on_each_other(tmp_path: Path) -> None:
    records = [rollout(index, 0, reward=float(index % 4 > 1)) for index in range(8)]
    for one in records:
        one.prompt_key = f"{one.index % 4:032x}"  # as a training in its second epoch
    run = write_run(tmp_path / "run", records, n=1)
    columns = RunColumns([Run.open(run)])
    columns.refresh()
    mean, interval = mean_interval(columns, group_figures(columns))
    (judged,) = read_runs([run])
    said = summarize(judged.samples).reward
    assert said is not None and interval is not None
    assert (mean, *interval) == pytest.approx((said.mean, said.low, said.high))


def test_rewards_that_failed_are_counted_by_their_cause(tmp_path: Path) -> None:
    failed = [rollout(at, 0, reward=None, reward_extra={"error": f"KeyError: {at}"}) for at in range(3)]
    others = [rollout(3, 0), rollout(4, 0, reward=None)]
    columns = RunColumns([Run.open(write_run(tmp_path / "run", failed + others, n=1))])
    columns.refresh()
    said = overview(columns, group_figures(columns), 0.5)
    assert said["reward_failures"] == {"KeyError: N": 3}


def test_two_at_a_time_are_never_more_in_flight(tmp_path: Path) -> None:
    records = [rollout(at, 0, metrics=Metrics(total_s=1.0)) for at in range(6)]
    for at, record in enumerate(records):
        record.finished_at = 1001.0 + at // 2
    columns = RunColumns([Run.open(write_run(tmp_path / "run", records, n=1))])
    columns.refresh()
    timeline = overview(columns, group_figures(columns), 0.5)["timeline"]
    assert max(timeline["in_flight"]) == 2 and sum(timeline["finished"]) == 6


@pytest.mark.parametrize("high", [1e308, 1.7976931348623157e308])
def test_rewards_may_be_as_far_apart_as_numbers_can_be(tmp_path: Path, high: float) -> None:
    columns = columns_of(tmp_path / "run", [(0, high), (0, -high), (1, 0.5)])
    said = overview(columns, group_figures(columns), 0.5)
    assert sum(said["histograms"]["reward"]["counts"]) == 3
    assert np.isfinite(said["histograms"]["reward"]["edges"]).all()
