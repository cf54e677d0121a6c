"""Artifacts of given rollouts, for the tests of what reads them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from rollstream.store.batch import batch_metadata, build_table, write_tables_durably
from rollstream.store.records import RecordCodec
from rollstream.trajectory import LogprobKind, Metrics, Rollout, Trajectory


def write_artifact(path: Path, rollouts: Sequence[Rollout], *, logprobs: LogprobKind | None = None) -> Path:
    codec = RecordCodec()
    records = [codec.decode_rollout(codec.encode(one).body) for one in rollouts]
    write_tables_durably(path, [build_table(records)], batch_metadata(bytes(16), logprobs))
    return path


def conversation(answers: int, *, few_shot: int = 0) -> list[dict[str, Any]]:
    """A system message, examples, a question, and sampled answers with a tool's result between them."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}]
    for number in range(few_shot):
        messages += [
            {"role": "user", "content": f"e{number}"},
            {"role": "assistant", "content": f"a{number}"},
        ]
    messages.append({"role": "user", "content": "q"})
    for number in range(answers):
        messages += [{"role": "tool", "content": "r"}] if number else []
        messages.append({"role": "assistant", "content": f"answer {number}"})
    return messages


def trajectory(
    prompt_ids: Sequence[int] = (1, 2, 3),
    turns: Sequence[Sequence[int]] = ((4, 5), (6,), (7, 8)),
    *,
    reward: float | None = 0.5,
    logprobs: bool = True,
    few_shot: int = 0,
    **fields: Any,
) -> Trajectory:
    """`turns`: what the model sampled and what it was given, by turns; the first is the model's."""
    ids = [token for turn in turns for token in turn]
    mask = [1 - number % 2 for number, turn in enumerate(turns) for _ in turn]
    answers = -(-len(turns) // 2)
    return Trajectory(
        prompt_ids=list(prompt_ids),
        response_ids=ids,
        response_mask=mask,
        response_logprobs=[-0.5 * bit * (at + 1) for at, bit in enumerate(mask)] if logprobs else None,
        messages=conversation(answers, few_shot=few_shot),
        finish_reason="stop",
        num_turns=len(turns) + 1,
        reward=reward,
        metrics=Metrics(engine_calls=answers),
        **fields,
    )


def rollouts(*trajectories: Trajectory, n: int = 2) -> list[Rollout]:
    """A rollout of each; `n` to a prompt row."""
    return [
        Rollout(at // n, at % n, f"{at // n:032x}", [one], "test", ground_truth=str(at))
        for at, one in enumerate(trajectories)
    ]


_ids = st.lists(st.integers(0, 150_000), min_size=1, max_size=6)


@st.composite
def trajectories(draw: st.DrawFn, *, scored: bool, logprobs: bool) -> Trajectory:
    return trajectory(
        draw(_ids),
        draw(st.lists(_ids, max_size=5)),
        reward=draw(st.floats(-4, 4, width=32)) if scored else None,
        logprobs=logprobs,
        few_shot=draw(st.integers(0, 2)),
        extra=draw(st.dictionaries(st.sampled_from(["ability", "level"]), st.integers(0, 9))),
        reward_extra=draw(st.dictionaries(st.sampled_from(["acc", "level"]), st.booleans())),
    )


@st.composite
def runs(draw: st.DrawFn) -> list[Rollout]:
    """Rollouts of which all or none have rewards, and log-probs."""
    one = trajectories(scored=draw(st.booleans()), logprobs=draw(st.booleans()))
    return rollouts(*draw(st.lists(one, min_size=1, max_size=8)))
