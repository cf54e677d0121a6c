"""What the embedded engines share: a backend that is started again when it dies, stop strings, settings."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from rollstream.aio import Backoff
from rollstream.engine.checks import read_engine_kwargs
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError

_LOG = logging.getLogger(__name__)

_RESTART_PAUSE_S = 0.5
"""After a restart that was at once, before the next one; doubles up to the next constant."""

_RESTART_PAUSE_S_MAX = 30.0
"""What keeps dying is started twice a minute: cheap, and soon enough when the cause has gone."""


class Backend(Protocol):
    """One life of what runs the model: a process, or a thread."""

    @property
    def cause(self) -> str:
        """Why it serves nobody any more; "" while it serves."""
        ...

    async def close(self) -> None:
        """Ends it, and what is in flight with `EngineUnavailableError`."""
        ...


_B = TypeVar("_B", bound=Backend)


class Restarted(Generic[_B]):
    """Keeps one backend running.

    Args:
        name: the engine's.
        start: starts a backend; raises `EngineError`.

    Attributes:
        backend: None before `start` and after `close`.
        lock: held while the backend is started, changed or ended.
    """

    def __init__(self, name: str, start: Callable[[], Awaitable[_B]]) -> None:
        self._name = name
        self._start = start
        self._starting: asyncio.Future[_B] | None = None
        self._backoff = Backoff(_RESTART_PAUSE_S, _RESTART_PAUSE_S_MAX)
        self._restart_at = 0.0
        self.backend: _B | None = None
        self.closed = False
        self.lock = asyncio.Lock()

    def serving(self) -> _B:
        """The backend. Raises `EngineUnavailableError`."""
        if self.backend is None:
            raise EngineUnavailableError("the engine is closed, or was not started")
        return self.backend

    async def start(self) -> None:
        """Starts the first one. `close` ends this with `EngineUnavailableError`."""
        async with self.lock:
            if self.backend is None and not self.closed:
                await self._replace()

    async def health(self) -> bool:
        """Whether the backend serves. Starts another one if not: at once, then with pauses that double."""
        if self.backend is not None and not self.backend.cause:
            return not self.closed  # also while it loads weights
        async with self.lock:
            if self.closed or self.backend is None:
                return False
            if not self.backend.cause:
                return True
            clock = asyncio.get_running_loop().time
            if clock() < self._restart_at:
                return False
            _LOG.warning("starting engine %r anew: %s", self._name, self.backend.cause)
            try:
                await self._replace()
            except EngineError as error:
                _LOG.warning("%s", error)
                return False
            finally:
                self._restart_at = clock() + self._backoff.pause()
            return True

    def worked(self) -> None:
        """The backend has answered: should it die, the next one is started at once."""
        self._backoff.reset()
        self._restart_at = 0.0

    async def close(self) -> None:
        """Ends the backend, also one that is starting."""
        self.closed = True
        # A second cancellation would interrupt the clean-up after the first one.
        if isinstance(self._starting, asyncio.Task) and not self._starting.cancelling():
            self._starting.cancel()
        async with self.lock:
            if self.backend is not None:
                await self.backend.close()
                self.backend = None

    async def _replace(self) -> None:
        if self.backend is not None:
            await self.backend.close()
        self._starting = asyncio.ensure_future(self._start())
        try:
            self.backend = await self._starting
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise EngineUnavailableError("the engine was closed while it was starting") from None
        finally:
            self._starting = None


class StopTexts:
    """Finds stop strings in what was sampled."""

    def __init__(self, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def found(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        """Whether the text of `ids` has one of `stop`, given that it had none before its last token.

        Only the last `stop_window(stop)` ids are looked at.
        """
        text = self._tokenizer.decode(ids[-stop_window(stop) :], skip_special_tokens=False)
        return any(entry in text for entry in stop)


def stop_window(stop: tuple[str, ...]) -> int:
    """In how many tokens the end of a stop string is looked for."""
    # A character takes at most four tokens (its bytes); a few more give the decoder its context.
    return 4 * max(map(len, stop)) + 8


def read_settings(
    engine: str, given: Mapping[str, Any], defaults: Mapping[str, Any], least: Mapping[str, float]
) -> dict[str, Any]:
    """`engine_kwargs` with their defaults; `least` has the least values. Raises `ConfigError`."""
    kwargs = read_engine_kwargs(engine, given, defaults)
    for key, value in least.items():
        if not kwargs[key] >= value:
            raise ConfigError(f"engine_kwargs.{key} is {kwargs[key]}, want {value:g} or more")
    if kwargs["max_num_seqs"] > kwargs["max_num_batched_tokens"]:
        raise ConfigError("engine_kwargs.max_num_seqs must not be more than max_num_batched_tokens")
    return kwargs
