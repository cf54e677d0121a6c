"""What a verl loop gave, as a trajectory; and the worker's part of it, with a stand-in for verl's."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.integrations.verl.streaming import (
    EngineCall,
    SampleCalls,
    StreamingAgentLoopWorkerMixin,
    current_calls,
)
from rollstream.integrations.verl.trajectories import (
    finish_reason,
    policy_versions,
    read_messages,
    to_trajectories,
)
from rollstream.rollout.validate import check_trajectories

METRICS = SimpleNamespace(generate_sequences=1.5, tool_calls=0.25, compute_score=0.0, num_preempted=-1)


def decode(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


def output(prompt: list[int], mask: list[int], **others: Any) -> Any:
    values: dict[str, Any] = {
        "prompt_ids": prompt,
        "response_ids": list(range(100, 100 + len(mask))),
        "response_mask": mask,
        "response_logprobs": [-0.5 if one else 0.0 for one in mask],
        "reward_score": None,
        "num_turns": 2,
        "metrics": METRICS,
        "extra_fields": {},
        **others,
    }
    return SimpleNamespace(**values)


def call(prompt: int, tokens: int, *versions: tuple[int, int], reason: str = "stop") -> EngineCall:
    return EngineCall(prompt, tokens, list(versions) or [(0, 0)], reason, 3)


def test_ids_mask_and_logprobs_are_the_loops() -> None:
    given_by_loop = output(
        [1, 2, 3],
        [1, 1, 0, 0, 1],
        reward_score=0.5,
        num_turns=4,
        extra_fields={
            "raw_prompt": [{"role": "user"}],
            "reward_extra_info": {"acc": 1},
            "turn_scores": [0.1],
            "odd": object(),
        },
    )
    calls = SampleCalls(calls=[call(3, 2, (0, 7)), call(7, 1, (0, 8), reason="length")])
    (trajectory,) = to_trajectories(
        [given_by_loop], calls, messages=[{"role": "user", "content": "?"}], decode=decode
    )
    check_trajectories([trajectory], logprobs=True)
    assert trajectory.prompt_ids == [1, 2, 3]
    assert trajectory.response_ids == [100, 101, 102, 103, 104]
    assert trajectory.response_mask == [1, 1, 0, 0, 1]
    assert trajectory.response_logprobs == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert (trajectory.reward, trajectory.reward_extra) == (0.5, {"acc": 1})
    assert (trajectory.num_turns, trajectory.finish_reason) == (4, "length")
    assert trajectory.policy_versions == [(0, 7), (4, 8)]
    assert (trajectory.metrics.generate_s, trajectory.metrics.tool_s) == (1.5, 0.25)
    assert (trajectory.metrics.engine_calls, trajectory.metrics.cached_prompt_tokens) == (2, 6)
    assert trajectory.extra == {"turn_scores": [0.1], "verl_dropped": ["odd"]}
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "tool", "assistant"]


def test_several_outputs_are_snapshots_and_a_final_one() -> None:
    calls = SampleCalls(calls=[call(2, 2)])
    trajectories = to_trajectories(
        [output([1], [1]), output([1, 2], [1, 1])], calls, messages=[], decode=decode
    )
    check_trajectories(trajectories, logprobs=True)
    assert [one.is_snapshot for one in trajectories] == [True, False]
    assert trajectories[-1].metrics.engine_calls == 1


@given(st.lists(st.integers(0, 1), max_size=30))
def test_messages_have_every_sampled_token_once(mask: list[int]) -> None:
    ids = list(range(len(mask)))
    messages = read_messages(ids, mask, decode)
    said = [int(word) for m in messages if m["role"] == "assistant" for word in m["content"].split()]
    assert said == [i for i, one in zip(ids, mask, strict=True) if one]


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, 6), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 40),
)
def test_versions_are_those_of_each_token(
    turns: list[tuple[int, int, list[int]]], response_length: int
) -> None:
    """Against a list with a version for every token; the response is cut at its longest."""
    prompt, calls, expected = 5, [], []
    for between, tokens, versions in turns:
        if calls:
            expected += [expected[-1]] * between
        at = prompt + len(expected)
        runs = [(start, version) for start, version in enumerate(versions) if start < tokens]
        calls.append(EngineCall(at, tokens, runs, "stop"))
        expected += [runs[min(i, len(runs) - 1)][1] for i in range(tokens)]
    expected = expected[:response_length]
    encoded = policy_versions(calls, prompt_tokens=prompt, response_tokens=len(expected))
    starts = [start for start, _ in encoded]
    assert starts[0] == 0 and starts == sorted(set(starts))
    decoded = [[v for s, v in encoded if s <= i][-1] for i in range(len(expected))]
    assert decoded == expected


def test_a_loop_that_asks_for_something_else_has_its_lowest_version() -> None:
    calls = [call(5, 4, (0, 3)), call(2, 9, (0, 2), (4, 5))]
    assert policy_versions(calls, prompt_tokens=5, response_tokens=4) == [(0, 2)]
    assert policy_versions([], prompt_tokens=5, response_tokens=4) == [(0, 0)]


@pytest.mark.parametrize(
    ("said", "reason"), [("completed", "stop"), (None, "stop"), ("length", "length"), ("abort", "aborted")]
)
def test_reasons(said: str | None, reason: str) -> None:
    assert finish_reason([EngineCall(1, 1, [(0, 0)], said)]) == reason


class _VerlsWorker:
    """As verl's worker runs a loop, and pads what it gave."""

    rollout_config = SimpleNamespace(
        temperature=0.7,
        top_p=0.9,
        top_k=-1,
        calculate_log_probs=True,
        agent=SimpleNamespace(default_agent_loop="first"),
    )

    def __init__(self) -> None:
        self.scored: list[Any] = []

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], *, agent_name: str, **row: Any
    ) -> Any:
        await asyncio.sleep(0)
        if row.get("fails"):
            raise ValueError("no")
        calls = current_calls()
        if calls is not None:
            calls.calls.append(call(row["index"], 1))
        given = SimpleNamespace(name=agent_name, params=sampling_params, trajectory=trajectory, row=row)
        return await self._agent_loop_postprocess(given, False, **row)

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        return ("padded", output)

    async def _compute_score(self, outputs: list[Any], kwargs: dict[str, Any]) -> None:
        self.scored += outputs


class _Worker(StreamingAgentLoopWorkerMixin, _VerlsWorker):
    pass


async def test_a_sample_is_not_padded_and_knows_its_index() -> None:
    worker = _Worker()
    calls = SampleCalls()
    sample = {"raw_prompt": ["p"], "index": 0, "agent_name": "mine", "dummy_tensor": 1, "x": 2}
    (got,) = await worker.run_sample(sample, index=9, repeat=2, sampling_params={"stop": ["."]}, calls=calls)
    assert got.name == "mine" and worker.scored == [got]
    assert got.params["temperature"] == 0.7 and got.params["logprobs"] is True and got.params["stop"] == ["."]
    assert (got.trajectory["sample_index"], got.trajectory["rollout_n"]) == (9, 2)
    assert got.row == {"raw_prompt": ["p"], "index": 9, "priority": 9, "x": 2}
    assert calls.calls[0].prompt_tokens == 9


async def test_samples_do_not_mix_and_fail_alone() -> None:
    worker = _Worker()
    all_calls = [SampleCalls() for _ in range(20)]
    results = await asyncio.gather(
        *(
            worker.run_sample({"raw_prompt": [], "fails": i == 7}, index=i, calls=all_calls[i])
            for i in range(20)
        ),
        return_exceptions=True,
    )
    assert [isinstance(one, ValueError) for one in results] == [i == 7 for i in range(20)]
    assert [[c.prompt_tokens for c in calls.calls] for calls in all_calls] == [
        [] if i == 7 else [i] for i in range(20)
    ]
    assert current_calls() is None
    padded = await worker._run_agent_loop({}, {}, agent_name="first", index=1)
    assert padded[0] == "padded"


def test_generations_are_in_the_order_in_which_they_began() -> None:
    """A loop may ask for several at once: each has a number, and with it a seed, of its own."""
    calls = SampleCalls(seed=11)
    assert [calls.begin() for _ in range(4)] == [0, 1, 2, 3]
    for number in (2, 0, 3):  # one fails
        calls.complete(number, call(number, 1))
    assert [one.prompt_tokens for one in calls.calls] == [0, 2, 3]
    assert calls.begin() == 4
