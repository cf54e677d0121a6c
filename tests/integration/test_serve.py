"""`rollstream serve` as a process, with the demo model: OpenAI's client, ours, signals."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import orjson
import pytest

from demo_model.chats import CALCULATOR
from rollstream.chat.tokenizer import load_tokenizer
from rollstream.demo import MODEL_PATH
from rollstream.engine.base import ScoresIds
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.engine.registry import create_engine
from rollstream.errors import EngineError
from rollstream.trajectory import Completion, SamplingParams
from tests.support.processes import children, is_running
from tests.support.serving import COMMAND, Served, question, serve
from tests.support.until import PATIENCE_S, until, wait_until

pytest.importorskip("openvino_genai")

TOKENIZER = load_tokenizer(str(MODEL_PATH))
NEVER_ENDS = {"max_new_tokens": 3000, "ignore_eos": True}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def direct(tmp_path: Path, asked: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    """What the engine itself answers."""
    engine = OpenVINOEngine(MODEL_PATH, log_path=tmp_path / "engine.log")
    await engine.start()
    try:
        return await asyncio.gather(
            *(engine.generate(prompt, how, request_id=str(i)) for i, (prompt, how) in enumerate(asked))
        )
    finally:
        await engine.close()


def worst(one: list[float], two: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, two, strict=True))


async def load_of(session: aiohttp.ClientSession, url: str) -> int:
    async with session.get(f"{url}/get_load") as response:
        count: int = (await response.json())[0]["num_reqs"]
        return count


async def until_loaded(session: aiohttp.ClientSession, url: str, count: int) -> None:
    async def is_so() -> bool:
        return await load_of(session, url) == count

    await until(is_so)


# OpenAI's client


def test_the_served_model_is_listed(served: Served, client: openai.OpenAI) -> None:
    assert (served.ready["model"], served.ready["pid"]) == ("demo", served.process.pid)
    (model,) = client.models.list().data
    assert (model.id, model.owned_by) == ("demo", "rollstream")
    assert client.models.retrieve("demo").id == "demo"


async def test_completions_are_the_engines(client: openai.OpenAI, tmp_path: Path) -> None:
    prompts = [TOKENIZER.render(question(a, 41)) for a in (12, 37)]
    answer = client.completions.create(
        model="demo",
        prompt=prompts,
        n=2,
        seed=5,
        max_tokens=8,
        logprobs=0,
        extra_body={"return_token_ids": True},
    )
    asked = [(prompt, SamplingParams(8, seed=seed)) for prompt in prompts for seed in (5, 6)]
    expected = await direct(tmp_path, asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, (prompt, _), completion in zip(answer.choices, asked, expected, strict=True):
        extra = choice.model_extra
        assert extra is not None
        assert (extra["prompt_token_ids"], extra["token_ids"]) == (prompt, completion.token_ids)
        assert choice.text == TOKENIZER.decode(completion.token_ids)
        assert choice.logprobs is not None
        assert worst(choice.logprobs.token_logprobs or [], completion.logprobs or []) < 1e-3
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in expected)


async def test_a_chat_is_the_engines(client: openai.OpenAI, tmp_path: Path) -> None:
    messages = question(37, 41)
    answer = client.chat.completions.create(
        model="demo",
        messages=messages,  # type: ignore[arg-type]
        seed=3,
        logprobs=True,
        max_completion_tokens=9,
        extra_body={"return_token_ids": True},
    )
    prompt = TOKENIZER.render(messages)
    (expected,) = await direct(tmp_path, [(prompt, SamplingParams(9, seed=3))])
    (choice,) = answer.choices
    assert (answer.model_extra or {})["prompt_token_ids"] == prompt
    assert (choice.model_extra or {})["token_ids"] == expected.token_ids
    assert choice.message.content == TOKENIZER.decode(expected.token_ids)
    assert (choice.finish_reason, choice.message.role) == ("stop", "assistant")
    assert choice.logprobs is not None
    got = [one.logprob for one in choice.logprobs.content or []]
    assert worst(got, expected.logprobs or []) < 1e-3


def test_a_chat_as_a_stream(client: openai.OpenAI) -> None:
    how: dict[str, Any] = {"model": "demo", "messages": question(37, 41), "temperature": 0, "logprobs": True}
    whole = client.chat.completions.create(**how)
    chunks = list(client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "78"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    streamed, expected = chunks[-2].choices[0].logprobs, whole.choices[0].logprobs
    assert streamed is not None
    assert expected is not None
    # Greedy twice, in batches of their own: equal but for the noise of float32.
    assert [one.token for one in streamed.content or []] == ["7", "8", "<|im_end|>"]
    got, said = ([one.logprob for one in logprobs.content or []] for logprobs in (streamed, expected))
    assert worst(got, said) < 1e-3
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("stream", [False, True])
def test_the_model_calls_its_calculator(client: openai.OpenAI, stream: bool) -> None:
    messages = question(37, 41)
    how: dict[str, Any] = {"model": "demo", "tools": [CALCULATOR], "temperature": 0}
    if stream:
        with client.chat.completions.stream(messages=messages, **how) as events:  # type: ignore[arg-type]
            for _ in events:
                pass
            choice: Any = events.get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(messages=messages, **how).choices[0]  # type: ignore[arg-type]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert call.function.name == "calculator"
    assert orjson.loads(call.function.arguments) == {"expression": "37 + 41"}
    messages += [
        choice.message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}),
        {"role": "tool", "tool_call_id": call.id, "content": "78"},
    ]
    last = client.chat.completions.create(messages=messages, **how).choices[0]  # type: ignore[arg-type]
    assert (last.message.content, last.finish_reason, last.message.tool_calls) == ("78", "stop", None)


def test_errors_are_openais(client: openai.OpenAI) -> None:
    chat: dict[str, Any] = {"model": "demo", "messages": question(1, 2)}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**chat, logit_bias={"5": 1})
    assert refused.value.param == "logit_bias"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**chat, "model": "other"})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="demo", prompt=[5] * 4096)
    assert client.chat.completions.create(**chat, user="me", metadata={"a": "b"}).choices


async def test_a_client_that_hangs_up_leaves_nothing_behind(served: Served) -> None:
    body = {"messages": question(1, 2), "n": 4, "max_tokens": 3000, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        task = asyncio.create_task(session.post(f"{served.url}/v1/chat/completions", json=body))
        await until_loaded(session, served.url, 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_loaded(session, served.url, 0)


# The process


async def test_who_is_in_flight_when_the_worker_dies_is_answered(tmp_path: Path) -> None:
    sampling = {"max_new_tokens": 3000, "ignore_eos": True, "sampling_seed": 3}
    body = {"input_ids": [5, 6, 7], "sampling_params": sampling}
    with serve(log=tmp_path / "log") as served:
        async with aiohttp.ClientSession() as session:
            tasks = [asyncio.create_task(session.post(f"{served.url}/generate", json=body)) for _ in range(3)]
            await until_loaded(session, served.url, 3)
            (worker,) = children(served.process.pid)
            os.kill(worker, signal.SIGKILL)
            replies = [await (await task).json() for task in tasks]
        assert children(served.process.pid) != [worker]
    (expected,) = await direct(tmp_path, [([5, 6, 7], SamplingParams(3000, ignore_eos=True, seed=3))])
    assert [reply["output_ids"] for reply in replies] == [expected.token_ids] * 3


async def test_a_signal_ends_it_in_good_order(tmp_path: Path) -> None:
    with serve(log=tmp_path / "log") as served:
        (worker,) = children(served.process.pid)
        body = {"input_ids": [5], "sampling_params": NEVER_ENDS}
        async with aiohttp.ClientSession() as session:
            tasks = [
                asyncio.create_task(session.post(f"{served.url}/generate", json={**body, "stream": stream}))
                for stream in (False, True)
            ]
            await until_loaded(session, served.url, 2)
            code, printed = await asyncio.to_thread(served.stop, signal.SIGTERM)
            for task in tasks:
                response = await task
                assert response.status == 503
                assert "shutting down" in (await response.json())["error"]["message"]
    assert (code, printed) == (0, b"")
    wait_until(lambda: not is_running(worker))
    assert "Traceback" not in served.log.read_text()


def test_a_signal_while_the_model_is_loaded_ends_it(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*COMMAND, "--log-dir", str(tmp_path)], stdout=log, stderr=log)
    wait_until(lambda: process.poll() is not None or (tmp_path / "engine-openvino.log").exists())
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0, (tmp_path / "log").read_text()
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    starter = (
        "import subprocess, sys\n"
        "server = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)\n"
        "sys.stdout.buffer.write(server.stdout.readline())\n"
        "sys.stdout.flush()\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", starter, *COMMAND, "--json", "--exit-with-parent"]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid: int = orjson.loads(parent.stdout.readline())["pid"]
    (worker,) = children(pid)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_running(pid) and not is_running(worker))


def test_a_key_a_name_and_a_limit(tmp_path: Path) -> None:
    options = ["--api-key-env", "SERVE_KEY", "--served-model-name", "sums", "--max-model-len", "50"]
    options += ["--engine-kwargs", "num_threads=1", "num_kv_blocks=40"]
    with serve(*options, log=tmp_path / "log", env={"SERVE_KEY": "s3cret"}) as served:
        base = f"{served.url}/v1"
        with (
            openai.OpenAI(base_url=base, api_key="wrong", max_retries=0) as wrong,
            pytest.raises(openai.AuthenticationError),
        ):
            wrong.models.list()
        with openai.OpenAI(base_url=base, api_key="s3cret", max_retries=0) as client:
            (model,) = client.models.list().data
            assert (model.id, (model.model_extra or {})["max_model_len"]) == ("sums", 50)
            messages: Any = question(1, 2)
            answer = client.chat.completions.create(
                model="sums", messages=messages, extra_body={"ignore_eos": True}
            )
            assert answer.usage is not None
            assert answer.usage.total_tokens == 50


async def test_the_likeliest_ids_of_an_hf_engine_come_through(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    ids = [3 + at * 37 % 500 for at in range(50)]
    direct = create_engine("hf", model_path=MODEL_PATH, log_dir=tmp_path)
    with serve("--engine", "hf", log=tmp_path / "log", env={"PYTHONPATH": ""}) as served:
        ours = create_engine("sglang", model_path=MODEL_PATH, server_urls=[served.url], log_dir=tmp_path)
        try:
            await asyncio.gather(direct.start(), ours.start())
            assert isinstance(direct, ScoresIds) and isinstance(ours, ScoresIds)
            assert ours.capabilities.score_top_k == direct.capabilities.score_top_k > 8
            for start in (1, 20):
                one, other = [await engine.score(ids, start, 8) for engine in (direct, ours)]
                assert other.top_ids == one.top_ids
                for values, wanted in zip(
                    [other.logprobs, *other.top_logprobs], [one.logprobs, *one.top_logprobs], strict=True
                ):
                    assert values == pytest.approx(wanted, abs=1e-5)
            with pytest.raises(EngineError):
                await ours.score(ids, 1, 1000)
        finally:
            await asyncio.gather(direct.close(), ours.close())
