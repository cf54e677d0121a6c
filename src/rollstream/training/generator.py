"""What makes the groups: the seam between the training door and whatever generates."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from rollstream.errors import WeightUpdateError
from rollstream.training.plan import PlannedGroup


@runtime_checkable
class GroupGenerator(Protocol):
    """Generates groups; all its coroutines run in one event loop, that of the generation thread."""

    async def start(self) -> None:
        """Gets ready; what it raises is raised by whoever starts the batches."""
        ...

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        """The group's rollouts, one at least. Many run at once; cancelled when nobody wants them any more.

        Raises:
            EngineUnavailableError: no engine is there; it is asked again later, within the group's time.
            TransientError: trying again may help.
            Exception: it does not; the group has failed.
        """
        ...

    async def update_weights(self, source: str, version: int) -> None:
        """Gives the engine new weights; `source` is what the engine understands by it."""
        ...

    async def close(self) -> None:
        """Releases everything. Called once, also after a failed `start`."""
        ...


class CallableGenerator:
    """A generator of plain coroutine functions.

    Args:
        generate: the rollouts of a group.
        update_weights: takes `(source, version)`; None: weights that the engine shares with the trainer, or
            that somebody else pushes: only the version is kept.
        start: called once before.
        close: called once after.
    """

    def __init__(
        self,
        generate: Callable[[PlannedGroup], Awaitable[Sequence[Any]]],
        *,
        update_weights: Callable[[str, int], Awaitable[None]] | None = None,
        start: Callable[[], Awaitable[None]] | None = None,
        close: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._generate = generate
        self._update_weights = update_weights
        self._start = start
        self._close = close

    async def start(self) -> None:
        if self._start is not None:
            await self._start()

    async def generate(self, group: PlannedGroup) -> Sequence[Any]:
        return await self._generate(group)

    async def update_weights(self, source: str, version: int) -> None:
        if self._update_weights is not None:
            await self._update_weights(source, version)
        elif source:
            raise WeightUpdateError(f"this generator has no update_weights: it cannot load {source!r}")

    async def close(self) -> None:
        if self._close is not None:
            await self._close()
