"""SGLang servers: native `/generate`, ids in, ids and log-probs out.

Source: https://docs.sglang.io/basic_usage/native_api.html and sampling_params.html.
"""

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import orjson

from rollstream.aio import finish_despite_cancellation
from rollstream.engine.adapters import ServerAdapters, is_adapter
from rollstream.engine.base import MOST_TOP, Capabilities, TopScores
from rollstream.engine.checks import least
from rollstream.engine.http_server import AWAY_STATUSES, status_error
from rollstream.engine.kind import EngineKind, EngineOptions, of_servers
from rollstream.engine.load import SGLANG_METRICS, read_metrics, read_sglang_loads
from rollstream.engine.replica import ReplicaRequest, Weights, WeightsLostError
from rollstream.engine.servers import (
    SERVER_KWARGS,
    FinishType,
    ServerEngine,
    ServerReplica,
    broken_reply,
    check_sampled,
    check_scores,
    decode_reply,
    model_names,
    weight_version,
)
from rollstream.engine.weight_channel import SentWeights, checkpoint_tensors, find_difference, transfer
from rollstream.errors import EngineError
from rollstream.sampling import bias_by_id, schema_text, server_sampling
from rollstream.trajectory import Completion, SamplingParams

ENGINE_KWARGS = SERVER_KWARGS

_PART_BYTES = 2**30
"""Of weights that are sent: a server receives a part whole before it loads it."""

_SCORE_TIMEOUT_S = 120.0
"""For log-probs of a few ids: a server may be busy, or compile for a new length."""


class SGLangReplica(ServerReplica):
    """One SGLang server.

    Log-probs are those of the distribution after the temperature and before top-p and top-k (SGLang's
    default), hence "processed".
    """

    def __init__(self, url: str, options: EngineOptions) -> None:
        routes = [("/metrics", lambda page: read_metrics(page, SGLANG_METRICS))]  # with --enable-metrics
        super().__init__(
            url, options, [*routes, *((path, read_sglang_loads) for path in ("/v1/loads", "/get_load"))]
        )
        self._loaded = ""
        """Folder of the weights of the last update: a server calls its model by that from then on."""
        self.adapters = ServerAdapters(self.name, "", self._tell)
        self._vocab_size = self._limits.vocab_size
        self._is_rollstream = False

    async def describe(self) -> Capabilities:
        ask = self._server.ask
        model, info = await ask("/get_model_info"), await ask("/get_server_info")
        max_model_len = info.get("context_length")
        if max_model_len is None:
            (card, *_) = (await ask("/v1/models")).get("data") or [{}]
            max_model_len = card.get("max_model_len")
            if not (model or info or card):
                raise EngineError(f"{self.name} has no /get_model_info: is it an SGLang server?")
        served = model.get("model_path") or info.get("model_path")
        if not self._loaded or not model_names(self._loaded) & model_names(str(served)):
            # A trainer's weights lie in a folder of theirs; the tokenizer stays where it was.
            self._check_served(served, info.get("served_model_name"), model.get("tokenizer_path"))
        self._vocab_size = least(model.get("vocab_size") or info.get("vocab_size"), self._limits.vocab_size)
        own = info.get("capabilities")  # of `rollstream serve`, whose engines differ
        self._is_rollstream = isinstance(own, dict)
        own = (
            own
            if isinstance(own, dict)
            else {"logprobs": "processed", "scores": True, "score_top_k": MOST_TOP}
        )
        kind = own.get("logprobs")
        has_tokenizer = not info.get("skip_tokenizer_init")
        return Capabilities(
            token_ids=True,
            logprobs=kind if kind in ("raw", "processed", "none") else "processed",
            # Without --enable-deterministic-inference seeds are silently ignored.
            seeds=bool(info.get("enable_deterministic_inference")),
            # Without its tokenizer a server cannot match stop strings.
            stop_strings=has_tokenizer,
            stop_token_ids=True,
            # A server of a text model takes images without a word and ignores them.
            images=bool(model.get("has_image_understanding")),
            update_weights=True,
            max_model_len=max_model_len,
            vocab_size=self._vocab_size,
            # SGLang looks at stop_token_ids only where it looks at the end token.
            stop_token_ids_with_ignore_eos=False,
            extra_sampling=tuple(own.get("extra_sampling", ()))
            if self._is_rollstream
            else server_sampling(has_tokenizer=has_tokenizer),
            scores=bool(own.get("scores")),
            score_top_k=int(own.get("score_top_k") or 0),
            adapters=int(info.get("max_loras_per_batch") or 0) if info.get("enable_lora") else 0,
        )

    async def generate(self, request: ReplicaRequest) -> Completion:
        return await self.adapters.answer(request.weights, lambda name: self._ask(request, name))

    async def _ask(self, request: ReplicaRequest, adapter: str | None) -> Completion:
        ids, images = request.prompt_ids, check_images(request.images)
        sent = collapse_images(ids, self._limits.image_token_id, len(images)) if images else ids
        payload = await self._server.post(
            "/generate",
            request_body(sent, request.sampling, request.rid, images, adapter),
            is_healthy=self._health.ask,
            wanted=lambda: not request.aborted,
        )
        return read_reply(
            self.name,
            payload,
            request.sampling,
            rid=request.rid,
            vocab_size=self._vocab_size,
            image_prompt_tokens=len(ids) if images else None,
            ends_are_seen=self._is_rollstream,
        )

    async def score(self, ids: list[int], start: int = 1, top_k: int = 0) -> TopScores:
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},  # at least one token is sampled
            "return_logprob": True,
            "logprob_start_len": start - 1,  # that one has none
            **({"top_logprobs_num": top_k} if top_k else {}),
            **adapter_param(await self.adapters.name()),
        }
        payload = await self._tell("/generate", body, timeout_s=_SCORE_TIMEOUT_S)
        meta = decode_reply(self.name, _SCORES, payload).meta_info
        values = [entry.logprob for entry in meta.input_token_logprobs or []]
        if values and values[0] is None:
            del values[0]
        places = (meta.input_top_logprobs or [])[1:]
        top = [[(entry.token_id, entry.logprob) for entry in place or ()] for place in places]
        return check_scores(self.name, values, top, len(ids) - start, top_k)

    async def abort(self, rid: str) -> bool:
        await self._tell_abort("/abort_request", {"rid": rid})
        return True

    async def health(self) -> bool:
        """SGLang's `/health` generates a token. A router's may only say that the router runs; then its
        `/readiness`, which SGLang does not have, says whether there are servers behind it.
        """
        if await self._server.answers("/health") != 200:
            return False
        return await self._server.answers("/readiness") not in (None, *AWAY_STATUSES)

    async def update_weights(self, source: str, version: int) -> None:
        if is_adapter(source):
            await self.adapters.update(Weights(source, version))
            return
        if isinstance(source, SentWeights):
            await finish_despite_cancellation(self._receive_weights(source, version))
        else:
            where = {"model_path": source, "weight_version": str(version)}
            await self._tell("/update_weights_from_disk", where)
            self._loaded = source
        said = (await self._server.ask("/get_model_info")).get("weight_version")
        if weight_version(said) != version:
            # The version of a token is what the server says with it.
            raise WeightsLostError(
                f"{self.name} has loaded {source}, but says weight version {said!r} and not {version}: "
                "this SGLang is too old to tell which weights a token is from"
            )
        await self.adapters.reset()

    async def _receive_weights(self, weights: SentWeights, version: int) -> None:
        """Sends weights as the field's trainers do; they are compared with the model's folder, if that is here."""
        listed, folder = weights.listed(), Path(self._model_path or "")
        if (own := checkpoint_tensors(folder) if self._model_path else {}) and (
            problem := find_difference(listed, own, tied=self._limits.tied_embeddings)
        ):
            raise EngineError(f"{self.name} does not take {weights}: {problem}")
        info = await self._server.ask("/get_server_info")
        workers, name = int(info.get("tp_size") or 1), f"rollstream-{secrets.token_hex(4)}"
        if (info.get("pp_size") or 1) > 1:
            raise EngineError(f"{self.name}: an SGLang with pipeline stages gives several of them one place")
        group = {"world_size": workers + 1, "rank_offset": 1, "backend": weights.transport}

        async def meet(address: str, port: int) -> None:
            where = {"master_address": address, "master_port": port}
            await self._tell("/init_weights_update_group", {"group_name": name, **group, **where})

        # As torch's `_new_process_group_helper` has it, which SGLang calls.
        prefixes = (name, f"{name}/", "cpu/" if weights.transport == "gloo" else "cuda/")
        timeout = self._kwargs["update_timeout"]
        async with transfer(weights, self.name, workers, meet, timeout=timeout, prefixes=prefixes) as send:
            try:
                for names in (parts := weights.parts(_PART_BYTES)):
                    last = {"weight_version": str(version)} if names is parts[-1] else {}
                    part = {
                        "group_name": name,
                        "names": names,
                        "dtypes": [listed[each][0] for each in names],
                        "shapes": [listed[each][1] for each in names],
                        "flush_cache": bool(last),
                        **last,
                    }
                    await send(names, self._tell("/update_weights_from_distributed", part))
            except EngineError as error:
                raise WeightsLostError(f"{error} (until an update goes well)") from error
            finally:
                with contextlib.suppress(EngineError):
                    await self._tell("/destroy_weights_update_group", {"group_name": name})


class SGLangEngine(ServerEngine):
    """A pool of SGLang servers of the same model."""


KIND = SGLangEngine.kind = SGLangReplica.kind = EngineKind(
    "sglang",
    of_servers(SGLangEngine),
    ENGINE_KWARGS,
    launches=("sglang", "rollstream"),
    make_replica=SGLangReplica,
)


# The wire: request bodies out, completions or errors in. No I/O.


class _FinishReason(msgspec.Struct):
    type: FinishType
    message: str | None = None
    status_code: int | None = None


class _TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, id, text or null]`. Hundreds per reply: without gc, and without the text."""

    logprob: float
    token_id: int


class _InputLogprob(msgspec.Struct, array_like=True, gc=False):
    logprob: float | None


class _MetaInfo(msgspec.Struct):
    finish_reason: _FinishReason
    id: str | None = None
    output_token_logprobs: list[_TokenLogprob] | None = None
    cached_tokens: int = 0
    prompt_tokens: int | None = None
    weight_version: Any = None
    """Of the weights when the request ended."""
    weight_versions: list[tuple[int, int]] | None = None
    """Run-length encoded `(start, version)`: `rollstream serve` says it where there are several."""


class _SGLangReply(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


class _InputMeta(msgspec.Struct):
    input_token_logprobs: list[_InputLogprob] | None = None
    input_top_logprobs: list[list[_TokenLogprob] | None] | None = None


class _Scored(msgspec.Struct):
    meta_info: _InputMeta


_REPLY = msgspec.json.Decoder(_SGLangReply)
_SCORES = msgspec.json.Decoder(_Scored)


def check_images(images: Sequence[object]) -> list[str]:
    """The images of a request as they go over the wire.

    Raises:
        EngineError: one is no `data:` URL. A server takes other texts for a path or an address of its own.
    """
    urls = [image for image in images if isinstance(image, str) and image.startswith("data:image/")]
    if len(urls) != len(images):
        raise EngineError("engine 'sglang' takes images as data: URLs")
    return urls


def request_body(
    prompt_ids: list[int],
    sampling: SamplingParams,
    rid: str,
    images: Sequence[str] = (),
    adapter: str | None = None,
) -> bytes:
    """The body of a `/generate` request that the server knows by `rid`.

    `images` are `data:` URLs, in the order of their placeholders in `prompt_ids`.
    """
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        **extra_params(sampling.extra),
    }
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    for name in ("stop", "stop_token_ids", "ignore_eos"):
        if value := getattr(sampling, name):
            params[name] = value
    body = {
        "rid": rid,
        "input_ids": prompt_ids,
        "sampling_params": params,
        "return_logprob": sampling.logprobs,
        "stream": False,
        **adapter_param(adapter),
    }
    if images:
        body["image_data"] = images
    return orjson.dumps(body)


def adapter_param(adapter: str | None) -> dict[str, str]:
    """The part of a body that names an adapter, if there is one."""
    return {} if adapter is None else {"lora_path": adapter}


def extra_params(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Further sampling parameters by SGLang's names."""
    names = {"grammar": "ebnf", "min_tokens": "min_new_tokens"}
    params = {names.get(name, name): value for name, value in extra.items()}
    if "json_schema" in params:
        params["json_schema"] = schema_text(params["json_schema"])
    if "logit_bias" in params:
        params["logit_bias"] = bias_by_id(params["logit_bias"])
    return params


def collapse_images(prompt_ids: list[int], image_token_id: int | None, images: int) -> list[int]:
    """Prompt ids with one placeholder for each image, as a server wants them.

    A server runs its own image processor and writes each placeholder as often as the image has tokens. Given
    one per image it keeps all other ids; given runs of them, many versions turn the ids into text and back
    (https://github.com/sgl-project/sglang/pull/26555).

    Args:
        prompt_ids: with a run of placeholders for each image.
        image_token_id: the placeholder; None where the model's folder does not say.
        images: how many.

    Returns:
        `prompt_ids` as they are when their runs are not one for each image: images without anything between
        them, or whose tokens are interrupted. Then the server has to find its way.
    """
    if image_token_id is None:
        return prompt_ids
    collapsed = [
        token_id
        for token_id, before in zip(prompt_ids, [None, *prompt_ids], strict=False)
        if token_id != image_token_id or before != image_token_id
    ]
    return collapsed if collapsed.count(image_token_id) == images else prompt_ids


def read_reply(
    server: str,
    payload: bytes,
    sampling: SamplingParams,
    *,
    rid: str,
    vocab_size: int | None,
    image_prompt_tokens: int | None = None,
    ends_are_seen: bool = False,
) -> Completion:
    """Checks a `/generate` reply and makes a completion of it.

    Args:
        server: named in errors.
        payload: the body of an HTTP 200.
        sampling: what was asked for.
        rid: of the request that this must answer.
        vocab_size: ids must be below it; None where nobody said.
        image_prompt_tokens: tokens of a prompt with images; None for one without. A server processes images
            itself, and a prompt of another length is not the one that is stored.
        ends_are_seen: whether the server looks for an end also in the step in which it aborts. SGLang does
            not (`Req.check_finished` returns before): the last token may be an end token that nobody has
            seen, and what is generated after it would be of no use. It is left out then, to be sampled again.

    Raises:
        TransientEngineError: the reply is broken.
        EngineError: it says that the request can't be served, or that the prompt was another one.
    """
    reply = decode_reply(server, _REPLY, payload)
    meta, ids = reply.meta_info, reply.output_ids
    reason, entries = meta.finish_reason, meta.output_token_logprobs
    if meta.id is not None and meta.id != rid:
        raise broken_reply(server, f"it answers request {meta.id!r} instead of {rid!r}")
    if reason.status_code is not None:
        raise status_error(server, reason.status_code, str(reason.message))
    is_aborted = reason.type == "abort"
    if image_prompt_tokens not in (None, meta.prompt_tokens) and not is_aborted:
        raise EngineError(
            f"{server} made {meta.prompt_tokens} tokens of a prompt with images that has "
            f"{image_prompt_tokens}: its image processor has other settings than that of "
            "actor_rollout_ref.model.path, or this SGLang tokenizes such prompts again "
            "(SGLANG_MM_AVOID_RETOKENIZE)"
        )
    if is_aborted and not ids and not entries:
        ids, entries = [], []  # aborted while it was queued: then a server leaves out what was asked for, too
    logprobs: list[float] | None = None
    if sampling.logprobs:
        if entries is None:
            raise broken_reply(server, "it has no log-probs, which were asked for")
        logprobs = [entry.logprob for entry in entries]
        sampled = [entry.token_id for entry in entries]
        if ids is not None and ids != sampled:
            raise broken_reply(server, f"{len(ids)} ids do not match {len(sampled)} log-probs")
        ids = sampled
    if ids is None:
        raise broken_reply(server, "it has no output_ids; this SGLang gives ids only with log-probs")
    check_sampled(server, ids, logprobs, sampling, vocab_size)
    versions = meta.weight_versions or [(0, weight_version(meta.weight_version))]
    starts = [start for start, _ in versions]
    if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= max(1, len(ids)):
        raise broken_reply(server, f"its weight versions are not those of {len(ids)} tokens")
    if is_aborted and ids and not ends_are_seen and not sampling.ignore_eos:
        ids, logprobs = ids[:-1], logprobs and logprobs[:-1]
        versions = [run for run in versions if run[0] < max(1, len(ids))]
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=reason.type,
        policy_versions=versions,
        cached_prompt_tokens=meta.cached_tokens,
    )
