"""R1: ids, masks, log-probs and versions stay in step, whatever comes in."""

from hypothesis import given
from hypothesis import strategies as st

from rollstream.agent.tokens import TokenTrack
from rollstream.trajectory import Completion

ids = st.lists(st.integers(0, 500), max_size=8)


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=5),
    st.lists(st.tuples(st.booleans(), ids, st.integers(0, 2)), max_size=8),
    st.booleans(),
)
def test_track_keeps_sampled_ids_apart_from_given_ones(
    prompt: list[int], parts: list[tuple[bool, list[int], int]], logprobs: bool
) -> None:
    track = TokenTrack(prompt, logprobs=logprobs)
    expected: list[tuple[int, int, float]] = []
    versions: dict[int, int] = {}
    for sampled, part, version in parts:
        if sampled:
            values = [-0.1 * (i + 1) for i in range(len(part))]
            versions |= {len(expected) + i: version for i in range(len(part))}
            runs = [(0, version)] if part else []
            track.add_sampled(Completion(part, values if logprobs else None, "stop", runs))
            expected += [(i, 1, v) for i, v in zip(part, values, strict=True)]
        else:
            track.add_given(part)
            expected += [(i, 0, 0.0) for i in part]
    assert track.response_ids == [i for i, _, _ in expected]
    assert track.response_mask == [m for _, m, _ in expected]
    assert track.response_logprobs == ([v for _, _, v in expected] if logprobs else None)
    assert track.context == prompt + track.response_ids
    starts = [start for start, _ in track.policy_versions]
    assert starts == sorted(set(starts))
    for at, version in versions.items():
        assert [v for start, v in track.policy_versions if start <= at][-1] == version


def test_an_endpoints_count_is_kept_where_there_are_no_ids() -> None:
    track = TokenTrack([], logprobs=False)
    assert track.marks == {}
    track.add_sampled(Completion([], None, "stop", usage=(10, 500)))
    track.add_sampled(Completion([], None, "stop", usage=(540, 7)))  # a tool's result of 30 was between
    assert track.marks == {"usage": {"prompt_tokens": 10, "response_tokens": 537}}
    track.add_sampled(Completion([], None, "stop", usage=(60, 3)))  # asked without the thinking before
    assert track.usage == (10, 540)
    track.add_sampled(Completion([], None, "stop"))
    assert track.marks == {}
    exact = TokenTrack([1], logprobs=False)
    exact.add_sampled(Completion([2], None, "stop", usage=(1, 1)))
    assert exact.marks == {}
