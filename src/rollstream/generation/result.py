"""How a generation run ended."""

from dataclasses import dataclass, field
from pathlib import Path

from rollstream.store.summary import FailureCause


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """How a run ended. Counts of rollouts."""

    run_dir: Path
    total: int
    completed: int
    """Durable, earlier runs included."""
    failed: int
    unscored: int
    """Completed without a reward: no rule knows their data source, or the reward function failed."""
    generated: int
    """Completed by this call."""
    failed_now: int
    """Recorded as failed by this call."""
    mean_reward: float | None
    """Over the scored ones."""
    artifact: Path | None
    """The merged artifact, when it was made and is up to date."""
    artifact_rows: int
    elapsed_s: float
    damage: list[str]
    """What was found damaged or missing when the run was opened."""
    signal: int | None = None
    """The signal that stopped the run before its end."""
    max_failed_share: float = 0.0
    tool_calls: int = 0
    """Of rollouts that this call completed."""
    tool_errors: int = 0
    """Of those calls: unknown tools, unreadable arguments, exceptions, timeouts."""

    policy_versions: tuple[int, int] | None = None
    """The lowest and the highest version that made tokens of this call's rollouts; None without any."""
    reward_failed: int = 0
    """Of the unscored ones: the reward function failed on them."""
    unscored_sources: dict[str, int] = field(default_factory=dict)
    """Data sources that no reward rule knows, with their numbers of prompt rows."""
    uploaded: str | None = None
    """Where `generation.upload_artifact` put the trajectories; None when not asked for, or when it failed."""
    failure_causes: list[FailureCause] = field(default_factory=list)
    """Of the rollouts that failed in this call."""
    equal_rewards: float | None = None
    """The reward of all scored ones, where there are several and it is the same."""
    gave_up: str | None = None
    """Why the run stopped itself before its end (`generation.stop_after_failures`)."""

    @property
    def complete(self) -> bool:
        """Whether every rollout is done or recorded as failed."""
        return self.completed + self.failed >= self.total

    @property
    def exit_code(self) -> int:
        """0 done; 1 more failed (or unscored by an error) than allowed; 128 + signal when stopped."""
        if self.signal is not None:
            return 128 + self.signal
        allowed = self.max_failed_share * self.total
        return 1 if self.failed + self.reward_failed > allowed or not self.complete else 0
