"""Weights that a real vLLM server on a CPU is sent over the network, by gloo. `make test-vllm` runs it."""

import asyncio
import copy
import itertools
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollstream.demo import MODEL_PATH
from rollstream.engine.vllm import VLLMEngine
from rollstream.engine.weight_channel import WeightChannel
from rollstream.engine.weight_group import WeightGroup
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.integrations.configured_groups import ConfiguredGroups
from rollstream.training import BatchesAhead, ShuffledPlan
from rollstream.trajectory import SamplingParams
from tests.compat.vllm_server import PYTHON, VARIABLES, Server, plugin_path, vllm_server
from tests.faults.runs import write_prompts

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: run `make test-vllm`"),
    pytest.mark.timeout(900),
]

IDS = [1 + at * 37 % 500 for at in range(60)]
LONG = SamplingParams(600, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with vllm_server("generate", tmp_path_factory.mktemp("vllm") / "server.log", receives=True) as server:
        yield server


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine([server.url], model_path=str(MODEL_PATH))
    await engine.start()
    yield engine
    await engine.close()


class Trainer:
    """The demo model, whose embedding is its output layer, and ways to train it that take no time."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)
        self.channel = WeightChannel("gloo")
        self._random = torch.Generator().manual_seed(0)

    def step(self) -> Any:
        """Changes every tensor, and returns what is to be sent."""
        with torch.no_grad():
            for tensor in self.model.parameters():
                noise = torch.randn(tensor.shape, generator=self._random)
                tensor.add_(noise * 0.2 * tensor.abs().mean())
        return self.channel.put(self.model)

    def logprobs(self, ids: list[int] = IDS) -> list[float]:
        return logprobs_of(self.model, ids)


def logprobs_of(model: Any, ids: list[int]) -> list[float]:
    with torch.no_grad():
        scores = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return [scores[at, token].item() for at, token in enumerate(ids[1:])]


@pytest.fixture
def trainer() -> Trainer:
    return Trainer()


async def has_weights_of(engine: VLLMEngine, trainer: Trainer) -> bool:
    return (await engine.score(IDS)).logprobs == pytest.approx(trainer.logprobs(), abs=1e-4)


async def test_twenty_updates_while_it_generates(
    server: Server, engine: VLLMEngine, trainer: Trainer
) -> None:
    assert engine.capabilities.update_weights  # from a folder it would keep its output layer
    prompts, answers, done = [], [], asyncio.Event()

    async def generate(which: int) -> None:
        while not done.is_set():
            answer = await engine.generate([1, 5 + which], LONG, request_id=str(which))
            prompts.append([1, 5 + which])
            answers.append(answer)

    async with asyncio.TaskGroup() as group:
        for which in range(3):
            group.create_task(generate(which))
        scores = []
        for version in range(1, 21):
            while not await asyncio.to_thread(server.running):
                await asyncio.sleep(0.02)
            await engine.update_weights(trainer.step(), version)
            assert await has_weights_of(engine, trainer), version
            scores.append(trainer.logprobs())
        done.set()
    least = min(max(map(abs, torch.tensor(a) - torch.tensor(b))) for a, b in itertools.pairwise(scores))
    assert least > 0.05  # each was another model
    versions = [[version for _, version in answer.policy_versions] for answer in answers]
    assert versions == [sorted(each) for each in versions] and max(map(len, versions)) > 1
    assert {answer.finish_reason for answer in answers} == {"length"}
    # Its tokens are of the last weights from where it says so.
    prompt, last = next(
        one for one in zip(prompts, answers, strict=True) if one[1].policy_versions[-1][1] == 20
    )
    start = last.policy_versions[-1][0]
    expected = trainer.logprobs([*prompt, *last.token_ids])[1:][start:]
    assert (last.logprobs or [])[start:] == pytest.approx(expected, abs=1e-3)


async def test_other_tensors_are_refused_before_one_is_sent(
    engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.update_weights(trainer.step(), 1)
    sent = []
    monkeypatch.setattr(WeightGroup, "broadcast", lambda *_: sent.append(1))
    state = trainer.model.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    for wrong, words in (
        (dict([*state.items()][:10]), "of 26 tensors are missing"),
        (state | {name: state[name].T}, f"{name} has the shape"),
        (state | {name: state[name].long()}, f"{name} is int64"),
        (state | {"more": state[name].clone()}, "not known to it, more first"),
    ):
        with pytest.raises(EngineError, match=words):
            await engine.update_weights(trainer.channel.put(None, wrong), 2)
    assert not sent and await engine.health() and await has_weights_of(engine, trainer)
    answer = await engine.generate([1, 5], replace(LONG, max_tokens=4), request_id="a")
    assert answer.policy_versions == [(0, 1)]


async def test_a_connection_that_breaks_takes_its_weights_and_a_new_one_brings_them(
    server: Server, engine: VLLMEngine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.update_weights(trainer.step(), 1)
    before = trainer.logprobs()
    whole, left = WeightGroup.broadcast, [12]

    def breaks(group: WeightGroup, tensor: Any) -> None:
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("a cable was pulled")
        whole(group, tensor)

    monkeypatch.setattr(WeightGroup, "broadcast", breaks)
    with pytest.raises(EngineError, match=r"a cable was pulled.*stays paused"):
        await engine.update_weights(trainer.step(), 2)
    # The pool brings it back to the weights that it has, from the copy.
    async with asyncio.timeout(60):
        while not engine.ready:
            await asyncio.sleep(0.1)
    assert (await engine.score(IDS)).logprobs == pytest.approx(before, abs=1e-4)
    await engine.update_weights(trainer.channel.put(trainer.model), 3)
    assert await has_weights_of(engine, trainer)


LOST = """
import asyncio, contextlib, sys
from rollstream.engine import vllm, weight_group
from tests.compat.test_vllm_weights import Trainer

async def stop(where):
    print("here", flush=True)
    await asyncio.sleep(3600)

plain = vllm.transfer

@contextlib.asynccontextmanager
async def met(*arguments, **keywords):
    async def send(names, telling):
        telling.close()
        await stop("start")
    async with plain(*arguments, **keywords):
        yield send

async def main(url, where):
    if where == "start":
        vllm.transfer = met
    else:
        whole, left = weight_group.WeightGroup.broadcast, [int(where)]
        def broadcast(group, tensor):
            left[0] -= 1
            if not left[0]:
                print("here", flush=True)
                __import__("time").sleep(3600)
            whole(group, tensor)
        weight_group.WeightGroup.broadcast = broadcast
    engine = vllm.VLLMEngine([url])
    await engine.start()
    await engine.update_weights(Trainer().step(), 5)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("where", ["start", "1", "9", "26"])
async def test_a_trainer_that_is_lost_leaves_a_server_that_answers_nobody(
    server: Server, engine: VLLMEngine, trainer: Trainer, where: str
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", LOST, server.url, where, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"here\n"
    process.kill()
    await process.wait()
    assert not await engine.health()
    newcomer = VLLMEngine([server.url])
    with pytest.raises(EngineUnavailableError, match="is paused"):
        await newcomer.start()
    # Whoever knew it before may mend it.
    await engine.update_weights(trainer.step(), 6)
    assert await has_weights_of(engine, trainer)
    assert (await engine.generate([1, 5], replace(LONG, max_tokens=4), request_id="a")).policy_versions == [
        (0, 6)
    ]


def check_tokens(rollouts: Sequence[Any], models: dict[int, Any]) -> set[int]:
    """Each token's log-prob is that of the weights that it says it is of. Returns their versions."""
    found = set()
    for rollout in rollouts:
        row, end = rollout.final, len(rollout.final.response_ids)
        for start, version in reversed(row.policy_versions):
            expected = logprobs_of(models[version], [*row.prompt_ids, *row.response_ids])
            own = expected[len(row.prompt_ids) - 1 :][start:end]
            assert row.response_logprobs[start:end] == pytest.approx(own, abs=1e-4)
            found.add(version)
            end = start
    return found


@pytest.mark.parametrize("processes", [1, 2])
def test_batches_ahead(server: Server, trainer: Trainer, tmp_path: Path, processes: int) -> None:
    """Updates come in the middle of rollouts, which are in this process, or in two."""
    (tmp_path / "reward.py").write_text("def compute_score(**given):\n    return 1.0\n")
    generator = ConfiguredGroups(
        [
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.rollout.server_urls=[{server.url}]",
            "actor_rollout_ref.rollout.n=2",
            "actor_rollout_ref.rollout.response_length=48",
            f"custom_reward_function.path={tmp_path / 'reward.py'}",
            f"data.train_files={write_prompts(tmp_path / 'p.jsonl', 8)}",
            f"generation.processes={processes}",
        ]
    )
    plan, models, seen = ShuffledPlan(len(generator.rows), seed=1), {}, set()
    models[0] = copy.deepcopy(trainer.model)
    batches = BatchesAhead(plan, generator, groups_per_step=4, weights="in_flight")
    batches.start(weights=trainer.channel.put(trainer.model))
    try:
        for step in range(1, 5):
            batch = batches.next_batch()
            seen |= check_tokens(batch.rollouts, models)
            batches.trained(batch.step)
            weights = trainer.step()
            models[step] = copy.deepcopy(trainer.model)
            batches.update_weights(weights)
    finally:
        batches.stop()
    assert 0 in seen and max(seen) >= 2  # the fourth batch is one step stale at most


@pytest.mark.parametrize("processes", [1, 2])
def test_a_training_by_trl_with_a_server_that_is_launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    pytest.importorskip("trl")
    from rollstream.integrations.trl.groups import EnvironmentGroups
    from tests.compat.trl.parts import environment, rows
    from tests.compat.trl.parts import trainer as make_trainer

    plain, models = EnvironmentGroups.update_weights, {}

    async def update(self: EnvironmentGroups, source: str, version: int) -> None:
        models[version] = Trainer().model  # TRL's has a `forward` that a copy would share
        models[version].load_state_dict(made.model.state_dict())
        await plain(self, source, version)

    monkeypatch.setattr(EnvironmentGroups, "update_weights", update)
    variables = {**VARIABLES, "PYTHONPATH": plugin_path(tmp_path / "plugin")}
    launch = "actor_rollout_ref.rollout.launch"
    env = environment(
        tmp_path,
        "vllm",
        f"{launch}.python={PYTHON}",
        *(f"+{launch}.env.{name}='{value}'" for name, value in variables.items()),
        f"+{launch}.args.enforce_eager=true",
        f"+{launch}.args.max_num_batched_tokens=16384",
        "actor_rollout_ref.rollout.dtype=float32",
        f"actor_rollout_ref.model.path={MODEL_PATH}",
        f"generation.processes={processes}",
    )
    made = make_trainer(tmp_path, rows(8), env=env, weight_transfer="gloo", learning_rate=1e-2, max_steps=4)
    taken: list[Any] = []
    next_batch = BatchesAhead.next_batch
    monkeypatch.setattr(
        BatchesAhead, "next_batch", lambda *args, **more: taken.append(next_batch(*args, **more)) or taken[-1]
    )
    made.train()
    assert sorted(models) == [0, 1, 2, 3] and len(taken) == 4
    seen = set().union(*(check_tokens(batch.rollouts, models) for batch in taken))
    assert len(seen) > 2
    assert not list(tmp_path.rglob("*.safetensors"))
