"""What the meter counts is what went through."""

import asyncio

import pytest

from rollstream.engine.base import ChatEngine, ChatPrompt, Engine
from rollstream.engine.continuation import ContinuingEngine
from rollstream.errors import EngineError, EngineOverloadedError
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Completion, SamplingParams


class SpeakingEngine(ScriptedEngine):
    async def chat(self, prompt: ChatPrompt, sampling: SamplingParams, *, request_id: str) -> Completion:
        return Completion([], None, "stop", usage=None if request_id == "silent" else (5, 2))


async def test_engines_that_speak_messages_are_counted_too() -> None:
    prompt = ChatPrompt([{"role": "user", "content": "1 + 1 ="}])
    engine = ContinuingEngine(SpeakingEngine())
    assert isinstance(engine, ChatEngine)
    for name in ("a", "silent"):  # ids are the caller's; an endpoint may say how many tokens it sampled
        await engine.chat(prompt, SamplingParams(8), request_id=name)
    assert (engine.meter.calls, engine.meter.counts.finished, engine.meter.counts.tokens) == (0, 2, 2)
    engine = ContinuingEngine(ScriptedEngine())
    with pytest.raises(EngineError, match="token ids"):
        await engine.chat(prompt, SamplingParams(8), request_id="a")


async def test_everything_is_counted_once() -> None:
    inner = ScriptedEngine(latency=lambda request: 1e6 if request.request_id == "slow" else 0.02)
    engine = ContinuingEngine(inner)
    await engine.start()
    assert isinstance(engine, Engine)
    inner.fail(lambda request: request.request_id == "full", EngineOverloadedError("429"))
    inner.fail(lambda request: request.request_id == "bad", EngineError("400"))
    sampling = SamplingParams(8)
    names = ["a", "b", "full", "bad", "slow"]
    tasks = [asyncio.create_task(engine.generate([1, 2], sampling, request_id=name)) for name in names]
    await asyncio.sleep(0)
    assert engine.meter.calls >= 3
    answers = await asyncio.gather(*tasks[:4], return_exceptions=True)
    tasks[4].cancel()
    await asyncio.gather(tasks[4], return_exceptions=True)
    assert isinstance(answers[2], EngineOverloadedError)
    assert isinstance(answers[3], EngineError)
    counts = engine.meter.counts
    assert (engine.meter.calls, counts.finished, counts.overloads, counts.cut_off) == (0, 2, 1, 1)
    assert counts.tokens == sum(len(answer.token_ids) for answer in answers[:2])  # type: ignore[union-attr]
    assert 0.04 <= counts.seconds <= counts.call_seconds
    assert (
        engine.meter.counts.call_seconds == counts.call_seconds
    )  # nothing is there any more: time adds nothing
    await engine.close()
