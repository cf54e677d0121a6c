"""SGLang's wire format: request bodies out, completions or errors in. No I/O.

Source: https://docs.sglang.io/basic_usage/native_api.html and sampling_params.html.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import orjson

from rollstream.engine.checks import ids_fit, logprobs_fit
from rollstream.engine.http_server import status_error
from rollstream.errors import EngineError, TransientEngineError
from rollstream.sampling import bias_by_id, schema_text
from rollstream.trajectory import Completion, FinishReason, SamplingParams


class _FinishReason(msgspec.Struct):
    type: str
    message: str | None = None
    status_code: int | None = None


class _TokenLogprob(msgspec.Struct, array_like=True, gc=False):
    """`[logprob, id, text or null]`. Hundreds per reply: without gc, and without the text."""

    logprob: float
    token_id: int


class _MetaInfo(msgspec.Struct):
    id: str | None = None
    finish_reason: _FinishReason | None = None
    output_token_logprobs: list[_TokenLogprob] | None = None
    cached_tokens: int = 0
    prompt_tokens: int | None = None
    weight_version: Any = None
    """Of the weights when the request ended."""
    weight_versions: list[tuple[int, int]] | None = None
    """Run-length encoded `(start, version)`: `rollstream serve` says it where there are several."""


class _Reply(msgspec.Struct):
    meta_info: _MetaInfo
    output_ids: list[int] | None = None


_REPLY = msgspec.json.Decoder(_Reply)
_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def check_images(images: list[object]) -> list[str]:
    """The images of a request as they go over the wire.

    Raises:
        EngineError: one is no `data:` URL. A server takes other texts for a path or an address of its own.
    """
    urls = [image for image in images if isinstance(image, str) and image.startswith("data:image/")]
    if len(urls) != len(images):
        raise EngineError(
            "engine 'sglang' takes images as data: URLs, as chat.images.encode_for_engine makes them"
        )
    return urls


def request_body(
    prompt_ids: list[int], sampling: SamplingParams, rid: str, images: Sequence[str] = ()
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
    if sampling.stop:
        params["stop"] = sampling.stop
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        params["ignore_eos"] = True
    body = {
        "rid": rid,
        "input_ids": prompt_ids,
        "sampling_params": params,
        "return_logprob": sampling.logprobs,
        "stream": False,
    }
    if images:
        body["image_data"] = images
    return orjson.dumps(body)


def extra_params(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Further sampling parameters by SGLang's names."""
    params = dict(extra)
    for name, own in (("grammar", "ebnf"), ("min_tokens", "min_new_tokens")):
        if name in params:
            params[own] = params.pop(name)
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

    An abort is one whoever asked for it: another client, a trainer that pauses the server, the server itself.

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
    try:
        reply = _REPLY.decode(payload)
    except msgspec.DecodeError as error:
        raise _broken(server, f"it cannot be read: {error} ({len(payload)} bytes)") from error
    meta = reply.meta_info
    if meta.id is not None and meta.id != rid:
        raise _broken(server, f"it answers request {meta.id!r} instead of {rid!r}")
    reason = meta.finish_reason
    if reason is None or reason.type not in _FINISH_REASONS:
        raise _broken(server, f"its finish reason is {reason!r}")
    if reason.status_code is not None:
        raise status_error(server, reason.status_code, str(reason.message))
    if (
        image_prompt_tokens is not None
        and reason.type != "abort"
        and meta.prompt_tokens != image_prompt_tokens
    ):
        raise EngineError(
            f"{server} made {meta.prompt_tokens} tokens of a prompt with images that has "
            f"{image_prompt_tokens}: its image processor has other settings than that of "
            "actor_rollout_ref.model.path, or this SGLang tokenizes such prompts again "
            "(SGLANG_MM_AVOID_RETOKENIZE)"
        )

    logprobs: list[float] | None = None
    if reason.type == "abort" and not reply.output_ids and not meta.output_token_logprobs:
        # Aborted while it was queued: then a server leaves out what was asked for, too.
        ids, logprobs = [], [] if sampling.logprobs else None
    elif sampling.logprobs:
        if meta.output_token_logprobs is None:
            raise _broken(server, "it has no log-probs, which were asked for")
        ids = [entry.token_id for entry in meta.output_token_logprobs]
        logprobs = [entry.logprob for entry in meta.output_token_logprobs]
        if reply.output_ids is not None and reply.output_ids != ids:
            raise _broken(server, f"{len(reply.output_ids)} ids do not match {len(ids)} log-probs")
        if not logprobs_fit(logprobs):
            raise _broken(server, "it has log-probs above 0")
    elif reply.output_ids is not None:
        ids = reply.output_ids
    else:
        raise _broken(server, "it has no output_ids; this SGLang gives ids only with log-probs")
    if not ids_fit(ids, vocab_size):
        raise _broken(server, f"it has ids outside the vocabulary of {vocab_size} ids")
    if len(ids) > sampling.max_tokens:
        raise _broken(server, f"it has {len(ids)} tokens, more than max_tokens {sampling.max_tokens}")
    versions = _policy_versions(server, meta, len(ids))
    if reason.type == "abort" and ids and not ends_are_seen and not sampling.ignore_eos:
        ids, logprobs = ids[:-1], logprobs and logprobs[:-1]
        versions = [run for run in versions if run[0] < max(1, len(ids))]
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=_FINISH_REASONS[reason.type],
        policy_versions=versions,
        cached_prompt_tokens=meta.cached_tokens,
    )


def _policy_versions(server: str, meta: _MetaInfo, tokens: int) -> list[tuple[int, int]]:
    runs = meta.weight_versions
    if not runs:
        return [(0, parse_version(meta.weight_version))]
    starts = [start for start, _ in runs]
    if starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] >= max(1, tokens):
        raise _broken(server, f"its weight versions are not those of {tokens} tokens")
    return runs


def parse_version(weight_version: object) -> int:
    """SGLang's weight version is free text, "default" until the first update: that is version 0."""
    try:
        return int(str(weight_version))
    except ValueError:
        return 0


def _broken(server: str, what: str) -> TransientEngineError:
    return TransientEngineError(f"broken reply from {server}: {what}")
