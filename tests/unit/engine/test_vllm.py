"""A small server that answers as vLLM 0.32 did when it was recorded, and what the engine makes of it."""

import asyncio
import copy
import itertools
import logging
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollstream.engine.base import Engine
from rollstream.engine.kind import EngineOptions
from rollstream.engine.vllm import (
    COMPLETIONS,
    GENERATE,
    VLLMEngine,
    VLLMReplica,
    read_probe,
    request_body,
    server_request_id,
)
from rollstream.errors import (
    EngineError,
    EngineUnavailableError,
    TransientEngineError,
)
from rollstream.trajectory import Completion, SamplingParams
from tests.support.engines import started
from tests.support.until import until

SAMPLING = SamplingParams(5, seed=1)


USAGE = {
    "prompt_tokens": 4,
    "total_tokens": 9,
    "completion_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 3, "created_cache_tokens": None, "multimodal_tokens": None},
    "completion_tokens_details": None,
}
IDS = [374, 129, 350, 19, 19]
LOGPROBS = [
    -5.9154815673828125,
    -6.10731315612793,
    -1.9620392322540283,
    -0.9532407522201538,
    -1.842869758605957,
]
VERSIONS = [{"version": "default", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 5}]
SCORED = [
    {"token_id": token, "logprob": value, "rank": 129} for token, value in zip(IDS, LOGPROBS, strict=True)
]
GENERATE_REPLY: dict[str, Any] = {
    "request_id": "generate-tokens-abc.1",
    **{"model": "org/demo", "created": 1795268398, "usage": USAGE, "output_mode": "tokens"},
    **{"prompt_logprobs": None, "prompt_token_ids": None},
    "choices": [
        {
            **{"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": IDS},
            "weight_versions": VERSIONS,
            "logprobs": {"content": [{**one, "top_logprobs": [one]} for one in SCORED]},
        }
    ],
}
NAMES = [f"token_id:{token}" for token in IDS]
COMPLETION_REPLY: dict[str, Any] = {
    "id": "cmpl-abc.1",
    **{"object": "text_completion", "created": 1795268426, "model": "org/demo", "usage": USAGE},
    "choices": [
        {
            **{"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": IDS},
            **{"text": 'des�"}}11', "prompt_token_ids": [1, 5, 6, 7]},
            "logprobs": {
                **{"text_offset": [0, 12, 24, 36, 47], "token_logprobs": LOGPROBS, "tokens": NAMES},
                "top_logprobs": [{name: value} for name, value in zip(NAMES, LOGPROBS, strict=True)],
            },
        }
    ],
}
RAW_TOPS = [-5.257299423217773, -5.306367874145508, -5.329089641571045, -5.396659851074219]
PROCESSED_TOPS = [0.0, -9999.0, -9999.0, -9999.0]
DISABLED = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


def failure(status: int, message: str, kind: str) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return web.json_response({"error": error}, status=status)


def probe_reply(route: str, rid: str, tops: list[float]) -> dict[str, Any]:
    if route == GENERATE:
        scored = [{"token_id": 300 + i, "logprob": top, "rank": i + 1} for i, top in enumerate(tops)]
        content = [{"token_id": 300, "logprob": tops[0], "rank": 1, "top_logprobs": scored}]
        choice = {"index": 0, "finish_reason": "length", "token_ids": [300], "logprobs": {"content": content}}
        return {"request_id": f"generate-tokens-{rid}", "choices": [choice]}
    logprobs = {
        "token_logprobs": tops[:1],
        "top_logprobs": [{f"token_id:{300 + i}": top for i, top in enumerate(tops)}],
    }
    return {"id": f"cmpl-{rid}", "choices": [{"token_ids": [300], "logprobs": logprobs}]}


class FakeServer:
    """vLLM's routes. What it is told to answer with, it keeps answering with."""

    def __init__(self, *, scale_out: bool = True, dev: bool = False) -> None:
        self.scale_out, self.dev = scale_out, dev
        self.tops = RAW_TOPS
        self.takes_stops = True
        self.has_tokenizer = True
        self.healthy = True
        self.paused = False
        self.cards: list[dict[str, Any]] = [{"id": "org/demo", "root": "/models/demo", "max_model_len": 64}]
        self.edit: Callable[[dict[str, Any]], None] = lambda reply: None
        self.answer: Callable[[], web.Response] | None = None
        self.hang = False
        self.failing_path = ""
        self.gate: asyncio.Event | None = None
        """`/collective_rpc` waits for it."""
        self.asked: list[dict[str, Any]] = []
        self.score = -2.5
        self.device = "cuda"
        self.probes = 0
        self.told: list[tuple[str, Any]] = []
        self.waiting: dict[str, asyncio.Event] = {}
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.serve)
        self._server = TestServer(app)

    async def __aenter__(self) -> "FakeServer":
        await self._server.start_server()
        return self

    async def __aexit__(self, *_: object) -> None:
        for event in self.waiting.values():
            event.set()
        await self._server.close()

    @property
    def url(self) -> str:
        return str(self._server.make_url("")).rstrip("/")

    async def serve(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/health":
            return web.Response(status=200 if self.healthy else 503)
        if path == "/v1/models":
            return web.json_response({"object": "list", "data": self.cards})
        if path == "/detokenize":
            if self.has_tokenizer:
                return web.json_response({"prompt": "6"})
            return failure(400, "Tokenizer not available when `skip_tokenizer_init=True`", "BadRequestError")
        if path in (GENERATE, "/inference/v1/abort_requests") and not self.scale_out:
            return failure(403, DISABLED, "PermissionDeniedError")
        if path in (GENERATE, COMPLETIONS):
            return await self.sample(path, await request.json())
        if path == "/inference/v1/abort_requests" or (self.dev and path == "/abort_requests"):
            for name in (body := await request.json())["request_ids"]:
                self.told.append((path, name))
                self.waiting[name].set()
            assert path.startswith("/inference") or body["request_ids"], "this would abort everything"
            return web.Response()
        if self.dev and path == "/weight_info":
            return web.json_response({"weight_version": "default"})
        if self.dev and path == "/server_info":
            return web.json_response({"vllm_config": {"device_config": {"device": self.device}}})
        if self.dev and path == "/is_paused":
            return web.json_response({"is_paused": self.paused})
        if self.dev and request.method == "POST":
            return await self.control(request)
        return web.json_response({"detail": "Not Found"}, status=404)

    async def control(self, request: web.Request) -> web.Response:
        self.told.append((request.path_qs, orjson.loads(await request.read() or b"null")))
        self.paused = self.paused if request.path not in ("/pause", "/resume") else request.path == "/pause"
        if self.gate is not None and request.path == "/collective_rpc":
            await self.gate.wait()
        if request.path == self.failing_path:
            if request.path == "/reset_prefix_cache":
                return web.json_response({"success": False})
            return failure(500, "Call to collective_rpc method failed", "InternalServerError")
        return web.json_response({"success": True})

    async def sample(self, path: str, body: dict[str, Any]) -> web.Response:
        params = body["sampling_params"] if path == GENERATE else body
        if params.get("stop") and not self.takes_stops:
            return failure(400, "stop strings are not supported", "BadRequestError")
        if "prompt_logprobs" in body:
            places = [None, *({token: {"logprob": self.score, "rank": 9}} for token in body["prompt"][1:])]
            return web.json_response({"id": "cmpl-x", "choices": [{"prompt_logprobs": places}]})
        rid = body["request_id"]
        if body["request_id"].startswith("probe-"):
            self.probes += 1
            if self.answer is not None:
                return self.answer()
            return web.json_response(probe_reply(path, rid, self.tops))
        self.asked.append(body)
        if self.answer is not None:
            return self.answer()
        reply = copy.deepcopy(GENERATE_REPLY if path == GENERATE else COMPLETION_REPLY)
        reply |= {"request_id": f"generate-tokens-{rid}"} if path == GENERATE else {"id": f"cmpl-{rid}"}
        if self.hang:
            name = server_request_id(path, body["request_id"])  # type: ignore[arg-type]
            self.waiting[name] = asyncio.Event()
            try:
                await self.waiting[name].wait()
            finally:
                del self.waiting[name]
            reply["choices"][0]["finish_reason"] = "abort"
        self.edit(reply)
        return web.json_response(reply)


@pytest.fixture(params=[True, False], ids=["generate", "completions"])
async def server(request: pytest.FixtureRequest) -> AsyncIterator[FakeServer]:
    async with FakeServer(scale_out=request.param) as server:
        yield server


@pytest.fixture
async def engine(server: FakeServer) -> AsyncIterator[VLLMEngine]:
    async with started(VLLMEngine([server.url])) as engine:
        yield engine


async def ask(engine: VLLMEngine, *, request_id: str = "a", **changes: Any) -> Completion:
    return await engine.generate([1, 5, 6, 7], replace(SAMPLING, **changes), request_id=request_id)


async def test_ids_and_logprobs_are_those_of_the_server(server: FakeServer, engine: VLLMEngine) -> None:
    assert isinstance(engine, Engine)
    completion = await ask(engine)
    assert (completion.token_ids, completion.logprobs) == (IDS, LOGPROBS)
    assert (completion.finish_reason, completion.cached_prompt_tokens) == ("length", 3)
    assert completion.policy_versions == ([(0, 0), (2, 7)] if server.scale_out else [(0, 0)])
    plain = await ask(engine, logprobs=False)
    assert plain.logprobs is None and plain.token_ids == IDS
    first, second = (body.get("sampling_params", body) for body in server.asked)
    assert first["logprobs"] == 0 and "logprobs" not in second
    assert server.asked[0]["model"] == "org/demo"


def test_bodies_say_all_that_was_asked_for() -> None:
    stop = ("a", "<|im_end|>")
    how = SamplingParams(9, 0.7, 0.9, 20, seed=3, stop=stop, stop_token_ids=(4, 5), ignore_eos=True)
    params = {
        **{"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "logprobs": 0, "seed": 3},
        **{"stop": stop, "skip_special_tokens": False, "stop_token_ids": (4, 5), "ignore_eos": True},
    }
    about = {"request_id": "r", "model": "m"}
    assert request_body(GENERATE, [1, 2], how, "r", "m") == {
        **about,
        "token_ids": [1, 2],
        "sampling_params": {**params, "detokenize": True},
    }
    completions = request_body(COMPLETIONS, [1, 2], how, "r", "m")
    assert completions == {**completions, **params, **about, "prompt": [1, 2]}
    assert completions["return_token_ids"] and completions["min_p"] == 0.0
    extra = {"min_p": 0.1, "min_tokens": 2}
    for route in (GENERATE, COMPLETIONS):
        body = request_body(route, [1], replace(how, extra=extra), "r", "m")
        body = body["sampling_params"] if route == GENERATE else body
        assert body == {**body, **extra}
    quiet = request_body(GENERATE, [1], SamplingParams(2), "r", "m")["sampling_params"]
    defaults = {"max_tokens": 2, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "logprobs": 0}
    assert quiet == {**defaults, "detokenize": False}


async def test_capabilities_come_from_the_server(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 500, "max_position_embeddings": 48}')
    server.dev, server.tops, server.takes_stops = True, PROCESSED_TOPS, False
    engine = VLLMEngine([server.url], model_path=str(tmp_path), engine_kwargs={"check_model": False})
    with pytest.raises(EngineError, match="not been started"):
        _ = engine.capabilities
    async with started(engine):
        found = engine.capabilities
    assert found.logprobs == "processed"
    assert not found.stop_strings and not found.images
    assert found.seeds and found.stop_token_ids and found.stop_token_ids_with_ignore_eos
    assert found.update_weights is server.scale_out
    assert (found.max_model_len, found.vocab_size) == (48, 500)


@pytest.mark.parametrize("route", [GENERATE, COMPLETIONS])
@pytest.mark.parametrize(
    ("tops", "kind"),
    [
        (RAW_TOPS, "raw"),
        ([math.log(0.5), math.log(0.3), math.log(0.2)], "raw"),
        (PROCESSED_TOPS, "processed"),
        ([14.2, 11.0, 9.5, 3.0], "none"),
        ([-3.0, -9999.0, -9999.0], "none"),
        ([900.0, 800.0], "none"),
    ],
)
def test_what_logprobs_are_of(route: str, tops: list[float], kind: str) -> None:
    assert read_probe(orjson.dumps(probe_reply(route, "r", tops))) == kind


async def test_a_server_without_a_tokenizer_sees_no_stop_strings(server: FakeServer) -> None:
    server.has_tokenizer = False  # and it takes them without a word
    async with started(VLLMEngine([server.url])) as engine:
        assert (engine.capabilities.stop_strings, engine.capabilities.logprobs) == (False, "raw")
        with pytest.raises(EngineError, match="stop"):
            await ask(engine, stop=("a",))
        assert server.asked == []


@pytest.mark.parametrize(
    ("model_path", "asked_for", "warned"),
    [
        (None, "org/demo", False),
        ("org/demo", "org/demo", False),
        ("/adapters/tuned", "tuned", False),
        ("/hub/models--org--demo/snapshots/5a3f", "org/demo", False),
        ("/models/other", "org/demo", True),
    ],
)
async def test_the_model_that_is_meant(
    server: FakeServer,
    caplog: pytest.LogCaptureFixture,
    model_path: str | None,
    asked_for: str,
    warned: bool,
) -> None:
    server.cards.append(
        {"id": "tuned", "root": "/adapters/tuned", "parent": "org/demo", "max_model_len": None}
    )
    if warned:
        with pytest.raises(EngineError, match=r"serves '/models/demo', but .*check_model"):
            await VLLMEngine([server.url], model_path=model_path).start()
    options = {"check_model": not warned}
    async with started(VLLMEngine([server.url], model_path=model_path, engine_kwargs=options)) as engine:
        await ask(engine)
        assert server.asked[0]["model"] == asked_for
        assert engine.capabilities.max_model_len == 64
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert bool(warnings) is warned


def fewer_logprobs(reply: dict[str, Any]) -> None:
    logprobs = reply["choices"][0]["logprobs"]
    for key, values in logprobs.items():
        logprobs[key] = values[:-1]


def third_logprob(reply: dict[str, Any], value: float | None) -> None:
    logprobs = reply["choices"][0]["logprobs"]
    if "content" in logprobs:
        logprobs["content"][2]["logprob"] = -9999.0 if value is None else value
    else:
        logprobs["token_logprobs"][2] = value


def choice(**changes: Any) -> Callable[[dict[str, Any]], object]:
    return lambda reply: reply["choices"][0].update(changes)


BROKEN: list[Callable[[dict[str, Any]], object]] = [
    fewer_logprobs,
    lambda reply: third_logprob(reply, None),
    lambda reply: third_logprob(reply, 0.5),
    lambda reply: reply["choices"][0].pop("logprobs"),
    lambda reply: reply["choices"][0].pop("token_ids"),
    choice(finish_reason="error"),
    choice(token_ids=[1] * 6),
    lambda reply: reply["choices"].clear(),
    lambda reply: reply.update(usage={"prompt_tokens": 5}),
]


@pytest.mark.parametrize("edit", BROKEN)
async def test_a_broken_reply_is_tried_again(
    server: FakeServer, engine: VLLMEngine, edit: Callable[[dict[str, Any]], object]
) -> None:
    server.edit = edit  # type: ignore[assignment]
    with pytest.raises(TransientEngineError) as caught:
        await ask(engine)
    assert type(caught.value) is TransientEngineError
    server.healthy = False  # what a server says while it goes is no fault of the request
    with pytest.raises(EngineUnavailableError, match="not healthy"):
        await ask(engine)


async def asked_and_in_the_server(server: FakeServer, engine: VLLMEngine) -> "asyncio.Task[Completion]":
    server.hang = True
    task = asyncio.create_task(ask(engine))
    await until(lambda: len(server.waiting) == 1)
    return task


async def test_abort_returns_what_the_server_gives(server: FakeServer) -> None:
    server.dev = True
    async with started(VLLMEngine([server.url])) as engine:
        task = await asked_and_in_the_server(server, engine)
        await engine.abort("a")
        completion = await task
        assert (completion.finish_reason, completion.token_ids) == ("abort", IDS)
        path = "/inference/v1/abort_requests" if server.scale_out else "/abort_requests"
        assert [told[0] for told in server.told] == [path]
        await engine.abort("unknown")


async def test_abort_without_a_route_closes_the_connection() -> None:
    async with FakeServer(scale_out=False) as server, started(VLLMEngine([server.url])) as engine:
        task = await asked_and_in_the_server(server, engine)
        await engine.abort("a")
        completion = await task
        assert (completion.finish_reason, completion.token_ids, completion.logprobs) == ("abort", [], [])
        server.hang = False
        assert (await ask(engine)).token_ids == IDS


async def test_cancelling_aborts_in_the_server(server: FakeServer, engine: VLLMEngine) -> None:
    task = await asked_and_in_the_server(server, engine)
    (name,) = server.waiting
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if server.scale_out:
        await until(lambda: server.told == [("/inference/v1/abort_requests", name)])


async def test_other_weights_are_loaded_in_order() -> None:
    options = {"update_timeout": 30}
    async with (
        FakeServer(dev=True) as server,
        started(VLLMEngine([server.url], engine_kwargs=options)) as engine,
    ):
        await engine.update_weights("/weights/8", 8)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": "/weights/8"}, "timeout": 30.0}
        steps = [
            ("/pause?mode=keep", None),
            ("/collective_rpc", reload),
            ("/reset_prefix_cache?reset_running_requests=true&reset_external=true", None),
            ("/update_weight_version", {"new_version": "8"}),
            ("/resume", None),
        ]
        assert server.told == steps
        for path, done in (("/collective_rpc", 2), ("/reset_prefix_cache", 3)):
            server.told.clear()
            server.failing_path = path
            with pytest.raises(EngineError, match="stays paused until an update goes well"):
                await engine.update_weights("/weights/8", 8)
            assert server.told == steps[:done]
            assert not await engine.health()
        with pytest.raises(EngineUnavailableError, match="is paused"):
            await VLLMEngine([server.url]).start()
        server.failing_path = ""
        await engine.update_weights("/weights/8", 8)
        assert await engine.health()


@pytest.mark.parametrize(
    ("device", "config", "takes"),
    [
        ("cpu", {"tie_word_embeddings": True}, False),
        ("cpu", {"text_config": {"vocab_size": 9}}, False),
        ("cpu", {"tie_word_embeddings": False}, True),
        ("cuda", {"tie_word_embeddings": True}, True),
    ],
)
async def test_no_weights_for_a_server_that_would_keep_its_old_output_layer(
    device: str, config: dict[str, Any], takes: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_bytes(orjson.dumps(config))
    async with FakeServer(dev=True) as server:
        server.device = device
        server.cards = [{"id": "org/demo", "root": str(tmp_path), "max_model_len": 64}]
        async with started(VLLMEngine([server.url])) as engine:
            assert engine.capabilities.update_weights is takes
            assert ("output layer" in caplog.text) is not takes


async def test_log_probs_of_given_ids(server: FakeServer, engine: VLLMEngine) -> None:
    assert engine.capabilities.scores
    assert (await engine.score([1, 5, 6, 7], 2)).logprobs == [-2.5, -2.5]


async def test_a_server_that_our_update_paused_comes_back_by_loading() -> None:
    async with (
        FakeServer(dev=True) as server,
        FakeServer(dev=True) as other,
        started(VLLMEngine([server.url, other.url], engine_kwargs={"update_timeout": 30})) as engine,
    ):
        server.failing_path = "/collective_rpc"
        await engine.update_weights("/weights/8", 8)
        assert (server.paused, other.paused) == (True, False)
        server.failing_path = ""
        server.edit = other.edit = choice(weight_versions=[{"version": "8", "start": 0, "end": 5}])  # type: ignore[assignment]
        await until(lambda: len(engine.ready) == 2)
        for number in itertools.count():
            await ask(engine, request_id=f"r{number}")
            if server.asked:
                break
        assert not server.paused
        assert server.probes == 1


async def test_weights_are_not_given_to_a_server_that_was_never_asked_what_it_is() -> None:
    async with FakeServer(dev=True) as server, FakeServer(dev=True) as other:
        other.paused = True  # by somebody else
        async with started(VLLMEngine([server.url, other.url])) as engine:
            await engine.update_weights("/weights/8", 8)
            assert (server.paused, other.paused, other.told) == (False, True, [])
            assert engine.ready == [server.url]


async def test_a_cancelled_load_comes_to_its_end_and_leaves_no_pause() -> None:
    async with FakeServer(dev=True) as server:
        replica = VLLMReplica(server.url, EngineOptions(None))
        await replica.describe()
        server.gate = asyncio.Event()
        load = asyncio.create_task(replica.update_weights("/weights/8", 8))
        await until(lambda: len(server.told) == 2)
        load.cancel()
        await asyncio.wait([load], timeout=0)
        assert server.paused and not load.done()
        server.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert not server.paused
        assert server.told[-1] == ("/resume", None)
        await replica.close()


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (lambda: failure(500, DEAD, "InternalServerError"), EngineUnavailableError, "EngineCore"),
        (lambda: web.json_response({"choices": []}), EngineError, "answers with something else"),
    ],
)
async def test_a_start_that_fails_says_why(
    server: FakeServer, answer: Callable[[], web.Response], expected: type[EngineError], message: str
) -> None:
    server.answer = answer
    engine = VLLMEngine([server.url])
    with pytest.raises(expected, match=message) as caught:
        await engine.start()
    assert type(caught.value) is expected
