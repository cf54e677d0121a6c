"""Prometheus' text format, for every page of metrics.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]
"""Names and values of a sample's labels."""


class Histogram:
    """How many values lie at or below each bound.

    Args:
        bounds: ascending; what lies above the last one is counted, too.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Between each bound and the one before it; not cumulative."""
        self.total = 0.0

    def add(self, value: float) -> None:
        """Counts a value; one that is not finite counts as none."""
        if math.isfinite(value):
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value


class MetricsPage:
    """A page of metrics in the making.

    Args:
        prefix: of the names of all metrics.
    """

    def __init__(self, prefix: str = "rollstream_") -> None:
        self._prefix = prefix
        self._lines: list[str] = []

    def add(
        self,
        name: str,
        kind: Literal["counter", "gauge"],
        text: str,
        values: Mapping[Labels, float] | float,
    ) -> None:
        """Adds a metric; `values` by labels, or the one value of a metric without labels."""
        self._head(name, kind, text)
        if not isinstance(values, Mapping):
            values = {(): values}
        for labels, value in sorted(values.items()):
            self._lines.append(f"{self._prefix}{name}{_braced(labels)} {_number(value)}")

    def add_histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """Adds a histogram."""
        self._head(name, "histogram", text)
        below = 0
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            below += count
            self._lines.append(f'{self._prefix}{name}_bucket{{le="{_number(bound)}"}} {below}')
        self._lines.append(f"{self._prefix}{name}_sum {_number(histogram.total)}")
        self._lines.append(f"{self._prefix}{name}_count {below}")

    def text(self) -> str:
        """The page so far."""
        return "".join(f"{line}\n" for line in self._lines)

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP {self._prefix}{name} {text}", f"# TYPE {self._prefix}{name} {kind}"]


def _braced(labels: Labels) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)
    return f"{{{inside}}}" if inside else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value) if isinstance(value, int) or not value.is_integer() else repr(int(value))
