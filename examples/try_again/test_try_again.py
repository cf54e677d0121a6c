"""A test of the loop without a model: the scripted engine says what the model says."""

import asyncio

from try_again import TryAgain

from rollstream.agent.base import AgentResources
from rollstream.agent.prompt import PromptRenderer
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.testing.scripted import ScriptedEngine
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import SamplingParams, Trajectory

tokenizer = load_tokenizer(str(MODEL_PATH))  # or that of your model: a folder, or a hub name


async def play(rule, **options) -> Trajectory:
    """One rollout with a model that answers by `rule`."""
    engine = ScriptedEngine(answer_by_text(tokenizer, rule), vocab_size=tokenizer.vocab_size)
    await engine.start()
    prompts = PromptRenderer(tokenizer, prompt_length=512, truncation="error")
    resources = AgentResources(engine, tokenizer, prompts, response_length=256)
    loop = TryAgain(resources, request_id="test", shared=TryAgain.build_shared(resources), **options)
    question = [{"role": "user", "content": "2 + 3 ="}]
    return await loop.run(SamplingParams(256), raw_prompt=question, prompt_key="q", ground_truth="5")


def test_it_is_told_that_it_was_wrong_and_tries_again() -> None:
    """The model is right once it has read the feedback."""
    done = asyncio.run(play(lambda prompt: "5" if "Look again." in prompt else "6", feedback="Look again."))
    assert [message["content"] for message in done.messages] == ["2 + 3 =", "6", "Look again.", "5"]
    assert (done.finish_reason, done.extra) == ("stop", {"turn_scores": [0.0, 1.0]})
    sampled = [token for token, mask in zip(done.response_ids, done.response_mask, strict=True) if mask]
    assert tokenizer.decode(sampled, skip_special_tokens=False) == "6<|im_end|>5<|im_end|>"


def test_it_ends_after_max_tries() -> None:
    """The model never learns."""
    done = asyncio.run(play(lambda prompt: "6", max_tries=3))
    assert (done.finish_reason, done.extra) == ("max_turns", {"turn_scores": [0.0, 0.0, 0.0]})
