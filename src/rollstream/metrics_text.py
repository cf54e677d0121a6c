"""Pages of metrics in Prometheus' text format, by prometheus_client."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def family(
    name: str, text: str, value: float | Mapping[tuple[str, ...], float], labels: Sequence[str] = ()
) -> Any:
    """A metric: a counter where its name ends in `_total`, else a gauge; `value`, or values by labels."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    made = kind(name.removesuffix("_total"), text, labels=labels)
    for key, number in value.items() if isinstance(value, Mapping) else [((), value)]:
        made.add_metric(key, number)
    return made


def metrics_page(families: Iterable[Any]) -> bytes:
    """The page of these metrics."""
    registry = CollectorRegistry()
    registry.register(_Collector(list(families)))
    return generate_latest(registry)


class _Collector:
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families
