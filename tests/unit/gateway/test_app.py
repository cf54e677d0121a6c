"""The server that agents ask: whose request it is, the run's sampling, streams, errors, and what is not there."""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.agent.images import ImageReader
from rollstream.gateway import app
from rollstream.gateway.app import SESSION_HEADER, Endpoint
from rollstream.gateway.recorder import Recorder
from rollstream.testing.scripted import AnswerRule, ScriptedEngine
from rollstream.web import HTTPError, Request
from tests.support.until import until
from tests.unit.agent.rollouts import END, demo_tokenizer, started
from tests.unit.chat.vision import IMAGE_PAD, load_model, png, write_model
from tests.unit.chat.wires.test_wires import BODIES, JSON, PLACES, ROUTES, changed
from tests.unit.gateway.test_recorder import TOOL, check_exact, recorder_of, user

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASK: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": [user("q")]},
    RESPONSES: {"model": "m", "input": "q"},
    MESSAGES: {"model": "m", "messages": [user("q")], "max_tokens": 64},
}


class Client:
    """Posts to a session."""

    def __init__(self, recorder: Recorder, http: aiohttp.ClientSession, url: str) -> None:
        self.recorder, self.http, self.url = recorder, http, url
        self.headers: Any = {}

    async def post(
        self, body: Any, route: str = CHAT, begun: asyncio.Event | None = None, **headers: str
    ) -> tuple[int, Any]:
        """`begun` is set when the answer begins."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with self.http.post(self.url + route, data=data, headers=headers) as response:
            self.headers = response.headers
            read = await response.content.readany()
            if begun is not None:
                begun.set()
            read += await response.content.read()
            return response.status, read if response.content_type != "application/json" else orjson.loads(
                read
            )


@asynccontextmanager
async def served(engine: ScriptedEngine, **given: Any) -> AsyncIterator[Client]:
    options = {name: given.pop(name) for name in ("client_sampling", "strict") if name in given}
    endpoint = Endpoint("m", 4096, **options)
    recorder, _ = recorder_of(engine, **given)
    async with endpoint.serving(), aiohttp.ClientSession() as http:
        with endpoint.open(recorder) as url:
            yield Client(recorder, http, url)


def says(what: str) -> AnswerRule:
    """Always the same."""
    return lambda request: demo_tokenizer().encode(what)


@pytest.mark.parametrize("route", ASK)
async def test_a_text_that_was_cut_through_an_emoji_is_taken_and_noted(route: str) -> None:
    engine = await started(says("78" + END))
    async with served(engine) as client:
        cut = orjson.dumps(ASK[route]).replace(b'"q"', rb'"\ud83d q"')
        for _ in range(2):
            assert (await client.post(cut, route))[0] == 200
        trajectories = client.recorder.trajectories()
    assert "\ufffd q" in demo_tokenizer().decode(engine.requests[0].prompt_ids)
    assert [one.extra["gateway"] for one in trajectories] == [{"replaced_surrogates": 1}] * 2


@given(st.lists(st.tuples(st.sampled_from(list(BODIES)), PLACES, JSON), min_size=5, max_size=5))
@settings(max_examples=40)
def test_garbage_is_no_fault_of_the_server_and_ends_no_rollout(changes: list[Any]) -> None:
    async def play() -> None:
        engine = await started(response_tokens=4)
        async with served(engine) as client:
            assert (await client.post(ASK[CHAT]))[0] == 200
            for wire, where, by in changes:
                status, _ = await client.post(changed(BODIES[wire], where, by), ROUTES[wire])
                assert status in (200, 400)
            client.recorder.trajectories()

    asyncio.run(play())


DEEP = [b"[" * depth + b"1" + b"]" * depth for depth in (200, 900, 100_000)]


@pytest.mark.parametrize("deep", DEEP, ids=len)
async def test_what_is_nested_deeply_ends_no_rollout(deep: bytes) -> None:
    engine = await started()
    call = b'{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": %b}}' % deep
    body = b'{"max_tokens": 9, "messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [%b]}, '
    body = body % call + b'{"role": "user", "content": "r"}]}'
    async with served(engine) as client:
        assert (await client.post(body, MESSAGES))[0] in (200, 400)
        assert (await client.post(ASK[MESSAGES], MESSAGES))[0] == 200


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "image",
        ),
        (
            {"messages": [user("q"), {"role": "tool", "tool_call_id": ["x"], "content": "7"}]},
            "must be a text",
        ),
    ],
)
async def test_what_cannot_be_meant_is_refused_and_ends_no_rollout(given: dict[str, Any], words: str) -> None:
    engine = await started()
    async with served(engine) as client:
        status, body = await client.post({**ASK[CHAT], **given})
        assert status == 400 and words in body["error"]["message"]
        assert words in str(client.recorder.refusal)
        assert not engine.requests
        assert (await client.post(ASK[CHAT]))[0] == 200


@pytest.mark.parametrize(
    ("given", "notes"),
    [
        ({"temperature": 0.0, "top_p": 0.5}, ["temperature: 0.0", "top_p: 0.5"]),
        ({"temperature": 1, "top_p": 1.0, "top_k": 0, "presence_penalty": 0, "min_p": 0}, []),
        ({"frequency_penalty": 0.5, "seed": 5}, ["frequency_penalty: 0.5", "seed: 5"]),
        ({"reasoning_effort": "low", "parallel_tool_calls": True}, ["reasoning_effort: low"]),
        ({"tool_choice": "required", "store": False}, ["tool_choice: required", "store: false"]),
        ({"tools": [TOOL, {"type": "web_search"}]}, ["tool web_search: left out"]),
    ],
)
async def test_what_is_not_done_as_asked_is_noted(
    given: dict[str, Any], notes: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = await started()
    async with served(engine) as client:
        for more in ({}, {"max_tokens": 9}):
            assert (await client.post({**ASK[CHAT], **given, "model": "theirs", **more}))[0] == 200
        trajectory = client.recorder.trajectories()[-1]
    assert sorted(trajectory.extra["gateway"]["notes"]) == sorted([*notes, "model: theirs"])
    for note in notes:
        assert caplog.text.count(f"agents ask for {note.partition(':')[0]},") == 1
    request = engine.requests[0]
    assert (request.sampling.temperature, request.sampling.top_p) == (1.0, 1.0)
    assert request.sampling.seed not in (5, None)


async def test_a_strict_gateway_refuses_what_it_does_not_do() -> None:
    engine = await started()
    async with served(engine, strict=True) as client:
        for wrong in ({"tool_choice": "required"}, {"unheard_of": 1}, {"tools": [{"type": "web_search"}]}):
            assert (await client.post({**ASK[CHAT], **wrong}))[0] == 400
        assert (await client.post({**ASK[CHAT], "store": False, "temperature": 0.5}))[0] == 200


async def test_clients_choose_the_sampling_where_the_run_lets_them() -> None:
    engine = await started()
    async with served(engine, client_sampling=True) as client:
        asked = {"temperature": 0.5, "top_k": 9, "seed": 2**31 + 5}
        for _ in range(2):
            assert (await client.post({**ASK[CHAT], **asked, "reasoning_effort": "low"}))[0] == 200
        trajectory = client.recorder.trajectories()[-1]
        for wrong in ({"temperature": -1}, {"top_p": 2}, {"seed": 0.5}, {"min_p": 0.1}):
            status, body = await client.post({**ASK[CHAT], **wrong})
            assert status == 400 and next(iter(wrong)) in body["error"]["message"]
        assert (await client.post(ASK[CHAT]))[0] == 200
    sampled = [(one.sampling.temperature, one.sampling.top_k, one.sampling.seed) for one in engine.requests]
    assert sampled[:2] == [(0.5, 9, 5)] * 2
    assert sampled[2][:2] == (1.0, -1)
    chosen = {"temperature": [0.5], "top_k": [9], "seed": [5]}
    assert trajectory.extra["gateway"]["client_sampling"] == chosen


async def test_log_probs_and_ids_of_a_cut_answer() -> None:
    engine = await started(response_tokens=50)
    async with served(engine) as client:
        _, body = await client.post({**ASK[CHAT], "max_completion_tokens": 3, "logprobs": True})
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["token_ids"] == engine.completions[0][1].token_ids
    names = [f"token_id:{token}" for token in choice["token_ids"]]
    assert [one["token"] for one in choice["logprobs"]["content"]] == names and len(names) == 3
    async with served(engine, logprobs=False) as client:
        status, body = await client.post({**ASK[CHAT], "logprobs": True})
        assert status == 400 and "calculate_log_probs" in body["error"]["message"]


async def test_a_response_goes_on_after_another_one() -> None:
    engine = await started(lambda request: demo_tokenizer().encode("78" + END))
    async with served(engine) as client:
        _, first = await client.post({"input": "q", "instructions": "be brief"}, RESPONSES)
        again = {"input": "more", "previous_response_id": first["id"], "temperature": 0.5}
        _, second = await client.post({**again, "instructions": "be brief"}, RESPONSES)
        assert second["id"].startswith("resp_")  # also where its temperature is not taken
        assert len(client.recorder.trajectories()) == 1
        # Instructions belong to one request: without them, or with others, it is another conversation.
        await client.post(again, RESPONSES)
        trajectories = client.recorder.trajectories()
        check_exact(engine, trajectories)
        assert [message["role"] for message in trajectories[1].messages] == ["user", "assistant"] * 2
        status, body = await client.post({**again, "previous_response_id": "resp_x"}, RESPONSES)
        assert (status, body["error"]["code"]) == (400, "previous_response_not_found")


@pytest.mark.parametrize("route", ASK)
async def test_a_call_says_that_it_is_a_side_call(route: str) -> None:
    engine = await started(says("so" + END))
    async with served(engine) as client:
        assert (await client.post(ASK[route], route, **{"x-rollstream-call": "side"}))[0] == 200
        assert (await client.post({**ASK[route], "rollstream": {"call": "side"}}, route))[0] == 200
        assert (await client.post(ASK[route], route))[0] == 200
        assert (await client.post({**ASK[route], "rollstream": {"call": "main"}}, route))[0] == 400
        assert [one.is_side_call for one in client.recorder.trajectories()] == [True, True, False]


async def test_tokens_are_counted_and_models_are_told() -> None:
    engine = await started()
    async with served(engine) as client:
        _, counted = await client.post({"messages": [user("q")], "model": "m"}, MESSAGES + "/count_tokens")
        assert not client.recorder.session.begun
        await client.post(ASK[MESSAGES], MESSAGES)
        assert counted == {"input_tokens": len(engine.requests[0].prompt_ids)}
        async with client.http.get(f"{client.url}/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("m", 4096)
        async with client.http.get(f"{client.url}/v1/models/org/any") as response:
            assert await response.json() == model


async def test_programs_without_a_network_come_by_a_socket(tmp_path: Path) -> None:
    """One that opens more connections there than its session may have calls is cut off, and nobody else."""
    recorder, _ = recorder_of(await started())
    endpoint = Endpoint("m", 4096)
    socket, greedy = str(tmp_path / "socket"), str(tmp_path / "greedy")
    async with (
        endpoint.serving(),
        endpoint.listening_at(Path(socket)),
        endpoint.listening_at(Path(greedy)),
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(socket)) as http,
    ):
        held = [await asyncio.open_unix_connection(greedy) for _ in range(129)]
        reader, _ = held[-1]
        assert await reader.read() == b""
        with endpoint.open(recorder) as url:
            session = url.replace(endpoint.url, "http://127.0.0.1:8383")
            assert (await Client(recorder, http, session).post(ASK[CHAT]))[0] == 200
        for _, writer in held:
            writer.close()


async def test_requests_of_nobody_and_routes_that_are_not_there(caplog: pytest.LogCaptureFixture) -> None:
    """An error has the form of the API that the path names; a session's secret is told to nobody."""
    engine = await started()
    async with served(engine) as client:
        own, base = client.url, client.url.partition("/s/")[0]
        for client.url in (f"{base}/s/other", f"{base}/s/", base):
            assert (await client.post(ASK[CHAT]))[0] == 404
            status, body = await client.post(ASK[MESSAGES], MESSAGES)
            assert (status, body["error"]["type"]) == (404, "not_found_error")
        async with client.http.get(f"{base}/s/other/v1/models") as response:
            assert response.status == 404
        client.url = own
        status, body = await client.post(ASK[CHAT], "/v1/embeddings")
        assert status == 404 and "embeddings" in str(client.recorder.refusal)
        assert not engine.requests
        engine.fail(lambda request: True, ValueError("a mistake"))
        with caplog.at_level(logging.DEBUG):
            assert (await client.post(ASK[CHAT]))[0] == 500
        secret = own.rpartition("/")[2]
        assert len(secret) > 40 and secret not in caplog.text + str(client.recorder.refusal)
        client.url = base
        assert (await client.post(ASK[CHAT], **{SESSION_HEADER: secret}))[0] == 200


async def test_a_session_has_its_share_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_CALLS_AT_ONCE", 2)
    engine = await started(latency=60.0)
    endpoint = Endpoint("m", None, max_sessions=2)
    recorders = [recorder_of(engine, name=str(at))[0] for at in range(3)]
    async with endpoint.serving(), aiohttp.ClientSession() as http:
        with endpoint.open(recorders[0]) as url, endpoint.open(recorders[1]) as other:
            with pytest.raises(HTTPError, match="2 sessions are open"), endpoint.open(recorders[2]):
                pass
            first, second = Client(recorders[0], http, url), Client(recorders[1], http, other)
            calls = [asyncio.create_task(first.post(ASK[CHAT])) for _ in range(2)]
            await until(lambda: engine.in_flight == 2)
            status, body = await first.post(ASK[MESSAGES], MESSAGES)
            assert (status, body["error"]["type"]) == (429, "rate_limit_error")
            assert first.headers["Retry-After"] == "1"
            calls.append(asyncio.create_task(second.post(ASK[CHAT])))
            await until(lambda: engine.in_flight == 3)
        for call in calls:
            with pytest.raises(aiohttp.ClientError):
                await call


async def test_calls_whose_bodies_are_to_come_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_CALLS_AT_ONCE", 2)
    async with served(await started()) as client:
        where, writers, statuses = urlsplit(client.url), [], []
        for _ in range(3):
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
            head = f"POST {where.path}{CHAT} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Length: 9\r\n\r\n"
            writer.write(head.encode())
            writers.append(writer)
            statuses.append(asyncio.create_task(reader.readline()))
        done, waiting = await asyncio.wait(statuses, return_when=asyncio.FIRST_COMPLETED)
        assert [status.result()[:12] for status in done] == [b"HTTP/1.1 429"]
    assert await asyncio.gather(*waiting) == [b"", b""]  # cut off with their session
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_ends_with_its_rollout(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_HEADERS_S", 0.0)
    engine = await started(latency=60.0)
    recorder, broken = recorder_of(engine)
    endpoint = Endpoint("m", 4096)
    async with endpoint.serving(), aiohttp.ClientSession() as http:
        with endpoint.open(recorder) as url:
            call = asyncio.create_task(Client(recorder, http, url).post({**ASK[CHAT], "stream": stream}))
            await until(lambda: engine.in_flight)
        await until(lambda: not engine.in_flight)
        with pytest.raises(aiohttp.ClientError):
            await call
    assert not recorder.session.turns and not broken.done()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_ends_its_generation(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_HEADERS_S", 0.0)
    engine = await started(latency=60.0)
    async with served(engine) as client:
        task = asyncio.create_task(client.post({**ASK[CHAT], "stream": stream}))
        await until(lambda: engine.in_flight)
        task.cancel()
        await until(lambda: not engine.in_flight)
        assert client.recorder.session.turns == []


async def test_an_answer_whose_client_went_away_meanwhile_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ended when the answer was there already, and nothing was cancelled yet."""
    engine = await started(response_tokens=4)
    async with served(engine) as client:
        with monkeypatch.context() as patched:
            patched.setattr(Request, "gone", property(lambda self: bool(engine.completions)))
            with pytest.raises(aiohttp.ClientError):
                await client.post(ASK[CHAT])
        assert engine.completions and not client.recorder.session.turns
        assert (await client.post(ASK[CHAT]))[0] == 200
        assert len(client.recorder.trajectories()) == 1


def showing(route: str, url: str) -> dict[str, Any]:
    """A user's message with an image, as an API has it."""
    if route == CHAT:
        part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    elif route == RESPONSES:
        part = {"type": "input_image", "image_url": url}
    else:
        part = {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": url.split(",")[1]},
        }
    return {
        "role": "user",
        "content": [{"type": "text" if route != RESPONSES else "input_text", "text": "look"}, part],
    }


@pytest.mark.parametrize("route", ASK)
async def test_images_go_to_the_engine_and_are_not_stored(route: str, tmp_path: Path) -> None:
    tokenizer, processor = load_model(write_model(tmp_path))
    urls = ["data:image/png;base64," + base64.b64encode(png(56, height)).decode() for height in (56, 84)]
    capabilities = replace(ScriptedEngine().capabilities, images=True, vocab_size=512)
    engine = await started(lambda request: tokenizer.encode("this<|im_end|>"), capabilities=capabilities)
    given = {"tokenizer": tokenizer, "images": ImageReader(processor)}
    async with served(engine, **given) as client:
        field = "input" if route == RESPONSES else "messages"
        first = showing(route, urls[0])
        answer = {"role": "assistant", "content": "this"}
        asked = {**ASK[route], field: [first]}
        assert (await client.post(asked, route))[0] == 200
        asked[field] = [first, answer, showing(route, urls[1])]
        if route == MESSAGES:
            _, counted = await client.post(asked, MESSAGES + "/count_tokens")
        assert (await client.post(asked, route))[0] == 200
        for wrong in (urls[0][:60], "/etc/passwd", "file:///etc/passwd", "http://127.0.0.1:9/x.png"):
            if route != MESSAGES:
                asked[field] = [showing(route, wrong)]
                assert (await client.post(asked, route))[0] == 400
        (trajectory,) = client.recorder.trajectories()
    check_exact(engine, [trajectory])
    assert [len(request.images) for request in engine.requests] == [1, 2]
    assert [request.prompt_ids.count(IMAGE_PAD) for request in engine.requests] == [4, 4 + 6]
    assert "base64" not in repr(trajectory.messages) and "sha256" in repr(trajectory.messages)
    if route == MESSAGES:
        assert counted == {"input_tokens": len(engine.requests[1].prompt_ids)}


async def test_rollouts_at_once_do_not_mix() -> None:
    engine = await started(response_tokens=3, latency=0.005)
    endpoint = Endpoint("m", None)
    async with endpoint.serving(), aiohttp.ClientSession() as http:

        async def play(number: int) -> Recorder:
            recorder, _ = recorder_of(engine, name=str(number))
            messages = [user(f"question {number}")]
            with endpoint.open(recorder) as url:
                for _ in range(3):
                    _, answer = await Client(recorder, http, url).post({"messages": messages})
                    messages = [*messages, answer["choices"][0]["message"], user("more")]
            return recorder

        recorders = await asyncio.gather(*(play(number) for number in range(40)))
    for number, recorder in enumerate(recorders):
        (trajectory,) = recorder.trajectories()
        assert trajectory.messages[0]["content"] == f"question {number}"
        assert sum(trajectory.response_mask) == 9
