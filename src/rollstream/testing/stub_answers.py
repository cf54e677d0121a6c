"""What a stub server says to a request, from the answer book or from a rule, in SGLang's JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from rollstream.testing.answers import AnswerBook
from rollstream.testing.stub_faults import Fault
from rollstream.trajectory import Completion, SamplingParams

_EXTRA = ("frequency_penalty", "min_new_tokens", "min_p", "presence_penalty", "repetition_penalty")
"""Further sampling parameters that are kept, by SGLang's names."""


class StubAnswer(Protocol):
    """One answer."""

    @property
    def length(self) -> int:
        """Tokens in it."""
        ...

    @property
    def finish_reason(self) -> dict[str, Any]:
        """As `meta_info.finish_reason` has it."""
        ...

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that are said to come from a cache."""
        ...

    def to_json(self, length: int) -> tuple[bytes, bytes | None]:
        """Its first `length` tokens: `output_ids`, and `output_token_logprobs`, if it has them."""
        ...


@dataclass(frozen=True, slots=True)
class BookAnswer:
    """An answer of the answer book."""

    book: AnswerBook
    digest: bytes
    """Of prompt and seed."""
    length: int
    max_tokens: int
    cached_tokens: int = 0
    start: int = 0
    """Tokens of it that are there already."""

    @property
    def finish_reason(self) -> dict[str, Any]:
        return _length(self.length) if self.length == self.max_tokens else _stop(0)

    def to_json(self, length: int) -> tuple[bytes, bytes | None]:
        return self.book.answer_json(self.digest, length, start=self.start)


@dataclass(frozen=True, slots=True)
class RuleAnswer:
    """What a rule answered."""

    completion: Completion

    @property
    def length(self) -> int:
        return len(self.completion.token_ids)

    @property
    def cached_tokens(self) -> int:
        return self.completion.cached_prompt_tokens

    @property
    def finish_reason(self) -> dict[str, Any]:
        match self.completion.finish_reason:
            case "length":
                return _length(self.length)
            case "abort":
                return _ABORTED
        return _stop(self.completion.token_ids[-1] if self.completion.token_ids else 0)

    def to_json(self, length: int) -> tuple[bytes, bytes | None]:
        ids, logprobs = self.completion.token_ids[:length], self.completion.logprobs
        if logprobs is None:
            return orjson.dumps(ids), None
        entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids, strict=False)]
        return orjson.dumps(ids), orjson.dumps(entries)


def read_sampling(query: Mapping[str, Any]) -> SamplingParams:
    """How a `/generate` request wants to be sampled; what it does not say has our defaults.

    Raises:
        KeyError: it does not say how many tokens.
    """
    params = query["sampling_params"]
    stop = params.get("stop") or ()
    return SamplingParams(
        max_tokens=params["max_new_tokens"],
        temperature=params.get("temperature", 1.0),
        top_p=params.get("top_p", 1.0),
        top_k=params.get("top_k", -1),
        logprobs=bool(query.get("return_logprob")),
        seed=params.get("sampling_seed"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(params.get("stop_token_ids") or ()),
        ignore_eos=bool(params.get("ignore_eos")),
        extra={name: params[name] for name in _EXTRA if name in params},
    )


def write_reply(
    answer: StubAnswer,
    *,
    rid: str,
    prompt_tokens: int,
    weight_version: str,
    logprobs: bool,
    share: float | None = None,
    fault: Fault | None = None,
) -> bytes:
    """The body of the reply to `/generate`.

    Args:
        answer: what it says.
        rid: of the request.
        prompt_tokens: said of it.
        weight_version: said of the server.
        logprobs: whether they were asked for.
        share: how much of the answer was done when it was aborted; None: all.
        fault: what is wrong with the reply.
    """
    length, reason = answer.length, answer.finish_reason
    if share is not None:
        length, reason = int(share * length), _ABORTED
    ids, entries = answer.to_json(length)
    if fault == "short_logprobs":
        entries = answer.to_json(max(0, length - 1))[1]
    if fault == "bad_ids":
        ids, entries = b"[%d]" % _NO_ID, b"[[-1.0,%d,null]]" % _NO_ID
    meta = {
        "id": f"{rid}-not" if fault == "wrong_rid" else rid,
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "weight_version": weight_version,
        "completion_tokens": length,
        "cached_tokens": answer.cached_tokens,
        "e2e_latency": 0.0,
    }
    if logprobs and entries is not None:
        meta["output_token_logprobs"] = orjson.Fragment(entries)
    body = orjson.dumps({"text": "", "output_ids": orjson.Fragment(ids), "meta_info": meta})
    return body[: len(body) // 2] if fault == "truncate" else body


_NO_ID = 2**31 - 1
"""In no vocabulary."""

_ABORTED: dict[str, Any] = {"type": "abort", "message": "Aborted"}


def _length(length: int) -> dict[str, Any]:
    return {"type": "length", "length": length}


def _stop(matched: int) -> dict[str, Any]:
    return {"type": "stop", "matched": matched}
