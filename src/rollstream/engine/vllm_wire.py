"""vLLM's wire formats: request bodies out, completions or errors in. No I/O.

A server has one of two routes, or both:

- `/inference/v1/generate` (with `--enable-scale-out`): ids in, ids out, with the weights that sampled each;
- `/v1/completions`: OpenAI's, which takes ids as the prompt and gives them with `return_token_ids`.

Source: `vllm/entrypoints/scale_out/token_in_token_out/protocol.py` and
`vllm/entrypoints/openai/completion/protocol.py` of vLLM 0.32; https://docs.vllm.ai.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from rollstream.engine.checks import ids_fit, logprobs_fit
from rollstream.errors import TransientEngineError
from rollstream.sampling import bias_by_id, schema_text
from rollstream.trajectory import Completion, FinishReason, SamplingParams

Route = Literal["/inference/v1/generate", "/v1/completions"]
GENERATE: Route = "/inference/v1/generate"
COMPLETIONS: Route = "/v1/completions"

LogprobKind = Literal["raw", "processed", "none"]

_UNKNOWN_LOGPROB = -9999.0
"""What a server writes for a log-prob that is minus infinity, not a number, or not there."""

_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}

_PROBE_LOGPROBS = 5
"""Log-probs asked for at start: more than one, and within `--max-logprobs` (20 by default)."""


class _TokenLogprob(msgspec.Struct, gc=False):
    """Hundreds per reply: without gc."""

    token_id: int
    logprob: float


class _ScoredToken(_TokenLogprob, gc=False):
    top_logprobs: list[_TokenLogprob] = []


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


class _TokenLogprobs(msgspec.Struct):
    content: list[_TokenLogprob] | None = None


class _GenerateChoice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _TokenLogprobs | None = None
    weight_versions: list[_Span] | None = None


class _GenerateReply(msgspec.Struct):
    choices: list[_GenerateChoice]
    request_id: str = ""
    usage: _Usage | None = None


class _CompletionLogprobs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _CompletionChoice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _CompletionLogprobs | None = None


class _CompletionReply(msgspec.Struct):
    choices: list[_CompletionChoice]
    id: str = ""
    usage: _Usage | None = None


class _ProbeTops(msgspec.Struct):
    content: list[_ScoredToken] | None = None
    """Of the generate route."""
    top_logprobs: list[dict[str, float]] | None = None
    """Of the completions route."""


class _ProbeChoice(msgspec.Struct):
    logprobs: _ProbeTops


class _ProbeReply(msgspec.Struct):
    choices: list[_ProbeChoice]
    request_id: str = ""
    id: str = ""


_GENERATE_REPLY = msgspec.json.Decoder(_GenerateReply)
_COMPLETION_REPLY = msgspec.json.Decoder(_CompletionReply)
_PROBE_REPLY = msgspec.json.Decoder(_ProbeReply)


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
    if sampling.stop_token_ids:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.ignore_eos:
        params["ignore_eos"] = True
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
    params = dict(extra)
    structured = {
        own: params.pop(name)
        for name, own in (("grammar", "grammar"), ("json_schema", "json"), ("regex", "regex"))
        if name in params
    }
    if "json" in structured:
        structured["json"] = schema_text(structured["json"])
    if structured:
        params["structured_outputs"] = structured
    if "logit_bias" in params:
        params["logit_bias"] = bias_by_id(params["logit_bias"])
    return params


def read_reply(
    server: str,
    route: Route,
    payload: bytes,
    sampling: SamplingParams,
    *,
    rid: str | None,
    prompt_tokens: int,
    vocab_size: int | None,
) -> Completion:
    """Checks the reply of either route and makes a completion of it.

    An abort is one whoever asked for it: another client, a trainer that pauses the server, the server itself.

    Args:
        server: named in errors.
        route: that was asked.
        payload: the body of an HTTP 200.
        sampling: what was asked for.
        rid: of the request that this must answer; None where somebody between renames requests.
        prompt_tokens: of the request.
        vocab_size: ids must be below it; None where nobody said.

    Raises:
        TransientEngineError: the reply is broken.
    """
    decoder: msgspec.json.Decoder[Any] = _GENERATE_REPLY if route == GENERATE else _COMPLETION_REPLY
    try:
        reply: _GenerateReply | _CompletionReply = decoder.decode(payload)
    except msgspec.DecodeError as error:
        raise _broken(server, f"it cannot be read: {error} ({len(payload)} bytes)") from error
    answered = reply.request_id if isinstance(reply, _GenerateReply) else reply.id
    if rid is not None and not answered.endswith(f"-{rid}"):
        raise _broken(server, f"it answers request {answered!r} instead of {rid!r}")
    if len(reply.choices) != 1:
        raise _broken(server, f"it has {len(reply.choices)} answers instead of one")
    choice, usage = reply.choices[0], reply.usage or _Usage()
    reason = _FINISH_REASONS.get(choice.finish_reason or "")
    if reason is None:
        raise _broken(server, f"its finish reason is {choice.finish_reason!r}")
    if usage.prompt_tokens is not None and usage.prompt_tokens != prompt_tokens:
        raise _broken(server, f"it is about a prompt of {usage.prompt_tokens} tokens, not {prompt_tokens}")

    ids = choice.token_ids
    if ids is None:
        raise _broken(server, "it has no token_ids: this vLLM is too old, or something between removes them")
    if not ids_fit(ids, vocab_size):
        raise _broken(server, "it has ids outside the vocabulary")
    if len(ids) > sampling.max_tokens:
        raise _broken(server, f"it has {len(ids)} tokens, more than max_tokens {sampling.max_tokens}")
    logprobs = _logprobs(server, choice, ids) if sampling.logprobs else None
    details = usage.prompt_tokens_details or _CachedTokens()
    return Completion(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=reason,
        policy_versions=_policy_versions(server, choice, len(ids)),
        cached_prompt_tokens=details.cached_tokens or 0,
    )


def probe_body(route: Route, rid: str, model: str, *, stop: Sequence[str]) -> dict[str, Any]:
    """The body of a request for one token, whose reply `read_probe` reads."""
    sampling = SamplingParams(max_tokens=1, temperature=1.0, top_k=1, stop=tuple(stop))
    body = request_body(route, [0], sampling, rid, model)
    (body["sampling_params"] if route == GENERATE else body)["logprobs"] = _PROBE_LOGPROBS
    return body


def read_probe(payload: bytes, rid: str) -> tuple[LogprobKind, bool]:
    """What the log-probs in a probe's reply are of, and whether the reply names the request.

    The probe asked for the best token alone (`top_k` 1) and for the log-probs of several. In the distribution
    that is sampled from, the others have probability 0, and in the model's own they don't. Logits
    (`--logprobs-mode raw_logits`) are no logarithms of probabilities: they do not sum to 1 or less.

    Raises:
        msgspec.DecodeError: it is no reply to a probe.
    """
    reply = _PROBE_REPLY.decode(payload)
    named = (reply.request_id or reply.id).endswith(f"-{rid}")
    tops = reply.choices[0].logprobs if reply.choices else _ProbeTops()
    if tops.content:
        values = [top.logprob for top in tops.content[0].top_logprobs]
    elif tops.top_logprobs:
        values = list(tops.top_logprobs[0].values())
    else:
        return "none", named
    known = [value for value in values if value > _UNKNOWN_LOGPROB]
    if not known or max(known) > 80 or sum(map(math.exp, known)) > 1.0001:  # exp(80) still is a float
        return "none", named
    if len(known) == len(values) > 1:
        return "raw", named
    return ("processed" if abs(known[0]) < 1e-4 and len(known) == 1 else "none"), named


def _logprobs(server: str, choice: _GenerateChoice | _CompletionChoice, ids: list[int]) -> list[float]:
    if isinstance(choice, _GenerateChoice):
        entries = (choice.logprobs and choice.logprobs.content) or []
        if [entry.token_id for entry in entries] != ids:
            raise _broken(server, f"{len(ids)} ids do not match {len(entries)} log-probs")
        values: Sequence[float | None] = [entry.logprob for entry in entries]
    else:
        values = (choice.logprobs and choice.logprobs.token_logprobs) or []
        if len(values) != len(ids):
            raise _broken(server, f"{len(ids)} ids do not match {len(values)} log-probs")
    known = [value for value in values if value is not None and value > _UNKNOWN_LOGPROB]
    if len(known) != len(values):
        raise _broken(server, f"it lacks the log-probs of {len(values) - len(known)} tokens")
    if not logprobs_fit(known):
        raise _broken(server, "it has log-probs above 0")
    return known


def _policy_versions(
    server: str, choice: _GenerateChoice | _CompletionChoice, tokens: int
) -> list[tuple[int, int]]:
    """A weight version is free text, "default" until the first update: that is version 0."""
    spans = choice.weight_versions if isinstance(choice, _GenerateChoice) else None
    if not spans:
        return [(0, 0)]
    ends = [0, *(span.end for span in spans)]
    if [span.start for span in spans] != ends[:-1] or ends[-1] != tokens:
        raise _broken(server, f"its weight versions are not those of {tokens} tokens")
    versions: list[tuple[int, int]] = []
    for span in spans:
        version = _parse_version(span.version)
        if not versions or versions[-1][1] != version:
            versions.append((span.start, version))
    return versions


def _parse_version(version: str) -> int:
    try:
        return int(version)
    except ValueError:
        return 0


def _broken(server: str, what: str) -> TransientEngineError:
    return TransientEngineError(f"broken reply from {server}: {what}")
