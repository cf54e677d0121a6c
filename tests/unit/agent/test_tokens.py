"""What is kept of an endpoint without token ids; test_conversation has R1."""

from rollstream.agent.tokens import TokenTrack
from rollstream.trajectory import Completion


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
