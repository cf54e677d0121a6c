"""A rule's answers are the same over the wire as in this process."""

from dataclasses import replace

from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.sglang import SGLangEngine
from rollstream.testing.scripted import ScriptedEngine
from rollstream.testing.stub_server import StubServer
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import SamplingParams

SAMPLING = SamplingParams(
    max_tokens=24, temperature=0.5, top_p=0.9, top_k=7, seed=3, stop_token_ids=(500, 501)
)


async def test_it_answers_over_the_wire_as_the_scripted_engine_does() -> None:
    tokenizer = load_tokenizer(str(MODEL_PATH))
    rule = answer_by_text(tokenizer, lambda prompt: "five" if "2 + 3" in prompt else "what?")
    prompt = tokenizer.render([{"role": "user", "content": "2 + 3 ="}])
    scripted = ScriptedEngine(rule)
    await scripted.start()
    async with StubServer(rule) as server:
        engine = SGLangEngine([server.url])
        await engine.start()
        for sampling in (SAMPLING, SamplingParams(2, seed=4), replace(SAMPLING, logprobs=False)):
            here = await scripted.generate(prompt, sampling, request_id="a")
            assert await engine.generate(prompt, sampling, request_id="a") == here
        await engine.close()
    assert tokenizer.decode(here.token_ids) == "five"
