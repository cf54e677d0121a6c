"""Servers that go wrong, one by one and in a whole run: nothing is lost and no rollout pays for it."""

import asyncio
import contextlib
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import orjson
import pytest

from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.generation.runner import run_generation
from rollstream.store.paths import RunPaths
from rollstream.store.validate import validate_run
from rollstream.testing.stub_faults import Faults, Latency
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import Completion, SamplingParams
from tests.faults.runs import overrides, stub_server, write_prompts

SAMPLING = SamplingParams(max_tokens=16)


def ask(pool: SGLangEngine, number: int) -> "asyncio.Task[Completion]":
    return asyncio.create_task(
        pool.generate([number % 500, number // 500], SAMPLING, request_id=f"{number}-0-0")
    )


@contextlib.asynccontextmanager
async def pool_of(*urls: str, **kwargs: object) -> AsyncIterator[SGLangEngine]:
    pool = SGLangEngine(urls, engine_kwargs=kwargs)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid:30000"])
async def test_a_wrong_url(url: str) -> None:
    with pytest.raises(EngineUnavailableError, match=rf"{url}.*server_urls"):
        await SGLangEngine([url]).start()


async def test_https_to_a_plain_port() -> None:
    async with StubServer() as server:
        with pytest.raises(EngineUnavailableError, match=r"does not speak TLS.*Is its URL http://"):
            await SGLangEngine([server.url.replace("http:", "https:")]).start()


@pytest.fixture
def certificate(tmp_path: Path) -> ssl.SSLContext:
    """Of a server that signed its certificate itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    key, path = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-subj", "/CN=127.0.0.1", "-keyout", str(key), "-out", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(path, key)
    return context


async def test_a_certificate_that_nobody_trusts(certificate: ssl.SSLContext) -> None:
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=certificate)
    port = listener.sockets[0].getsockname()[1]
    with pytest.raises(EngineUnavailableError, match=r"certificate is not one .* trusts.*SSL_CERT_FILE"):
        await SGLangEngine([f"https://127.0.0.1:{port}"]).start()
    listener.close()


async def test_a_server_that_comes_later_with_another_model_gets_no_work(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with StubServer(model=StubModel("/models/good", vocab_size=512)) as good:
        async with StubServer() as placeholder:
            url, port = placeholder.url, int(placeholder.url.rpartition(":")[2])
        pool = SGLangEngine([good.url, url], model_path="/models/good")
        await pool.start()
        assert "going on without it" in caplog.text
        caplog.clear()
        rounds = 0

        async def until(check: Callable[[], bool]) -> None:
            nonlocal rounds
            async with asyncio.timeout(20):
                while not check():
                    rounds += 1
                    await asyncio.gather(*(ask(pool, rounds * 10 + at) for at in range(10)))
                    await asyncio.sleep(0.01)

        async with StubServer(port=port, model=StubModel("/models/bad")) as bad:
            await until(lambda: "gets no work" in caplog.text)
            await asyncio.sleep(1.0)  # it is asked again
            assert bad.stats.requests == 0
        assert caplog.text.count("gets no work") == 1
        assert "serves '/models/bad'" in caplog.text
        caplog.clear()
        async with StubServer(port=port, model=StubModel("/models/good", vocab_size=100)) as small:
            await until(lambda: "vocab_size 100 (not 512)" in caplog.text)
            assert small.stats.requests == 0
        async with StubServer(port=port, model=StubModel("/elsewhere/good")) as late:
            await until(lambda: late.stats.answered > 0)
        await pool.close()


async def test_a_server_dies_in_the_middle_of_a_thousand_requests() -> None:
    quick = Latency("fixed", 0.05)
    async with StubServer(latency=quick) as a, StubServer(latency=quick) as b, StubServer(latency=quick) as c:
        async with pool_of(a.url, b.url, c.url) as pool:
            a.faults = Faults(die_after=100)
            completions = await asyncio.gather(*(ask(pool, number) for number in range(1000)))
        assert 100 <= a.stats.answered < 400
        for number, completion in enumerate(completions):
            assert completion.token_ids == b.book.answer([number % 500, number // 500], None, 16)[0]


@contextlib.contextmanager
def stub_process(*options: str) -> Iterator[tuple[str, int]]:
    """A stub server in its own process: its URL and its number."""
    command = [sys.executable, "-m", "rollstream.testing.stub_server", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield orjson.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(20)


def run(tmp_path: Path, urls: list[str], **settings: object) -> list[dict[str, object]]:
    """A whole run of 120 prompts; its rows."""
    import pyarrow.parquet as pq

    prompts = write_prompts(tmp_path / "prompts.jsonl", 120)
    result = run_generation(overrides(tmp_path / "run", prompts, ",".join(urls), **settings))
    assert (result.total, result.completed, result.failed) == (120, 120, 0)
    assert validate_run(tmp_path / "run").sound
    return pq.read_table(RunPaths(tmp_path / "run").root / "trajectories.parquet").to_pylist()


def send_when_busy(url: str, pid: int, number: signal.Signals, sent: list[int]) -> None:
    """Sends a signal to a server that has answered something and has more to do."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{url}/stub/stats", timeout=10) as response:
            stats = orjson.loads(response.read())
        if stats["answered"] >= 10 and stats["in_flight"]:
            os.kill(pid, number)
            sent.append(stats["in_flight"])
            return
        time.sleep(0.01)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_run_loses_a_server(tmp_path: Path, number: signal.Signals) -> None:
    """Killed: its sockets close. Frozen: it takes connections and says nothing. No attempt is charged."""
    slow = ("--latency", "fixed:0.2", "--max-running", "8")
    sent: list[int] = []
    with stub_process(*slow) as (one, _), stub_process(*slow) as (other, pid):
        sender = threading.Thread(target=send_when_busy, args=(other, pid, number, sent))
        sender.start()
        rows = run(
            tmp_path,
            [one, other],
            actor_rollout_ref__rollout__engine_kwargs="{probe_after: 0.5, health_timeout: 0.5}",
            generation__max_in_flight=24,
            generation__max_attempts=1,
        )
        sender.join(10)
        assert sent and sent[0] > 0
    assert len(rows) == 120


def test_a_run_with_a_server_that_breaks_one_in_three_replies(tmp_path: Path) -> None:
    broken = [
        "--truncate",
        "0.1",
        "--bad-ids",
        "0.1",
        "--wrong-rid",
        "0.1",
        "--drop",
        "0.05",
        "--error",
        "0.05",
    ]
    with stub_server() as good, stub_server(*broken) as bad:
        assert len(run(tmp_path, [good, bad], generation__max_attempts=1)) == 120


def test_a_server_of_another_model_ends_the_run_at_its_start(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 3)
    with (
        stub_server("--model-path", "/models/another") as url,
        pytest.raises(EngineError, match="serves '/models/an"),
    ):
        run_generation(overrides(tmp_path / "run", prompts, url))
