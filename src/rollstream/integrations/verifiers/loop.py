"""The agent loop that is an environment of verifiers."""

import asyncio
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.errors import ConfigError, DataError
from rollstream.gateway.agents import SharedEndpoint, unless_broken
from rollstream.gateway.app import Endpoint
from rollstream.gateway.recorder import Recorder
from rollstream.integrations.verifiers.loading import Environment, digest, load
from rollstream.integrations.verifiers.outcome import EnvironmentFailedError, Played
from rollstream.trajectory import SamplingParams, Trajectory

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
"""Finish reasons of verifiers, and the run directory's. Others are `stop`."""


class SharedEnvironment:
    """The environment and the endpoint that all rollouts of one worker share."""

    def __init__(self, environment: Environment, model: str, max_model_len: int | None) -> None:
        """`model`: what requests call the model; `max_model_len`: what it can take."""
        self.environment = environment
        # It keeps the environment open while it serves.
        self.endpoint = SharedEndpoint(
            lambda: Endpoint(model, max_model_len),
            lambda endpoint: environment.serving(f"{endpoint.url}/v1", model),
        )


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
        if not environment or not isinstance(environment, str) or not isinstance(arguments or {}, Mapping):
            raise ConfigError(
                f"VerifiersLoop: environment={environment!r:.100} is a name or file.py:factory, arguments="
                f"{arguments!r:.100} a mapping"
            )
        self.environment = environment

    @classmethod
    def build_shared(cls, resources: AgentResources, **options: Any) -> SharedEnvironment:
        name, expected = options.get("environment", ""), options.get("digest")
        loaded = load(name, options.get("arguments") or {})
        if expected is not None and (now := digest(loaded)) != expected:
            raise ConfigError(
                f"the source of environment {name!r} has changed since its prompts were written (digest {now}, "
                f"not {expected}): write them anew by `rollstream verifiers`, into another folder for another run"
            )
        limit = resources.max_model_len or resources.engine.capabilities.max_model_len
        return SharedEnvironment(loaded, options.get("model", "rollstream"), limit)

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
        given = {**given, "position": (row.get("extra_info") or {}).get("index")}
        endpoint = await self.shared.endpoint.get()
        environment: Environment = self.shared.environment
        name, broken = self.request_id, asyncio.get_running_loop().create_future()
        recorders: list[Recorder] = []
        with ExitStack() as sessions:

            def open_session(session: str) -> Recorder:
                own = f"{name}-{len(recorders)}" if recorders else name
                recorder = Recorder(self, sampling, name=own, broken=broken)
                sessions.enter_context(endpoint.open(recorder, session))
                recorders.append(recorder)
                return recorder

            started = time.monotonic()
            try:
                playing = environment.run(given, row["raw_prompt"], open_session, sampling)
                played = await unless_broken(playing, broken)
            except EnvironmentFailedError as error:
                refusal = next((one.refusal for one in recorders if one.refusal is not None), None)
                if refusal is None:
                    raise
                raise type(error)(f"{error}; its last refused request: {refusal}") from refusal
            # What is neither waiting for answers nor the rollout's own is the environment's.
            self.metrics.tool_s += max(0.0, time.monotonic() - started - self.metrics.generate_s)
        found = [trajectory for part in played for trajectory in self._trajectories(part)]
        if not found:
            raise EnvironmentFailedError(
                f"environment {self.environment!r} ended without an answer of the model that counts"
            )
        for trajectory in found[:-1]:
            trajectory.is_snapshot = True
        found[-1].metrics.generate_s, found[-1].metrics.tool_s = self.metrics.generate_s, self.metrics.tool_s
        return found

    def _trajectories(self, part: Played) -> list[Trajectory]:
        """An agent's, with what the environment says of it."""
        found = part.recorder.trajectories(kept=part.kept, find_side_calls=False)
        about = {"environment": self.environment, "stop_condition": part.stop_condition, **part.extra}
        for trajectory in found:
            trajectory.reward = part.reward
            trajectory.reward_extra = dict(part.metrics)
            trajectory.extra["verifiers"] = about
        if found and found[-1].finish_reason == "stop":
            reason = _FINISH_REASONS.get(part.stop_condition or "", "stop")
            found[-1].finish_reason = "length" if part.recorder.ran_out_of_room else reason
        return found
