"""What `/metrics` says."""

from collections import Counter

from rollstream.engine.base import EngineLoad
from rollstream.metrics_text import family, metrics_page
from rollstream.serving.service import EngineService

_AS_OTHERS_SAY = {
    "running": ("sglang:num_running_reqs", "vllm:num_requests_running"),
    "queued": ("sglang:num_queue_reqs", "vllm:num_requests_waiting"),
    "kv_usage": ("sglang:token_usage", "vllm:kv_cache_usage_perc"),
    "preemptions": ("sglang:num_retracted_requests_total", "vllm:num_preemptions_total"),
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


def metrics_text(service: EngineService, counts: RequestCounts, load: EngineLoad | None) -> bytes:
    """The page. What the engine does not say, `load` or a part of it, is not there."""
    finished: dict[tuple[str, ...], float] = {
        (reason,): number for reason, number in service.finished.items()
    }
    answered: dict[tuple[str, ...], float] = {
        (route, str(status)): number for (route, status), number in counts.answered.items()
    }
    families = [
        family("rollstream_samples_running", "Samples that the engine has, queued or not", service.running),
        family("rollstream_samples_waiting", "Samples held back by a pause or an outage", service.waiting),
        family("rollstream_paused", "1 during a pause", int(service.paused)),
        family("rollstream_weight_version", "Version of the weights", service.weight_version),
        family("rollstream_samples_total", "Samples by finish reason", finished, ["finish_reason"]),
        family("rollstream_prompt_tokens_total", "Tokens of finished prompts", service.prompt_tokens),
        family("rollstream_generated_tokens_total", "Tokens sampled", service.generated_tokens),
        family("rollstream_http_requests_total", "Requests answered", answered, ["route", "status"]),
    ]
    for part, names in _AS_OTHERS_SAY.items():
        value = getattr(load, part, None)
        if value is not None:
            value += service.waiting if part == "queued" else 0
            families += [family(name, part, value) for name in names]
    return metrics_page(families)
