"""What `/metrics` says, in Prometheus' text format.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

from collections import Counter

from rollstream.engine.base import EngineLoad
from rollstream.metrics_text import MetricsPage
from rollstream.serving.service import EngineService

_AS_OTHERS_SAY = {
    "running": ("gauge", ("sglang:num_running_reqs", "vllm:num_requests_running")),
    "queued": ("gauge", ("sglang:num_queue_reqs", "vllm:num_requests_waiting")),
    "kv_usage": ("gauge", ("sglang:token_usage", "vllm:kv_cache_usage_perc")),
    "preemptions": ("counter", ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total")),
}
"""What clients of those servers read, see `engine.load`."""


class RequestCounts:
    """HTTP requests, by route and status."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()

    @property
    def total(self) -> int:
        """Of all routes."""
        return self.answered.total()


def metrics_text(service: EngineService, counts: RequestCounts, load: EngineLoad | None) -> str:
    """The page. What the engine does not say, `load` or a part of it, is not there."""
    page = MetricsPage()
    page.add("samples_running", "gauge", "Samples that the engine has, queued by it or not.", service.running)
    page.add(
        "samples_waiting",
        "gauge",
        "Samples held back by a pause or an engine that is coming back.",
        service.waiting,
    )
    page.add("paused", "gauge", "1 during a pause.", int(service.paused))
    page.add("weight_version", "gauge", "Version of the weights.", service.weight_version)
    page.add(
        "samples_total",
        "counter",
        "Samples that ended, by finish reason.",
        {(("finish_reason", reason),): number for reason, number in service.finished.items()},
    )
    page.add("prompt_tokens_total", "counter", "Prompt tokens of samples that ended.", service.prompt_tokens)
    page.add("generated_tokens_total", "counter", "Tokens sampled.", service.generated_tokens)
    page.add(
        "http_requests_total",
        "counter",
        "Answered HTTP requests, by route and status.",
        {
            (("route", route), ("status", str(status))): number
            for (route, status), number in counts.answered.items()
        },
    )
    lines: list[str] = []
    for field, (kind, names) in _AS_OTHERS_SAY.items():
        value = getattr(load, field, None)
        if value is None:
            continue
        if field == "queued":
            value += service.waiting
        for name in names:
            lines += [f"# TYPE {name} {kind}", f"{name} {value}"]
    return page.text() + "".join(f"{line}\n" for line in lines)
