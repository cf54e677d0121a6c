"""The version ledger: which weights the engine has, and how stale what was trained on has been.

    trainer    0 ------train 0------> 1 ------train 1------> 2
    engine     0 ----------------------[update]--> 1 ------------[update]--> 2
    a group         begun: start = 0 .......... finished ... delivered in batch 1: staleness 1

A group is stamped with the engine's version when it is begun, before any wait: stamped later it would seem
fresher than it is. Its tokens may be newer (weights that arrive in flight), and are never older unless an
engine did not take an update that it was told to have taken.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from rollstream.errors import StalenessError, WeightUpdateError
from rollstream.training.group import token_versions

TokenVersions = Literal["check", "ignore"]
"""`check`: a group with tokens older than its stamp has failed; `ignore`: the tokens' stamps mean nothing."""


class VersionLedger:
    """Not thread-safe: the group buffer's lock guards it.

    Args:
        engine_version: what the engine has now.
        token_versions: whether to believe what is stamped on tokens.
    """

    def __init__(self, *, engine_version: int = 0, token_versions: TokenVersions = "check") -> None:
        self.engine_version = engine_version
        """Of groups that are begun now. While an update is under way, the one before it."""
        self.updating: int | None = None
        """The version on its way to the engine."""
        self.histogram: Counter[int] = Counter()
        """Groups trained on, by staleness."""
        self._token_versions = token_versions

    def begin_update(self, version: int) -> None:
        """New weights are on their way. Raises `WeightUpdateError`: others are, or these are older."""
        if self.updating is not None:
            raise WeightUpdateError(f"version {self.updating} is on its way to the engine already")
        if version < self.engine_version:
            raise WeightUpdateError(
                f"the engine is at version {self.engine_version}, which does not fall to {version}"
            )
        self.updating = version

    def end_update(self, *, taken: bool) -> None:
        """The update came to its end. One that failed leaves the old stamp: it is never too new."""
        assert self.updating is not None
        if taken:
            self.engine_version = self.updating
        self.updating = None

    def oldest(self, start: int, rollouts: Iterable[Any]) -> int:
        """The oldest version with a part in a group begun at `start`: its staleness is counted from there.

        Raises:
            StalenessError: tokens are older than the stamp.
        """
        versions = token_versions(rollouts) if self._token_versions == "check" else []
        if versions and min(versions) < start:
            raise StalenessError(
                f"the engine stamped tokens with version {min(versions)}, but was at version {start} when "
                "their group was begun: a replica missed an update, an engine that is new was not told its "
                "version (start(weights=…)), or it does not stamp versions (token_versions='ignore' then)"
            )
        return start

    def record(self, step: int, oldest: Iterable[int]) -> list[int]:
        """Notes a batch that is trained with version `step`; returns the staleness of each of its groups."""
        staleness = [step - version for version in oldest]
        self.histogram.update(staleness)
        return staleness
