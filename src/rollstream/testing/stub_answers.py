"""What a stub server says to a request, from the answer book or from a rule, in SGLang's JSON."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollstream.testing.answers import AnswerBook
from rollstream.testing.stub_faults import Fault
from rollstream.trajectory import Completion, SamplingParams

_TOKEN_PIXELS = 28
"""Width and height of an image token, as of Qwen2-VL."""

_PNG_SIZE = slice(16, 24)
"""Where a PNG file has its width and height, 4 bytes each."""

_EXTRA = ("frequency_penalty", "min_new_tokens", "min_p", "presence_penalty", "repetition_penalty")
"""Further sampling parameters that are kept, by SGLang's names."""


@dataclass(frozen=True, slots=True)
class StubAnswer:
    """One answer."""

    length: int
    """Tokens in it."""
    finish_reason: dict[str, Any]
    """As `meta_info.finish_reason` has it."""
    to_json: Callable[[int], tuple[bytes, bytes | None]]
    """Its first so many tokens: `output_ids`, and `output_token_logprobs`, if it has them."""
    cached_tokens: int = 0
    """Tokens of the prompt that are said to come from a cache."""


def book_answer(book: AnswerBook, digest: bytes, length: int, max_tokens: int, *, start: int) -> StubAnswer:
    """An answer of the answer book to what `digest` stands for, from its token `start` on."""
    reason = _length(length) if length == max_tokens else _stop(0)
    return StubAnswer(length, reason, lambda count: book.answer_json(digest, count, start=start))


def rule_answer(completion: Completion) -> StubAnswer:
    """What a rule answered."""
    ids, logprobs = completion.token_ids, completion.logprobs

    def to_json(length: int) -> tuple[bytes, bytes | None]:
        if logprobs is None:
            return orjson.dumps(ids[:length]), None
        entries = [[logprob, token, None] for logprob, token in zip(logprobs, ids[:length], strict=False)]
        return orjson.dumps(ids[:length]), orjson.dumps(entries)

    reasons = {"length": _length(len(ids)), "abort": _ABORTED}
    reason = reasons.get(completion.finish_reason, _stop(ids[-1] if ids else 0))
    return StubAnswer(len(ids), reason, to_json, completion.cached_prompt_tokens)


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


def image_files(image_data: str | list[str] | None) -> list[bytes]:
    """The image files of a request: base64, as it is or as a `data:` URL.

    Raises:
        TypeError, ValueError: it is something else.
    """
    images = [image_data] if isinstance(image_data, str) else image_data or []
    if not all(isinstance(image, str) for image in images):
        raise TypeError("image_data is no text, nor a list of texts")
    return [base64.b64decode(image.rpartition(",")[2], validate=True) for image in images]


def expanded_length(prompt_ids: list[int], files: list[bytes], image_token_id: int | None) -> int:
    """Tokens of a prompt when each lone placeholder is written as often as its image has tokens.

    The images are PNG files that a Qwen2-VL processor would not shrink: a token for each 28 x 28 pixels. A
    prompt whose placeholders are not one for each image has the length it has.
    """
    if image_token_id is None or prompt_ids.count(image_token_id) != len(files):
        return len(prompt_ids)
    return len(prompt_ids) + sum(_tokens(file) - 1 for file in files)


def _tokens(file: bytes) -> int:
    size = file[_PNG_SIZE]
    sides = (int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big"))
    width, height = (max(1, round(side / _TOKEN_PIXELS)) for side in sides)
    return width * height
