"""Whether a request that is slow where it is should go on at another server. Pure.

A rollout that is begun late on a slow server ends a run late, while the fast ones have nothing to do. It may
move with the tokens it has, which the other server reads as part of its prompt:

    saved = what is left * (seconds a token takes here - there) - reading the prompt again there

What is left is not known. It is taken for as much as there is: with a long tail, those that are long already
are those that will be, and one that has just begun shows nothing yet.
"""

FASTER = 1.5
"""By so much, at least: measured speeds are off by some 20 %. Also what keeps a request from going back."""

LEAST_SAVED_S = 0.2
"""A move also costs two round trips."""

MOST_MOVES = 2
"""A request moves from slow to fast, and once more if that was wrong."""

_PREFILL = 20.0
"""How many prompt tokens a server reads in the time of one sampled token: a low figure for servers on GPUs, so
that a move is rather not made."""


def should_move(*, prompt_tokens: int, max_tokens: int, seconds: float, here: float, there: float) -> bool:
    """Whether a move saves enough.

    Args:
        prompt_tokens: of the prompt as it was sent here, with the tokens of earlier pieces.
        max_tokens: what it could sample here at most.
        seconds: since it was sent here.
        here: seconds that a sampled token takes.
        there: the same at the other server, with one request more than it has.
    """
    if there <= 0 or here < FASTER * there:
        return False
    sampled = min(seconds / here, max_tokens)
    left = min(sampled, max_tokens - sampled)
    read_again = (prompt_tokens + sampled) * there / _PREFILL
    return left * (here - there) - read_again >= LEAST_SAVED_S
