"""The agent loop that is an environment of verifiers."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.errors import ConfigError, DataError
from rollstream.integrations.verifiers.endpoint import Endpoint
from rollstream.integrations.verifiers.failures import EnvironmentFailedError
from rollstream.integrations.verifiers.lasting import Lasting
from rollstream.integrations.verifiers.loading import digest, load
from rollstream.integrations.verifiers.outcome import Environment, Played
from rollstream.integrations.verifiers.recorder import Recorder
from rollstream.trajectory import SamplingParams, Trajectory

logger = logging.getLogger(__name__)

_CLEAN_UP_S = 30.0
"""How long a rollout that was cut off waits for its environment to clean up: sandboxes take seconds. One that
takes longer goes on by itself."""

_FINISH_REASONS = {
    "max_turns_reached": "max_turns",
    "max_turns": "max_turns",
    "prompt_too_long": "length",
    "context_length": "length",
    "max_total_completion_tokens_reached": "length",
    "max_input_tokens": "length",
    "max_output_tokens": "length",
    "max_total_tokens": "length",
    "timeout_reached": "aborted",
    "agent_timeout": "aborted",
}
"""What verifiers calls the end of a rollout, and what the run directory does. Others are `stop`."""


@dataclass(slots=True)
class _Shared:
    """What the loops of one worker share."""

    environment: Environment
    endpoint: Lasting[Endpoint]


class VerifiersLoop(AgentLoop):
    """Lets an environment of verifiers run the rollout, and records what its model says.

    Options (in the YAML of `agent_loop_config_path`):

    - `environment`: an installed environment, or `path/to/file.py:factory`, `package.module:factory`.
    - `arguments`: of the environment.
    - `digest`: of the environment's source, as `rollstream verifiers` writes it: another one is an error at
      start. It is a part of the run's identity.
    - `model`: what requests call the model.
    """

    sees_images = False

    def __init__(
        self,
        *args: Any,
        environment: str = "",
        arguments: Mapping[str, Any] | None = None,
        digest: str | None = None,
        model: str = "rollstream",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if not environment or not isinstance(environment, str):
            raise ConfigError("VerifiersLoop needs the option `environment`: a name, or file.py:factory")
        if not isinstance(arguments or {}, Mapping):
            raise ConfigError(f"VerifiersLoop: arguments are {arguments!r}, want a mapping")
        self.environment = environment
        self.model = model

    @classmethod
    def build_shared(
        cls,
        resources: AgentResources,
        *,
        environment: str = "",
        arguments: Mapping[str, Any] | None = None,
        digest: str | None = None,
        model: str = "rollstream",
        **options: Any,
    ) -> _Shared:
        loaded = load(environment, arguments or {}, model=model)
        check_digest(loaded, environment, digest)

        @asynccontextmanager
        async def serving() -> AsyncIterator[Endpoint]:
            limit = resources.max_model_len or resources.engine.capabilities.max_model_len
            endpoint = Endpoint(model, limit)
            async with endpoint.serving(), loaded.serving(endpoint):
                yield endpoint

        return _Shared(loaded, Lasting(serving))

    async def run(self, sampling: SamplingParams, **row: Any) -> list[Trajectory]:
        """Executes the rollout.

        Raises:
            EnvironmentFailedError: the environment ended it with an error of its own.
            EngineError: the engine's, whatever the environment made of it.
            DataError: the row, or its prompt, cannot be used.
        """
        given = row.get("verifiers")
        if not isinstance(given, Mapping):
            raise DataError(
                "the row has no column `verifiers`: `rollstream verifiers ENVIRONMENT` writes prompt files"
            )
        shared: _Shared = self.shared
        request_id = self.request_id
        broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        recorders: list[Recorder] = []

        def on_broken(error: Exception) -> None:
            if not broken.done():
                broken.set_result(error)

        async with shared.endpoint.using() as endpoint:
            with ExitStack() as sessions:

                def open_session(session: str) -> Recorder:
                    name = request_id if not recorders else f"{request_id}-{len(recorders)}"
                    recorder = Recorder(self, sampling, model=self.model, name=name, on_broken=on_broken)
                    sessions.enter_context(endpoint.session(session, recorder))
                    recorders.append(recorder)
                    return recorder

                started = time.monotonic()
                try:
                    played = await _unless_broken(
                        shared.environment.run(
                            given, row["raw_prompt"], open_session=open_session, sampling=sampling
                        ),
                        broken,
                    )
                except EnvironmentFailedError as error:
                    refusal = next((one.refusal for one in recorders if one.refusal is not None), None)
                    if refusal is not None:
                        raise type(error)(f"{error}; its last refused request: {refusal}") from refusal
                    raise
                # What is neither waiting for answers nor the rollout's own is the environment's.
                self.metrics.tool_s += max(0.0, time.monotonic() - started - self.metrics.generate_s)
        return self._trajectories(played)

    def _trajectories(self, played: list[Played]) -> list[Trajectory]:
        """Of all agents, the one that ended last and its newest answer last."""
        found: list[Trajectory] = []
        for part in played:
            own = part.recorder.trajectories(part.kept)
            for trajectory in own:
                trajectory.reward = part.reward
                trajectory.reward_extra = dict(part.metrics)
                trajectory.extra = {
                    "verifiers": {
                        "environment": self.environment,
                        "stop_condition": part.stop_condition,
                        **part.extra,
                    }
                }
            if own and own[-1].finish_reason == "stop":
                full = part.recorder.ran_out_of_room
                own[-1].finish_reason = (
                    "length" if full else _FINISH_REASONS.get(part.stop_condition or "", "stop")
                )
            found += own
        if not found:
            raise EnvironmentFailedError(
                f"environment {self.environment!r} ended without an answer of the model that counts"
            )
        for trajectory in found[:-1]:
            trajectory.is_snapshot = True
        found[-1].metrics = self.metrics
        return found


def check_digest(environment: Environment, name: str, expected: str | None) -> None:
    """Refuses an environment whose source is not the one that the prompts were written with.

    Raises:
        ConfigError: it is another one.
    """
    if expected is not None and (now := digest(environment)) != expected:
        raise ConfigError(
            f"the source of environment {name!r} has changed since its prompts were written (digest {now}, "
            f"not {expected}): write them anew by `rollstream verifiers`, into another folder for another run"
        )


async def _unless_broken(work: Any, broken: "asyncio.Future[Exception]") -> list[Played]:
    """Awaits an environment's rollout, but ends it when the engine fails, whatever it would make of that.

    Raises:
        Exception: what `broken` gives, or what the work raises.
    """
    task: asyncio.Task[list[Played]] = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task, broken), return_when=asyncio.FIRST_COMPLETED)
        if not broken.done():
            return task.result()
    finally:
        if not task.done():
            task.cancel()
            _, late = await asyncio.wait((task,), timeout=_CLEAN_UP_S)
            if late:
                logger.warning("an environment still cleans up %g s after its rollout ended", _CLEAN_UP_S)
    if task.done() and not task.cancelled():
        task.exception()  # what it made of the engine's error is not told
    raise broken.result()
