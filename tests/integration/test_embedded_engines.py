"""What both embedded engines do alike, with the demo model; tests/conformance has what all engines do."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Engine
from rollstream.engine.load import ask_load
from rollstream.engine.registry import create_engine
from rollstream.errors import EngineError
from rollstream.trajectory import SamplingParams
from tests.support.forward import answer, requests, worst_error
from tests.support.until import PATIENCE_S

torch = pytest.importorskip("torch")
pytest.importorskip("openvino_genai")

LONG = SamplingParams(3000, ignore_eos=True, seed=1)
Start = Callable[..., Awaitable[Engine]]


@pytest.fixture(params=["openvino", "hf"])
async def start(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts engines; closes them at the end."""
    engines: list[Engine] = []

    async def start(**kwargs: Any) -> Engine:
        given = {"num_threads": 1, "num_kv_blocks": 512} | kwargs
        engines.append(
            create_engine(request.param, model_path=MODEL_PATH, engine_kwargs=given, log_dir=tmp_path)
        )
        await engines[-1].start()
        return engines[-1]

    yield start
    for engine in engines:
        await engine.close()


@pytest.fixture(scope="module")
def module() -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(MODEL_PATH, dtype=torch.float32)


async def test_logprobs_are_those_of_a_forward_pass_whatever_the_sampling(start: Start, module: Any) -> None:
    engine = await start()
    asked = requests(60)
    for i, (prompt, _) in enumerate(requests(60)):
        hot = SamplingParams(20, seed=i, temperature=0.4 + i / 30)
        how = [hot, replace(hot, top_k=1 + i % 9), replace(hot, top_p=0.3 + i / 100)]
        how.append(replace(hot, top_k=20, top_p=0.8))
        asked.append((prompt, how[i % 4]))
    asked += [(prompt, SamplingParams(20, temperature=0.0)) for prompt, _ in requests(20)]
    answers = await answer(engine, asked)
    assert worst_error(module, asked, answers, raw=engine.capabilities.logprobs == "raw") < 1e-4


async def test_seeds_repeat_whatever_else_is_in_the_batch(start: Start) -> None:
    engine, asked = await start(), requests(64)
    together = await answer(engine, asked)
    alone = [await engine.generate(p, s, request_id="x") for p, s in asked[:16]]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[:16]]
    # Another order, other batch sizes (prompts are split), a cache so small that requests have to queue.
    other = await start(max_num_seqs=5, max_num_batched_tokens=23, num_kv_blocks=20)
    backwards = (await answer(other, asked[::-1]))[::-1]
    assert [c.token_ids for c in backwards] == [c.token_ids for c in together]
    for one, two in zip(backwards, together, strict=True):
        assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)


async def test_more_work_than_the_cache_holds_queues_and_stays_exact(start: Start, module: Any) -> None:
    # At most some three of these fit at once; to preempt one would give wrong log-probs.
    engine = await start(num_kv_blocks=12, max_num_seqs=64)
    longest = engine.capabilities.max_model_len
    assert longest in (12 * 32, 12 * 32 - 1)
    asked = requests(60, longest=90)
    answers = await answer(engine, asked)
    assert worst_error(module, asked, answers, raw=engine.capabilities.logprobs == "raw") < 1e-4
    with pytest.raises(EngineError, match=f"max_model_len {longest}"):
        await engine.generate([1] * 300, SamplingParams(longest - 299), request_id="a")
    # Each of these fills the cache alone.
    whole = SamplingParams(longest - 300, ignore_eos=True)
    async with asyncio.timeout(PATIENCE_S):
        answers = await answer(engine, [([1] * 300, whole)] * 3)
    assert [len(c.token_ids) for c in answers] == [whole.max_tokens] * 3


async def test_cancelling_frees_the_place_and_leaves_the_others_alone(start: Start) -> None:
    engine = await start(max_num_seqs=5, num_kv_blocks=1024)
    asked = requests(24)
    alone = await answer(engine, asked)
    short = replace(LONG, max_tokens=20)
    hows = (LONG, LONG, LONG, LONG, short, LONG)
    hogs = [
        asyncio.create_task(engine.generate([1], how, request_id=f"hog{i}")) for i, how in enumerate(hows)
    ]
    await hogs.pop(4)  # the other hogs have all places
    tasks = [asyncio.create_task(engine.generate(p, s, request_id=str(i))) for i, (p, s) in enumerate(asked)]
    await asyncio.sleep(0)
    for hog in hogs:
        hog.cancel()
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*tasks)
    assert [c.token_ids for c in answers] == [c.token_ids for c in alone]
    assert all(hog.cancelled() for hog in hogs)
    load = await ask_load(engine)
    assert load is not None
    assert (load.running, load.queued, load.kv_usage) == (0, 0, 0.0)


async def test_an_abort_returns_what_was_sampled_in_the_queue_nothing(start: Start) -> None:
    engine = await start(max_num_seqs=3)
    watched = replace(LONG, stop=("no such text",))  # its tokens are read as they come
    hows = (LONG, watched, replace(LONG, max_tokens=20), LONG, watched)
    tasks = [asyncio.create_task(engine.generate([1], how, request_id=str(i))) for i, how in enumerate(hows)]
    async with asyncio.timeout(PATIENCE_S):
        await tasks[2]  # the ones before it have as many tokens, and the next one has its place
        for i in (4, 0, 1):
            await engine.abort(str(i))
        await asyncio.gather(*(tasks[i] for i in (4, 0, 1)))
        await engine.generate([1], hows[2], request_id="later")
        await engine.abort("3")
        parts = await asyncio.gather(*(tasks[i] for i in (0, 1, 3, 4)))
    assert {part.finish_reason for part in parts} == {"abort"}
    assert parts[3].token_ids == []
    whole = max((part.token_ids for part in parts), key=len)
    for part in parts[:3]:
        assert 0 < len(part.token_ids) == len(part.logprobs or []) < LONG.max_tokens
        assert part.token_ids == whole[: len(part.token_ids)]
