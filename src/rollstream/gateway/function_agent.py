"""`function_agent`: a Python function as an agent loop, its calls recorded.

async def run(client, row):
    done = await client.chat.completions.create(model="rollstream", messages=row["prompt"])
    return done.choices[0].message.content
"""

import inspect
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from rollstream.agent.base import AgentResources
from rollstream.config.settings import GatewaySettings
from rollstream.errors import ConfigError
from rollstream.gateway.agents import (
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


class _Client:
    """A client of OpenAI's for all rollouts of a worker: each has another address, and the same connections."""

    @asynccontextmanager
    async def opened(self, _: Endpoint) -> AsyncIterator[None]:
        """Opens it for as long as an event loop."""
        from openai import AsyncOpenAI

        # An answer may wait as long as the engine does; the attempt's own limit ends it.
        async with AsyncOpenAI(api_key="none", timeout=None, max_retries=0) as self._client:
            yield

    def of(self, url: str) -> Any:
        """The client of one session."""
        return self._client.with_options(base_url=f"{url}/v1", api_key=url.rpartition("/")[2])


@dataclass(slots=True)
class _Functions(Shared):
    """The function and its client, for all rollouts of one worker."""

    function: Callable[..., Any]
    client: _Client


class FunctionAgent(RecordedAgent):
    """Calls `gateway.function` once for each rollout, with a client whose calls are recorded.

    It returns the answer (text), the reward (a number), `{"answer", "reward", "reward_extra", "extra"}`, or None:
    then the run's reward function scores the last answer.
    """

    resumable = True

    @classmethod
    def deciding_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        function = _load(read_options(options))
        return {"function": function.__qualname__, "source": source_digest(function), **deciding(options)}

    @classmethod
    def build_shared(cls, resources: AgentResources, **options: Any) -> _Functions:
        settings = read_options(options)
        function = _load(settings)
        client = _Client()
        return _Functions(settings, shared_endpoint(resources, settings, client.opened), function, client)

    async def act(self, url: str, row: dict[str, Any]) -> Outcome:
        shared: _Functions = self.shared
        returned = await shared.function(shared.client.of(url), row)
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
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"{_KEY}: {settings.function} cannot be called with (client, row) ({error})"
        ) from error
    if find_spec("openai") is None:
        raise ConfigError(f"{_KEY}: the package 'openai' is not installed: pip install openai")
    return function
