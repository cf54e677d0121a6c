"""A read: judge what is ready, lease what is good, finish it group by group while it is sent.

    candidates --> judge --+-- valid ------> leased (durable) --> finish --> bytes
                           +-- finished ---> dropped, with its reason |
                           +-- neither ----> kept, judged again when it grows
                                                                      +-- hook raised: quarantined

Judging by the default rule needs rewards only, so nothing is loaded for it. Hooks run in one thread, one at a
time: writes go on beside them. Groups are finished a few ahead of the reader, however many were leased. What
is done for every group of a read is done for some hundred of them at a time, and others have their turn.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import orjson

from rollstream.buffer.finishing import Finishing, Layout, lacks_means, text_of
from rollstream.buffer.groups import GroupSettings, ItemDict, judge_rewards, summarize_rewards
from rollstream.buffer.hooks import Hooks
from rollstream.buffer.items import InstanceId, load_item
from rollstream.buffer.ledger import GroupView, Ledger
from rollstream.buffer.reads import Part, Taken, Wanted
from rollstream.buffer.unread_drops import Drop, UnreadDrops
from rollstream.errors import ConflictError, NotFoundError, RollstreamError

_LOG = logging.getLogger(__name__)

_T = TypeVar("_T")

_SIZES = 1000
"""Tasks and group sizes whose settings are kept."""

_AT_ONCE = 256
"""Groups judged, leased or dropped before others have a turn: a few milliseconds."""

_SWEPT = 4
"""Times that `sweep` looks at so many; what is left then is the next one's."""

_Outcome = Literal["lease", "keep", "drop", "quarantine"]


class _Judged(NamedTuple):
    """What is to become of a group, and why."""

    outcome: _Outcome
    reason: str = ""
    """Of a drop; of a quarantine, the traceback."""


@dataclass(slots=True)
class _Decisions:
    """What is to become of groups that were looked at."""

    lease: list[GroupView] = field(default_factory=list)
    drop: list[tuple[GroupView, str]] = field(default_factory=list)
    keep: list[GroupView] = field(default_factory=list)
    quarantine: list[tuple[GroupView, str]] = field(default_factory=list)

    def add(self, view: GroupView, judged: _Judged) -> None:
        """One more."""
        if judged.outcome == "lease":
            self.lease.append(view)
        elif judged.outcome == "keep":
            self.keep.append(view)
        elif judged.outcome == "drop":
            self.drop.append((view, judged.reason))
        else:
            self.quarantine.append((view, judged.reason))

    def slices(self) -> Iterator["_Decisions"]:
        """The same, some at a time."""
        most = max(len(self.lease), len(self.drop), len(self.keep), len(self.quarantine))
        for at in range(0, most, _AT_ONCE):
            some = slice(at, at + _AT_ONCE)
            yield _Decisions(self.lease[some], self.drop[some], self.keep[some], self.quarantine[some])


class Delivery:
    """Reads of one ledger. Lives in the server's event loop.

    Args:
        ledger: what there is.
        hooks: of a task type: its generator file's, else the default ones.
        settings: of a task type.
    """

    def __init__(
        self, ledger: Ledger, hooks: Callable[[str], Hooks], settings: Callable[[str], GroupSettings]
    ) -> None:
        self._ledger = ledger
        self._hooks = hooks
        self._settings = settings
        self._deciding = asyncio.Lock()
        self._sized: dict[tuple[str, int], tuple[GroupSettings, GroupSettings]] = {}
        self.unread = UnreadDrops()
        """What was dropped, by whichever read, and no trainer on slime's wire was told of."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="buffer-hooks")
        self._finishing = Finishing(ledger, hooks, self._settings_of, self._thread, self._drop_finished)

    async def take(self, wanted: Wanted) -> Taken:
        """Judges, drops and leases; what it says is durable.

        Raises:
            StorageError: it could not be made so. Nothing was leased; some may have been dropped.
        """
        async with self._deciding:
            return await self._take(wanted)

    async def sweep(self) -> int:
        """Drops what has timed out and is not worth handing out; returns how many groups that were."""
        dropped = 0
        for _ in range(_SWEPT):
            async with self._deciding:
                taken = await self._take(Wanted(max_groups=0), overdue=True)
            dropped += len(taken.dropped)
        return dropped

    def settings(self, task_type: str) -> GroupSettings:
        """Of a task's groups."""
        return self._settings(task_type)

    def _settings_of(self, view: GroupView) -> GroupSettings:
        """Of a group: of a rollout that another one has replaced, it may be of another size."""
        settings = self._settings(view.task_type)
        if settings.group_size == view.group_size:
            return settings
        key = view.task_type, view.group_size
        found = self._sized.get(key)
        if found is None or found[0] != settings:
            if len(self._sized) >= _SIZES:
                self._sized.clear()
            found = self._sized[key] = settings, replace(settings, group_size=view.group_size)
        return found[1]

    def stream(self, taken: Taken, layout: Layout, *, first: bool = True) -> AsyncGenerator[Part, None]:
        """Finishes the leased groups, some at a time, and always works one step ahead of the reader.

        A group that cannot be finished is quarantined; it and those of which nothing is left are taken out
        of the lease and of `taken.groups`. The others go on.

        Args:
            taken: what `take` gave.
            layout: makes the bytes.
            first: no groups were sent before these.
        """
        return self._finishing.stream(taken, layout, first=first)

    def load(self, views: Sequence[GroupView]) -> dict[InstanceId, list[ItemDict]]:
        """Groups as they were written, by instance."""
        return {view.instance_id: self._load(view) for view in views}

    async def meta_info(self, taken: Taken) -> dict[str, Any]:
        """What slime's clients are told of a read: of all items that left by it, before any filter."""
        views = [*taken.groups, *(drop.group for drop in taken.dropped)]
        tasks = {view.task_type for view in views}
        own = [task for task in tasks if not self._hooks(task).is_default_meta_info]
        loop = asyncio.get_running_loop()
        if own and len(tasks) == 1:
            hooks = self._hooks(own[0])
            settings = self._settings_of(views[0])
            meta = await loop.run_in_executor(
                self._thread,
                _caught,
                lambda: _as_json(hooks.meta_info(self._all_items(taken), settings)),
            )
            if not isinstance(meta, Exception):
                return {**meta, "finished_groups": _instances(views)}
            _LOG.warning("get_group_data_meta_info failed, its default says it: %s", meta)
        if len(views) <= _AT_ONCE:
            return _default_meta_info(views)
        return await loop.run_in_executor(self._thread, _default_meta_info, views)

    def _all_items(self, taken: Taken) -> dict[InstanceId, list[ItemDict]]:
        """Of groups that are leased, from disk, and of dropped ones, as they were kept."""
        groups: dict[InstanceId, list[ItemDict]] = {}
        for view in taken.groups:
            groups.setdefault(view.instance_id, []).extend(self._load(view))
        for drop in taken.dropped:
            items = [load_item(payload, encoding) for payload, encoding in drop.payloads or ()]
            if items:
                groups.setdefault(drop.group.instance_id, []).extend(items)
        return groups

    async def _note(self, views: Iterable[GroupView]) -> list[Drop]:
        """Groups that are about to be dropped, with what their task's hook for `meta_info` will ask for."""
        drops = []
        for view in views:
            payloads = None
            if not self._hooks(view.task_type).is_default_meta_info:
                try:
                    payloads = await asyncio.to_thread(self._ledger.load, view)
                except RollstreamError as error:
                    _LOG.warning("group %r is dropped, and cannot be read: %s", view.instance_id, error)
            drops.append(Drop(view, payloads))
        return drops

    async def _drop_finished(self, views: Iterable[GroupView]) -> list[Drop]:
        drops = await self._note(views)
        self.unread.add(drops)
        return drops

    def close(self) -> None:
        """Ends the thread once what it does is done."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- deciding

    async def _take(self, wanted: Wanted, *, overdue: bool = False) -> Taken:
        taken = Taken()
        made = _Decisions()
        seen: set[int] = set()
        most = None if overdue else wanted.max_groups
        in_line = self._ledger.ready_groups  # before the look: one that joins during it was not passed over
        candidates = self._candidates(wanted, overdue=overdue)
        if not overdue:
            candidates = self._ledger.free_ones(candidates, lambda: len(made.lease))
        for at, view in enumerate(candidates):
            if most is not None and len(made.lease) >= most:
                break
            if at % _AT_ONCE == _AT_ONCE - 1:
                await asyncio.sleep(0)
            if view.number in seen or view.instance_id in wanted.without:
                continue
            if wanted.group_size not in (None, view.group_size):
                continue
            seen.add(view.number)
            judged = await self._judge(view, wanted)
            if not (overdue and judged.outcome == "lease"):
                made.add(view, judged)
        taken.available = len(made.lease)
        taken.passed_over = max(0, in_line - len(seen))
        if wanted.all_or_nothing and len(made.lease) < (wanted.max_groups or 0):
            made.lease = []
        try:
            for some in made.slices():
                await self._decide(wanted, some, taken)
            if wanted.all_or_nothing and len(taken.groups) < len(made.lease):  # some changed meanwhile
                taken.available = len(taken.groups)
                if taken.lease is not None:
                    await self._ledger.nack(taken.lease.lease_id)
                taken.lease, taken.groups = None, []
        except BaseException:
            if taken.lease is not None:
                with contextlib.suppress(RollstreamError):  # else its time passes
                    await asyncio.shield(self._ledger.nack(taken.lease.lease_id))
            raise
        return taken

    def _candidates(self, wanted: Wanted, *, overdue: bool) -> Iterator[GroupView]:
        """What may be judged; some may come twice. What is there may change while it is walked along."""
        scope: dict[str, Any] = {"task_type": wanted.task_type, "rollouts": wanted.rollouts}
        if overdue:
            # In one decision: those of one that fails are told again.
            return iter(self._ledger.candidates(**scope, timed_out_only=True, limit=_AT_ONCE))
        walk = self._ledger.walk(**scope)
        if wanted.max_groups is None or wanted.max_groups > _AT_ONCE:
            return walk
        # Mostly these are enough; the walk begins with a look at all there are.
        first = self._ledger.candidates(**scope, limit=wanted.max_groups + 16)
        return itertools.chain(first, walk) if len(first) == wanted.max_groups + 16 else iter(first)

    async def _decide(self, wanted: Wanted, some: _Decisions, taken: Taken) -> None:
        """Makes decisions durable; all groups that are leased for a read are on one lease."""
        dropped = await self._note(view for view, _ in some.drop)
        into = None if taken.lease is None else taken.lease.lease_id
        if into is not None:
            try:
                await self._ledger.extend(into)
            except (ConflictError, NotFoundError):  # given back by its consumer's `release`, or much too slow
                taken.lease, taken.groups = None, []
                raise
        lease = await self._ledger.decide(
            lease=some.lease,
            consumer=wanted.consumer,
            lease_seconds=wanted.lease_seconds,
            drop=some.drop,
            keep=some.keep,
            quarantine=some.quarantine,
            into=into,
            read_id=wanted.read_id,
        )
        if lease is not None:
            taken.lease = taken.lease or lease
            taken.groups += lease.groups  # without those that changed since they were looked at
        taken.dropped += dropped
        self.unread.add(dropped)

    async def _judge(self, view: GroupView, wanted: Wanted) -> _Judged:
        if wanted.max_staleness is not None and wanted.policy_version is not None:
            oldest = view.policy_version
            if oldest is not None and oldest < wanted.policy_version - wanted.max_staleness:
                return _Judged("drop", "stale")
        hooks = self._hooks(view.task_type)
        settings = self._settings_of(view)
        if hooks.is_default_verdict:
            verdict = judge_rewards(view.rewards, settings, timed_out=view.timed_out)
        else:
            loop = asyncio.get_running_loop()
            said = await loop.run_in_executor(
                self._thread,
                _caught,
                lambda: hooks.judge((view.instance_id, self._load(view)), settings, timed_out=view.timed_out),
            )
            if isinstance(said, Exception):
                if lacks_means(said):
                    raise said
                _LOG.warning(
                    "group %d (instance %r of task %r) is quarantined, is_valid_group: %s",
                    view.number,
                    view.instance_id,
                    view.task_type,
                    said,
                )
                return _Judged("quarantine", text_of(said))
            verdict = said
        if verdict.valid:
            return _Judged("lease")
        if verdict.finished or view.timed_out:
            if hooks.is_default_verdict and _all_failed(view):
                return _Judged("drop", "failed")
            return _Judged("drop", "timed_out" if view.timed_out and not view.closed else "not_valid")
        return _Judged("keep")

    def _load(self, view: GroupView) -> list[ItemDict]:
        return [load_item(payload, encoding) for payload, encoding in self._ledger.load(view)]


def _caught(call: Callable[[], _T]) -> _T | Exception:
    """What a call with hooks in it gives, or what it raises, whatever that is.

    In the thread: that there is no thread any more is no fault of the hooks.
    """
    try:
        return call()
    except Exception as error:
        return error


def _default_meta_info(views: Sequence[GroupView]) -> dict[str, Any]:
    return {**summarize_rewards(view.rewards for view in views), "finished_groups": _instances(views)}


def _instances(views: Iterable[GroupView]) -> list[InstanceId]:
    """Of which nothing more is to come of this time round: handed out or dropped."""
    return list(dict.fromkeys(view.instance_id for view in views))


def _as_json(meta: dict[str, Any]) -> dict[str, Any]:
    """With keys that are texts: a hook may have made a dict by instance id. Raises `TypeError`."""
    plain: dict[str, Any] = orjson.loads(orjson.dumps(meta, option=orjson.OPT_NON_STR_KEYS))
    return plain


def _all_failed(view: GroupView) -> bool:
    """Nothing was scored, and some rollouts say that they failed: by a reward below 0."""
    rewards = view.rewards
    return all(reward is None or reward < 0 for reward in rewards) and any(rewards)
