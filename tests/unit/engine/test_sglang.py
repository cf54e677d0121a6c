import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.engine.base import Engine
from rollstream.engine.sglang import SGLangEngine, read_reply
from rollstream.errors import (
    EngineError,
    EngineOverloadedError,
    EngineUnavailableError,
    TransientEngineError,
)
from rollstream.testing.stub_faults import Faults
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import Completion, SamplingParams
from tests.support.engines import started
from tests.support.until import until

SAMPLING = SamplingParams(max_tokens=24, seed=5)


@pytest.fixture
async def server() -> AsyncIterator[StubServer]:
    async with StubServer(response_tokens=16, model=StubModel(context_length=64)) as server:
        server.weight_version = "7"
        yield server


@pytest.fixture
async def engine(server: StubServer) -> AsyncIterator[SGLangEngine]:
    async with started(SGLangEngine([server.url])) as engine:
        yield engine


async def ask(engine: SGLangEngine, **changes: Any) -> Completion:
    return await engine.generate([1], replace(SAMPLING, **changes), request_id="a")


NOBODY = "http://127.0.0.1:1"


async def test_tokens_and_logprobs_are_those_of_the_server(server: StubServer, engine: SGLangEngine) -> None:
    assert isinstance(engine, Engine)
    completion = await ask(engine)
    ids, logprobs = server.book.answer([1], 5, 16)
    assert (completion.token_ids, completion.logprobs) == (ids, logprobs)
    assert (completion.finish_reason, completion.policy_versions) == ("stop", [(0, 7)])
    without = await ask(engine, max_tokens=8, logprobs=False)
    assert (without.token_ids, without.logprobs, without.finish_reason) == (ids[:8], None, "length")


async def test_capabilities_come_from_the_server_and_a_models_folder(
    server: StubServer, engine: SGLangEngine, tmp_path: Path
) -> None:
    found = engine.capabilities
    assert (found.max_model_len, found.vocab_size, found.seeds) == (64, 512, True)
    assert not found.stop_token_ids_with_ignore_eos
    server.model = replace(server.model, seeds=False)
    async with started(SGLangEngine([server.url], max_model_len=32)) as other:
        assert (other.capabilities.seeds, other.capabilities.max_model_len) == (False, 32)
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 48}')
    async with started(SGLangEngine([server.url], model_path=str(tmp_path))) as small:
        assert (small.capabilities.vocab_size, small.capabilities.max_model_len) == (8, 48)
        with pytest.raises(TransientEngineError, match="outside the vocabulary"):
            await ask(small)


async def test_an_abort_by_somebody_else_keeps_what_was_sampled(
    server: StubServer, engine: SGLangEngine
) -> None:
    """Whoever wants to go on from it does so: see `ContinuingEngine`."""
    whole = await ask(engine)
    server.faults = Faults(abort=1.0)
    # The server sends 8 tokens. The last one may be an end token that it has not looked at.
    for ignore_eos, kept in ((False, 7), (True, 8)):
        part = await ask(engine, ignore_eos=ignore_eos)
        assert (part.finish_reason, part.token_ids) == ("abort", whole.token_ids[:kept])
        assert part.logprobs == (whole.logprobs or [])[:kept]
        assert part.policy_versions == whole.policy_versions


def aborted(ids: list[int], **meta: object) -> bytes:
    entries = [[-0.5, token, None] for token in ids]
    about = {"id": "r", "finish_reason": {"type": "abort"}, "output_token_logprobs": entries, **meta}
    return orjson.dumps({"output_ids": ids, "meta_info": about})


@pytest.mark.parametrize("logprobs", [False, True])
def test_what_was_aborted_in_the_queue_has_nothing(logprobs: bool) -> None:
    payload = orjson.dumps({"text": "", "meta_info": {"id": "r", "finish_reason": {"type": "abort"}}})
    how = SamplingParams(8, logprobs=logprobs)
    completion = read_reply("server", payload, how, rid="r", vocab_size=9)
    assert (completion.token_ids, completion.finish_reason) == ([], "abort")
    assert completion.logprobs == ([] if logprobs else None)


def test_the_versions_of_an_aborted_answer_are_those_of_what_is_kept() -> None:
    runs = [[0, 3], [2, 4]]
    for ids, kept in (([5, 6, 7], [(0, 3)]), ([5, 6, 7, 8], [(0, 3), (2, 4)])):
        payload = aborted(ids, weight_versions=runs)
        completion = read_reply("server", payload, SamplingParams(8), rid="r", vocab_size=9)
        assert (completion.token_ids, completion.policy_versions) == (ids[:-1], kept)
        assert len(completion.logprobs or []) == len(ids) - 1
    seen = read_reply("server", aborted([5]), SamplingParams(8), rid="r", vocab_size=9, ends_are_seen=True)
    assert seen.token_ids == [5]


def test_impossible_logprobs_are_a_broken_reply() -> None:
    entries = [[-0.5, 5, None], [0.5, 6, None]]
    payload = aborted([5, 6], output_token_logprobs=entries)
    with pytest.raises(TransientEngineError, match="log-probs above 0"):
        read_reply("server", payload, SamplingParams(8), rid="r", vocab_size=9)


@pytest.mark.parametrize(
    ("faults", "expected", "message"),
    [
        (Faults(error=1.0), TransientEngineError, "stub error"),
        (Faults(error=1.0, error_status=429), EngineOverloadedError, "429"),
        (Faults(bad_request=1.0), EngineError, "stub says this request is bad"),
        (Faults(truncate=1.0), TransientEngineError, "cannot be read"),
        (Faults(short_logprobs=1.0), TransientEngineError, "16 ids do not match 15"),
        (Faults(wrong_rid=1.0), TransientEngineError, "instead of"),
        (Faults(error=1.0, error_status=503), EngineOverloadedError, "answers 503: stub error"),
        (Faults(error=1.0, error_status=502, unhealthy=True), EngineUnavailableError, "not healthy"),
        (Faults(error=1.0, error_status=500, unhealthy=True), TransientEngineError, "500"),
        (Faults(broken_http=True), EngineUnavailableError, "Bad status line|Expected HTTP"),
        (Faults(drop=1.0), EngineUnavailableError, "no sglang server answers"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_every_fault_has_its_error(
    server: StubServer, engine: SGLangEngine, faults: Faults, expected: type[EngineError], message: str
) -> None:
    server.faults = faults
    with pytest.raises(expected, match=message) as caught:
        await ask(engine)
    assert type(caught.value) is expected
    server.faults = Faults()
    assert len((await ask(engine)).token_ids) == 16


async def test_cancelling_aborts_in_the_server(server: StubServer, engine: SGLangEngine) -> None:
    server.faults = Faults(hang=1.0)
    task = asyncio.create_task(ask(engine))
    await until(lambda: server.stats.in_flight == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: server.stats.in_flight == 0)
    assert server.stats.aborts == 1
    server.faults = Faults()
    await ask(engine)


@pytest.mark.parametrize(
    "faults", [Faults(unhealthy=True), Faults(unready=True), Faults(broken_http=True)], ids=str
)
async def test_an_unhealthy_server(server: StubServer, engine: SGLangEngine, faults: Faults) -> None:
    assert await engine.health()
    server.faults = faults
    assert not await engine.health()
    server.faults = Faults()
    assert await engine.health()


async def test_start_needs_one_server(server: StubServer, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EngineUnavailableError, match="no sglang server answers"):
        await SGLangEngine([NOBODY]).start()
    async with started(SGLangEngine([NOBODY, server.url])) as half:
        assert "going on without it" in caplog.text
        assert half.capabilities.max_model_len == 64
        assert len((await ask(half)).token_ids) == 16


@pytest.mark.parametrize("faults", [Faults(broken_http=True), Faults(info_status=503)], ids=str)
async def test_start_at_a_server_that_is_not_there_yet(server: StubServer, faults: Faults) -> None:
    server.faults = faults
    engine = SGLangEngine([server.url])
    with pytest.raises(EngineUnavailableError, match=server.url):
        await engine.start()
    assert not await engine.health()
