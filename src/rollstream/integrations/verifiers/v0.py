"""Environments of verifiers up to 0.2: `Environment.run_group`, each rollout a group of its own."""

import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from rollstream.data.values import to_jsonable
from rollstream.errors import ConfigError, DataError
from rollstream.integrations.verifiers.endpoint import SESSION_HEADER, Endpoint
from rollstream.integrations.verifiers.failures import EnvironmentFailedError, TransientEnvironmentError
from rollstream.integrations.verifiers.outcome import OpenSession, Played
from rollstream.trajectory import SamplingParams

_MODELS_OWN = ("EmptyModelResponseError", "InvalidModelResponseError")
"""Errors that are what the model said: an answer with nothing in it ends a rollout, which is scored."""

_PASSING = ("InfraError", "TunnelError", "SandboxError", "BrowserSandboxError")


class GroupEnvironment:
    """An environment with a dataset, a rubric, and rollouts that are its methods."""

    def __init__(self, environment: Any, name: str, *, home: ModuleType, model: str) -> None:
        """Args:
        environment: a `verifiers.Environment`.
        name: what it is called.
        home: the module that made it.
        model: what requests call the model.

        Raises:
            ConfigError: its rubric compares the rollouts of a group.
        """
        if environment.requires_group_rollouts:
            raise ConfigError(
                f"the rubric of environment {name!r} has rewards of whole groups: rollouts are generated, "
                "tried again and resumed one by one here, so it has to score each by itself"
            )
        self.name = name
        self.source = environment
        self.home = home
        self._model = model
        self._http: Any = None
        self._client: Any = None

    def rows(self, split: str, count: int | None) -> Iterator[dict[str, Any]]:
        environment = self.source
        dataset = environment.build_dataset() if split == "train" else environment.build_eval_dataset()
        if dataset is None:
            raise ConfigError(f"environment {self.name!r} has no {split} dataset")
        for position in range(len(dataset) if count is None else min(count, len(dataset))):
            given: dict[str, Any] = to_jsonable(dict(dataset[position]))
            prompt = given["prompt"]
            if isinstance(prompt, list):
                # Arrow gives each message every key that any of them has.
                prompt = [{k: v for k, v in message.items() if v is not None} for message in prompt]
            given.pop("prompt")
            yield {
                "prompt": prompt,
                "ground_truth": given.get("answer"),
                "verifiers": {"version": 0, "input": given},
            }

    @asynccontextmanager
    async def serving(self, endpoint: Endpoint) -> AsyncIterator[None]:
        from openai import AsyncOpenAI

        # An answer may wait as long as the engine does. A worker tries again, not the client.
        client = AsyncOpenAI(api_key="none", base_url=endpoint.url, max_retries=0, timeout=None)
        async with client:
            self._client = client
            yield

    async def run(
        self,
        row: Mapping[str, Any],
        messages: list[dict[str, Any]],
        *,
        open_session: OpenSession,
        sampling: SamplingParams,
    ) -> list[Played]:
        from verifiers.clients import OpenAIChatCompletionsClient

        if row.get("version") != 0 or not isinstance(row.get("input"), dict):
            raise DataError(f"the row was not written for environment {self.name!r} of verifiers 0.2")
        session = uuid.uuid4().hex
        recorder = open_session(session)
        client = OpenAIChatCompletionsClient(
            self._client.with_options(default_headers={SESSION_HEADER: session})
        )
        (output,) = await self.source.run_group(
            [{"prompt": messages, **row["input"]}],
            client,
            self._model,
            # For the tokens of `state["trajectory"]`; what is stored does not come from there.
            {"logprobs": sampling.logprobs or None, "extra_body": {"return_token_ids": True}},
            state_columns=["trajectory"],
        )
        error = output.get("error")
        if error is not None and error["error"] not in _MODELS_OWN:
            failure = TransientEnvironmentError if error["error"] in _PASSING else EnvironmentFailedError
            raise failure(f"environment {self.name!r}: {error['error_chain_repr']}")
        kept = {step["response"].id for step in output["trajectory"]}
        extra = {"is_truncated": bool(output["is_truncated"])}
        if error is not None:
            extra["error"] = error["error_chain_repr"]
            if (last := recorder.newest_answer()) is not None:
                kept.add(last)  # the answer that is the error is no step
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
