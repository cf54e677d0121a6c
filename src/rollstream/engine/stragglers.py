"""Which requests leave a slow replica for an idle faster one. Pure: owns no task, no clock and no connection.

A rollout that is begun late on a slow replica ends the run late, while the fast ones have nothing to do. It
may move with the tokens it has, which the faster replica reads as part of its prompt.

    gain = what is left / speed here  -  what is left / speed there  -  reading the prompt again there

What is left is not known. It is taken for as much as there is: with a long tail, those that are long already
are those that will be, and one that has just begun shows nothing yet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FASTER = 1.5
"""A replica is faster when it is so by this factor: measured speeds are off by some 20 %. Also what keeps a
request from going back."""
IDLE = 0.5
"""A replica is idle while it has less than this share of its usual requests: between an answer and the next
request it has one fewer, and not many."""
MOST_MOVES = 2
"""Of a request. From slow to fast, and once more if it was wrong."""
LEAST_GAIN_S = 0.2
"""A move also costs two round trips."""
_PREFILL = 20.0
"""How many prompt tokens a replica reads in the time of one sampled token: a low figure for servers on GPUs,
so that a move is rather not made."""


@dataclass(frozen=True, slots=True)
class Lane:
    """What is known of a replica."""

    in_flight: int
    speed: float
    """Tokens per second of one request."""
    usual: float
    """Requests that it usually has in flight; 0: not known."""

    @property
    def room(self) -> int:
        """How many more requests it may take and still be idle; an idle one takes at least one."""
        room = int(IDLE * self.usual) - self.in_flight
        return max(room, 0 if self.in_flight else 1)


@dataclass(frozen=True, slots=True)
class Running:
    """A request that may move."""

    request_id: str
    replica: str
    seconds: float
    """Since it began there."""
    prompt_tokens: int
    """As it was sent there."""
    max_tokens: int
    """Likewise."""
    moves: int
    """That it has made."""


@dataclass(frozen=True, slots=True)
class Move:
    """A request and where it goes."""

    request_id: str
    to: str


def has_slower(lanes: Mapping[str, Lane]) -> bool:
    """Whether a move is possible at all: an idle replica, and a slower one that is at work."""
    fastest = max((lane.speed for lane in lanes.values() if lane.room), default=0.0)
    return any(lane.in_flight and lane.speed * FASTER <= fastest for lane in lanes.values())


def choose_moves(lanes: Mapping[str, Lane], running: Iterable[Running]) -> list[Move]:
    """The moves to make now, those that gain most first. At most as many as there is room for.

    Args:
        lanes: by name. A request on a replica that is not among them stays.
        running: the requests that may move.
    """
    rooms = {name: lane.room for name, lane in lanes.items() if lane.room}
    order = sorted(rooms, key=lambda name: -lanes[name].speed)
    wishes = []
    for one in running:
        if one.moves >= MOST_MOVES or one.replica not in lanes:
            continue
        gain = _gain(one, lanes[one.replica], lanes[order[0]]) if order else 0.0
        if gain >= LEAST_GAIN_S:
            wishes.append((gain, one))
    wishes.sort(key=lambda wish: -wish[0])
    moves = []
    for _, one in wishes:
        # The emptiest of those that are as fast as the fastest with room, near enough.
        open_lanes = [name for name in order if rooms[name]]
        if not open_lanes:
            break
        fast = [name for name in open_lanes if lanes[name].speed * FASTER > lanes[open_lanes[0]].speed]
        to = max(fast, key=lambda name: rooms[name] / max(1, lanes[name].room + lanes[name].in_flight))
        if _gain(one, lanes[one.replica], lanes[to]) >= LEAST_GAIN_S:
            rooms[to] -= 1
            moves.append(Move(one.request_id, to))
    return moves


def _gain(one: Running, here: Lane, there: Lane) -> float:
    """Seconds that a move saves; less than none when it is not a faster one."""
    if there.speed < FASTER * here.speed:
        return -1.0
    sampled = min(one.seconds * here.speed, one.max_tokens)
    left = min(sampled, one.max_tokens - sampled)
    read_again = (one.prompt_tokens + sampled) / (_PREFILL * there.speed)
    return left / here.speed - left / there.speed - read_again
