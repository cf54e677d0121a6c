from dataclasses import replace
from typing import Any

import orjson
import pytest

from demo_model.chats import CALCULATOR
from rollstream.testing.scripted import ScriptedEngine
from tests.unit.serving.served import END, saying, served_model, serving, tokenizer

PATH = "/v1/chat/completions"
QUESTION = [{"role": "user", "content": "2 + 3 ="}]
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'


async def answer_to(text: str, **body: Any) -> dict[str, Any]:
    async with serving(saying(text)) as client:
        status, answer = await client.post(PATH, {"messages": QUESTION, **body})
    assert status == 200, answer
    result: dict[str, Any] = answer
    return result


async def chunks_of(text: str, **body: Any) -> list[dict[str, Any]]:
    async with serving(saying(text)) as client:
        _, stream = await client.post(PATH, {"messages": QUESTION, "stream": True, **body})
    *events, end = stream.strip().split("\n\n")
    assert end == "data: [DONE]"
    return [orjson.loads(event.removeprefix("data: ")) for event in events]


async def test_a_plain_answer() -> None:
    engine = saying(f"5{END}")
    async with serving(engine) as client:
        body = {"messages": QUESTION, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        _, answer = await client.post(PATH, body)
    prompt_ids = tokenizer().render(QUESTION)
    (request,) = engine.requests
    assert request.prompt_ids == prompt_ids
    assert request.sampling.max_tokens == 1024  # this engine has no limit
    completion = engine.completions[0][1]
    assert completion.logprobs is not None
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "5"}
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == completion.token_ids
    assert answer["prompt_token_ids"] == prompt_ids
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["5", END]
    assert [one["logprob"] for one in choice["logprobs"]["content"]] == completion.logprobs
    assert choice["logprobs"]["content"][0]["bytes"] == [53]
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids)
    assert answer["usage"]["completion_tokens"] == 2


async def test_a_tool_call() -> None:
    answer = await answer_to(f"I compute.\n{CALL}{END}", tools=[CALCULATOR])
    (choice,) = answer["choices"]
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "I compute."}
    assert choice["finish_reason"] == "tool_calls"
    assert len(call.pop("id")) == 9
    assert call == {
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression":"2 + 3"}'},
    }


async def test_a_call_alone_has_no_content_and_two_have_two_ids() -> None:
    answer = await answer_to(f"{CALL}\n{CALL}{END}", tools=[CALCULATOR])
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert len({call["id"] for call in message["tool_calls"]}) == 2


async def test_without_tools_a_call_is_text() -> None:
    engine = saying(f"{CALL}{END}")
    async with serving(engine) as client:
        for more in ({}, {"tools": [CALCULATOR], "tool_choice": "none"}, {"tools": []}):
            _, answer = await client.post(PATH, {"messages": QUESTION, **more})
            assert answer["choices"][0]["message"] == {"role": "assistant", "content": CALL}
            assert answer["choices"][0]["finish_reason"] == "stop"
    assert {tuple(request.prompt_ids) for request in engine.requests} == {tuple(tokenizer().render(QUESTION))}


async def test_a_broken_call_is_text_and_nothing_is_lost() -> None:
    broken = '<tool_call>\n{"name": "calculator", "arg'
    answer = await answer_to(f"I compute.\n{broken}", tools=[CALCULATOR])
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": f"I compute.\n{broken}"}
    assert answer["choices"][0]["finish_reason"] == "stop"


async def test_thinking_is_apart() -> None:
    answer = await answer_to(f"<think>five?</think>\n\n5{END}")
    assert answer["choices"][0]["message"] == {
        "role": "assistant",
        "content": "5",
        "reasoning_content": "five?",
    }


async def test_tools_are_shown_word_for_word_and_calls_come_back_as_they_were() -> None:
    engine = saying(f"5{END}")
    call = {
        "id": "c00000001",
        "type": "function",
        "function": {"name": "calculator", "arguments": '{"expression": "2 + 3"}'},
    }
    messages: list[dict[str, Any]] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00000001", "content": "5"},
    ]
    async with serving(engine) as client:
        await client.post(PATH, {"messages": messages, "tools": [CALCULATOR]})
    prompt = tokenizer().decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert CALL + END in prompt
    expected: list[dict[str, Any]] = [
        *QUESTION,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "type": "function",
                    "function": {"name": "calculator", "arguments": {"expression": "2 + 3"}},
                }
            ],
        },
        {"role": "tool", "content": "5"},
    ]
    assert engine.requests[0].prompt_ids == tokenizer().render(expected, tools=[CALCULATOR])


async def test_a_stream_has_role_thinking_content_calls_end_and_usage() -> None:
    text = f"<think>hm</think>I compute.\n{CALL}{END}"
    chunks = await chunks_of(
        text,
        tools=[CALCULATOR],
        logprobs=True,
        return_token_ids=True,
        stream_options={"include_usage": True},
    )
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    (called,) = deltas[3].pop("tool_calls")
    assert deltas == [
        {"role": "assistant", "content": None},
        {"reasoning_content": "hm"},
        {"content": "I compute."},
        {},
        {},
    ]
    assert (called["index"], called["function"]["name"]) == (0, "calculator")
    last = chunks[-2]["choices"][0]
    assert last["finish_reason"] == "tool_calls"
    assert last["token_ids"] == tokenizer().encode(text)
    assert len(last["logprobs"]["content"]) == len(last["token_ids"])
    assert chunks[0]["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], len(last["token_ids"]))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])


async def test_a_stream_of_several_samples() -> None:
    chunks = await chunks_of(f"5{END}", n=3)
    finished = [one["choices"][0]["index"] for one in chunks if one["choices"][0]["finish_reason"]]
    assert finished == [0, 1, 2]


async def test_limits_of_length() -> None:
    engine = saying("5")
    engine.capabilities = replace(engine.capabilities, max_model_len=40)
    length = len(tokenizer().render(QUESTION))
    async with serving(engine) as client:
        await client.post(PATH, {"messages": QUESTION})
        await client.post(PATH, {"messages": QUESTION, "max_tokens": 3})
        await client.post(PATH, {"messages": QUESTION, "max_tokens": 3, "max_completion_tokens": 2})
        limits = [request.sampling.max_tokens for request in engine.requests]
        assert limits == [40 - length, 3, 2]
        error = await client.refused(PATH, {"messages": QUESTION, "max_tokens": 41 - length})
        assert "max_model_len 40" in error["message"]
        long = [{"role": "user", "content": "1" * 60}]
        error = await client.refused(PATH, {"messages": long})
        assert error["code"] == "context_length_exceeded"


async def test_special_tokens_are_no_content() -> None:
    answer = await answer_to(f"1{END}2", ignore_eos=True)
    assert answer["choices"][0]["message"]["content"] == "12"


async def test_a_parsers_stop_tokens_end_a_turn_with_tools() -> None:
    class Parser:
        stop_tokens = ("<|im_start|>", "no such token")

        def __getattr__(self, name: str) -> Any:
            return getattr(served_model().parser, name)

    engine = saying(f"5{END}")
    model = replace(served_model(), parser=Parser())
    async with serving(engine, model) as client:
        await client.post(PATH, {"messages": QUESTION, "tools": [CALCULATOR], "stop_token_ids": [7]})
        await client.post(PATH, {"messages": QUESTION})
    assert [one.sampling.stop_token_ids for one in engine.requests] == [
        (7, tokenizer().token_id("<|im_start|>")),
        (),
    ]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, None),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        ({"tool_choice": "required", "tools": [CALCULATOR]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "calculator"}}}, "tool_choice"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logit_bias": {"1": 2}}, "logit_bias"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, None),
        ({"tools": [{"type": "function"}]}, None),
        ({"tools": "calculator"}, "tools"),
    ],
)
async def test_what_cannot_be_answered_is_a_400(more: dict[str, Any], param: str | None) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        error = await client.refused(PATH, {"messages": QUESTION, **more})
    assert error["param"] == param
    assert not engine.requests


async def test_an_answer_that_goes_on() -> None:
    engine = saying(f" is 5{END}")
    begun = [*QUESTION, {"role": "assistant", "content": "The answer"}]
    async with serving(engine) as client:
        body = {"messages": begun, "continue_final_message": True, "add_generation_prompt": False}
        _, answer = await client.post(PATH, body)
        assert answer["choices"][0]["message"]["content"] == " is 5"
        (request,) = engine.requests
        prompt = tokenizer().render_text(QUESTION) + "The answer"
        assert request.prompt_ids == tokenizer().encode(prompt)
        for messages, more, hint in [
            (begun, {"continue_final_message": True, "add_generation_prompt": True}, "exactly one"),
            (begun, {"add_generation_prompt": False}, "exactly one"),
            (QUESTION, {"continue_final_message": True}, "must be an assistant's"),
        ]:
            error = await client.refused(PATH, {"messages": messages, **more})
            assert hint in error["message"]
        called = {"role": "assistant", "content": "x", "tool_calls": [_a_call()]}
        error = await client.refused(PATH, {"messages": [*QUESTION, called], "continue_final_message": True})
        assert "without calls" in error["message"]
        text = "a line\n\n"  # white space at the end is kept
        body["messages"] = [*QUESTION, {"role": "assistant", "content": text}]
        await client.post(PATH, body)
    assert tokenizer().decode(engine.requests[-1].prompt_ids, skip_special_tokens=False).endswith(text)


def _a_call() -> dict[str, Any]:
    return {"id": "c00000000", "type": "function", "function": {"name": "calculator", "arguments": "{}"}}
