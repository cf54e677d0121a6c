"""verl's worker and manager of agent loops, with rollstream's stream of results. Imported where verl is."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import ray
from verl.experimental.agent_loop.agent_loop import AgentLoopManager, AgentLoopWorker
from verl.utils.ray_utils import auto_await

from rollstream.errors import DataError
from rollstream.integrations.verl.compose import to_rollstream
from rollstream.integrations.verl.recipe import VerlRecipe
from rollstream.integrations.verl.rows import sample_row
from rollstream.integrations.verl.worker import StreamingAgentLoopWorkerMixin
from rollstream.rollout.executor import Executor
from rollstream.rollout.ray import RayBackend
from rollstream.store.records import EncodedRollout
from rollstream.trajectory import Failure, RolloutKey


class StreamingAgentLoopWorker(StreamingAgentLoopWorkerMixin, AgentLoopWorker):  # type: ignore[misc]
    """verl's agent loop worker, which also runs single samples."""


class GenerationLoopManager(AgentLoopManager):  # type: ignore[misc]
    """verl's manager of agent loops, whose workers take samples one by one and deliver each as it completes.

        servers = await StreamingLLMServerManager.create(config)
        client = servers.get_client(client_cls=StreamingLLMServerClient)
        manager = await GenerationLoopManager.create(config, client)
        async for result in manager.stream(samples):
            ...

    Any number of samples over any number of workers: a worker gets the next one when it has room. A sample
    that fails is delivered as its `Failure`; a worker that dies costs what it had in flight, which is begun
    again. `generate_sequences` is verl's own, over verl's workers, which are started when it is first called.
    """

    worker_class = StreamingAgentLoopWorker

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.agent_loop_workers_class = ray.remote(self.worker_class)
        self.agent_loop_workers: list[Any] = []
        super().__init__(*args, **kwargs)

    async def _init_agent_loop_workers(self) -> None:
        """Not yet: the workers of a stream are other ones."""

    @auto_await  # type: ignore[untyped-decorator]
    async def generate_sequences(self, prompts: Any) -> Any:
        """verl's: a batch, in equal chunks. To be awaited or not, as verl's trainers do both."""
        if not self.agent_loop_workers:
            await super()._init_agent_loop_workers()
        return await super().generate_sequences(prompts)

    async def stream(
        self, samples: Iterable[Mapping[str, Any]], *, max_in_flight: int = 256, max_attempts: int = 3
    ) -> AsyncGenerator[EncodedRollout | Failure, None]:
        """Runs samples, and yields what became of each as soon as it is there.

        Args:
            samples: rows as verl's dataset gives them, each with an `index` of its own, from 0 on.
            max_in_flight: at once, over all workers.
            max_attempts: tries at one sample where trying again may help.

        Raises:
            DataError: an `index` that is missing, no number, negative, or there twice. (A sample without
                messages is a failed one.)
        """
        rows: dict[int, Mapping[str, Any]] = {}
        recipe = VerlRecipe(
            settings=to_rollstream(self.config, [f"generation.max_attempts={max_attempts}"]),
            verl_config=self.config,
            worker=self.worker_class,
            client=self.llm_client,
            loop_names=(self.rollout_config.agent.default_agent_loop,),
            data_sources=("unknown",),
        )
        results = _Results()
        run = Executor(
            results,
            RayBackend(lambda: recipe),
            load_row=lambda key: sample_row(key.index, rows[key.index]),
            max_in_flight=max_in_flight,
            workers=self.rollout_config.agent.num_workers,
            attempt_timeout=600.0,
            max_attempts=max_attempts,
        )
        async with AsyncExitStack() as stack:
            stack.push_async_callback(run.close)
            await run.start()
            work = asyncio.ensure_future(run.run(_keys(samples, rows)))
            work.add_done_callback(lambda _: results.put_nowait(None))
            try:
                while (item := await results.get()) is not None:
                    result, taken = item
                    taken.set_result(None)
                    rows.pop(result.index, None)
                    yield result
                await work
            finally:
                run.drop()
                results.abandon()
                await asyncio.gather(work, return_exceptions=True)


class _Results(asyncio.Queue[Any]):
    """Takes the place of a store: a result is durable once somebody has taken it, or nobody takes any more."""

    is_abandoned = False

    def submit(self, result: EncodedRollout | Failure) -> "asyncio.Future[None]":
        """See `StoreWriter.submit`."""
        taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.put_nowait((result, taken))
        if self.is_abandoned:
            self.abandon()
        return taken

    def abandon(self) -> None:
        """Nobody takes anything any more."""
        self.is_abandoned = True
        while not self.empty():
            if (item := self.get_nowait()) is not None:
                item[1].set_result(None)


def _keys(samples: Iterable[Mapping[str, Any]], rows: dict[int, Mapping[str, Any]]) -> Iterator[RolloutKey]:
    """The keys of samples, which are kept in `rows`. Raises `DataError` for an index that cannot be used."""
    seen: set[int] = set()
    for sample in samples:
        index = sample.get("index")
        if not isinstance(index, int | np.integer) or index < 0 or index in seen:
            raise DataError(
                f"sample index {index!r}: every sample needs an index of its own, 0 or more (verl's dataset gives "
                "0 to every row that has none in its extra_info)"
            )
        seen.add(int(index))
        rows[int(index)] = sample
        yield RolloutKey(int(index), 0)
