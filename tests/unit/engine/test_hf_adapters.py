"""LoRA adapters of peft's as weights of engine `hf`: one after the other, or several in one batch."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from rollstream.demo import MODEL_PATH
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.hf import HFEngine
from rollstream.errors import ConfigError, EngineError
from rollstream.trajectory import Completion, SamplingParams
from tests.support.adapters import check_logprobs, make_adapter, peft_model
from tests.support.engines import started

KWARGS = {"num_threads": 1, "cache_size": 0.02}
PROMPTS = [[1, 5, 9, 33], [1, 7, 12], [1, 44, 8, 3, 91]]


def engine() -> ContinuingEngine:
    return ContinuingEngine(HFEngine(MODEL_PATH, engine_kwargs=KWARGS))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [make_adapter(folder / str(seed), seed=seed) for seed in range(3)]


async def generate(engine: ContinuingEngine, at: int, tokens: int, name: str = "") -> Completion:
    how = SamplingParams(tokens, temperature=1.0, ignore_eos=True)
    return await engine.generate(PROMPTS[at], how, request_id=name or str(at))


async def test_generations_go_on_under_the_newest_adapter(adapters: list[Path]) -> None:
    sources = {0: None, **dict(enumerate(adapters, 1))}
    async with started(engine()) as hf:
        for version in (1, 2):
            over = asyncio.create_task(generate(hf, 0, 400))
            await asyncio.sleep(0.2)
            await hf.update_weights(str(sources[version]), version)
            check_logprobs(await over, PROMPTS[0], sources)
            after = await generate(hf, 1, 20)
            assert after.policy_versions == [(0, version)]
            check_logprobs(after, PROMPTS[1], sources)


async def test_a_lent_model_has_its_owners_adapter(tmp_path: Path) -> None:
    model = peft_model(seed=7)
    model.save_pretrained(tmp_path)
    async with started(ContinuingEngine(HFEngine(model=model, engine_kwargs=KWARGS))) as hf:
        with model.disable_adapter():  # the owner's modules are not the engine's
            check_logprobs(await generate(hf, 0, 20), PROMPTS[0], {0: tmp_path})
        with pytest.raises(EngineError, match="takes no LoRA adapter"):
            await hf.update_weights(str(tmp_path), 1)


async def test_an_adapter_that_does_not_fit_changes_nothing(adapters: list[Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    broken = make_adapter(tmp_path / "broken", seed=5)
    weights = load_file(broken / "adapter_model.safetensors")
    weights.pop(next(iter(weights)))
    save_file(weights, broken / "adapter_model.safetensors")
    async with started(engine()) as hf:
        for version, source in ((0, None), (3, adapters[0])):
            if source is not None:
                await hf.update_weights(str(source), version)
            with pytest.raises(EngineError, match="does not fit"):
                await hf.update_weights(str(broken), 9)
            check_logprobs(await generate(hf, 0, 20), PROMPTS[0], {version: source})


async def test_pinned_rollouts_end_under_the_adapter_that_they_began_with(adapters: list[Path]) -> None:
    sources = {0: None, **dict(enumerate(adapters, 1))}
    async with started(engine()) as hf:
        with pytest.raises(ConfigError, match="100 LoRA adapters"):
            hf.pin_weights(100)
        hf.pin_weights(3)

        begun, go_on = asyncio.Semaphore(0), asyncio.Event()

        async def rollout(at: int) -> list[Completion]:
            with hf.pinned(str(at)):
                first = await generate(hf, at, 20)
                begun.release()
                await go_on.wait()
                # A second turn, of a sub-conversation as the gateway names it.
                return [first, await generate(hf, at, 60, name=f"{at}.1")]

        running = []
        for version in range(3):  # of the base model, of the first adapter, of the second
            running.append(asyncio.create_task(rollout(version)))
            await begun.acquire()
            await hf.update_weights(str(adapters[version]), version + 1)
        go_on.set()
        with pytest.raises(EngineError, match="its own folder"):
            await hf.update_weights(str(adapters[0]), 4)
        for version, turns in enumerate(await asyncio.gather(*running)):
            for turn in turns:
                assert turn.policy_versions == [(0, version)]
                check_logprobs(turn, PROMPTS[version], sources)
        assert (await generate(hf, 0, 5)).policy_versions == [(0, 3)]
        with pytest.raises(EngineError, match="is for LoRA adapters"):
            await hf.update_weights(str(MODEL_PATH), 5)
