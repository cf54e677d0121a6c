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
"""A replica is idle while it has less than this share of its typical requests: between an answer and the next
request it has one fewer, and not many."""
MOST_MOVES = 2
"""A request moves from slow to fast, and once more if that was wrong."""
LEAST_GAIN_S = 0.2
"""A move also costs two round trips."""
_PREFILL = 20.0
"""How many prompt tokens a replica reads in the time of one sampled token: a low figure for servers on GPUs,
so that a move is rather not made."""


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """How busy and how fast a replica is."""

    in_flight: int
    speed: float
    """Tokens per second of one request."""
    typical_in_flight: float
    """0: not known."""

    @property
    def spare(self) -> int:
        """How many more requests it may take and still be idle; an idle one takes at least one."""
        spare = int(IDLE * self.typical_in_flight) - self.in_flight
        return max(spare, 0 if self.in_flight else 1)


@dataclass(frozen=True, slots=True)
class Running:
    """A request that may move."""

    request_id: str
    replica: str
    seconds: float
    """Since it began there."""
    prompt_tokens: int
    """Of the prompt as it was sent there, with the tokens of earlier pieces."""
    max_tokens: int
    """Left when it was sent there."""
    moves: int
    """How often it has moved."""


@dataclass(frozen=True, slots=True)
class Move:
    """A request and where it goes."""

    request_id: str
    to: str


def has_slower(loads: Mapping[str, ReplicaLoad]) -> bool:
    """Whether a move is possible at all: an idle replica, and a slower one that is at work."""
    fastest = max((load.speed for load in loads.values() if load.spare), default=0.0)
    return any(load.in_flight and load.speed * FASTER <= fastest for load in loads.values())


def choose_moves(loads: Mapping[str, ReplicaLoad], running: Iterable[Running]) -> list[Move]:
    """The moves to make now, those that gain most first. At most as many as idle replicas can spare.

    Args:
        loads: by name. A request on a replica that is not among them stays.
        running: the requests that may move.
    """
    spares = {name: load.spare for name, load in loads.items() if load.spare}
    order = sorted(spares, key=lambda name: -loads[name].speed)
    candidates = []
    for one in running:
        if one.moves >= MOST_MOVES or one.replica not in loads:
            continue
        gain = _gain(one, loads[one.replica], loads[order[0]]) if order else 0.0
        if gain >= LEAST_GAIN_S:
            candidates.append((gain, one))
    candidates.sort(key=lambda candidate: -candidate[0])
    moves = []
    for _, one in candidates:
        # The emptiest of those that are as fast as the fastest with room, near enough.
        with_spare = [name for name in order if spares[name]]
        if not with_spare:
            break
        fast = [name for name in with_spare if loads[name].speed * FASTER > loads[with_spare[0]].speed]
        to = max(fast, key=lambda name: spares[name] / max(1, loads[name].spare + loads[name].in_flight))
        if _gain(one, loads[one.replica], loads[to]) >= LEAST_GAIN_S:
            spares[to] -= 1
            moves.append(Move(one.request_id, to))
    return moves


def _gain(one: Running, here: ReplicaLoad, there: ReplicaLoad) -> float:
    """Seconds that a move saves; less than none when it is not a faster one."""
    if there.speed < FASTER * here.speed:
        return -1.0
    sampled = min(one.seconds * here.speed, one.max_tokens)
    left = min(sampled, one.max_tokens - sampled)
    read_again = (one.prompt_tokens + sampled) / (_PREFILL * there.speed)
    return left / here.speed - left / there.speed - read_again
