from typing import Any

import orjson
import pytest

from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import SamplingParams
from tests.unit.serving.served import END, saying, serving, tokenizer

PATH = "/v1/completions"


async def test_a_text_is_completed() -> None:
    engine = saying(f"7é{END}")
    async with serving(engine) as client:
        body = {"model": "demo", "prompt": "12", "logprobs": 0, "return_token_ids": True, "user": "me"}
        status, answer = await client.post(PATH, body)
    assert status == 200
    assert engine.requests[0].sampling == SamplingParams(16)
    completion = engine.completions[0][1]
    (choice,) = answer["choices"]
    logprobs = choice.pop("logprobs")
    assert choice == {
        "index": 0,
        "text": "7é",
        "finish_reason": "stop",
        "stop_reason": None,
        "prompt_token_ids": tokenizer().encode("12"),
        "token_ids": completion.token_ids,
    }
    assert logprobs == {
        "tokens": ["7", "", "é", END],
        "token_logprobs": completion.logprobs,
        "top_logprobs": None,
        "text_offset": [0, 1, 1, 2],
    }
    assert answer["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 4,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert (answer["object"], answer["model"], answer["metadata"]) == (
        "text_completion",
        "demo",
        {"weight_version": "0"},
    )


@pytest.mark.parametrize(
    "prompt", ["12", [20, 21], ["12", "3"], [[20], [21, 22]], ["12", [20]]], ids=lambda value: str(value)
)
async def test_prompts_are_texts_or_ids_one_or_many(prompt: Any) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        _, answer = await client.post(PATH, {"prompt": prompt, "n": 2, "seed": 4})
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    ids = [tokenizer().encode(one) if isinstance(one, str) else one for one in many]
    assert [request.prompt_ids for request in engine.requests] == [one for one in ids for _ in range(2)]
    assert [request.sampling.seed for request in engine.requests] == [4, 5] * len(ids)
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(ids)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert answer["usage"]["completion_tokens"] == 16 * 2 * len(ids)


async def test_a_stream_is_the_answer_in_chunks() -> None:
    async with serving(ScriptedEngine()) as client:
        body = {"prompt": [5], "n": 2, "seed": 1, "max_tokens": 3}
        _, answer = await client.post(PATH, body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, text = await client.post(PATH, {**body, **options})
        _, without = await client.post(PATH, {**body, "stream": True})
    *events, end = text.strip().split("\n\n")
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events]
    assert end == "data: [DONE]"
    assert [chunk["choices"] for chunk in chunks] == [[answer["choices"][0]], [answer["choices"][1]], []]
    assert [chunk["usage"] for chunk in chunks] == [None, None, answer["usage"]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in without


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"n": 0}, "n"),
        ({"n": 10**9}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"continuous_usage_stats": True}}, "stream_options"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": None}, None),
        ({"stop": ["a", ""]}, "stop"),
        ({"max_tokens": 0}, None),
        ({"prompt": []}, None),
        ({"prompt": ""}, None),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
async def test_what_cannot_be_answered_is_a_400(more: dict[str, Any], param: str | None) -> None:
    engine = ScriptedEngine()
    async with serving(engine) as client:
        error = await client.refused(PATH, {"prompt": "12", **more})
    assert error["param"] == param
    assert error["message"]
    assert error["type"] == "invalid_request_error"
    assert not engine.requests


async def test_another_model_is_not_found() -> None:
    async with serving(ScriptedEngine()) as client:
        error = await client.refused(PATH, {"prompt": "1", "model": "gpt-4"}, 404)
    assert error["code"] == "model_not_found"
    assert "'demo'" in error["message"]


async def test_tokens_by_their_ids() -> None:
    how = {"logprobs": 0, "return_tokens_as_token_ids": True, "request_id": "mine"}
    async with serving(saying("78")) as client:
        _, answer = await client.post(PATH, {"prompt": "1", **how})
        chat = {"messages": [{"role": "user", "content": "1"}], **how, "logprobs": True}
        _, turn = await client.post("/v1/chat/completions", chat)
    names = [f"token_id:{token}" for token in tokenizer().encode("78")]
    assert answer["choices"][0]["logprobs"]["tokens"] == names
    assert [one["token"] for one in turn["choices"][0]["logprobs"]["content"]] == names
    assert (answer["id"], turn["id"]) == ("cmpl-mine", "chatcmpl-mine")


async def test_special_tokens_are_shown_on_request() -> None:
    async with serving(saying("7<|im_start|>8")) as client:
        texts = []
        for skip in (True, False):
            _, answer = await client.post(PATH, {"prompt": "1", "skip_special_tokens": skip})
            texts.append(answer["choices"][0]["text"])
    assert texts == ["78", "7<|im_start|>8"]


async def test_a_stop_string_is_named_and_left_out() -> None:
    async with serving(saying("12 and")) as client:
        _, answer = await client.post(PATH, {"prompt": "1", "stop": ["and"], "return_token_ids": True})
    (choice,) = answer["choices"]
    assert (choice["text"], choice["stop_reason"], choice["finish_reason"]) == ("12 ", "and", "stop")
    assert choice["token_ids"] == tokenizer().encode("12 and")
