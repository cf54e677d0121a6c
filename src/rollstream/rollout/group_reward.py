"""Rewards of whole groups: a function that sees all rollouts of a prompt, such as a judge that compares them."""

from collections.abc import Awaitable, Callable, Sequence
from itertools import compress

from rollstream.errors import RewardError
from rollstream.reward.base import FunctionReward, Score, check_counts, last_answer, scored_row
from rollstream.reward.processes import ProcessReward
from rollstream.trajectory import OWN_REWARD, PromptRow, Rollout

GroupReward = FunctionReward | ProcessReward
"""One that `sees_group`."""

Judge = Callable[[Sequence[Rollout]], Awaitable[None]]
"""`score_group` by a certain reward."""


async def score_group(
    reward: GroupReward,
    rollouts: Sequence[Rollout],
    *,
    decode: Callable[[list[int]], str],
    snapshots: str = "outcome",
    on_error: Callable[[RewardError], object] = lambda error: None,
) -> None:
    """Gives the rollouts of a prompt their rewards, when all are there.

    Args:
        reward: sees the group.
        rollouts: those that did not fail, as they were stored, without rewards. Those with one of their own keep it.
        decode: the text of sampled ids, where no message has the answer.
        snapshots: what those without a reward get: "none", or that of their rollout.
        on_error: called when the reward fails, which leaves None and `error` in each `reward_extra`.
    """
    rollouts = [one for one in rollouts if OWN_REWARD not in one.final.extra]
    if not rollouts:
        return
    rows, answers = zip(*(_seen(one, decode) for one in rollouts), strict=True)
    try:
        scores = await reward.score_group(rows, answers)
        for rollout, score in zip(rollouts, scores, strict=True):
            check_counts(score.extra, rollout.final)
    except RewardError as error:
        scores = [Score(None, {"error": " ".join(f"RewardError: {error}".split())[:500]})] * len(rollouts)
        on_error(error)
    for rollout, (found, extra) in zip(rollouts, scores, strict=True):
        give_reward(rollout, found, extra, snapshots=snapshots)


def give_reward(
    rollout: Rollout, found: float | None, extra: dict[str, object], *, snapshots: str = "outcome"
) -> None:
    """Puts a reward into a rollout, and into those of its snapshots that have none."""
    *earlier, final = rollout.trajectories
    final.reward, final.reward_extra = found, {**final.reward_extra, **extra}
    for one in earlier if snapshots != "none" else ():
        if one.reward is None and not one.is_side_call and OWN_REWARD not in one.extra:
            one.reward = found
            one.reward_extra |= {"error": extra["error"]} if found is None and "error" in extra else {}


def _seen(rollout: Rollout, decode: Callable[[list[int]], str]) -> tuple[PromptRow, str]:
    """A rollout as the reward sees it, and its answer."""
    final, info = rollout.final, rollout.final.extra.get("extra_info") or {}
    program, answer = final.extra.get("gateway"), None
    if isinstance(program, dict):  # the reward sees the whole conversation, as at the end of the program
        answer, info = program.get("answer"), {**info, "messages": final.messages}
    if answer is None and (answer := last_answer(final.messages)) is None:
        answer = decode([*compress(final.response_ids, final.response_mask)])
    row = PromptRow(
        rollout.index, rollout.prompt_key, [], rollout.data_source, rollout.ground_truth, extra_info=info
    )
    return scored_row(row, final), answer
