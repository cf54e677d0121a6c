"""The trainer's weights on their way to servers over the network, without a folder that both see.

    channel = WeightChannel("gloo")
    batches.update_weights(channel.put(model))

    put: a copy --update_weights(source)--> each replica: names, shapes and dtypes are compared
                                            --> a group of its own --> tensor after tensor --> the probe

The copy stays until the next weights have arrived: a server that comes back later gets the weights that the others
have, and the trainer's own tensors have changed by then. Servers are updated side by side and do not wait for each
other, so that one that is lost does not hold up the rest.
"""

import asyncio
import itertools
import json
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollstream.engine.replica import ReplicaUnavailableError
from rollstream.engine.weight_copy import read_header
from rollstream.engine.weight_group import (
    PREFIXES,
    Transport,
    WeightGroup,
    address_facing,
    listen_at,
)
from rollstream.engine.weight_probe import own_logprobs
from rollstream.errors import EngineError
from rollstream.user_calls import in_daemon_thread

_FLOATS = frozenset(("float64", "float32", "float16", "bfloat16"))
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool"}
DTYPES |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "U8": "uint8"}
DTYPES |= {f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)}
"""Of safetensors, by torch's names."""

Tensors = Mapping[str, tuple[str, Sequence[int]]]
"""The dtype and the shape by name."""


class SentWeights(str):
    """Weights that `update_weights` takes where it takes a folder's path; as a text the name that messages give them.

    They go through the pool to its replicas as they are, so they last as long as a replica may want them.
    """

    transport: Transport
    tensors: Mapping[str, Any]
    """In main memory, by the names of a checkpoint."""
    logprobs: list[float] | None
    """Of the trainer's own model, see `weight_probe`."""
    device: Any
    """From which `nccl` sends."""

    def listed(self) -> dict[str, tuple[str, list[int]]]:
        """The dtype and the shape of each tensor."""
        return {
            name: (str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in self.tensors.items()
        }

    def parts(self, size: int) -> list[list[str]]:
        """Names of tensors that have so many bytes together, or of one that has more."""
        parts: list[list[str]] = [[]]
        total = 0
        for name, tensor in self.tensors.items():
            if parts[-1] and total + tensor.nbytes > size:
                parts.append([])
                total = 0
            parts[-1].append(name)
            total += tensor.nbytes
        return parts

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!s} are in the memory of the trainer's process, and leave it only for a server"
        )


class WeightChannel:
    """Makes copies of weights that servers are sent.

    Names, shapes and dtypes are compared with the server's checkpoint first; others are an error, and nothing has
    changed. A server that comes back later is sent the last copy. An update that breaks off leaves its server paused
    until one goes well; a server whose trainer was lost meanwhile must be started again. The trainer listens while it
    sends, without encryption or passwords.

    Args:
        transport: how they are sent: `gloo` (TCP, between any machines) or `nccl` (between CUDA devices).
    """

    def __init__(self, transport: Transport = "gloo") -> None:
        self._transport = transport
        self._name = secrets.token_hex(3)
        self._count = itertools.count()

    def put(
        self, model: Any, state: Mapping[str, Any] | None = None, *, logprobs: Sequence[float] | None = None
    ) -> SentWeights:
        """Copies weights into main memory.

        Args:
            model: a model of transformers; None: `state` has the names of a checkpoint.
            state: its weights where they are not in the model itself: those of a sharded one, gathered.
            logprobs: by `weight_probe.own_logprobs`; None: without `state`, the model is asked.
        """
        state, logprobs = checkpoint_state(model, state, logprobs)
        weights = SentWeights(f"weights {self._name}/{next(self._count)} of this process")
        weights.transport = self._transport
        weights.device = next((one.device for one in state.values() if one.device.type == "cuda"), "cuda")
        weights.tensors = {
            name: one.detach().to("cpu", copy=True).contiguous() for name, one in state.items()
        }
        weights.logprobs = [*logprobs] if logprobs else None
        return weights


def checkpoint_state(
    model: Any, state: Mapping[str, Any] | None, logprobs: Sequence[float] | None
) -> tuple[Mapping[str, Any], Sequence[float] | None]:
    """The tensors of a checkpoint, by its names, and the log-probs: see `WeightChannel.put`."""
    if model is not None and state is None and logprobs is None:
        logprobs = own_logprobs(model, model.get_input_embeddings().num_embeddings)
    state = _untied(model.state_dict() if state is None else state)
    if model is not None:
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(model, state)
    return state, logprobs


def _untied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without the second name of a tensor that has two: a server ties them itself."""
    kept: dict[Any, str] = {}
    for name, tensor in state.items():
        kept.setdefault((tensor.data_ptr() or name, tensor.shape, tensor.stride()), name)
    return {name: state[name] for name in kept.values()}


def checkpoint_tensors(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """The dtype and the shape of each tensor of a model's folder; empty where it has no safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = {folder / name for name in json.loads(index.read_bytes())["weight_map"].values()}
    else:
        files = set(folder.glob("*.safetensors"))
    found: dict[str, tuple[str, list[int]]] = {}
    for path in files:
        header, _, _ = read_header(path)
        found |= {
            name: (DTYPES.get(one["dtype"], one["dtype"]), one["shape"]) for name, one in header.items()
        }
    return found


def find_difference(sent: Tensors, own: Tensors, *, tied: bool) -> str | None:
    """Says by what tensors differ from those that a server began with; None if by nothing that matters.

    Floats of one size may become floats of another. The output layer of a model with `tied` embeddings may be
    there or not.
    """
    for more, less, what in (own, sent, "are missing"), (sent, own, "are not known to it"):
        others = sorted(
            name for name in more.keys() - less.keys() if not (tied and name.endswith("lm_head.weight"))
        )
        if others:
            return f"{len(others)} of {len(more)} tensors {what}, {others[0]} first"
    for name in sent.keys() & own.keys():
        (dtype, shape), (own_dtype, own_shape) = sent[name], own[name]
        if list(shape) != list(own_shape):
            return f"{name} has the shape {list(shape)}, and it expects {list(own_shape)}"
        if dtype != own_dtype and not {dtype, own_dtype} <= _FLOATS:
            return f"{name} is {dtype}, and it expects {own_dtype}"
    return None


Send = Callable[[Iterable[str], Awaitable[Any]], Awaitable[None]]
"""Sends tensors by their names while the server is told to receive them. Raises `EngineError`."""


@asynccontextmanager
async def transfer(
    weights: SentWeights,
    url: str,
    workers: int,
    telling: Callable[[str, int], Awaitable[Any]],
    *,
    timeout: float,
    prefixes: tuple[str, ...] = PREFIXES,
) -> AsyncIterator[Send]:
    """Makes a group with the workers of a server, for as long as the block lasts, and gives what sends to them.

    Args:
        weights: to be sent.
        url: of the server.
        workers: of the server, each of which receives all tensors.
        telling: tells the server the trainer's address and port; answered when its workers are in the group.
        timeout: seconds for one tensor.
        prefixes: see `WeightGroup`.

    Raises:
        EngineError: the two did not find each other.
    """
    size, made = workers + 1, list[WeightGroup]()
    try:
        host = urlsplit(url)
        address = await asyncio.to_thread(address_facing, host.hostname or "", host.port or 80)
        store, port = await asyncio.to_thread(listen_at, address, size)
    except (OSError, RuntimeError) as error:
        raise EngineError(f"{url} can be sent no weights from here: {error}") from error

    def make() -> None:
        made.append(
            WeightGroup(
                weights.transport, store, address, rank=0, size=size, timeout=timeout, prefixes=prefixes
            )
        )

    async def send(names: Iterable[str], telling: Awaitable[Any]) -> None:
        device, group = "cpu" if weights.transport == "gloo" else weights.device, made[0]

        def broadcast() -> None:
            for name in names:
                group.broadcast(weights.tensors[name].to(device))

        await _both(telling, broadcast, group.close)

    try:
        await _both(telling(address, port), make, lambda: None)
        yield send
    finally:
        for group in made:
            group.close()


async def _both(telling: Awaitable[Any], work: Callable[[], None], cut: Callable[[], None]) -> None:
    """Waits for a server's answer and for this process's own part; one that fails ends the other.

    Raises:
        EngineError: with the words of both, for it is the server that knows why a connection was lost;
            `ReplicaUnavailableError` where it is away.
    """
    answer, own = asyncio.ensure_future(telling), asyncio.create_task(in_daemon_thread(work))
    own.add_done_callback(lambda task: task.cancelled() or task.exception())  # seen
    await asyncio.wait((answer, own), return_when=asyncio.FIRST_EXCEPTION)
    if not (answer.done() and own.done()):
        cut()
        await asyncio.wait((answer,))  # a thread that still waits for the server ends by itself
    if errors := [error for task in (answer, own) if task.done() and (error := task.exception()) is not None]:
        is_away = isinstance(errors[0], ReplicaUnavailableError)
        raise (ReplicaUnavailableError if is_away else EngineError)("; ".join(map(str, errors))) from errors[
            0
        ]
