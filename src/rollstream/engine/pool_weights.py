"""Which replica of a pool holds which weights, so that nothing is generated with any but the wanted ones.

    holds the wanted --(an update of others went well)----------------> owes
    holds the wanted --(it was away: it may have been started anew)---> owes
    owes --(a request comes: it loads the wanted weights)-------------> holds the wanted, and answers
    owes --(it cannot, or nobody knows where those are)---------------> away: the request goes elsewhere

Until the first update the wanted weights are those that the servers began with, and one that comes back has
them.
"""

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rollstream.engine.replica import Replica, ReplicaAwayError, ReplicaRequest, WeightsLostError
from rollstream.engine.to_the_end import to_the_end
from rollstream.errors import EngineError, EngineUnavailableError, RollstreamError, TransientEngineError
from rollstream.trajectory import Completion

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """What an update names."""

    source: str
    version: int


FIRST = Weights("", 0)
"""What a server began with, wherever that came from."""

LoadResult = Literal["loaded", "refused", "unknown", "not asked"]
"""How a replica fared: it has the new weights, it kept the old ones, nobody knows, it was not there."""


class WeightLedger:
    """Who holds what. Does nothing by itself."""

    def __init__(self) -> None:
        self.wanted = FIRST
        self._held: dict[str, Weights | None] = {}
        self._loads: dict[str, int] = {}

    def held(self, name: str) -> Weights | None:
        """What a replica holds; None when nobody knows."""
        return self._held.get(name, FIRST)

    def owes(self, name: str) -> bool:
        """Whether a replica must not generate before it has loaded the wanted weights."""
        return self.held(name) != self.wanted

    def epoch(self, name: str) -> int:
        """Counts the loads of a replica. Read it before asking the replica, and give it to `lost`."""
        return self._loads.get(name, 0)

    def loaded(self, name: str, weights: Weights) -> None:
        """A replica has loaded weights."""
        self._held[name] = weights
        self._loads[name] = self.epoch(name) + 1

    def lost(self, name: str, epoch: int) -> None:
        """A replica was away, or showed other weights. From before its last load that is no news."""
        if self.wanted != FIRST and epoch == self.epoch(name):
            self._held[name] = None

    def forget(self, name: str) -> None:
        """A replica has left the pool."""
        self._held.pop(name, None)
        self._loads.pop(name, None)

    def settle(self, weights: Weights, results: Mapping[str, LoadResult]) -> bool:
        """Ends an update. Whether the new weights are wanted now: at least one replica has them."""
        for name, result in results.items():
            if result == "loaded":
                self.loaded(name, weights)
            elif result == "unknown":
                self._held[name] = None
        if "loaded" in results.values():
            self.wanted = weights
        return self.wanted == weights


class PoolWeights:
    """Brings the replicas of a pool to the same weights, and keeps those away that have others."""

    def __init__(self) -> None:
        self.ledger = WeightLedger()
        self._one_update = asyncio.Lock()
        self._settled = asyncio.Event()
        self._settled.set()
        self._loading: dict[str, asyncio.Lock] = {}

    def forget(self, name: str) -> None:
        """A replica has left the pool."""
        self.ledger.forget(name)
        self._loading.pop(name, None)

    async def update(self, replicas: Collection[Replica], source: str, version: int) -> None:
        """Loads weights on all replicas; one update at a time, and new requests wait for its end.

        When at least one replica has loaded them, they are the pool's, and this returns: a replica that has
        not gets no request before it has. Requests that replicas have in flight are the caller's to end:
        see `InterruptibleEngine`.

        Cancelling this takes effect when all replicas have answered.

        Raises:
            EngineUnavailableError: no replica is there. Nothing has changed.
            EngineError: none could load them; the old weights stay the pool's. A replica that was lost midway
                loads those before its next request; before the first update that went well nobody knows
                where they are, and such a replica gets none.
        """
        async with self._one_update:
            self._settled.clear()
            try:
                await to_the_end(self._update(replicas, Weights(source, version)))
            finally:
                self._settled.set()

    async def generate(self, replica: Replica, request: ReplicaRequest) -> Completion:
        """Has a replica answer, with the wanted weights.

        Raises:
            ReplicaAwayError: also when the replica has other weights and cannot load the wanted ones.
            EngineError: the replica's.
        """
        await self._settled.wait()
        ledger = self.ledger
        if ledger.owes(replica.name):
            await self._bring_up(replica)
        if request.aborted:
            return Completion([], [] if request.sampling.logprobs else None, "abort")
        epoch, asked = ledger.epoch(replica.name), ledger.wanted
        try:
            completion = await replica.generate(request)
        except ReplicaAwayError:
            ledger.lost(replica.name, epoch)
            raise
        if completion.token_ids and asked != FIRST:
            version = completion.policy_versions[-1][1]
            if version not in (asked.version, ledger.wanted.version):
                ledger.lost(replica.name, epoch)
                raise ReplicaAwayError(
                    f"{replica.name} answers with weights of version {version}, but had loaded version "
                    f"{asked.version}: it was started anew, or somebody else updates it"
                )
        return completion

    async def _bring_up(self, replica: Replica) -> None:
        ledger, name = self.ledger, replica.name
        async with self._lock(name):
            if not ledger.owes(name):
                return
            weights = ledger.wanted
            if weights == FIRST:
                raise ReplicaAwayError(
                    f"{name} was lost while it loaded weights, and nobody knows which it has: update again"
                )
            _LOG.info("%s loads the weights of version %d before it goes on", name, weights.version)
            try:
                await replica.update_weights(weights.source, weights.version)
            except EngineError as error:
                raise ReplicaAwayError(
                    f"{name} has no weights of version {weights.version}: {error}"
                ) from error
            ledger.loaded(name, weights)

    async def _update(self, replicas: Collection[Replica], weights: Weights) -> None:
        were_healthy = await asyncio.gather(*(replica.health() for replica in replicas))
        errors = dict(zip(replicas, await self._load_on(replicas, weights), strict=True))
        failed = [replica for replica, error in errors.items() if error is not None]
        # What all of them refuse is the fault of what they were given.
        may_help = TransientEngineError | EngineUnavailableError
        if failed and any(error is None or isinstance(error, may_help) for error in errors.values()):
            errors.update(zip(failed, await self._load_on(failed, weights), strict=True))
        results: dict[str, LoadResult] = {}
        for (replica, error), was_healthy in zip(errors.items(), were_healthy, strict=True):
            if error is None:
                results[replica.name] = "loaded"
            elif _is_refusal(error):
                results[replica.name] = "refused"
            elif isinstance(error, ReplicaAwayError) and not was_healthy:
                results[replica.name] = "not asked"
            else:
                results[replica.name] = "unknown"
        self.ledger.settle(weights, results)
        for error in errors.values():
            if error is not None and not isinstance(error, RollstreamError):
                raise error
        causes = "; ".join(
            f"{replica.name}: {error}" for replica, error in errors.items() if error is not None
        )
        if "loaded" in results.values():
            if causes:
                _LOG.warning(
                    "these have no weights of version %d, and get no work before they have: %s",
                    *(weights.version, causes),
                )
            return
        if set(results.values()) == {"not asked"}:
            raise EngineUnavailableError(f"no server is there to load weights ({causes})")
        raise EngineError(f"none of {len(results)} replicas could load {weights.source} ({causes})")

    async def _load_on(self, replicas: Collection[Replica], weights: Weights) -> list[BaseException | None]:
        async def load(replica: Replica) -> None:
            async with self._lock(replica.name):
                await replica.update_weights(weights.source, weights.version)

        return await asyncio.gather(*(load(replica) for replica in replicas), return_exceptions=True)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._loading.setdefault(name, asyncio.Lock())


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a replica said no, is there, and has what it had."""
    return isinstance(error, EngineError) and not isinstance(
        error, EngineUnavailableError | TransientEngineError | WeightsLostError
    )
