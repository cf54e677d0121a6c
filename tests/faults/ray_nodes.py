"""Ray nodes on this machine for tests, and what kills them; recipes of workers, importable where they run."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.agent.prompt import PromptRenderer
from rollstream.agent.registry import register
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, EngineOverloadedError, EngineUnavailableError
from rollstream.rollout.gate import EngineGate
from rollstream.rollout.meter import MeteredEngine
from rollstream.rollout.ray_worker import BuiltWorker
from rollstream.rollout.retry import RetryPolicy
from rollstream.rollout.worker import RolloutWorker
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import PromptRow, SamplingParams, Trajectory
from tests.without_torch import without_torch

NOTICED_SOON = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}
"""A node that is gone is noticed within seconds, not fifteen."""

AS_QUICK_AS_OTHERS = {
    "prestart_worker_first_driver": False,
    "enable_worker_prestart": False,
    "worker_niceness": 0,
}
"""No idle process for each CPU of each node, most of which would never be used; and those that are used do
not wait for whatever else runs here, as by Ray's default (nice 15)."""


@contextlib.contextmanager
def nodes(*cpus: int, gpus: int = 0) -> Iterator[Any]:
    """A cluster with a node for each number of CPUs, each with so many GPUs that it only says it has.

    The first one is its head.
    """
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", without_torch()["PYTHONPATH"])  # of the nodes, and of workers on them
            for number, count in enumerate(cpus):
                extra: dict[str, Any] = (
                    {"_system_config": NOTICED_SOON | AS_QUICK_AS_OTHERS} if number == 0 else {}
                )
                extra |= {"num_cpus": count, "num_gpus": gpus}
                cluster.add_node(object_store_memory=128 << 20, include_dashboard=False, **extra)
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def working_pids() -> list[int]:
    """Processes of this program's Ray workers that have started, and nobody else's, the oldest first.

    Ray names a process after the method that it began last.
    """
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, IndexError):
            if process.cmdline()[0].startswith(("ray::RayWorker.reports", "ray::RayWorker.give")):
                found.append((process.create_time(), process.pid))
    return [pid for _, pid in sorted(found)]


def lose_node(cluster: Any, node: Any) -> None:
    """A node goes as with its power: nothing on it has time for anything."""
    raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
    for process in [raylet, *raylet.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)


def wait_for(condition: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.02)


@register("deadly_agent")
class DeadlyAgent(AgentLoop):
    """Ends its process in row 7, and is an answer of one token elsewhere."""

    async def run(self, sampling: SamplingParams, *, raw_prompt: Any, **row: Any) -> Trajectory:
        if row["index"] == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        await asyncio.sleep(0.02)
        return Trajectory([1], [2], [1], [-0.5], raw_prompt, "stop")


class LostEngine(ScriptedEngine):
    """One that has gone for good."""

    async def health(self) -> bool:
        return False

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        raise EngineUnavailableError("it has gone")


class FullEngine(ScriptedEngine):
    """One that refuses two of three requests for want of room."""

    async def generate(self, *args: Any, request_id: str, **kwargs: Any) -> Any:
        if random.random() < 2 / 3:
            raise EngineOverloadedError("no room")
        return await super().generate(*args, request_id=request_id, **kwargs)


@dataclass(frozen=True)
class ScriptedRecipe:
    """A worker on a scripted engine."""

    loop: str = "single_turn_agent"
    latency: float = 0.0
    broken: str = ""
    """What is wrong with the configuration."""
    lost: tuple[int, ...] = ()
    """Numbers of workers whose engine has gone."""
    full: bool = False

    async def build(self, number: int) -> BuiltWorker:
        if self.broken:
            raise ConfigError(self.broken)
        kind = LostEngine if number in self.lost else FullEngine if self.full else ScriptedEngine
        engine = kind(latency=self.latency, record=False)
        await engine.start()
        metered = MeteredEngine(engine)
        tokenizer = load_tokenizer(str(MODEL_PATH))
        gate = EngineGate(engine, timeout=0.3 if self.lost else 30)
        worker = RolloutWorker(
            AgentResources(
                metered, tokenizer, PromptRenderer(tokenizer, prompt_length=64, truncation="error"), 16
            ),
            sampling=SamplingParams(16),
            seed=3,
            default_agent_loop=self.loop,
            retry=RetryPolicy(100 if self.full else 3, 0.001, 0.002),
            attempt_timeout=30,
            gate=gate,
        )
        return BuiltWorker(worker, metered, gate, close=engine.close)


def load_row(index: int) -> PromptRow:
    return PromptRow(index, f"{index:032x}", [{"role": "user", "content": f"{index} + 1 ="}], "test")
