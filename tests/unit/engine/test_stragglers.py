"""Which requests move: a pure decision, held to what it promises for any pool."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.engine.stragglers import (
    FASTER,
    LEAST_GAIN_S,
    MOST_MOVES,
    Move,
    ReplicaLoad,
    Running,
    choose_moves,
    has_slower,
)

NAMES = ["a", "b", "c", "d"]
SLOW, FAST = ReplicaLoad(4, 50.0, 4.0), ReplicaLoad(0, 150.0, 8.0)


def running(request_id: str = "r", replica: str = "slow", **changes: object) -> Running:
    one = Running(request_id, replica, seconds=10.0, prompt_tokens=500, max_tokens=4000, moves=0)
    return replace(one, **changes)


@st.composite
def pools(draw: st.DrawFn) -> tuple[dict[str, ReplicaLoad], list[Running]]:
    lanes = {
        name: ReplicaLoad(draw(st.integers(0, 20)), draw(st.floats(1, 500)), draw(st.floats(0, 20)))
        for name in draw(st.sets(st.sampled_from(NAMES), min_size=1))
    }
    requests = [
        Running(
            f"r{number}",
            draw(st.sampled_from(NAMES)),
            draw(st.floats(0, 500)),
            draw(st.integers(1, 20_000)),
            draw(st.integers(1, 20_000)),
            draw(st.integers(0, 3)),
        )
        for number in range(draw(st.integers(0, 30)))
    ]
    return lanes, requests


@given(pools())
@settings(max_examples=300, deadline=None)
def test_every_move_is_to_an_idle_and_faster_replica(
    pool: tuple[dict[str, ReplicaLoad], list[Running]],
) -> None:
    lanes, requests = pool
    moves = choose_moves(lanes, requests)
    by_id = {one.request_id: one for one in requests}
    assert len({move.request_id for move in moves}) == len(moves)
    for move in moves:
        one = by_id[move.request_id]
        assert one.moves < MOST_MOVES
        assert lanes[move.to].speed >= FASTER * lanes[one.replica].speed
    for name, lane in lanes.items():
        taken = sum(move.to == name for move in moves)
        assert taken <= lane.spare
        assert taken == 0 or lane.in_flight + taken <= max(1, lane.typical_in_flight / 2)
    if any(lanes[by_id[move.request_id].replica].in_flight for move in moves):
        assert has_slower(lanes)  # the cheap question first


@given(pools())
@settings(max_examples=300, deadline=None)
def test_none_goes_back(pool: tuple[dict[str, ReplicaLoad], list[Running]]) -> None:
    """With the speeds as they are, whatever is idle and however long it takes."""
    lanes, requests = pool
    for move in choose_moves(lanes, requests):
        before = next(one for one in requests if one.request_id == move.request_id)
        for seconds in (0.0, before.seconds, 10 * before.seconds):
            moved = replace(before, replica=move.to, seconds=seconds, moves=0)
            idle = {name: replace(lane, in_flight=0) for name, lane in lanes.items()}
            assert all(again.to != before.replica for again in choose_moves(idle, [moved]))


@given(pools())
@settings(max_examples=200, deadline=None)
def test_no_move_only_to_read_the_prompt_again(pool: tuple[dict[str, ReplicaLoad], list[Running]]) -> None:
    """What a move saves is more than reading all of the prompt once more, by an estimate that is not rosy."""
    lanes, requests = pool
    by_id = {one.request_id: one for one in requests}
    for move in choose_moves(lanes, requests):
        one = by_id[move.request_id]
        here, there = lanes[one.replica].speed, lanes[move.to].speed
        left = one.max_tokens - min(one.seconds * here, one.max_tokens)
        assert left / here - left / there - one.prompt_tokens / (20 * there) >= LEAST_GAIN_S - 1e-6


def test_a_straggler_moves_when_a_faster_replica_is_idle() -> None:
    assert choose_moves({"slow": SLOW, "fast": FAST}, [running()]) == [Move("r", "fast")]
    assert has_slower({"slow": SLOW, "fast": FAST})


def test_none_moves_while_the_faster_ones_are_busy() -> None:
    lanes = {"slow": SLOW, "fast": replace(FAST, in_flight=6)}
    assert choose_moves(lanes, [running()]) == []
    assert not has_slower(lanes)


def test_none_moves_between_equals_or_when_it_has_just_begun_or_is_nearly_done() -> None:
    assert choose_moves({"slow": SLOW, "fast": replace(FAST, speed=60.0)}, [running()]) == []
    lanes = {"slow": SLOW, "fast": FAST}
    assert choose_moves(lanes, [running(seconds=0.1)]) == []
    assert choose_moves(lanes, [running(max_tokens=505)]) == []
    assert choose_moves(lanes, [running(prompt_tokens=100_000)]) == []
    assert choose_moves(lanes, [running(moves=2)]) == []


def test_the_oldest_go_first_and_only_as_many_as_there_is_room_for() -> None:
    crowd = [running(f"r{age}", seconds=float(age)) for age in range(5, 15)]
    moves = choose_moves({"slow": SLOW, "fast": FAST}, crowd)
    assert [move.request_id for move in moves] == ["r14", "r13", "r12", "r11"]


def test_the_moves_are_spread_over_those_that_are_equally_fast() -> None:
    lanes = {"slow": SLOW, "x": FAST, "y": replace(FAST, speed=140.0), "z": replace(FAST, speed=80.0)}
    moves = choose_moves(lanes, [running(f"r{age}", seconds=float(age)) for age in range(5, 11)])
    assert sorted(move.to for move in moves) == ["x", "x", "x", "y", "y", "y"]
