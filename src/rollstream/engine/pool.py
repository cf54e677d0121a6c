"""An engine made of replicas: servers of the same model that come and go.

The way of a request:

    pick a replica --> it answers                                             --> done
          ^            it is away, or failed at the request, others are left --+
          |                                                                    |
          +--------------------------------------------------------------------+
                       all are away    --> EngineUnavailableError: the caller waits, nothing is charged
                       some are there, all failed at it --> TransientEngineError: charged as an attempt
                       the request is at fault          --> EngineError, at once
"""

import asyncio
import itertools
import logging
import secrets
from collections.abc import Callable, Sequence

from rollstream.engine.base import Capabilities
from rollstream.engine.checks import check_request
from rollstream.engine.replica import Replica, ReplicaAwayError, ReplicaRequest
from rollstream.engine.routing import Outcome, Router
from rollstream.errors import (
    ConfigError,
    EngineError,
    EngineUnavailableError,
    RollstreamError,
    TransientEngineError,
)
from rollstream.trajectory import Completion, SamplingParams

logger = logging.getLogger(__name__)

_ABORT_TIMEOUT_S = 10.0
"""An abort is a courtesy to the server: not worth waiting longer."""


class PoolEngine:
    """Drives one or several replicas as one engine.

    There is no limit on time or on connections here: the caller bounds both.

    Args:
        replicas: at least one.
        own: the user's limits, laid over what the replicas say of themselves.
        what: the engine's name, for messages.
        hint: what to check when nobody answers at start.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        *,
        own: Callable[[Capabilities], Capabilities] = lambda capabilities: capabilities,
        what: str = "engine",
        hint: str = "check actor_rollout_ref.rollout.server_urls, and that the servers are running",
    ) -> None:
        if not replicas:
            raise ConfigError(f"engine {what!r} needs at least one replica")
        self._replicas = {replica.name: replica for replica in replicas}
        self._router = Router(self._replicas)
        self._own = own
        self._what = what
        self._hint = hint
        self._capabilities: Capabilities | None = None
        # A rid of our own on the wire: one that was cancelled may still be known to the server when the same
        # request comes again, and two runs may share a server.
        self._nonce = secrets.token_hex(4)
        self._counter = itertools.count()
        self._in_flight: dict[str, tuple[ReplicaRequest, str]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def capabilities(self) -> Capabilities:
        if self._capabilities is None:
            raise EngineError("the engine has not been started")
        return self._capabilities

    @property
    def replicas(self) -> list[str]:
        """Names of the replicas, in the order they came."""
        return list(self._replicas)

    async def start(self) -> None:
        """Asks every replica what it is; at least one has to answer.

        Raises:
            EngineUnavailableError: nobody is there.
            EngineError: a server refuses to say, or is something else than expected.
        """
        if self._capabilities is not None:
            return
        try:
            self._capabilities = self._own(await self._ask_all())
        except BaseException:
            await self.close()
            raise

    async def add_replica(self, replica: Replica) -> None:
        """Takes in a replica while requests go on.

        Raises:
            ReplicaAwayError: it does not answer.
            EngineError: it cannot do what the others can: a run that relies on that must not meet it.
        """
        if replica.name in self._replicas:
            return
        found = self._own(await replica.describe())
        if self._capabilities is not None and found != self._capabilities:
            raise EngineError(f"{replica.name} is another kind of server than {', '.join(self._replicas)}")
        self._replicas[replica.name] = replica
        self._router.add(replica.name)

    async def remove_replica(self, name: str) -> None:
        """Sends nothing more to a replica; its requests in flight begin anew on others. Unknown names: fine.

        Raises:
            EngineError: it is the last one.
        """
        if len(self._replicas) == 1 and name in self._replicas:
            raise EngineError(f"{name} is the last replica")
        replica = self._replicas.pop(name, None)
        self._router.remove(name)
        if replica is not None:
            await replica.close()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        check_request(prompt_ids, sampling, self.capabilities, images=images)
        causes: dict[str, RollstreamError] = {}
        request = ReplicaRequest(prompt_ids, sampling, request_id, "", list(images or ()))
        try:
            while not request.aborted:
                if self._closed:
                    raise EngineUnavailableError("the engine is closed")
                pick = self._router.pick(request_id, causes)
                if pick is None:
                    raise self._refusal(causes)
                request.rid = f"{request_id}.{self._nonce}{next(self._counter)}"
                self._in_flight[request_id] = (request, pick.name)
                outcome: Outcome = "cancelled"
                tokens = 0
                try:
                    completion = await self._replicas[pick.name].generate(request)
                    outcome, tokens = "answered", len(completion.token_ids)
                    return completion
                except ReplicaAwayError as error:
                    outcome = "away"
                    causes[pick.name] = error
                except TransientEngineError as error:
                    outcome = "failed"
                    causes[pick.name] = error
                except EngineError:
                    outcome = "answered"
                    raise
                except asyncio.CancelledError:
                    self._abort_soon(pick.name, request.rid)
                    raise
                finally:
                    self._router.release(pick, outcome, tokens=tokens)
        finally:
            self._in_flight.pop(request_id, None)
        # Aborted, and its replica is away: what it had is lost, and it is not worth another one.
        return Completion([], [] if sampling.logprobs else None, "abort")

    async def abort(self, request_id: str) -> None:
        if (found := self._in_flight.get(request_id)) is not None:
            request, name = found
            request.aborted = True
            await self._replicas[name].abort(request.rid)

    async def update_weights(self, source: str, version: int) -> None:
        """Loads the weights on every replica; on all of them, or it raises.

        Raises:
            EngineError: a replica could not. The others may have the new weights: generate nothing before
                an update has gone well.
        """
        if not self.capabilities.update_weights:
            raise EngineError(f"engine {self._what!r} cannot update weights")
        names = list(self._replicas)
        results = await asyncio.gather(
            *(self._replicas[name].update_weights(source, version) for name in names), return_exceptions=True
        )
        failed = {
            name: result
            for name, result in zip(names, results, strict=True)
            if isinstance(result, BaseException)
        }
        for error in failed.values():
            if not isinstance(error, RollstreamError):
                raise error
        if failed:
            causes = "; ".join(f"{name}: {error}" for name, error in failed.items())
            raise EngineError(f"{len(failed)} of {len(names)} replicas could not update weights ({causes})")

    async def health(self) -> bool:
        """Whether at least one replica says it is healthy."""
        if self._closed:
            return False
        checks = [asyncio.ensure_future(replica.health()) for replica in self._replicas.values()]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return True
            return False
        finally:
            for task in checks:
                task.cancel()
            await asyncio.gather(*checks, return_exceptions=True)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    def _refusal(self, causes: dict[str, RollstreamError]) -> RollstreamError:
        """What to say when every replica was tried."""
        for error in causes.values():
            if not isinstance(error, ReplicaAwayError):
                return error  # one that is there failed at it: trying again may help, and is charged
        said = "; ".join(str(error) for error in causes.values())
        return EngineUnavailableError(f"no {self._what} server answers ({said})")

    def _abort_soon(self, name: str, rid: str) -> None:
        # Held by the set until it is done; `close` waits for it. Cancellation itself is not delayed.
        task = asyncio.get_running_loop().create_task(self._replicas[name].abort(rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _ask_all(self) -> Capabilities:
        answers = await asyncio.gather(
            *(replica.describe() for replica in self._replicas.values()), return_exceptions=True
        )
        found: list[Capabilities] = []
        silent: list[str] = []
        for answer in answers:
            if isinstance(answer, Capabilities):
                found.append(answer)
            elif isinstance(answer, ReplicaAwayError):
                silent.append(str(answer))
            else:
                raise answer
        if not found:
            raise EngineUnavailableError(
                f"no {self._what} server answers ({'; '.join(silent)}): {self._hint}"
            )
        for cause in silent:
            logger.warning("%s server does not answer, going on without it: %s", self._what, cause)
        return common_capabilities(found)


def common_capabilities(found: Sequence[Capabilities]) -> Capabilities:
    """What all of several replicas can give."""
    lengths = [one.max_model_len for one in found if one.max_model_len is not None]
    vocab_sizes = [one.vocab_size for one in found if one.vocab_size is not None]
    kinds = {one.logprobs for one in found}
    return Capabilities(
        token_ids=all(one.token_ids for one in found),
        # Log-probs of two kinds in one dataset would be worse than none.
        logprobs=kinds.pop() if len(kinds) == 1 else "none",
        seeds=all(one.seeds for one in found),
        stop_strings=all(one.stop_strings for one in found),
        stop_token_ids=all(one.stop_token_ids for one in found),
        images=all(one.images for one in found),
        update_weights=all(one.update_weights for one in found),
        max_model_len=min(lengths, default=None),
        vocab_size=min(vocab_sizes, default=None),
        stop_token_ids_with_ignore_eos=all(one.stop_token_ids_with_ignore_eos for one in found),
    )
