"""Credit for single turns and tokens: returns and advantages of step rewards, and of a teacher, as pure functions.

A reward may give each turn of the model a number (`steps`). Its return is what came from it on; its advantage compares
that with the turns of the group's other rollouts, as GRPO compares rewards and GiGPO (https://arxiv.org/abs/2505.10978)
compares turns in the same state.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from itertools import accumulate
from statistics import fmean, stdev
from typing import Final

from rollstream.errors import DataError
from rollstream.rollout.teachers import NAME
from rollstream.trajectory import Trajectory, reward_values, turn_values

_EPSILON: Final = 1e-4
"""Added to a standard deviation, as TRL does."""


def discounted_returns(steps: Sequence[float], gamma: float = 1.0) -> list[float]:
    """For each turn its step reward and `gamma` times the return of the next one."""
    return [*accumulate(reversed(steps), lambda later, step: step + gamma * later)][::-1]


def step_advantages(
    group: Sequence[Sequence[float]],
    *,
    states: Sequence[Sequence[Hashable]] | None = None,
    scale: bool = True,
) -> list[list[float]]:
    """How much better each turn of a group did than the turns that it is compared with.

    Args:
        group: the returns of each rollout's turns.
        states: of the same shape: turns in equal ones are compared (GiGPO's anchor states). None: turns of the same
            number are.
        scale: divide by the standard deviation, too.

    Returns:
        of the shape of `group`; 0 for a turn that is compared with none.

    Raises:
        DataError: `states` has another shape.
    """
    if states is None:
        states = [range(len(turns)) for turns in group]
    if [*map(len, states)] != [*map(len, group)]:
        raise DataError("states: one for each turn of each rollout")
    compared = defaultdict[Hashable, list[float]](list)
    for turns, own in zip(group, states, strict=True):
        for value, state in zip(turns, own, strict=True):
            compared[state].append(value)
    means = {state: fmean(values) for state, values in compared.items()}
    deviations = {
        state: (stdev(values) if len(values) > 1 else 0.0) + _EPSILON if scale else 1.0
        for state, values in compared.items()
    }
    return [
        [(value - means[state]) / deviations[state] for value, state in zip(turns, own, strict=True)]
        for turns, own in zip(group, states, strict=True)
    ]


def token_advantages(
    group: Sequence[Trajectory],
    *,
    step_weight: float,
    gamma: float = 1.0,
    token_weight: float = 0.0,
    distill_coef: float = 0.0,
    scale: bool = True,
) -> list[list[float]]:
    """What step and token rewards, and a teacher, add to the advantage of each response token of a group.

    Args:
        group: the trajectories of one prompt.
        step_weight: of `step_advantages` of discounted returns, on all tokens of a turn.
        gamma: see `discounted_returns`.
        token_weight: of `tokens`, which are added as they are.
        distill_coef: of `reverse_kl`, added as it is.
        scale: see `step_advantages`.
    """
    steps = [
        one.reward_extra["steps"]
        if reward_values("step_rewards", one.reward_extra, one.response_mask) is not None
        else None
        for one in group
    ]
    known = step_advantages([discounted_returns(one or [], gamma) for one in steps], scale=scale)
    found = []
    for one, own, turns in zip(group, steps, known, strict=True):
        mask = one.response_mask
        of_steps = [0.0] * len(mask) if own is None else turn_values(mask, turns)
        of_tokens = reward_values("token_rewards", one.reward_extra, mask) or [0.0] * len(mask)
        found.append(
            [
                step_weight * step + token_weight * token + distill_coef * apart
                for step, token, apart in zip(of_steps, of_tokens, reverse_kl(one), strict=True)
            ]
        )
    return found


def reverse_kl(trajectory: Trajectory) -> list[float]:
    """For each sampled token how far the teacher's log-prob is above the sampler's; 0.0 elsewhere, and without them.

    Its mean estimates -KL(student || teacher): https://thinkingmachines.ai/blog/on-policy-distillation/.
    """
    taught, sampled = trajectory.streams.get(NAME), trajectory.response_logprobs
    if taught is None or sampled is None:
        return [0.0] * len(trajectory.response_mask)
    values = zip(taught, sampled, trajectory.response_mask, strict=True)
    return [mine - theirs if mask else 0.0 for mine, theirs, mask in values]
