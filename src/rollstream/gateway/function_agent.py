"""`function_agent`: a Python function as an agent loop, its calls recorded.

async def run(client, row):
    done = await client.chat.completions.create(model="rollstream", messages=row["prompt"])
    return done.choices[0].message.content
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollstream.agent.base import AgentResources
from rollstream.config.settings import GatewaySettings
from rollstream.errors import ConfigError
from rollstream.gateway.agents import (
    MODEL,
    AgentFailedError,
    Outcome,
    RecordedAgent,
    Shared,
    deciding,
    read_options,
    read_outcome,
    shared_endpoint,
)
from rollstream.gateway.app import Endpoint
from rollstream.user_code import import_name, source_digest

_KEY = "gateway.function"

_MORE = ("anthropic_client", "base_url", "model")
"""What a function may ask for by the names of its parameters, besides `client` and `row`."""


@dataclass(slots=True)
class _Functions(Shared):
    """What the rollouts of one worker share."""

    function: Callable[..., Any]
    wanted: frozenset[str]
    clients: "_Clients"


class _Clients:
    """A client of each kind: a rollout's own has another address, and the same connections."""

    def __init__(self, wanted: frozenset[str]) -> None:
        self._wanted = wanted
        self._clients: dict[str, Any] = {}

    @asynccontextmanager
    async def opened(self, _: Endpoint) -> AsyncIterator[None]:
        """Opens them for as long as an event loop."""
        # An answer may wait as long as the engine does; the attempt's own limit ends it.
        given: dict[str, Any] = {"api_key": "none", "timeout": None, "max_retries": 0}
        async with AsyncExitStack() as stack:
            for name, kind in _client_classes(self._wanted).items():
                self._clients[name] = await stack.enter_async_context(kind(**given))
            yield

    def of(self, url: str) -> dict[str, Any]:
        """The clients of one session."""
        addresses = {"client": f"{url}/v1", "anthropic_client": url}
        key = url.rpartition("/")[2]
        return {
            name: client.with_options(base_url=addresses[name], api_key=key)
            for name, client in self._clients.items()
        }


class FunctionAgent(RecordedAgent):
    """Calls `gateway.function` once for each rollout, with a client whose calls are recorded.

    It returns the answer (text), the reward (a number), `{"answer", "reward", "reward_extra", "extra"}`, or None:
    then the run's reward function scores the last answer.
    """

    @classmethod
    def deciding_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        function = _load(read_options(options))
        return {"function": function.__qualname__, "source": source_digest(function), **deciding(options)}

    @classmethod
    def build_shared(cls, resources: AgentResources, **options: Any) -> _Functions:
        settings = read_options(options)
        function = _load(settings)
        parameters = list(inspect.signature(function).parameters.values())
        wanted = frozenset(one.name for one in parameters[2:]) & {*_MORE}
        _client_classes(wanted)
        clients = _Clients(wanted)
        endpoint = shared_endpoint(resources, settings, clients.opened)
        return _Functions(settings, endpoint, function, wanted, clients)

    async def act(self, url: str, row: dict[str, Any]) -> Outcome:
        shared: _Functions = self.shared
        clients = shared.clients.of(url)
        given = {**clients, "base_url": url, "model": MODEL}
        client = clients["client"]
        returned = await shared.function(client, row, **{name: given[name] for name in shared.wanted})
        if returned is None:
            return Outcome()
        if isinstance(returned, str):
            return Outcome(answer=returned)
        if isinstance(returned, int | float):
            returned = {"reward": returned}
        try:
            return read_outcome(returned, "what the function returned")
        except AgentFailedError as error:
            raise AgentFailedError(
                f"{error} (want a text, a number, None, or a dict of answer, reward, reward_extra, extra)"
            ) from error


def _load(settings: GatewaySettings) -> Callable[..., Any]:
    """The function. Raises `ConfigError`."""
    if settings.function is None:
        raise ConfigError(
            f"agent loop function_agent needs {_KEY}: path/to/file.py:name or package.module.name"
        )
    function: Callable[..., Any] = import_name(settings.function, key=_KEY)
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{_KEY}: {settings.function} must be an async function: async def run(client, row)"
        )
    try:
        parameters = inspect.signature(function).parameters
        inspect.signature(function).bind(None, None, **{name: None for name in _MORE if name in parameters})
    except TypeError as error:
        raise ConfigError(
            f"{_KEY}: {settings.function} cannot be called with (client, row); by name it may ask for "
            f"{', '.join(_MORE)} ({error})"
        ) from error
    return function


def _client_classes(wanted: frozenset[str]) -> dict[str, Any]:
    """The classes of clients by the names of parameters. Raises `ConfigError` for a package that is missing."""
    classes: dict[str, Any] = {}
    try:
        from openai import AsyncOpenAI

        classes["client"] = AsyncOpenAI
        if "anthropic_client" in wanted:
            from anthropic import AsyncAnthropic

            classes["anthropic_client"] = AsyncAnthropic
    except ImportError as error:
        raise ConfigError(
            f"{_KEY}: the package {error.name!r} is not installed: pip install {error.name}"
        ) from error
    return classes
