"""What a trajectory says of itself."""

import pytest

from rollstream.trajectory import Trajectory


@pytest.mark.parametrize(
    ("mask", "generations"),
    [
        ([], []),
        ([0, 0], []),
        ([1, 1, 1], [([7, 8], [1, 2, 3])]),
        ([1, 0, 0, 1, 1, 0], [([7, 8], [1]), ([7, 8, 1, 2, 3], [4, 5])]),
    ],
)
def test_generations_are_what_the_model_saw_and_answered(
    mask: list[int], generations: list[tuple[list[int], list[int]]]
) -> None:
    ids = list(range(1, len(mask) + 1))
    trajectory = Trajectory([7, 8], ids, mask, None, [], "stop")
    assert list(trajectory.generations()) == generations
