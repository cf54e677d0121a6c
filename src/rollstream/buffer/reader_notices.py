"""What a reader that gets nothing is told: generators that fail, groups that its hooks spoiled (R10), what
else there is; and who starts a rollout, of what is odd about it.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

from rollstream.buffer.generators import Rollouts
from rollstream.buffer.ledger import Ledger
from rollstream.buffer.reads import Taken
from rollstream.buffer.rollout_record import RolloutFailure, RolloutRecord, near_misses

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


def notices(
    ledger: Ledger,
    rollouts: Rollouts,
    taken: Taken,
    task_type: str | None,
    of: Collection[str | None] | None,
) -> list[str]:
    """Why there may be nothing although nothing fails. Arguments as of `reasons`, and what the read got."""
    found = []
    if taken.passed_over:
        found.append(
            f"{taken.passed_over} groups are ready, but not for this read: they are of another task, of "
            "another rollout or (batch_size) of another size, or their instances were handed out within a "
            "cycle (--groups-per-cycle)"
        )
    last = rollouts.last
    if (
        last is not None
        and last.state in ("finished", "stopped")
        and task_type in (None, last.task_type)
        and (of is None or last.rollout_id in of)
        and not ledger.has_groups(last.rollout_id)
    ):
        found.append(
            f"rollout {last.rollout_id} of task {last.task_type!r} is {last.state} and all of it has left "
            "the buffer: nothing more comes of it until a rollout is started"
        )
    return found


def start_warnings(record: RolloutRecord, payload: Mapping[str, Any]) -> list[str]:
    """What is odd about a start of a rollout that was answered with success."""
    found = near_misses(payload)
    if record.state == "finished":
        found.append(
            f"rollout {record.rollout_id} of this payload has finished, and items of it are still in the "
            "buffer: nothing was started. Once they are delivered and acked (or dropped: POST "
            f"/v1/rollouts/{record.rollout_id}/drop), the same payload starts a new one"
        )
    return found
