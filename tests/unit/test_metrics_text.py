"""Pages of metrics read back as what they were made of."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from rollstream.metrics_text import family, metrics_page


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.one_of(st.integers(-(10**12), 10**12), st.floats(allow_nan=False)),
        max_size=4,
    )
)
def test_values_by_labels_read_back(values: dict[str, float]) -> None:
    errors = family("x_errors_total", "By kind", {(kind,): n for kind, n in values.items()}, ["kind"])
    page = metrics_page([errors, family("x_size", "Alone", 3)]).decode()
    counter, gauge = text_string_to_metric_families(page)
    assert (counter.name, counter.type, gauge.type) == ("x_errors", "counter", "gauge")
    assert {sample.labels["kind"]: sample.value for sample in counter.samples} == values
    assert [sample.value for sample in gauge.samples] == [3.0]
