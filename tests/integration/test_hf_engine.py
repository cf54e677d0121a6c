"""The `hf` engine with the demo model: real steps, real thread deaths."""

import asyncio
import copy
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import EngineLoad
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.hf import HFEngine
from rollstream.engine.hf_model import load_module
from rollstream.engine.load import ask_load
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams
from tests.support.forward import Asked, answer, error_of, logits_of, requests, worst_error
from tests.support.until import until

torch = pytest.importorskip("torch")
pytest.importorskip("psutil")

LONG = SamplingParams(3000, ignore_eos=True, seed=1)
EOS = 2


async def started(model: Any = None, **kwargs: Any) -> HFEngine:
    # A small cache, for speed: 64 x 8 blocks of 32 tokens.
    given = {"num_threads": 1, "num_kv_blocks": 512} | kwargs
    engine = HFEngine(MODEL_PATH, model=model, engine_kwargs=given)
    await engine.start()
    return engine


@pytest.fixture
async def engine() -> AsyncIterator[HFEngine]:
    engine = await started()
    yield engine
    await engine.close()


@pytest.fixture
def module() -> Any:
    torch.set_num_threads(1)
    return load_module(str(MODEL_PATH), dtype="auto", device="cpu", attn_implementation="")


@pytest.fixture
def other(module: Any) -> Any:
    """The model with other weights."""
    other = copy.deepcopy(module)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=noise)
    return other


def sampled(engine: HFEngine) -> list[int]:
    assert engine._life.backend is not None
    return [len(request.sampled) for request in engine._life.backend.in_flight.values()]


async def nothing_is_left(engine: HFEngine) -> None:
    """No request, and no block of the manager's cache."""
    batch = engine._life.backend
    assert batch is not None
    assert not batch._running and not batch._waiting and not batch.in_flight
    assert batch._free_blocks == batch._settings.cache.blocks
    cache = batch._manager.batch_processor.cache
    await until(lambda: cache.get_num_free_blocks() == cache.num_blocks)


SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}


@pytest.mark.parametrize(
    ("kind", "more", "longest"),
    [
        ("LlamaConfig", {}, 512),
        ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, 512),
        ("MistralConfig", {"sliding_window": 60}, 60),
        (
            "Gemma3TextConfig",
            {"sliding_window": 60, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
            60,
        ),
    ],
)
async def test_other_architectures_are_exact_as_far_as_they_may_go(
    kind: str, more: dict[str, Any], longest: int
) -> None:
    import transformers

    torch.manual_seed(1)
    module = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, kind)(**SMALL, **more)
    ).eval()
    engine = await started(module, max_num_batched_tokens=40, block_size=16)
    assert engine.capabilities.max_model_len == longest
    asked = [
        (
            [3 + (7 * i + j) % 290 for j in range(1 + 3 * i)],
            SamplingParams(59 - 3 * i, ignore_eos=True, seed=i),
        )
        for i in range(16)
    ]
    assert worst_error(module, asked, await answer(engine, asked)) < 1e-4
    await nothing_is_left(engine)
    await engine.close()


async def test_the_engine_says_how_busy_it_is() -> None:
    engine = await started(max_num_seqs=2)
    assert await ask_load(engine) == EngineLoad(0, 0, 0.0, 0)
    how = SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    tasks = [asyncio.create_task(engine.generate([5] * 4, how, request_id=str(i))) for i in range(6)]
    await asyncio.sleep(0)
    load = await ask_load(engine)
    assert load is not None
    assert (load.running, load.queued, load.preemptions) == (2, 4, 0)
    assert load.kv_usage is not None
    assert 0 < load.kv_usage <= 1
    await asyncio.gather(*tasks)
    assert await ask_load(engine) == EngineLoad(0, 0, 0.0, 0)
    await engine.close()
    assert await ask_load(engine) is None


class Trouble:
    """A hook on the model that breaks its next steps."""

    def __init__(self, module: Any) -> None:
        self.error: BaseException | None = None
        module.register_forward_pre_hook(self._raise)

    def __deepcopy__(self, memo: object) -> "Trouble":
        return self  # the engine's copy of the modules gets the same one

    def _raise(self, module: Any, args: Any) -> None:
        if self.error is not None:
            raise self.error


async def test_a_dead_thread_is_replaced(module: Any) -> None:
    trouble = Trouble(module)
    engine = await started(module)
    asked = requests(12)
    before = await answer(engine, asked)
    for error in (MemoryError("no room for a step"), RuntimeError("lost")):
        tasks = [asyncio.create_task(engine.generate([1], LONG, request_id=str(i))) for i in range(40)]
        await until(lambda: max(sampled(engine), default=0) > 3)
        trouble.error = error
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 30)
        assert all(isinstance(r, EngineUnavailableError) for r in results)
        for result in results:
            assert f"thread ended: {type(error).__name__}: {error}" in str(result)
            assert isinstance(result, BaseException) and result.__cause__ is error
        with pytest.raises(EngineUnavailableError, match="thread ended"):
            await engine.generate([1], LONG, request_id="a")
        trouble.error = None
        assert all(await asyncio.gather(*(engine.health() for _ in range(3))))
        after = await answer(engine, asked)
        assert [c.token_ids for c in after] == [c.token_ids for c in before]
        assert worst_error(module, asked, after) < 1e-4
        await nothing_is_left(engine)
    await engine.close()


async def test_restarts_back_off(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.engine.embedded._RESTART_PAUSE_S", 1000.0)
    trouble = Trouble(module)
    engine = await started(module)
    trouble.error = RuntimeError("again")
    for expected in (True, False):
        with pytest.raises(EngineUnavailableError):
            await engine.generate([1], LONG, request_id="a")
        assert await engine.health() is expected
    trouble.error = None
    engine._life.worked()  # the time has come
    assert await engine.health()
    assert (await engine.generate([1], SamplingParams(3), request_id="a")).token_ids
    await engine.close()


async def test_broken_weights_are_an_error_and_not_a_sample(module: Any) -> None:
    engine = await started(module)
    state = {name: tensor * torch.nan for name, tensor in module.state_dict().items()}
    good = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    await engine.load_state_dict(state, 1)
    with pytest.raises(EngineError, match="logits are not numbers"):
        await engine.generate([1], LONG, request_id="a")
    await engine.load_state_dict(good, 2)
    assert (await engine.generate([1], SamplingParams(3), request_id="a")).policy_versions == [(0, 2)]
    await engine.close()


async def test_close_ends_the_thread_and_what_is_in_flight() -> None:
    threads = threading.active_count()
    engine = await started(max_num_seqs=4)
    tasks = [asyncio.create_task(engine.generate([1], LONG, request_id=str(i))) for i in range(8)]
    await until(lambda: max(sampled(engine), default=0) > 3)
    await engine.close()
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineUnavailableError) for r in results)
    assert not await engine.health()
    with pytest.raises(EngineUnavailableError):
        await engine.generate([1], LONG, request_id="b")
    await until(lambda: threading.active_count() <= threads)


async def test_a_cancelled_start_leaves_nothing_behind() -> None:
    threads = threading.active_count()
    for turns in (0, 1, 5, 50):
        engine = HFEngine(MODEL_PATH, engine_kwargs={"num_kv_blocks": 64})
        task = asyncio.create_task(engine.start())
        for _ in range(turns):
            await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()
        assert not await engine.health()
    await until(lambda: threading.active_count() <= threads)


async def test_an_engine_that_nobody_closed_ends_with_its_last_reference() -> None:
    engine = await started()
    assert (await engine.generate([1], SamplingParams(3), request_id="a")).token_ids
    assert engine._life.backend is not None
    thread = engine._life.backend._manager._generation_thread
    assert thread.is_alive()
    del engine
    gc.collect()
    await until(lambda: not thread.is_alive())


NOT_CLOSED = """
import asyncio
from rollstream.demo import MODEL_PATH
from rollstream.engine.hf import HFEngine
from rollstream.trajectory import SamplingParams

async def main():
    engine = HFEngine(MODEL_PATH, engine_kwargs={"num_threads": 1, "num_kv_blocks": 512})
    await engine.start()
    sampling = SamplingParams(3000, ignore_eos=True)
    tasks = [asyncio.create_task(engine.generate([1], sampling, request_id=str(i))) for i in range(4)]
    while not all(len(one.sampled) > 3 for one in engine._life.backend.in_flight.values()):
        await asyncio.sleep(0.01)
    raise RuntimeError("something else went wrong")

asyncio.run(main())
"""


@pytest.mark.usefixtures("processes_find_torch")
def test_a_program_that_fails_while_it_generates_still_ends() -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOT_CLOSED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == "RuntimeError: something else went wrong"


async def test_what_cannot_be_loaded_is_one_line(tmp_path: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((MODEL_PATH / name).read_bytes())
    engine = HFEngine(tmp_path)
    with pytest.raises(EngineError, match="engine 'hf' cannot load") as caught:
        await engine.start()
    assert "\n" not in str(caught.value)
    await engine.close()


async def test_a_weight_that_the_folder_lacks_is_not_made_up(module: Any, tmp_path: Any) -> None:
    state = {name: tensor for name, tensor in module.state_dict().items() if "layers.1.mlp" not in name}
    module.save_pretrained(tmp_path, state_dict=state)
    engine = HFEngine(tmp_path)
    with pytest.raises(EngineError, match=r"lacks .*layers\.1\.mlp"):
        await engine.start()
    await engine.close()
    engine = await started()
    with pytest.raises(EngineError, match=r"missing: .*layers\.1\.mlp"):
        await engine.update_weights(str(tmp_path), 1)
    assert engine.version == 0
    await engine.close()


async def test_a_cache_that_does_not_fit_is_said_at_start() -> None:
    engine = HFEngine(MODEL_PATH, engine_kwargs={"num_kv_blocks": 10**9})
    with pytest.raises(EngineError, match="cannot make its KV cache: Memory footprint"):
        await engine.start()
    await engine.close()


async def test_another_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import configuration_utils
    from transformers.generation.continuous_batching import continuous_api

    engine = HFEngine(MODEL_PATH, engine_kwargs={"num_kv_blocks": 64})
    with monkeypatch.context() as patch:
        patch.delattr(continuous_api.ContinuousBatchingManager, "cancel_request")
        with pytest.raises(EngineError, match=r"transformers 5\.10, .* has no cancel_request"):
            await engine.start()
    with monkeypatch.context() as patch:
        config = configuration_utils.ContinuousBatchingConfig
        patch.setattr(configuration_utils, "ContinuousBatchingConfig", lambda page_size: config())
        with pytest.raises(EngineError, match=r"transformers 5\.10, .* unexpected keyword"):
            await engine.start()
    await engine.start()
    assert (await engine.generate([1], SamplingParams(3), request_id="a")).token_ids
    await engine.close()


# Weights that change.


def in_flight_at_the_swap() -> Asked:
    return [
        (prompt, SamplingParams(60, seed=i, ignore_eos=True)) for i, (prompt, _) in enumerate(requests(64))
    ]


async def swapped(other: Any, **kwargs: Any) -> tuple[HFEngine, list[Completion]]:
    """64 rollouts, with other weights in the middle of each."""
    engine = await started(max_num_seqs=64, **kwargs)
    tasks = [
        asyncio.create_task(engine.generate(prompt, how, request_id=str(i)))
        for i, (prompt, how) in enumerate(in_flight_at_the_swap())
    ]
    await until(lambda: min(sampled(engine), default=0) >= 5)
    at_least = sampled(engine)
    assert not any(task.done() for task in tasks)
    await engine.load_state_dict(other.state_dict(), 7)
    assert engine.version == 7
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 120)
    for least, completion in zip(at_least, answers, strict=True):
        starts = [start for start, _ in completion.policy_versions]
        assert starts[0] == 0
        assert all(least <= start < 60 for start in starts[1:])
    return engine, answers


async def test_a_swap_aborts_and_the_caller_goes_on_exactly(module: Any, other: Any) -> None:
    engine, parts = await swapped(other)
    asked = in_flight_at_the_swap()
    assert {c.finish_reason for c in parts} == {"abort"}
    assert all(c.policy_versions == [(0, 0)] for c in parts)
    assert worst_error(module, asked, parts) < 1e-4
    rest = [
        (prompt + part.token_ids, replace(how, max_tokens=60 - len(part.token_ids)))
        for (prompt, how), part in zip(asked, parts, strict=True)
    ]
    answers = await answer(engine, rest)
    assert all(c.policy_versions == [(0, 7)] for c in answers)
    assert worst_error(other, rest, answers) < 1e-4
    assert worst_error(module, rest, answers) > 0.1  # the weights do differ
    await nothing_is_left(engine)
    await engine.close()


async def test_a_kept_cache_goes_on_and_samples_from_new_weights_over_old_keys(
    module: Any, other: Any
) -> None:
    engine, answers = await swapped(other, keep_cache=True)
    off = 0.0
    for (prompt, how), completion in zip(in_flight_at_the_swap(), answers, strict=True):
        ids, logprobs = completion.token_ids, completion.logprobs or []
        ((_, old), (start, new)) = completion.policy_versions
        assert (len(ids), old, new) == (60, 0, 7)
        assert error_of(logits_of(module, prompt, ids)[:start], how, ids[:start], logprobs[:start]) < 1e-4
        with torch.no_grad():
            keys = module(torch.tensor([prompt + ids[: start - 1]]), use_cache=True).past_key_values
            mixed = other(torch.tensor([ids[start - 1 : -1]]), past_key_values=keys).logits[0]
        assert error_of(mixed, how, ids[start:], logprobs[start:]) < 1e-4
        off = max(off, error_of(logits_of(other, prompt, ids)[start:], how, ids[start:], logprobs[start:]))
    assert off > 0.01  # which a fresh forward pass does not give
    await nothing_is_left(engine)
    await engine.close()


async def test_a_prompt_that_was_seen_before_is_computed_anew(engine: HFEngine, other: Any) -> None:
    asked = [([5] * 100 + [i], SamplingParams(10, seed=i, ignore_eos=True)) for i in range(8)]
    await answer(engine, asked)
    await engine.load_state_dict(other.state_dict(), 1)
    assert worst_error(other, asked, await answer(engine, asked)) < 1e-4


async def test_weights_come_from_a_folder(engine: HFEngine, other: Any, tmp_path: Any) -> None:
    other.save_pretrained(tmp_path / "step1")
    await engine.update_weights(str(tmp_path / "step1"), 1)
    asked = requests(8)
    answers = await answer(engine, asked)
    assert all(c.policy_versions == [(0, 1)] for c in answers)
    assert worst_error(other, asked, answers) < 1e-4
    with pytest.raises(EngineError, match=r"cannot load .*nothing"):
        await engine.update_weights(str(tmp_path / "nothing"), 2)
    with pytest.raises(EngineError, match=r"missing: .* and 22 more"):
        await engine.load_state_dict({"model.embed_tokens.weight": torch.zeros(512, 128)}, 2)
    assert engine.version == 1
    assert [c.token_ids for c in await answer(engine, asked)] == [c.token_ids for c in answers]


async def test_new_weights_outlive_the_thread(module: Any, other: Any) -> None:
    trouble = Trouble(module)
    engine = await started(module)
    await engine.load_state_dict(other.state_dict(), 3)
    trouble.error = RuntimeError("dead")
    with pytest.raises(EngineUnavailableError):
        await engine.generate([1], LONG, request_id="a")
    trouble.error = None
    assert await engine.health()
    asked = requests(8)
    answers = await answer(engine, asked)
    assert all(c.policy_versions == [(0, 3)] for c in answers)
    assert worst_error(other, asked, answers) < 1e-4
    await engine.close()


def so_far(continuing: ContinuingEngine, engine: HFEngine) -> list[int]:
    """Tokens of each request, over all pieces."""
    assert engine._life.backend is not None
    before = {one.request_id: len(one.partial) for one in continuing._requests.values()}
    running = engine._life.backend.in_flight
    return [before[name] + len(request.sampled) for name, request in running.items()]


async def test_a_trainer_steps_its_own_model_between_the_engines_steps(module: Any) -> None:
    """The trainer's forward and backward go on beside generation; only its step is inside the block."""
    reference = copy.deepcopy(module)
    engine = await started(module)
    continuing = ContinuingEngine(engine)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    snapshots = [copy.deepcopy(module)]
    tokens = 900
    long = SamplingParams(tokens, ignore_eos=True, seed=1)
    tasks = [asyncio.create_task(continuing.generate([i, 9], long, request_id=str(i))) for i in range(8)]
    batch = torch.tensor([[5, 6, 7, 8, 9, 10]])
    for version in (1, 2, 3):
        # Each answer has tokens of the weights before; the engine may be far ahead of a trainer that is kept waiting.
        had = max(so_far(continuing, engine), default=0)
        await until(
            lambda had=had: min(so_far(continuing, engine), default=0) >= had + 10  # type: ignore[misc]
        )
        module.train()
        output = module(batch, labels=batch)
        if version == 1:
            with torch.no_grad():
                assert torch.allclose(output.logits, reference(batch).logits, atol=1e-5)
        optimizer.zero_grad()
        output.loss.backward()
        async with engine.changing_weights(version):
            optimizer.step()
        snapshots.append(copy.deepcopy(module).eval())
    for i, completion in enumerate(await asyncio.wait_for(asyncio.gather(*tasks), 120)):
        runs = [*completion.policy_versions, (tokens, -1)]
        assert [version for _, version in runs[:-1]] == [0, 1, 2, 3]
        for (start, version), (end, _) in itertools.pairwise(runs):
            logits = logits_of(snapshots[version], [i, 9], completion.token_ids)[start:end]
            ids, logprobs = completion.token_ids[start:end], (completion.logprobs or [])[start:end]
            assert error_of(logits, long, ids, logprobs) < 1e-4
    await engine.close()


async def test_a_change_that_fails_or_is_cancelled_lets_the_engine_go_on(engine: HFEngine) -> None:
    with pytest.raises(ZeroDivisionError):
        async with engine.changing_weights(5):
            raise ZeroDivisionError
    assert engine.version == 0
    async with engine.changing_weights(1):
        # Nothing is sampled meanwhile, but requests are taken; another change waits and is given up.
        task = asyncio.create_task(engine.generate([1], SamplingParams(3), request_id="a"))
        waits = asyncio.create_task(engine.changing_weights(9).__aenter__())
        await asyncio.sleep(0.05)
        waits.cancel()
        assert not task.done()
    await asyncio.gather(waits, return_exceptions=True)
    assert waits.cancelled()
    completion = await asyncio.wait_for(task, 30)
    assert (completion.policy_versions, engine.version) == ([(0, 1)], 1)
    async with engine.changing_weights(1):
        pass  # other weights of one version
    assert (engine.version, engine.weight_changes) == (1, 2)
