"""A rollout that failed for good, as a trainer of whole groups takes it: no token, and no reward."""

import logging
from collections.abc import Sequence

from rollstream.errors import GroupFailedError
from rollstream.integrations.trl.bounds import Runs
from rollstream.training.plan import PlannedGroup
from rollstream.trajectory import Failure, PromptRow, Rollout, Trajectory

logger = logging.getLogger(__name__)

_FAILED = "rollstream_failed"
"""In the `extra` of the stand-in's trajectory: the error."""


class ForgivingWorker:
    """A rollout worker that gives a stand-in where the other one gives a failure."""

    def __init__(self, worker: Runs) -> None:
        self._worker = worker

    async def run(self, row: PromptRow, repeat: int) -> Rollout:
        """See `RolloutWorker.run`."""
        result = await self._worker.run(row, repeat)
        return stand_in(row, result) if isinstance(result, Failure) else result


def stand_in(row: PromptRow, failure: Failure) -> Rollout:
    """A rollout with neither prompt nor response, of no version, and without a reward."""
    trajectory = Trajectory(
        prompt_ids=[],
        response_ids=[],
        response_mask=[],
        response_logprobs=[],
        messages=list(row.messages),
        finish_reason="aborted",
        policy_versions=[],
        extra={_FAILED: f"after {failure.attempts} attempts, {failure.error}\n{failure.traceback}"},
    )
    return Rollout(
        row.index,
        failure.repeat,
        row.prompt_key,
        [trajectory],
        row.data_source,
        row.ground_truth,
        attempts=failure.attempts,
    )


def failure_of(rollout: Rollout) -> str | None:
    """Why it failed, if it stands in for a rollout that did."""
    error = rollout.final.extra.get(_FAILED)
    return None if error is None else str(error)


class FailedGroups:
    """Counts groups in a row of which no rollout is left.

    Args:
        at_most: so many are let pass; one more is an error.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self._in_a_row = 0

    def judge(self, group: PlannedGroup, rollouts: Sequence[Rollout]) -> None:
        """Takes note of a group.

        Raises:
            GroupFailedError: too many failed one after the other; with the error of the last one.
        """
        errors = [error for error in map(failure_of, rollouts) if error is not None]
        if len(errors) < len(rollouts):
            self._in_a_row = 0
        else:
            self._in_a_row += 1
            if self._in_a_row > self._at_most:
                raise GroupFailedError(
                    f"{self._in_a_row} groups in a row failed whole (max_failed_groups={self._at_most}), "
                    f"the last one of row {group.index}: {errors[-1]}"
                )
        if errors:
            logger.warning(
                "%d of %d rollouts of row %d failed and are not trained on; the last one %s",
                *(len(errors), len(rollouts), group.index, errors[-1].partition("\n")[0]),
            )
