"""Environments of verifiers from 0.3 on: tasks, agents and their traces, one episode a rollout."""

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from rollstream.errors import ConfigError, DataError
from rollstream.integrations.verifiers.endpoint import Endpoint
from rollstream.integrations.verifiers.failures import EnvironmentFailedError, TransientEnvironmentError
from rollstream.integrations.verifiers.outcome import OpenSession, Played
from rollstream.integrations.verifiers.recorder import Recorder
from rollstream.trajectory import Message, SamplingParams

_PASSING = ("SandboxError", "TunnelError", "InterceptionError", "TimeoutError")

_NO_PROMPT = "(the environment opens the conversation)"


class EpisodeEnvironment:
    """A taskset, the agents that play its tasks, and how a task becomes an episode."""

    def __init__(self, environment: Any, name: str, *, home: ModuleType, model: str) -> None:
        """Args:
        environment: a `verifiers.v1.Env`.
        name: what it is called.
        home: the module that made it.
        model: what requests call the model.
        """
        self.name = name
        self.source = environment
        self.home = home
        self._model = model
        self._task_type = type(environment.taskset).task_type()
        self._data_type = self._task_type.data_type()
        self._url = ""

    def rows(self, split: str, count: int | None) -> Iterator[dict[str, Any]]:
        if split != "train":
            raise ConfigError(
                f"environment {self.name!r} has one taskset and no splits: choose by its arguments instead"
            )
        tasks = self.source.taskset
        # 0.3 knows no views with an end.
        if count is None and not getattr(tasks, "bounded", not tasks.INFINITE):
            raise ConfigError(f"the tasks of environment {self.name!r} have no end: say how many to take")
        for task in itertools.islice(tasks, count):
            data = task.data.model_dump(mode="json", exclude_none=True)
            yield {"prompt": _prompt_of(data), "verifiers": {"version": 1, "task": data}}

    @asynccontextmanager
    async def serving(self, endpoint: Endpoint) -> AsyncIterator[None]:
        self._url = endpoint.url
        async with self.source.serving():
            yield

    async def run(
        self,
        row: Mapping[str, Any],
        messages: list[dict[str, Any]],
        *,
        open_session: OpenSession,
        sampling: SamplingParams,
    ) -> list[Played]:
        from verifiers import v1

        if row.get("version") != 1:
            raise DataError(
                f"the row was not written for environment {self.name!r} of verifiers 0.3 or later"
            )
        data = self._data_type.model_validate(row["task"])
        task = self._task_type(data, self.source.config.taskset.task)
        recorders: dict[str, Recorder] = {}

        def begin(trace: Any) -> None:
            # The interception server sends a trace's id with each of its requests.
            recorders[trace.id] = open_session(trace.id)

        context = v1.ModelContext(
            model=self._model,
            client=v1.EvalClientConfig(base_url=self._url, api_key_var="ROLLSTREAM_NO_KEY"),
            sampling=v1.Sampling(temperature=sampling.temperature, top_p=sampling.top_p),
        )
        episode = await self.source.run_episode(task, context, on_trace=begin)
        if not self.source.complete(episode):
            self._fail(episode, recorders)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if not trained:
            raise EnvironmentFailedError(
                f"environment {self.name!r}: no agent of the episode is trainable: there is nothing to keep"
            )
        return [_played(trace, recorders[trace.id]) for trace in trained]

    def _fail(self, episode: Any, recorders: Mapping[str, Recorder]) -> None:
        """Raises the episode's error, if it is one: a model that ran out of room is none."""
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not errors:
            raise EnvironmentFailedError(f"environment {self.name!r} ended an episode without a result")
        room = any(recorder.ran_out_of_room for recorder in recorders.values())
        if room and not episode.errors:
            return
        last = errors[-1]
        failure = TransientEnvironmentError if last.type in _PASSING else EnvironmentFailedError
        raise failure(f"environment {self.name!r}: {last.type}: {last.message}")


def _played(trace: Any, recorder: Recorder) -> Played:
    scores = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Played(
        recorder,
        float(trace.reward) if scores else None,
        trace.stop_condition,
        metrics={**{name: float(one.score) for name, one in scores.items()}, **metrics},
        extra={"agent": trace.agent.name},
    )


def _prompt_of(data: Mapping[str, Any]) -> list[Message]:
    """What the model is shown first, as far as the task says; the harness has the last word."""
    system, prompt = data.get("system_prompt"), data.get("prompt")
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    elif prompt:
        messages += [{k: v for k, v in message.items() if v is not None} for message in prompt]
    return messages or [{"role": "user", "content": _NO_PROMPT}]
