"""What `openvino.py` and its worker process say to each other.

Both directions carry frames: 4 bytes of length (little-endian), then msgpack. Token ids travel as int32
bytes and log-probs as float32 bytes, so that neither side touches single tokens in Python more than once.
A frame holds everything there was to say at that moment: one write per model step, not one per request.
"""

from array import array
from typing import Literal

import msgspec

LENGTH_BYTES = 4


class Start(msgspec.Struct, tag=True):
    """First message to the worker."""

    model_path: str
    properties: dict[str, str | int]
    """OpenVINO properties of the compiled model."""
    scheduler: dict[str, int | bool]
    """Attributes of openvino_genai.SchedulerConfig."""
    tokenizer_path: str = ""
    """Folder of the tokenizer, when it is not `model_path`."""
    version: int = 0
    """Of the weights."""


class Update(msgspec.Struct, tag=True):
    """To the worker: other weights of the same model."""

    number: int
    """Answered with; never used twice in the life of a worker."""
    model_path: str
    version: int


class Add(msgspec.Struct):
    """One request."""

    id: int
    """Never used twice in the life of a worker."""
    prompt: bytes
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    logprobs: bool
    seed: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool


class Orders(msgspec.Struct, tag=True):
    """To the worker: new requests, requests to end early, requests to forget."""

    add: list[Add]
    abort: list[int]
    """Answered with what was sampled."""
    cancel: list[int]
    """Not answered."""


class Ready(msgspec.Struct, tag=True):
    """First message from the worker: the model is loaded and has answered once."""

    cache_tokens: int
    """Tokens that the KV cache holds."""


class StartFailed(msgspec.Struct, tag=True):
    """Instead of `Ready`; the worker ends after it."""

    error: str


class Done(msgspec.Struct):
    """The end of one request."""

    id: int
    tokens: bytes
    logprobs: bytes | None
    reason: Literal["stop", "length", "abort", "refused", "broken"]
    """refused: the pipeline does not take this request; broken: it failed while working on it."""
    error: str = ""
    version: int = 0
    """Of the weights that sampled all of its tokens."""


class Updated(msgspec.Struct, tag=True):
    """Answer to an `Update`. After it, results are of the new weights."""

    number: int
    error: str = ""
    """Why not; the old weights go on then, and nothing was interrupted."""


class Results(msgspec.Struct, tag=True):
    """From the worker: what ended in one step, and how busy the step was."""

    done: list[Done]
    running: int = 0
    """Requests in that step."""
    waiting: int = 0
    """Requests that the KV cache had no room for yet."""
    kv_usage: float = 0.0
    """Share of the KV cache that was reserved for those that ran."""


_ENCODER = msgspec.msgpack.Encoder()
TO_WORKER = msgspec.msgpack.Decoder(Start | Orders | Update)
FROM_WORKER = msgspec.msgpack.Decoder(Ready | StartFailed | Results | Updated)


def encode_frame(message: msgspec.Struct) -> bytes:
    """The frame of a message."""
    body = _ENCODER.encode(message)
    return len(body).to_bytes(LENGTH_BYTES, "little") + body


def pack_ids(ids: list[int]) -> bytes:
    """Ids as int32."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """The reverse of `pack_ids`."""
    return array("i", data).tolist()


def pack_floats(values: list[float]) -> bytes:
    """Log-probs as float32, which they are in the model."""
    return array("f", values).tobytes()


def unpack_floats(data: bytes) -> list[float]:
    """The reverse of `pack_floats`."""
    return array("f", data).tolist()
