"""A server that speaks SGLang's native routes, has no model, and goes wrong on command.

    python -m rollstream.testing.stub_server --port 0 --response-tokens 512

prints one JSON line, `{"url": "http://127.0.0.1:40123", "pid": 4711}`, and serves until it is stopped.
Answers are a pure function of (`input_ids`, `image_data`, `sampling_seed`), unless a rule gives them;
latencies too.
"""

import argparse
import asyncio
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NoReturn

import orjson
from aiohttp import web

from rollstream.testing.answers import AnswerBook
from rollstream.testing.http_stub import HttpStub
from rollstream.testing.scripted import AnswerRule, ScriptedRequest, ask_rule
from rollstream.testing.stub_answers import (
    book_rule,
    expanded_length,
    read_request,
    write_reply,
    write_scores,
)
from rollstream.testing.stub_faults import Fault, Faults, Latency
from rollstream.testing.stub_work import StubWork
from rollstream.trajectory import Completion

_IMAGE_DIGESTS = 1024
"""How many are kept: a test with images has a few, a benchmark with images has no use for them."""


@dataclass(frozen=True, slots=True)
class StubModel:
    """The model that a stub server plays."""

    path: str | None = None
    """`None` names no model, and is taken for any."""
    vocab_size: int = 512
    """A prompt id beyond it is a 400."""
    context_length: int | None = None
    """Longest prompt + response; a 400 beyond."""
    seeds: bool = True
    images: bool = False
    """Whether it understands images; if not, a request with images is a 400."""
    image_token_id: int | None = None
    """Its placeholder. With it, the prompt tokens that are reported count images' tokens as Qwen2-VL's does."""


@dataclass(slots=True)
class Stats:
    """A stub server's counters. Served at `/stub/stats`."""

    requests: int = 0
    """`/generate` requests that arrived."""
    answered: int = 0
    """Whole answers, broken ones included."""
    tokens: int = 0
    """Sampled, those of aborted requests included."""
    aborts: int = 0
    """`/abort_request` calls that named a request in flight."""
    health_checks: int = 0
    in_flight: int = 0
    images: int = 0
    """Images that arrived with `/generate` requests."""
    image_digests: list[str] = field(default_factory=list)
    """SHA-256 of the newest of them, as files, in the order they came."""


class StubServer(HttpStub):
    """The server, in this process. What it says, and how fast and how wrong, may be changed at any time.

    Example:
        >>> async with StubServer(response_tokens=64) as server:
        ...     engine = SGLangEngine([server.url])

    Args:
        rule: what to answer, as `ScriptedEngine` has it (`text_rules.answer_by_text` makes one from texts, and
            `stub_answers.book_rule` one of answers that go on where they were). The request id it sees is the
            one on the wire, `rid`, which a client makes anew for each request; its images are the files'
            bytes. What it raises is an HTTP 500 that names it. Its completions are sent as they are, but with
            the server's `weight_version`.
        response_tokens: tokens in an answer without a rule, at most the request's `max_new_tokens`; None
            answers with exactly that many.
        latency: time until an answer.
        max_running: requests worked on at once, the others wait their turn; None is no limit.
        faults: what goes wrong.
        model: what it says of its model.
        port: 0 takes a free one.
    """

    def __init__(
        self,
        rule: AnswerRule | None = None,
        *,
        response_tokens: int | None = None,
        latency: Latency = Latency(),  # noqa: B008 (frozen)
        max_running: int | None = None,
        faults: Faults = Faults(),  # noqa: B008 (frozen)
        model: StubModel = StubModel(),
        port: int = 0,
    ) -> None:
        self.book = AnswerBook(model.vocab_size)
        self.rule = rule or book_rule(response_tokens, book=self.book)
        self.latency = latency
        self.faults = faults
        self.model = model
        self.port = port
        self.weight_version = "default"
        """Reported, also with every answer."""
        self.stats = Stats()
        self.on_death: Callable[[], None] = self._die_in_process
        """The effect of `Faults.die_after`: here the sockets close at once, as when a process is killed."""
        self._work = StubWork(max_running)
        self._asking: dict[str, asyncio.Future[Completion]] = {}
        """Rules that are at work, by request."""
        self._rng = random.Random(0)
        self._routes: dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/health": self._health,
            "/health_generate": self._health,
            "/readiness": self._readiness,
            "/get_model_info": self._model_info,
            "/get_server_info": self._server_info,
            "/update_weights_from_disk": self._update_weights,
            "/metrics": self._metrics,
            "/get_load": self._load,
            "/stub/stats": self._report_stats,
            "/stub/faults": self._set_faults,
        }

    async def stop(self) -> None:
        self._work.end_all()
        await super().stop()

    def _die_in_process(self) -> None:
        self.kill()
        self._work.end_all()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.faults.broken_http and request.transport is not None:
            request.transport.write(b"NOT/HTTP what is this\r\n\r\n")
            request.transport.close()
        route = self._routes.get(request.path)
        if route is None:
            return _error(404, f"no route {request.path}")
        response = await route(request)
        while self.faults.frozen and request.path != "/stub/faults":  # noqa: ASYNC110 (a field that anyone sets)
            await asyncio.sleep(0.01)
        return response

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        stats = self.stats
        stats.requests += 1
        try:
            query = orjson.loads(await request.read())
            asked = read_request(query, query.get("rid") or f"stub-{stats.requests}")
            problem = self._find_problem(asked)
            if not problem and query.get("logprob_start_len", -1) >= 0:
                stats.requests -= 1
                return web.Response(
                    body=write_scores(asked.prompt_ids, self.weight_version), content_type="application/json"
                )
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            problem = f"malformed request: {error!r}"
        if problem:
            return _error(400, problem)
        self._note_images(asked)
        fault = self.faults.choose(self._rng.random())
        stats.in_flight += 1
        try:
            completion, share = await self._answer(asked, fault)
        except Exception as error:
            return _error(500, f"the rule raised {type(error).__name__}: {error}")
        finally:
            stats.in_flight -= 1
        if completion is None:
            return self._fail(fault, request)
        if fault == "abort" and share is None:
            share = 0.5
        tokens = len(completion.token_ids)
        stats.tokens += tokens if share is None else int(share * tokens)
        body = write_reply(
            completion,
            rid=asked.request_id,
            prompt_tokens=expanded_length(asked, self.model.image_token_id),
            weight_version=self.weight_version,
            logprobs=asked.sampling.logprobs,
            share=share,
            fault=fault,
        )
        stats.answered += 1
        if self.faults.die_after is not None and stats.answered > self.faults.die_after:
            self.on_death()
        return web.Response(body=body, content_type="application/json")

    async def _answer(
        self, asked: ScriptedRequest, fault: Fault | None
    ) -> tuple[Completion | None, float | None]:
        """The answer, None for an error, and the share of it that was done when the request was aborted; None: all."""
        completion, tokens = None, 0
        if fault not in ("error", "bad_request", "drop"):
            asking = asyncio.ensure_future(ask_rule(self.rule, asked, self.book))
            self._asking[asked.request_id] = asking
            try:
                await asyncio.wait({asking})
            finally:
                asking.cancel()
                del self._asking[asked.request_id]
            if asking.cancelled():
                return Completion([], [], "abort"), 0.0
            completion = asking.result()
            tokens = len(completion.token_ids)
        seconds = self.latency.draw(self.book.digest(asked.prompt_ids, asked.sampling.seed), tokens)
        return completion, await self._work.do(asked.request_id, float("inf") if fault == "hang" else seconds)

    def _find_problem(self, asked: ScriptedRequest) -> str | None:
        ids, model = asked.prompt_ids, self.model
        if not ids:
            return "input_ids cannot be empty"
        if min(ids) < 0 or max(ids) >= model.vocab_size:
            return f"input_ids hold an id outside the vocabulary of {model.vocab_size}"
        limit = model.context_length
        if limit is not None and len(ids) + asked.sampling.max_tokens > limit:
            return f"Requested token count exceeds the model's maximum context length of {limit} tokens"
        if asked.images and not model.images:
            return "image_data given to a model that understands no images"
        if asked.request_id in self._work or asked.request_id in self._asking:
            return f"Duplicate request ID detected: {asked.request_id}"
        return None

    def _note_images(self, asked: ScriptedRequest) -> None:
        digests = [hashlib.sha256(file).hexdigest() for file in asked.images if isinstance(file, bytes)]
        self.stats.images += len(digests)
        self.stats.image_digests = [*self.stats.image_digests, *digests][-_IMAGE_DIGESTS:]

    def _fail(self, fault: Fault | None, request: web.BaseRequest) -> web.Response:
        if fault == "bad_request":
            return _error(400, "stub says this request is bad")
        if fault == "drop" and request.transport is not None:
            request.transport.abort()
        return _error(self.faults.error_status, "stub error")

    async def _abort(self, request: web.BaseRequest) -> web.StreamResponse:
        query = orjson.loads(await request.read())
        in_flight = [*self._asking, *self._work.names()]
        names = in_flight if query.get("abort_all") else [str(query.get("rid"))]
        for name in names:
            asking = self._asking.get(name)
            self.stats.aborts += self._work.abort(name) if asking is None else asking.cancel()
        return web.Response()

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        self.stats.health_checks += 1
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _readiness(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=503 if self.faults.unready else 404)

    async def _model_info(self, request: web.BaseRequest) -> web.StreamResponse:
        return self._describe(
            {
                "model_path": self.model.path,
                "tokenizer_path": self.model.path,
                "is_generation": True,
                "weight_version": self.weight_version,
                "has_image_understanding": self.model.images,
            }
        )

    async def _server_info(self, request: web.BaseRequest) -> web.StreamResponse:
        return self._describe(
            {
                "model_path": self.model.path,
                "context_length": self.model.context_length,
                "vocab_size": self.model.vocab_size,
                "enable_deterministic_inference": self.model.seeds,
                "skip_tokenizer_init": False,
                "version": "stub",
            }
        )

    def _describe(self, info: dict[str, Any]) -> web.Response:
        status = self.faults.info_status
        return _json(info) if status == 200 else _error(status, "stub says nothing")

    async def _update_weights(self, request: web.BaseRequest) -> web.StreamResponse:
        query = orjson.loads(await request.read())
        self.weight_version = str(query.get("weight_version") or self.weight_version)
        return _json({"success": True, "message": "Succeeded to update model weights."})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.faults.no_metrics:
            return _error(404, "no metrics")
        lines = [f'sglang:num_running_reqs{{model_name="stub"}} {float(self._work.running)}']
        lines.append(f'sglang:num_queue_reqs{{model_name="stub"}} {float(self._work.waiting)}')
        return web.Response(text="\n".join(lines) + "\n")

    async def _load(self, request: web.BaseRequest) -> web.StreamResponse:
        running, waiting = self._work.running, self._work.waiting
        return _json([{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting}])

    async def _report_stats(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(asdict(self.stats))

    async def _set_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        self.faults = replace(self.faults, **orjson.loads(await request.read()))
        return _json(asdict(self.faults))


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status)


def _parse_server(argv: list[str] | None = None) -> StubServer:
    parser = argparse.ArgumentParser(
        prog="python -m rollstream.testing.stub_server",
        description=__doc__,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--host", default="127.0.0.1")
    for name in ("port", "response_tokens", "max_running"):
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    parser.add_argument("--model-path", dest="path")
    for name in ("vocab_size", "context_length", "image_token_id"):
        parser.add_argument("--" + name.replace("_", "-"), type=int)
    parser.add_argument("--images", action="store_true")
    parser.add_argument(
        "--latency", default="fixed:0", help="fixed:T, lognormal:MEDIAN,SIGMA, pareto:MIN,ALPHA"
    )
    parser.add_argument("--latency-max", type=float, default=float("inf"))
    for one in fields(Faults):
        option = "--" + one.name.replace("_", "-")
        if one.type is bool:
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=float if one.type is float else int)
    given = vars(parser.parse_args(argv))
    host = given.pop("host")
    latency = Latency.parse(given.pop("latency"), maximum=given.pop("latency_max"))
    faults, model = (
        {one.name: given.pop(one.name) for one in fields(kind) if one.name in given}
        for kind in (Faults, StubModel)
    )
    server = StubServer(latency=latency, faults=Faults(**faults), model=StubModel(**model), **given)
    server.host = host
    return server


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


async def _serve(server: StubServer) -> None:
    server.on_death = _die
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    async with server:
        sys.stdout.write(json.dumps({"url": server.url, "pid": os.getpid()}) + "\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(_serve(_parse_server()))
