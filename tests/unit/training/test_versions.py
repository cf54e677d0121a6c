from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.errors import StalenessError, WeightUpdateError
from rollstream.training.versions import VersionLedger


def rollout(*versions: int) -> Any:
    """As much of a `Rollout` as the ledger looks at."""
    return SimpleNamespace(
        trajectories=[SimpleNamespace(policy_versions=[(3 * i, v) for i, v in enumerate(versions)])]
    )


def test_the_stamp_is_the_version_before_an_update_until_it_is_taken() -> None:
    ledger = VersionLedger()
    ledger.begin_update(1)
    assert ledger.engine_version == 0
    ledger.end_update(taken=True)
    assert ledger.engine_version == 1
    ledger.begin_update(2)
    ledger.end_update(taken=False)
    assert ledger.engine_version == 1  # it may have taken part of it: the older stamp is never too new
    ledger.begin_update(2)
    ledger.end_update(taken=True)
    assert ledger.engine_version == 2


def test_the_engine_does_not_go_back_nor_take_two_at_once() -> None:
    ledger = VersionLedger(engine_version=3)
    with pytest.raises(WeightUpdateError, match="does not fall to 2"):
        ledger.begin_update(2)
    ledger.begin_update(4)
    with pytest.raises(WeightUpdateError, match="version 4 is on its way"):
        ledger.begin_update(5)


@given(st.integers(0, 5), st.lists(st.lists(st.integers(0, 8), min_size=1, max_size=4), max_size=4))
@settings(deadline=None)
def test_tokens_older_than_the_stamp_are_found(start: int, versions: list[list[int]]) -> None:
    rollouts = [rollout(*one) for one in versions]
    oldest = min((version for one in versions for version in one), default=start)
    ledger = VersionLedger()
    if oldest < start:
        with pytest.raises(StalenessError, match=f"version {oldest}, but was at version {start}"):
            ledger.oldest(start, rollouts)
    else:
        # Newer tokens (weights that came in flight) do not make the group younger: the first token counts.
        assert ledger.oldest(start, rollouts) == start
    assert VersionLedger(token_versions="ignore").oldest(start, rollouts) == start


def test_staleness_is_counted_from_the_oldest() -> None:
    ledger = VersionLedger()
    assert ledger.record(3, [3, 2, 2]) == [0, 1, 1]
    assert ledger.record(4, [2]) == [2]
    assert ledger.histogram == Counter({1: 2, 0: 1, 2: 1})
