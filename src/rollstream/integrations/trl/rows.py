"""Rollouts as rows of a training batch: lists for TRL, and rows of their own for the snapshots.

    N rollouts -> N final trajectories -> TRL: rewards, advantages by group, logs
               -> M - N snapshots      -> `append_rows`: rows behind those that TRL has made

A rollout may have several trajectories: those before a context edit (snapshots), and the final one. TRL's groups
are of N rollouts, so it is given the final ones; each snapshot is a row of its own behind them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rollstream.data.mixed import SOURCE
from rollstream.errors import TrainingError
from rollstream.integrations.trl.groups import failure_of
from rollstream.trajectory import Rollout, Trajectory

if TYPE_CHECKING:
    import torch

Fields = dict[str, list[Any]]
"""The fields that TRL's `rollout_func` returns, and those that reward functions get beside them, see `to_rows`."""


@dataclass(frozen=True, slots=True)
class Row:
    """A trajectory as TRL holds it: never without a token."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """1 where the model sampled the token."""
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A trajectory before the final one."""

    rollout: int
    """Place of its rollout in the batch, over all processes."""
    reward: float | None
    row: Row


@dataclass(slots=True)
class BatchRows:
    """The rollouts of a batch, of all processes."""

    fields: Fields
    """The final trajectories, one entry for each rollout."""
    snapshots: list[Snapshot]
    figures: dict[str, float]
    """For the log: means over the rollouts that did not fail."""
    added: list[list[float]] = field(default_factory=list)
    """To the advantage of each response token by step and token rewards, and by a teacher: of the final trajectories,
    then of the snapshots; empty where these do not count."""

    @property
    def trained(self) -> int:
        """Trajectories that are trained on."""
        return self.fields["env_failed"].count(False) + len(self.snapshots)


def to_rows(rollouts: Sequence[Rollout], *, end_id: int) -> BatchRows:
    """Rollouts, in their order, as rows.

    Args:
        rollouts: of all groups, one after the other.
        end_id: stands, masked, for a prompt or a response without any token, which TRL cannot hold.

    Raises:
        TrainingError: a trajectory has no log-probs.
    """
    finals, snapshots = list[dict[str, Any]](), list[Snapshot]()
    for place, rollout in enumerate(rollouts):
        *rows, last = [_row(rollout, trajectory, end_id) for trajectory in rollout.trajectories]
        rewards = [trajectory.reward for trajectory in rollout.trajectories[:-1]]
        snapshots += [Snapshot(place, reward, row) for reward, row in zip(rewards, rows, strict=True)]
        finals.append(
            {
                "prompt_ids": last.prompt_ids,
                "completion_ids": last.completion_ids,
                "logprobs": last.logprobs,
                "env_mask": last.mask,
                "env_reward": rollout.final.reward,
                "env_messages": rollout.final.messages,
                "env_reward_extra": rollout.final.reward_extra,
                "env_failed": failure_of(rollout) is not None,
            }
        )
    fields = {name: [final[name] for final in finals] for name in finals[0]}
    return BatchRows(fields, snapshots, _figures(rollouts))


def empty_row(end_id: int) -> Row:
    """A row of one masked token."""
    return Row([end_id], [end_id], [0], [0.0])


def _row(rollout: Rollout, trajectory: Trajectory, end_id: int) -> Row:
    if trajectory.response_logprobs is None:
        raise TrainingError(f"rollout ({rollout.index}, {rollout.repeat}) has no log-probs")
    prompt = list(trajectory.prompt_ids) or [end_id]
    if not trajectory.response_ids:
        return Row(prompt, [end_id], [0], [0.0])
    columns = (trajectory.response_ids, trajectory.response_mask, trajectory.response_logprobs)
    return Row(prompt, *map(list, columns))  # type: ignore[arg-type]


def _figures(rollouts: Sequence[Rollout]) -> dict[str, float]:
    done = [rollout.trajectories for rollout in rollouts if failure_of(rollout) is None]
    names = {
        "turns": "engine_calls",
        "tool_calls": "tool_calls",
        "tool_errors": "tool_errors",
        "tool_s": "tool_s",
    }
    figures = {
        name: [sum(getattr(trajectory.metrics, metric) for trajectory in each) for each in done]
        for name, metric in names.items()
    }
    figures["trajectories"] = [len(each) for each in done]
    means = {f"rollstream/{name}": fmean(values) if values else 0.0 for name, values in figures.items()}
    by_source: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        if isinstance(name := rollout.final.extra.get(SOURCE), str):
            by_source.setdefault(name, []).append(rollout)
    for name, some in by_source.items():
        rewards = [one.final.reward for one in some if one.final.reward is not None]
        means[f"rollstream/{name}/share"] = len(some) / len(rollouts)
        means[f"rollstream/{name}/failed"] = float(sum(failure_of(one) is not None for one in some))
        if rewards:
            means[f"rollstream/{name}/reward"] = fmean(rewards)
    return {**means, "rollstream/failed": float(len(rollouts) - len(done))}


def take_slice(fields: Fields, rank: int, ranks: int) -> Fields:
    """The part of one process: equal consecutive slices, in the order of the ranks."""
    total = len(fields["prompt_ids"])
    if total % ranks:
        raise TrainingError(f"{total} rollouts cannot be dealt to {ranks} processes evenly")
    size = total // ranks
    return {name: values[rank * size : (rank + 1) * size] for name, values in fields.items()}


def env_reward(*, env_reward: list[float | None], **_: Any) -> list[float | None]:
    """The environment's reward as a TRL reward function; None: not scored, left out of its group's mean."""
    return env_reward


def with_added(output: dict[str, Any], added: Sequence[Sequence[float]]) -> dict[str, Any]:
    """TRL's tensors with more advantage for single tokens: of the first rows, that of the others stays."""
    rows, width = output["completion_ids"].shape
    more = output["advantages"].new_zeros(rows, width)
    for row, values in zip(more, added, strict=False):
        row[: len(values)] = row.new_tensor(values)
    return {**output, "advantages": output["advantages"].unsqueeze(1) + more}


# --- rows behind those that TRL has made


def append_rows(
    output: dict[str, Any], rows: Sequence[Row], *, pad_id: int, multiple: int | None
) -> dict[str, Any]:
    """TRL's tensors of a batch with further rows, padded as TRL pads.

    Args:
        output: of `_generate_and_score_completions`; `[B, P]` and `[B, C]`.
        rows: appended in their order.
        pad_id: of the tokenizer.
        multiple: TRL's `pad_to_multiple_of`.
    """
    import torch
    from trl.trainer.utils import pad

    prompts, completions = [row.prompt_ids for row in rows], [row.completion_ids for row in rows]
    grown = dict(output)
    for name, values, fill, side in (
        ("prompt_ids", prompts, pad_id, "left"),
        ("prompt_mask", [[1] * len(ids) for ids in prompts], 0, "left"),
        ("completion_ids", completions, pad_id, "right"),
        ("completion_mask", [[1] * len(ids) for ids in completions], 0, "right"),
        ("tool_mask", [row.mask for row in rows], 1, "right"),
        ("sampling_per_token_logps", [row.logprobs for row in rows], 0.0, "right"),
    ):
        tensors = [*output[name], *(torch.tensor(value).to(output[name]) for value in values)]
        grown[name] = pad(tensors, fill, side, pad_to_multiple_of=multiple)
    return grown


def snapshot_advantages(
    rewards: "torch.Tensor",
    snapshots: Sequence[Snapshot],
    *,
    weights: "torch.Tensor",
    group_size: int,
    scale: str,
    aggregation: str,
) -> "torch.Tensor":
    """Advantages of a batch with snapshots, `[N + S]`: of the final trajectories, then of the snapshots.

    The formulas are TRL's, over groups that also have the snapshots with a reward of their own: the mean and the
    deviation know every reward, so no advantage is beyond what TRL gives to a group of that size. A snapshot's
    reward stands in the place of the environment's; what other functions gave the rollout is the snapshot's, too.
    A snapshot that has its rollout's reward has its rollout's advantage, and counts once with it. One without a
    reward has the advantage 0, unless the environment gave the rollout none either.

    Args:
        rewards: `[N, F]` of the final trajectories, the environment's first; NaN where there is none.
        snapshots: of these rollouts.
        weights: `[F]`.
        group_size: rollouts of a group.
        scale: TRL's `scale_rewards`.
        aggregation: TRL's `multi_objective_aggregation`.
    """
    import torch
    from trl.trainer.utils import nanstd

    places = torch.tensor(
        [snapshot.rollout for snapshot in snapshots], dtype=torch.long, device=rewards.device
    )
    own = rewards.new_tensor([torch.nan if one.reward is None else one.reward for one in snapshots])
    outcome = rewards[places, 0]
    values = torch.cat([rewards, rewards[places]])
    values[len(rewards) :, 0] = own
    groups = torch.cat([torch.arange(len(rewards), device=rewards.device), places]) // group_size
    final = torch.ones(len(rewards), dtype=torch.bool, device=rewards.device)
    counts = torch.cat([final, ~own.isnan() & (own != outcome)])
    members = [groups == group for group in range(len(rewards) // group_size)]

    def total(parts: torch.Tensor) -> torch.Tensor:
        """A function that scored one trajectory of a group has no deviation there: it counts as 0, as in TRL."""
        return (parts * weights).nansum(1).masked_fill(values.isnan().all(1), torch.nan)

    if aggregation == "normalize_then_sum":
        parts = values.clone()
        for group in members:
            compared = values[group & counts]
            deviation = nanstd(compared, dim=0) + _EPSILON
            parts[group] = (values[group] - compared.nanmean(0)) / deviation
        totals = total(parts)
        advantages = (totals - totals[counts].nanmean()) / (nanstd(totals[counts]) + _EPSILON)
    else:
        advantages = totals = total(values)
        for group in members:
            compared = totals[group & counts]
            advantages = torch.where(group, totals - compared.nanmean(), advantages)
            if scale != "none":
                deviation = nanstd(totals[counts] if scale == "batch" else compared) + _EPSILON
                advantages = torch.where(group, advantages / deviation, advantages)
    advantages[len(rewards) :].masked_fill_(own.isnan() & ~outcome.isnan(), 0.0)
    return advantages.nan_to_num(nan=0.0)


_EPSILON = 1e-4
"""Added to a standard deviation, as TRL does."""
