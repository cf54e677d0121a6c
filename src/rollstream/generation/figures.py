"""The figures of a run at one moment, by name: what every tracker is told. Pure.

Names are `group/name`; units stand in the name, or in `docs/tracking.md`. A figure that nobody knows now (the
mean reward of a window in which nothing was scored, the load of an engine that does not tell it) is left out.
"""

from collections.abc import Mapping

from rollstream.engine.base import EngineLoad
from rollstream.generation.progress import Snapshot
from rollstream.generation.statistics import Statistics, Window


def run_figures(
    snapshot: Snapshot,
    rates: tuple[float, float],
    statistics: Statistics,
    window: Window,
    load: EngineLoad | None,
) -> dict[str, float]:
    """All figures.

    Args:
        snapshot: of the run's progress.
        rates: rollouts per second, sampled tokens per second.
        statistics: of this process.
        window: since the last figures.
        load: of the engine.
    """
    figures: dict[str, float] = {
        "progress/total": snapshot.total,
        "progress/done": snapshot.done,
        "progress/failed": snapshot.failed,
        "progress/unscored": snapshot.unscored,
        "progress/retries": snapshot.retries,
        "rate/rollouts_per_second": rates[0],
        "rate/tokens_per_second": rates[1],
        "tokens/sampled": statistics.tokens,
        "tools/calls": statistics.tool_calls,
        "tools/errors": statistics.tool_errors,
        "queue/in_flight": snapshot.in_flight,
        "queue/pending_rows": snapshot.pending_rows,
        "queue/saved_batches": snapshot.saved_batches,
        "engine/waiting": int(snapshot.waiting),
    }
    if snapshot.limit is not None:
        figures["queue/cap"] = snapshot.limit if snapshot.cap is None else snapshot.cap
    if snapshot.mean_reward is not None:
        figures["reward/mean_of_run"] = snapshot.mean_reward
    figures |= _rewards(window)
    if window.lengths.count:
        figures["response/length_mean"] = window.lengths.mean
        figures["response/length_max"] = window.lengths.largest
        figures["response/share_at_limit"] = window.at_limit / window.lengths.count
    if window.seconds.count:
        figures["rollout/seconds_mean"] = window.seconds.mean
        figures["rollout/seconds_max"] = window.seconds.largest
    figures |= {f"failures/{kind}": count for kind, count in statistics.failures.items()}
    if snapshot.replicas is not None:
        figures["engine/replicas_up"], figures["engine/replicas"] = snapshot.replicas
    if statistics.versions is not None:
        figures["engine/policy_version_min"], figures["engine/policy_version_max"] = statistics.versions
    return {**figures, **_load(load)}


def _rewards(window: Window) -> Mapping[str, float]:
    if not window.rewards.count:
        return {}
    found = {
        "reward/mean": window.rewards.mean,
        "reward/std": window.rewards.std,
        "reward/scored": window.rewards.count,
    }
    return found | {
        f"reward/{source}/mean": rewards.mean for source, rewards in window.by_source.items() if rewards.count
    }


def _load(load: EngineLoad | None) -> Mapping[str, float]:
    if load is None:
        return {}
    found: dict[str, float] = {"engine/running": load.running, "engine/queued": load.queued}
    if load.kv_usage is not None:
        found["engine/kv_usage"] = load.kv_usage
    if load.preemptions is not None:
        found["engine/preemptions"] = load.preemptions
    return found
