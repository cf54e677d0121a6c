"""Interactions: partners that answer, score, end, fail, hang, and are always finalized."""

import asyncio
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollstream.agent.interactions import Interaction, Interactions, load_interactions
from rollstream.errors import ConfigError
from rollstream.trajectory import Failure, Message, Rollout
from tests.unit.agent.rollouts import (
    FAR,
    completed,
    demo_tokenizer,
    failed,
    make_row,
    make_worker,
    resources,
    sampled,
    says,
    started,
)


class Teacher(Interaction):
    """Asks again until the answer is right; does what `config` says."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.log: list[tuple[str, str, dict[str, Any]]] = []
        self.heard: list[list[Message]] = []
        self.begun = asyncio.Event()

    async def _do(self, what: str, instance_id: str, kwargs: dict[str, Any]) -> Any:
        self.log.append((what, instance_id, kwargs))
        behaviour = self.config.get(what)
        if behaviour == "hang":
            self.begun.set()
            await asyncio.Event().wait()
        if isinstance(behaviour, BaseException):
            raise behaviour
        return behaviour

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        assert instance_id is not None
        await self._do("start", instance_id, kwargs)
        return str(self.config.get("own_id", instance_id))

    async def generate_response(self, instance_id: str, messages: list[Message], **kwargs: Any) -> Any:
        self.heard.append(copy.deepcopy(messages))
        if answer := await self._do("respond", instance_id, kwargs):
            return answer
        right = messages[-1]["content"] == kwargs.get("truth", "12")
        messages[-1]["content"] = "changed"  # copies, all of them: nobody misses anything
        messages.clear()
        return right, "right" if right else "try again", float(right), {"n": 1}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._do("score", instance_id, kwargs)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        await self._do("finalize", instance_id, kwargs)

    @property
    def done(self) -> list[str]:
        return [entry[0] for entry in self.log]


ASKS = {"interaction_kwargs": {"name": "teacher", "truth": "12"}}


async def play(
    teacher: Teacher, *answers: str, info: dict[str, Any] | None = None, **given: Any
) -> tuple[Rollout | Failure, Any]:
    """One rollout with the teacher, and its engine."""
    timeout = given.pop("timeout", FAR)
    attempts = given.pop("max_attempts", 3)
    attempt_timeout = given.pop("attempt_timeout", FAR)
    engine = await started(says(*answers))
    partners = Interactions({"teacher": teacher}, timeout=timeout)
    worker = make_worker(
        resources(engine, interactions=partners, **given),
        max_attempts=attempts,
        attempt_timeout=attempt_timeout,
    )
    async with asyncio.timeout(FAR):
        return await worker.run(make_row(extra_info=ASKS if info is None else info), 0), engine


async def test_it_answers_until_it_ends_the_conversation() -> None:
    teacher = Teacher({"score": 0.75})
    result, engine = await play(teacher, "10", "11", "12")
    made = completed(result).final
    assert made.finish_reason == "stop"
    assert [message["content"] for message in made.messages] == [
        "3 + 9 =",
        *("10", "try again", "11", "try again", "12"),
    ]
    assert made.num_turns == 6
    assert made.extra["turn_scores"] == [0.0, 0.0, 1.0]
    assert made.extra["interaction_score"] == 0.75
    assert teacher.done == ["start", "respond", "respond", "respond", "score", "finalize"]
    assert {entry[1] for entry in teacher.log} == {"0-0-1"}
    assert all(entry[2] == {"truth": "12"} for entry in teacher.log)
    assert [messages[-1]["content"] for messages in teacher.heard] == ["10", "11", "12"]
    assert [token for token, _ in sampled(made)] == [
        token for _, completion in engine.completions for token in completion.token_ids
    ]
    running = demo_tokenizer().decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)
    assert running.endswith("11<|im_end|>\n<|im_start|>user\ntry again<|im_end|>\n<|im_start|>assistant\n")


async def test_rows_that_ask_for_none_have_none() -> None:
    nothing: list[dict[str, Any]] = [
        {},
        {"interaction_kwargs": None},
        {"interaction_kwargs": {}},
        {"interaction_kwargs": {"name": None, "truth": None}},
    ]
    for info in nothing:
        teacher = Teacher({})
        result, _ = await play(teacher, "10", info=info)
        assert completed(result).final.finish_reason == "stop"
        assert "turn_scores" not in completed(result).final.extra
        assert not teacher.log


async def test_rows_name_their_interaction() -> None:
    teacher = Teacher({"own_id": "mine"})
    result, _ = await play(teacher, "10", "12", info={"interaction_kwargs": {"truth": "12"}})
    assert completed(result).final.extra["turn_scores"] == [0.0, 1.0]  # the only one needs no name
    assert {entry[1] for entry in teacher.log[1:]} == {"mine"}
    for kwargs in ({"name": "techer"}, {"name": 3}, "teacher"):
        result, engine = await play(Teacher({}), "10", info={"interaction_kwargs": kwargs})
        assert (failed(result).stage, failed(result).attempts, engine.requests) == ("prompt", 1, [])


@pytest.mark.parametrize(
    ("what", "behaviour"),
    [
        ("respond", (False, "hm")),
        ("respond", (False, 3, 0.5, {})),
        ("respond", (False, "hm", "much", {})),
        ("respond", KeyError("bug")),
        ("respond", SystemExit(3)),
        ("respond", asyncio.CancelledError()),
        ("start", ValueError("no seat")),
        ("score", ZeroDivisionError("none")),
    ],
)
async def test_what_breaks_its_promise_fails_the_rollout_alone(what: str, behaviour: Any) -> None:
    teacher = Teacher({"name": "teacher", what: behaviour})
    failure = failed((await play(teacher, "10", "12"))[0])
    assert (failure.stage, failure.attempts) == ("agent", 1)
    assert teacher.done.count("finalize") == 1


@pytest.mark.virtual_time
@pytest.mark.parametrize("what", ["start", "respond", "score"])
async def test_a_timeout_is_tried_again_and_finalized_each_time(what: str) -> None:
    teacher = Teacher({what: "hang"})
    result, engine = await play(teacher, "12", timeout=0.2)
    failure = failed(result)
    assert failure.attempts == 3
    assert (
        "took longer than 0.2 s (actor_rollout_ref.rollout.multi_turn.interaction_timeout)" in failure.error
    )
    assert [entry[1] for entry in teacher.log if entry[0] == "finalize"] == ["0-0-1", "0-0-2", "0-0-3"]
    assert len(engine.requests) == 3


@pytest.mark.virtual_time
@pytest.mark.parametrize("finalize", [None, ValueError("no"), "hang"])
@pytest.mark.parametrize("how", ["cancel", "timeout"])
async def test_it_is_finalized_when_the_rollout_is_cut_off(how: str, finalize: Any) -> None:
    """And what that does, the rollout ends as it was told to: cancelled is cancelled, not failed."""
    teacher = Teacher({"respond": "hang", "finalize": finalize})
    partners = Interactions({"teacher": teacher}, timeout=10.0)
    given = replace(resources(await started(says("10"))), interactions=partners)
    worker = make_worker(given, max_attempts=1, attempt_timeout=5.0 if how == "timeout" else FAR)
    before = asyncio.all_tasks()
    task = asyncio.create_task(worker.run(make_row(extra_info=ASKS), 0))
    if how == "cancel":
        await teacher.begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert "took longer than" in failed(await task).error
    assert teacher.done == ["start", "respond", "finalize"]
    assert asyncio.all_tasks() == before


SOURCE = """
from rollstream.agent.interactions import Interaction
class Echo(Interaction):
    async def generate_response(self, instance_id, messages, **kwargs):
        return self.config["ends"], messages[-1]["content"], 0.5, {}
class Half:
    def __init__(self, config): pass
    async def start_interaction(self, instance_id, **kwargs): pass
class Exits:
    def __init__(self, config): raise SystemExit("no licence")
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    (tmp_path / "partners.py").write_text(SOURCE)

    def save(text: str) -> str:
        file = tmp_path / "interactions.yaml"
        file.write_text(text.replace("HERE", str(tmp_path / "partners.py")))
        return str(file)

    return save


async def test_a_yaml_file_is_read(write: Callable[[str], str]) -> None:
    text = (
        "interaction:\n"
        "  - {name: echo, class_name: 'HERE:Echo', config: {ends: true, 3: x}}\n"
        "  - {class_name: rollstream.agent.interactions.Interaction}\n"
    )
    loaded = load_interactions(write(text), timeout=7)
    assert (list(loaded.by_name), loaded.timeout) == (["echo", "Interaction"], 7)
    assert loaded.by_name["echo"].config == {"ends": True, 3: "x", "name": "echo"}
    assert loaded.by_name["echo"].name == "echo"
    session = loaded.open({"name": "echo"}, request_id="r")
    assert session is not None
    assert await session.respond([{"role": "assistant", "content": "hi"}]) == (True, "hi")
    assert loaded.digest == load_interactions(write(text), timeout=8).digest
    changed = load_interactions(write(text.replace("true", "false")), timeout=7)
    assert changed.digest != loaded.digest
    Path(write(text)).with_name("partners.py").write_text(SOURCE + "# changed")
    assert load_interactions(write(text), timeout=7).digest not in (loaded.digest, changed.digest)
    assert load_interactions(None, timeout=3) == Interactions(timeout=3)


@pytest.mark.parametrize(
    "text",
    [
        "interaction: {a: 1}",
        "interaction: [3]",
        "interaction: [{class_name: 'HERE:Ech'}]",
        "interaction: [{class_name: 'HERE:Half'}]",
        "interaction: [{class_name: 'HERE:Exits'}]",
        "interaction: [{class_name: 'HERE:Echo', config: [1]}]",
        "interaction: [{class_name: 'HERE:Echo'}, {class_name: 'HERE:Echo'}]",
        "interaction: [{class_name: '${nowhere}'}]",
    ],
)
def test_file_that_cannot_be_used(write: Callable[[str], str], text: str) -> None:
    with pytest.raises(ConfigError, match="interaction_config_path"):
        load_interactions(write(text), timeout=1)
