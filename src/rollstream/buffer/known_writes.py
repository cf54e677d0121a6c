"""Writes of items whose uid is known: the same item once more, or another one that nobody will ever see."""

import logging
from collections.abc import Sequence
from typing import Final

from rollstream.buffer.items import Item

_LOG = logging.getLogger(__name__)

_REMEMBERED: Final = 1000
"""Rollouts whose warning was given: bounds what clients can make the server remember."""


class KnownWrites:
    """Counts them, and warns once a rollout."""

    def __init__(self) -> None:
        self.items = 0
        """Since the server started."""
        self._told: set[str | None] = set()

    def count(self, items: Sequence[Item], stored: Sequence[bool], active_rollout: str | None) -> None:
        """Looks at one write.

        Args:
            items: that were written.
            stored: by item, False: its uid was known.
            active_rollout: that of items which name none.
        """
        if all(stored):
            return
        for item, is_new in zip(items, stored, strict=True):
            if is_new:
                continue
            self.items += 1
            rollout = item.rollout_id or active_rollout
            if rollout in self._told or len(self._told) >= _REMEMBERED:
                continue
            self._told.add(rollout)
            _LOG.warning(
                "%s: an item of instance %.100r with uid %.100r was answered with success and not stored, "
                "since an item with this uid was written before. A retry does that. If it is another item, "
                "it is lost: a uid has to be unique over all rollouts and tasks. (Said once a rollout; "
                "rollstream_buffer_items_known_total counts them.)",
                *("no rollout" if rollout is None else f"rollout {rollout:.100}", item.instance_id, item.uid),
            )
