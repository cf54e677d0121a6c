"""Engine `vllm` against real vLLM servers on a CPU. `make test-vllm` makes their environment, and runs it."""

import asyncio
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow.parquet as pq
import pytest
from openai import AsyncOpenAI

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import ChatPrompt, Engine
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.kind import EngineOptions
from rollstream.engine.openai import OpenAIEngine
from rollstream.engine.vllm import VLLMEngine, VLLMReplica
from rollstream.engine.weight_channel import WeightChannel
from rollstream.engine.weight_deltas import DeltaChannel
from rollstream.engine.weight_probe import own_logprobs, write_probe
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.gateway.app import Endpoint
from rollstream.rollout.validate import check_trajectories
from rollstream.trajectory import Completion, SamplingParams
from tests.compat.vllm_server import OPTIONS, PYTHON, Server, vllm_server
from tests.conformance.reference import Reference
from tests.faults.runs import overrides, write_prompts
from tests.unit.gateway.test_recorder import TOOL, recorder_of

pytestmark = [
    pytest.mark.skipif(not PYTHON, reason="needs vLLM: run `make test-vllm`"),
    pytest.mark.timeout(900),  # a server takes a minute to start
]

GREEDY = SamplingParams(24, temperature=0.0)
LONG = SamplingParams(3000, ignore_eos=True, seed=1)
QUESTIONS = [f"What is {i * 13 % 97} + {i * 31 % 89}?" for i in range(20)]


def copy_model(folder: Path, *, scale: float = 1.0, head: float | None = 1.0) -> Path:
    """The demo model with other weights: MLPs and embedding times `scale`, and an output layer of its own.

    `head` scales that; None: it stays the embedding.
    """
    from safetensors.torch import load_file, save_file

    shutil.copytree(MODEL_PATH, folder)
    weights = load_file(MODEL_PATH / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"].clone()
    weights = {
        name: value * scale if "mlp" in name or "embed" in name else value for name, value in weights.items()
    }
    if head is not None:
        weights["lm_head.weight"] = embedding * head
        config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
        (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, whose output layer is a copy of the embedding: vLLM takes other weights of it on a CPU."""
    return copy_model(tmp_path_factory.mktemp("model") / MODEL_PATH.name)


@pytest.fixture(scope="module", params=OPTIONS)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, untied: Path
) -> Iterator[Server]:
    log, model = (
        tmp_path_factory.mktemp("vllm") / "server.log",
        untied if request.param == "generate" else MODEL_PATH,
    )
    with vllm_server(request.param, log, model) as server:
        yield server


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine([server.url], model_path=str(MODEL_PATH))
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL_PATH)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for text in QUESTIONS
    ]


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(MODEL_PATH)


async def test_capabilities_are_found_out(server: Server, engine: VLLMEngine) -> None:
    found = engine.capabilities
    assert found.logprobs == ("raw" if server.route == "generate" else "processed")
    assert found.update_weights == (server.route == "generate")
    assert (found.max_model_len, found.vocab_size) == (4096, 512)
    assert found.token_ids and found.seeds and found.stop_strings and not found.images
    assert await engine.health()


async def test_abort_and_cancel_end_a_request_in_the_server(server: Server, engine: VLLMEngine) -> None:
    (task,) = await server.at_work(partial(engine.generate, [1, 5], LONG, request_id="a"))
    await engine.abort("a")
    part = await asyncio.wait_for(task, 60)
    await server.until_idle()
    assert part.finish_reason == "abort"
    assert len(part.logprobs or []) == len(part.token_ids) < 3000
    if server.route == "generate":  # without an abort route, what there was is lost
        again = await engine.generate([1, 5], replace(LONG, max_tokens=400), request_id="b")
        assert part.token_ids[:400] == again.token_ids[: len(part.token_ids)]
    (task,) = await server.at_work(partial(engine.generate, [1, 5], LONG, request_id="c"))
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    await server.until_idle()
    await engine.abort("unknown")


async def test_the_servers_own_refusals(server: Server) -> None:
    engine = VLLMEngine([server.url])  # without the model's folder it does not know the vocabulary
    await engine.start()
    with pytest.raises(EngineError, match="answers 400: Token id 600 is out of vocabulary") as caught:
        await engine.generate([600], GREEDY, request_id="a")
    assert type(caught.value) is EngineError
    assert await engine.health()
    await engine.close()


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with other weights, its embedding and output layer among them."""
    return copy_model(tmp_path_factory.mktemp("model") / "changed", scale=1.1, head=0.95)


async def test_other_weights(
    server: Server,
    engine: VLLMEngine,
    prompts: list[list[int]],
    changed: Path,
    untied: Path,
    tmp_path: Path,
) -> None:
    if server.route != "generate":
        pytest.skip("needs the generate route and VLLM_SERVER_DEV_MODE=1")
    before = await engine.generate(prompts[0], GREEDY, request_id="a")
    how = replace(LONG, max_tokens=1500)
    (over,) = await server.at_work(partial(engine.generate, prompts[0], how, request_id="b"))
    await engine.update_weights(str(changed), 7)
    after = await engine.generate(prompts[0], GREEDY, request_id="a")
    first = await over
    with pytest.raises(EngineError, match="stays paused"):
        await engine.update_weights(str(tmp_path / "nothing"), 8)
    # It is brought back to the weights that the pool has.
    assert await engine.health()
    back = await engine.generate(prompts[0], GREEDY, request_id="a")
    assert (back.token_ids, back.policy_versions) == (after.token_ids, [(0, 7)])
    await engine.update_weights(str(untied), 9)
    assert await engine.health()
    again = await engine.generate(prompts[0], GREEDY, request_id="a")

    assert (before.policy_versions, after.policy_versions) == ([(0, 0)], [(0, 7)])
    assert again.policy_versions == [(0, 9)]
    assert again.token_ids == before.token_ids
    assert again.logprobs == pytest.approx(before.logprobs, abs=1e-4)
    new = Reference(changed)
    assert after.logprobs == pytest.approx(new.score(prompts[0], after.token_ids)[1], abs=1e-3)
    # What was in flight goes on with the new weights, exactly from where they are said to begin.
    (_, old_version), (start, new_version) = first.policy_versions
    assert (old_version, new_version) == (0, 7)
    logprobs = first.logprobs or []
    assert logprobs[:start] == pytest.approx(
        Reference(MODEL_PATH).score(prompts[0], first.token_ids)[1][:start], abs=1e-3
    )
    assert logprobs[start:] == pytest.approx(new.score(prompts[0], first.token_ids)[1][start:], abs=1e-3)


def probed(folder: Path) -> str:
    """The folder, with what a trainer says of its weights."""
    from transformers import AutoModelForCausalLM

    write_probe(folder, own_logprobs(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), 512))
    return str(folder)


async def test_weights_are_compared_with_the_trainers(
    server: Server, engine: VLLMEngine, untied: Path, tmp_path: Path
) -> None:
    if server.route != "generate":
        pytest.skip("needs the generate route and VLLM_SERVER_DEV_MODE=1")
    # The second folder has weights that the trainer's word is not of.
    right, wrong = (copy_model(tmp_path / str(at), scale=1.1, head=0.95) for at in range(2))
    try:
        await engine.update_weights(probed(right), 3)
        assert await engine.health()
        shutil.copyfile(untied / "model.safetensors", Path(probed(wrong)) / "model.safetensors")
        with pytest.raises(EngineError, match="nats off the trainer's"):
            await engine.update_weights(str(wrong), 4)
    finally:
        await engine.update_weights(str(untied), 5)


async def test_a_tied_output_layer_stays_the_old_one_so_no_weights_are_given(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tied = copy_model(tmp_path / "tied", scale=1.1, head=None)
    ids = [1 + at * 37 % 500 for at in range(100)]
    with vllm_server("generate", tmp_path / "server.log") as server:
        engine = VLLMEngine([server.url], model_path=str(MODEL_PATH))
        await engine.start()
        try:
            assert not engine.capabilities.update_weights
            state = AutoModelForCausalLM.from_pretrained(tied).state_dict()
            replica = VLLMReplica(server.url, EngineOptions(None))
            with pytest.raises(EngineError, match=r"not configured.*--weight-transfer-config"):
                await replica.update_weights(WeightChannel().put(None, state), 1)
            assert await replica.health()
            await replica.close()
            with pytest.raises(EngineError, match="cannot update weights"):
                await engine.update_weights(str(tied), 1)
            # When vLLM mends this, the refusal can go.
            reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tied)}}
            url = f"{server.url}/collective_rpc"
            async with aiohttp.ClientSession() as direct, direct.post(url, json=reload) as answer:
                assert answer.status == 200
            new = Reference(tied).score(ids[:1], ids[1:])[1]
            scores = (await engine.score(ids)).logprobs
            assert sum(abs(a - b) for a, b in zip(scores, new, strict=True)) / len(new) > 0.2
        finally:
            await engine.close()


async def test_updates_by_files_of_what_changed_while_it_generates(
    server: Server, engine: VLLMEngine, untied: Path, tmp_path: Path
) -> None:
    if server.route != "generate":
        pytest.skip("needs the generate route and VLLM_SERVER_DEV_MODE=1")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(untied, dtype=torch.float32)
    channel, random = DeltaChannel(tmp_path / "source", timeout=120), torch.Generator().manual_seed(0)
    words = ["-m", "rollstream", "weights", str(tmp_path / "source"), str(tmp_path / "copies")]
    copier = await asyncio.create_subprocess_exec(sys.executable, *words)
    ids, scores, versions = [1 + at * 37 % 500 for at in range(60)], [], []

    async def generate() -> None:
        for number in itertools.count():
            completion = await engine.generate(ids[:2], LONG, request_id=f"over {number}")
            versions.append([version for _, version in completion.policy_versions])

    await engine.update_weights(str(untied), 0)  # another test may have left others
    generating = asyncio.create_task(generate())
    try:
        for version in range(1, 6):
            with torch.no_grad():
                for tensor in model.parameters():
                    some = torch.rand(tensor.shape, generator=random) < 0.05
                    tensor.add_(some * tensor.abs().mean() * torch.randn(tensor.shape, generator=random))
            await engine.update_weights(await asyncio.to_thread(channel.put, model), version)
            logits = (await asyncio.to_thread(model, torch.tensor([ids]))).logits[0].log_softmax(-1)
            scores.append([logits[at, token].item() for at, token in enumerate(ids[1:])])
            assert (await engine.score(ids)).logprobs == pytest.approx(scores[-1], abs=1e-4), version
        while {5} != set(versions[-1]):  # what has begun after the last update
            await asyncio.wait([generating], timeout=0.1)
            assert not generating.done(), generating
        assert all(each == sorted(each) for each in versions), versions
        assert any(len(each) > 1 for each in versions), versions
        assert all(max(map(abs, torch.tensor(a) - torch.tensor(b))) > 0.05 for a, b in pairwise(scores))
        sizes = [path.stat().st_size for path in (tmp_path / "source").glob("*.delta.safetensors")]
        whole = sum(one.nbytes for one in model.state_dict().values())
        assert len(sizes) == 4 and max(sizes) < whole / 3
    finally:
        generating.cancel()
        copier.terminate()
        await asyncio.wait([generating, asyncio.ensure_future(copier.wait())])
        await engine.update_weights(str(untied), 0)


async def test_what_an_update_interrupts_goes_on_with_the_new_weights(
    server: Server, prompts: list[list[int]], reference: Reference, changed: Path, untied: Path
) -> None:
    if server.route != "generate":
        pytest.skip("needs the generate route and VLLM_SERVER_DEV_MODE=1")
    engine = ContinuingEngine(VLLMEngine([server.url], model_path=str(MODEL_PATH)))
    await engine.start()
    how = replace(LONG, max_tokens=1500, temperature=0.0, seed=None)
    tasks = await server.at_work(
        *(partial(engine.generate, p, how, request_id=str(i)) for i, p in enumerate(prompts[:8]))
    )
    await engine.update_weights(str(changed), 11)
    try:
        new, cut = Reference(changed), 0
        for prompt, completion in zip(prompts, await asyncio.gather(*tasks), strict=False):
            assert len(completion.token_ids) == how.max_tokens
            start, version = completion.policy_versions[-1]
            assert version == 11
            cut += start > 0
            old_logprobs = reference.score(prompt, completion.token_ids)[1]
            new_logprobs = new.score(prompt, completion.token_ids)[1]
            logprobs = old_logprobs[:start] + new_logprobs[start:]
            assert completion.logprobs == pytest.approx(logprobs, abs=1e-3)
        assert cut > 0
    finally:
        await engine.update_weights(str(untied), 0)
        await engine.close()


async def test_its_chat_route_with_the_openai_engine(
    server: Server, prompts: list[list[int]], reference: Reference
) -> None:
    engine = OpenAIEngine([server.url], model_path=server.model)
    await engine.start()
    try:
        how = replace(GREEDY, logprobs=False)
        for text, prompt in zip(QUESTIONS, prompts, strict=True):
            asked = ChatPrompt([{"role": "user", "content": text}])
            answer = await engine.chat(asked, how, request_id="a")
            whole = reference.text((await reference.answer(prompt, how)).token_ids[:-1])
            assert answer.message is not None
            assert answer.message["content"] == whole
    finally:
        await engine.close()


class Logged:
    """The engine, and a list of what it was asked and has answered."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.log: list[tuple[list[int], SamplingParams, Completion]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(self, prompt_ids: list[int], sampling: SamplingParams, **more: Any) -> Completion:
        done = await self._engine.generate(prompt_ids, sampling, **more)
        self.log.append((list(prompt_ids), sampling, done))
        return done


async def test_the_gateway_records_what_the_server_says(
    server: Server, engine: VLLMEngine, reference: Reference
) -> None:
    logged = Logged(engine)
    recorder, _ = recorder_of(logged)  # type: ignore[arg-type]
    endpoint = Endpoint("m", 4096)
    async with endpoint.serving(), aiohttp.ClientSession() as direct:
        with endpoint.open(recorder) as url:
            async with AsyncOpenAI(base_url=url + "/v1", api_key="none") as client:
                ask = client.chat.completions.create
                messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
                for turn, text in enumerate(QUESTIONS[1:4]):
                    tools: Any = [TOOL]
                    answer = await ask(model="m", messages=messages, tools=tools, logprobs=turn == 1)
                    messages.append(answer.choices[0].message)
                    calls = answer.choices[0].message.tool_calls or ()
                    messages += [{"role": "tool", "tool_call_id": one.id, "content": "7"} for one in calls]
                    messages.append({"role": "user", "content": text})
                branches = [[*messages[:-1], {"role": "user", "content": text}] for text in QUESTIONS[4:6]]
                await asyncio.gather(*(ask(model="m", messages=one, tools=tools) for one in branches))
                async for _ in await ask(model="m", messages=messages[:1], stream=True):
                    pass
        found = recorder.trajectories()
        owed = list(logged.log)
        for prompt, sampling, done in owed:
            body = {
                "model": server.model,
                "prompt": prompt,
                "max_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "seed": sampling.seed,
                "stop_token_ids": list(sampling.stop_token_ids),
                "logprobs": 1,
                "return_token_ids": True,
            }
            async with direct.post(f"{server.url}/v1/completions", json=body) as response:
                (choice,) = (await response.json())["choices"]
            assert (choice["prompt_token_ids"], choice["token_ids"]) == (prompt, done.token_ids)
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(done.logprobs, abs=1e-3)
            assert done.logprobs == pytest.approx(reference.score(prompt, done.token_ids)[1], abs=1e-3)
    check_trajectories(found, logprobs=True)
    assert len(found) == 3 and len(owed) == 6
    recorded = [
        (prompt, ids, trajectory.response_logprobs[len(prompt) - len(trajectory.prompt_ids) :][: len(ids)])
        for trajectory in found
        if trajectory.response_logprobs is not None
        for prompt, ids in trajectory.generations()
    ]
    said = [(prompt, done.token_ids, done.logprobs) for prompt, _, done in owed]
    assert sorted(recorded) == sorted(said)


def test_a_run_from_end_to_end(server: Server, reference: Reference, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "actor_rollout_ref__rollout__name": "vllm",
        "actor_rollout_ref__rollout__n": 4,
    }
    words = overrides(tmp_path / "run", write_prompts(tmp_path / "p.jsonl", 8), server.url, **settings)
    command = [sys.executable, "-m", "rollstream.cli", "generate", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["completed"] == 32
    rows = pq.read_table(tmp_path / "run" / "trajectories.parquet").to_pylist()
    assert [(row["index"], row["repeat"]) for row in rows] == [(i, k) for i in range(8) for k in range(4)]
    for row in rows:
        assert row["response_mask"] == [1] * len(row["response_ids"])
        expected = reference.score(row["prompt_ids"], row["response_ids"])[1]
        assert row["response_logprobs"] == pytest.approx(expected, abs=1e-3)


async def test_a_server_that_is_killed(server: Server, engine: VLLMEngine) -> None:
    """The last one: it leaves no server."""
    tasks = await server.at_work(
        *(partial(engine.generate, [1, 5], LONG, request_id=str(i)) for i in range(4))
    )
    server.kill(signal.SIGKILL)
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
    assert {type(result) for result in results} == {EngineUnavailableError}
    assert not await engine.health()
    with pytest.raises(EngineUnavailableError, match=server.url):
        await engine.generate([1], GREEDY, request_id="a")
