"""The stub is understood by OpenAI's own client."""

from typing import Any

import openai
import pytest

from rollstream.testing.stub_chat import ChatFault, ChatStub

ASK: Any = {"model": "stub", "messages": [{"role": "user", "content": "2 + 3 ="}]}
CALL = {"id": "c1", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}


def client(stub: ChatStub, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{stub.url}/v1", api_key=key, max_retries=0)


async def test_openais_client_reads_answers_calls_and_streams() -> None:
    message = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
    async with ChatStub(lambda body: message) as stub, client(stub) as api:
        assert [model.id async for model in api.models.list()] == ["stub"]
        (choice,) = (await api.chat.completions.create(**ASK)).choices
        assert (choice.message.content, choice.finish_reason) == ("I add.", "tool_calls")
        assert choice.message.tool_calls is not None
        call: Any = choice.message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("add", '{"a":2,"b":3}')
        text, arguments, usage = "", "", None
        options = {"include_usage": True}
        async for chunk in await api.chat.completions.create(**ASK, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for one in chunk.choices:
                text += one.delta.content or ""
                for part in one.delta.tool_calls or ():
                    assert part.function is not None
                    arguments += part.function.arguments or ""
        assert (text, arguments) == ("I add.", '{"a":2,"b":3}')
        assert usage is not None
        assert usage.total_tokens == 15


async def test_openais_client_sees_its_faults() -> None:
    async with ChatStub(lambda body: "5", api_key="right", limit=(4, 60.0)) as stub:
        async with client(stub, "wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
        async with client(stub, "right") as api:
            stub.faults += [ChatFault("status", 400), ChatFault("drop"), ChatFault("finish", code="length")]
            with pytest.raises(openai.BadRequestError, match="stub error"):
                await api.chat.completions.create(**ASK)
            with pytest.raises(openai.APIConnectionError):
                await api.chat.completions.create(**ASK)
            answer = await api.chat.completions.create(**ASK)
            assert answer.choices[0].finish_reason == "length"
            with pytest.raises(openai.NotFoundError):
                await api.chat.completions.create(**{**ASK, "model": "other"})
            await api.chat.completions.create(**ASK)
            with pytest.raises(openai.RateLimitError) as caught:
                await api.chat.completions.create(**ASK)
            assert 0 < float(caught.value.response.headers["Retry-After"]) <= 60
        assert stub.refused == 1
