"""Whether the engine is there: work waits while it is away.

One of the waiting rollouts probes the engine; when it is cancelled, the next one takes over. So there is no
background task, and when the engine is back all go on at once.
"""

import asyncio
import logging
import time

from rollstream.aio import Backoff
from rollstream.engine.base import Engine
from rollstream.errors import EngineLostError, EngineUnavailableError

logger = logging.getLogger(__name__)

_FIRST_PROBE_S = 0.2
_PROBE_S_MAX = 1.0
"""Between probes; also the longest that a returned engine waits for work."""

_QUIET_S = 10.0
"""After a return that held this long, the next outage is a new one: pauses begin short again."""


class EngineAvailability:
    """Lets work through while the engine is there."""

    def __init__(self, engine: Engine, *, timeout: float) -> None:
        """`timeout`: seconds without an engine after which waiting ends with `EngineLostError`."""
        self.returns = 0
        """How often the engine has come back. Read it before asking the engine, and give it to `mark_away`."""
        self._engine = engine
        self._timeout = timeout
        self._probing = asyncio.Lock()
        self._away_because: EngineUnavailableError | None = None
        self._away_since = 0.0
        self._returned_at = -_QUIET_S
        self._backoff = Backoff(_FIRST_PROBE_S, _PROBE_S_MAX)

    @property
    def is_available(self) -> bool:
        """Whether the engine is believed to be there."""
        return self._away_because is None

    def mark_away(self, error: EngineUnavailableError, returns: int) -> None:
        """The engine was not there. A report from before its last return changes nothing."""
        if self._away_because is None and returns == self.returns:
            self._away_because = error
            self._away_since = time.monotonic()
            if self._away_since - self._returned_at > _QUIET_S:
                self._backoff.reset()
            logger.warning("no engine: %s; work waits for up to %g s", error, self._timeout)

    async def wait(self) -> None:
        """Returns when the engine is there.

        Raises:
            EngineLostError: it stayed away for longer than `timeout`, the cause is the first report; or it
                says itself that it will not come back.
        """
        while self._away_because is not None:
            async with self._probing:
                while self._away_because is not None:
                    # The pause comes first: an engine whose health is fine while its requests fail must
                    # not be asked in a hot loop.
                    await asyncio.sleep(self._backoff.pause())
                    await self._probe(self._away_because)

    async def _probe(self, cause: EngineUnavailableError) -> None:
        deadline = self._away_since + self._timeout
        try:
            async with asyncio.timeout(max(1.0, deadline - time.monotonic())):
                healthy = await self._engine.health()
        except EngineLostError:
            raise
        except Exception as error:
            logger.info("engine probe: %s: %s", type(error).__name__, error)
            healthy = False
        now = time.monotonic()
        if healthy:
            logger.warning("the engine is back after %.1f s", now - self._away_since)
            self._away_because = None
            self.returns += 1
            self._returned_at = now
        elif now > deadline:
            raise EngineLostError(
                f"the engine has been away for {now - self._away_since:.0f} s (generation.engine_timeout is "
                f"{self._timeout:g}): {cause}. What is done is safe; bring the engine back and run the same "
                "command again."
            ) from cause
