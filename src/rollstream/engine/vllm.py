"""vLLM servers: ids in, ids and log-probs out.

A server has one of two routes, or both:

- `/inference/v1/generate` (with `--enable-scale-out`): ids in, ids out, with the weights that sampled each;
- `/v1/completions`: OpenAI's, which takes ids as the prompt and gives them with `return_token_ids`.

Source: `vllm/entrypoints/scale_out/token_in_token_out/protocol.py` and
`vllm/entrypoints/openai/completion/protocol.py` of vLLM 0.32; https://docs.vllm.ai.
"""

import logging
import math
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import orjson

from rollstream.aio import finish_despite_cancellation
from rollstream.engine.adapters import ServerAdapters, is_adapter
from rollstream.engine.base import Capabilities, TopScores
from rollstream.engine.checks import model_limits
from rollstream.engine.kind import EngineKind, EngineOptions, of_servers
from rollstream.engine.load import ASK_TIMEOUT_S, VLLM_METRICS, read_metrics
from rollstream.engine.replica import ReplicaRequest, ReplicaUnavailableError, Weights, WeightsLostError
from rollstream.engine.servers import (
    ABORT_TIMEOUT_S,
    SERVER_KWARGS,
    FinishType,
    ServerEngine,
    ServerReplica,
    broken_reply,
    card_names,
    check_sampled,
    check_scores,
    decode_reply,
    model_names,
    weight_version,
)
from rollstream.engine.weight_channel import Send, SentWeights, transfer
from rollstream.errors import EngineError, TransientEngineError
from rollstream.sampling import bias_by_id, schema_text, server_sampling
from rollstream.trajectory import Completion, LogprobKind, SamplingParams

_LOG = logging.getLogger(__name__)

ENGINE_KWARGS: dict[str, Any] = {
    **SERVER_KWARGS,
    "probe_timeout": 120.0,  # seconds for the token sampled at start: a server may compile, or be busy, until then
}

_ABORT = "/inference/v1/abort_requests"
"""Comes with the generate route. `/abort_requests`, of development servers, aborts everything when it is
given no request: that one is not asked whether it is there."""

Route = Literal["/inference/v1/generate", "/v1/completions"]
GENERATE: Route = "/inference/v1/generate"
COMPLETIONS: Route = "/v1/completions"

_UNKNOWN_LOGPROB = -9999.0
"""What a server writes for a log-prob that is minus infinity, not a number, or not there."""

_SEND = """weights that are sent need a server with --weight-transfer-config '{"backend": "rollstream"}'"""

_MOST_TOP = 20
"""vLLM's own `--max-logprobs`; no route says what a server has."""

_PROBE_LOGPROBS = 5
"""Log-probs asked for at start: more than one, and within `--max-logprobs` (20 by default)."""


class VLLMReplica(ServerReplica):
    """One vLLM server."""

    def __init__(self, url: str, options: EngineOptions) -> None:
        super().__init__(url, options, [("/metrics", lambda page: read_metrics(page, VLLM_METRICS))])
        self._route: Route = COMPLETIONS
        self._abort_path: str | None = None
        self._is_dev = False
        self._model = self._root = ""
        """The model's name, and its folder on the server's disk."""
        self._capabilities: Capabilities | None = None
        """What it said last."""
        self.adapters = ServerAdapters(self.name, "/v1", self._tell)
        self._paused_by_us = False
        """Since an update that failed. Until one goes well nothing can be sampled there."""
        self._keeps_output_layer = False
        """A reload from a folder leaves it as it is."""

    async def describe(self) -> Capabilities:
        """See `Replica.describe`; while a pause of our own lasts, what the server said before it."""
        max_model_len = await self._choose_model()
        self._is_dev = bool(await self._server.ask("/weight_info"))
        if not await self._is_paused():
            self._paused_by_us = False  # it was ended by somebody else, or the server was started anew
        elif self._paused_by_us and self._capabilities is not None:
            return self._capabilities
        else:
            raise ReplicaUnavailableError(
                f"{self.name} is paused (POST /resume ends that; where a trainer was lost in an update, start it again)"
            )
        try:
            # An abort of no request does nothing, and its route is there where the generate route is.
            # 403 without --enable-scale-out, 404 in older versions.
            if await self._takes(_ABORT, {"request_ids": []}, timeout_s=ABORT_TIMEOUT_S) is not None:
                self._route, self._abort_path = GENERATE, _ABORT
            else:
                self._route, self._abort_path = COMPLETIONS, "/abort_requests" if self._is_dev else None
            logprobs, stop_strings = await self._probe()
        except TransientEngineError as error:
            raise ReplicaUnavailableError(str(error)) from error
        is_receiver, self._keeps_output_layer = await self._ask_of_weights()
        self._capabilities = Capabilities(
            token_ids=True,
            logprobs=logprobs,
            seeds=True,
            stop_strings=stop_strings,
            stop_token_ids=True,
            images=False,
            # Only the generate route says which weights sampled a token.
            update_weights=self._is_dev
            and self._route == GENERATE
            and (is_receiver or not self._keeps_output_layer),
            max_model_len=max_model_len,
            vocab_size=self._limits.vocab_size,
            extra_sampling=server_sampling(has_tokenizer=stop_strings),
            scores=True,
            score_top_k=_MOST_TOP,
            adapters=await self._adapters_at_once(),
        )
        return self._capabilities

    async def generate(self, request: ReplicaRequest) -> Completion:
        return await self.adapters.answer(
            request.weights, lambda name: self._ask(request, name or self._model)
        )

    async def _ask(self, request: ReplicaRequest, model: str) -> Completion:
        route = self._route  # the one of now: a server that was restarted may have another
        body = request_body(route, request.prompt_ids, request.sampling, request.rid, model)
        try:
            payload = await self._server.post(
                route, orjson.dumps(body), is_healthy=self._health.ask, wanted=lambda: not request.aborted
            )
            return read_reply(
                self.name,
                payload,
                request.sampling,
                prompt_tokens=len(request.prompt_ids),
                vocab_size=self._limits.vocab_size,
            )
        except TransientEngineError as error:
            # A server whose engine died answers 500.
            if await self._health.ask():
                raise
            raise ReplicaUnavailableError(f"{error}, and it is not healthy") from error

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        model = await self.adapters.name() or self._model
        body = request_body(
            COMPLETIONS, ids, SamplingParams(1, logprobs=False), f"score-{secrets.token_hex(4)}", model
        )
        body["prompt_logprobs"] = top_k
        payload = await self._tell(COMPLETIONS, body, timeout_s=self._kwargs["probe_timeout"])
        choices = decode_reply(self.name, _SCORES, payload).choices
        places = [place or {} for place in (choices[0].prompt_logprobs if choices else [])]
        given = [place.get(token) for place, token in zip(places, ids, strict=False)]
        values = [None if one is None or one.logprob <= _UNKNOWN_LOGPROB else one.logprob for one in given]
        # The given id stands there besides, with its rank.
        ranked = [
            sorted((one.rank, token, one.logprob) for token, one in place.items() if one.rank <= top_k)
            for place in places
        ]
        top = [[pair[1:] for pair in place[:top_k]] for place in ranked]
        return check_scores(self.name, values[start:], top[start:], len(ids) - start, top_k)

    async def abort(self, rid: str) -> bool:
        if self._abort_path is None:
            return False
        await self._tell_abort(self._abort_path, {"request_ids": [server_request_id(self._route, rid)]})
        return True

    async def health(self) -> bool:
        if await self._server.answers("/health") != 200:
            return False
        try:
            return not await self._is_paused()
        except EngineError:
            return False

    async def update_weights(self, source: str, version: int) -> None:
        """Loads weights from a folder that the server sees, or sends it them; requests in flight go on with those.

        An adapter is loaded beside what there is, and requests in flight keep theirs. For whole weights the
        server is paused meanwhile, and stays paused when it fails: without its old weights and without
        the new ones it would die at the next request. Another update may mend it. Cancelling this takes
        effect when the server has loaded, or has not.
        """
        if self._capabilities is None:
            await self.describe()  # weights of ours are nothing for a server of another model
        if isinstance(source, SentWeights):
            await finish_despite_cancellation(self._receive_weights(source, version))
        elif is_adapter(source):
            await finish_despite_cancellation(self.adapters.update(Weights(source, version)))
            return
        elif self._keeps_output_layer:
            raise EngineError(f"{self.name} would keep the output layer that it has: {_SEND}")
        else:
            reload = {
                "method": "reload_weights",
                "kwargs": {"weights_path": source},
                "timeout": self._kwargs["update_timeout"],
            }
            load = partial(self._tell, "/collective_rpc", reload)
            await finish_despite_cancellation(self._change_weights(load, version))
        await self.adapters.reset()

    async def _receive_weights(self, weights: SentWeights, version: int) -> None:
        """Nothing is lost before the server is paused: tensors are compared, and its workers meet this process."""
        init = "/init_weight_transfer_engine"
        timeout = self._kwargs["update_timeout"]
        announced = {"tensors": weights.listed(), "transport": weights.transport, "timeout": timeout}
        try:
            await self._tell(init, {"init_info": announced})
        except TransientEngineError as error:  # it answers 500, whatever it does not like
            hint = f" ({_SEND})" if re.search("not configured|Invalid init_info", str(error)) else ""
            raise EngineError(f"{_worker_words(error)} ({weights}){hint}") from error
        workers = int((await self._server.ask("/get_world_size"))["world_size"])

        async def meet(address: str, port: int) -> None:
            where = {"address": address, "port": port, "workers": workers}
            await self._tell(init, {"init_info": announced | where})

        async with transfer(weights, self.name, workers, meet, timeout=timeout) as send:
            await self._change_weights(partial(self._load_sent, send, weights), version)

    async def _load_sent(self, send: Send, weights: SentWeights) -> None:
        try:
            await self._tell("/start_weight_update")
        except TransientEngineError:  # its trainer of before was lost after it had told this
            await self._tell("/finish_weight_update")
            await self._tell("/start_weight_update")
        names = [*weights.tensors]
        await send(names, self._tell("/update_weights", {"update_info": {"names": names}}))
        await self._tell("/finish_weight_update")

    async def _change_weights(self, load: Callable[[], Awaitable[object]], version: int) -> None:
        self._paused_by_us = True  # also when the answer is lost
        await self._tell("/pause?mode=keep")
        try:
            await load()
            # What is running is computed anew: its keys and values are those of the old weights.
            dropped = await self._tell("/reset_prefix_cache?reset_running_requests=true&reset_external=true")
            if b'"success":true' not in dropped.replace(b" ", b""):
                raise EngineError(f"{self.name} keeps its prefix cache of the old weights")
            await self._tell("/update_weight_version", {"new_version": str(version)})
            await self._tell("/resume")
            self._paused_by_us = False
        except EngineError as error:
            words = _worker_words(error)
            raise WeightsLostError(f"{words} (it stays paused until an update goes well)") from error

    async def _is_paused(self) -> bool:
        """Whether requests wait for somebody to end a pause. Only development servers have pauses."""
        if not self._is_dev:
            return False
        return bool((await self._server.ask("/is_paused")).get("is_paused"))

    async def _choose_model(self) -> int | None:
        """Chooses which of the server's models is meant; returns its longest sequence."""
        cards = (await self._server.ask("/v1/models")).get("data") or []
        if not cards:
            raise EngineError(f"{self.name}/v1/models names no model: is it a vLLM server?")
        wanted = model_names(self._model_path or "")
        chosen = next((card for card in cards if wanted & card_names(card)), cards[0])
        self._check_served(chosen.get("root"), chosen.get("id"))
        self._model, self._root = str(chosen.get("id")), str(chosen.get("root") or "")
        # The card of an adapter has no length: it is its base model's.
        lengths = [card.get("max_model_len") for card in (chosen, *cards)]
        return next((length for length in lengths if isinstance(length, int)), None)

    async def _ask_of_weights(self) -> tuple[bool, bool]:
        """Whether it can be sent weights, as far as that matters here, and whether a folder leaves its output layer.

        vLLM packs that on a CPU. A reload packs anew what the checkpoint has a tensor for, and of a model with tied
        embeddings it has none (`dispatch_cpu_unquantized_gemm`, `finalize_layerwise_processing` of vLLM 0.32).
        """
        # The server's own folder, where it is to be seen from here.
        folder = self._root if self._root and Path(self._root).is_dir() else self._model_path
        if not self._is_dev or not model_limits(folder).tied_embeddings:
            return False, False
        timeout = self._kwargs["probe_timeout"]  # the server looks through its machine for this
        status, payload = await self._server.get("/server_info?config_format=json", timeout_s=timeout)
        payload = payload.replace(b" ", b"")
        if status != 200 or b'"device_config":{"device":"cpu"' not in payload:
            return False, False
        if b'"weight_transfer_config":{"backend":"rollstream"' in payload:
            return True, True
        _LOG.warning(
            "%s cannot be given new weights: on a CPU vLLM keeps the old output layer of a model with tied "
            "embeddings (%s)",
            self.name,
            _SEND,
        )
        return False, True

    async def _adapters_at_once(self) -> int:
        """`--max-loras`: a request under one adapter more waits without a word until another one's have ended."""
        if await self._server.answers("/v1/load_lora_adapter") != 405:  # 404 where the route is not open
            return 0
        # Told once a request has been answered, the probe; not with --disable-log-stats.
        _, page = await self._server.get("/metrics", timeout_s=ASK_TIMEOUT_S)
        found = re.search(rb'^vllm:lora_requests_info\{.*max_lora="(\d+)"', page, re.MULTILINE)
        return int(found[1]) if found else 1

    async def _probe(self) -> tuple[LogprobKind | Literal["none"], bool]:
        """The distribution of the log-probs, which no route says, and whether stop texts are taken."""
        rid, timeout = f"probe-{secrets.token_hex(4)}", self._kwargs["probe_timeout"]
        sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=1)
        body = request_body(self._route, [0], sampling, rid, self._model)
        params = body["sampling_params"] if self._route == GENERATE else body
        params["logprobs"] = _PROBE_LOGPROBS
        payload = None
        # Without a tokenizer, a server refuses stop texts (--tokens-only), or takes them and never sees one
        # (--skip-tokenizer-init).
        detokenize = {"model": self._model, "tokens": [0]}
        if await self._takes("/detokenize", detokenize, timeout_s=timeout) is not None:
            params |= {"stop": ["no such text"], "detokenize": True}
            payload = await self._takes(self._route, body, timeout_s=timeout)
            del params["stop"], params["detokenize"]
        stop_strings = payload is not None
        if payload is None:
            payload = await self._tell(self._route, body, timeout_s=timeout)
        try:
            kind = read_probe(payload)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise EngineError(f"{self.name}{self._route} answers with something else: {error!r}") from error
        if kind == "none":
            _LOG.warning(
                "%s gives no log-probs, but something else (--logprobs-mode raw_logits or processed_logits?)",
                self.name,
            )
        return kind, stop_strings

    async def _takes(self, path: str, body: object, *, timeout_s: float) -> bytes | None:
        """The answer to something that a server may not have or may refuse; None if so."""
        try:
            return await self._tell(path, body, timeout_s=timeout_s)
        except (ReplicaUnavailableError, TransientEngineError):
            raise
        except EngineError as error:
            _LOG.info("%s does not take %s: %s", self.name, path, error)
            return None


class VLLMEngine(ServerEngine):
    """A pool of vLLM servers of the same model."""


KIND = VLLMEngine.kind = VLLMReplica.kind = EngineKind(
    "vllm", of_servers(VLLMEngine), ENGINE_KWARGS, launches=("vllm",), make_replica=VLLMReplica
)


# The wire: request bodies out, completions or errors in. No I/O.


class _VLLMTokenLogprob(msgspec.Struct, gc=False):
    """Hundreds per reply: without gc."""

    token_id: int
    logprob: float


class _Span(msgspec.Struct, gc=False):
    """Tokens `[start, end)` were sampled by the weights `version`."""

    version: str
    start: int
    end: int


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class _Logprobs(msgspec.Struct):
    content: list[_VLLMTokenLogprob] | None = None
    """Of the generate route."""
    token_logprobs: list[float] = []
    """Of the completions route."""


class _CompletionChoice(msgspec.Struct):
    finish_reason: FinishType
    token_ids: list[int]
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    """Of the generate route."""


class _VLLMReply(msgspec.Struct):
    choices: Annotated[list[_CompletionChoice], msgspec.Meta(min_length=1, max_length=1)]
    usage: _Usage | None = None


class _PromptLogprob(msgspec.Struct):
    logprob: float
    rank: int


class _ScoredChoice(msgspec.Struct):
    prompt_logprobs: list[dict[int, _PromptLogprob] | None]


class _VLLMScored(msgspec.Struct):
    choices: list[_ScoredChoice]


_REPLY = msgspec.json.Decoder(_VLLMReply)
_SCORES = msgspec.json.Decoder(_VLLMScored)


def _worker_words(error: EngineError) -> str:
    """An error of the server; where a worker failed, its words alone."""
    around = (
        r"Call to collective_rpc method failed: Worker failed with error '(.*?)', please check .*?root cause"
    )
    return re.sub(around, r"\1", str(error), flags=re.DOTALL)


def server_request_id(route: Route, rid: str) -> str:
    """The name that a server gives to the request `rid`: what its abort route wants."""
    return f"generate-tokens-{rid}" if route == GENERATE else f"cmpl-{rid}-0"


def request_body(
    route: Route, prompt_ids: list[int], sampling: SamplingParams, rid: str, model: str
) -> dict[str, Any]:
    """The body, to be sent as JSON, of a request that the server knows by `server_request_id(route, rid)`.

    Args:
        route: where it is posted to.
        prompt_ids: as they are: a server adds nothing to ids.
        sampling: how to sample.
        rid: ours.
        model: as the server calls it.
    """
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **extra_params(sampling.extra),
    }
    if sampling.logprobs:
        params["logprobs"] = 0  # of the sampled token, and no other
    if sampling.seed is not None:
        params["seed"] = sampling.seed
    if sampling.stop:
        params["stop"] = sampling.stop
        params["skip_special_tokens"] = False  # stop texts may have them
    for name in ("stop_token_ids", "ignore_eos"):
        if value := getattr(sampling, name):
            params[name] = value
    if route == GENERATE:
        params["detokenize"] = bool(sampling.stop)
        return {"request_id": rid, "model": model, "token_ids": prompt_ids, "sampling_params": params}
    return {
        # What is not said here, a server takes from the model's generation_config.json.
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "min_p": 0.0,
        **params,
        "request_id": rid,
        "model": model,
        "prompt": prompt_ids,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,  # no text of tokens: what is no UTF-8 has none
    }


def extra_params(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Further sampling parameters by vLLM's names."""
    names = {"grammar": "grammar", "json_schema": "json", "regex": "regex"}
    params = {name: value for name, value in extra.items() if name not in names}
    structured = {own: extra[name] for name, own in names.items() if name in extra}
    if "json" in structured:
        structured["json"] = schema_text(structured["json"])
    if structured:
        params["structured_outputs"] = structured
    if "logit_bias" in params:
        params["logit_bias"] = bias_by_id(params["logit_bias"])
    return params


def read_reply(
    server: str,
    payload: bytes,
    sampling: SamplingParams,
    *,
    prompt_tokens: int,
    vocab_size: int | None,
) -> Completion:
    """Checks the reply of either route and makes a completion of it.

    Args:
        server: named in errors.
        payload: the body of an HTTP 200.
        sampling: what was asked for.
        prompt_tokens: of the request.
        vocab_size: ids must be below it; None where nobody said.

    Raises:
        TransientEngineError: the reply is broken.
    """
    reply = decode_reply(server, _REPLY, payload)
    (choice,), usage = reply.choices, reply.usage or _Usage()
    if usage.prompt_tokens not in (None, prompt_tokens):
        raise broken_reply(server, f"it is about {usage.prompt_tokens} prompt tokens, not {prompt_tokens}")
    ids = choice.token_ids
    logprobs: list[float] | None = None
    if sampling.logprobs:
        given = choice.logprobs or _Logprobs()
        entries = given.content
        logprobs = given.token_logprobs if entries is None else [entry.logprob for entry in entries]
        sampled = ids if entries is None else [entry.token_id for entry in entries]
        if len(logprobs) != len(ids) or sampled != ids:
            raise broken_reply(server, f"{len(ids)} ids do not match {len(logprobs)} log-probs")
        if min(logprobs, default=0.0) <= _UNKNOWN_LOGPROB:
            raise broken_reply(server, "it lacks log-probs")
    check_sampled(server, ids, logprobs, sampling, vocab_size)
    details = usage.prompt_tokens_details or _CachedTokens()
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        policy_versions=_policy_versions(server, choice.weight_versions, len(ids)),
        cached_prompt_tokens=details.cached_tokens or 0,
    )


def read_probe(payload: bytes) -> LogprobKind | Literal["none"]:
    """The distribution that the log-probs in a probe's reply are of.

    The probe asked for the best token alone (`top_k` 1) and for the log-probs of several. In the distribution
    that is sampled from, the others have probability 0, and in the model's own they don't. Logits
    (`--logprobs-mode raw_logits`) are no logarithms of probabilities: they do not sum to 1 or less.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is no reply to a probe.
    """
    logprobs = orjson.loads(payload)["choices"][0]["logprobs"]
    values: list[float] = []
    if logprobs.get("content"):
        values = [float(top["logprob"]) for top in logprobs["content"][0]["top_logprobs"]]
    elif logprobs.get("top_logprobs"):
        values = [float(value) for value in logprobs["top_logprobs"][0].values()]
    known = [value for value in values if value > _UNKNOWN_LOGPROB]
    if not known or max(known) > 80 or sum(map(math.exp, known)) > 1.0001:  # exp(80) still is a float
        return "none"
    if len(known) == len(values) > 1:
        return "raw"
    return "processed" if abs(known[0]) < 1e-4 and len(known) == 1 else "none"


def _policy_versions(server: str, spans: list[_Span] | None, tokens: int) -> list[tuple[int, int]]:
    if not spans:
        return [(0, 0)]
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens:
        raise broken_reply(server, f"its weight versions are not those of {tokens} tokens")
    versions: list[tuple[int, int]] = []
    for span in spans:
        version = weight_version(span.version)
        if not versions or versions[-1][1] != version:
            versions.append((span.start, version))
    return versions
