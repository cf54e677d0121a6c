"""Engine `openai` against a stub endpoint in this process."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine import openai as openai_module
from rollstream.engine.base import ChatEngine, ChatPrompt
from rollstream.engine.http_server import CONNECTION_KWARGS, HttpServer
from rollstream.engine.openai import OpenAIEngine
from rollstream.errors import ConfigError, EngineError, EngineUnavailableError, TransientEngineError
from rollstream.testing.stub_chat import ChatFault, ChatStub
from rollstream.trajectory import Completion, SamplingParams
from tests.support.until import until

KEY = "sk-very-secret-0123456789"
HOW = SamplingParams(64, logprobs=False)
ANSWER = "the answer is four words longer"
CALL = {"type": "function", "id": "c00000000", "function": {"name": "add", "arguments": {"x": 1}}}


def ask(text: str = "2 + 3 =", **more: Any) -> ChatPrompt:
    return ChatPrompt([{"role": "user", "content": text}], **more)


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(openai_module, "_CUT_PAUSE_S", 0.01)


@pytest.fixture
async def stub() -> AsyncIterator[ChatStub]:
    async with ChatStub(lambda body: ANSWER) as stub:
        yield stub


Make = Callable[..., Any]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Starts engines; closes them at the end."""
    engines: list[OpenAIEngine] = []

    async def start(*stubs: ChatStub, model: str = "stub", **kwargs: Any) -> OpenAIEngine:
        engine = OpenAIEngine([one.url for one in stubs], model_path=model, engine_kwargs=kwargs)
        engines.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in engines:
        await engine.close()


def content(completion: Completion) -> Any:
    assert completion.message is not None
    return completion.message["content"]


async def test_text_in_text_out(stub: ChatStub, make: Make) -> None:
    engine = await make(stub)
    assert isinstance(engine, ChatEngine)
    capabilities = engine.capabilities
    assert not (capabilities.token_ids or capabilities.seeds or capabilities.stop_token_ids)
    assert (capabilities.logprobs, capabilities.images, capabilities.stop_strings) == ("none", False, True)
    answer = await engine.chat(ask(), HOW, request_id="a")
    assert (content(answer), answer.finish_reason, answer.token_ids, answer.logprobs) == (
        ANSWER,
        "stop",
        [],
        None,
    )
    (request,) = stub.requests
    assert request["messages"] == [{"role": "user", "content": "2 + 3 ="}]
    assert request["stream"] is True


async def test_ids_alone_are_refused_with_a_hint(stub: ChatStub, make: Make) -> None:
    engine = await make(stub)
    with pytest.raises(EngineError, match="messages, not token ids"):
        await engine.generate([1, 2], HOW, request_id="a")


async def test_tools(stub: ChatStub, make: Make) -> None:
    stub.rule = lambda body: {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}
    engine = await make(stub)
    answer = await engine.chat(ask(tools=[{"type": "function"}]), HOW, request_id="a")
    function = answer.message["tool_calls"][0]["function"]
    assert (function["name"], function["arguments"]) == ("add", '{"x":1}')
    assert (content(answer), answer.finish_reason) == ("I add.", "stop")
    assert stub.requests[0]["tools"] == [{"type": "function"}]


@pytest.mark.parametrize(
    ("fault", "expected", "message"),
    [
        (ChatFault("status", 400, message="too long"), EngineError, "answers 400: too long"),
        (ChatFault("status", 403, message="flagged"), EngineError, "answers 403: flagged"),
        (ChatFault("status", 500), TransientEngineError, "answers 500"),
        (ChatFault("status", 503), TransientEngineError, "answers 503"),
        (ChatFault("status", 404, message="no such model"), EngineError, "no such model"),
        (ChatFault("finish", code="content_filter"), EngineError, "content_filter"),
        (ChatFault("finish", code="what"), TransientEngineError, "what"),
        (ChatFault("error_event", code=400, message="bad"), EngineError, "answers 400: bad"),
        (ChatFault("error_event", code="x"), TransientEngineError, "answers 500: stub error"),
    ],
    ids=lambda value: str(value)[:50],
)
async def test_every_fault_has_its_error(
    stub: ChatStub, make: Make, fault: ChatFault, expected: type[EngineError], message: str
) -> None:
    engine = await make(stub)
    stub.faults.append(fault)
    with pytest.raises(expected, match=message) as caught:
        await engine.chat(ask(), HOW, request_id="a")
    assert isinstance(caught.value, TransientEngineError) == (expected is TransientEngineError)
    assert not isinstance(caught.value, EngineUnavailableError)
    assert content(await engine.chat(ask(), HOW, request_id="a")) == ANSWER


CUTS = [ChatFault(kind) for kind in ("cut", "truncate", "half_event", "garbage", "no_choices", "drop")]


@pytest.mark.parametrize("fault", CUTS, ids=lambda fault: fault.kind)
async def test_a_cut_answer_is_asked_for_again(stub: ChatStub, make: Make, fault: ChatFault) -> None:
    engine = await make(stub)
    stub.faults += [fault, fault]
    assert content(await engine.chat(ask(), HOW, request_id="a")) == ANSWER
    assert len(stub.requests) == 3
    assert all(request == stub.requests[0] for request in stub.requests)
    stub.faults += [fault] * 3
    with pytest.raises(TransientEngineError, match="3 times in a row"):
        await engine.chat(ask(), HOW, request_id="a")


async def test_an_endpoint_that_goes_away_and_comes_back(stub: ChatStub, make: Make) -> None:
    engine = await make(stub)
    await stub.stop()
    with pytest.raises(EngineUnavailableError):
        await engine.chat(ask(), HOW, request_id="a")
    assert not await engine.health()
    await stub.start()
    assert await engine.health()
    assert content(await engine.chat(ask(), HOW, request_id="a")) == ANSWER


async def test_an_abort_gives_what_has_arrived_and_ends_it_there(stub: ChatStub, make: Make) -> None:
    engine = await make(stub)
    for seconds in (0.02, 0.2, 2, 20):  # for the first words
        stub.faults.append(ChatFault("hang"))
        asked = asyncio.create_task(engine.chat(ask(), HOW, request_id="a"))
        await asyncio.sleep(seconds)
        await engine.abort("a")
        answer = await asked
        assert answer.finish_reason == "abort"
        if content(answer):
            break
    assert ANSWER.startswith(content(answer)) and content(answer)
    closed, requests = stub.closed_by_client, len(stub.requests)
    stub.faults.append(ChatFault("hang"))
    asked = asyncio.create_task(engine.chat(ask(), HOW, request_id="b"))
    await until(lambda: len(stub.requests) > requests)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await until(lambda: stub.closed_by_client > closed)


async def test_closing_ends_what_is_in_flight_and_what_a_limit_holds(stub: ChatStub, make: Make) -> None:
    engine = await make(stub, requests_per_minute=1)
    stub.faults.append(ChatFault("hang"))
    asked = [asyncio.create_task(engine.chat(ask(), HOW, request_id=str(one))) for one in range(3)]
    await until(lambda: stub.requests)
    await engine.close()
    for one in asked:
        with pytest.raises(EngineUnavailableError):
            await one
    assert len(stub.requests) == 1


async def test_retry_after_holds_all_and_costs_nothing(
    stub: ChatStub, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await make(stub)
    stub.faults += [ChatFault("status", 429, "rate_limit_exceeded", headers={"Retry-After": "0.6"})]
    await engine.chat(ask(), HOW, request_id="a")
    answers = await asyncio.gather(*(engine.chat(ask(), HOW, request_id=str(one)) for one in range(5)))
    assert {content(one) for one in answers} == {ANSWER}
    (line,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert "429" in line.message and "nothing is sent for 0.6 s" in line.message


async def test_a_long_hold_is_an_endpoint_that_is_away(stub: ChatStub, make: Make) -> None:
    engine = await make(stub)
    stub.faults.append(ChatFault("status", 429, "x", headers={"Retry-After": "1800"}))
    with pytest.raises(EngineUnavailableError, match="not asked for 1800 s"):
        await engine.chat(ask(), HOW, request_id="a")
    assert not await engine.health()


@pytest.mark.parametrize(
    "fault",
    [
        ChatFault("status", 429, "insufficient_quota", "You exceeded your quota"),
        ChatFault("status", 402, "x", "Insufficient Balance"),
        ChatFault("status", 401, "invalid_api_key", "revoked"),
    ],
)
async def test_no_quota_and_a_refused_key_stop_the_run_and_no_rollout(
    stub: ChatStub, make: Make, monkeypatch: pytest.MonkeyPatch, fault: ChatFault
) -> None:
    monkeypatch.setattr(openai_module, "_AWAY_HOLD_S", 0.0)
    monkeypatch.setattr(openai_module, "_REFUSED_HOLD_S", 30.0)
    engine = await make(stub)
    stub.faults.append(fault)
    for _ in range(2):
        with pytest.raises(EngineUnavailableError, match=fault.message):
            await engine.chat(ask(), HOW, request_id="a")
    assert len(stub.requests) == 1  # the next ones fared no better, unasked
    assert not await engine.health()
    monkeypatch.setattr(openai_module.time, "monotonic", lambda now=openai_module.time.monotonic: now() + 60)
    assert await engine.health()
    assert content(await engine.chat(ask(), HOW, request_id="a")) == ANSWER  # somebody has paid


async def test_the_key_is_shown_and_never_told(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with ChatStub(lambda body: ANSWER, api_key=KEY) as stub:
        with pytest.raises(EngineError, match=r"401.*api_key_env"):
            await make(stub)
        monkeypatch.setenv("OPENAI_API_KEY", KEY + "\n")
        assert content(await (await make(stub)).chat(ask(), HOW, request_id="a")) == ANSWER
        monkeypatch.setenv("OTHER_KEY", "sk-another-0123456789")
        with pytest.raises(EngineError, match=r"Incorrect API key provided: \*\*\*") as caught:
            await make(stub, api_key_env="OTHER_KEY")
        engine = await make(stub)
        stub.faults.append(ChatFault("status", 400, message=f"odd key {KEY}"))
        with pytest.raises(EngineError, match=r"odd key \*\*\*") as caught_too:
            await engine.chat(ask(), HOW, request_id="a")
    told = caplog.text + str(caught.value) + str(caught_too.value)
    # Long texts are cut, but not in the middle of a key.
    server = HttpServer("http://a:1", CONNECTION_KWARGS | {"api_key_env": "OPENAI_API_KEY"})
    told += str(server.refusal(500, b"x" * 490 + KEY.encode()))
    assert KEY[:9] not in told
    assert KEY not in told
    assert "sk-another" not in told
    assert "the API key in OPENAI_API_KEY goes to http://127.0.0.1" in told
    with pytest.raises(ConfigError, match="NO_SUCH_KEY"):
        OpenAIEngine(["http://a:1"], model_path="m", engine_kwargs={"api_key_env": "NO_SUCH_KEY"})


async def test_the_model_is_one_that_is_served(stub: ChatStub, make: Make, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"does not list the model 'gpt-9' .*model\.path"):
        await make(stub, model="gpt-9")
    engine = await make(stub, model="gpt-9", check_model=False)
    with pytest.raises(EngineError, match="`gpt-9` does not exist"):
        await engine.chat(ask(), HOW, request_id="a")
    (tmp_path / "stub").mkdir()
    engine = await make(stub, model=str(tmp_path / "stub"))
    assert content(await engine.chat(ask(), HOW, request_id="a")) == ANSWER
    stub.lists_models = False
    for model in ("stub", str(tmp_path / "stub")):
        engine = await make(stub, model=model)
        assert content(await engine.chat(ask(), HOW, request_id="a")) == ANSWER
        assert await engine.health()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"extra_body": {"messages": []}}, "extra_body has 'messages'"),
        ({"extra_body": {"logprobs": True}}, "extra_body has 'logprobs'"),
        ({"omit": ["stop"]}, "omit has 'stop'"),
        ({"max_tokens_key": "tokens"}, "max_tokens_key"),
        ({"requests_per_minute": -1}, "requests_per_minute"),
        ({"honors_seed": True}, "did you mean 'honours_seed'"),
        ({"api_key": KEY}, "unknown key"),
    ],
)
def test_settings_that_make_no_sense(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        OpenAIEngine(["http://a:1"], model_path="m", engine_kwargs=kwargs)
    assert KEY not in str(caught.value)
