"""What a call of the gateway costs, and that it does not cost more after many others; what open sessions take.

    python -m bench.gateway [--quick] [--json FILE]

The turns are those of `bench.agent`: a prompt of 512 tokens, turns with two tool calls each, a last answer;
every turn adds some 1,500 tokens. The engine has its answers ready and writes the body of the request that a
server would get, nothing else.

    tool_agent  RolloutWorker, tool_agent: runs the tools, too; no HTTP, the conversation is the loop's own
    recorder    the same turns as calls: whole conversations in, matched and recorded, but no HTTP
    gateway     the same by HTTP, as OpenAI's chat API: JSON read and checked, and written
    bare proxy  a server that reads the same JSON and writes the same answers, and records nothing

CPU of all threads, the median over conversations; by HTTP with what a plain socket costs at the client's end.
"first" is a conversation's first call, whose prompt is rendered whole, "later" the mean of the others.
"""

import argparse
import asyncio
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from bench.agent import RESULT_TOKENS, ReadyEngine, Stack, measure_turns, text_of
from bench.report import print_table, write_json
from rollstream.agent.base import AgentLoop, AgentResources
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.chat.wires.requests import request_object
from rollstream.demo import MODEL_PATH
from rollstream.gateway.app import Endpoint
from rollstream.gateway.recorder import Call, Recorder
from rollstream.trajectory import Completion, Message, SamplingParams, Trajectory
from rollstream.web import Request, Route, WebServer, json_response

TURNS = 5
EARLIER = (1, 10, 100, 1_000)


class FreshEngine(ReadyEngine):
    """Answers are lists of their own, as they are from a server: none is shared by sessions."""

    async def generate(self, *args: Any, **kwargs: Any) -> Completion:
        done = await super().generate(*args, **kwargs)
        ids, logprobs = orjson.loads(orjson.dumps([done.token_ids, done.logprobs]))
        return Completion(ids, logprobs, "stop")


class Loop(AgentLoop):
    """What a recorder needs of an agent loop."""

    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        raise NotImplementedError


class Bench:
    """The turns of `bench.agent`, for recorders."""

    def __init__(self) -> None:
        self.tokenizer = load_tokenizer(str(MODEL_PATH))
        self.stack = Stack(self.tokenizer, TURNS)
        self.tools = self.stack.toolbox.schemas
        self.prompt = self.stack.prompt
        self.result = text_of(self.tokenizer, RESULT_TOKENS)
        worker: Any = self.stack.worker("tool_agent")
        resources: AgentResources = worker.resources
        answers = [ids for ids, _ in self.stack.engine._answers]
        self.resources = AgentResources(
            FreshEngine(answers, self.tokenizer),
            self.tokenizer,
            resources.prompts,
            10**7,
            tools=self.stack.toolbox,
        )

    def recorder(self, name: str) -> Recorder:
        """Of a new session."""
        broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        loop = Loop(self.resources, request_id=name)
        return Recorder(loop, self.stack.sampling, name=name, broken=broken)

    def added(self, answer: Message) -> list[Message]:
        """What the client sends after an answer."""
        calls = answer.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": one["id"], "content": self.result} for one in calls]
        return [answer, *results] if results else [answer, {"role": "user", "content": self.result}]


@asynccontextmanager
async def serving(kind: str, bench: Bench, sessions: int) -> AsyncIterator[list[str]]:
    """Serves; gives the URL of each session."""
    async with AsyncExitStack() as stack:
        if kind == "bare proxy":
            server = WebServer([Route("POST", "/{name}/v1/chat/completions", Proxy(bench).answer)])
            url = await server.start()
            stack.push_async_callback(server.stop, 1.0)
            yield [f"{url}/{at}" for at in range(sessions)]
        else:
            endpoint = Endpoint("m", None)
            await stack.enter_async_context(endpoint.serving())
            recorders = [bench.recorder(str(at)) for at in range(sessions)]
            yield [stack.enter_context(endpoint.open(recorder)) for recorder in recorders]


async def serve(sessions: int) -> None:
    """A process whose memory is measured: serves until its input ends, and says its URLs."""
    async with serving("gateway", Bench(), sessions) as urls:
        gc.freeze()  # as the processes of a run do
        print(orjson.dumps(urls).decode(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        os._exit(0)


class Proxy:
    """Reads what the gateway reads, writes what it writes."""

    def __init__(self, bench: Bench) -> None:
        calls = [
            {"id": f"c{at}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, (name, arguments) in enumerate(
                [("look_up", '{"name":"the first thing"}'), ("search", '{"query":"another thing"}')]
            )
        ]
        said = bench.tokenizer.decode(bench.stack.engine._answers[0][0][:200])
        self._turn = {"role": "assistant", "content": said, "tool_calls": calls}
        self._last = {"role": "assistant", "content": "That is all."}

    async def answer(self, request: Request) -> web.Response:
        body = await request_object(request, dict)
        message = self._turn if len(body["messages"]) < 3 * TURNS else self._last
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
        head = {"id": "x", "object": "chat.completion", "created": int(time.time()), "model": "m"}
        return json_response({**head, "choices": [choice]})


async def measure_served(kind: str, bench: Bench, sessions: int) -> dict[str, float]:
    """CPU of a call by HTTP, with what a plain socket needs at the client's end."""
    times: list[list[float]] = [[] for _ in range(TURNS + 1)]
    async with serving(kind, bench, sessions + 1) as urls:
        host, port = urls[0].split("/")[2].split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=2**20)
        for at, url in enumerate(urls):
            messages: list[Message] = list(bench.prompt)
            for turn in range(TURNS + 1):
                body = orjson.dumps({"model": "m", "messages": messages, "tools": bench.tools})
                path = url.split(host + ":" + port)[1] + "/v1/chat/completions"
                head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n"
                before = time.process_time()
                writer.write(head.encode() + body)
                start = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = int(start.partition(b"content-length:")[2].split()[0])
                answer = await reader.readexactly(length)
                if at:  # the first one fills caches
                    times[turn].append(time.process_time() - before)
                messages += bench.added(orjson.loads(answer)["choices"][0]["message"])
        writer.close()
    return summary(times)


def summary(times: list[list[float]]) -> dict[str, float]:
    """Of seconds by turn: the median, or the machine's other work would be counted."""
    first, *later = [statistics.median(each) * 1e6 for each in times]
    return {"first us": first, "later us": statistics.mean(later)}


async def measure_recorder(bench: Bench, sessions: int) -> dict[str, float]:
    """The same without HTTP."""
    times: list[list[float]] = [[] for _ in range(TURNS + 1)]
    for at in range(sessions + 1):
        recorder, messages = bench.recorder(str(at)), list(bench.prompt)
        for turn in range(TURNS + 1):
            call = orjson.loads(orjson.dumps(messages))  # no text is one that is known already
            before = time.process_time()
            answer = (await recorder.answer(Call(call, bench.tools)))[0].message
            if at:
                times[turn].append(time.process_time() - before)
            messages += bench.added(answer)
    return summary(times)


async def measure_tool_agent(bench: Bench, rollouts: int) -> dict[str, float]:
    """The turns of `bench.agent`, by its clock."""
    await bench.stack.check()
    return {
        "later us": statistics.mean(
            row["rollstream us"] for row in await measure_turns(bench.stack, rollouts)
        )
    }


async def measure_kinds(bench: Bench, rounds: int) -> list[dict[str, Any]]:
    """All four, by turns: what else the machine does hits all alike. Medians over the rounds."""
    await bench.stack.check()
    kinds: dict[str, Callable[[], Awaitable[dict[str, float]]]] = {
        "tool_agent": lambda: measure_tool_agent(bench, 20),
        "recorder": lambda: measure_recorder(bench, 20),
        "gateway": lambda: measure_served("gateway", bench, 20),
        "bare proxy": lambda: measure_served("bare proxy", bench, 20),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, measure in kinds.items():
            found[name].append(await measure())
            own = found["tool_agent"][-1]["later us"]
            found[name][-1]["x tool_agent"] = found[name][-1]["later us"] / own
    names = ("first us", "later us", "x tool_agent")
    return [
        {"what": kind, **{name: statistics.median(row.get(name, 0.0) for row in rows) for name in names}}
        for kind, rows in found.items()
    ]


async def measure_earlier(bench: Bench, calls: int) -> list[dict[str, float]]:
    """CPU of the same call after others: calls of their own, and turns of its conversation."""
    rows = []
    for earlier in EARLIER:
        row: dict[str, float] = {"earlier calls": earlier}
        for how in ("others", "branches", "turns"):
            recorder = bench.recorder(f"{how}{earlier}")
            messages: list[Message] = [{"role": "user", "content": "begin"}]
            answer = (await recorder.answer(Call(list(messages), [])))[0].message
            messages += [answer, {"role": "user", "content": "go on"}]
            for at in range(earlier - 1):
                if how == "others":
                    call = Call([{"role": "user", "content": f"help {at}"}], [])
                else:
                    call = Call(list(messages), [], max_tokens=300)
                answer = (await recorder.answer(call))[0].message
                if how == "turns":
                    messages += [answer, {"role": "user", "content": "go on"}]
            times = []
            gc.collect()
            for _ in range(calls):
                call = Call(orjson.loads(orjson.dumps(messages)), [])
                before = time.process_time()
                _, context = await recorder.answer(call)
                times.append(time.process_time() - before)
            row[f"{how} us"] = statistics.median(times) * 1e6
            if how == "turns":
                row["of it must be sent us"] = must_be_sent(recorder, context)
                row["tokens"] = len(context)
        rows.append(row)
    return rows


def must_be_sent(recorder: Recorder, context: list[int]) -> float:
    """CPU of writing the body of the engine's request."""
    from rollstream.engine.sglang import request_body

    times = []
    for _ in range(20):
        before = time.process_time()
        request_body(list(context), recorder.sampling, "x")
        times.append(time.process_time() - before)
    return statistics.median(times) * 1e6


async def measure_memory(bench: Bench, sessions: int) -> list[dict[str, float]]:
    """Memory of a process that serves while conversations of 8,000 tokens grow in all its sessions at once."""
    rows = []
    command = [sys.executable, "-m", "bench.gateway", "--serve", str(sessions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220
        assert process.stdout is not None and process.stdin is not None
        urls = orjson.loads(process.stdout.readline())
        status = Path(f"/proc/{process.pid}/status")

        def row(calls: int) -> dict[str, float]:
            resident = int(status.read_text().partition("VmRSS:")[2].split()[0]) / 1024
            return {"sessions": sessions, "calls of each": calls, "MB": resident}

        histories: list[list[Message]] = [list(bench.prompt) for _ in urls]
        rows.append(row(0))
        connector = aiohttp.TCPConnector(limit=sessions)
        async with aiohttp.ClientSession(connector=connector) as client:

            async def ask(at: int) -> None:
                body = orjson.dumps({"model": "m", "messages": histories[at], "tools": bench.tools})
                async with client.post(urls[at] + "/v1/chat/completions", data=body) as response:
                    answer = await response.json()
                histories[at] += bench.added(answer["choices"][0]["message"])

            for turn in range(TURNS + 1):
                for start in range(0, sessions, 50):
                    await asyncio.gather(*map(ask, range(start, min(sessions, start + 50))))
                rows.append(row(turn + 1))
        process.stdin.close()
    return rows


async def bench_all(options: argparse.Namespace) -> None:
    """Runs the benchmark."""
    many, sessions = (20, 100) if options.quick else (200, 1_000)
    bench = Bench()
    gc.freeze()  # as the processes of a run do
    rows = await measure_kinds(bench, many // 20)
    print_table(f"CPU of a call, {many} conversations of {TURNS + 1} calls, one at a time", rows)
    earlier = await measure_earlier(bench, 20)
    print_table("CPU of a call after earlier ones", earlier)
    memory = await measure_memory(bench, sessions)
    print_table("memory of open sessions", memory)
    await bench.stack.toolbox.close()
    write_json(options.json, "gateway", [*rows, *earlier, *memory])


def main() -> None:
    """The command line, of the benchmark and of the processes that it measures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes; ends within 40 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    asyncio.run(serve(options.serve) if options.serve else bench_all(options))


if __name__ == "__main__":
    main()
