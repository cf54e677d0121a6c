"""OpenAI's routes: completions and chat."""

from dataclasses import replace
from typing import Any

import pytest

from demo_model.chats import CALCULATOR
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams
from tests.unit.serving.served import END, QUESTION, saying, served_model, serving, tokenizer

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"
CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
FUNCTION = {"name": "calculator", "arguments": '{"expression":"2 + 3"}'}


async def choice_of(text: str, **body: Any) -> dict[str, Any]:
    async with serving(saying(text)) as client:
        answer = await client.answer(CHAT, {"messages": QUESTION, **body})
    choice: dict[str, Any] = answer["choices"][0]
    return choice


async def test_a_text_is_completed() -> None:
    engine = saying(f"7é{END}")
    async with serving(engine) as client:
        body = {"model": "demo", "prompt": "12", "logprobs": 0, "return_token_ids": True, "user": "me"}
        answer = await client.answer(COMPLETE, body)
    assert engine.requests[0].sampling == SamplingParams(16)
    completion = engine.completions[0][1]
    assert answer["choices"] == [
        {
            "index": 0,
            "text": "7é",
            "finish_reason": "stop",
            "stop_reason": None,
            "prompt_token_ids": tokenizer().encode("12"),
            "token_ids": completion.token_ids,
            "logprobs": {
                "tokens": ["7", "", "é", END],
                "token_logprobs": completion.logprobs,
                "top_logprobs": None,
                "text_offset": [0, 1, 1, 2],
            },
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (answer["object"], answer["model"]) == ("text_completion", "demo")
    assert answer["metadata"] == {"weight_version": "0"}


@pytest.mark.parametrize(
    "prompt", ["12", [20, 21], ["12", "3"], [[20], [21, 22]], ["12", [20]]], ids=lambda value: str(value)
)
async def test_prompts_are_texts_or_ids_one_or_many(prompt: Any) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        answer = await client.answer(COMPLETE, {"prompt": prompt, "n": 2, "seed": 4})
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    ids = [tokenizer().encode(one) if isinstance(one, str) else one for one in many]
    assert [request.prompt_ids for request in engine.requests] == [one for one in ids for _ in range(2)]
    assert [request.sampling.seed for request in engine.requests] == [4, 5] * len(ids)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 16 * 2 * len(ids)


async def test_a_stream_of_completions_is_the_answer_in_chunks() -> None:
    async with serving(ScriptedEngine()) as client:
        body = {"prompt": [5], "n": 2, "seed": 1, "max_tokens": 3}
        answer = await client.answer(COMPLETE, body)
        chunks = await client.events(COMPLETE, {**body, "stream_options": {"include_usage": True}})
        without = await client.events(COMPLETE, body)
    assert [chunk["choices"] for chunk in chunks] == [[answer["choices"][0]], [answer["choices"][1]], []]
    assert [chunk["usage"] for chunk in chunks] == [None, None, answer["usage"]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in without[0]


async def test_how_tokens_and_answers_are_named_on_request() -> None:
    how = {"logprobs": 0, "return_tokens_as_token_ids": True, "request_id": "mine"}
    async with serving(saying("78")) as client:
        answer = await client.answer(COMPLETE, {"prompt": "1", **how})
        turn = await client.answer(CHAT, {"messages": QUESTION, **how, "logprobs": True})
    names = [f"token_id:{token}" for token in tokenizer().encode("78")]
    assert answer["choices"][0]["logprobs"]["tokens"] == names
    assert [one["token"] for one in turn["choices"][0]["logprobs"]["content"]] == names
    assert (answer["id"], turn["id"]) == ("cmpl-mine", "chatcmpl-mine")


async def test_stop_strings_are_named_and_special_tokens_shown_on_request() -> None:
    async with serving(saying("12 and", "7<|im_start|>8")) as client:
        answer = await client.answer(COMPLETE, {"prompt": "1", "stop": ["and"], "return_token_ids": True})
        texts = [
            (await client.answer(COMPLETE, {"prompt": "1", "skip_special_tokens": skip}))["choices"][0][
                "text"
            ]
            for skip in (True, False)
        ]
    (choice,) = answer["choices"]
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == ("12 ", "and", "stop")
    assert choice["token_ids"] == tokenizer().encode("12 and")
    assert texts == ["78", "7<|im_start|>8"]


async def test_a_plain_chat_answer() -> None:
    engine = saying(f"5{END}")
    async with serving(engine) as client:
        body = {"messages": QUESTION, "logprobs": True, "top_logprobs": 0, "return_token_ids": True}
        answer = await client.answer(CHAT, body)
    prompt_ids = tokenizer().render(QUESTION)
    (request,) = engine.requests
    assert (request.prompt_ids, request.sampling.max_tokens) == (prompt_ids, 4096 - len(prompt_ids))
    completion = engine.completions[0][1]
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "5"}
    assert (choice["finish_reason"], choice["token_ids"]) == ("stop", completion.token_ids)
    assert answer["prompt_token_ids"] == prompt_ids
    entries = choice["logprobs"]["content"]
    assert [one["token"] for one in entries] == ["5", END]
    assert [one["logprob"] for one in entries] == completion.logprobs
    assert entries[0]["bytes"] == [53]
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids)
    assert answer["usage"]["completion_tokens"] == 2


async def test_tool_calls() -> None:
    choice = await choice_of(f"I compute.\n{CALL}{END}", tools=[CALCULATOR])
    (call,) = choice["message"].pop("tool_calls")
    assert choice["message"] == {"role": "assistant", "content": "I compute."}
    assert (choice["finish_reason"], len(call.pop("id"))) == ("tool_calls", 9)
    assert call == {"type": "function", "function": FUNCTION}
    message = (await choice_of(f"{CALL}\n{CALL}{END}", tools=[CALCULATOR]))["message"]
    assert message["content"] is None
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize(
    ("text", "more", "message"),
    [
        (f"{CALL}{END}", {}, {"content": CALL}),
        (f"{CALL}{END}", {"tools": [CALCULATOR], "tool_choice": "none"}, {"content": CALL}),
        (
            f'I compute.\n{CALL[:30]}"arg',
            {"tools": [CALCULATOR]},
            {"content": f'I compute.\n{CALL[:30]}"arg'},
        ),
        (f"<think>five?</think>\n\n5{END}", {}, {"content": "5", "reasoning_content": "five?"}),
        (f"1{END}2", {"ignore_eos": True}, {"content": "12"}),
    ],
    ids=["no tools", "tool_choice none", "a broken call", "thinking", "special tokens"],
)
async def test_what_is_content(text: str, more: dict[str, Any], message: dict[str, Any]) -> None:
    choice = await choice_of(text, **more)
    assert choice["message"] == {"role": "assistant", **message}
    assert choice["finish_reason"] == "stop"


async def test_tools_are_shown_word_for_word_and_calls_come_back_as_they_were() -> None:
    engine = saying(f"5{END}")
    call = {"id": "c00000001", "type": "function", "function": FUNCTION}
    messages: list[dict[str, Any]] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c00000001", "content": "5"},
    ]
    async with serving(engine) as client:
        await client.answer(CHAT, {"messages": messages, "tools": [CALCULATOR]})
        for more in ({}, {"tools": [CALCULATOR], "tool_choice": "none"}, {"tools": []}):
            await client.answer(CHAT, {"messages": QUESTION, **more})
    prompt = tokenizer().decode(engine.requests[0].prompt_ids, skip_special_tokens=False)
    assert CALL + END in prompt
    function = {"name": "calculator", "arguments": {"expression": "2 + 3"}}
    shown: list[dict[str, Any]] = [
        *QUESTION,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "content": "5"},
    ]
    assert engine.requests[0].prompt_ids == tokenizer().render(shown, tools=[CALCULATOR])
    plain = tokenizer().render(QUESTION)
    assert [request.prompt_ids for request in engine.requests[1:]] == [plain] * 3


async def test_a_chat_stream_has_role_thinking_content_calls_end_and_usage() -> None:
    text = f"<think>hm</think>I compute.\n{CALL}{END}"
    body = {"messages": QUESTION, "tools": [CALCULATOR], "logprobs": True, "return_token_ids": True}
    async with serving(saying(text)) as client:
        chunks = await client.events(CHAT, {**body, "stream_options": {"include_usage": True}})
        several = await client.events(CHAT, {"messages": QUESTION, "n": 3})
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
    assert (called["index"], called["function"]) == (0, FUNCTION)
    last = chunks[-2]["choices"][0]
    assert (last["finish_reason"], last["token_ids"]) == ("tool_calls", tokenizer().encode(text))
    assert len(last["logprobs"]["content"]) == len(last["token_ids"])
    assert chunks[0]["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])
    assert (chunks[-1]["choices"], chunks[-1]["usage"]["completion_tokens"]) == ([], len(last["token_ids"]))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    ends = [one["choices"][0]["index"] for one in several if one["choices"][0]["finish_reason"]]
    assert ends == [0, 1, 2]


async def test_limits_of_length() -> None:
    engine = saying("5")
    engine.capabilities = replace(engine.capabilities, max_model_len=40)
    length = len(tokenizer().render(QUESTION))
    async with serving(engine) as client:
        for more in ({}, {"max_tokens": 3}, {"max_tokens": 3, "max_completion_tokens": 2}):
            await client.answer(CHAT, {"messages": QUESTION, **more})
        assert [request.sampling.max_tokens for request in engine.requests] == [40 - length, 3, 2]
        error = await client.refused(CHAT, {"messages": QUESTION, "max_tokens": 41 - length})
        assert "max_model_len 40" in error["message"]
        error = await client.refused(CHAT, {"messages": [{"role": "user", "content": "1" * 60}]})
        assert error["code"] == "context_length_exceeded"


async def test_a_parsers_stop_tokens_end_a_turn_with_tools() -> None:
    class Parser:
        stop_tokens = ("<|im_start|>", "no such token")

        def __getattr__(self, name: str) -> Any:
            return getattr(served_model().parser, name)

    engine = saying(f"5{END}")
    async with serving(engine, replace(served_model(), parser=Parser())) as client:
        await client.answer(CHAT, {"messages": QUESTION, "tools": [CALCULATOR], "stop_token_ids": [7]})
        await client.answer(CHAT, {"messages": QUESTION})
    stops = [one.sampling.stop_token_ids for one in engine.requests]
    assert stops == [(7, tokenizer().token_id("<|im_start|>")), ()]


async def test_an_answer_that_goes_on() -> None:
    engine = saying(f" is 5{END}")
    begun = [*QUESTION, {"role": "assistant", "content": "The answer"}]
    goes_on = {"continue_final_message": True, "add_generation_prompt": False}
    async with serving(engine) as client:
        answer = await client.answer(CHAT, {"messages": begun, **goes_on})
        assert answer["choices"][0]["message"]["content"] == " is 5"
        prompt = tokenizer().render_text(QUESTION) + "The answer"
        assert engine.requests[0].prompt_ids == tokenizer().encode(prompt)
        call = {"id": "c00000000", "type": "function", "function": FUNCTION}
        called = {"role": "assistant", "content": "x", "tool_calls": [call]}
        error = await client.refused(CHAT, {"messages": [*QUESTION, called], **goes_on})
        assert "without calls" in error["message"]
        text = "a line\n\n"  # white space at the end is kept
        await client.answer(
            CHAT, {"messages": [*QUESTION, {"role": "assistant", "content": text}], **goes_on}
        )
    assert tokenizer().decode(engine.requests[-1].prompt_ids, skip_special_tokens=False).endswith(text)


async def test_what_cannot_be_answered_is_a_400() -> None:
    engine = ScriptedEngine()
    cases: list[tuple[str, dict[str, Any], str | None]] = [
        *((COMPLETE, {"prompt": prompt}, "prompt") for prompt in (5, {"a": 1}, ["a", 5])),
        *((COMPLETE, {"prompt": prompt}, None) for prompt in (None, [], "")),
        (COMPLETE, {"logprobs": 1}, "logprobs"),
        (COMPLETE, {"echo": True}, "echo"),
        (COMPLETE, {"best_of": 2}, "best_of"),
        (COMPLETE, {"suffix": "x"}, "suffix"),
        (COMPLETE, {"n": 10**9}, "n"),
        (COMPLETE, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETE, {"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        (COMPLETE, {"stop": ["a", ""]}, "stop"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"top_logprobs": 2, "logprobs": True}, "top_logprobs"),
        (CHAT, {"tool_choice": "required", "tools": [CALCULATOR]}, "tool_choice"),
        *(
            (path, more, param)
            for path in (COMPLETE, CHAT)
            for more, param in [
                ({"logit_bias": {"5": 1}}, "logit_bias"),
                ({"n": 0}, "n"),
                ({"max_tokens": 0}, None),
                ({"response_format": {"type": "json_object"}}, "response_format"),
            ]
        ),
    ]
    async with serving(engine) as client:
        for path, more, param in cases:
            error = await client.refused(
                path, {"prompt": "12"} | more if path == COMPLETE else {"messages": QUESTION} | more
            )
            assert (error["param"], error["type"]) == (param, "invalid_request_error"), more
        error = await client.refused(COMPLETE, {"prompt": "1", "model": "gpt-4"}, 404)
        assert (error["code"], "'demo'" in error["message"]) == ("model_not_found", True)
    assert not engine.requests
