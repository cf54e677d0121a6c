"""A run's metrics for Prometheus, served on this machine while the run goes on."""

from collections.abc import Callable

from aiohttp import web

from rollstream.engine.base import EngineLoad
from rollstream.errors import ConfigError
from rollstream.generation.progress import Snapshot
from rollstream.generation.statistics import Statistics
from rollstream.metrics_text import CONTENT_TYPE, MetricsPage

_LAST_ANSWERS_S = 1.0
"""For scrapes to get their answers when the run ends."""


def metrics_page(snapshot: Snapshot | None, statistics: Statistics, load: EngineLoad | None) -> str:
    """The page. What is not known yet, or what the engine does not tell, is not there.

    Args:
        snapshot: of the run's progress; None before the first rollout.
        statistics: of this process.
        load: of the engine.
    """
    page = MetricsPage()
    if snapshot is not None:
        _add_progress(page, snapshot)
    page.add(
        "rollouts_completed_total",
        "counter",
        "Rollouts of this process that are durable.",
        statistics.completed,
    )
    page.add("rollouts_scored_total", "counter", "Those of them that have a reward.", statistics.scored)
    page.add("rewards_sum", "gauge", "Sum of their rewards.", statistics.reward_sum)
    page.add(
        "rollout_failures_total",
        "counter",
        "Rollouts of this process that failed, by the class of the error.",
        {(("error", kind),): count for kind, count in statistics.failures.items()},
    )
    page.add("sampled_tokens_total", "counter", "Tokens sampled.", statistics.tokens)
    page.add("tool_calls_total", "counter", "Calls of tools.", statistics.tool_calls)
    page.add("tool_errors_total", "counter", "Calls of tools that failed.", statistics.tool_errors)
    page.add(
        "responses_at_limit_total", "counter", "Responses cut off by the length limit.", statistics.at_limit
    )
    page.add_histogram("response_tokens", "Length of responses, in tokens.", statistics.lengths)
    page.add_histogram(
        "rollout_seconds", "Seconds from a rollout's dispatch until it is scored.", statistics.seconds
    )
    if statistics.versions is not None:
        low, high = statistics.versions
        page.add("policy_version_min", "gauge", "Lowest policy version of any token.", low)
        page.add("policy_version_max", "gauge", "Highest policy version of any token.", high)
    if load is not None:
        page.add("engine_requests_running", "gauge", "Requests that the engine works on.", load.running)
        page.add("engine_requests_queued", "gauge", "Requests that wait in the engine.", load.queued)
        if load.kv_usage is not None:
            page.add("engine_kv_usage_ratio", "gauge", "Share of the KV cache that is taken.", load.kv_usage)
        if load.preemptions is not None:
            page.add("engine_preemptions_total", "counter", "Requests preempted.", load.preemptions)
    return page.text()


def _add_progress(page: MetricsPage, snapshot: Snapshot) -> None:
    for name, text, value in (
        ("rollouts", "Rollouts of the whole run.", snapshot.total),
        ("rollouts_done", "Rollouts that are durable, earlier processes included.", snapshot.done),
        ("rollouts_failed", "Rollouts recorded as failed, earlier processes included.", snapshot.failed),
        ("rollouts_in_flight", "Rollouts being executed.", snapshot.in_flight),
        ("pending_rows", "Durable trajectories that are in no batch yet.", snapshot.pending_rows),
        ("saved_batches", "Sealed batches.", snapshot.saved_batches),
        ("engine_waiting", "1 while work waits for an engine that is away.", int(snapshot.waiting)),
    ):
        page.add(name, "gauge", text, value)
    page.add(
        "retries_total", "counter", "Attempts that failed and were followed by another.", snapshot.retries
    )
    page.add("unscored_total", "counter", "Rollouts that could not be scored.", snapshot.unscored)
    if snapshot.limit is not None:
        cap = snapshot.limit if snapshot.cap is None else snapshot.cap
        page.add("rollouts_in_flight_cap", "gauge", "Rollouts in flight at most, now.", cap)
    if snapshot.replicas is not None:
        up, all_of_them = snapshot.replicas
        page.add("engine_replicas_up", "gauge", "Replicas that take requests.", up)
        page.add("engine_replicas", "gauge", "Replicas.", all_of_them)


class MetricsServer:
    """Answers `GET /metrics` on 127.0.0.1.

    Args:
        port: 0 takes a free one.
        page: what is answered; takes microseconds, and is made in the run's own event loop.
    """

    def __init__(self, port: int, page: Callable[[], str]) -> None:
        self._port = port
        self._page = page
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Begins to listen; returns the URL. Raises `ConfigError` when the port cannot be used."""
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=_LAST_ANSWERS_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", self._port).start()
        except (OSError, OverflowError) as error:
            await runner.cleanup()
            raise ConfigError(
                f"generation.metrics_port={self._port}: cannot listen on 127.0.0.1 there: {error}"
            ) from error
        self._runner = runner
        return f"http://127.0.0.1:{runner.addresses[0][1]}/metrics"

    async def close(self) -> None:
        """Ends. May be called twice."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(body=self._page().encode(), headers={"Content-Type": CONTENT_TYPE})
