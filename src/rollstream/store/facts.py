"""What is counted of a rollout while a run goes on; small, so that it travels where the rollout need not."""

from dataclasses import dataclass

from rollstream.trajectory import Rollout


@dataclass(frozen=True, slots=True)
class RolloutFacts:
    """What statistics of a run are made of, for one rollout."""

    data_source: str
    response_lengths: tuple[int, ...]
    """Of its trajectories: tokens of the response, sampled or not."""
    at_limit: int
    """Trajectories that ended because there was no room for more tokens."""
    seconds: float
    """From dispatch to scored."""
    versions: tuple[int, int]
    """The lowest and the highest policy version that made its tokens."""


def rollout_facts(rollout: Rollout) -> RolloutFacts:
    """What is counted of a rollout."""
    versions = [version for one in rollout.trajectories for _, version in one.policy_versions] or [0]
    return RolloutFacts(
        data_source=rollout.data_source,
        response_lengths=tuple(len(one.response_ids) for one in rollout.trajectories),
        at_limit=sum(one.finish_reason == "length" for one in rollout.trajectories),
        seconds=float(rollout.final.metrics.total_s),
        versions=(min(versions), max(versions)),
    )
