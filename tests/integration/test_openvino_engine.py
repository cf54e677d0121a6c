"""The embedded engine with the demo model: real processes, real kills."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.base import EngineLoad
from rollstream.engine.load import ask_load
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams
from tests.conformance.reference import Reference
from tests.support.processes import is_running
from tests.support.until import wait_until

pytest.importorskip("openvino_genai")

MODEL = Path(__file__).parents[2] / "src" / "rollstream" / "demo" / "model"
LONG = SamplingParams(max_tokens=3000, ignore_eos=True, seed=1)


async def started(tmp_path: Path, **kwargs: Any) -> OpenVINOEngine:
    engine = OpenVINOEngine(MODEL, log_path=tmp_path / "logs" / "engine.log", engine_kwargs=kwargs)
    await engine.start()
    return engine


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[OpenVINOEngine]:
    engine = await started(tmp_path)
    yield engine
    await engine.close()


async def test_scores_among_generations_change_neither(engine: OpenVINOEngine) -> None:
    prompts = [[1, 5 + number, 9, 3, 20] for number in range(24)]

    async def generate(number: int) -> Completion:
        how = SamplingParams(8, ignore_eos=True, seed=number)
        return await engine.generate(prompts[number], how, request_id=f"{number}")

    def later(number: int, call: Callable[[], Coroutine[Any, Any, Any]]) -> Coroutine[Any, Any, Any]:
        async def result() -> Any:
            await asyncio.sleep(number * 0.002)
            return await call()

        return result()

    completions = [await generate(number) for number in range(24)]
    asked = [prompt + one.token_ids for prompt, one in zip(prompts, completions, strict=True)]
    scores = [(await engine.score(ids)).logprobs for ids in asked]
    found = await asyncio.gather(
        *(later(number, partial(generate, number)) for number in range(24)),
        *(later(number, partial(engine.score, asked[number])) for number in range(24)),
    )
    for number in range(24):
        assert found[number].token_ids == completions[number].token_ids
        assert found[number].logprobs == pytest.approx(completions[number].logprobs, abs=1e-3)
        assert found[24 + number].logprobs == pytest.approx(scores[number], abs=1e-3)


async def test_log_probs_of_a_temperature_are_exact(tmp_path: Path) -> None:
    """By its own setting, and by a run's: also after an update of the weights."""
    reference = Reference(MODEL)
    for temperature in (0.7, 1.6):
        engine = OpenVINOEngine(MODEL, log_path=tmp_path / "log", logprobs_temperature=temperature)
        await engine.start()
        assert (engine.capabilities.logprobs, engine.capabilities.scores) == ("processed", False)
        plain = await started(tmp_path)
        for weights in range(2):
            how = SamplingParams(60, temperature=temperature, ignore_eos=True, seed=5)
            mine, raw = [await one.generate([5, 9, 3], how, request_id="a") for one in (engine, plain)]
            expected = reference.score([5, 9, 3], mine.token_ids, temperature)[1]
            assert mine.logprobs == pytest.approx(expected, abs=1e-4)
            assert mine.token_ids == raw.token_ids  # what is drawn is what it was
            for other in ({"temperature": 1.0}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 5}):
                with pytest.raises(EngineError, match="logprobs_mode"):
                    await engine.generate([5], replace(how, **other), request_id="b")
            assert await engine.generate([5], replace(how, top_k=5, logprobs=False), request_id="c")
            if not weights:
                await engine.update_weights(str(MODEL), 1)
        await engine.close()
        await plain.close()


async def begin(engine: OpenVINOEngine, requests: int) -> list[asyncio.Task[Completion]]:
    """Sends long requests; returns when the model is at work on the first two of them."""

    def ask(sampling: SamplingParams, name: str) -> asyncio.Task[Completion]:
        return asyncio.create_task(engine.generate([1], sampling, request_id=name))

    tasks = [ask(LONG, str(number)) for number in range(min(requests, 2))]
    short = ask(SamplingParams(1), "short")
    tasks += [ask(LONG, str(number)) for number in range(len(tasks), requests)]
    await short  # it was let in after those before it
    return tasks


async def test_the_engine_says_how_busy_it_is(tmp_path: Path) -> None:
    engine = await started(tmp_path, num_kv_blocks=200)
    assert await ask_load(engine) is None  # nothing has ended yet
    tasks = await begin(engine, 20)
    # Each needs 94 blocks of 32 tokens, and nothing else ends for 3000 steps.
    assert await ask_load(engine) == EngineLoad(2, 18, pytest.approx(188 / 200), 0)
    for number in range(20):
        await engine.abort(str(number))
    await asyncio.gather(*tasks)
    assert await ask_load(engine) == EngineLoad(0, 0, 0.0, 0)
    await engine.close()
    assert await ask_load(engine) is None


async def test_a_killed_worker_is_replaced(engine: OpenVINOEngine) -> None:
    before = await engine.generate([1, 2], SamplingParams(30, seed=1), request_id="a")
    for _ in range(2):
        tasks = await begin(engine, 8)
        pid = engine.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(r, EngineUnavailableError) for r in results)
        assert "SIGKILL" in str(results[0])
        assert engine.worker_pid is None
        with pytest.raises(EngineUnavailableError, match="SIGKILL"):
            await engine.generate([1], LONG, request_id="a")
        assert all(await asyncio.gather(*(engine.health() for _ in range(3))))
        assert engine.worker_pid not in (None, pid)
        after = await engine.generate([1, 2], SamplingParams(30, seed=1), request_id="a")
        assert after.token_ids == before.token_ids


async def test_interrupts_are_left_to_the_parent(engine: OpenVINOEngine) -> None:
    assert engine.worker_pid is not None
    task = asyncio.create_task(engine.generate([1], SamplingParams(300, ignore_eos=True), request_id="a"))
    await asyncio.sleep(0.02)
    os.kill(engine.worker_pid, signal.SIGINT)
    os.kill(engine.worker_pid, signal.SIGTERM)
    assert len((await task).token_ids) == 300


async def test_close_ends_the_worker_and_what_is_in_flight(tmp_path: Path) -> None:
    engine = await started(tmp_path)
    pid = engine.worker_pid
    assert pid is not None
    (task,) = await begin(engine, 1)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineUnavailableError):
        await task
    assert not is_running(pid)
    assert not await engine.health()
    with pytest.raises(EngineUnavailableError):
        await engine.generate([1], LONG, request_id="b")


FAILS_TO_START = """
import asyncio, sys
from pathlib import Path
from rollstream.engine.openvino import OpenVINOEngine

engine = OpenVINOEngine(sys.argv[1], log_path=Path(sys.argv[2]))
# Not asyncio.run, which turns the loop a few times more before it closes it.
loop = asyncio.new_event_loop()
loop.slow_callback_duration = 60  # a busy machine is nothing to tell of
try:
    loop.run_until_complete(engine.start())
except Exception as error:
    print(type(error).__name__, error)
loop.close()
"""


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    folder, log = tmp_path / "model", tmp_path / "engine.log"
    folder.mkdir()
    for path in MODEL.iterdir():
        content = path.read_bytes()
        (folder / path.name).write_bytes(content[:1000] if path.name == "openvino_model.bin" else content)
    cause = "Incorrect weights in bin file!"
    # A process of its own: a transport that is not closed complains on stderr after the loop has ended.
    command = [sys.executable, "-X", "dev", "-c", FAILS_TO_START, str(folder), str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    assert line.startswith(f"EngineError engine 'openvino' cannot load {folder}: {cause}")
    assert line.count(cause) == 1 and "Traceback" not in line
    assert str(log) in line and "Traceback" in log.read_text()


CANCELLED_STARTS = """
import asyncio, sys
from pathlib import Path
from rollstream.engine.openvino import OpenVINOEngine

async def main(delay):
    asyncio.get_running_loop().slow_callback_duration = 60  # a busy machine is nothing to tell of
    engine = OpenVINOEngine(sys.argv[1], log_path=Path(sys.argv[2]))
    task = asyncio.create_task(engine.start())
    await asyncio.sleep(delay)
    task.cancel()
    await asyncio.sleep(0)
    await engine.close()
    await asyncio.gather(task, return_exceptions=True)

for delay in (0.0, 0.01, 0.1):
    asyncio.run(main(delay))
"""


def test_a_cancelled_start_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "dev", "-c", CANCELLED_STARTS, str(MODEL), str(tmp_path / "engine.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # asyncio's development mode says by itself that it kills a process whose start was cut off.
    said = [line for line in done.stderr.splitlines() if not line.startswith("Close running child process")]
    assert said == []


async def test_settings_that_the_model_refuses_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"cannot load .*: Wrong value q7 for property key KV_CACHE_PRECISION"
    ):
        await started(tmp_path, kv_cache_precision="q7")


PARENT = """
import asyncio, sys
from pathlib import Path
from rollstream.engine.checks import read_model_limits
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.trajectory import SamplingParams

async def main():
    engine = OpenVINOEngine(sys.argv[1], log_path=Path(sys.argv[2]))
    await engine.start()
    sampling = SamplingParams(3000, ignore_eos=True)
    busy = sys.argv[3] == "busy"
    tasks = [asyncio.create_task(engine.generate([1], sampling, request_id=str(i))) for i in range(32 * busy)]
    await asyncio.sleep(0.05)
    print(engine.worker_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_the_worker_does_not_outlive_its_parent(tmp_path: Path, state: str) -> None:
    command = [sys.executable, "-c", PARENT, str(MODEL), str(tmp_path / "engine.log"), state]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()
    wait_until(lambda: not is_running(worker))
