"""Metrics of a run: sums that say the same as the values; what is not known is left out."""

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.base import EngineLoad
from rollstream.generation.metrics import MOST_NAMES, RunMetrics
from rollstream.store.records import RecordCodec
from rollstream.trajectory import Failure, Metrics, Rollout, Trajectory
from tests.unit.generation.test_progress import snapshot

NO_RATES = (0.0, 0.0)

finite = st.floats(-1e6, 1e6)


def rollout(lengths: list[int], reward: float | None = None, source: str = "sums", **more: Any) -> Rollout:
    trajectories = [
        Trajectory(
            prompt_ids=[1],
            response_ids=[2] * length,
            response_mask=[1] * length,
            response_logprobs=None,
            messages=[],
            finish_reason=more.get("finish_reason", "stop"),
            policy_versions=more.get("versions", [(0, 0)]),
            is_snapshot=at < len(lengths) - 1,
            reward=reward,
            metrics=Metrics(total_s=more.get("seconds", 1.0), tool_calls=2.0, tool_errors=1.0),
        )
        for at, length in enumerate(lengths)
    ]
    return Rollout(0, 0, "k", trajectories, source)


def failure(error: str) -> Failure:
    return Failure(0, 0, "k", 1, "agent", error, "", 0.0)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=3), st.none() | finite, st.booleans()),
        max_size=30,
    )
)
def test_encoded_rollouts_count_as_the_rollouts_they_were(given_ones: list[Any]) -> None:
    plain, encoded = RunMetrics(), RunMetrics()
    codec = RecordCodec()
    for lengths, reward, encode_first in given_ones:
        one = rollout(lengths, reward)
        plain.add(one)
        encoded.add(codec.encode(one) if encode_first else one)
    assert without_times(plain.page(None, None)) == without_times(encoded.page(None, None))
    assert sample(plain, "response_tokens_count") == sum(len(lengths) for lengths, _, _ in given_ones)
    assert plain.report(snapshot(), NO_RATES, None) == encoded.report(snapshot(), NO_RATES, None)


def without_times(page: bytes) -> list[bytes]:
    """prometheus_client says of histograms when they were made."""
    return [line for line in page.splitlines() if b"_created" not in line]


def sample(metrics: RunMetrics, name: str) -> float:
    lines = metrics.page(None, None).decode().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"rollstream_{name} "))


@given(st.lists(st.text(max_size=20), max_size=100))
def test_names_do_not_fill_the_memory(names: list[str]) -> None:
    metrics = RunMetrics()
    for name in names:
        metrics.add(rollout([1], 1.0, source=name))
        metrics.add_failure(failure(f"{name}: what happened"))
    told = metrics.report(snapshot(), NO_RATES, None)
    assert told["reward/scored"] if names else True
    assert len([name for name in told if re.fullmatch(r"(?s)reward/.*/mean", name)]) <= MOST_NAMES + 1
    for counted in (metrics.failures, {cause: count for cause, (count, _) in metrics.causes.items()}):
        assert len(counted) <= MOST_NAMES + 1
        assert sum(counted.values()) == len(names)


def test_what_is_known_is_told() -> None:
    metrics = RunMetrics()
    metrics.add(rollout([4], 1.0, versions=[(0, 2)], seconds=3.0))
    metrics.add(rollout([8], 0.0, source="other", finish_reason="length", versions=[(0, 1)], seconds=1.0))
    metrics.add_failure(failure("TimeoutError: 1 s"))
    told = metrics.report(
        snapshot(limit=32, cap=9, replicas=(3, 4), waiting=True, retries=5, reward_failed=6),
        (1.5, 20.0),
        EngineLoad(7, 2, 0.25, 1),
    )
    expected = {
        "progress/retries": 5,
        "progress/reward_failed": 6,
        "rate/rollouts_per_second": 1.5,
        "rate/tokens_per_second": 20.0,
        "tokens/sampled": 12,
        "tools/calls": 4,
        "tools/errors": 2,
        "queue/cap": 9,
        "reward/mean": 0.5,
        "reward/std": 0.5,
        "reward/scored": 2,
        "reward/mean_of_run": 0.25,
        "reward/sums/mean": 1.0,
        "reward/other/mean": 0.0,
        "response/length_mean": 6.0,
        "response/length_max": 8,
        "response/share_at_limit": 0.5,
        "rollout/seconds_mean": 2.0,
        "rollout/seconds_max": 3.0,
        "failures/TimeoutError": 1,
        "engine/waiting": 1,
        "engine/replicas_up": 3,
        "engine/replicas": 4,
        "engine/policy_version_min": 1,
        "engine/policy_version_max": 2,
        "engine/running": 7,
        "engine/queued": 2,
        "engine/kv_usage": 0.25,
        "engine/preemptions": 1,
    }
    assert told.items() >= expected.items()
    assert all(isinstance(value, int | float) for value in told.values())
    # The next window is empty; what is counted from the start stays.
    later = metrics.report(snapshot(mean_reward=None), (0.0, 0.0), None)
    assert not [name for name in later if name.startswith(("reward/", "response/"))]
    assert not later.keys() & {"engine/running", "engine/replicas_up"}
    assert (later["tokens/sampled"], later["failures/TimeoutError"]) == (12, 1)


def test_the_page_has_each_metric_once_with_its_type() -> None:
    metrics = RunMetrics()
    metrics.add(rollout([4], 1.0, seconds=3.0))
    metrics.add_failure(failure("TimeoutError: 1 s"))
    shown = snapshot(limit=32, replicas=(3, 4))
    page = metrics.page(shown, EngineLoad(7, 2, 0.25, 1)).decode()
    lines = page.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for line in lines:
        if not line.startswith("#"):
            name = re.match(r"[a-z_]+", line)[0]  # type: ignore[index]
            assert name.startswith("rollstream_")
            assert re.sub(r"_(bucket|sum|count|created)$", "", name) in types or name in types
    assert "rollstream_queue_cap 32.0" in lines
    assert 'rollstream_failures_total{error="TimeoutError"} 1.0' in lines
    assert 'rollstream_response_tokens_bucket{le="32.0"} 1.0' in lines
    assert 'rollstream_rollout_seconds_bucket{le="2.5"} 0.0' in lines
    assert 'rollstream_rollout_seconds_bucket{le="5.0"} 1.0' in lines
    assert "rollstream_engine_replicas_up 3.0" in lines
    assert RunMetrics().page(None, None).count(b"rollstream_rollouts_completed_total 0.0") == 1
