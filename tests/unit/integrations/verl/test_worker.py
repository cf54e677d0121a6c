"""What a verl loop gave, as a trajectory; and the worker's part of it, with a stand-in for verl's."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollstream.integrations.verl.worker import (
    EngineCall,
    SampleCalls,
    StreamingAgentLoopWorkerMixin,
    current_calls,
    finish_reason,
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


def call(prompt: int, ids: Sequence[int], *versions: tuple[int, int], reason: str = "stop") -> EngineCall:
    return EngineCall(prompt, ids, list(versions) or [(0, 0)], reason, 3)


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
    calls = [call(3, [100, 101], (0, 7)), call(7, [104], (0, 8), reason="length")]
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


ROW = [{"role": "user", "content": "?"}]


def several(outputs: list[Any], calls: list[EngineCall]) -> list[Any]:
    found = to_trajectories(outputs, calls, messages=ROW, decode=decode)
    check_trajectories(found, logprobs=True)
    assert [one.is_snapshot for one in found] == [True] * (len(found) - 1) + [False]
    return found


def test_each_output_has_what_its_own_generations_said() -> None:
    """A conversation that is cut, goes on, and is then rewritten: three outputs, and a summary beside them."""
    calls = [
        call(2, [100, 101], (0, 5), (1, 6), reason="length"),
        call(50, [9], (0, 1)),  # no output has it
        call(5, [100], (0, 7)),
        call(3, [100, 101], (0, 8), reason="abort"),
    ]
    outputs = [output([1, 2], [1, 1]), output([1, 2, 100, 101, 7], [1]), output([3, 4, 5], [1, 1])]
    cut, goes_on, anew = several(outputs, calls)
    assert [one.policy_versions for one in (cut, goes_on, anew)] == [[(0, 5), (1, 6)], [(0, 7)], [(0, 8)]]
    assert [one.finish_reason for one in (cut, goes_on, anew)] == ["length", "stop", "aborted"]
    assert [one.metrics.engine_calls for one in (cut, goes_on, anew)] == [1, 1, 2]
    answer = {"role": "assistant", "content": "100 101"}
    assert cut.messages == [*ROW, answer]
    assert goes_on.messages == [*ROW, answer, {"role": "tool", "content": "7"}, answer | {"content": "100"}]
    assert anew.messages == [{"role": "user", "content": "3 4 5"}, answer]
    assert [one.extra["prompt_messages"] for one in (cut, goes_on, anew)] == [1, 3, 1]


def test_answers_side_by_side_to_one_prompt() -> None:
    """Best of three as a list: each answer is found by its tokens, whatever the order of the outputs."""
    outputs = [output([1], [1, 1, 1], response_ids=[5, 6, last], extra_fields={}) for last in (9, 7, 8)]
    calls = [call(1, [5, 6, last], (0, last)) for last in (7, 8, 9)]
    found = several(outputs, calls)
    assert [one.policy_versions for one in found] == [[(0, 9)], [(0, 7)], [(0, 8)]]
    assert [one.metrics.engine_calls for one in found] == [1, 1, 1]
    assert all(one.messages[:1] == ROW for one in found)


def test_what_a_loop_says_of_its_conversation_and_its_end_holds() -> None:
    said = {"messages": [*ROW, {"role": "assistant", "content": "a"}], "finish_reason": "max_turns"}
    given_by_loop = output([1], [1], extra_fields={**said, "prompt_messages": 1})
    (one,) = several([given_by_loop], [call(1, [100], reason="length")])
    assert (one.messages, one.finish_reason, one.extra) == (
        said["messages"],
        "max_turns",
        {"prompt_messages": 1},
    )


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
    calls: list[EngineCall] = []
    expected: list[int] = []
    ids: list[int] = []
    mask: list[int] = []
    for between, tokens, versions in turns:
        if calls:
            expected += [expected[-1]] * between
            ids += [-1] * between
            mask += [0] * between
        sampled = list(range(len(ids), len(ids) + tokens))
        runs = [(start, version) for start, version in enumerate(versions) if start < tokens]
        calls.append(EngineCall(5 + len(ids), sampled, runs, "stop"))
        expected += [runs[min(i, len(runs) - 1)][1] for i in range(tokens)]
        ids += sampled
        mask += [1] * tokens
    cut = output([0] * 5, mask[:response_length], response_ids=ids[:response_length])
    (trajectory,) = to_trajectories([cut], calls, messages=[], decode=decode)
    starts = [start for start, _ in trajectory.policy_versions]
    assert starts[0] == 0 and starts == sorted(set(starts))
    decoded = [[v for s, v in trajectory.policy_versions if s <= i][-1] for i in range(len(cut.response_ids))]
    assert decoded == expected[:response_length]


def test_tokens_of_no_generation_have_the_lowest_version() -> None:
    calls = [call(5, [1, 2, 3, 4], (0, 3)), call(2, [8] * 9, (0, 2), (4, 5))]
    for known, wanted in ((calls, [(0, 2)]), ([], [(0, 0)])):
        (one,) = to_trajectories([output([0] * 5, [1] * 4)], known, messages=[], decode=decode)
        assert one.policy_versions == wanted


@pytest.mark.parametrize(
    ("said", "reason"),
    [("completed", "stop"), (None, "stop"), ("length", "length"), ("abort", "aborted"), ("max_turns",) * 2],
)
def test_reasons(said: str | None, reason: str) -> None:
    assert finish_reason(said) == reason


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
        self,
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        *,
        agent_name: str,
        trace: bool = True,
        **row: Any,
    ) -> Any:
        await asyncio.sleep(0)
        if row.get("fails"):
            raise ValueError("no")
        calls = current_calls()
        if calls is not None:
            calls.complete(calls.begin(), call(row["index"], [1]))
        given = SimpleNamespace(
            name=agent_name, params=sampling_params, trajectory=trajectory, row=row, trace=trace
        )
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
    sample |= {"sampling_params": {"temperature": 0}}  # the run's to read: a loop gets them once
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


@pytest.mark.parametrize(("most", "traced"), [(None, [0, 0, 1, 2]), (1, [0, 0]), (0, [])])
async def test_some_samples_are_traced_with_all_repeats(
    monkeypatch: pytest.MonkeyPatch, most: int | None, traced: list[int]
) -> None:
    config = SimpleNamespace(**vars(_Worker.rollout_config), trace={"max_samples_per_step_per_worker": most})
    monkeypatch.setattr(_Worker, "rollout_config", config)
    worker = _Worker()
    given = [await worker.run_sample({"raw_prompt": []}, index=index) for index in (0, 0, 1, 2)]
    assert [one.row["index"] for (one,) in given if one.trace] == traced


def test_generations_are_in_the_order_in_which_they_began() -> None:
    """A loop may ask for several at once: each has a number, and with it a seed, of its own."""
    calls = SampleCalls(seed=11)
    assert [calls.begin() for _ in range(4)] == [0, 1, 2, 3]
    for number in (2, 0, 3):  # one fails
        calls.complete(number, call(number, [1]))
    assert [one.prompt_tokens for one in calls.calls] == [0, 2, 3]
    assert calls.begin() == 4
