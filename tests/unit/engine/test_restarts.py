"""When a replica is started again."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.restarts import Restarts

lives = st.lists(st.none() | st.floats(0, 100), max_size=40)
"""How long each life served; None: it never became healthy."""


@given(lives, st.floats(0.01, 5), st.floats(0.01, 60), st.integers(0, 6))
def test_pauses_are_bounded_and_it_is_given_up_after_failures_in_a_row_only(
    served: list[float | None], first: float, longest: float, most: int
) -> None:
    restarts = Restarts(first=first, longest=longest, most_failures=most)
    in_a_row = 0
    for life in served:
        if life is None:
            in_a_row += 1
            pause = restarts.after_failed_start()
            assert (pause is None) == (in_a_row > most)
            if pause is None:
                return
        else:
            in_a_row = 0
            pause = restarts.after_serving(life)
            if life >= 10:
                assert pause == first
        assert first <= pause <= max(first, longest)


def test_pauses_double_until_it_serves_well() -> None:
    restarts = Restarts(first=0.5, longest=3, most_failures=9)
    pauses = [restarts.after_serving(0.1), restarts.after_failed_start(), restarts.after_serving(2)]
    assert pauses == [0.5, 1.0, 2.0]
    assert [restarts.after_failed_start() for _ in range(2)] == [3, 3]
    assert restarts.after_serving(60) == 0.5
    assert restarts.failures == 0
