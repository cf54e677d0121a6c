from functools import cache

import pytest

from rollstream.chat.tokenizer import ChatTokenizer, load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.testing.scripted import AnswerRule, ScriptedEngine, ScriptedRequest
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import Completion, SamplingParams


@cache
def tokenizer() -> ChatTokenizer:
    return load_tokenizer(str(MODEL_PATH))


async def ask(rule: AnswerRule, text: str = "2 + 3 =", *, max_tokens: int = 32, seed: int = 1) -> Completion:
    engine = ScriptedEngine(rule)
    await engine.start()
    prompt = tokenizer().render([{"role": "user", "content": text}])
    return await engine.generate(prompt, SamplingParams(max_tokens, seed=seed), request_id="7-0-1")


async def test_the_rule_sees_the_prompt_with_its_special_tokens_and_ends_its_turn() -> None:
    prompts: list[str] = []

    def say_five(prompt: str) -> str:
        prompts.append(prompt)
        return "5"

    completion = await ask(answer_by_text(tokenizer(), say_five))
    assert prompts == [tokenizer().render_text([{"role": "user", "content": "2 + 3 ="}])]
    assert tokenizer().decode(completion.token_ids, skip_special_tokens=False) == "5<|im_end|>"
    assert completion.finish_reason == "stop"


async def test_a_rule_may_want_the_request_and_be_async() -> None:
    async def who(prompt: str, request: ScriptedRequest) -> str:
        return f"{request.request_id} {request.sampling.seed} {len(prompt) > 10}"

    completion = await ask(answer_by_text(tokenizer(), who, end=""), seed=9)
    assert tokenizer().decode(completion.token_ids) == "7-0-1 9 True"
    with_default = answer_by_text(tokenizer(), lambda prompt, suffix="!": suffix)
    assert tokenizer().decode((await ask(with_default)).token_ids) == "!"


async def test_what_the_rule_raises_is_raised_and_an_unknown_end_is_an_error() -> None:
    def broken(prompt: str) -> str:
        raise LookupError("no answer to this")

    with pytest.raises(LookupError, match="no answer to this"):
        await ask(answer_by_text(tokenizer(), broken))
    with pytest.raises(ValueError, match="</s>"):
        answer_by_text(tokenizer(), lambda prompt: "", end="</s>")
