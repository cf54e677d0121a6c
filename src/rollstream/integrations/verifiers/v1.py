"""Environments of verifiers from 0.3 on: tasks, agents and their traces, one episode a rollout."""

import itertools
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

from rollstream.errors import ConfigError, DataError
from rollstream.integrations.verifiers.outcome import (
    EnvironmentFailedError,
    OpenSession,
    Played,
    TransientEnvironmentError,
)
from rollstream.trajectory import Message, SamplingParams

_PASSING = ("SandboxError", "TunnelError", "InterceptionError", "TimeoutError")

_NO_PROMPT = "(the environment opens the conversation)"


class EpisodeEnvironment:
    """A taskset, the agents that play its tasks, and how a task becomes an episode."""

    def __init__(self, environment: Any, name: str, home: ModuleType) -> None:
        """Args:
        environment: a `verifiers.v1.Env`.
        name: what it is called.
        home: the module that made it.
        """
        self.name = name
        self.source = environment
        self.home = home
        self._task_type = type(environment.taskset).task_type()

    @staticmethod
    def load(name: str, arguments: Mapping[str, Any]) -> tuple[ModuleType, Any]:
        """The module of an installed taskset, and the environment that a configuration makes of it."""
        from verifiers.v1.utils.loaders import import_taskset, load_environment, resolve_env_config

        taskset = {"id": name, **arguments.get("taskset", {})}
        return import_taskset(name), load_environment(resolve_env_config({**arguments, "taskset": taskset}))

    def rows(self, split: str, count: int | None) -> Iterator[dict[str, Any]]:
        """The prompt rows: `prompt`, `ground_truth`, and what `run` needs in the column `verifiers`.

        A task's position is `extra_info.index`, so that its prompt key does not depend on it, nor on defaults that
        a release of verifiers adds.

        Args:
            split: `train` or `eval`.
            count: at most; None: all of them.

        Raises:
            ConfigError: there is no such split, or no end to the rows.
        """
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
            place = {"index": data.pop("idx")} if "idx" in data else {}
            own = task.data.model_dump(mode="json", exclude_defaults=True)
            kept = {name: value for name, value in data.items() if name in own}
            yield {
                "prompt": _prompt_of(data),
                "verifiers": {"version": 1, "task": kept},
                "extra_info": place,
            }

    @asynccontextmanager
    async def serving(self, url: str, model: str) -> AsyncIterator[None]:
        """Holds open what rollouts share while some are under way; `url` answers for the model."""
        from verifiers import v1

        self._model = model
        self._client = v1.EvalClientConfig(base_url=url, api_key_var="ROLLSTREAM_NO_KEY")
        async with self.source.serving():
            yield

    async def run(
        self,
        row: Mapping[str, Any],
        messages: list[Message],
        open_session: OpenSession,
        sampling: SamplingParams,
    ) -> list[Played]:
        """Executes one rollout, its rewards included, while `serving`.

        Args:
            row: the column `verifiers` of the prompt row, and its `position`.
            messages: of the prompt row.
            open_session: called before an agent's first request.
            sampling: how the run samples.

        Returns:
            The agents whose tokens train the model, the last one to end last.

        Raises:
            EnvironmentFailedError: it ended with an error of its own.
            DataError: the row is none of this environment.
        """
        from verifiers import v1

        if row.get("version") != 1:
            raise DataError(
                f"the row was not written for environment {self.name!r} of verifiers 0.3 or later"
            )
        place = {} if row["position"] is None else {"idx": row["position"]}
        data = self._task_type.data_type().model_validate(row["task"] | place)
        task = self._task_type(data, self.source.config.taskset.task)
        context = v1.ModelContext(
            model=self._model,
            client=self._client,
            sampling=v1.Sampling(temperature=sampling.temperature, top_p=sampling.top_p),
        )
        recorders = {}

        def begin(trace: Any) -> None:
            # The interception server sends a trace's id with each of its requests.
            recorders[trace.id] = open_session(trace.id)

        episode = await self.source.run_episode(task, context, on_trace=begin)
        if not self.source.complete(episode):
            room = any(recorder.ran_out_of_room for recorder in recorders.values())
            if episode.errors or not room:  # a model that ran out of room is no error
                raise self._failure(episode)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        if not trained:
            raise EnvironmentFailedError(
                f"environment {self.name!r}: no agent of the episode is trainable: there is nothing to keep"
            )
        return [_played(trace, recorders[trace.id]) for trace in trained]

    def _failure(self, episode: Any) -> EnvironmentFailedError:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not errors:
            return EnvironmentFailedError(f"environment {self.name!r} ended an episode without a result")
        last = errors[-1]
        failure = TransientEnvironmentError if last.type in _PASSING else EnvironmentFailedError
        return failure(f"environment {self.name!r}: {last.type}: {last.message}")


def _played(trace: Any, recorder: Any) -> Played:
    scores = {name: float(one.score) for name, one in trace.rewards.items() if one is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return Played(
        recorder,
        float(trace.reward) if scores else None,
        trace.stop_condition,
        metrics={**scores, **metrics},
        extra={"agent": trace.agent.name},
    )


def _prompt_of(data: Mapping[str, Any]) -> list[Message]:
    """The task's prompt, as far as the task says; the harness has the last word."""
    system, prompt = data.get("system_prompt"), data.get("prompt")
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    if isinstance(prompt, str):
        messages.append({"role": "user", "content": prompt})
    elif prompt:
        messages += [{k: v for k, v in message.items() if v is not None} for message in prompt]
    return messages or [{"role": "user", "content": _NO_PROMPT}]
