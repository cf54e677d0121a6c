"""The window of rollouts in flight: who may begin, and who waits until there is room."""

import asyncio
from collections import deque


class ResizableSemaphore:
    """Places for rollouts in flight; how many there are may change at any time.

    A lower cap takes no place away from who has one: it is not given again. All calls from one event loop.

    Args:
        cap: places, at least 1.
    """

    def __init__(self, cap: int) -> None:
        self.in_flight = 0
        """Places that are taken."""
        self._cap = cap
        self._paused = False
        self._closed = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def cap(self) -> int:
        """Places there are. Setting it lets in who waits, as far as there is room."""
        return self._cap

    @cap.setter
    def cap(self, cap: int) -> None:
        self._cap = cap
        self._let_in()

    @property
    def paused(self) -> bool:
        """Whether no place is given for now, whatever the cap is."""
        return self._paused

    @paused.setter
    def paused(self, paused: bool) -> None:
        self._paused = paused
        self._let_in()

    async def enter(self) -> bool:
        """Takes a place, when there is one; False if the window was closed instead."""
        while not self._closed and (self._paused or self.in_flight >= self._cap):
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._let_in()  # the turn was given, and goes to the next
                raise
        if self._closed:
            return False
        self.in_flight += 1
        return True

    def leave(self) -> None:
        """Gives a place back."""
        self.in_flight -= 1
        self._let_in()

    def close(self) -> None:
        """Nobody begins any more: who waits is told so."""
        self._closed = True
        self._let_in()

    def _let_in(self) -> None:
        if self._paused and not self._closed:
            return
        room = len(self._waiting) if self._closed else self._cap - self.in_flight
        while room > 0 and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                room -= 1
