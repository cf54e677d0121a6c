"""Pages of metrics: what Prometheus' own rules for the text format ask."""

import math
import re

from hypothesis import given
from hypothesis import strategies as st

from rollstream.metrics_text import Histogram, MetricsPage

SAMPLE = re.compile(r'[a-z_]+(\{[a-z_]+="(?:[^"\\\n]|\\[\\n"])*"(,[a-z_]+="(?:[^"\\\n]|\\[\\n"])*")*\})? \S+')


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False)),
        max_size=4,
    )
)
def test_every_line_is_a_comment_or_a_sample_that_reads_back(values: dict[str, float]) -> None:
    page = MetricsPage("x_")
    page.add("errors_total", "counter", "By kind.", {(("kind", kind),): n for kind, n in values.items()})
    lines = page.text().split("\n")
    assert lines[-1] == ""
    assert lines[:2] == ["# HELP x_errors_total By kind.", "# TYPE x_errors_total counter"]
    samples = lines[2:-1]
    assert len(samples) == len(values)
    found = {}
    for line in samples:
        assert SAMPLE.fullmatch(line), line
        label = line[line.index('"') + 1 : line.rindex('"')]
        kind = re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], label)
        found[kind] = float(line.rsplit(" ", 1)[1].replace("Inf", "inf"))
    assert found == {kind: float(value) for kind, value in values.items()}


@given(st.lists(st.one_of(st.floats(), st.sampled_from([1.0, 2.0, 5.0]))))
def test_a_histogram_is_cumulative_and_counts_each_finite_value_once(values: list[float]) -> None:
    histogram = Histogram((1.0, 2.0, 5.0))
    for value in values:
        histogram.add(value)
    page = MetricsPage("")
    page.add_histogram("h", "x", histogram)
    lines = page.text().splitlines()[2:]
    finite = [value for value in values if math.isfinite(value)]
    for line, bound in zip(lines, (1, 2, 5, math.inf), strict=False):
        label = "+Inf" if bound == math.inf else str(bound)
        assert line == f'h_bucket{{le="{label}"}} {sum(value <= bound for value in finite)}'
    assert lines[-1] == f"h_count {len(finite)}"
