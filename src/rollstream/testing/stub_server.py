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
from dataclasses import asdict, dataclass, field, fields

import orjson
from aiohttp import web

from rollstream.testing.answers import AnswerBook
from rollstream.testing.http_stub import HttpStub, error_response, json_response
from rollstream.testing.scripted import AnswerRule, ScriptedRequest, ask_rule
from rollstream.testing.stub_answers import (
    book_rule,
    expanded_length,
    read_request,
    write_reply,
    write_scores,
)
from rollstream.testing.stub_faults import Fault, Faults, Latency
from rollstream.trajectory import Completion


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
    adapters: int = 0
    """LoRA adapters that one batch may have."""


@dataclass(slots=True)
class StubStats:
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
    """SHA-256 of them, as files, in the order they came."""


@dataclass(slots=True)
class _Job:
    """A request in flight: the rule is at work, it waits for its turn, or it runs."""

    task: "asyncio.Task[None]"
    completion: Completion = field(default_factory=lambda: Completion([], [], "abort"))
    """The answer, once the rule has given it."""
    began: float | None = None
    """When it began to run, by the loop's clock."""
    seconds: float = 0.0
    """That it runs."""


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
        self.adapters: dict[str, str] = {}
        """Folders of the LoRA adapters that it was given, by name."""
        self.stats = StubStats()
        self.before_scores: Callable[[list[int]], Awaitable[object]] | None = None
        """Awaited with the ids before their log-probs are sent."""
        self.on_death: Callable[[], None] = self.kill
        """The effect of `Faults.die_after`: here the sockets close at once, as when a process is killed."""
        self._slots = asyncio.Semaphore(sys.maxsize if max_running is None else max_running)
        self._jobs: dict[str, _Job] = {}
        self._rng = random.Random(0)
        self._routes: dict[str, Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]] = {
            "/generate": self._generate,
            "/abort_request": self._abort,
            "/update_weights_from_disk": self._update_weights,
            "/load_lora_adapter": self._change_adapters,
            "/unload_lora_adapter": self._change_adapters,
        }

    def kill(self) -> None:
        super().kill()
        self._end_jobs()

    async def stop(self) -> None:
        self._end_jobs()
        await super().stop()

    def _end_jobs(self) -> None:
        for job in self._jobs.values():
            job.task.cancel()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if self.faults.broken_http and request.transport is not None:
            request.transport.write(b"NOT/HTTP what is this\r\n\r\n")
            request.transport.close()
        route = self._routes.get(request.path)
        response = self._report(request.path) if route is None else await route(request)
        while self.faults.frozen:  # noqa: ASYNC110 (a field that anyone sets)
            await asyncio.sleep(0.01)
        return response

    async def _generate(self, request: web.BaseRequest) -> web.StreamResponse:
        stats = self.stats
        stats.requests += 1
        try:
            query = orjson.loads(await request.read())
            asked = read_request(query, query.get("rid") or f"stub-{stats.requests}")
            problem = self._find_problem(asked)
            if (adapter := query.get("lora_path")) is not None and adapter not in self.adapters:
                problem = f"LoRA adapter {adapter} is not loaded"
            if not problem and (start := query.get("logprob_start_len", -1)) >= 0:
                stats.requests -= 1
                if self.before_scores is not None:
                    await self.before_scores(asked.prompt_ids)
                top_k = query.get("top_logprobs_num", 0)
                body = write_scores(asked.prompt_ids, self.weight_version, start, top_k)
                return web.Response(body=body, content_type="application/json")
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            problem = f"malformed request: {error!r}"
        if problem:
            return error_response(400, problem)
        digests = [hashlib.sha256(file).hexdigest() for file in asked.images if isinstance(file, bytes)]
        stats.images += len(digests)
        stats.image_digests += digests
        fault = self.faults.choose(self._rng.random())
        stats.in_flight += 1
        try:
            completion, share = await self._answer(asked, fault)
        except Exception as error:
            return error_response(500, f"the rule raised {type(error).__name__}: {error}")
        finally:
            stats.in_flight -= 1
        if fault == "bad_request":
            return error_response(400, "stub says this request is bad")
        if fault == "drop" and request.transport is not None:
            request.transport.abort()
        if fault in ("drop", "error"):
            return error_response(self.faults.error_status, "stub error")
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

    async def _answer(self, asked: ScriptedRequest, fault: Fault | None) -> tuple[Completion, float | None]:
        """The answer, and the share of it that was done when the request was aborted; None: all."""

        async def work() -> None:
            job.completion = await ask_rule(self.rule, asked, self.book)
            async with self._slots:
                digest = self.book.digest(asked.prompt_ids, asked.sampling.seed)
                job.seconds = self.latency.draw(digest, len(job.completion.token_ids))
                job.began = asyncio.get_running_loop().time()
                if fault == "hang":
                    await asyncio.Event().wait()
                elif job.seconds:
                    await asyncio.sleep(job.seconds)

        job = _Job(asyncio.create_task(work()))
        self._jobs[asked.request_id] = job
        try:
            await asyncio.wait((job.task,))
        finally:
            job.task.cancel()
            del self._jobs[asked.request_id]
        if not job.task.cancelled():
            job.task.result()
            return job.completion, None
        done = 0.0 if job.began is None else asyncio.get_running_loop().time() - job.began
        return job.completion, min(1.0, done / job.seconds) if job.seconds else 0.0

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
        if asked.request_id in self._jobs:
            return f"Duplicate request ID detected: {asked.request_id}"
        return None

    async def _abort(self, request: web.BaseRequest) -> web.StreamResponse:
        query = orjson.loads(await request.read())
        for name in [*self._jobs] if query.get("abort_all") else [str(query.get("rid"))]:
            if (job := self._jobs.get(name)) is not None:
                self.stats.aborts += job.task.cancel()
        return web.Response()

    async def _update_weights(self, request: web.BaseRequest) -> web.StreamResponse:
        query = orjson.loads(await request.read())
        self.weight_version = str(query.get("weight_version") or self.weight_version)
        return json_response({"success": True, "message": "Succeeded to update model weights."})

    async def _change_adapters(self, request: web.BaseRequest) -> web.StreamResponse:
        query = orjson.loads(await request.read())
        name, loads = query["lora_name"], request.path == "/load_lora_adapter"
        if loads == (name in self.adapters):
            return error_response(400, f"LoRA adapter {name} is loaded already, or is not")
        if loads:
            self.adapters[name] = query["lora_path"]
        else:
            del self.adapters[name]
        return json_response({"success": True, "loaded_adapters": self.adapters})

    def _report(self, path: str) -> web.Response:
        """The answer of a route that reports."""
        faults, model = self.faults, self.model
        running = sum(job.began is not None for job in self._jobs.values())
        waiting = len(self._jobs) - running
        match path:
            case "/health":
                self.stats.health_checks += 1
                return web.Response(status=503 if faults.unhealthy else 200)
            case "/readiness" if faults.unready:
                return web.Response(status=503)
            case "/get_model_info" | "/get_server_info" if faults.info_status != 200:
                return error_response(faults.info_status, "stub says nothing")
            case "/get_model_info":
                return json_response(
                    {
                        "model_path": model.path,
                        "tokenizer_path": model.path,
                        "is_generation": True,
                        "weight_version": self.weight_version,
                        "has_image_understanding": model.images,
                    }
                )
            case "/get_server_info":
                return json_response(
                    {
                        "model_path": model.path,
                        "context_length": model.context_length,
                        "vocab_size": model.vocab_size,
                        "enable_deterministic_inference": model.seeds,
                        "skip_tokenizer_init": False,
                        "enable_lora": model.adapters > 0,
                        "max_loras_per_batch": model.adapters,
                        "version": "stub",
                    }
                )
            case "/metrics" if not faults.no_metrics:
                label = '{model_name="stub"}'
                counts = f"sglang:num_running_reqs{label} {running}\nsglang:num_queue_reqs{label} {waiting}\n"
                return web.Response(text=counts)
            case "/get_load":
                return json_response(
                    [{"dp_rank": 0, "num_reqs": running + waiting, "num_waiting_reqs": waiting}]
                )
            case "/stub/stats":
                return json_response(asdict(self.stats))
        return error_response(404, f"no route {path}")


def _parse_server() -> StubServer:
    parser = argparse.ArgumentParser(
        prog="python -m rollstream.testing.stub_server",
        description=__doc__,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--host", default="127.0.0.1")
    for name in ("port", "response-tokens", "max-running"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument(
        "--latency", type=Latency.parse, help="fixed:T, lognormal:MEDIAN,SIGMA, pareto:MIN,ALPHA"
    )
    parser.add_argument("--die-after", type=int, help="dies when so many requests have been answered")
    parser.add_argument("--unhealthy", action="store_true", help="/health answers 503")
    given = vars(parser.parse_args())
    host = given.pop("host")
    faults = {one.name: given.pop(one.name) for one in fields(Faults) if one.name in given}
    server = StubServer(faults=Faults(**faults), **given)
    server.host = host
    return server


async def _serve(server: StubServer) -> None:
    server.on_death = lambda: os.kill(os.getpid(), signal.SIGKILL)
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with server:
        sys.stdout.write(json.dumps({"url": server.url, "pid": os.getpid()}) + "\n")
        sys.stdout.flush()
        await stopped.wait()


if __name__ == "__main__":
    asyncio.run(_serve(_parse_server()))
