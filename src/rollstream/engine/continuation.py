"""Generations that outlive a cut: new weights, a pause, an abort at the server.

The ids are the state: prompt ids and what was sampled so far are the prompt of the next piece, on any replica
and under any weights. So nothing that was paid for is thrown away, and every token keeps the log-prob and the
policy version it was sampled with. `PartialCompletion` is that state:

    waiting --> in the engine --> ended by itself, or aborted by its caller          --> answered
       ^             |
       +---- cut ----+  `continue`: with the tokens it has; `restart`: with none; `abort`: --> answered

An update closes the engine to new requests, aborts what is inside, waits until all of it has left, loads, and
opens again. So no request has tokens of two versions without a fresh prompt in between, and the log-probs of
every token are those of a forward pass under the version that it is stamped with. A pause, which a trainer asks
a server for, ends what is inside for its callers, and keeps the engine closed until it is ended.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from rollstream.aio import Backoff
from rollstream.engine.adapters import HoldsAdapters, is_adapter
from rollstream.engine.base import (
    Capabilities,
    ChatEngine,
    ChatPrompt,
    Engine,
    EngineLoad,
    HasReplicas,
    ReportsLoad,
    ScoresIds,
    TopScores,
)
from rollstream.engine.load import RequestMeter
from rollstream.engine.replica import INITIAL_WEIGHTS, Weights, WeightsLostError
from rollstream.engine.weight_probe import PROBE_IDS, ProbeScores, find_problem, read_probe
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError, TransientEngineError
from rollstream.trajectory import Completion, FinishReason, SamplingParams

_LOG = logging.getLogger(__name__)

OnUpdate = Literal["continue", "restart", "abort"]
"""Says what becomes of a generation that is cut off."""

_DRAIN_S = 60.0
"""For what is in the engine to end after an abort: a step of the model, or a round trip; more when the CPU is
taken. An engine that needs longer is not going to."""

_ABORT_AGAIN_S = 1.0
"""An abort that arrives while a request is on its way (from one replica to another) may miss it."""

_FIRST_PAUSE_S, _PAUSE_S_MAX = 0.05, 1.0
"""Before a request that was cut off without a new token is sent again: an engine that ends all it is given must
not be asked in a hot loop, and one that is back should be used soon."""

_NO_PROGRESS_MAX = 64
"""Cuts in a row without a new token: about a minute with the pauses."""


class PartialCompletion:
    """The tokens that a request has so far, and the next piece to ask for.

    Args:
        prompt_ids: of the request; not changed.
        sampling: of the request.
    """

    def __init__(self, prompt_ids: list[int], sampling: SamplingParams) -> None:
        self._prompt_ids, self._sampling = prompt_ids, sampling
        self.clear()

    def clear(self) -> None:
        """Forgets what there is: the request begins anew."""
        self._whole = Completion([], [] if self._sampling.logprobs else None, "abort", [])

    def __len__(self) -> int:
        """Sampled tokens so far."""
        return len(self._whole.token_ids)

    @property
    def can_go_on(self) -> bool:
        """Whether another piece can follow what there is, see `SamplingParams.can_be_continued`."""
        return not len(self) or self._sampling.can_be_continued

    @property
    def is_full(self) -> bool:
        """Whether it has all the tokens that were asked for."""
        return len(self) >= self._sampling.max_tokens

    @property
    def prompt_ids(self) -> list[int]:
        """Prompt of the next piece. The request's own list before the first token."""
        return self._prompt_ids + self._whole.token_ids if len(self) else self._prompt_ids

    @property
    def sampling(self) -> SamplingParams:
        """How to sample the next piece: what is left of `max_tokens`, and a seed of its own.

        A piece with the seed of the one before it would draw the same random numbers once more.
        """
        if not (count := len(self)):
            return self._sampling
        seed = self._sampling.seed
        if seed is not None:
            digest = hashlib.blake2b(f"{seed}:piece:{count}".encode(), digest_size=4).digest()
            seed = int.from_bytes(digest, "little") >> 1
        return replace(self._sampling, max_tokens=self._sampling.max_tokens - count, seed=seed)

    def add(self, piece: Completion) -> None:
        """Appends what an engine sampled.

        Raises:
            ValueError: log-probs were asked for, and there is not one for each id.
        """
        whole, start, count = self._whole, len(self), len(piece.token_ids)
        logprobs, versions = whole.logprobs, list(whole.policy_versions)
        if logprobs is not None:
            if len(piece.logprobs or []) != count:
                raise ValueError(f"{count} sampled ids came with {len(piece.logprobs or [])} log-probs")
            logprobs = logprobs + (piece.logprobs or [])
        for offset, version in piece.policy_versions:
            # A run without tokens, at the end, says nothing: the next piece begins there.
            if offset < count and (not versions or versions[-1][1] != version):
                versions.append((start + offset, version))
        # The prompt's; later pieces find the request's own tokens, too.
        cached = whole.cached_prompt_tokens if start else piece.cached_prompt_tokens
        self._whole = Completion(
            whole.token_ids + piece.token_ids, logprobs, "abort", versions, cached_prompt_tokens=cached
        )

    def finish(self, piece: Completion) -> Completion:
        """The whole, ended by `piece` and for its reason; `piece` itself when it is the only one."""
        if not len(self):
            return piece
        self.add(piece)
        return self.result(piece.finish_reason)

    def result(self, finish_reason: FinishReason) -> Completion:
        """The tokens so far as a completion."""
        versions = self._whole.policy_versions or [(0, 0)]
        return replace(self._whole, finish_reason=finish_reason, policy_versions=versions)


@dataclass(slots=True, eq=False)
class _Generation:
    request_id: str
    partial: PartialCompletion
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a reason to wait may have gone."""
    aborted: bool = False
    """By its caller, who wants what there is."""
    is_inside: bool = False
    """The engine has it, whether it works on it or queues it."""
    cut_by_update: bool = False
    """Aborted by an update, since it was last sent."""
    weights: int | None = None
    """The engine's when it was last sent, see `ContinuingEngine._weights`."""
    longest: int = 0
    """Tokens it has had at once: more than that is progress."""
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE_S, _PAUSE_S_MAX))
    """Counts cuts in a row without progress."""
    no_progress_since: float = 0.0


class ContinuingEngine:
    """Wraps an engine: `update_weights` may be called while requests are in flight.

    A cut is a completion with finish reason `abort` that the caller did not ask for. What becomes of its tokens
    is up to `on_update`:

    - `continue`: they stay, each with its log-prob and version; the request goes on after them. Requests that
      cannot be continued (`SamplingParams.can_be_continued`) begin anew. So do those with a seed, unless the cut
      was made to load new weights: the same seed and weights must give the same tokens.
    - `restart`: they are dropped and the request begins anew.
    - `abort`: the caller gets them, with finish reason `abort`. Without any, the request begins anew.

    This is about one generation: earlier turns of a rollout keep the tokens and versions that they have. What a
    request has is lost when the engine goes away (or fails) before its end: the error goes to the caller, who
    begins anew.

    Args:
        engine: what generates; started, updated and closed through this one.
        on_update: see above.
        check: refuses sampling by what it raises, before anything is generated.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_update: OnUpdate = "continue",
        check: Callable[[Capabilities, SamplingParams], None] = lambda *_: None,
    ) -> None:
        self.engine = engine
        """The one inside."""
        self.meter = RequestMeter()
        self._on_update = on_update
        self._check = check
        self._requests: dict[str, _Generation] = {}
        self._changed = asyncio.Event()
        """Set when the engine has become empty, or a pause has ended."""
        self._is_open = True
        self.paused = False
        self.inside = 0
        """Requests that the engine has, whether it works on them or queues them."""
        self._updating = asyncio.Lock()
        self._pins: dict[str, Weights] | None = None
        """The weights of each rollout, by the id of its requests; None: weights are not pinned."""
        self._newest = INITIAL_WEIGHTS
        """Of pinned ones."""
        self._proved: ProbeScores | None = None
        """By the weights of the last update."""
        self._closed = False
        self._progress_at = float("-inf")

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    async def start(self) -> None:
        await self.engine.start()

    async def generate(
        self,
        prompt_ids: list[int],
        sampling: SamplingParams,
        *,
        request_id: str,
        images: list[object] | None = None,
    ) -> Completion:
        """See `Engine.generate`; the completion may have several policy versions.

        Raises:
            TransientEngineError: also when the engine ends this request again and again without a token, and
                others go on; `EngineUnavailableError` when none goes on.
        """
        self._check(self.capabilities, sampling)
        return await self.meter.counted(self._generate(prompt_ids, sampling, request_id, images))

    async def _generate(
        self, prompt_ids: list[int], sampling: SamplingParams, request_id: str, images: list[object] | None
    ) -> Completion:
        partial = PartialCompletion(prompt_ids, sampling)
        request = self._requests[request_id] = _Generation(request_id, partial)
        try:
            while True:
                await self._wait(request, until=lambda: self._is_open and not self.paused)
                if self._closed:
                    raise EngineUnavailableError("the engine is closed")
                if request.aborted:
                    return partial.result("abort")
                piece = await self._send(request, images)
                if piece.finish_reason != "abort" or request.aborted:
                    return partial.finish(piece)
                if self._on_update == "abort" and (piece.token_ids or len(partial)):
                    return partial.finish(piece)
                is_longer = self._keep(request, piece)
                if partial.is_full:
                    return partial.result("length")
                if not (is_longer or request.cut_by_update):
                    await self._pause_without_progress(request)
        finally:
            if self._requests.get(request_id) is request:
                del self._requests[request_id]

    def pin_weights(self, versions: int) -> None:
        """From now on an update ends nothing: each rollout goes on under the adapter that it began with.

        Args:
            versions: that rollouts may be of at once, the newest included.

        Raises:
            ConfigError: the engine cannot answer under so many.
        """
        can = self.capabilities.adapters if isinstance(self.engine, HoldsAdapters) else 0
        if can < versions:
            raise ConfigError(
                f"weights='pinned' needs an engine that answers under {versions} LoRA adapters at once "
                f"(max_staleness + 1), and this one does so under {can}: vLLM by --max-loras, see docs/engines.md"
            )
        self._pins = {}

    @contextlib.contextmanager
    def pinned(self, request_id: str) -> Iterator[None]:
        """Inside it the requests of a rollout are answered under the weights of now, where weights are pinned.

        They have this id, or this one with a dot and a number behind it.
        """
        if (pins := self._pins) is None:
            yield
            return
        pins[request_id] = self._newest
        try:
            yield
        finally:
            del pins[request_id]

    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        """See `ChatEngine.chat`; goes to the engine as it is: one that speaks messages updates no weights."""
        if not isinstance(self.engine, ChatEngine):
            raise EngineError("this engine takes token ids: ask `generate`")
        answer = self.engine.chat(prompt, sampling, request_id=request_id)
        completion = await self.meter.counted(answer)
        if completion.usage is not None:
            self.meter.counts.tokens += completion.usage[1]
        return completion

    async def abort(self, request_id: str) -> None:
        """See `Engine.abort`; its `generate` returns what was sampled over all pieces."""
        request = self._requests.get(request_id)
        if request is not None:
            request.aborted = True
            request.wake.set()
        if request is None or request.is_inside:
            await self.engine.abort(request_id)

    async def pause(self) -> None:
        """Aborts what is in the engine, as the caller of each request would, and holds back what comes until `resume`.

        Returns when the engine is empty, or the pause has ended. Weights can be updated meanwhile.
        """
        self.paused = True
        await asyncio.gather(*(self.abort(request.request_id) for request in self._inside()))
        while self.paused and self.inside:
            self._changed.clear()
            await self._changed.wait()

    def resume(self) -> None:
        """Ends a pause."""
        self.paused = False
        self._wake_all()

    async def update_weights(self, source: str, version: int) -> None:
        """Loads other weights; one update at a time, in the order of the calls.

        Requests that arrive meanwhile wait. What a cancellation does while the engine loads depends on the engine.

        Raises:
            WeightsLostError: the engine has loaded something else, or does not say what.
            EngineError: the engine's, or it does not let go of its requests. The old weights stand then, and
                what was cut off goes on with them.
        """
        async with self._updating:
            if self._closed:
                raise EngineUnavailableError("the engine is closed")
            if self._pins is not None:
                await self._add_weights(self._pins, Weights(source, version))
                return
            try:
                await self.hold()
                await self.engine.update_weights(source, version)
                await self._prove(source)
                _LOG.info("weights of version %d, from %s", version, source)
            finally:
                self.release()

    async def hold(self) -> None:
        """Empties the engine, and keeps it so until `release`: requests wait, whoever it is that loads weights.

        Raises:
            EngineError: it does not let go of its requests.
        """
        self._is_open = False
        await self._drain()

    def release(self) -> None:
        """Ends a hold: what was cut off goes on."""
        self._is_open = True
        self._wake_all()

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        """See `ScoresIds.score`; not while weights change."""
        if not self.capabilities.scores or not isinstance(self.engine, ScoresIds):
            raise EngineError("this engine gives no log-probs of given ids")
        if top_k > self.capabilities.score_top_k:
            raise EngineError(f"this engine does not say which {top_k} ids are likeliest")
        async with self._updating:
            return await self.engine.score(ids, start, top_k)

    async def load(self) -> EngineLoad | None:
        """The engine's load, if it says it."""
        return await self.engine.load() if isinstance(self.engine, ReportsLoad) else None

    def replica_counts(self) -> tuple[int, int] | None:
        """The engine's replicas that take requests, and all, if it has any."""
        return self.engine.replica_counts() if isinstance(self.engine, HasReplicas) else None

    async def health(self) -> bool:
        return await self.engine.health()

    async def close(self) -> None:
        self._closed = True
        self._wake_all()
        await self.engine.close()

    def _inside(self) -> list[_Generation]:
        return [request for request in self._requests.values() if request.is_inside]

    def _weights(self) -> int | None:
        """A number that differs for other weights of an engine in this process; None of a server.

        It is their version, unless the engine counts every change: whoever owns the model may change its
        weights beside us, several times in one version.
        """
        return getattr(self.engine, "weight_changes", getattr(self.engine, "version", None))

    async def _send(self, request: _Generation, images: list[object] | None) -> Completion:
        """Asks the engine for the next piece. Nothing else can happen between the wait and the engine."""
        request.cut_by_update, request.weights = False, self._weights()
        request.is_inside = True
        self.inside += 1
        partial, name = request.partial, request.request_id
        pinned: dict[str, Any] = {}
        if (pins := self._pins) is not None:
            pinned["weights"] = pins.get(name) or pins.get(name.rpartition(".")[0], self._newest)
        try:
            piece = await self.engine.generate(
                partial.prompt_ids, partial.sampling, request_id=name, images=images, **pinned
            )
        finally:
            request.is_inside = False
            self.inside -= 1
            if not self.inside:
                self._changed.set()
        if piece.finish_reason != "abort":
            self._progress_at = asyncio.get_running_loop().time()
        return piece

    def _keep(self, request: _Generation, piece: Completion) -> bool:
        """Takes a piece that was cut off. Returns whether the request has more tokens than ever before."""
        partial = request.partial
        length = len(partial) + len(piece.token_ids)
        if self._on_update != "restart":
            partial.add(piece)
            # The same seed and weights must give the same tokens, whoever paused a server meanwhile.
            has_new_weights = request.cut_by_update or self._weights() != request.weights
            must_repeat = partial.sampling.seed is not None and not has_new_weights
            if must_repeat or not partial.can_go_on:
                partial.clear()
        if length <= request.longest:
            return False
        request.longest = length
        request.backoff.reset()
        self._progress_at = asyncio.get_running_loop().time()
        return True

    async def _pause_without_progress(self, request: _Generation) -> None:
        """Pauses; raises when the request was cut off too often in a row without a new token."""
        backoff = request.backoff
        cuts = backoff.failures + 1
        if cuts == 1:
            request.no_progress_since = asyncio.get_running_loop().time()
        elif cuts >= _NO_PROGRESS_MAX:
            problem = f"the engine ended request {request.request_id!r} {cuts} times without a token"
            if self._progress_at > request.no_progress_since:
                raise TransientEngineError(f"{problem}, while others go on")
            raise EngineUnavailableError(f"{problem}, and no other one has got any: is it paused?")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(backoff.pause()):
                await self._wait(request, until=lambda: False)

    async def _wait(self, request: _Generation, until: Callable[[], bool]) -> None:
        """Returns when `until` holds, the caller aborts, or the engine is closed."""
        while not (until() or request.aborted or self._closed):
            request.wake.clear()
            await request.wake.wait()

    async def _drain(self) -> None:
        """Aborts what is in the engine and returns when it has left it."""
        loop = asyncio.get_running_loop()
        give_up_at, again_at = loop.time() + _DRAIN_S, loop.time()
        while self.inside:
            if loop.time() >= give_up_at:
                raise EngineError(
                    f"{self.inside} requests did not end within {_DRAIN_S:g} s of their abort; "
                    "the old weights stay"
                )
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(give_up_at):
                    if loop.time() >= again_at:
                        inside = self._inside()
                        for request in inside:
                            request.cut_by_update = True
                        await asyncio.gather(*(self.engine.abort(request.request_id) for request in inside))
                        again_at = loop.time() + _ABORT_AGAIN_S
                    async with asyncio.timeout_at(again_at):
                        await self._changed.wait()
        if self._closed:
            raise EngineUnavailableError("the engine was closed while it was updated")

    async def _add_weights(self, pins: Mapping[str, Weights], weights: Weights) -> None:
        """Gives the engine an adapter for what begins from now on."""
        assert isinstance(self.engine, HoldsAdapters)
        if not is_adapter(weights.source):
            raise EngineError(
                f"weights='pinned' is for LoRA adapters, and {weights.source!r} is none that is seen here: whole "
                "weights would take the place of those that rollouts go on under"
            )
        if any(one.source == weights.source for one in pins.values()):
            raise EngineError(f"rollouts go on under {weights.source}: the next version needs its own folder")
        await self.engine.hold({*pins.values(), self._newest})
        await self.engine.update_weights(weights.source, weights.version)
        await self._prove(weights.source)
        self._newest = weights
        _LOG.info("adapter of version %d, from %s", weights.version, weights.source)

    async def _prove(self, source: str) -> None:
        """Compares the engine with what the trainer says of its weights. A pool has done so for each replica.

        Raises:
            WeightsLostError: it has loaded something else.
        """
        engine, trainer = self.engine, await asyncio.to_thread(read_probe, source)
        if trainer is None or isinstance(engine, HasReplicas):
            return
        if engine.capabilities.scores and isinstance(engine, ScoresIds):
            now = ProbeScores((await engine.score(list(PROBE_IDS))).logprobs, trainer)
            if (problem := find_problem(now, self._proved)) is not None:
                raise WeightsLostError(f"the engine has loaded {source}, but {problem}")
            self._proved = now

    def _wake_all(self) -> None:
        self._changed.set()
        for request in self._requests.values():
            request.wake.set()
