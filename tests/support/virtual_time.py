"""An event loop whose clock is the test's: nobody waits for a timer, and a busy machine changes nothing.

For code that waits by the loop's own timers alone, without sockets, threads or processes.
"""

import asyncio
import selectors

_TURN_S = 0.001
"""What a turn of the loop takes."""


class _Jumping(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        self.now += _TURN_S if found else max(timeout, _TURN_S)
        return found


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to the next timer as soon as nothing else is left to do."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now
