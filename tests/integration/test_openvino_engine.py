"""The embedded engine with the demo model: real processes, real kills."""

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.base import Engine, EngineLoad
from rollstream.engine.checks import read_model_limits
from rollstream.engine.load import ask_load
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams

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


async def eventually(check: Callable[[], bool], timeout_s: float = 10.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.01)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def requests(count: int, *, longest: int = 60) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(7)
    return [
        (
            [rng.randrange(3, 500) for _ in range(rng.randrange(1, 60))],
            SamplingParams(rng.randrange(2, longest), seed=i, ignore_eos=i % 3 == 0),
        )
        for i in range(count)
    ]


async def answer(engine: Engine, asked: list[tuple[list[int], SamplingParams]]) -> list[Completion]:
    return await asyncio.gather(
        *(engine.generate(prompt, how, request_id=str(i)) for i, (prompt, how) in enumerate(asked))
    )


async def test_the_engine_says_how_busy_it_is(tmp_path: Path) -> None:
    engine = await started(tmp_path, num_kv_blocks=8)  # of 32 tokens
    assert await ask_load(engine) is None  # nothing has ended yet
    how = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    tasks = [
        asyncio.create_task(engine.generate([5] * 4, how, request_id=str(number))) for number in range(40)
    ]
    seen = []
    async with asyncio.timeout(60):
        while not all(task.done() for task in tasks):
            seen.append(await ask_load(engine))
            await asyncio.sleep(0.001)
    said = [load for load in seen if load is not None]
    assert max(load.running for load in said) in (3, 4)  # each needs two blocks of 32 tokens
    assert max(load.queued for load in said) >= 20
    assert max(load.kv_usage or 0 for load in said) > 0.5
    assert {load.preemptions for load in said} == {0}
    assert await ask_load(engine) == EngineLoad(0, 0, 0.0, 0)
    await engine.close()
    assert await ask_load(engine) is None


def worst_logprob_error(asked: list[tuple[list[int], SamplingParams]], answers: list[Completion]) -> float:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    worst = 0.0
    for (prompt, _), completion in zip(asked, answers, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + completion.token_ids])).logits[0]
        expected = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        ids = torch.tensor(completion.token_ids)
        difference = expected.gather(1, ids[:, None])[:, 0] - torch.tensor(completion.logprobs)
        worst = max(worst, float(difference.abs().max()))
    return worst


async def test_logprobs_are_the_models_whatever_the_sampling(engine: OpenVINOEngine) -> None:
    assert isinstance(engine, Engine)
    asked = requests(60)
    asked += [
        (prompt, SamplingParams(20, seed=i, temperature=0.5 + i / 20, top_p=0.8, top_k=20))
        for i, (prompt, _) in enumerate(requests(20))
    ]
    asked += [(prompt, SamplingParams(20, temperature=0.0)) for prompt, _ in requests(20)]
    answers = await answer(engine, asked)
    assert worst_logprob_error(asked, answers) < 1e-4
    for (_, how), completion in zip(asked, answers, strict=True):
        assert 1 <= len(completion.token_ids) <= how.max_tokens
        assert len(completion.logprobs or []) == len(completion.token_ids)


async def test_seeds_repeat_whatever_else_is_in_the_batch(engine: OpenVINOEngine, tmp_path: Path) -> None:
    asked = requests(64)
    together = await answer(engine, asked)
    alone = [await engine.generate(p, s, request_id="x") for p, s in asked[:16]]
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[:16]]
    # Another order, other batch sizes (prompts are split), a cache so small that requests have to queue.
    other = await started(tmp_path, max_num_seqs=5, max_num_batched_tokens=23, num_kv_blocks=20)
    backwards = (await answer(other, asked[::-1]))[::-1]
    await other.close()
    assert [c.token_ids for c in backwards] == [c.token_ids for c in together]
    differences = [
        abs(a - b)
        for one, two in zip(backwards, together, strict=True)
        for a, b in zip(one.logprobs or [], two.logprobs or [], strict=True)
    ]
    assert max(differences) < 1e-4


async def test_without_a_seed_answers_differ(engine: OpenVINOEngine) -> None:
    sampling = SamplingParams(20, ignore_eos=True)
    answers = await asyncio.gather(*(engine.generate([5, 6], sampling, request_id=str(i)) for i in range(8)))
    assert len({tuple(c.token_ids) for c in answers}) > 1


async def test_how_a_generation_ends(engine: OpenVINOEngine) -> None:
    # Hot, so that answers are varied whatever the model has learned.
    hot = SamplingParams(60, temperature=2.0)
    prompt = [5, 6, 7]
    answers = await answer(engine, [(prompt, replace(hot, seed=i)) for i in range(300)])
    seed, free = next(
        (i, c) for i, c in enumerate(answers) if c.finish_reason == "stop" and len(c.token_ids) > 12
    )
    how = replace(hot, seed=seed)
    length = len(free.token_ids)
    assert free.token_ids[-1] in read_model_limits(MODEL).eos_token_ids  # part of what was sampled
    cut = await engine.generate(prompt, replace(how, max_tokens=10), request_id="a")
    assert (cut.token_ids, cut.finish_reason) == (free.token_ids[:10], "length")
    exact = await engine.generate(prompt, replace(how, max_tokens=length), request_id="a")
    assert (exact.token_ids, exact.finish_reason) == (free.token_ids, "stop")
    on = await engine.generate(prompt, replace(how, max_tokens=200, ignore_eos=True), request_id="a")
    assert on.finish_reason == "length"
    assert len(on.token_ids) == 200
    assert on.token_ids[:length] == free.token_ids
    # A stop id that comes later than the end token still counts when the end token does not.
    wanted = next(i for i in on.token_ids[length:] if i not in free.token_ids)
    stop = replace(how, max_tokens=200, ignore_eos=True, stop_token_ids=(wanted,))
    stopped = await engine.generate(prompt, stop, request_id="a")
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == on.token_ids[: on.token_ids.index(wanted) + 1]
    without = await engine.generate(prompt, replace(how, logprobs=False), request_id="a")
    assert without.logprobs is None
    assert without.token_ids == free.token_ids


async def test_stop_strings_keep_every_sampled_token(engine: OpenVINOEngine) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    free = await engine.generate([1, 5, 6, 7], SamplingParams(60, seed=1, ignore_eos=True), request_id="a")
    pairs = [tokenizer.decode(free.token_ids[i : i + 2], skip_special_tokens=False) for i in range(20, 40)]
    stop = next(text for text in pairs if text and text.isascii())
    whole = tokenizer.decode(free.token_ids, skip_special_tokens=False)
    sampling = SamplingParams(60, seed=1, ignore_eos=True, stop=("no such text", stop))
    answers = await asyncio.gather(
        *(engine.generate([1, 5, 6, 7], sampling, request_id=str(i)) for i in range(4))
    )
    for completion in answers:
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        before = tokenizer.decode(completion.token_ids[:-1], skip_special_tokens=False)
        assert completion.finish_reason == "stop"
        assert completion.token_ids == free.token_ids[: len(completion.token_ids)]
        assert stop in text
        assert stop not in before
        assert whole.startswith(text)
        expected = (free.logprobs or [])[: len(completion.token_ids)]
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)
    never = SamplingParams(30, seed=1, ignore_eos=True, stop=("no such text",))
    ended = await engine.generate([1, 5, 6, 7], never, request_id="a")
    assert ended.finish_reason == "length"
    assert ended.token_ids == free.token_ids[:30]


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([], SamplingParams(5), "empty"),
        ([512], SamplingParams(5), "vocabulary"),
        ([-1], SamplingParams(5), "vocabulary"),
        ([2**40], SamplingParams(5), "vocabulary"),
        ([1], SamplingParams(0), "max_tokens"),
        ([1], SamplingParams(5, temperature=-1.0), "temperature"),
        ([1], SamplingParams(5, top_p=0.0), "top_p"),
        ([1], SamplingParams(5, top_k=0), "top_k"),
        ([1] * 4095, SamplingParams(2), "max_model_len 4096"),
    ],
)
async def test_bad_requests_hurt_only_themselves(
    engine: OpenVINOEngine, prompt: list[int], sampling: SamplingParams, message: str
) -> None:
    neighbour = asyncio.create_task(engine.generate([1, 2], SamplingParams(30, seed=1), request_id="n"))
    with pytest.raises(EngineError, match=message) as caught:
        await engine.generate(prompt, sampling, request_id="bad")
    assert type(caught.value) is EngineError
    assert (await neighbour).token_ids
    assert await engine.health()


async def test_more_work_than_the_cache_holds_queues_and_stays_exact(tmp_path: Path) -> None:
    # At most some three of these fit at once; preempting one would give wrong log-probs.
    engine = await started(tmp_path, num_kv_blocks=12, max_num_seqs=64)
    assert engine.capabilities.max_model_len == 12 * 32
    asked = requests(60, longest=90)
    answers = await answer(engine, asked)
    assert worst_logprob_error(asked, answers) < 1e-4
    with pytest.raises(EngineError, match="max_model_len 384"):
        await engine.generate([1] * 300, SamplingParams(85), request_id="a")
    # Each of these fills the cache alone.
    whole = SamplingParams(84, ignore_eos=True)
    answers = await asyncio.wait_for(answer(engine, [([1] * 300, whole)] * 3), 20)
    assert [len(c.token_ids) for c in answers] == [84] * 3
    await engine.close()


async def test_cancelling_frees_the_place_and_leaves_the_others_alone(tmp_path: Path) -> None:
    engine = await started(tmp_path, max_num_seqs=4)
    asked = requests(24)
    alone = await answer(engine, asked)
    hogs = [asyncio.create_task(engine.generate([1], LONG, request_id=f"hog{i}")) for i in range(4)]
    tasks = [asyncio.create_task(engine.generate(p, s, request_id=str(i))) for i, (p, s) in enumerate(asked)]
    await asyncio.sleep(0.1)
    assert not any(task.done() for task in tasks)
    for hog in hogs:
        hog.cancel()
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 20)
    assert [c.token_ids for c in answers] == [c.token_ids for c in alone]
    assert all(hog.cancelled() for hog in hogs)
    await engine.close()


async def test_abort_returns_what_was_sampled(tmp_path: Path) -> None:
    engine = await started(tmp_path, max_num_seqs=2)
    await engine.generate([1], SamplingParams(2, seed=1), request_id="first")  # what comes first is slow

    long = SamplingParams(4000, ignore_eos=True, seed=1)
    tasks = [asyncio.create_task(engine.generate([1], long, request_id=str(i))) for i in range(4)]
    watched = SamplingParams(4000, ignore_eos=True, seed=1, stop=("no such text",))
    tasks.append(asyncio.create_task(engine.generate([1], watched, request_id="4")))
    await asyncio.sleep(0.2)  # for some tokens; 4,000 take more than a second
    for i in (0, 1, 3):
        await engine.abort(str(i))
    first, second, queued = await asyncio.gather(tasks[0], tasks[1], tasks[3])
    await asyncio.sleep(0.2)
    await engine.abort("2")
    await engine.abort("4")
    third, fifth = await asyncio.wait_for(asyncio.gather(tasks[2], tasks[4]), 10)
    await engine.abort("unknown")
    for part in (first, second, third, fifth):
        assert part.finish_reason == "abort"
        assert 0 < len(part.token_ids) == len(part.logprobs or []) < 4000
    assert queued.finish_reason == "abort"
    assert queued.token_ids == []
    parts = sorted((first, second, third, fifth), key=lambda c: len(c.token_ids))
    assert all(parts[-1].token_ids[: len(p.token_ids)] == p.token_ids for p in parts)
    await engine.close()


async def test_a_killed_worker_is_replaced(engine: OpenVINOEngine) -> None:
    before = await engine.generate([1, 2], SamplingParams(30, seed=1), request_id="a")
    for _ in range(2):
        tasks = [asyncio.create_task(engine.generate([1], LONG, request_id=str(i))) for i in range(8)]
        await asyncio.sleep(0.05)
        pid = engine.worker_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(isinstance(r, EngineUnavailableError) for r in results)
        assert "SIGKILL" in str(results[0])
        assert engine.worker_pid is None
        with pytest.raises(EngineUnavailableError, match="SIGKILL"):
            await engine.generate([1], LONG, request_id="a")
        assert all(await asyncio.gather(*(engine.health() for _ in range(3))))
        assert engine.worker_pid not in (None, pid)
        after = await engine.generate([1, 2], SamplingParams(30, seed=1), request_id="a")
        assert after.token_ids == before.token_ids


async def test_restarts_back_off(engine: OpenVINOEngine) -> None:
    for expected in (True, False):
        if engine.worker_pid is not None:
            os.kill(engine.worker_pid, signal.SIGKILL)
            await eventually(lambda: engine.worker_pid is None)
        assert await engine.health() is expected
    async with asyncio.timeout(60):
        while not await engine.health():
            await asyncio.sleep(0.05)


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
    task = asyncio.create_task(engine.generate([1], LONG, request_id="a"))
    await asyncio.sleep(0.05)
    await engine.close()
    await engine.close()
    with pytest.raises(EngineUnavailableError):
        await task
    assert not running(pid)
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


@pytest.mark.parametrize(
    ("file", "content", "cause"),
    [
        ("openvino_model.bin", None, "Empty weights data in bin file or bin file cannot be found!"),
        ("openvino_model.bin", b"x" * 1000, "Incorrect weights in bin file!"),
        ("openvino_model.xml", b"<net>", "Unable to read the model"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_line(
    tmp_path: Path, file: str, content: bytes | None, cause: str
) -> None:
    folder, log = tmp_path / "model", tmp_path / "engine.log"
    folder.mkdir()
    for path in MODEL.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_bytes(content)
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
        assert running(worker)
        parent.kill()
    deadline = time.monotonic() + 5
    while running(worker):
        assert time.monotonic() < deadline, "the worker is still there"
        time.sleep(0.01)
