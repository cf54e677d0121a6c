"""When a run is given up because nothing of it works."""

import pytest

from rollstream.rollout.executor import FailureStreak
from rollstream.trajectory import Failure


def hopeless_after(failures: list[tuple[int, str]], *, limit: int = 4, rows: int = 100) -> int | None:
    """How many failures, by prompt row and error, it takes."""
    streak = FailureStreak(limit, rows)
    for number, (index, error) in enumerate(failures, 1):
        if error == "done":
            streak.completed()
        elif streak.failed(Failure(index, 0, "k", 1, "agent", error, "", 0.0)):
            return number
    return None


@pytest.mark.parametrize(
    ("failures", "given", "expected"),
    [
        ([(row, "E: row") for row in range(20)], {}, 8),
        ([(row, f"E: {row} of 7") for row in range(20)], {"limit": 12}, 12),
        ([(row, "E: row") for row in range(20)], {"limit": 0}, None),
        ([(row, "E: row") for row in range(3) for _ in range(9)], {"rows": 3}, 19),
        ([(0, "E: one bad row")] * 50, {}, None),
        ([(row, f"E{'ab'[row % 2]}: row") for row in range(50)], {}, None),
        ([(0, "done"), *((row, "E: row") for row in range(50))], {}, None),
    ],
)
def test_a_run_is_hopeless_when_the_first_rollouts_all_fail_with_one_cause(
    failures: list[tuple[int, str]], given: dict[str, int], expected: int | None
) -> None:
    assert hopeless_after(failures, **given) == expected
