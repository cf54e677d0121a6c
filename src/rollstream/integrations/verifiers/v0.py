"""Environments of verifiers up to 0.2: `Environment.run_group`, each rollout a group of its own.

The methods promise what those of `EpisodeEnvironment` do.
"""

import signal
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from rollstream.data.values import to_jsonable
from rollstream.errors import ConfigError, DataError
from rollstream.gateway.app import SESSION_HEADER
from rollstream.integrations.verifiers.outcome import (
    EnvironmentFailedError,
    OpenSession,
    Played,
    TransientEnvironmentError,
)
from rollstream.trajectory import Message, SamplingParams

_MODELS_OWN = ("EmptyModelResponseError", "InvalidModelResponseError")
"""Errors that are what the model said: an answer with nothing in it ends a rollout, which is scored."""

_PASSING = ("InfraError", "TunnelError", "SandboxError", "BrowserSandboxError")


class GroupEnvironment:
    """An environment with a dataset, a rubric, and rollouts that are its methods."""

    def __init__(self, environment: Any, name: str, home: ModuleType) -> None:
        if environment.requires_group_rollouts:
            raise ConfigError(
                f"the rubric of environment {name!r} has rewards of whole groups: rollouts are generated, "
                "tried again and resumed one by one here, so it has to score each by itself"
            )
        self.name = name
        self.source = environment
        self.home = home

    @staticmethod
    def load(name: str, arguments: Mapping[str, Any]) -> tuple[ModuleType, Any]:
        import verifiers
        from verifiers.utils.env_utils import import_env_module

        return import_env_module(name), verifiers.load_environment(name, **arguments)

    def rows(self, split: str, count: int | None) -> Iterator[dict[str, Any]]:
        environment = self.source
        dataset = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
        if dataset is None:
            raise ConfigError(f"environment {self.name!r} has no {split} dataset")
        for position in range(len(dataset) if count is None else min(count, len(dataset))):
            given: dict[str, Any] = to_jsonable(dict(dataset[position]))
            prompt = given.pop("prompt")
            if isinstance(prompt, list):
                # Arrow gives each message every key that any of them has.
                prompt = [{k: v for k, v in message.items() if v is not None} for message in prompt]
            place = {"index": given.pop("example_id", position)}
            row = {"version": 0, "input": given}
            yield {
                "prompt": prompt,
                "ground_truth": given.get("answer"),
                "verifiers": row,
                "extra_info": place,
            }

    @asynccontextmanager
    async def serving(self, url: str, model: str) -> AsyncIterator[None]:
        from openai import AsyncOpenAI

        self._model = model
        # An answer may wait as long as the engine does. A worker tries again, not the client.
        async with AsyncOpenAI(api_key="none", base_url=url, max_retries=0, timeout=None) as self._client:
            yield

    async def run(
        self,
        row: Mapping[str, Any],
        messages: list[Message],
        open_session: OpenSession,
        sampling: SamplingParams,
    ) -> list[Played]:
        from verifiers.clients import OpenAIChatCompletionsClient

        if row.get("version") != 0 or not isinstance(row.get("input"), dict):
            raise DataError(f"the row was not written for environment {self.name!r} of verifiers 0.2")
        session = uuid.uuid4().hex
        recorder = open_session(session)
        client = self._client.with_options(default_headers={SESSION_HEADER: session})
        (output,) = await self.source.run_group(
            [{"prompt": messages, **row["input"], "example_id": row["position"]}],
            OpenAIChatCompletionsClient(client),
            self._model,
            # For the tokens of `state["trajectory"]`; what is stored does not come from there.
            {"logprobs": sampling.logprobs or None, "extra_body": {"return_token_ids": True}},
            state_columns=["trajectory"],
        )
        kept = {step["response"].id for step in output["trajectory"]}
        extra = {"is_truncated": bool(output["is_truncated"])}
        if (error := output.get("error")) is not None:
            words = error["error_chain_repr"]
            if error["error"] not in _MODELS_OWN:
                failure = TransientEnvironmentError if error["error"] in _PASSING else EnvironmentFailedError
                raise failure(f"environment {self.name!r}: {words}")
            extra["error"] = words
            # The answer that is the error is no step.
            kept |= {turn.name for turn in recorder.session.turns[-1:]}
        reward = output["reward"]
        return [
            Played(
                recorder,
                None if reward is None else float(reward),
                output.get("stop_condition"),
                metrics={name: float(value) for name, value in (output.get("metrics") or {}).items()},
                kept=kept,
                extra=extra,
            )
        ]


@contextmanager
def signals_left_alone() -> Iterator[None]:
    """Keeps environments from taking SIGINT and SIGTERM over when they are made.

    A run ends by its own handlers, which lets rollouts in flight end well; and in a thread that is not the
    main one, as in training, setting one raises.
    """
    from verifiers.envs import environment

    environment.signal = SimpleNamespace(**{**vars(signal), "signal": lambda *_: None})
    try:
        yield
    finally:
        environment.signal = signal
