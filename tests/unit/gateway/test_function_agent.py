"""A Python function as an agent loop: its client's calls are recorded, what it returns is the outcome."""

import asyncio
import base64
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.images import ImageReader
from rollstream.agent.registry import AgentLoops, LoopEntry
from rollstream.agent.turns import Turns
from rollstream.data.row_images import take_images
from rollstream.errors import ConfigError
from rollstream.gateway.function_agent import FunctionAgent
from rollstream.rollout.worker import RolloutWorker
from rollstream.store.records import EncodedTurn, RecordCodec
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import CALL_TIMES, RolloutKey, Trajectory
from tests.unit.agent.rollouts import completed, failed, make_row, make_worker, resources, says, started
from tests.unit.chat.vision import IMAGE_PAD, load_model, png, write_model

pytest.importorskip("openai")

ASK = """
async def ask(client, row):
    done = await client.chat.completions.create(model="rollstream", messages=row["prompt"])
    return done.choices[0].message.content

"""


def function(folder: Path, source: str) -> str:
    file = folder / "agent.py"
    file.write_text(ASK + source)
    return f"{file}:run"


def function_worker(engine: ScriptedEngine, name: str, **given: Any) -> RolloutWorker:
    loops = AgentLoops({"function_agent": LoopEntry(FunctionAgent, {"function": name})})
    return make_worker(resources(engine, **given), loop="function_agent", loops=loops, max_attempts=1)


@pytest.mark.parametrize(
    ("returns", "reward", "answer"),
    [
        ("found", None, "so"),
        ("None", None, None),
        ("0.5", 0.5, None),
        ("True", 1.0, None),
        ("{'answer': 7, 'reward': 1, 'extra': {'steps': 2}}", 1.0, "7"),
    ],
)
async def test_what_a_function_returns_is_the_outcome(
    tmp_path: Path, returns: str, reward: float | None, answer: str | None
) -> None:
    source = f"async def run(client, row):\n    found = await ask(client, row)\n    return {returns}\n"
    worker = function_worker(await started(says("so")), function(tmp_path, source))
    (final,) = completed(await worker.run(make_row(), 0)).trajectories
    assert final.reward == reward
    assert final.extra.get("gateway", {}).get("answer") == answer
    assert final.extra.get("steps") == (2 if answer == "7" else None)


async def test_functions_at_once_have_sessions_of_their_own(tmp_path: Path) -> None:
    source = """
import asyncio

async def run(client, row):
    one, two = await asyncio.gather(ask(client, row), ask(client, row))
    return f"{one} {two} {client.base_url}"
"""
    worker = function_worker(await started(says("so")), function(tmp_path, source))
    rows = [make_row(index, text=f"{index} + 1 =") for index in range(4)]
    answers = set()
    for row in rows:
        found = completed(await worker.run(row, 0)).trajectories
        assert [one.is_snapshot for one in found] == [True, False]
        answers.add(found[-1].extra["gateway"]["answer"])
        assert found[-1].messages[0] == row.messages[0]
    assert len(answers) == len(rows)


async def test_calls_that_are_made_again_get_the_answers_that_they_got(tmp_path: Path) -> None:
    """R1, R3: a program that begins again after a kill asks the engine for what it has not heard, as by ids."""
    source = """
import asyncio

async def run(client, row):
    messages = [*row["prompt"]]
    for number in range(3):
        said = await ask(client, {"prompt": messages})
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {number}?"}]
    one, two = [await ask(client, {"prompt": messages}) for _ in range(2)]
    return f"{one} {two}"
"""
    name = function(tmp_path, source)
    turns: list[EncodedTurn] = []
    whole: list[Trajectory] | None = None
    for finished in range(6):
        engine = await started()
        worker = function_worker(engine, name)
        bodies = [turn.body for turn in turns[:finished]]
        turns = turns[:finished]
        kept = Turns(RolloutKey(0, 0), make_row().prompt_key, bodies, turns.append, RecordCodec())
        made = completed(await worker.run(make_row(), 0, turns=kept)).trajectories
        assert len(engine.requests) == 5 - finished
        assert [turn.number for turn in turns] == [0, 1, 2, 3, 4]
        whole = whole or made
        for one, other in zip(made, whole, strict=True):
            assert one.metrics.engine_calls == other.metrics.engine_calls
            extra = {**one.extra, CALL_TIMES: other.extra[CALL_TIMES]}
            assert replace(one, metrics=other.metrics, extra=extra) == other


async def test_a_row_s_images_are_shown_as_an_api_takes_them(tmp_path: Path) -> None:
    tokenizer, processor = load_model(write_model(tmp_path))
    capabilities = replace(ScriptedEngine().capabilities, images=True, vocab_size=512)
    engine = await started(lambda request: tokenizer.encode("this<|im_end|>"), capabilities=capabilities)
    name = function(tmp_path, "async def run(client, row): return await ask(client, row)")
    worker = function_worker(engine, name, tokenizer=tokenizer, images=ImageReader(processor))
    image = {"bytes": base64.b64encode(png(56, 84)).decode()}
    messages, images = take_images([{"role": "user", "content": "look: <image>"}], [image])
    (final,) = completed(await worker.run(make_row(messages=messages, images=images), 0)).trajectories
    assert [len(request.images) for request in engine.requests] == [1]
    assert final.prompt_ids.count(IMAGE_PAD) == 6
    assert "base64" not in repr(final.messages)


async def test_the_endpoint_stays_open_when_its_worker_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = function(tmp_path, "async def run(client, row): return str(client.base_url)")
    worker = function_worker(await started(says("so")), name)
    failed(await worker.run(make_row(), 0))
    before = len(asyncio.all_tasks())
    del worker
    gc.collect()
    assert len(asyncio.all_tasks()) == before
    assert "destroyed" not in caplog.text


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("    raise ValueError('no idea')", "no idea"),
        ("    return 'guessed'", "without an answer of the model"),
        ("    await ask(client, row)\n    return [1]", "want a text, a number, None, or a dict"),
    ],
)
async def test_a_function_that_fails_says_why(tmp_path: Path, source: str, words: str) -> None:
    name = function(tmp_path, f"async def run(client, row):\n{source}\n")
    failure = failed(await function_worker(await started(says("so")), name).run(make_row(), 0))
    assert words in failure.error and failure.stage == "agent"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def run(client, row): ...", "must be an async function"),
        ("async def run(client): ...", r"cannot be called with \(client, row\)"),
        ("async def run(client, row, base_url): ...", "base_url"),
        ("async def ran(client, row): ...", "did you mean .ran."),
    ],
)
async def test_what_is_no_such_function_is_an_error_at_start(tmp_path: Path, source: str, words: str) -> None:
    given = resources(await started())
    with pytest.raises(ConfigError, match=words):
        FunctionAgent.build_shared(given, function=function(tmp_path, source))


def test_the_source_is_in_the_identity(tmp_path: Path) -> None:
    options: dict[str, Any] = {"function": function(tmp_path, "async def run(client, row): ...")}
    before = LoopEntry(FunctionAgent, options).digest
    assert LoopEntry(FunctionAgent, {**options, "keep_workdir": "always"}).digest == before
    assert LoopEntry(FunctionAgent, {**options, "client_sampling": True}).digest != before
    function(tmp_path, "async def run(client, row): return 1")
    assert LoopEntry(FunctionAgent, options).digest != before
