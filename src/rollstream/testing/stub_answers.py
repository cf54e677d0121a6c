"""SGLang's `/generate` as a stub server speaks it: requests read, answers of the book, replies written."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any
from zlib import crc32

import orjson

from rollstream.testing.answers import AnswerBook
from rollstream.testing.scripted import AnswerRule, ScriptedRequest
from rollstream.testing.stub_faults import Fault, Latency
from rollstream.trajectory import Completion, SamplingParams

_TOKEN_PIXELS = 28
"""Width and height of an image token, as of Qwen2-VL."""

_PNG_SIZE = slice(16, 24)
"""The place of a PNG file's width and height, 4 bytes each."""

_NO_ID = 2**31 - 1
"""In no vocabulary."""

_EXTRA = ("frequency_penalty", "min_new_tokens", "min_p", "presence_penalty", "repetition_penalty")
"""Further sampling parameters that are kept, by SGLang's names."""


def book_rule(
    length: int | Latency | None = None, *, prompt_tokens: int | None = None, book: AnswerBook | None = None
) -> AnswerRule:
    """Answers of the answer book: a pure function of prompt ids, images (as files) and seed.

    Args:
        length: tokens in an answer, or drawn for each prompt; at most `max_tokens`, and None has that many.
        prompt_tokens: length of prompts. What a longer one has besides is taken for the beginning of the
            answer, which goes on from there. None: all is prompt.
        book: for another vocabulary than that of 512 ids.
    """
    book = book or AnswerBook()

    def answer(request: ScriptedRequest) -> Completion:
        own, sampling = request.prompt_ids[:prompt_tokens], request.sampling
        done = len(request.prompt_ids) - len(own)
        images = [image for image in request.images if isinstance(image, bytes)]
        digest = book.digest(own, sampling.seed, images)
        whole = int(length.draw(digest)) if isinstance(length, Latency) else length
        count = sampling.max_tokens if whole is None else min(sampling.max_tokens, max(1, whole - done))
        ids, logprobs = book.tokens(digest, done + count)
        return Completion(
            ids[done:],
            logprobs[done:] if sampling.logprobs else None,
            "length" if count == sampling.max_tokens else "stop",
        )

    return answer


def read_request(query: Mapping[str, Any], rid: str) -> ScriptedRequest:
    """Reads a client's request; sampling has our defaults where it does not say.

    Raises:
        KeyError, TypeError, ValueError: it is not of SGLang's form.
    """
    params = query["sampling_params"]
    stop = params.get("stop") or ()
    sampling = SamplingParams(
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
    return ScriptedRequest(rid, query["input_ids"], sampling, tuple(_image_files(query.get("image_data"))))


def _image_files(image_data: str | list[str] | None) -> list[bytes]:
    """The image files of a request: base64, as it is or as a `data:` URL."""
    images = [image_data] if isinstance(image_data, str) else image_data or []
    if not all(isinstance(image, str) for image in images):
        raise TypeError("image_data is no text, nor a list of texts")
    return [base64.b64decode(image.rpartition(",")[2], validate=True) for image in images]


def write_reply(
    completion: Completion,
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
        completion: what it says.
        rid: of the request.
        prompt_tokens: said of it.
        weight_version: said of the server.
        logprobs: whether they were asked for.
        share: how much of the answer was done when it was aborted; None: all.
        fault: what is wrong with the reply.
    """
    ids, of_ids = completion.token_ids, completion.logprobs
    reason: dict[str, Any] = {"type": "stop", "matched": ids[-1] if ids else 0}
    if share is not None or completion.finish_reason == "abort":
        reason = {"type": "abort", "message": "Aborted"}
        ids = ids[: None if share is None else int(share * len(ids))]
    elif completion.finish_reason == "length":
        reason = {"type": "length", "length": len(ids)}
    if fault == "bad_ids":
        ids, of_ids = [_NO_ID], [-1.0]
    meta = {
        "id": f"{rid}-not" if fault == "wrong_rid" else rid,
        "finish_reason": reason,
        "prompt_tokens": prompt_tokens,
        "weight_version": weight_version,
        "completion_tokens": len(ids),
        "cached_tokens": completion.cached_prompt_tokens,
        "e2e_latency": 0.0,
    }
    if logprobs and of_ids is not None:
        entries = [(logprob, token, None) for logprob, token in zip(of_ids, ids, strict=False)]
        meta["output_token_logprobs"] = entries[:-1] if fault == "short_logprobs" else entries
    body = orjson.dumps({"text": "", "output_ids": ids, "meta_info": meta})
    return body[: len(body) // 2] if fault == "truncate" else body


def write_scores(ids: Sequence[int], weight_version: str, start: int = 0, top_k: int = 0) -> bytes:
    """The body of a reply with the prompt's log-probs: other ones by other weights."""
    digest = crc32(weight_version.encode())
    entries = [
        (None if at == 0 else -((digest + 31 * at) % 97) / 9, token, None) for at, token in enumerate(ids)
    ]
    meta: dict[str, Any] = {"input_token_logprobs": [(None, ids[start], None), *entries[start + 1 :]]}
    if top_k:
        places = range(start + 1, len(ids))
        meta["input_top_logprobs"] = [None, *([(-1.0 - at, at, None) for at in range(top_k)] for _ in places)]
    return orjson.dumps({"text": "", "output_ids": [], "meta_info": meta})


def expanded_length(request: ScriptedRequest, image_token_id: int | None) -> int:
    """Tokens of a prompt when each lone placeholder is written as often as its image has tokens.

    The images are PNG files that a Qwen2-VL processor would not shrink: a token for each 28 x 28 pixels. A
    prompt whose placeholders are not one for each image has the length it has.
    """
    ids, images = request.prompt_ids, request.images
    if image_token_id is None or ids.count(image_token_id) != len(images):
        return len(ids)
    return len(ids) + sum(_tokens(file) - 1 for file in images if isinstance(file, bytes))


def _tokens(file: bytes) -> int:
    size = file[_PNG_SIZE]
    sides = (int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big"))
    width, height = (max(1, round(side / _TOKEN_PIXELS)) for side in sides)
    return width * height
