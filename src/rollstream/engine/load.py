"""How busy an engine is: asking it, reading what servers say, adding up replicas, counting requests."""

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import msgspec

from rollstream.engine.base import EngineLoad, ReportsLoad
from rollstream.errors import EngineOverloadedError

_LOG = logging.getLogger(__name__)

ASK_TIMEOUT_S = 2.0
"""A server that takes longer to say how busy it is has said nothing: that was of another moment."""

_NUMBER = re.compile(rb"\d{1,15}(\.\d*)?(e[+-]?\d{1,2})?", re.IGNORECASE)
"""A count or a share, as such pages write them. Not NaN, and nothing below 0."""

VLLM_METRICS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "queued",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:num_preemptions": "preemptions",  # as exported without the suffix of counters
}
"""Source: https://docs.vllm.ai/en/latest/usage/metrics.html. One sample for each data-parallel engine."""

SGLANG_METRICS = {
    "sglang:num_running_reqs": "running",
    "sglang:num_queue_reqs": "queued",
    "sglang:token_usage": "kv_usage",
    "sglang:num_retracted_requests_total": "preemptions",
}
"""Source: https://docs.sglang.io/references/production_metrics.html; there with `--enable-metrics`.
`sglang:num_retracted_reqs` is a gauge that is set back to 0: of no use here."""


async def ask_load(engine: object) -> EngineLoad | None:
    """The load of an engine; None when it does not say, in time or at all."""
    if not isinstance(engine, ReportsLoad):
        return None
    try:
        async with asyncio.timeout(ASK_TIMEOUT_S):
            load = await engine.load()
    except Exception as error:  # anybody's engine: what it cannot say must not end a run
        _LOG.debug("the engine does not say its load: %r", error)
        return None
    return load if isinstance(load, EngineLoad) and _is_sound(load) else None


def read_metrics(page: bytes, names: Mapping[str, str]) -> EngineLoad | None:
    """The load that a page in Prometheus' text format tells; None without requests running and queued.

    Requests and preemptions of several samples (data-parallel engines) are added up, of the cache's usage the
    highest counts.

    Args:
        page: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
        names: what metrics mean: `running`, `queued`, `kv_usage`, `preemptions`.
    """
    found: dict[str, list[float]] = {}
    for name, meaning in names.items():
        if meaning in found:  # an old name and its successor may both be there
            continue
        # Searched, not parsed: a page has a thousand lines, and is asked for every other second.
        samples = re.findall(rb"^%s(?:\{.*\})?[ \t]+(\d\S*)" % re.escape(name.encode()), page, re.MULTILINE)
        if values := [float(sample) for sample in samples if _NUMBER.fullmatch(sample)]:
            found[meaning] = values
    if "running" not in found or "queued" not in found:
        return None
    return EngineLoad(
        running=round(sum(found["running"])),
        queued=round(sum(found["queued"])),
        kv_usage=min(1.0, max(found["kv_usage"])) if "kv_usage" in found else None,
        preemptions=round(sum(found["preemptions"])) if "preemptions" in found else None,
    )


class _Rank(msgspec.Struct):
    num_waiting_reqs: int
    num_running_reqs: int | None = None
    """Of `/v1/loads`; of `/get_load` there is `num_reqs`, which counts those that wait as well."""
    num_reqs: int = 0
    token_usage: float | None = None


class _Loads(msgspec.Struct):
    loads: list[_Rank]


_LOADS: msgspec.json.Decoder[_Loads | list[_Rank]] = msgspec.json.Decoder(_Loads | list[_Rank])


def read_sglang_loads(body: bytes) -> EngineLoad | None:
    """The load by SGLang's `/v1/loads`, or its predecessor `/get_load`; None for anything else.

    Both have an entry for each data-parallel rank.
    """
    try:
        answer = _LOADS.decode(body)
    except msgspec.DecodeError:
        return None
    ranks = answer.loads if isinstance(answer, _Loads) else answer
    queued = sum(rank.num_waiting_reqs for rank in ranks)
    running = sum(
        rank.num_reqs - rank.num_waiting_reqs if rank.num_running_reqs is None else rank.num_running_reqs
        for rank in ranks
    )
    usage = [rank.token_usage for rank in ranks if rank.token_usage is not None]
    load = EngineLoad(max(0, running), queued, max(usage, default=None))
    return load if ranks and _is_sound(load) else None


class LoadSum:
    """Adds up the loads of replicas that come, go and start anew, so that preemptions only ever rise."""

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}
        self._preemptions = 0

    def add(self, loads: Iterable[tuple[str, EngineLoad | None]]) -> EngineLoad | None:
        """The load of those that say theirs; None when nobody does.

        The cache's usage is the mean: new requests go where there is room.
        """
        known = {name: load for name, load in loads if load is not None}
        if not known:
            return None
        counts = {name: load.preemptions for name, load in known.items() if load.preemptions is not None}
        for name, count in counts.items():
            # Of a replica seen for the first time, what was before does not count; one that was restarted
            # counts from 0.
            before = self._seen.get(name, count)
            self._preemptions += count - before if count >= before else count
        self._seen |= counts
        usage = [load.kv_usage for load in known.values() if load.kv_usage is not None]
        return EngineLoad(
            running=sum(load.running for load in known.values()),
            queued=sum(load.queued for load in known.values()),
            kv_usage=sum(usage) / len(usage) if usage else None,
            preemptions=self._preemptions if counts else None,
        )


@dataclass(slots=True)
class Counts:
    """Counts an engine's requests, and the rollouts that make them. Numbers only ever rise."""

    finished: int = 0
    """Requests that the engine answered."""
    tokens: int = 0
    """Sampled in them."""
    seconds: float = 0.0
    """Sum of their durations."""
    call_seconds: float = 0.0
    """Requests in flight, integrated over time."""
    overloads: int = 0
    """Requests that the engine refused for want of room."""
    cut_off: int = 0
    """Requests that were cancelled."""
    retries: int = 0
    """Attempts that failed and were followed by another."""
    unavailable: int = 0
    """Attempts cut off because the engine went away; charged to no rollout."""
    reward_errors: int = 0
    """Rollouts that completed but could not be scored."""
    timeouts: int = 0
    """Attempts cut off by their time limit."""

    def add(self, other: "Counts") -> None:
        """Adds those of another worker."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


_Answer = TypeVar("_Answer", bound=Any)
"""Has `token_ids`: a `Completion`, or verl's output."""


class RequestMeter:
    """Counts the requests that go through an engine."""

    def __init__(self) -> None:
        self.calls = 0
        """Requests at the engine now."""
        self._counts = Counts()
        self._counted_at = time.monotonic()

    @property
    def counts(self) -> Counts:
        """Always the same object; a worker that uses the engine counts there, too."""
        self._count(0)
        return self._counts

    async def counted(self, request: Awaitable[_Answer]) -> _Answer:
        """Awaits a request, and counts it."""
        started = self._count(1)
        try:
            answer = await request
        except EngineOverloadedError:
            self._counts.overloads += 1
            raise
        except asyncio.CancelledError:
            self._counts.cut_off += 1
            raise
        finally:
            ended = self._count(-1)
        self._counts.finished += 1
        self._counts.tokens += len(answer.token_ids)
        self._counts.seconds += ended - started
        return answer

    def _count(self, change: int) -> float:
        now = time.monotonic()
        self._counts.call_seconds += self.calls * (now - self._counted_at)
        self._counted_at = now
        self.calls += change
        return now


def _is_sound(load: EngineLoad) -> bool:
    counts = (load.running, load.queued, load.preemptions or 0)
    return all(count >= 0 for count in counts) and (load.kv_usage is None or 0.0 <= load.kv_usage <= 1.0)
