"""Weights that change in the middle of rollouts: nothing sampled is lost, each token is of its version."""

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from rollstream.config.load import compose
from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Engine
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.openvino import OpenVINOEngine
from rollstream.engine.openvino_weights import lay_out_weights, read_safetensors
from rollstream.engine.sglang import SGLangEngine
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.generation.plan import GenerationPlan
from rollstream.generation.run import generate
from rollstream.store.validate import validate_run
from rollstream.trajectory import Completion, SamplingParams
from tests.faults.runs import rows_of
from tests.integration.test_agents import FUNCTION
from tests.integration.test_generation import config, write_sums
from tests.support.forward import logprobs_under
from tests.support.serving import serve
from tests.support.until import PATIENCE_S, until

torch = pytest.importorskip("torch")
pytest.importorskip("openvino_genai")

ROLLOUTS = 64
IN_FLIGHT = 16
"""Of a run that is updated: it goes on for several waves, so that an update comes in the middle of one."""
LONG = SamplingParams(400, ignore_eos=True)
NEVER_ENDS = SamplingParams(3500, ignore_eos=True)
ENGINES: dict[str, dict[str, Any]] = {
    "openvino": {"num_threads": 1},
    "hf": {"num_threads": 1, "num_kv_blocks": 1024, "max_num_seqs": 64},
}


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders of the model's weights by version: 0 as shipped, 1 to 3 others, as a trainer saves them."""
    from safetensors.numpy import save_file

    folders = {0: MODEL_PATH}
    shipped = read_safetensors(MODEL_PATH)
    for version in (1, 2, 3):
        noise = np.random.default_rng(version)
        folders[version] = tmp_path_factory.mktemp(f"step{version}")
        weights = {
            name: (tensor + 0.1 * tensor.std() * noise.standard_normal(tensor.shape)).astype(np.float32)
            for name, tensor in shipped.items()
        }
        save_file(weights, folders[version] / "model.safetensors", metadata={"format": "pt"})
        for name in ("config.json", "generation_config.json"):
            (folders[version] / name).write_bytes((MODEL_PATH / name).read_bytes())
    return folders


@pytest.fixture(scope="module")
def modules(steps: dict[int, Path]) -> dict[int, Any]:
    """The same in transformers, float32."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return {
        version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        for version, folder in steps.items()
    }


def versions_of(runs: list[tuple[int, int]], length: int) -> list[int]:
    versions = [0] * length
    for start, version in runs:
        versions[start:] = [version] * (length - start)
    return versions


def worst_error(
    modules: dict[int, Any],
    prompt: list[int],
    response: list[int],
    logprobs: list[float],
    versions: list[int],
    mask: list[int] | None = None,
) -> float:
    """Of the log-probs, each under the version of its token."""
    worst = 0.0
    sampled = np.array(mask or [1] * len(response), bool)
    for version in set(versions):
        here = (np.array(versions) == version) & sampled
        if here.any():
            difference = np.abs(logprobs_under(modules[version], prompt, response) - np.array(logprobs))[here]
            worst = max(worst, float(difference.max()))
    return worst


def completion_error(modules: dict[int, Any], prompt: list[int], answer: Completion) -> float:
    versions = versions_of(answer.policy_versions, len(answer.token_ids))
    return worst_error(modules, prompt, answer.token_ids, answer.logprobs or [], versions)


Cut = tuple[str, list[int], list[int], int]
"""Of a request that an update interrupted: its id, its prompt, what it had, and the version that came."""


def step_of(version: int) -> int:
    """Which of the weights a run has at a version: there are three to change to."""
    return (version - 1) % 3 + 1 if version else 0


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ContinuingEngine]:
    """The engines of runs."""
    engines: list[ContinuingEngine] = []
    create = GenerationPlan.create_engine

    def create_and_keep(self: GenerationPlan, log_dir: Path) -> Engine:
        engine = create(self, log_dir)
        assert isinstance(engine, ContinuingEngine)
        engines.append(engine)
        return engine

    monkeypatch.setattr(GenerationPlan, "create_engine", create_and_keep)
    return engines


@pytest.mark.parametrize(
    ("name", "loop"),
    [
        ("openvino", "single_turn_agent"),
        ("hf", "tool_agent"),
        pytest.param("openvino", "tool_agent", marks=pytest.mark.soak),
        pytest.param("hf", "single_turn_agent", marks=pytest.mark.soak),
    ],
)
async def test_a_run_goes_on_over_new_weights(
    name: str,
    loop: str,
    steps: dict[int, Path],
    modules: dict[int, Any],
    tmp_path: Path,
    made: list[ContinuingEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stored versions change exactly where each rollout was cut, what it had stays, log-probs are exact."""
    (tmp_path / "tools.py").write_text(FUNCTION)
    sums = write_sums(tmp_path / "sums.jsonl", [(11 + i, 20 + 37 * i % 79) for i in range(ROLLOUTS)])
    rollout = {"name": name, "n": 1, "response_length": 200, "engine_kwargs": ENGINES[name]}
    if loop == "tool_agent":
        tools = str(tmp_path / "tools.py")
        rollout |= {"agent": {"default_agent_loop": loop}, "multi_turn": {"function_tool_path": tools}}
    else:
        rollout |= {"ignore_eos": True}
    tree = config(
        tmp_path / "run",
        sums,
        actor_rollout_ref__rollout=rollout,
        generation__seed=None,
        generation__max_in_flight=IN_FLIGHT,
        data__max_prompt_length=400,
    )
    cuts: list[Cut] = []

    run = asyncio.create_task(generate(compose(layers=[tree])))
    await until(lambda: bool(made) or run.done())
    engine = made[0]
    inner = engine.engine
    load = inner.update_weights

    async def load_and_note(source: str, version: int) -> None:
        await load(source, version)
        for flight in engine._requests.values():
            ids = flight.partial.result("abort").token_ids
            prompt = flight.partial.prompt_ids
            cuts.append((flight.request_id, prompt[: len(prompt) - len(ids)], ids, version))

    monkeypatch.setattr(inner, "update_weights", load_and_note)
    # One update after the other, each a little later, until enough have been cut in the middle: how far
    # requests are only shows when they are cut.
    pause = 0.05
    for version in range(1, 20):
        await until(lambda: engine.inside >= IN_FLIGHT // 2 or run.done())
        await asyncio.wait([run], timeout=pause)
        if run.done() or len({request_id for request_id, _, ids, _ in cuts if ids}) >= ROLLOUTS // 4:
            break
        with contextlib.suppress(
            EngineUnavailableError
        ):  # what was cut was all that was left: the run has ended
            await engine.update_weights(str(steps[step_of(version)]), version)
        pause *= 1.5
    result = await run
    assert (result.completed, result.failed) == (ROLLOUTS, 0)
    assert validate_run(tmp_path / "run").sound
    rows = {row["index"]: row for row in rows_of(tmp_path / "run")}
    assert len(rows) == ROLLOUTS
    with_tokens = [cut for cut in cuts if cut[2]]
    assert len({request_id for request_id, *_ in with_tokens}) >= ROLLOUTS // 8
    expected: dict[int, list[tuple[int, int]]] = {}
    for request_id, prompt, ids, version in cuts:
        index, _, attempt = map(int, request_id.split("-"))
        assert attempt == 1  # nothing was charged
        row = rows[index]
        stored = row["prompt_ids"] + row["response_ids"]
        assert stored[: len(prompt) + len(ids)] == prompt + ids
        expected.setdefault(index, []).append((len(prompt) + len(ids) - len(row["prompt_ids"]), version))
    worst = 0.0
    for index, row in rows.items():
        length = len(row["response_ids"])
        runs = [(run["start"], run["version"]) for run in row["policy_versions"]]
        versions = versions_of(runs, length)
        for i, sampled in enumerate(row["response_mask"]):
            # The last update that had come when this token was sampled.
            came = [version for at, version in expected.get(index, []) if at <= i]
            assert not sampled or not came or versions[i] >= came[-1]
            later = [version for at, version in expected.get(index, []) if at > i]
            assert not sampled or not later or versions[i] < later[0]
        worst = max(
            worst,
            worst_error(
                {version: modules[step_of(version)] for version in set(versions)},
                *(row["prompt_ids"], row["response_ids"], row["response_logprobs"], versions),
                row["response_mask"],
            ),
        )
        assert row["response_mask"].count(1) <= 200
        if loop == "single_turn_agent":
            assert (length, row["finish_reason"]) == (200, "length")
    assert worst < 1e-3, worst


@pytest.mark.parametrize("policy", ["restart", "abort"])
async def test_a_run_may_begin_anew_or_end(
    policy: str, steps: dict[int, Path], tmp_path: Path, made: list[ContinuingEngine]
) -> None:
    sums = write_sums(tmp_path / "sums.jsonl", [(11 + i, 20) for i in range(8)])
    rollout = {
        "response_length": 900,
        "ignore_eos": True,
        "on_weight_update": policy,
        "engine_kwargs": ENGINES["openvino"],
    }
    tree = config(tmp_path / "run", sums, actor_rollout_ref__rollout=rollout, generation__seed=None)
    run = asyncio.create_task(generate(compose(layers=[tree])))
    await until(lambda: run.done() or (bool(made) and made[0].inside == 8))
    inner = made[0].engine
    assert isinstance(inner, OpenVINOEngine)
    await some_are_sampled(inner)
    with contextlib.suppress(EngineUnavailableError):  # when all were ended, so is the run
        await made[0].update_weights(str(steps[1]), 1)
    assert (await run).completed == 8
    rows = rows_of(tmp_path / "run")
    for row in rows:
        ((start, version),) = [(one["start"], one["version"]) for one in row["policy_versions"]]
        assert start == 0
        if policy == "restart":
            assert (version, len(row["response_ids"]), row["finish_reason"]) == (1, 900, "length")
        else:
            assert (version, row["finish_reason"]) == (0, "aborted")
            assert 0 < len(row["response_ids"]) < 900


# The OpenVINO engine by itself


async def started(tmp_path: Path, **kwargs: Any) -> OpenVINOEngine:
    engine = OpenVINOEngine(
        MODEL_PATH, log_path=tmp_path / "engine.log", engine_kwargs={"num_threads": 1, **kwargs}
    )
    await engine.start()
    return engine


def ask(engine: Engine, count: int, how: SamplingParams) -> "list[asyncio.Task[Completion]]":
    return [asyncio.create_task(engine.generate([5 + i, 6, 7], how, request_id=str(i))) for i in range(count)]


async def some_are_sampled(engine: OpenVINOEngine) -> None:
    """Waits until requests in flight have tokens, which only an aborted one tells."""
    while True:
        probe = asyncio.create_task(engine.generate([9], NEVER_ENDS, request_id="probe"))
        await asyncio.sleep(0.1)
        await engine.abort("probe")
        if len((await probe).token_ids) > 5:
            return


async def test_openvino_ends_what_has_tokens_and_begins_the_rest_anew(
    steps: dict[int, Path], modules: dict[int, Any], tmp_path: Path
) -> None:
    engine = await started(tmp_path, max_num_seqs=4)
    asked = ask(engine, 3, NEVER_ENDS)
    await some_are_sampled(engine)
    asked += ask(engine, 9, LONG)  # one of which runs at once
    await engine.update_weights(str(steps[1]), 5)
    answers = await asyncio.gather(*asked)
    assert engine.version == 5
    by_version = {0: modules[0], 5: modules[1]}
    for i, answer in enumerate(answers):
        assert completion_error(by_version, [5 + (i if i < 3 else i - 3), 6, 7], answer) < 1e-4
    assert [(answer.finish_reason, answer.policy_versions) for answer in answers[:3]] == [
        ("abort", [(0, 0)])
    ] * 3
    assert [(answer.finish_reason, answer.policy_versions) for answer in answers[4:]] == [
        ("length", [(0, 5)])
    ] * 8
    assert engine.capabilities.update_weights
    await engine.close()


async def test_openvino_takes_an_export_and_keeps_its_own_copy(
    steps: dict[int, Path], modules: dict[int, Any], tmp_path: Path
) -> None:
    export = tmp_path / "export"
    export.mkdir()
    lay_out_weights(MODEL_PATH, steps[2], export)
    engine = await started(tmp_path)
    await engine.update_weights(str(export), 1)
    for file in export.iterdir():
        file.write_bytes(b"others write here now")
    # A worker that is killed begins again with the weights and the version that it had.
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.worker_pid is None)
    assert await engine.health()
    assert engine.worker_pid != pid
    answer = await engine.generate([5, 6], LONG, request_id="a")
    assert answer.policy_versions == [(0, 1)]
    assert completion_error({1: modules[2]}, [5, 6], answer) < 1e-4
    # An update also brings back one that is dead.
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.worker_pid is None)
    await engine.update_weights(str(steps[3]), 2)
    answer = await engine.generate([5, 6], LONG, request_id="a")
    assert completion_error({2: modules[3]}, [5, 6], answer) < 1e-4
    copies = Path(engine._load.model_path)
    assert copies.is_dir()
    await engine.close()
    assert not copies.exists()


async def test_weights_that_cannot_be_loaded_interrupt_nobody(steps: dict[int, Path], tmp_path: Path) -> None:
    engine = await started(tmp_path)
    asked = ask(engine, 4, LONG)
    await some_are_sampled(engine)
    export, empty = tmp_path / "export", tmp_path / "empty"
    export.mkdir()
    empty.mkdir()
    lay_out_weights(MODEL_PATH, steps[1], export)
    with (export / "openvino_model.bin").open("r+b") as file:
        file.truncate(1000)
    for source, cause in ((tmp_path / "no", "neither"), (empty, "neither"), (export, "cannot load")):
        with pytest.raises(EngineError, match=cause) as caught:
            await engine.update_weights(str(source), 9)
        assert not isinstance(caught.value, EngineUnavailableError)
    assert [answer.finish_reason for answer in await asyncio.gather(*asked)] == ["length"] * 4
    assert {answer.result().policy_versions[0] for answer in asked} == {(0, 0)}
    assert engine.version == 0
    await engine.close()


async def test_updates_at_bad_moments(
    steps: dict[int, Path], modules: dict[int, Any], tmp_path: Path
) -> None:
    engine = OpenVINOEngine(MODEL_PATH, log_path=tmp_path / "log", engine_kwargs={"num_threads": 1})
    with pytest.raises(EngineUnavailableError, match="not started"):
        await engine.update_weights(str(steps[1]), 1)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    # During the start it waits; a second one waits for the first; a cancelled one has been, or has not.
    updates = [asyncio.create_task(engine.update_weights(str(steps[v]), v)) for v in (1, 2)]
    await starting
    await asyncio.gather(*updates)
    assert engine.version == 2
    update = asyncio.create_task(engine.update_weights(str(steps[3]), 3))
    await asyncio.sleep(0.05)
    update.cancel()
    await asyncio.wait({update})
    answer = await engine.generate([5, 6], LONG, request_id="a")
    assert answer.policy_versions == [(0, engine.version)]
    assert completion_error(modules, [5, 6], answer) < 1e-4
    # The worker is killed, or the engine closed, in the middle of one.
    asked = ask(engine, 2, NEVER_ENDS)
    version, pid = engine.version, engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    update = asyncio.create_task(engine.update_weights(str(steps[1]), 7))
    await until(lambda: bool(engine._life.backend and engine._life.backend._loading))  # it was told
    os.kill(pid, signal.SIGKILL)
    results = await asyncio.gather(update, *asked, return_exceptions=True)
    assert [type(result) for result in results] == [EngineUnavailableError] * 3
    assert await engine.health()
    answer = await engine.generate([5, 6], LONG, request_id="a")
    assert answer.policy_versions == [(0, version)]
    assert completion_error(modules, [5, 6], answer) < 1e-4
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    update = asyncio.create_task(engine.update_weights(str(steps[1]), 8))
    await asyncio.sleep(0.1)
    await engine.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        await update
    assert engine.worker_pid is None


async def test_a_worker_that_loads_for_ever_is_killed(
    steps: dict[int, Path], modules: dict[int, Any], tmp_path: Path
) -> None:
    engine = await started(tmp_path)
    engine._start_timeout = 0.2
    pid = engine.worker_pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(EngineUnavailableError, match=r"was not ready within 0\.2 s"):
        await engine.update_weights(str(steps[1]), 1)
    engine._start_timeout = PATIENCE_S
    assert await engine.health()
    answer = await engine.generate([5, 6], LONG, request_id="a")
    assert answer.policy_versions == [(0, 0)]
    assert completion_error(modules, [5, 6], answer) < 1e-4
    await engine.close()


# A pool of servers


async def test_a_pool_of_servers_gets_new_weights(
    steps: dict[int, Path], modules: dict[int, Any], tmp_path: Path
) -> None:
    """Two `rollstream serve`, updated by the client in the middle of 64 generations; then one restarts."""
    options = ("--engine-kwargs", "num_threads=1", "--weights", *map(str, steps.values()), str(tmp_path))
    with serve(*options, log=tmp_path / "a") as one:
        with serve(*options, log=tmp_path / "b") as two:
            engine = ContinuingEngine(SGLangEngine([one.url, two.url], model_path=str(MODEL_PATH)))
            await engine.start()
            asked = ask(engine, ROLLOUTS, LONG)
            # What comes behind them all has an answer of 20 tokens: those before it have some, too.
            probes = [
                engine.generate([9], replace(LONG, max_tokens=20), request_id=f"p{i}") for i in range(2)
            ]
            await asyncio.gather(*probes)
            await engine.update_weights(str(steps[1]), 1)
            answers = await asyncio.gather(*asked)
            for i, answer in enumerate(answers):
                assert (len(answer.token_ids), answer.finish_reason) == (400, "length")
                assert completion_error(modules, [5 + i, 6, 7], answer) < 1e-3
            versions = [tuple(version for _, version in answer.policy_versions) for answer in answers]
            # A server may be done before the other has begun; what had tokens at the swap kept them.
            assert (0, 1) in versions and set(versions) <= {(0,), (0, 1), (1,)}
            # A folder that one of them cannot have: both say no, and the old weights stand.
            with pytest.raises(EngineError, match="none of 2 replicas could load"):
                await engine.update_weights(str(tmp_path / "nothing"), 2)
            answers = await asyncio.gather(*ask(engine, 8, LONG))
            assert {tuple(answer.policy_versions) for answer in answers} == {((0, 1),)}
            port = two.url.rpartition(":")[2]
        # One is down: the other one is updated, and the first one before it gets work again.
        await engine.update_weights(str(steps[2]), 2)
        answers = await asyncio.gather(*ask(engine, 8, LONG))
        assert {tuple(answer.policy_versions) for answer in answers} == {((0, 2),)}
        with serve(*options, "--port", port, log=tmp_path / "b"):
            version = "0"
            async with asyncio.timeout(PATIENCE_S), aiohttp.ClientSession() as session:
                while version != "2":
                    answers = await asyncio.gather(*ask(engine, 8, LONG))
                    assert {tuple(answer.policy_versions) for answer in answers} == {((0, 2),)}
                    async with session.get(f"http://127.0.0.1:{port}/get_weight_version") as reply:
                        version = (await reply.json())["weight_version"]
            for i, answer in enumerate(answers):
                assert completion_error(modules, [5 + i, 6, 7], answer) < 1e-3
            await engine.close()
