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
from dataclasses import KW_ONLY, asdict, dataclass, fields, replace
from typing import Any, NoReturn

import orjson
from aiohttp import web

from rollstream.testing.answers import AnswerBook
from rollstream.testing.http_stub import HttpStub
from rollstream.testing.scripted import AnswerRule, ScriptedRequest, ask_rule
from rollstream.testing.stub_answers import (
    StubAnswer,
    book_answer,
    expanded_length,
    image_files,
    read_sampling,
    rule_answer,
    write_reply,
)
from rollstream.testing.stub_faults import Fault, Faults, Latency
from rollstream.testing.stub_work import Stats, StubWork

_MAX_BODY = 2**28
"""Prompts with images are large; a test server does not guard against its tester."""


@dataclass(eq=False)
class StubServer(HttpStub):
    """The server, in this process. What it says, and how fast and how wrong, may be changed at any time.

    Example:
        >>> async with StubServer(response_tokens=64) as server:
        ...     engine = SGLangEngine([server.url])
    """

    rule: AnswerRule | None = None
    """What to answer, as `ScriptedEngine` has it (`text_rules.answer_by_text` makes one from texts); None
    answers from the book. The request id it sees is the one on the wire, `rid`, which a client makes anew for
    each request; its images are the files' bytes. What it raises is an HTTP 500 that names it. Its completions
    are sent as they are, but with the server's `weight_version`."""
    _: KW_ONLY
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""

    # The model
    model_path: str | None = None
    """Reported; None says nothing of a model, and is taken for any."""
    vocab_size: int = 512
    """Of prompt and response ids; a prompt id beyond it is a 400."""
    context_length: int | None = None
    """Longest prompt + response, reported, and a 400 beyond."""
    weight_version: str = "default"
    """Reported, also with every answer."""
    deterministic: bool = True
    images: bool = False
    """Whether its model understands images; if not, a request with images is a 400."""
    image_token_id: int | None = None
    """Its placeholder. With it, the prompt tokens that are reported count images' tokens as Qwen2-VL's does."""

    # Answers of the book
    response_tokens: int | None = None
    """Tokens in an answer, at most the request's `max_new_tokens`; None answers with exactly that many."""
    lengths: Latency | None = None
    """The same drawn for the prompt; not together with `response_tokens`."""
    prompt_tokens: int | None = None
    """Length of prompts. What a longer one has besides is taken for the beginning of the answer, which goes on
    from there. None: all is prompt."""

    # How fast, and how wrong
    latency: Latency = Latency()  # noqa: RUF009 (frozen)
    """Time until an answer."""
    token_s: float = 0.0
    """Seconds for each token of an answer, besides."""
    speed: float = 1.0
    """It works so many times as fast."""
    max_running: int | None = None
    """Requests worked on at once, the others wait their turn; None is no limit."""
    faults: Faults = Faults()  # noqa: RUF009 (frozen)
    metrics: bool = True
    """Whether there is `/metrics`; `/get_load` is always there, as in SGLang."""

    def __post_init__(self) -> None:
        self.stats = Stats()
        self.book = AnswerBook(self.vocab_size)
        self.work = StubWork(self.max_running)
        self.on_death: Callable[[], None] = self._die_in_process
        """What `Faults.die_after` does: here the sockets close at once, as when a process is killed."""
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
        self.work.end_all()
        await super().stop()

    def _die_in_process(self) -> None:
        self.kill()
        self.work.end_all()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.faults.broken_http and request.transport is not None:
            request.transport.write(b"NOT/HTTP what is this\r\n\r\n")
            request.transport.close()
        route = self._routes.get(request.path)
        if route is None:
            return _json({"error": {"message": f"no route {request.path}"}}, 404)
        response = await route(request)
        while self.faults.frozen and request.path != "/stub/faults":  # noqa: ASYNC110 (a field that anyone sets)
            await asyncio.sleep(0.01)
        return response

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        stats = self.stats
        stats.requests += 1
        payload = await request.read()
        try:
            query = orjson.loads(payload)
            prompt_ids: list[int] = query["input_ids"]
            params: dict[str, Any] = query["sampling_params"]
            max_tokens: int = params["max_new_tokens"]
            problem = self._find_problem(prompt_ids, max_tokens)
            images = image_files(query.get("image_data"))
            if images and not self.images:
                problem = "image_data given to a model that understands no images"
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            problem = f"malformed request: {error!r}"
        if problem:
            return _json({"error": {"message": problem}}, 400)
        rid: str = query.get("rid") or f"stub-{stats.requests}"
        if rid in self.work:
            return _json({"error": {"message": f"Duplicate request ID detected: {rid}"}}, 400)

        fault = self.faults.choose(self._rng.random())
        own_ids = prompt_ids[: self.prompt_tokens]
        digest = self.book.digest(own_ids, params.get("sampling_seed"))
        prompt_tokens = len(prompt_ids)
        if images:
            digests = [hashlib.sha256(file).hexdigest() for file in images]
            prompt_tokens = expanded_length(prompt_ids, images, self.image_token_id)
            digest = hashlib.blake2b(digest + "".join(digests).encode(), digest_size=64).digest()
            stats.saw_images(digests)
        stats.in_flight += 1
        stats.peak_in_flight = max(stats.peak_in_flight, stats.in_flight)
        try:
            done = len(prompt_ids) - len(own_ids)
            answer = self._answer(digest, done, max_tokens) if self.rule is None else None
            seconds = self.latency.draw(digest) + self.token_s * (answer.length if answer else 0)
            share = await self.work.do(rid, float("inf") if fault == "hang" else seconds / self.speed)
        finally:
            stats.in_flight -= 1
        if fault is not None:
            stats.faults += 1
            if early := self._fail_early(fault, request):
                return early
        try:
            answer = answer or await self._ask_rule(query, rid, images)
        except Exception as error:
            return _json({"error": {"message": f"the rule raised {type(error).__name__}: {error}"}}, 500)
        if fault == "abort" and share is None:
            share = 0.5
        stats.tokens += answer.length if share is None else int(share * answer.length)
        body = write_reply(
            answer,
            rid=rid,
            prompt_tokens=prompt_tokens,
            weight_version=self.weight_version,
            logprobs=bool(query.get("return_logprob")),
            share=share,
            fault=fault,
        )
        stats.answered += 1
        if self.faults.die_after is not None and stats.answered > self.faults.die_after:
            self.on_death()
        return web.Response(body=body, content_type="application/json")

    def _find_problem(self, prompt_ids: list[int], max_tokens: int) -> str | None:
        if not prompt_ids:
            return "input_ids cannot be empty"
        if min(prompt_ids) < 0 or max(prompt_ids) >= self.vocab_size:
            return f"input_ids hold an id outside the vocabulary of {self.vocab_size}"
        limit = self.context_length
        if limit is not None and len(prompt_ids) + max_tokens > limit:
            return f"Requested token count exceeds the model's maximum context length of {limit} tokens"
        return None

    def _fail_early(self, fault: Fault, request: web.BaseRequest) -> web.StreamResponse | None:
        if fault == "error":
            return _json({"error": {"message": "stub error"}}, self.faults.error_status)
        if fault == "bad_request":
            return _json({"error": {"message": "stub says this request is bad"}}, 400)
        if fault == "drop" and request.transport is not None:
            request.transport.abort()
        return None

    def _answer(self, digest: bytes, done: int, max_tokens: int) -> StubAnswer:
        length = int(self.lengths.draw(digest)) if self.lengths else self.response_tokens
        left = max_tokens if length is None else min(max_tokens, max(1, length - done))
        return book_answer(self.book, digest, left, max_tokens, start=done)

    async def _ask_rule(self, query: dict[str, Any], rid: str, images: list[bytes]) -> StubAnswer:
        assert self.rule is not None
        request = ScriptedRequest(rid, query["input_ids"], read_sampling(query), tuple(images))
        return rule_answer(await ask_rule(self.rule, request, self.book))

    async def _abort(self, request: web.BaseRequest) -> web.StreamResponse:
        query = orjson.loads(await request.read())
        names = self.work.names() if query.get("abort_all") else [str(query.get("rid"))]
        self.stats.aborts += sum(self.work.abort(name) for name in names)
        return web.Response()

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        self.stats.health_checks += 1
        return web.Response(status=503 if self.faults.unhealthy else 200)

    async def _readiness(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(status=503 if self.faults.unready else 404)

    async def _model_info(self, request: web.BaseRequest) -> web.StreamResponse:
        return self._describe(
            {
                "model_path": self.model_path,
                "tokenizer_path": self.model_path,
                "is_generation": True,
                "weight_version": self.weight_version,
                "has_image_understanding": self.images,
            }
        )

    async def _server_info(self, request: web.BaseRequest) -> web.StreamResponse:
        return self._describe(
            {
                "model_path": self.model_path,
                "context_length": self.context_length,
                "vocab_size": self.vocab_size,
                "enable_deterministic_inference": self.deterministic,
                "skip_tokenizer_init": False,
                "version": "stub",
            }
        )

    def _describe(self, info: dict[str, Any]) -> web.Response:
        status = self.faults.info_status
        return _json(info if status == 200 else {"error": {"message": "stub says nothing"}}, status)

    async def _update_weights(self, request: web.BaseRequest) -> web.StreamResponse:
        query = orjson.loads(await request.read())
        if self.faults.update_fails:
            return _json({"success": False, "message": "stub cannot load weights"}, 400)
        self.weight_version = str(query.get("weight_version") or self.weight_version)
        return _json({"success": True, "message": "Succeeded to update model weights."})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.metrics:
            return _json({"error": {"message": "no metrics"}}, 404)
        lines = [f'sglang:num_running_reqs{{model_name="stub"}} {float(self.work.running)}']
        lines.append(f'sglang:num_queue_reqs{{model_name="stub"}} {float(self.work.waiting)}')
        return web.Response(text="\n".join(lines) + "\n")

    async def _load(self, request: web.BaseRequest) -> web.StreamResponse:
        running, waiting = self.work.running, self.work.waiting
        return _json([{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting}])

    async def _report_stats(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(asdict(self.stats))

    async def _set_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        self.faults = replace(self.faults, **orjson.loads(await request.read()))
        return _json(asdict(self.faults))


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _parse_server(argv: list[str] | None = None) -> StubServer:
    parser = argparse.ArgumentParser(
        prog="python -m rollstream.testing.stub_server",
        description=__doc__,
        argument_default=argparse.SUPPRESS,
    )
    numbers = ("port", "response_tokens", "vocab_size", "context_length", "max_running", "image_token_id")
    whole = (*numbers, "error_status", "info_status", "die_after")
    parser.add_argument("--host")
    parser.add_argument("--model-path")
    parser.add_argument(
        "--latency", default="fixed:0", help="fixed:T, lognormal:MEDIAN,SIGMA, pareto:MIN,ALPHA"
    )
    parser.add_argument("--latency-max", type=float, default=float("inf"))
    parser.add_argument("--images", action="store_true")
    faults = {field.name: field.default for field in fields(Faults)}
    for name in (*numbers, *faults):
        option = "--" + name.replace("_", "-")
        if isinstance(faults.get(name), bool):
            parser.add_argument(option, action="store_true")
        else:
            parser.add_argument(option, type=int if name in whole else float)
    given = vars(parser.parse_args(argv))
    latency = Latency.parse(given.pop("latency"), maximum=given.pop("latency_max"))
    wrong = Faults(**{name: given.pop(name) for name in faults if name in given})
    return StubServer(latency=latency, faults=wrong, **given)


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
