"""R1 over every kind of template: random calls are what the engine says; and what is said of the rest."""

import asyncio
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import DataError
from rollstream.gateway.recorder import Call, Recorder, SessionLimits
from rollstream.rollout.validate import check_trajectories
from rollstream.testing.scripted import ScriptedEngine, ScriptedRequest
from rollstream.trajectory import Message, Trajectory
from rollstream.web import HTTPError
from tests.unit.agent.rollouts import started
from tests.unit.chat.templates import NAMES, load
from tests.unit.gateway.test_recorder import TOOL, recorder_of, user

SAID = ("12", "I think so.\n", "<think>\nhm, 7 * 8\n</think>\n\n56", "line\n\nline ", "{}")
steps = st.lists(
    st.tuples(
        st.sampled_from(["extend", "extend", "again", "cut", "rewrite", "at once", "tools", "gone"]),
        st.integers(0, 20),
    ),
    min_size=1,
    max_size=10,
)


def log_of(engine: ScriptedEngine) -> list[Any]:
    """What the engine says of itself: prompt, sampled ids, their log-probs and version, of each request."""
    return [
        (request.prompt_ids, done.token_ids, done.logprobs, done.policy_versions[-1][1])
        for request, (_, done) in zip(engine.requests, engine.completions, strict=True)
    ]


def generations(trajectory: Trajectory) -> list[Any]:
    """The same of what was recorded."""
    logprobs = trajectory.response_logprobs
    assert logprobs is not None
    found = []
    for seen, ids in trajectory.generations():
        at = len(seen) - len(trajectory.prompt_ids)
        version = [one for start, one in trajectory.policy_versions if start <= at][-1]
        found.append((seen, ids, logprobs[at : at + len(ids)], version))
    return found


async def ask(recorder: Recorder, messages: list[Message], **more: Any) -> list[Message]:
    turn, _ = await recorder.answer(Call(messages, more.pop("tools", []), **more))
    return [*messages, turn.message]


async def play(name: str, steps: list[tuple[str, int]]) -> None:
    tokenizer = load(name)
    rng = random.Random(len(steps))
    end = sorted(tokenizer.end_ids)[0]

    def rule(request: ScriptedRequest) -> list[int]:
        return [*tokenizer.encode(rng.choice(SAID)), *([end] if rng.random() < 0.8 else [])]

    engine = await started(rule, vocab_size=tokenizer.vocab_size)
    recorder, _ = recorder_of(engine, tokenizer=tokenizer, response_length=100_000)
    histories: list[list[Message]] = [[]]
    missed = 0
    for number, (what, which) in enumerate(steps):
        history = histories[which % len(histories)]
        asked = [*history, user(f"question {which}")]
        if what == "cut" and history:
            asked = [*history[:-2], user(f"other {which}")]
        elif what == "rewrite":
            asked = [user(f"so far {len(history)}"), *history[1:], *asked[-1:]] if history else asked
        elif what == "again":
            asked = history[:-1] or asked
        with suppress(DataError):  # some templates take no two users in a row
            if what == "gone":
                with pytest.raises(asyncio.CancelledError):
                    await recorder.answer(Call(asked, []), gone=lambda: True)
                missed += 1
            elif what == "at once":
                histories += await asyncio.gather(*(ask(recorder, asked) for _ in range(3)))
            else:
                histories.append(await ask(recorder, asked, tools=[TOOL] if what == "tools" else []))
        if number == 4:
            await engine.update_weights("w", 9)
    found = recorder.trajectories()
    if found:
        check_trajectories(found, logprobs=True)
    log = log_of(engine)
    for trajectory in found:
        for one in generations(trajectory):
            log.remove(one)
    assert len(log) == missed


@pytest.mark.parametrize("name", NAMES)
@given(steps)
@settings(max_examples=15)
def test_any_calls_are_what_the_engine_says(name: str, steps: list[tuple[str, int]]) -> None:
    asyncio.run(play(name, steps))


@given(st.permutations(range(5)), st.permutations(range(5)))
@settings(max_examples=10)
def test_a_replay_gives_the_same_whichever_call_is_faster(begun: list[int], slow: list[int]) -> None:
    """Five helpers at once, of which two are asked the same, each with a second turn; the agent before and after."""

    async def play(order: Sequence[int], latency: Sequence[int]) -> list[Any]:
        waits = iter([*latency] * 4)
        engine = await started(response_tokens=5, latency=lambda request: (1 + next(waits)) / 1000)
        recorder, _ = recorder_of(engine)

        async def helper(number: int) -> Message:
            first = await ask(recorder, [user(f"help {number // 2}")])
            return (await ask(recorder, [*first, user("more")]))[-1]

        await ask(recorder, [user("a plan")])
        said = await asyncio.gather(*map(helper, order))
        await ask(recorder, [user(" ".join(sorted(one["content"] for one in said)))])
        return [(one.prompt_ids, one.response_ids) for one in recorder.trajectories()]

    first = asyncio.run(play(range(5), range(5)))
    assert len(first) == 7
    assert asyncio.run(play(begun, slow)) == first


async def test_a_history_of_the_clients_making_is_counted() -> None:
    engine = await started(response_tokens=6)
    recorder, _ = recorder_of(engine)
    messages = await ask(recorder, [user("q")], notes={"temperature": "0.0"})
    await ask(recorder, [user("so far"), messages[1], user("more")])
    first, second = recorder.trajectories()
    asked = {"notes": ["temperature: 0.0"]}
    assert first.extra["gateway"] == asked
    assert second.extra["gateway"] == {"rendered_again_tokens": 6, **asked}
    assert (first.is_snapshot, second.is_snapshot) == (True, False)


async def test_a_session_is_bounded() -> None:
    engine = await started(response_tokens=6)
    for limits in (SessionLimits(calls=2), SessionLimits(bytes=4500)):
        recorder, _ = recorder_of(engine, limits=limits)
        for _ in range(2):
            await ask(recorder, [user("q")])
        with pytest.raises(HTTPError, match="at most"):
            await ask(recorder, [user("q")])
