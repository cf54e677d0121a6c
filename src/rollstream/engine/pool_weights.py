"""Which replica of a pool holds which weights, so that nothing is generated with any but the wanted ones.

    holds the wanted --(an update of others went well)----------------> owes
    holds the wanted --(it was away: it may have been started anew)---> owes
    owes --(it has loaded the wanted weights)-------------------------> holds the wanted
    owes --(it cannot, or nobody knows where those are)---------------> owes, and gets nothing

Until the first update the wanted weights are those that the servers began with, wherever they are from. A
server that somebody had updated before says so with its answers: one that was away since, or answers with a
lower version than before, is asked for a token first, and gets nothing while that is of a lower version. So
servers that another program updates go on, and one that was started anew with the base model does not.
"""

import asyncio
import logging
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from rollstream.engine.replica import Replica, ReplicaAwayError, ReplicaRequest, WeightsLostError
from rollstream.engine.to_the_end import to_the_end
from rollstream.errors import EngineError, EngineUnavailableError, RollstreamError, TransientEngineError
from rollstream.trajectory import Completion, SamplingParams

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Weights:
    """What an update names."""

    source: str
    version: int


FIRST = Weights("", 0)
"""What a server began with, wherever that came from; its answers may say another version."""

_TOKEN_TIMEOUT_S = 120.0
"""For a token that shows a server's version: as long as a vLLM has for its first one."""

LoadResult = Literal["loaded", "refused", "unknown", "not asked"]
"""How a replica fared: it has the new weights, it kept the old ones, nobody knows, it was not there."""


class WeightLedger:
    """Who holds what. Does nothing by itself."""

    def __init__(self) -> None:
        self.wanted = FIRST
        self._held: dict[str, Weights | None] = {}
        self._loads: dict[str, int] = {}
        self._said: dict[str, int] = {}
        """The highest version that a replica has answered with, while the wanted ones are the first."""
        self._doubted: set[str] = set()
        """Replicas that may have been started anew since, with lower ones."""

    def held(self, name: str) -> Weights | None:
        """What a replica holds; None when nobody knows."""
        return self._held.get(name, FIRST)

    def owes(self, name: str) -> bool:
        """Whether a replica must not generate before it has loaded the wanted weights, or shown them."""
        return name in self._doubted or self.must_load(name)

    def must_load(self, name: str) -> bool:
        """Whether it has not got the wanted weights, as far as known; it may be paused because of that."""
        return self.held(name) != self.wanted

    def said(self, name: str) -> int:
        """The least version that a replica has to answer with while the wanted weights are the first."""
        return self._said.get(name, 0)

    def says(self, name: str, version: int) -> None:
        """A replica has answered with a version, which is not too low."""
        self._said[name] = max(version, self.said(name))
        self._doubted.discard(name)

    def join(self, name: str) -> None:
        """A replica has come: while the wanted weights are the first, it must have what the others have."""
        if self.wanted == FIRST and (least := min(self._said.values(), default=0)):
            self._said[name] = least
            self._doubted.add(name)

    def epoch(self, name: str) -> int:
        """Counts the loads of a replica. Read it before asking the replica, and give it to `lost`."""
        return self._loads.get(name, 0)

    def loaded(self, name: str, weights: Weights) -> None:
        """A replica has loaded weights."""
        self._held[name] = weights
        self._doubted.discard(name)
        self._loads[name] = self.epoch(name) + 1

    def lost(self, name: str, epoch: int) -> None:
        """A replica was away, or showed other weights. From before its last load that is no news."""
        if epoch != self.epoch(name):
            return
        if self.wanted != FIRST:
            self._held[name] = None
        elif self.said(name):
            self._doubted.add(name)

    def forget(self, name: str) -> None:
        """A replica has left the pool."""
        self._held.pop(name, None)
        self._loads.pop(name, None)
        self._said.pop(name, None)
        self._doubted.discard(name)

    def settle(self, weights: Weights, results: Mapping[str, LoadResult]) -> bool:
        """Ends an update. Whether the new weights are wanted now: at least one replica has them."""
        for name, result in results.items():
            if result == "loaded":
                self.loaded(name, weights)
            elif result == "unknown":
                self._held[name] = None
        if "loaded" in results.values():
            self.wanted = weights
            self._doubted.clear()  # who has not loaded owes that
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

        Those are asked that are healthy and load nothing, if there are any: one that hangs, or is busy with
        weights of before, would keep all waiting. When at least one replica has loaded them, they are the
        pool's, and this returns: a replica that has not gets no request before it has. Requests that replicas
        have in flight are the caller's to end: see `InterruptibleEngine`.

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

    @property
    def is_settled(self) -> bool:
        """Whether no update is under way: only then a replica may be given requests."""
        return self._settled.is_set()

    async def settled(self) -> None:
        """Returns when no update is under way."""
        await self._settled.wait()

    async def generate(self, replica: Replica, request: ReplicaRequest) -> Completion:
        """Has a replica answer that owes nothing; call it while no update is under way.

        Raises:
            ReplicaAwayError: also when the replica answers with other weights than the wanted ones.
            EngineError: the replica's.
        """
        ledger, name = self.ledger, replica.name
        if ledger.owes(name):
            raise ReplicaAwayError(f"{name} has no weights of version {ledger.wanted.version}")
        epoch, asked, least = ledger.epoch(name), ledger.wanted, ledger.said(name)
        try:
            completion = await replica.generate(request)
        except ReplicaAwayError:
            ledger.lost(name, epoch)
            raise
        if not completion.token_ids:
            return completion
        version = completion.policy_versions[-1][1]
        if asked == FIRST:
            if version < least:
                ledger.lost(name, epoch)
                raise _lower(name, version, least)
            ledger.says(name, version)
        elif version not in (asked.version, ledger.wanted.version):
            ledger.lost(name, epoch)
            raise ReplicaAwayError(
                f"{name} answers with weights of version {version}, but had loaded version "
                f"{asked.version}: it was started anew, or somebody else updates it"
            )
        return completion

    async def bring_up(self, replica: Replica) -> None:
        """Has a replica load the wanted weights if it owes them; waits for the end of an update.

        Cancelling it may leave the server without any weights.

        Raises:
            ReplicaAwayError: it cannot, or nobody knows where those are.
        """
        await self.settled()
        ledger, name = self.ledger, replica.name
        async with self._lock(name):
            if not ledger.owes(name):
                return
            weights = ledger.wanted
            if ledger.held(name) is None and weights == FIRST:
                raise ReplicaAwayError(
                    f"{name} was lost while it loaded weights, and nobody knows which it has: update again"
                )
            if weights == FIRST:
                await self._ask_version(replica)
                return
            _LOG.info("%s loads the weights of version %d before it goes on", name, weights.version)
            try:
                await replica.update_weights(weights.source, weights.version)
            except EngineError as error:
                raise ReplicaAwayError(
                    f"{name} has no weights of version {weights.version}: {error}"
                ) from error
            ledger.loaded(name, weights)

    async def _ask_version(self, replica: Replica) -> None:
        """Has a replica sample a token, which shows the version of its weights."""
        name, least = replica.name, self.ledger.said(replica.name)
        sampling = SamplingParams(max_tokens=1, logprobs=False, ignore_eos=True)
        request = ReplicaRequest([1], sampling, "version", f"version-{secrets.token_hex(4)}")
        try:
            async with asyncio.timeout(_TOKEN_TIMEOUT_S):
                completion = await replica.generate(request)
        except (EngineError, TimeoutError) as error:
            raise ReplicaAwayError(f"{name} does not show the version of its weights: {error}") from error
        version = completion.policy_versions[-1][1]
        if not completion.token_ids or version < least:
            raise _lower(name, version, least)
        self.ledger.says(name, version)

    async def _update(self, replicas: Collection[Replica], weights: Weights) -> None:
        healthy = await self._ready(replicas)
        errors: dict[Replica, BaseException | None] = {
            replica: ReplicaAwayError(f"{replica.name} is not healthy, or loads weights of before")
            for replica in replicas
        }
        asked = healthy or replicas
        errors.update(zip(asked, await self._load_on(asked, weights), strict=True))
        failed = [replica for replica in asked if errors[replica] is not None]
        # What all of them refuse is the fault of what they were given.
        may_help = TransientEngineError | EngineUnavailableError
        if failed and any(errors[one] is None or isinstance(errors[one], may_help) for one in asked):
            errors.update(zip(failed, await self._load_on(failed, weights), strict=True))
        results: dict[str, LoadResult] = {}
        for replica, error in errors.items():
            if error is None:
                results[replica.name] = "loaded"
            elif _is_refusal(error):
                results[replica.name] = "refused"
            elif isinstance(error, ReplicaAwayError) and replica not in healthy:
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

    async def _ready(self, replicas: Collection[Replica]) -> list[Replica]:
        """Those that are healthy and load nothing."""
        checks = await asyncio.gather(*(replica.health() for replica in replicas))
        pairs = zip(replicas, checks, strict=True)
        return [one for one, is_healthy in pairs if is_healthy and not self._lock(one.name).locked()]

    async def _load_on(self, replicas: Collection[Replica], weights: Weights) -> list[BaseException | None]:
        async def load(replica: Replica) -> None:
            async with self._lock(replica.name):
                await replica.update_weights(weights.source, weights.version)

        return await asyncio.gather(*(load(replica) for replica in replicas), return_exceptions=True)

    def _lock(self, name: str) -> asyncio.Lock:
        return self._loading.setdefault(name, asyncio.Lock())


def _lower(name: str, version: int, least: int) -> ReplicaAwayError:
    return ReplicaAwayError(
        f"{name} answers with weights of version {version}, but it, or the server that it joins, had version "
        f"{least} before: it was started anew. Give it those weights again"
    )


def _is_refusal(error: BaseException | None) -> bool:
    """Whether a replica said no, is there, and has what it had."""
    return isinstance(error, EngineError) and not isinstance(
        error, EngineUnavailableError | TransientEngineError | WeightsLostError
    )
