"""LoRA adapters as weights: a folder of peft's (`adapter_config.json` and safetensors) instead of a whole model.

The model of a server stays as it is, so several versions can be answered under at once: a request names its own.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable

from rollstream.engine.base import Capabilities
from rollstream.engine.replica import ReplicaUnavailableError, Weights
from rollstream.errors import EngineError, TransientEngineError
from rollstream.trajectory import Completion


def is_adapter(source: str) -> bool:
    """Whether the weights at `source` are those of an adapter. Its folder has to be seen from here."""
    return bool(source) and (Path(source).expanduser() / "adapter_config.json").is_file()


def check_takes(what: str, capabilities: Capabilities, source: str) -> None:
    """Raises `EngineError` where an engine takes no weights of the kind that `source` is, a model or an adapter."""
    if is_adapter(source) and not capabilities.adapters:
        raise EngineError(
            f"engine {what!r} takes no LoRA adapter such as {source} (docs/engines.md says which do)"
        )
    if not is_adapter(source) and not capabilities.update_weights:
        raise EngineError(f"engine {what!r} cannot update weights")


@runtime_checkable
class HoldsAdapters(Protocol):
    """An engine that answers under several adapters at once: optional, `Capabilities.adapters` says how many.

    Its `generate` takes `weights=`, to answer under; None: the newest.
    """

    async def hold(self, held: Collection[Weights]) -> None:
        """Lets all others go, and from now on no update ends requests or waits for them."""
        ...


class ServerAdapters:
    """The adapters that a server has been given, each under a name of its own.

    A server may outlive us, and a version may be given twice: no name is used again.

    Args:
        server: named in errors.
        routes: the beginning of those that load and unload one.
        tell: posts to the server; raises what `HttpServer.tell` does.
    """

    def __init__(self, server: str, routes: str, tell: Callable[[str, object], Awaitable[bytes]]) -> None:
        self._server, self._routes, self._tell = server, routes, tell
        self._current: Weights | None = None
        """Requests that name no weights are answered under it; None: under the model itself."""
        self._names: dict[Weights, str] = {}
        self._one_load = asyncio.Lock()

    async def update(self, weights: Weights) -> None:
        """Loads an adapter for all requests that name none. Raises what `Replica.update_weights` does."""
        before = self._names.pop(weights, None)
        try:
            await self.name(weights)
        except EngineError:
            if before is not None:
                self._names[weights] = before
            raise
        self._current = weights
        if before is not None:
            await self._unload(before)

    async def reset(self) -> None:
        """The model has got other weights itself: requests that name none are for it."""
        self._current = None
        await self.keep(())

    async def keep(self, kept: Collection[Weights]) -> None:
        """Unloads the others."""
        async with self._one_load:
            for weights in self._names.keys() - {*kept}:
                await self._unload(self._names.pop(weights))

    async def name(self, weights: Weights | None = None) -> str | None:
        """The server's name of an adapter, which is loaded if it has not got it; None: the model is meant."""
        weights = weights or self._current
        if weights is None or not weights.source:
            return None
        if weights not in self._names:
            async with self._one_load:
                if weights not in self._names:
                    name = f"rollstream-{weights.version}-{secrets.token_hex(4)}"
                    await self._load(name, weights)
                    self._names[weights] = name
        return self._names[weights]

    async def answer(
        self, weights: Weights | None, ask: Callable[[str | None], Awaitable[Completion]]
    ) -> Completion:
        """The answer of a request, stamped with its adapter's version, which servers do not say.

        Args:
            weights: its own; None: the current ones.
            ask: sends it for an adapter of that name; None: for the model itself.

        Raises:
            ReplicaUnavailableError: the server was started anew, and had lost its adapters.
        """
        weights = weights or self._current
        name = await self.name(weights)
        if weights is None or name is None:
            return await ask(None)
        try:
            completion = await ask(name)
        except EngineError as error:
            if type(error) is EngineError and await self._has_lost(name, weights):
                raise ReplicaUnavailableError(f"{self._server} was started anew: {error}") from error
            raise
        return replace(completion, policy_versions=[(0, weights.version)])

    async def _has_lost(self, name: str, weights: Weights) -> bool:
        """Whether a server has no adapter of a name any more: names that it knows it would refuse."""
        async with self._one_load:
            if self._names.get(weights) == name:
                try:
                    await self._load(name, weights)
                except EngineError:
                    return False
                self._names.clear()
                await self._unload(name)
            return True

    async def _load(self, name: str, weights: Weights) -> None:
        try:
            path = str(Path(weights.source).expanduser())
            await self._tell(f"{self._routes}/load_lora_adapter", {"lora_name": name, "lora_path": path})
        except TransientEngineError as error:  # vLLM answers 500 where a rank is too high, say
            raise EngineError(f"the adapter {weights.source} cannot be loaded: {error}") from error

    async def _unload(self, name: str) -> None:
        with contextlib.suppress(EngineError):  # it is away, or was started anew: then it has none
            await self._tell(f"{self._routes}/unload_lora_adapter", {"lora_name": name})
