"""What `/metrics` says, in Prometheus' text format.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (version 0.0.4).
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

from rollstream.buffer.known_writes import KnownWrites

MEDIA_TYPE = b"text/plain; version=0.0.4; charset=utf-8"

_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Seconds: from one sync of a fast disk to a read that waits."""


class Histogram:
    """Counts of durations."""

    def __init__(self) -> None:
        self.counts = [0] * (len(_BOUNDS) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.sum += seconds

    def lines(self, name: str, labels: str = "") -> list[str]:
        """As Prometheus has them: cumulative."""
        total, lines = 0, []
        for bound, count in zip((*_BOUNDS, "+Inf"), self.counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{{labels}{"," if labels else ""}le="{bound}"}} {total}')
        braced = f"{{{labels}}}" if labels else ""
        return [*lines, f"{name}_sum{braced} {self.sum:.6f}", f"{name}_count{braced} {total}"]


class RequestMetrics:
    """What the HTTP side counts itself; the rest is the ledger's."""

    def __init__(self) -> None:
        self.answered: Counter[tuple[str, int]] = Counter()
        """By route and status."""
        self.writes = Histogram()
        """From the request's head to the answer, of every write that was stored."""
        self.reads = Histogram()
        """From the request's head to the last byte, of reads that gave something; with their waiting."""
        self.known = KnownWrites()
        """Items that were not stored, since their uid was known."""
        self.empty_reads = 0
        """Reads that gave nothing."""
        self.bytes_in = 0
        """Of the bodies of writes."""
        self.bytes_out = 0
        """Of the bodies of reads."""
        self.held_writes = 0
        """Writes that wait for room right now."""
        self.waiting_reads = 0
        """Reads that wait for data right now."""


class Page:
    """The lines of the page."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    def add(self, name: str, kind: str, text: str, values: "Mapping[str, float] | float") -> None:
        """One metric; `values` by label set (`reason="stale"`), or the one value if it has none."""
        self._head(name, kind, text)
        if not isinstance(values, Mapping):
            values = {"": values}
        for labels, value in sorted(values.items()):
            self._lines.append(f"rollstream_buffer_{name}{f'{{{labels}}}' if labels else ''} {value}")

    def add_histogram(self, name: str, text: str, histogram: Histogram) -> None:
        """One histogram of seconds."""
        self._head(name, "histogram", text)
        self._lines += histogram.lines(f"rollstream_buffer_{name}")

    def _head(self, name: str, kind: str, text: str) -> None:
        self._lines += [f"# HELP rollstream_buffer_{name} {text}", f"# TYPE rollstream_buffer_{name} {kind}"]

    def text(self) -> bytes:
        """The page."""
        return ("\n".join(self._lines) + "\n").encode()


def label(name: str, value: str) -> str:
    """`name="value"`, escaped."""
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'{name}="{escaped}"'
