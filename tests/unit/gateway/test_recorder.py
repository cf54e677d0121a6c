"""R1: whatever an agent does with its history, each sampled token is kept once, behind what it saw."""

import asyncio
from typing import Any

import pytest

from rollstream.agent.base import AgentLoop
from rollstream.errors import DataError, EngineUnavailableError
from rollstream.gateway.recorder import Call, Recorder
from rollstream.rollout.validate import check_trajectories
from rollstream.testing.scripted import ScriptedEngine
from rollstream.trajectory import Message, SamplingParams, Trajectory
from rollstream.web import HTTPError
from tests.support import turns
from tests.support.until import until
from tests.unit.agent.rollouts import END, call_text, demo_tokenizer, resources, started
from tests.unit.chat.templates import load

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}


class Loop(AgentLoop):
    async def run(self, sampling: SamplingParams, **row: Any) -> Trajectory:
        raise NotImplementedError


def recorder_of(engine: ScriptedEngine, **given: Any) -> tuple[Recorder, "asyncio.Future[Exception]"]:
    """A recorder, and what ends its attempt."""
    broken: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
    sampling = SamplingParams(given.pop("max_tokens", 64), seed=7, logprobs=given.pop("logprobs", True))
    name = given.pop("name", "0-0-1")
    more = {key: given.pop(key) for key in ("limits", "engine_wait") if key in given}
    loop = Loop(resources(engine, **given), request_id=name)
    return Recorder(loop, sampling, name=name, broken=broken, **more), broken


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def ask(recorder: Recorder, messages: list[Message], **more: Any) -> Message:
    """The answer's message."""
    with recorder.noting():
        turn, _ = await recorder.answer(Call(messages, more.pop("tools", []), **more))
    return turn.message


def check_exact(engine: ScriptedEngine, trajectories: list[Trajectory]) -> None:
    """Every completion stands in one trajectory, behind the prompt that the engine got."""
    for trajectory in trajectories[:-1]:
        trajectory.is_snapshot = True
    check_trajectories(trajectories, logprobs=True)
    prompts = [request.prompt_ids for request in engine.requests]
    owed = [
        (prompt, completion.token_ids)
        for prompt, (_, completion) in zip(prompts, engine.completions, strict=True)
    ]
    for trajectory in trajectories:
        for generation in trajectory.generations():
            owed.remove(generation)
    assert not owed


async def test_a_conversation_that_grows_is_one_trajectory() -> None:
    tokenizer = demo_tokenizer()
    engine = await started(lambda r: tokenizer.encode(f"answer {len(r.prompt_ids)}{END}"))
    recorder, _ = recorder_of(engine)
    messages: list[Any] = [user("a question")]
    for turn in range(3):
        messages += [await ask(recorder, messages), user(f"more {turn} {END}")]
    (trajectory,) = recorder.trajectories()
    check_exact(engine, [trajectory])
    assert trajectory.num_turns == 6
    # A special token in what was added ends no turn.
    assert tokenizer.decode(trajectory.response_ids, skip_special_tokens=False).count(END) == 3 + 2
    assert [m["content"].replace("\u200b", "") for m in trajectory.messages] == [
        m["content"] for m in messages[:-1]
    ]


async def test_results_in_a_rewritten_history_say_what_was_called() -> None:
    tokenizer = turns.load(
        "{%- for m in messages -%}<|turn|>{{ m.name if m.role == 'tool' else m.role }}: {{ m.content }}{%- endfor -%}"
    )
    engine = await started(lambda r: tokenizer.encode("dry</s>"))
    recorder, _ = recorder_of(engine, tokenizer=tokenizer)
    await ask(recorder, [user("Lyon?")])
    call = turns.calls(1)
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "wet"}
    await ask(recorder, [user("Nice?"), call, result])
    assert tokenizer.decode(list(engine.requests[-1].prompt_ids)).endswith("weather: wet")


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_helpers_prompt_may_be_longer_than_the_rollouts(at_once: bool) -> None:
    engine = await started(response_tokens=4, latency=0.01)
    recorder, broken = recorder_of(engine, prompt_length=40)
    calls = [asyncio.create_task(ask(recorder, [user("q")]))]
    if not at_once:
        await calls[0]
    calls.append(asyncio.create_task(ask(recorder, [user("q" * 500 + "<|im_end|>")])))
    await asyncio.gather(*calls)
    assert not broken.done()
    check_exact(engine, recorder.trajectories())


async def test_calls_and_their_results() -> None:
    tokenizer = demo_tokenizer()
    texts = iter([call_text("add", a=1) + "\n" + call_text("add", a=2), "<tool_call>\n{broken", "3"])
    engine = await started(lambda request: tokenizer.encode(next(texts) + END))
    recorder, _ = recorder_of(engine)
    messages: list[Any] = [user("q")]
    message = await ask(recorder, messages, tools=[TOOL])
    assert [call["function"] for call in message["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}},
        {"name": "add", "arguments": {"a": 2}},
    ]
    assert message["content"] == ""
    messages += [
        message,
        *({"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in message["tool_calls"]),
    ]
    # What cannot be executed is no call, but was said.
    message = await ask(recorder, messages, tools=[TOOL])
    assert "tool_calls" not in message
    assert message["content"] == "<tool_call>\n{broken"
    await ask(recorder, [*messages, message, user("again")], tools=[TOOL])
    (trajectory,) = recorder.trajectories()
    check_exact(engine, [trajectory])
    # With other tools it is another prompt.
    texts = iter(["4"])
    await ask(recorder, [*messages, message, user("again")])
    assert len(recorder.trajectories()) == 2


async def test_each_trajectory_has_its_own_prompt_tools_and_counts() -> None:
    tokenizer = demo_tokenizer()
    texts = iter([call_text("add", a=1), "2", "3", "4"])
    engine = await started(lambda request: tokenizer.encode(next(texts) + END))
    recorder, _ = recorder_of(engine)
    messages: list[Any] = [{"role": "system", "content": "s"}, user("q")]
    message = await ask(recorder, messages, tools=[TOOL])
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}
    await ask(recorder, [*messages, message, result], tools=[TOOL])
    await ask(recorder, [*messages, message, {**result, "content": "y"}], tools=[TOOL])
    await ask(recorder, [user("a title")])
    found = recorder.trajectories(answer="2", prompt=[user("q")])
    about = [
        (one.extra["prompt_messages"], one.extra.get("shown_tools"), one.metrics.engine_calls)
        for one in found
    ]
    assert about == [(4, [TOOL], 1), (1, None, 1), (2, [TOOL], 2)]
    assert [one.metrics.tool_calls for one in found] == [0, 0, 1]
    assert [one.is_side_call for one in found] == [False, True, False]
    assert [one.messages[-1]["content"] for one in found] == ["3", "4", "2"]


async def test_a_prompt_without_room_is_a_refusal() -> None:
    engine = await started(response_tokens=30)
    recorder, broken = recorder_of(engine, response_length=32, max_model_len=4096)
    message = await ask(recorder, [user("q")])
    with pytest.raises(HTTPError, match="context length"):
        await ask(recorder, [user("q"), message, user("a long question " * 3)])
    assert recorder.ran_out_of_room
    for long, tools in ("long " * 500_000, []), ("q", [{"long": "x" * 500_000}]):
        with pytest.raises(HTTPError, match="far more than the context length of 4096"):
            recorder.check_length([user(long)], tools)
    assert not broken.done()
    (trajectory,) = recorder.trajectories()
    check_exact(engine, [trajectory])


async def test_stop_strings_that_the_engine_does_not_know_are_refused() -> None:
    engine = await started()
    recorder, broken = recorder_of(engine)
    with pytest.raises(HTTPError, match="stop strings"):
        await ask(recorder, [user("q")], stop=("x",))
    assert not engine.requests
    assert not broken.done()
    assert "stop strings" in str(recorder.refusal)


async def test_errors_of_the_engine_and_of_the_prompt_end_the_attempt() -> None:
    engine = await started()
    engine.fail(lambda request: True, EngineUnavailableError("away"))
    recorder, broken = recorder_of(engine, prompt_length=40)
    with pytest.raises(DataError):
        await ask(recorder, [user("q" * 500)])
    assert isinstance(broken.result(), DataError)
    recorder, broken = recorder_of(engine)
    with pytest.raises(EngineUnavailableError):
        await ask(recorder, [user("q")])
    assert isinstance(broken.result(), EngineUnavailableError)
    # Nothing of it is left behind: the next request begins where the first one did.
    await ask(recorder, [user("q")])
    assert len(recorder.trajectories()) == 1


async def test_a_client_that_goes_away_leaves_the_conversation_as_it_was() -> None:
    slow = [False]
    engine = await started(response_tokens=4, latency=lambda request: 60.0 if slow[0] else 0.0)
    recorder, broken = recorder_of(engine)
    first = [user("q"), await ask(recorder, [user("q")])]
    slow[0] = True
    task = asyncio.create_task(ask(recorder, [*first, user("more")]))
    await until(lambda: engine.in_flight)
    task.cancel()
    await asyncio.wait((task,))
    slow[0] = False
    await ask(recorder, [*first, user("more")])
    (trajectory,) = recorder.trajectories()
    assert sum(trajectory.response_mask) == 8
    assert not broken.done()


async def test_results_in_a_rewritten_history_are_shown_by_a_template_without_a_role_for_them() -> None:
    first_only = "{%- if m.role == 'system' and not loop.first -%}{{ raise_exception('no') }}{%- endif -%}"
    source = (
        "{%- for m in messages if m.role != 'tool' -%}"
        + first_only
        + "[{{ m.role }}] {{ m.content }}{%- endfor -%}"
    )
    tokenizer = load("chatml", source)
    engine = await started(lambda request: tokenizer.encode("ok<|im_end|>"))
    recorder, _ = recorder_of(engine, tokenizer=tokenizer)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {}}}
    history: list[Any] = [
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "seven"},
        {"role": "system", "content": "be brief"},
    ]
    for messages in ([user("first")], history):
        await ask(recorder, messages, tools=[TOOL])
    shown = tokenizer.decode(engine.requests[1].prompt_ids, skip_special_tokens=False)
    assert "<tool_response>\nseven\n</tool_response>\n\nbe brief" in shown
    assert recorder.trajectories()[-1].extra["gateway"]["notes"] == ["system message: shown in a user's turn"]
