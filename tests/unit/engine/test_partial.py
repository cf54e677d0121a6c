"""Pieces add up to what one engine would have said in one go."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.engine.partial import PartialCompletion
from rollstream.trajectory import Completion, SamplingParams

PROMPT = [7, 8, 9]


@st.composite
def pieces(draw: st.DrawFn) -> list[tuple[int, list[tuple[int, int]]]]:
    """Lengths of pieces, and the versions in each: runs that begin at 0 and go up."""
    made = []
    for _ in range(draw(st.integers(1, 6))):
        length = draw(st.integers(0, 8))
        starts = sorted({0, *draw(st.lists(st.integers(1, max(1, length)), max_size=3))})
        made.append((length, [(start, draw(st.integers(0, 3))) for start in starts]))
    return made


def version_at(runs: list[tuple[int, int]], index: int) -> int:
    return next(version for start, version in reversed(runs) if start <= index)


@given(pieces(), st.booleans(), st.one_of(st.none(), st.integers(0, 2**31 - 1)))
def test_pieces_add_up(
    made: list[tuple[int, list[tuple[int, int]]]], logprobs: bool, seed: int | None
) -> None:
    total = sum(length for length, _ in made)
    sampling = SamplingParams(total + 5, logprobs=logprobs, seed=seed, temperature=0.7)
    partial = PartialCompletion(PROMPT, sampling)
    ids: list[int] = []
    versions: list[int] = []
    seeds = set()
    for length, runs in made:
        assert partial.prompt_ids == PROMPT + ids
        how = partial.sampling
        assert how == replace(sampling, max_tokens=total + 5 - len(ids), seed=how.seed)
        assert how.seed is None if seed is None else 0 <= (how.seed or 0) < 2**31
        seeds.add((len(ids), how.seed))
        assert not partial.is_full
        new = [len(ids) + i for i in range(length)]
        partial.add(Completion(new, [-float(i) for i in new] if logprobs else None, "abort", runs))
        ids += new
        versions += [version_at(runs, i) for i in range(length)]
        assert len(partial) == len(ids)
    whole = partial.result("abort")
    assert whole.token_ids == ids == list(range(total))
    assert whole.logprobs == ([-float(i) for i in ids] if logprobs else None)
    runs = whole.policy_versions
    assert [version_at(runs, i) for i in range(total)] == versions
    # Run-length encoded: from 0, going up, no two the same, none without a token.
    assert runs[0][0] == 0
    assert all(one[0] < two[0] and one[1] != two[1] for one, two in itertools.pairwise(runs))
    assert runs[-1][0] < max(1, total)
    if seed is not None:  # the same place always has the same seed, and each place another one
        assert len({how for _, how in seeds}) == len({at for at, _ in seeds})
    partial.clear()
    assert (len(partial), partial.prompt_ids, partial.sampling) == (0, PROMPT, sampling)


def test_the_last_piece_says_how_it_ended() -> None:
    sampling = SamplingParams(10)
    partial = PartialCompletion(PROMPT, sampling)
    only = Completion([1], [-1.0], "stop", [(0, 3)], cached_prompt_tokens=2)
    assert partial.finish(only) is only
    partial.add(Completion([], [], "abort"))
    partial.add(Completion([1, 2], [-1.0, -2.0], "abort", [(0, 3)], cached_prompt_tokens=2))
    whole = partial.finish(Completion([3], [-3.0], "stop", [(0, 4)], cached_prompt_tokens=5))
    assert (whole.token_ids, whole.finish_reason, whole.policy_versions) == (
        [1, 2, 3],
        "stop",
        [(0, 3), (2, 4)],
    )
    assert (
        whole.cached_prompt_tokens == 0
    )  # of the first piece: the later ones' cover the request's own tokens


def test_what_cannot_go_on_says_so() -> None:
    partial = PartialCompletion(PROMPT, SamplingParams(10, stop=("end",)))
    assert partial.can_go_on
    partial.add(Completion([1], [-1.0], "abort"))
    assert not partial.can_go_on
    partial.clear()
    assert partial.can_go_on
    full = PartialCompletion(PROMPT, SamplingParams(1))
    full.add(Completion([1], [-1.0], "abort"))
    assert full.is_full


def test_tokens_without_their_logprobs_are_refused() -> None:
    partial = PartialCompletion(PROMPT, SamplingParams(10))
    with pytest.raises(ValueError, match="2 sampled ids came with 1 log-probs"):
        partial.add(Completion([1, 2], [-1.0], "abort"))
    assert len(partial) == 0


def test_what_counts_tokens_of_a_request_is_not_continued() -> None:
    for extra, goes_on in (({}, True), ({"min_p": 0.1}, True), ({"presence_penalty": 0.5}, False)):
        partial = PartialCompletion(PROMPT, SamplingParams(9, logprobs=False, extra=extra))
        assert partial.can_go_on
        partial.add(Completion([1], None, "abort"))
        assert partial.can_go_on == goes_on
