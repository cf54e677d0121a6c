"""`rollstream_groups.jsonl`: which groups the steps of a training were made of, a line for each batch.

    {"first": 3, "step": 4, "groups": [{"index": 17, "n": 8, "mean": 0.5, "spread": 0.5, "prompt": …, …}, …]}

Steps `first` to `step` train the batch. A training begins the file anew; one that is resumed keeps the lines of
the steps before. What a kill left of a line stays a line of its own.
"""

import json
import logging
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from rollstream.integrations.trl.groups import failure_of
from rollstream.training.group import GroupBatch, token_versions
from rollstream.trajectory import PromptRow

logger = logging.getLogger(__name__)

GROUPS_FILE = "rollstream_groups.jsonl"
"""In the folder of the checkpoints."""

_PROMPT = 200
"""Characters of a prompt: a batch of 64 groups takes some 25 kB."""


class GroupLog:
    """Appends to the file in a folder. A disk that refuses is warned of once, and stops nothing."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / GROUPS_FILE
        self._refused = False

    def begin(self, after: int) -> None:
        """Keeps the batches up to a step: those of the checkpoint from which a training goes on, 0 of none."""
        if not self._path.exists():
            return
        partial = self._path.with_suffix(".partial")
        try:
            with self._path.open("rb") as old, partial.open("wb") as kept:
                kept.writelines(line for line in old if 0 < _step(line) <= after)
            partial.replace(self._path)
        except OSError as error:
            logger.warning("%s keeps lines of an earlier training: %s", self._path, error)

    def write(self, first: int, step: int, groups: Sequence[dict[str, Any]]) -> None:
        line = json.dumps({"first": first, "step": step, "groups": groups}).encode() + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab+") as file:
                if file.tell():
                    file.seek(-1, 2)
                    line = line if file.read(1) == b"\n" else b"\n" + line
                file.write(line)
        except OSError as error:
            if not self._refused:
                logger.warning("the groups of step %d, and later ones, are not noted: %s", step, error)
            self._refused = True


def _step(line: bytes) -> int:
    """The last step of a line's batch; 0 of a line that was cut."""
    try:
        return int(json.loads(line)["step"])
    except ValueError:
        return 0


def group_records(
    batch: GroupBatch, rewards: Sequence[float | None], load_row: Callable[[int], PromptRow]
) -> list[dict[str, Any]]:
    """The lines for a batch's groups.

    Args:
        batch: as it was delivered.
        rewards: what the trainer made of each rollout's, in the batch's order; None: it counts in no mean.
        load_row: the prompt row of an index.
    """
    records, left = list[dict[str, Any]](), iter(rewards)
    for group, staleness in zip(batch.groups, batch.staleness, strict=True):
        rollouts, row = group.rollouts, load_row(group.index)
        scored = [reward for reward in islice(left, len(rollouts)) if reward is not None]
        versions = sorted(token_versions(rollouts))
        records.append(
            {
                "index": group.index,
                "n": len(rollouts),
                "mean": fmean(scored) if scored else None,
                "spread": pstdev(scored) if scored else None,
                "failed": sum(failure_of(rollout) is not None for rollout in rollouts),
                "versions": [versions[0], versions[-1]] if versions else [],
                "prompt": _text(row.messages[-1])[:_PROMPT] if row.messages else "",
                "scored": len(scored),
                "staleness": staleness,
                "prompt_key": row.prompt_key,
                "position": group.position,
            }
        )
    return records


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(str(part.get("text") or "") for part in content)
    return str(content or "")
