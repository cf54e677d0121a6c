"""What a generator of slime's does when a trainer aborts its answers, against `rollstream serve`'s routes."""

import asyncio
import random
from typing import Any

import openai
import pytest

from rollstream.testing.scripted import ScriptedEngine
from rollstream.testing.text_rules import answer_by_text
from rollstream.trajectory import Completion
from tests.support.until import PATIENCE_S, until
from tests.unit.serving.served import FOREVER, served_model, serving, tokenizer

ANSWER = "12 + 34 = 46, I am sure."


def go_on(prompt: str) -> str:
    return ANSWER[len(prompt.rpartition("<|im_start|>assistant\n")[2]) :]


class Interrupted(ScriptedEngine):
    """Answers whole but for the first request, which goes on until it is aborted and then has some tokens."""

    def __init__(self, tokens: int) -> None:
        slow = [FOREVER]
        rule = answer_by_text(tokenizer(), go_on)
        super().__init__(rule, latency=lambda request: slow.pop() if slow else 0.0)
        self._tokens = tokens

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        completion = await super().generate(*args, **kwargs)
        if completion.finish_reason == "abort":
            completion.token_ids = tokenizer().encode(ANSWER)[: self._tokens]
        return completion


@pytest.mark.parametrize("tokens", [0, 5])
async def test_an_answer_goes_on_after_an_abort(tokens: int) -> None:
    """`tokens`: that it has by then."""
    engine = Interrupted(tokens)
    async with serving(engine, served_model()) as client:
        model = openai.AsyncOpenAI(api_key="test", base_url=client.url + "/v1")
        messages: list[Any] = [{"role": "user", "content": "12 + 34 ="}]
        text, used, pieces = None, 0, 0

        async def ask() -> Any:
            begun = [] if text is None else [{"role": "assistant", "content": text}]
            return await model.chat.completions.create(
                model="demo",
                messages=[*messages, *begun],
                max_tokens=64 - used,
                temperature=1,
                top_p=1,
                stream=False,
                seed=random.randint(1, 10_000_000),
                tools=None,  # type: ignore[arg-type]
                extra_body={"continue_final_message": True} if begun else None,
            )

        async with asyncio.timeout(PATIENCE_S):
            while True:
                asking = asyncio.create_task(ask())
                if pieces == 0:
                    await until(lambda: engine.in_flight)
                    await client.post("/abort_request", {"rid": "", "abort_all": True})
                answer = await asking
                pieces += 1
                used += answer.usage.completion_tokens
                text = (text or "") + (answer.choices[0].message.content or "")
                if answer.choices[0].finish_reason != "abort":
                    break
        assert (text, pieces, answer.choices[0].finish_reason) == (ANSWER, 2, "stop")
        await model.close()
