"""Engines whose replicas are servers that take and give token ids: the parts that SGLang and vLLM share."""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, ClassVar, Literal, TypeVar

import msgspec

from rollstream.aio import SharedCheck
from rollstream.engine.base import EngineLoad, TopScores
from rollstream.engine.checks import ids_fit, least, logprobs_fit, model_limits
from rollstream.engine.http_server import CONNECTION_KWARGS, HttpServer
from rollstream.engine.kind import EngineKind, EngineOptions
from rollstream.engine.load import ASK_TIMEOUT_S
from rollstream.engine.pool import POOL_KWARGS, PoolEngine
from rollstream.engine.replica import ReplicaUnavailableError
from rollstream.errors import ConfigError, EngineError, RollstreamError, TransientEngineError
from rollstream.trajectory import SamplingParams

logger = logging.getLogger(__name__)

SERVER_KWARGS: dict[str, Any] = {
    **CONNECTION_KWARGS,
    **POOL_KWARGS,
    "check_model": True,  # a server of a model with another name is an error; else a warning
    "update_timeout": 600.0,  # seconds for a server to load other weights
}

ABORT_TIMEOUT_S = 10.0
"""An abort is a courtesy to the server: not worth waiting longer."""

FinishType = Literal["stop", "length", "abort"]
"""An abort is one whoever asked for it: another client, a trainer that pauses the server, the server itself."""

_Reply = TypeVar("_Reply")


class ServerReplica:
    """One server of the model that `options` name: how it is reached, what it may serve, how busy it is.

    `loads` are routes where it may say how busy it is, the first that does, and what reads their bodies.
    """

    kind: ClassVar[EngineKind]

    def __init__(
        self,
        url: str,
        options: EngineOptions,
        loads: Iterable[tuple[str, Callable[[bytes], EngineLoad | None]]],
    ) -> None:
        self._kwargs = self.kind.read_kwargs(options.engine_kwargs)
        self._server = HttpServer(url, self._kwargs)
        self._health = SharedCheck(self.health)
        self._model_path = options.model_path
        self._limits = model_limits(options.model_path)
        """What the model's folder says and servers don't."""
        self._loads = dict(loads)

    @property
    def name(self) -> str:
        return self._server.url

    async def health(self) -> bool:
        raise NotImplementedError

    async def load(self) -> EngineLoad | None:
        """How busy the server is, as far as it says."""
        for path, read in list(self._loads.items()):
            try:
                status, body = await self._server.get(path, timeout_s=ASK_TIMEOUT_S)
            except ReplicaUnavailableError:
                return None
            if status == 200 and (load := read(body)) is not None:
                return load
            if status in (404, 405):  # asked once
                self._loads.pop(path, None)
        return None

    async def close(self) -> None:
        await self._health.close()
        await self._server.close()

    def _check_served(self, *names: object) -> None:
        """Refuses a server that serves none of what is meant; see `check_served_model`."""
        check_served_model(self.name, names, self._model_path, strict=self._kwargs["check_model"])

    async def _tell(self, path: str, body: object = None, *, timeout_s: float | None = None) -> bytes:
        payload = await self._server.tell(path, body, timeout_s=timeout_s or self._kwargs["update_timeout"])
        if b'"success":false' in payload.replace(b" ", b""):  # SGLang's way to refuse
            raise EngineError(f"{self.name}{path} fails: {payload[:500].decode(errors='replace')}")
        return payload

    async def _tell_abort(self, path: str, body: object) -> None:
        try:
            await self._tell(path, body, timeout_s=ABORT_TIMEOUT_S)
        except RollstreamError as error:
            # A server that cannot be reached runs nothing that could be aborted.
            logger.debug("could not abort %s on %s: %s", body, self.name, error)


class ServerEngine(PoolEngine):
    """A pool of servers of the same model, given by their URLs.

    Args:
        server_urls: base URLs, `http://host:port`.
        model_path: the model that the caller means. Where it is a folder, it says what the servers don't
            (vocabulary size, longest sequence).
        max_model_len: prompt plus response tokens at most; None takes the servers' own limit.
        engine_kwargs: see the `KIND` of the engine.
    """

    kind: ClassVar[EngineKind]

    def __init__(
        self,
        server_urls: Sequence[str],
        *,
        model_path: str | None = None,
        max_model_len: int | None = None,
        engine_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        kind = self.kind
        assert kind.make_replica is not None
        if not server_urls:
            raise ConfigError(f"engine {kind.name!r} needs actor_rollout_ref.rollout.server_urls")
        options = EngineOptions(model_path, server_urls, max_model_len, engine_kwargs or {})
        super().__init__(
            [kind.make_replica(url, options) for url in server_urls],
            max_model_len=least(max_model_len, model_limits(model_path).max_model_len),
            what=kind.name,
            probe_after=kind.read_kwargs(options.engine_kwargs)["probe_after"],
        )


def model_names(path: str) -> set[str]:
    """The names of a model for somebody who has it elsewhere: its folder's name, its name on the hub.

    In Hugging Face's cache it is `models--Qwen--Qwen2.5/snapshots/HASH`.
    """
    parts = PurePath(path).parts
    return {*parts[-1:], *(part.rpartition("--")[2] for part in parts if part.startswith("models--"))}


def card_names(card: Mapping[str, Any]) -> set[str]:
    """The names of a model of `/v1/models`: by its server, and on its disk."""
    return set().union(*(model_names(str(card[key])) for key in ("id", "root") if card.get(key)))


def check_served_model(server: str, served: Iterable[object], wanted: str | None, *, strict: bool) -> None:
    """Refuses a server of another model.

    Only names are compared: the same folder may lie elsewhere on another machine.

    Args:
        server: named in the error.
        served: paths or names under which the server knows its model; empty ones say nothing.
        wanted: `actor_rollout_ref.model.path`; None takes any.
        strict: whether it is an error, or only a warning.

    Raises:
        EngineError: none of the names is the one that is wanted.
    """
    names = [str(name) for name in served if name]
    if not wanted or not names or any(model_names(name) & model_names(wanted) for name in names):
        return
    text = f"{server} serves {names[0]!r}, but actor_rollout_ref.model.path is {wanted!r}"
    if strict:
        raise EngineError(f"{text} (engine_kwargs.check_model=false takes it for the same)")
    logger.warning("%s", text)


# Of replies


def broken_reply(server: str, problem: str) -> TransientEngineError:
    """The error for an answer that cannot be right: another server, or the same one later, may do better."""
    return TransientEngineError(f"broken reply from {server}: {problem}")


def decode_reply(server: str, decoder: msgspec.json.Decoder[_Reply], payload: bytes) -> _Reply:
    """Reads a reply. Raises `TransientEngineError`."""
    try:
        return decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise broken_reply(server, f"it cannot be read: {error} ({len(payload)} bytes)") from error


def check_sampled(
    server: str,
    ids: list[int],
    logprobs: list[float] | None,
    sampling: SamplingParams,
    vocab_size: int | None,
) -> None:
    """Raises `TransientEngineError` for ids and log-probs that were not asked for, or that no model has."""
    if not ids_fit(ids, vocab_size):
        raise broken_reply(server, f"it has ids outside the vocabulary of {vocab_size} ids")
    if len(ids) > sampling.max_tokens:
        raise broken_reply(server, f"it has {len(ids)} tokens, more than max_tokens {sampling.max_tokens}")
    if logprobs is not None and not logprobs_fit(logprobs):
        raise broken_reply(server, "it has log-probs above 0")


def check_scores(
    server: str,
    logprobs: Sequence[float | None],
    top: Sequence[Sequence[tuple[int, float]]],
    count: int,
    top_k: int,
) -> TopScores:
    """Log-probs of `count` ids, NaN for none, and the `top_k` likeliest ids in their places.

    Raises:
        TransientEngineError: there are more or fewer.
    """
    if len(logprobs) != count:
        raise broken_reply(server, f"{count} ids do not match {len(logprobs)} log-probs")
    if top_k and [len(one) for one in top] != [top_k] * count:
        raise broken_reply(server, f"it has not {top_k} likeliest ids for each of {count}")
    ids, values = ([[pair[at] for pair in one] for one in top] for at in range(2))
    return TopScores([math.nan if value is None else value for value in logprobs], ids, values)  # type: ignore[arg-type]


def weight_version(value: object) -> int:
    """A server's weight version is free text, "default" until the first update: that is version 0."""
    try:
        return int(str(value))
    except ValueError:
        return 0
