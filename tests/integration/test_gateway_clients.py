"""Official clients, unchanged, through the gateway: `openai` (chat and responses) and `anthropic`."""

import asyncio
import inspect
import operator
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from demo_model.chats import CALCULATOR
from rollstream.demo import MODEL_PATH
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.errors import EngineError
from rollstream.gateway import app
from rollstream.gateway.app import Endpoint
from rollstream.gateway.recorder import Recorder
from rollstream.testing.scripted import AnswerRule, ScriptedEngine, ScriptedRequest
from rollstream.trajectory import Completion, Trajectory
from tests.support.engines import started
from tests.support.until import PATIENCE_S, until
from tests.unit.agent.rollouts import END, call_text, demo_tokenizer
from tests.unit.gateway.test_recorder import check_exact, recorder_of, user

anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")

SYSTEM = "You are a helpful assistant."
QUESTION = "State the final answer to the following arithmetic problem: 37 + 41 ="
FUNCTION = CALCULATOR["function"]


def calculate(arguments: dict[str, Any]) -> str:
    """The agents' tool: sums of two numbers."""
    a, _, b = arguments["expression"].split()
    return str(int(a) + int(b))


async def settled(value: Any) -> Any:
    """Of an asynchronous client or of a synchronous one."""
    return await value if inspect.isawaitable(value) else value


async def streamed(manager: Any, final: str) -> Any:
    """What the helper of a stream puts together."""
    if hasattr(manager, "__aenter__"):
        async with manager as stream:
            return await getattr(stream, final)()
    with manager as stream:
        return getattr(stream, final)()


async def chat(client: Any, stream: bool) -> str:
    """An agent: asks, calculates, asks again."""
    api, messages = client.chat.completions, [{"role": "system", "content": SYSTEM}, user(QUESTION)]
    while True:
        asked = {"model": "any", "messages": messages, "tools": [CALCULATOR]}
        answering = streamed(api.stream(**asked), "get_final_completion") if stream else api.create(**asked)
        message = (await settled(answering)).choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            result = calculate(orjson.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


async def responses(client: Any, stream: bool) -> str:
    """The same; its stream goes on by `previous_response_id`, else all items are sent back."""
    items: list[Any] = [user(QUESTION)]
    asked: dict[str, Any] = {
        "model": "any",
        "instructions": SYSTEM,
        "tools": [{"type": "function", **FUNCTION}],
    }
    while True:
        asked["input"] = items
        if stream:
            answer = await streamed(client.responses.stream(**asked), "get_final_response")
            asked["previous_response_id"], items = answer.id, []
        else:
            answer = await settled(client.responses.create(**asked))
            items = [*items, *answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return str(answer.output_text)
        for call in calls:
            result = calculate(orjson.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


async def messages(client: Any, stream: bool) -> str:
    """The same."""
    api, turns = client.messages, [user(QUESTION)]
    tool = {"name": FUNCTION["name"], "description": FUNCTION["description"]}
    tool["input_schema"] = FUNCTION["parameters"]
    while True:
        asked = {"model": "any", "max_tokens": 200, "system": SYSTEM, "messages": turns, "tools": [tool]}
        answering = streamed(api.stream(**asked), "get_final_message") if stream else api.create(**asked)
        answer = await settled(answering)
        if answer.stop_reason != "tool_use":
            return "".join(block.text for block in answer.content if block.type == "text")
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": calculate(block.input)}
            for block in answer.content
            if block.type == "tool_use"
        ]
        turns += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]


async def tool_runner(client: Any, stream: bool) -> str:
    """Anthropic's own loop, which would like the server to hold the conversation."""
    name, about = FUNCTION["name"], FUNCTION["description"]
    how = {"name": name, "description": about, "input_schema": FUNCTION["parameters"]}

    async def later(expression: str) -> str:
        return calculate({"expression": expression})

    def now(expression: str) -> str:
        return calculate({"expression": expression})

    is_async = isinstance(client, anthropic.AsyncAnthropic)
    tool = anthropic.beta_async_tool(later, **how) if is_async else anthropic.beta_tool(now, **how)
    runner = client.beta.messages.tool_runner(
        model="any", max_tokens=200, system=SYSTEM, messages=[user(QUESTION)], tools=[tool], stream=stream
    )
    answer = await settled(runner.until_done())
    return "".join(block.text for block in answer.content if block.type == "text")


CLIENTS: dict[Callable[[Any, bool], Awaitable[str]], Any] = {
    chat: (openai.OpenAI, openai.AsyncOpenAI, "/v1"),
    responses: (openai.OpenAI, openai.AsyncOpenAI, "/v1"),
    messages: (anthropic.Anthropic, anthropic.AsyncAnthropic, ""),
    tool_runner: (anthropic.Anthropic, anthropic.AsyncAnthropic, ""),
}


def client_of(agent: Any, url: str, *, is_async: bool = True) -> Any:
    kind = CLIENTS[agent][is_async]
    return kind(api_key="any", base_url=url + CLIENTS[agent][2], max_retries=0)


@asynccontextmanager
async def session(engine: ScriptedEngine, **given: Any) -> AsyncIterator[tuple[Recorder, str]]:
    recorder, broken = recorder_of(engine, **given)
    endpoint = Endpoint("m", 4096)
    async with endpoint.serving():
        with endpoint.open(recorder) as url:
            yield recorder, url
    assert not broken.done() or isinstance(broken.result(), EngineError)


def sampled(trajectory: Trajectory) -> list[tuple[int, float]]:
    """What is trained on: ids with their log-probs."""
    assert trajectory.response_logprobs is not None
    given = zip(trajectory.response_ids, trajectory.response_logprobs, trajectory.response_mask, strict=True)
    return [(token, logprob) for token, logprob, mask in given if mask]


async def play(engine: ScriptedEngine, agent: Any, *, stream: bool, is_async: bool) -> tuple[str, Trajectory]:
    """What the agent says in the end, and its trajectory, which is the engine's own log."""
    async with session(engine, max_tokens=256) as (recorder, url):

        async def run() -> str:
            client = client_of(agent, url, is_async=is_async)
            said: str = await agent(client, stream)
            await settled(client.close())
            return said

        # In a loop of its own: a synchronous client does not let others run.
        said = await asyncio.to_thread(asyncio.run, run())
        (trajectory,) = recorder.trajectories()
    check_exact(engine, [trajectory])
    log: list[Completion] = [completion for _, completion in engine.completions]
    owed = chain.from_iterable(zip(one.token_ids, one.logprobs or (), strict=True) for one in log)
    assert sampled(trajectory) == [*owed]
    return said, trajectory


def scripted() -> AnswerRule:
    """Thinks, calls the tool twice at once, then says what it heard."""
    calls = "\n".join(call_text("calculator", expression=f"{a} + 41") for a in (37, 38))
    texts = iter([f"<think>\nadd up\n</think>\n\nI calculate.\n{calls}", "78 and 79"])
    return lambda request: demo_tokenizer().encode(next(texts) + END)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_agent_is_recorded_exactly_by_whatever_client_it_asks(
    stream: bool, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All show the model the same, and all that they send back is recognised."""
    monkeypatch.setattr(app, "_HEADERS_S", 0.0)
    monkeypatch.setattr(app, "_KEEP_ALIVE_S", 0.001)
    found = []
    for agent in CLIENTS:
        async with started(ScriptedEngine(scripted(), latency=0.02)) as engine:
            said, trajectory = await play(engine, agent, stream=stream, is_async=is_async)
        assert said == "78 and 79"
        assert [message["role"] for message in trajectory.messages] == [
            *("system", "user", "assistant", "tool", "tool", "assistant")
        ]
        assert trajectory.extra["gateway"]["notes"] == ["model: any"]
        found.append((trajectory.prompt_ids, trajectory.response_ids))
    assert all(one == found[0] for one in found)


async def test_the_demo_model_calculates_for_every_client(tmp_path: Path) -> None:
    pytest.importorskip("openvino_genai")
    async with started(OpenVINOEngine(MODEL_PATH, log_path=tmp_path / "engine.log")) as model:

        async def rule(request: ScriptedRequest) -> Completion:
            return await model.generate(request.prompt_ids, request.sampling, request_id=request.request_id)

        for agent in CLIENTS:
            async with started(ScriptedEngine(rule, capabilities=model.capabilities)) as engine:
                said, trajectory = await play(engine, agent, stream=True, is_async=True)
            assert said.strip() == "78"
            assert trajectory.num_turns == 4


ASK: dict[Any, tuple[str, dict[str, Any]]] = {
    chat: ("chat.completions", {"model": "m", "messages": [user("q")]}),
    responses: ("responses", {"model": "m", "input": "q"}),
    messages: ("messages", {"model": "m", "messages": [user("q")], "max_tokens": 9}),
}


async def ask(agent: Any, url: str, **more: Any) -> Any:
    route, body = ASK[agent]
    async with client_of(agent, url) as client:
        answer = await operator.attrgetter(route)(client).create(**{**body, **more})
        return [event async for event in answer] if more.get("stream") else answer


@pytest.mark.parametrize(
    ("agent", "given", "words"),
    [
        (chat, {"n": 2}, "'n' is supported"),
        (chat, {"logit_bias": {"3": 5}}, "logit_bias"),
        (chat, {"messages": [user("q" * 9000)]}, "no room"),
        (responses, {"previous_response_id": "resp_x"}, "has no response"),
        (messages, {"messages": [user("q"), {"role": "assistant", "content": "It"}]}, "prefill"),
        (messages, {"messages": [user("q" * 9000)]}, "prompt is too long"),
    ],
)
async def test_what_is_refused_is_an_error_of_the_clients(
    agent: Any, given: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "_HEADERS_S", 0.0)
    library = anthropic if agent is messages else openai
    async with (
        started(ScriptedEngine(latency=0.02)) as engine,
        session(engine, prompt_length=100_000, max_model_len=3000) as (_, url),
    ):
        with pytest.raises(library.BadRequestError, match=words):
            await ask(agent, url, **given)
        assert not engine.requests
        with pytest.raises(library.NotFoundError, match="no session"):
            await ask(agent, url[:-1] + "x")
        # The engine fails while the stream is kept alive.
        engine.fail(lambda request: True, EngineError("no such ids"))
        with pytest.raises(library.APIError, match="no such ids"):
            await ask(agent, url, stream=True)


async def test_what_cannot_change_an_answer_is_taken_by_all_clients() -> None:
    flat = CALCULATOR["function"]
    schema = {"type": "json_schema", "name": "a", "schema": {"type": "object"}}
    server_tool = {"type": "web_search_20250305", "name": "web_search"}
    own_tool = {"name": flat["name"], "input_schema": flat["parameters"]}
    asked: list[tuple[Any, dict[str, Any]]] = [
        (chat, {"tool_choice": "required", "tools": [CALCULATOR], "store": False, "metadata": {"a": "b"}}),
        (chat, {"messages": [user("q"), {"role": "developer", "content": "be brief"}]}),
        (
            responses,
            {"tools": [{"type": "web_search"}, {"type": "function", **flat}], "text": {"format": schema}},
        ),
        (responses, {"instructions": "a", "input": [{"role": "developer", "content": "b"}, user("q")]}),
        (messages, {"tools": [server_tool, own_tool], "tool_choice": {"type": "any"}}),
        (messages, {"system": "a", "messages": [user("q"), {"role": "system", "content": "in /tmp"}]}),
    ]
    async with started(ScriptedEngine()) as engine, session(engine) as (_, url):
        for agent, more in asked:
            await ask(agent, url, **more)


async def test_clients_wait_for_an_engine_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_HEADERS_S", 0.0)
    async with (
        started(ScriptedEngine(response_tokens=4)) as engine,
        session(engine, engine_wait=PATIENCE_S) as (recorder, url),
    ):
        engine.go_down()
        calls = [asyncio.create_task(ask(agent, url, stream=True)) for agent in ASK]
        await until(lambda: recorder.open_calls == len(calls))
        engine.come_back()
        ends = [(await call)[-1] for call in calls]
        assert ends[0].choices[0].finish_reason and ends[1].type == "response.completed"
        assert ends[2].type == "message_stop"
        check_exact(engine, recorder.trajectories())
