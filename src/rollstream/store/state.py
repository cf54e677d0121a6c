"""What a run directory holds, as counts and key states."""

from dataclasses import dataclass, field

from rollstream.store.batch import BatchKeys
from rollstream.store.keys import KeyStates


@dataclass(slots=True)
class RewardTotals:
    """Sum over final trajectories."""

    total: float = 0.0
    scored: int = 0
    unscored: int = 0
    """Those whose reward function failed; one without a reward function is in neither count."""

    @property
    def mean(self) -> float | None:
        """Mean reward; None when nothing was scored."""
        return self.total / self.scored if self.scored else None

    def add(self, reward: float | None, failed: bool) -> None:
        """Counts one final trajectory; `failed`: its reward function failed."""
        if reward is not None:
            self.total += reward
            self.scored += 1
        elif failed:
            self.unscored += 1

    def add_batch(self, keys: BatchKeys) -> None:
        """Counts the final trajectories of a batch."""
        rewards = keys.reward[keys.final]
        scored = rewards[rewards == rewards]
        self.total += float(scored.sum())
        self.scored += len(scored)
        self.unscored += keys.unscored


@dataclass(slots=True)
class RunState:
    """What a run directory holds."""

    keys: KeyStates
    rewards: RewardTotals = field(default_factory=RewardTotals)
    batches: list[int] = field(default_factory=list)
    """Numbers of the good batches."""
    unsealed: list[int] = field(default_factory=list)
    """Numbers of closed journal files that wait to be sealed."""
    open_journal: int | None = None
    """Number of the journal file to continue."""
    open_end: int = 0
    """Where in it the next frame belongs."""
    journal_rows: int = 0
    """Rows in the journal to continue."""
    journal_bytes: int = 0
    """Bytes of them, uncompressed (about)."""
    rows: int = 0
    """Trajectories in batches and journals."""
    torn: int = 0
    """Bytes of the torn tail that was cut."""
    damage: list[str] = field(default_factory=list)
    """One line per damaged file or stretch."""

    @property
    def next_number(self) -> int:
        """The next unused journal number."""
        used = [*self.batches, *self.unsealed]
        if self.open_journal is not None:
            used.append(self.open_journal)
        return max(used, default=-1) + 1
