"""The server that agents ask: whose request it is, garbage, streams, and what is not there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from rollstream.errors import EngineError
from rollstream.gateway.app import SESSION_HEADER, Endpoint
from rollstream.gateway.recorder import Recorder
from rollstream.testing.scripted import ScriptedEngine
from rollstream.web import Request
from tests.support.until import until
from tests.unit.agent.rollouts import END, call_text, demo_tokenizer, started
from tests.unit.gateway.test_recorder import TOOL, check_exact, recorder_of, user

ASK = {"model": "m", "messages": [user("q")]}


@asynccontextmanager
async def served(engine: ScriptedEngine, **given: Any) -> AsyncIterator[tuple[Recorder, Any]]:
    """A recorder under the name `mine`, and what posts to the endpoint."""
    recorder, _ = recorder_of(engine, **given)
    endpoint = Endpoint("m", 4096)
    async with endpoint.serving(), aiohttp.ClientSession() as client:

        async def post(
            body: Any, session: str | None = "mine", route: str = "/chat/completions"
        ) -> tuple[int, bytes]:
            data = body if isinstance(body, bytes) else orjson.dumps(body)
            headers = {} if session is None else {SESSION_HEADER: session}
            async with client.post(endpoint.url + route, data=data, headers=headers) as response:
                return response.status, await response.read()

        post.client, post.url = client, endpoint.url  # type: ignore[attr-defined]
        with endpoint.session("mine", recorder):
            yield recorder, post


async def test_an_answer() -> None:
    engine = await started(lambda request: demo_tokenizer().encode("78" + END))
    async with served(engine) as (recorder, post):
        status, body = await post(ASK)
        answer = orjson.loads(body)
        async with post.client.get(post.url + "/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == 4096
    assert status == 200
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "78"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)
    assert answer["usage"]["completion_tokens"] == 3
    assert "prompt_token_ids" not in answer
    check_exact(engine, recorder.session.trajectories())


async def test_a_stream_says_the_same() -> None:
    texts = iter([call_text("add", a=1) + END, "78" + END])
    engine = await started(lambda request: demo_tokenizer().encode(next(texts)))
    async with served(engine) as (_, post):
        more = {"stream": True, "stream_options": {"include_usage": True}}
        status, body = await post({**ASK, "tools": [TOOL], **more})
        _, second = await post({**ASK, "stream": True})
    assert status == 200
    events = [line.removeprefix(b"data: ") for line in body.split(b"\n\n") if line]
    assert events[-1] == b"[DONE]"
    chunks = [orjson.loads(event) for event in events[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] > 3
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": None}
    assert deltas[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a":1}'}
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert b'"content":"78"' in second
    assert b"usage" not in second


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"messages": 3}', b'{"messages": []}', b"\xff", b"{}"])
async def test_garbage_is_a_400(body: bytes) -> None:
    engine = await started()
    async with served(engine) as (_, post):
        assert (await post(body))[0] == 400
        assert (await post(ASK))[0] == 200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": 0.3}, "actor_rollout_ref.rollout.temperature"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"n": 2}, "'n'"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logit_bias": {"3": 5}}, "logit_bias"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image",
        ),
    ],
)
async def test_what_cannot_be_meant_is_refused(given: dict[str, Any], words: str) -> None:
    engine = await started()
    async with served(engine) as (recorder, post):
        status, body = await post({**ASK, **given})
    assert status == 400
    assert words in orjson.loads(body)["error"]["message"]
    assert words in str(recorder.refusal)
    assert not engine.requests


async def test_a_call_ends_with_its_rollout() -> None:
    engine = await started(latency=60.0)
    recorder, broken = recorder_of(engine)
    endpoint = Endpoint("m", 4096)
    async with endpoint.serving(), aiohttp.ClientSession(headers={SESSION_HEADER: "mine"}) as client:
        with endpoint.session("mine", recorder):
            call = asyncio.create_task(client.post(endpoint.url + "/chat/completions", json=ASK))
            await until(lambda: engine.in_flight)
        await until(lambda: not engine.in_flight)
        with pytest.raises(aiohttp.ClientError):
            await call
    assert not recorder.session.turns and not broken.done()


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "tool_call_id": ["x"], "content": "7"},
        {"role": "user", "name": {"a": 1}, "content": "7"},
        {"role": "assistant", "tool_calls": [{"id": [1], "function": {"name": "f", "arguments": "{}"}}]},
    ],
)
async def test_a_message_that_is_garbage_ends_no_rollout(message: dict[str, Any]) -> None:
    engine = await started(response_tokens=4)
    async with served(engine) as (recorder, post):
        _, body = await post(ASK)
        said = orjson.loads(body)["choices"][0]["message"]
        status, body = await post({"messages": [*ASK["messages"], said, message, user("?")]})
        assert status == 400 and "must be a text" in orjson.loads(body)["error"]["message"]
        assert "must be a text" in str(recorder.refusal)


async def test_log_probs_and_ids_of_a_cut_answer() -> None:
    engine = await started(response_tokens=50)
    async with served(engine) as (_, post):
        _, body = await post({**ASK, "max_completion_tokens": 3, "logprobs": True})
    (choice,) = orjson.loads(body)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == engine.completions[0][1].token_ids
    assert len(choice["logprobs"]["content"]) == 3


async def test_requests_of_nobody_and_routes_that_are_not_there() -> None:
    engine = await started()
    async with served(engine) as (recorder, post):
        for session in (None, "", "other"):
            assert (await post(ASK, session))[0] == 404
        status, body = await post(ASK, route="/responses")
        assert status == 404
        assert b"chat API" in body
    assert "/v1/responses" in str(recorder.refusal)
    assert not engine.requests


async def test_errors_of_the_engine() -> None:
    engine = await started()
    engine.fail(lambda request: True, EngineError("no such ids"))
    engine.fail(lambda request: True, ValueError("a mistake"))
    async with served(engine) as (_, post):
        assert sorted([(await post(ASK))[0], (await post(ASK))[0]]) == [400, 500]


async def test_a_client_that_hangs_up_ends_its_generation() -> None:
    engine = await started(latency=60.0)
    async with served(engine) as (recorder, post):
        task = asyncio.create_task(post(ASK))
        await until(lambda: engine.in_flight)
        task.cancel()
        await until(lambda: not engine.in_flight)
    assert recorder.session.turns == []


async def test_an_answer_whose_client_went_away_meanwhile_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended when the answer was there already, and nothing was cancelled yet."""
    engine = await started(response_tokens=4)
    async with served(engine) as (recorder, post):
        with monkeypatch.context() as patched:
            patched.setattr(Request, "gone", property(lambda self: bool(engine.completions)))
            with pytest.raises(aiohttp.ClientError):
                await post(ASK)
        assert engine.completions and not recorder.session.turns
        assert (await post(ASK))[0] == 200
    assert len(recorder.session.trajectories()) == 1


async def test_rollouts_at_once_do_not_mix() -> None:
    engine = await started(response_tokens=3, latency=0.005)
    endpoint = Endpoint("m", None)
    async with endpoint.serving(), aiohttp.ClientSession() as client:

        async def play(number: int) -> Recorder:
            recorder, _ = recorder_of(engine, name=str(number))
            headers = {SESSION_HEADER: str(number)}
            messages = [user(f"question {number}")]
            with endpoint.session(str(number), recorder):
                for _ in range(3):
                    body = {"messages": messages}
                    async with client.post(
                        endpoint.url + "/chat/completions", json=body, headers=headers
                    ) as reply:
                        answer = await reply.json()
                    messages = [*messages, answer["choices"][0]["message"], user("more")]
            return recorder

        recorders = await asyncio.gather(*(play(number) for number in range(40)))
    for number, recorder in enumerate(recorders):
        (trajectory,) = recorder.session.trajectories()
        assert trajectory.messages[0]["content"] == f"question {number}"
        assert sum(trajectory.response_mask) == 9
