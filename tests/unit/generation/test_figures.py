"""Figures and metrics pages: what is known is there, what is not is left out."""

import asyncio
import re

import aiohttp
import pytest

from rollstream.engine.base import EngineLoad
from rollstream.errors import ConfigError
from rollstream.generation.figures import run_figures
from rollstream.generation.metrics import MetricsServer, metrics_page
from rollstream.generation.statistics import Statistics
from tests.unit.generation.test_progress import snapshot
from tests.unit.generation.test_statistics import failure, rollout


def test_what_nobody_knows_is_left_out() -> None:
    statistics = Statistics()
    figures = run_figures(snapshot(mean_reward=None), (0.0, 0.0), statistics, statistics.take_window(), None)
    assert not [name for name in figures if name.startswith(("reward/", "response/", "failures/"))]
    assert not figures.keys() & {"engine/running", "engine/replicas_up", "engine/policy_version_min"}
    assert (figures["progress/done"], figures["queue/in_flight"], figures["engine/waiting"]) == (40, 8, 0)


def test_what_is_known_is_told() -> None:
    statistics = Statistics()
    statistics.add(rollout([4], 1.0, versions=[(0, 2)], seconds=3.0))
    statistics.add(rollout([8], 0.0, source="other", finish_reason="length", versions=[(0, 1)], seconds=1.0))
    statistics.add_failure(failure("TimeoutError: 1 s"))
    told = run_figures(
        snapshot(limit=32, cap=9, replicas=(3, 4), waiting=True, retries=5, unscored=6),
        (1.5, 20.0),
        statistics,
        statistics.take_window(),
        EngineLoad(7, 2, 0.25, 1),
    )
    expected = {
        "progress/retries": 5,
        "progress/unscored": 6,
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
    later = run_figures(snapshot(), (0.0, 0.0), statistics, statistics.take_window(), None)
    assert "reward/mean" not in later
    assert (later["tokens/sampled"], later["failures/TimeoutError"]) == (12, 1)


def test_the_page_has_each_metric_once_with_its_type() -> None:
    statistics = Statistics()
    statistics.add(rollout([4], 1.0, seconds=3.0))
    statistics.add_failure(failure("TimeoutError: 1 s"))
    shown = snapshot(limit=32, replicas=(3, 4))
    page = metrics_page(shown, statistics, EngineLoad(7, 2, 0.25, 1))
    lines = page.splitlines()
    types = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types))
    for line in lines:
        if not line.startswith("#"):
            name = re.match(r"[a-z_]+", line)[0]  # type: ignore[index]
            assert name.startswith("rollstream_")
            assert re.sub(r"_(bucket|sum|count)$", "", name) in types or name in types
    assert "rollstream_rollouts_in_flight_cap 32" in lines
    assert 'rollstream_rollout_failures_total{error="TimeoutError"} 1' in lines
    assert 'rollstream_response_tokens_bucket{le="32"} 1' in lines
    assert 'rollstream_rollout_seconds_bucket{le="2.5"} 0' in lines
    assert 'rollstream_rollout_seconds_bucket{le="5"} 1' in lines
    assert "rollstream_engine_replicas_up 3" in lines
    assert metrics_page(None, Statistics(), None).count("rollstream_rollouts_completed_total 0") == 1


async def test_the_server_answers_many_and_a_client_that_dawdles_blocks_nobody() -> None:
    server = MetricsServer(0, lambda: "rollstream_x 1\n")
    url = await server.start()
    port = int(url.split(":")[2].split("/")[0])
    _, dawdler = await asyncio.open_connection("127.0.0.1", port)
    dawdler.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n")  # and never the end of it
    async with aiohttp.ClientSession() as client:

        async def scrape() -> str:
            async with client.get(url) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return await answer.text()

        assert await asyncio.gather(*(scrape() for _ in range(20))) == ["rollstream_x 1\n"] * 20
    with pytest.raises(ConfigError, match=rf"generation.metrics_port={port}: cannot listen"):
        await MetricsServer(port, str).start()
    async with asyncio.timeout(15):
        await server.close()
    dawdler.close()


async def test_a_port_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="metrics_port=70000"):
        await MetricsServer(70000, str).start()
