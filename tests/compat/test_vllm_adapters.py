"""LoRA adapters of peft's as weights of a real vLLM server on a CPU, which rollstream launches. `make test-vllm`."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollstream.demo import MODEL_PATH
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.kind import EngineOptions
from rollstream.engine.launch.engine import launched_engine
from rollstream.engine.launch.plan import LaunchRequest
from rollstream.engine.vllm import KIND
from rollstream.errors import ConfigError, EngineError
from rollstream.trajectory import Completion, SamplingParams
from tests.compat.vllm_server import PYTHON
from tests.support.adapters import check_logprobs, make_adapter

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: run `make test-vllm`"),
    pytest.mark.timeout(900),  # a server takes a minute to start
]

ARGS = {"enforce-eager": True, "max-num-batched-tokens": 16384}
ENV = {
    **{"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_NO_USAGE_STATS": "1"},
    **{"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
}
PROMPT = [1, 5, 9, 33]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), seed=seed) for seed in range(3)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ContinuingEngine]:
    request = LaunchRequest(
        devices_per_node=0,
        python=PYTHON,
        arguments={"dtype": "float32", "lora_rank": 6},  # vLLM has no such rank, but one of 8
        args=ARGS,
        env=ENV,
    )
    options = EngineOptions(str(MODEL_PATH), log_dir=tmp_path_factory.mktemp("logs"))
    engine = ContinuingEngine(launched_engine(KIND, options, request))
    await engine.start()
    yield engine
    await engine.close()


async def generate(engine: ContinuingEngine, tokens: int, name: str = "a") -> Completion:
    how = SamplingParams(tokens, temperature=1.0, ignore_eos=True)
    return await engine.generate(PROMPT, how, request_id=name)


@pytest.mark.asyncio(loop_scope="module")
async def test_generations_go_on_under_a_new_adapter(engine: ContinuingEngine, adapters: list[Path]) -> None:
    sources = {0: None, **dict(enumerate(adapters, 1))}
    assert engine.capabilities.adapters == 2 and not engine.capabilities.update_weights
    over = []
    for version in (1, 2, 3):
        task = asyncio.create_task(generate(engine, 1500))
        while not engine.inside:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05 * version)
        await engine.update_weights(str(sources[version]), version)
        over.append(await task)
    for version, answer in enumerate(over, 1):
        assert answer.policy_versions[-1][1] in (version - 1, version)  # it may have ended before
        check_logprobs(answer, PROMPT, sources)
    assert any(len(answer.policy_versions) == 2 for answer in over)
    with pytest.raises(EngineError, match="cannot update weights"):
        await engine.update_weights(str(MODEL_PATH), 4)


@pytest.mark.asyncio(loop_scope="module")
async def test_an_adapter_that_the_server_refuses_leaves_the_one_before(
    engine: ContinuingEngine, adapters: list[Path], tmp_path: Path
) -> None:
    await engine.update_weights(str(adapters[0]), 4)
    with pytest.raises(EngineError, match="rank"):
        await engine.update_weights(str(make_adapter(tmp_path / "wide", seed=9, rank=16)), 5)
    check_logprobs(await generate(engine, 40), PROMPT, {4: adapters[0]})


@pytest.mark.asyncio(loop_scope="module")
async def test_two_versions_in_flight_at_once_outlive_their_server(
    engine: ContinuingEngine, adapters: list[Path]
) -> None:
    """The last one: weights stay pinned."""
    with pytest.raises(ConfigError, match="does so under 2"):
        engine.pin_weights(3)  # a request under a third one would wait for the end of another one's
    engine.pin_weights(2)
    await engine.update_weights(str(adapters[1]), 5)

    begun, turned, go_on = asyncio.Event(), asyncio.Semaphore(0), asyncio.Event()

    async def rollout(name: str) -> list[Completion]:
        with engine.pinned(name):
            begun.set()
            first = await generate(engine, 1000, name)
            turned.release()
            await go_on.wait()
            return [first, await generate(engine, 200, f"{name}.1")]

    old = asyncio.create_task(rollout("old"))
    await begun.wait()
    await engine.update_weights(str(adapters[2]), 6)
    new = asyncio.create_task(rollout("new"))
    await turned.acquire()
    await turned.acquire()
    launched: Any = engine.engine
    os.kill(launched.supervisors[0]._process.pid, signal.SIGKILL)
    while not launched.restarts or not await engine.health():  # another server, without any adapter
        await asyncio.sleep(0.2)
    go_on.set()
    for version, task in ((5, old), (6, new)):
        for answer in await task:
            assert answer.policy_versions == [(0, version)]
            check_logprobs(answer, PROMPT, {version: adapters[version - 4]})


def test_trl_trains_an_adapter_with_rollouts_pinned_to_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trl")
    from peft import LoraConfig

    from tests.compat.trl.adapters import check_training
    from tests.compat.trl.parts import environment, rows, trainer

    launch = "actor_rollout_ref.rollout.launch"
    words = [
        f"{launch}.python={PYTHON}",
        "trainer.n_gpus_per_node=0",
        "actor_rollout_ref.rollout.dtype=float32",
    ]
    words += [f"+{launch}.args.{name}={value}" for name, value in ARGS.items()]
    words += [f"+{launch}.env.{name}='{value}'" for name, value in ENV.items()]
    given: dict[str, Any] = {"max_steps": 5, "learning_rate": 0.02, "weight_sync": "pinned"}
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    made = trainer(tmp_path, rows(20), env=environment(tmp_path, "vllm", *words), peft_config=config, **given)
    written = check_training(made, tmp_path / "kept", monkeypatch)
    assert [path.name for path in written] == ["0", "1", "2", "3", "4"]
