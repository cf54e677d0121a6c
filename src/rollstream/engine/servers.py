"""Which server gets the next request. A full pool (stickiness, circuit breakers, replicas) replaces this."""

import time
from collections.abc import Callable, Collection, Sequence

_COOL_DOWN_S = 1.0
"""A server that dropped a connection is tried last for so long: long enough that a burst does not run into
a dead server request by request, short enough that a restarted one is used at once."""


class LeastInFlight:
    """Chooses the server with the fewest requests in flight; ties go round.

    A server that failed is only chosen within its cool-down when no other is left. Owns no task and no
    connection.
    """

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.urls = list(urls)
        self.in_flight = dict.fromkeys(self.urls, 0)
        """Requests in flight per server."""
        self._avoid_until = dict.fromkeys(self.urls, 0.0)
        self._clock = clock
        self._last = -1

    def pick(self, tried: Collection[str] = ()) -> str | None:
        """Takes a server that is not in `tried` and counts the request; None when all were tried."""
        if len(self.urls) == 1 and not tried:
            url = self.urls[0]
            self.in_flight[url] += 1
            return url
        now = self._clock()
        count = len(self.urls)
        best: tuple[bool, int, int] | None = None
        for offset in range(1, count + 1):
            position = (self._last + offset) % count
            url = self.urls[position]
            if url in tried:
                continue
            rank = (self._avoid_until[url] > now, self.in_flight[url], position)
            if best is None or rank[:2] < best[:2]:
                best = rank
        if best is None:
            return None
        self._last = best[2]
        url = self.urls[self._last]
        self.in_flight[url] += 1
        return url

    def release(self, url: str, *, failed: bool = False) -> None:
        """Ends a request that `pick` counted; `failed` when the server could not be reached."""
        self.in_flight[url] -= 1
        self._avoid_until[url] = self._clock() + _COOL_DOWN_S if failed else 0.0
