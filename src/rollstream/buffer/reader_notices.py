"""What a reader that gets nothing is told: generators that fail, groups that its hooks spoiled (R10)."""

from collections.abc import Collection
from dataclasses import asdict
from typing import Any

from rollstream.buffer.generators import Rollouts
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.rollout_record import RolloutFailure

_LOOKED_AT = 100
"""Quarantined groups; their causes are the same, mostly."""


def failures_of(
    rollouts: Rollouts, task_type: str | None, of: Collection[str | None] | None
) -> list[RolloutFailure]:
    """Those of generators that would bring what was asked for: of this task and these rollouts."""
    return [
        one
        for one in rollouts.failures()
        if task_type in (None, one.task_type) and (of is None or one.rollout_id in of)
    ]


def reasons(
    ledger: Ledger, rollouts: Rollouts, task_type: str | None, of: Collection[str | None] | None
) -> list[dict[str, Any]]:
    """Each with `task_type`, `error` (one line), `traceback`, and what else there is to say.

    Args:
        ledger: has the quarantine.
        rollouts: know which generators fail.
        task_type: what was asked for; None: any.
        of: rollouts that were asked for; None: any.
    """
    found = [{**asdict(one), "message": str(one)} for one in failures_of(rollouts, task_type, of)]
    aside = [
        one
        for one in ledger.quarantined(limit=_LOOKED_AT)
        if task_type in (None, one.group.task_type) and (of is None or one.group.rollout_id in of)
    ]
    if aside:
        last = aside[-1]
        count = f"{len(aside)}{' or more' if len(aside) == _LOOKED_AT else ''}"
        error = (
            f"{count} groups are quarantined: {last.traceback.strip().rpartition(chr(10))[2]} "
            "(see GET /v1/quarantine)"
        )
        found.append(
            {
                "task_type": last.group.task_type,
                "rollout_id": last.group.rollout_id,
                "error": error,
                "message": error,
                "traceback": last.traceback,
                "final": False,
            }
        )
    return found
