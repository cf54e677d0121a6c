"""The `hf` engine with the demo model: real steps, real thread deaths. See also test_embedded_engines.py."""

import asyncio
import copy
import gc
import itertools
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import EngineLoad
from rollstream.engine.continuation import ContinuingEngine
from rollstream.engine.hf import HFEngine
from rollstream.engine.hf_model import copy_weights, load_module
from rollstream.engine.load import ask_load
from rollstream.errors import EngineError, EngineUnavailableError
from rollstream.trajectory import Completion, SamplingParams
from tests.support.forward import answer, error_of, logits_of, requests, worst_error
from tests.support.until import PATIENCE_S, until

torch = pytest.importorskip("torch")

LONG = SamplingParams(3000, ignore_eos=True, seed=1)
FEW = SamplingParams(3)
IDLE = EngineLoad(0, 0, 0.0, 0)


class Steps:
    """A hook on the engine's model, with which a test decides at which token something happens.

    Those steps count that give a token to each of `rows` sequences, or more.
    """

    def __init__(self, rows: int = 1) -> None:
        self.error: BaseException | None = None
        """Breaks each step."""
        self._rows = rows
        self._left: float = float("inf")
        self._changed = threading.Condition()

    def __deepcopy__(self, memo: object) -> "Steps":
        return self  # the engine's copy of the modules gets the same one

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.error is not None:
            raise self.error
        if kwargs["input_ids"].shape[0] >= self._rows and kwargs["input_ids"].shape[1] == 1:
            with self._changed:
                self._changed.wait_for(lambda: self._left > 0)
                self._left -= 1

    def hold_after(self, count: float) -> None:
        """So many more, then the next one waits."""
        with self._changed:
            self._left = count
            self._changed.notify_all()

    def free(self) -> None:
        self.hold_after(float("inf"))

    async def held(self) -> None:
        await until(lambda: self._left == 0)


Start = Callable[..., Awaitable[HFEngine]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts engines; closes them at the end."""
    engines: list[tuple[HFEngine, Steps | None]] = []

    async def start(model: Any = None, steps: Steps | None = None, **kwargs: Any) -> HFEngine:
        # A small cache, for speed: 16 Ki tokens.
        given = {"num_threads": 1, "num_kv_blocks": 512} | kwargs
        engine = HFEngine(MODEL_PATH, model=model, engine_kwargs=given)
        engines.append((engine, steps))
        hook = model.register_forward_pre_hook(steps, with_kwargs=True) if steps else None
        await engine.start()
        if hook:
            hook.remove()  # the engine's copy of the modules keeps it
        return engine

    yield start
    for engine, steps in engines:
        if steps is not None:
            steps.free()
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


def ask(engine: Any, count: int, how: SamplingParams = LONG) -> list[asyncio.Task[Completion]]:
    return [asyncio.create_task(engine.generate([1 + i], how, request_id=str(i))) for i in range(count)]


SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
MIXED = {"sliding_window": 60, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "head_dim": 8},
    **{"qk_nope_head_dim": 16, "v_head_dim": 12, "n_group": 2, "topk_group": 1, "n_routed_experts": 4},
}


def small(kind: str, more: dict[str, Any]) -> Any:
    import transformers

    torch.manual_seed(1)
    return transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, f"{kind}Config")(**SMALL | more)
    )


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("GPT2", {}),
        ("DeepseekV3", EXPERTS | LATENT),
        ("Mistral", {"sliding_window": 60}),
        ("Gemma3Text", {"head_dim": 16} | MIXED),
        ("GptOss", {"head_dim": 16, "num_local_experts": 4} | MIXED),
    ],
)
async def test_other_architectures_are_exact(start: Start, kind: str, more: dict[str, Any]) -> None:
    """Prompts of many lengths, split ones and longer ones than a sliding window among them."""
    module = small(kind, more).eval()
    engine = await start(module, max_num_batched_tokens=40)
    asked = [
        (
            [3 + (7 * i + j) % 290 for j in range(1 + 11 * i)],
            SamplingParams(59 - 3 * i, ignore_eos=True, seed=i),
        )
        for i in range(16)
    ]
    assert worst_error(module, asked, await answer(engine, asked)) < 1e-4


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("Bloom", "cannot run BloomForCausalLM: ValueError"),
        ("Lfm2", "cannot run Lfm2ForCausalLM: it has layers of conv"),
    ],
)
async def test_models_that_attend_otherwise_are_refused(start: Start, kind: str, message: str) -> None:
    layers = {"layer_types": ["conv", "full_attention"] * 2} if kind == "Lfm2" else {}
    with pytest.raises(EngineError, match=message):
        await start(small(kind, layers))


async def test_a_model_that_forgets_its_cache_is_refused(start: Start, module: Any) -> None:
    def forget(module: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"] * 0  # all look at all
        return args, kwargs

    module.register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(EngineError, match="not be those of a forward pass"):
        await start(module)


async def test_the_engine_says_how_busy_it_is(start: Start, module: Any) -> None:
    steps = Steps()
    engine = await start(module, steps, max_num_seqs=2)
    assert await ask_load(engine) == IDLE
    steps.hold_after(0)
    tasks = ask(engine, 6, replace(LONG, max_tokens=40))
    while (load := await ask_load(engine)) is not None and load.running < 2:
        await asyncio.sleep(0.01)
    assert load == EngineLoad(2, 4, 2 * 41 / (512 * 32), 0)
    steps.free()
    await asyncio.gather(*tasks)
    assert await ask_load(engine) == IDLE
    await engine.close()
    assert await ask_load(engine) is None


@pytest.mark.parametrize("error", [MemoryError("no room"), RuntimeError("lost"), SystemExit("gone")], ids=str)
async def test_a_dead_thread_fails_its_requests_at_once_and_is_replaced(
    start: Start, module: Any, error: BaseException
) -> None:
    steps = Steps()
    engine = await start(module, steps)
    asked = requests(12)
    before = await answer(engine, asked)
    steps.hold_after(3)
    tasks = ask(engine, 40)
    await steps.held()
    steps.error = error
    steps.free()
    async with asyncio.timeout(PATIENCE_S):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        assert isinstance(result, EngineUnavailableError)
        assert f"thread ended: {type(error).__name__}: {error}" in str(result)
        assert result.__cause__ is error
    with pytest.raises(EngineUnavailableError, match="thread ended"):
        await engine.generate([1], LONG, request_id="a")
    steps.error = None
    assert all(await asyncio.gather(*(engine.health() for _ in range(3))))
    after = await answer(engine, asked)
    assert [c.token_ids for c in after] == [c.token_ids for c in before]
    assert worst_error(module, asked, after) < 1e-4
    assert await ask_load(engine) == IDLE


async def test_restarts_back_off(start: Start, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollstream.engine.embedded._RESTART_PAUSE_S", 1000.0)
    steps = Steps()
    engine = await start(module, steps)
    for expected in (True, False):
        steps.error = RuntimeError("again")
        with pytest.raises(EngineUnavailableError):
            await engine.generate([1], LONG, request_id="a")
        steps.error = None
        assert await engine.health() is expected  # the second one has to wait


async def test_broken_weights_are_an_error_and_not_a_sample(start: Start, module: Any) -> None:
    engine = await start(module)
    state = {name: tensor * torch.nan for name, tensor in module.state_dict().items()}
    good = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(EngineError, match="not numbers"):
        await engine.load_state_dict(state, 1)
    async with engine.changing_weights(1):  # their owner's own doing
        with torch.no_grad():
            for tensor in module.parameters():
                tensor.mul_(torch.nan)
    broken = await asyncio.gather(*ask(engine, 8), return_exceptions=True)
    assert all("logits are not numbers" in str(error) for error in broken)
    await engine.load_state_dict(good, 2)
    asked = requests(8)
    answers = await answer(engine, asked)
    assert all(c.policy_versions == [(0, 2)] for c in answers)
    assert worst_error(module, asked, answers) < 1e-4


async def test_close_ends_the_thread_and_what_is_in_flight(start: Start, module: Any) -> None:
    threads = threading.active_count()
    steps = Steps()
    engine = await start(module, steps, max_num_seqs=4)
    steps.hold_after(3)
    tasks = ask(engine, 8)
    await steps.held()
    closing = asyncio.create_task(engine.close())
    await asyncio.sleep(0)
    steps.free()
    await closing
    await engine.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(r, EngineUnavailableError) for r in results)
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
    threads, others = threading.active_count(), threading.enumerate()
    engine = HFEngine(MODEL_PATH, engine_kwargs={"num_kv_blocks": 64})
    await engine.start()
    assert (await engine.generate([1], FEW, request_id="a")).token_ids
    assert set(threading.enumerate()) - set(others)
    del engine
    gc.collect()
    await until(lambda: threading.active_count() <= threads)


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
    while (await engine.load()).running < 4:
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


async def test_what_cannot_be_loaded_is_one_line(start: Start, module: Any, tmp_path: Any) -> None:
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((MODEL_PATH / name).read_bytes())
    for model, kwargs, message in [
        (tmp_path, {}, "engine 'hf' cannot load"),
        (MODEL_PATH, {"num_kv_blocks": 10**9}, "cannot run Qwen2ForCausalLM: RuntimeError: .* memory"),
        (MODEL_PATH, {"cache_size": 1e-5}, "cache_size of 1e-05 GB does not hold 32 tokens of 1024 bytes"),
    ]:
        engine = HFEngine(model, engine_kwargs=kwargs)
        with pytest.raises(EngineError, match=message) as caught:
            await engine.start()
        assert "\n" not in str(caught.value)
        await engine.close()


async def test_a_weight_that_the_folder_lacks_is_not_made_up(
    start: Start, module: Any, tmp_path: Any
) -> None:
    state = {name: tensor for name, tensor in module.state_dict().items() if "layers.1.mlp" not in name}
    module.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(EngineError, match=r"lacks .*layers\.1\.mlp"):
        await HFEngine(tmp_path).start()
    engine = await start()
    with pytest.raises(EngineError, match=r"missing: .*layers\.1\.mlp"):
        await engine.update_weights(str(tmp_path), 1)
    with pytest.raises(EngineError, match=r"cannot load .*nothing"):
        await engine.update_weights(str(tmp_path / "nothing"), 1)
    assert engine.version == 0


# Weights that change.


async def test_weights_that_nobody_waits_for_any_more_have_their_version(
    start: Start, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, begun, loop = await start(), asyncio.Event(), asyncio.get_running_loop()
    goes_on = threading.Event()

    def slow(pairs: Any) -> None:
        loop.call_soon_threadsafe(begun.set)
        goes_on.wait(PATIENCE_S)
        copy_weights(pairs)

    monkeypatch.setattr("rollstream.engine.hf.copy_weights", slow)
    update = asyncio.create_task(engine.load_state_dict(other.state_dict(), 7))
    await begun.wait()
    update.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await update
    asked = requests(4)
    answers = await answer(engine, asked)
    assert all(c.policy_versions == [(0, 7)] for c in answers)
    assert worst_error(other, asked, answers) < 1e-4


async def test_new_weights_outlive_the_thread(start: Start, module: Any, other: Any) -> None:
    steps = Steps()
    engine = await start(module, steps)
    await engine.load_state_dict(other.state_dict(), 3)
    steps.error = RuntimeError("dead")
    with pytest.raises(EngineUnavailableError):
        await engine.generate([1], LONG, request_id="a")
    steps.error = None
    assert await engine.health()
    asked = requests(8)
    answers = await answer(engine, asked)
    assert all(c.policy_versions == [(0, 3)] for c in answers)
    assert worst_error(other, asked, answers) < 1e-4


async def test_a_trainer_steps_its_own_model_between_the_engines_steps(start: Start, module: Any) -> None:
    """The trainer's forward and backward go on beside generation; only its step is inside the block."""
    reference = copy.deepcopy(module)
    steps, rows, tokens = Steps(rows=8), 8, 200
    engine = await start(module, steps)
    continuing = ContinuingEngine(engine)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    snapshots = [copy.deepcopy(module)]
    steps.hold_after(10)
    how = replace(LONG, max_tokens=tokens)
    tasks = ask(continuing, rows, how)
    batch = torch.tensor([[5, 6, 7, 8, 9, 10]])
    for version in (1, 2, 3):
        await steps.held()  # each has ten tokens of the weights before
        module.train()
        output = module(batch, labels=batch)
        if version == 1:
            with torch.no_grad():
                assert torch.allclose(output.logits, reference(batch).logits, atol=1e-5)
        optimizer.zero_grad()
        output.loss.backward()

        async def step(version: int = version) -> None:
            async with engine.changing_weights(version):
                optimizer.step()

        change = asyncio.create_task(step())
        await asyncio.sleep(0)
        steps.hold_after(11)  # the first one is the one that was held
        await change
        snapshots.append(copy.deepcopy(module).eval())
    steps.free()
    async with asyncio.timeout(PATIENCE_S):
        answers = await asyncio.gather(*tasks)
    for i, completion in enumerate(answers):
        runs = [*completion.policy_versions, (tokens, -1)]
        assert [version for _, version in runs[:-1]] == [0, 1, 2, 3]
        for (begin, version), (end, _) in itertools.pairwise(runs):
            logits = logits_of(snapshots[version], [1 + i], completion.token_ids)[begin:end]
            ids, logprobs = completion.token_ids[begin:end], (completion.logprobs or [])[begin:end]
            assert error_of(logits, how, ids, logprobs) < 1e-4


async def test_a_change_that_fails_or_is_cancelled_lets_the_engine_go_on(start: Start) -> None:
    engine = await start()
    with pytest.raises(ZeroDivisionError):
        async with engine.changing_weights(5):
            raise ZeroDivisionError
    assert engine.version == 0
    async with engine.changing_weights(1):
        # Nothing is sampled meanwhile, but requests are taken; another change waits and is given up.
        task = asyncio.create_task(engine.generate([1], FEW, request_id="a"))
        waits = asyncio.create_task(engine.changing_weights(9).__aenter__())
        await asyncio.sleep(0.05)
        waits.cancel()
        assert not task.done()
    await asyncio.gather(waits, return_exceptions=True)
    assert waits.cancelled()
    async with asyncio.timeout(PATIENCE_S):
        completion = await task
    assert (completion.policy_versions, engine.version) == ([(0, 1)], 1)
    async with engine.changing_weights(1):
        pass  # other weights of one version
    assert (engine.version, engine.weight_changes) == (1, 2)
