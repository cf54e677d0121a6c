"""The store of a training: each finished rollout is on disk before it counts, and comes back after a crash.

It is a run directory whose keys are positions of the plan: `index` is the position, `repeat` the place in the group.
So whatever reads a run reads a training. `training/000000.rsj`, a journal too, has what became of the groups:

    begun(start) -> whole(places) -> trained(step)
          |              |
          |              +-> dropped (by a filter, or because it failed)
          +-- a restart: it goes on with the rollouts that it has and its old `start`; or it is set aside, with the
              reason: its files go to `set_aside/`, and its position is owed again

`trained` is durable before the trainer goes on, and with it all notes before it. What a power failure takes of the
others is made out of the rollouts. After a restart what was trained since the checkpoint is trained again from here.
"""

import asyncio
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from rollstream.agent.turns import Turns
from rollstream.errors import ConfigError, RunDirectoryError, StorageError
from rollstream.rollout.worker import make_failure
from rollstream.store.arrow import column_values
from rollstream.store.batch import read_footer
from rollstream.store.journal import JournalFile, ScanReport, encode_frame, scan, sync_folder
from rollstream.store.keys import KeyStates
from rollstream.store.manifest import (
    Manifest,
    identity_differences,
    new_manifest,
    read_manifest,
    write_manifest,
)
from rollstream.store.paths import RunPaths, forget_batches
from rollstream.store.records import EncodedTurn, EncodingError, RecordCodec, json_text
from rollstream.store.recovery import recover_frames
from rollstream.store.run import Run
from rollstream.store.run_dir import RunDirectory, lock_run, open_run
from rollstream.store.scores import GivenRewards, Rewards, note_judged, notes_path
from rollstream.store.streams import note_streams
from rollstream.store.turns import NO_TURN, TurnPlaces, remove_turns
from rollstream.store.writer import StoreWriter
from rollstream.training.group import Group, Kept, count_tokens
from rollstream.training.plan import Plan, PlannedGroup
from rollstream.trajectory import Failure, Rollout, RolloutKey
from rollstream.user_calls import in_daemon_thread

logger = logging.getLogger(__name__)

_ABOUT: Final = "training_store"
"""In the `extra` of each stored trajectory: `start`, the version that its group was begun with, `row`, `epoch`, and
the rollout's `repeat` as the worker counts."""

_READ_TOGETHER: Final = 32
"""Groups that are read together after a restart."""

_BATCH_ROWS: Final = 1000
"""Trajectories of a sealed batch: the default of `generation.save_batch_size`."""

_SEAL_S: Final = 600.0
"""Seconds without a rollout after which the journal becomes a batch."""


# -- what became of the groups


class Opened(msgspec.Struct, tag="opened"):
    """A process began to write."""

    step: int
    """Batches trained in the state that it went on from."""
    store: str | None = None
    """The store of that state."""
    went_back: bool = False
    """What was newer than that state was set aside."""


class Begun(msgspec.Struct, tag="begun"):
    """Rollouts of a group were begun: all, or after a restart those that are missing."""

    position: int
    start: int
    row: int
    epoch: int
    rollouts: int


class Whole(msgspec.Struct, tag="whole"):
    """A group is whole: it may be trained."""

    position: int
    places: list[int]
    """Its rollouts, by their places in the group; what failed or was not waited for is not among them."""


class Judged(msgspec.Struct, tag="judged"):
    """A function that sees groups has scored one, or the trainer has scored a group of its batch."""

    position: int
    rewards: dict[int, GivenRewards]
    """By place."""
    by_trainer: bool = False
    """Whether the trainer gave them: only readers see these, for it scores a batch anew whenever it gets it."""


class Dropped(msgspec.Struct, tag="dropped"):
    """A group is never trained."""

    position: int
    rollouts: int
    reason: str
    failed: bool
    places: list[int] = []
    """The rollouts that a filter saw, by their places in the group; empty if no filter threw it away."""


class Trained(msgspec.Struct, tag="trained"):
    """A batch was trained."""

    step: int
    positions: list[int]
    watermark: int
    """All positions below it are trained or dropped."""


class SetAside(msgspec.Struct, tag="set_aside"):
    """Groups are owed again."""

    positions: list[int]
    rollouts: int
    tokens: int
    reason: str


Note = Opened | Begun | Whole | Judged | Dropped | Trained | SetAside

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Note] = msgspec.msgpack.Decoder(Note)


@dataclass(slots=True)
class GroupHistory:
    """The notes of a group."""

    planned: PlannedGroup
    start: int
    process: int
    """The process that began it, or its rest: the first one is 1."""
    places: list[int] | None = None
    """Places in the group of its rollouts, once it is whole."""
    step: int | None = None
    """The batch that it was trained in."""
    dropped: Dropped | None = None
    judged: Judged | None = None


@dataclass(slots=True)
class History:
    """The notes of a training."""

    groups: dict[int, GroupHistory] = field(default_factory=dict)
    """By position; what is set aside is not in it."""
    batches: dict[int, Trained] = field(default_factory=dict)
    """By step. A batch that was trained again after a restart is there once."""
    set_aside: list[SetAside] = field(default_factory=list)
    opened: list[Opened] = field(default_factory=list)
    begun: int = 0
    """Rollouts."""
    again: int = 0
    """Batches that were trained again after a restart."""

    def add(self, note: Note) -> None:
        """Takes up the next note. It is left out if it is about a group whose `Begun` is lost to damage."""
        match note:
            case Opened():
                self.opened.append(note)
            case Begun():
                planned = PlannedGroup(note.position, note.epoch, note.row)
                self.groups[note.position] = GroupHistory(planned, note.start, len(self.opened))
                self.begun += note.rollouts
            case Trained() if self.groups.keys() >= set(note.positions):
                self.again += note.step in self.batches
                self.batches[note.step] = note
                for position in note.positions:
                    self.groups[position].step = note.step
            case Whole() | Judged() | Dropped() if note.position in self.groups:
                if isinstance(note, Whole):
                    self.groups[note.position].places = note.places
                elif isinstance(note, Judged):
                    if not note.by_trainer:
                        self.groups[note.position].judged = note
                else:
                    self.groups[note.position].dropped = note
            case Whole() | Judged() | Dropped() | Trained():
                logger.warning("a note is about a group of which the first one is lost: %r", note)
            case SetAside():
                self.set_aside.append(note)
                gone = set(note.positions)
                for position in gone:
                    self.groups.pop(position, None)
                for step in [step for step, one in self.batches.items() if gone.intersection(one.positions)]:
                    del self.batches[step]

    def forget(self, below: int) -> None:
        """Forgets the batches before a step, and the groups of before it: no restart goes back so far."""
        old = [step for step in self.batches if step < below]
        watermark = max((self.batches[step].watermark for step in old), default=0)
        for step in old:
            for position in self.batches.pop(step).positions:
                self.groups.pop(position, None)
        for position in [one for one, group in self.groups.items() if group.dropped and one < watermark]:
            del self.groups[position]


def read_history(root: Path, manifest: Manifest, report: ScanReport | None = None) -> History:
    """The notes of a training."""
    history = History()
    for frame in scan(notes_path(root), manifest.run_id_bytes, report or ScanReport()):
        history.add(_decoder.decode(frame.body))
    return history


def prompt_keys(run: Run) -> Iterator[tuple[int, str]]:
    """The position and the prompt key of each group that has a rollout, some of them more than once."""
    for table in run.rows(["index", "prompt_key"]):
        positions, first = np.unique(column_values(table["index"]), return_index=True)
        yield from zip(positions.tolist(), table["prompt_key"].take(first).to_pylist(), strict=True)


class GroupReader:
    """Reads groups of a store in the order in which they are needed: with each the next ones.

    Args:
        root: the store.
        manifest: its own.
        history: its own.
        failures: the rollouts in it that have failed.
        together: groups that are read together.
    """

    def __init__(
        self,
        root: Path,
        manifest: Manifest,
        history: History,
        failures: Callable[[], Iterable[Failure]],
        together: int = _READ_TOGETHER,
    ) -> None:
        self.waiting: dict[int, None] = {}
        """Positions whose rollouts are on disk and not read yet, in the order in which they are needed."""
        self._run, self._manifest, self._history = Run(root, manifest), manifest, history
        self._run.rewards = Rewards(root, by_trainer=False)
        self._failures, self._together = failures, together
        self._loaded: dict[int, dict[int, Rollout | Failure]] = {}
        self._reading = asyncio.Lock()

    async def read(self, position: int) -> dict[int, Rollout | Failure]:
        """The results of a group as they were made, by place; none of one that does not wait."""
        async with self._reading:
            if position in self.waiting:
                following = itertools.dropwhile(lambda one: one != position, self.waiting)
                positions = [*itertools.islice(following, self._together)]
                self._loaded |= await in_daemon_thread(self._load, positions)
                for one in positions:
                    del self.waiting[one]
        return self._loaded.pop(position, {})

    def _load(self, positions: Sequence[int]) -> dict[int, dict[int, Rollout | Failure]]:
        found: dict[int, dict[int, Rollout | Failure]] = {position: {} for position in positions}
        for stored in self._run.rollouts(np.array(sorted(positions))):
            found[stored.index][stored.repeat] = _as_made(stored)
        for failure in self._failures():
            group = self._history.groups.get(failure.index)
            # A group that is neither whole nor judged has its failed rollouts tried again.
            if failure.index in found and group is not None and (group.places is not None or group.judged):
                row, epoch = group.planned.index, group.planned.epoch
                repeat = epoch * self._manifest.n + failure.repeat
                found[failure.index][failure.repeat] = replace(failure, index=row, repeat=repeat)
        return found


# -- the store


@dataclass(frozen=True, slots=True)
class StoreFacts:
    """What a store says of the rollouts in it."""

    manifest: Manifest
    """As of a new run. Finished rollouts of another identity, reward or kind of log-probs are set aside."""
    config_yaml: str = ""
    tokenizer: bytes | None = None
    """Content of `tokenizer.json`."""
    streams: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Who makes the streams that rollouts come with, by name: `Stream.made`."""


def plain_facts(n: int) -> StoreFacts:
    """The facts of a generator that says nothing of itself but that its groups have `n` rollouts."""
    return StoreFacts(new_manifest(n=n, identity={}, dataset={}, versions={}, config={}))


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a training goes on."""

    plan: Plan
    step: int
    """Batches trained in the state that it goes on from."""
    is_settled: Callable[[int], bool]
    """Whether a position is trained or dropped in that state."""
    store: str | None
    """`TrainingStore.run_id` in that state; None: the training begins."""
    replay: bool = True
    """Whether batches that were trained since are trained again; if not, what is newer than the state is set aside."""


@dataclass(slots=True)
class Restored:
    """What goes on after a restart."""

    batches: list[list[Group]] = field(default_factory=list)
    """Trained since the checkpoint, step by step."""
    groups: list[Group] = field(default_factory=list)
    """Begun, and neither trained nor dropped."""
    dropped: dict[int, bool] = field(default_factory=dict)
    """By position, whether the group had failed."""


class TrainingStore:
    """Keeps the rollouts of a training.

    Args:
        root: the folder.
        keep_steps: batches that were trained more than so many steps before the checkpoint before the last one are
            deleted; None: none are.
        max_bytes: beyond so many bytes of sealed batches and what was set aside the oldest is deleted: what was set
            aside, then batches that were trained before the checkpoint before the last one. None: nothing is.
        resume: what is there goes on without a saved state, too: of a training that ended before its first
            checkpoint, and begins again with the same weights.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        keep_steps: int | None = None,
        max_bytes: int | None = None,
        resume: bool = False,
    ) -> None:
        self.root = Path(root).expanduser()
        self._resume = resume
        self.history = History()
        self._keep_steps = keep_steps
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._bytes = 0
        self._directory: RunDirectory | None = None
        self._writer: StoreWriter | None = None
        self._notes: JournalFile | None = None
        self._noting = threading.Lock()
        self._drops = self._durable_drops = 0
        """Groups whose `Dropped` was noted; it comes back from nowhere else."""
        self._rows = 1
        self._starts: dict[int, int] = {}
        """Of the groups that are being generated, by position."""
        self._held: dict[int, dict[int, Rollout]] = {}
        """Their rollouts, by position and place."""
        self._keep_turns = False
        self._codec = RecordCodec()
        self._reader: GroupReader | None = None
        self._marks: deque[int] = deque(maxlen=2)
        """Steps of the last two checkpoints."""

    @property
    def run_id(self) -> str | None:
        """Names the store; None before it is open."""
        return None if self._directory is None else self._manifest.run_id

    @property
    def _manifest(self) -> Manifest:
        assert self._directory is not None
        return self._directory.manifest

    # -- opening

    async def open(
        self,
        facts: StoreFacts,
        resume: Resume,
        *,
        rows: int,
        whole_groups: bool,
        keep_turns: bool,
        prompt_key: Callable[[int], str | None],
    ) -> Restored:
        """Opens the store; a store of another training is moved out of the way.

        Args:
            facts: of the rollouts that come.
            resume: where the training goes on.
            rows: rollouts of a step: with `keep_steps` about one batch is sealed for each.
            whole_groups: whether the generator makes groups as a whole only.
            keep_turns: whether finished turns of rollouts are kept, too.
            prompt_key: of a row, None where it is not known: groups of a row that has changed are set aside.

        Raises:
            RunDirectoryError, StorageError: it cannot be used.
        """
        changed = await in_daemon_thread(self._open, facts, resume)
        assert self._directory is not None
        for line in (*self._directory.state.damage, *self._directory.state.restored):
            logger.warning("%s: damaged, or restored: %s", self.root, line)
        self._rows = _BATCH_ROWS if self._keep_steps is None else rows
        self._keep_turns = keep_turns
        self._reader = GroupReader(self.root, self._directory.manifest, self.history, self._failures)
        self._start_writer()
        self._marks.append(resume.step)
        last = self.history.opened[-1] if self.history.opened else None
        went_back = not resume.replay
        if went_back and last is not None and last.went_back and last.step == resume.step:
            resume = replace(resume, replay=True)  # it crashed on that way: what is here was made on it
        resume = replace(resume, replay=resume.replay and not changed)
        restored, refused = await in_daemon_thread(self._sort_out, resume, whole_groups, prompt_key)
        newer = changed or "the training went back to a checkpoint before it"
        await self.set_aside({position: reason or newer for position, reason in refused.items()})
        if changed:  # only now: until here a crash leaves the rollouts under the identity that made them
            kept = {"run_id": self.run_id, "created": self._directory.manifest.created}
            self._directory.manifest = msgspec.structs.replace(facts.manifest, **kept)
            await in_daemon_thread(write_manifest, self.root, self._directory.manifest)
        self._note(Opened(resume.step, resume.store, went_back), durably=True)
        return restored

    def _open(self, facts: StoreFacts, resume: Resume) -> str:
        """Opens run directory and notes; says what has changed of the rollouts since, "" if nothing has."""
        root, wanted, changed = self.root, facts.manifest, ""
        lock = lock_run(root)
        try:
            old, paths, path = read_manifest(root), RunPaths(root), notes_path(root)
            has_data = paths.has_data() or (root / "set_aside").is_dir()
            if has_data and (old is None or not path.parent.is_dir()):
                raise RunDirectoryError(f"{root} is a run, or a part of one, and no store of a training")
            if has_data and old is not None:
                self.history = read_history(root, old) if path.exists() else History()
                if not self._is_of(resume, old, wanted):
                    aside = root.with_name(f"{root.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
                    root.rename(aside)
                    lock.release()
                    old_ones = [one for one in root.parent.iterdir() if one.name.startswith(f"{root.name}-2")]
                    logger.warning(
                        "%s held the rollouts of a training that this one does not resume: they are in %s now. Nobody "
                        "deletes such folders but you: %d beside it, %.3f GB in all",
                        *(root, aside, len(old_ones), sum(map(_bytes_in, old_ones)) / 1e9),
                    )
                    lock, has_data, self.history = lock_run(root), False, History()
            if has_data and old is not None:
                differing = [key for key, _, _ in identity_differences(old.identity, wanted.identity)]
                differing += [
                    name for name in ("reward", "logprobs") if getattr(old, name) != getattr(wanted, name)
                ]
                changed = f"it was made with another {', '.join(differing)}" if differing else ""
                wanted = old
            elif old is not None and self._is_of(resume, old, wanted):  # a checkpoint names it
                wanted = msgspec.structs.replace(wanted, run_id=old.run_id)
        except OSError as error:
            lock.release()
            raise RunDirectoryError(f"cannot use {root} as a store: {error.strerror}") from error
        except BaseException:
            lock.release()
            raise
        self._directory = open_run(
            lock, root, wanted, config_yaml=facts.config_yaml, tokenizer=facts.tokenizer
        )
        note_streams(root, facts.streams)
        path.parent.mkdir(exist_ok=True)
        if not has_data:  # of a training that stored nothing
            path.unlink(missing_ok=True)
            remove_turns(self._directory.paths, TurnPlaces())
        elif path.exists():
            report = ScanReport()
            self.history = read_history(root, wanted, report)
            for damage in report.damage:
                logger.warning("training/%s: what it said of groups is lost", damage)
            recover_frames(path, self._directory.paths, wanted)
        sync_folder(root)
        end = path.stat().st_size if path.exists() else None
        self._notes = JournalFile(path, wanted.run_id_bytes, resume_at=end)
        return changed

    def _is_of(self, resume: Resume, old: Manifest, wanted: Manifest) -> bool:
        """Whether the store is of the training that goes on: named in its state, or begun from that state."""
        first = self.history.opened[0] if self.history.opened else None
        begun = (
            first is not None and resume.step > 0 and (first.store, first.step) == (resume.store, resume.step)
        )
        named = old.run_id == resume.store or (resume.store is None and self._resume)
        return old.n == wanted.n and (named or begun)

    def _start_writer(self) -> None:
        assert self._directory is not None
        self._writer = StoreWriter(
            self._directory, save_batch_size=self._rows, pull_timeout=_SEAL_S, on_sealed=self._forget_old
        )
        self._writer.start()
        self._bytes = _bytes_in(self._directory.paths.batches) + _bytes_in(self.root / "set_aside")

    def _sort_out(
        self, resume: Resume, whole_groups: bool, prompt_key: Callable[[int], str | None]
    ) -> tuple[Restored, dict[int, str]]:
        """Returns what goes on, and by position what is set aside, with the reason ("": because it is newer)."""
        assert self._directory is not None and self._reader is not None
        waiting, every = self._reader.waiting, prompt_keys(Run(self.root, self._directory.manifest))
        keys = {position: key for position, key in every if not resume.is_settled(position)}
        half_done = self._directory.state.turns.rows() if self._keep_turns else set[int]()
        half_done = {position for position in half_done if not resume.is_settled(position)}
        restored, refused = Restored(), dict.fromkeys((*keys, *half_done), "")
        if not resume.replay:
            return restored, refused
        plan, groups, replayed = resume.plan, self.history.groups, set[int]()
        state, n = self._directory.state.keys, self._directory.manifest.n
        self._begin_again([position for position in keys if position not in groups])

        def put_back(position: int) -> Group:
            waiting[position] = None
            refused.pop(position, None)
            return Group(groups[position].planned, groups[position].start)

        for group in groups.values():
            if not resume.is_settled(group.planned.position):
                plan.restore(group.planned)
        while (batch := self.history.batches.get(resume.step + len(restored.batches))) is not None:
            wanted = sum(len(groups[position].places or ()) for position in batch.positions)
            if state.count(np.array(batch.positions))[0] < wanted:
                logger.warning("%s: rollouts of step %d are lost, it is made again", self.root, batch.step)
                break
            restored.batches.append([put_back(position) for position in batch.positions])
            replayed.update(batch.positions)
        for position, group in groups.items():
            if resume.is_settled(position) or position in replayed:
                continue
            if group.dropped is not None:
                restored.dropped[position] = group.dropped.failed
                refused.pop(position, None)
            elif position not in refused:
                continue
            elif whole_groups and group.places is None and state.count(np.array([position]))[0] < n:
                refused[position] = "its group was not whole"
            elif plan.at(position) != group.planned:
                refused[position] = "the plan has another prompt in its place"
            elif position in keys and prompt_key(group.planned.index) not in (keys[position], None):
                refused[position] = "its prompt row has changed"
            else:
                restored.groups.append(put_back(position))
        return restored, refused

    def _begin_again(self, positions: Sequence[int]) -> None:
        """Notes `Begun` of groups once more, by what their rollouts say: a power failure, or damage, has taken it."""
        for rollout in (
            Run(self.root, self._manifest).rollouts(np.array(sorted(positions))) if positions else ()
        ):
            if rollout.index not in self.history.groups and _ABOUT in rollout.final.extra:
                about = rollout.final.extra[_ABOUT]
                self._note(
                    Begun(rollout.index, about["start"], about["row"], about["epoch"], self._manifest.n)
                )

    async def filtered(self, positions: Iterable[int]) -> AsyncIterator[Group]:
        """Yields those of these groups that a filter threw away, with the rollouts that it saw."""
        reader, groups = (
            GroupReader(self.root, self._manifest, self.history, self._failures),
            self.history.groups,
        )
        reader.waiting.update(
            (one, None) for one in positions if (note := groups[one].dropped) and note.places
        )
        for position in [*reader.waiting]:
            group, results = groups[position], await reader.read(position)
            seen = () if group.dropped is None else group.dropped.places
            yield Group(group.planned, group.start, [results[place] for place in seen if place in results])

    async def set_aside(self, reasons: Mapping[int, str]) -> None:
        """Takes groups out of the run, by position with the reason: their positions are owed again."""
        if not reasons:
            return
        assert self._writer is not None and self._directory is not None
        await self._writer.close()  # seals all
        await in_daemon_thread(self._set_aside, reasons)
        self._start_writer()
        for position in reasons:
            self._forget_turns(position, ())

    def _set_aside(self, reasons: Mapping[int, str]) -> None:
        assert self._directory is not None and self._reader is not None
        positions = np.array(sorted(reasons))
        gone, counts = KeyStates(self._directory.manifest.n), dict.fromkeys(reasons.values(), (0, 0))
        for rollout in Run(self.root, self._directory.manifest).rollouts(positions):
            gone.mark_done(rollout.index, rollout.repeat)
            rollouts, tokens = counts[reasons[rollout.index]]
            counts[reasons[rollout.index]] = rollouts + 1, tokens + count_tokens([rollout])
        for reason, (rollouts, tokens) in counts.items():
            chosen = [one for one, why in reasons.items() if why == reason and one in self.history.groups]
            if chosen:  # else it was noted before a crash
                logger.warning("%d finished rollouts are not used: %s (%s)", rollouts, reason, self.root)
                self._note(SetAside(chosen, rollouts, tokens, reason), durably=True)
        self._directory.forget(gone, aside=self.root / "set_aside")
        for position in reasons:
            self._reader.waiting.pop(position, None)

    # -- while groups are generated

    def begin(self, group: Group) -> None:
        """Notes the `start` of a group, before anything is asked or kept of it."""
        self._starts[group.position] = group.start

    async def kept(self, planned: PlannedGroup) -> Kept:
        """See `GroupKeeper`. Rollouts that are missing count as begun from now on."""
        assert self._directory is not None and self._reader is not None
        position, n = planned.position, self._directory.manifest.n
        known, first = self.history.groups.get(position), position not in self._held
        held = self._held.setdefault(position, {})
        results: dict[int, Rollout | Failure] = {**await self._reader.read(position), **held}
        held.update({place: one for place, one in results.items() if isinstance(one, Rollout)})
        places = None if known is None else known.places
        if known is not None and known.judged is not None:
            places = [*known.judged.rewards]
        is_whole = len(held) == n or (places is not None and held.keys() >= set(places))
        if places is not None and is_whole:  # one that was not waited for may be there, too
            results = {at: one for at, one in results.items() if at in places or isinstance(one, Failure)}
        if not is_whole:  # what failed before a restart is tried again
            results = dict(held)
            if first:
                start, missing = self._starts[position], n - len(held)
                self._note(Begun(position, start, planned.index, planned.epoch, missing))
        return Kept(results, is_whole, is_whole and known is not None and known.judged is not None)

    async def keep_rewards(self, planned: PlannedGroup, rollouts: Mapping[int, Rollout]) -> None:
        """See `GroupKeeper`. Raises `StorageError`."""
        held = self._held[planned.position]
        rewards = {place: _rewards_of(held[place]) for place in rollouts}
        await in_daemon_thread(partial(note_judged, self.root))
        await in_daemon_thread(partial(self._note, Judged(planned.position, rewards), durably=True))

    async def keep(self, planned: PlannedGroup, place: int, result: Rollout | Failure) -> Rollout | Failure:
        """See `GroupKeeper`.

        Raises:
            StorageError: the disk is full, or cannot be written.
        """
        assert self._writer is not None
        if isinstance(result, Rollout) and result.finished_at is None:
            result.finished_at = time.time()
        if self._durable_drops < self._drops:  # else one that was dropped would be owed before this one again
            await in_daemon_thread(partial(self._note, durably=True))
        try:
            await self._writer.commit(_as_stored(planned, self._starts[planned.position], place, result))
        except EncodingError as error:
            key, attempts = (result.index, result.repeat, result.prompt_key), result.attempts
            return await self.keep(planned, place, make_failure(*key, attempts, "store", error))
        if isinstance(result, Rollout):
            self._held[planned.position][place] = result
        return result

    def turns(self, planned: PlannedGroup, place: int, prompt_key: str) -> Turns | None:
        """See `GroupKeeper`."""
        assert self._writer is not None
        if not self._keep_turns:
            return None
        key, writer = RolloutKey(planned.position, place), self._writer
        return Turns(key, prompt_key, writer.turns_of(key), writer.keep, self._codec)

    def _forget_turns(self, position: int, done: Container[int]) -> None:
        """Deletes the turns of a group's rollouts that nobody will finish: of all but those that are `done`."""
        assert self._writer is not None and self._directory is not None
        for place in range(self._directory.manifest.n if self._keep_turns else 0):
            key = RolloutKey(position, place)
            if place not in done and self._directory.state.turns.of(key):
                self._writer.keep(EncodedTurn(key, NO_TURN, b""))

    def is_whole(self, group: Group) -> bool:
        """Whether a group was whole before a restart: no filter threw it away."""
        known = self.history.groups.get(group.position)
        return known is not None and known.places is not None

    def ended(self, group: Group) -> None:
        """Notes that a group is whole."""
        if (held := self._held.pop(group.position, None)) is None:
            raise ConfigError(
                f"{group}: a generator with a keeper asks it for `kept` before it makes a group"
            )
        del self._starts[group.position]
        places = _places(group, held)
        self._forget_turns(group.position, held)
        if self.history.groups[group.position].places != places:
            self._note(Whole(group.position, places))

    def dropped(self, group: Group, reason: str, *, failed: bool) -> None:
        """Notes that a group is never trained."""
        position, planned = group.position, group.planned
        del self._starts[position]
        held = self._held.pop(position, {})
        self._forget_turns(position, ())
        if position not in self.history.groups:  # it failed before anything was asked of it
            self._note(Begun(position, group.start, planned.index, planned.epoch, 0))
        self._note(Dropped(position, len(held), reason[:1000], failed, _places(group, held)))

    def trained(
        self,
        step: int,
        groups: Sequence[Group],
        watermark: int,
        scored: Sequence[Sequence[Rollout]] = (),
    ) -> None:
        """Notes durably that a batch was trained, and the rewards of those rollouts of its groups that are `scored`.

        Raises:
            StorageError: the disk is full, or cannot be written.
        """
        assert self._directory is not None
        n, notes = self._directory.manifest.n, list[Note]()
        for group, rollouts in zip(groups, scored, strict=False):
            rewards = {one.repeat - group.epoch * n: _rewards_of(one) for one in rollouts}
            notes.append(Judged(group.position, rewards, by_trainer=True))
        if notes:
            note_judged(self.root)
        self._note(*notes, Trained(step, [group.position for group in groups], watermark), durably=True)

    def checkpoint(self, step: int) -> None:
        """Is told of each checkpoint: what only those before the last two need may be deleted then, see `keep_steps`.

        What was dropped by then is so durably when this returns. Raises `StorageError`.
        """
        if self._durable_drops < self._drops:
            self._note(durably=True)
        if not self._marks or self._marks[-1] != step:
            self._marks.append(step)
        with self._noting:
            self.history.forget(self._marks[0] - 1 - (self._keep_steps or 0))

    async def close(self) -> None:
        """Seals what is durable, and gives the folder back. Idempotent."""
        try:
            if self._writer is not None:
                await self._writer.close()
        finally:
            if self._notes is not None:
                with suppress(StorageError):  # who asks for a checkpoint is told
                    self._note(durably=True)
                self._notes.close()
            if self._directory is not None:
                self._directory.close()

    # -- files

    def _note(self, *notes: Note, durably: bool = False) -> None:
        assert self._notes is not None
        try:
            with self._noting:
                for note in notes:
                    self._notes.append(encode_frame(0, 0, 0, _encoder.encode(note)), durably=False)
                    self.history.add(note)
                    self._drops += isinstance(note, Dropped)
                drops = self._drops
            if durably:  # whoever else notes something need not wait for the disk
                self._notes.sync()
                self._durable_drops = drops
        except OSError as error:
            raise StorageError(
                f"cannot write to {self.root}: {error.strerror}. What is finished is safe: free space, and go on "
                "from the last checkpoint"
            ) from error

    def _failures(self) -> Iterable[Failure]:
        assert self._directory is not None
        directory = self._directory
        return Run(self.root, directory.manifest).failures() if directory.state.keys.failed else ()

    def _forget_old(self) -> None:
        """Deletes what is too old or too much, see `keep_steps` and `max_bytes`. In the thread that seals."""
        assert self._directory is not None
        paths, batches = self._directory.paths, self._directory.state.batches
        self._bytes += paths.batch(batches[-1]).stat().st_size
        aside = sorted((self.root / "set_aside").rglob("*")) if self._bytes > self._max_bytes else []
        while aside and self._bytes > self._max_bytes:
            self._bytes -= _delete(aside.pop(0))
        old = list[int]()
        for number in batches if len(self._marks) == 2 else ():
            steps = 0 if self._bytes > self._max_bytes else self._keep_steps
            last = None if steps is None else self.history.batches.get(self._marks[0] - 1 - steps)
            if last is None or _highest_index(paths.batch(number)) >= last.watermark:
                break
            self._bytes -= _delete(paths.batch(number))
            old.append(number)
        for number in old:
            batches.remove(number)
        forget_batches(paths, old)


def _places(group: Group, held: Mapping[int, Rollout]) -> list[int]:
    given = {getattr(one, "key", None) for one in group.rollouts}
    return sorted(place for place, one in held.items() if one.key in given)


def _rewards_of(rollout: Rollout) -> GivenRewards:
    parts = rollout.trajectories
    return rollout.finished_at, [(one.reward, json_text(one.reward_extra)) for one in parts]


def _as_stored(planned: PlannedGroup, start: int, place: int, result: Rollout | Failure) -> Rollout | Failure:
    if isinstance(result, Failure):
        return replace(result, index=planned.position, repeat=place)
    about = {"start": start, "row": planned.index, "epoch": planned.epoch, "repeat": result.repeat}
    parts = [replace(one, extra={**one.extra, _ABOUT: about}) for one in result.trajectories]
    return replace(result, index=planned.position, repeat=place, trajectories=parts)


def _as_made(stored: Rollout) -> Rollout:
    about = stored.final.extra[_ABOUT]
    for one in stored.trajectories:
        del one.extra[_ABOUT]
    return replace(stored, index=about["row"], repeat=about["repeat"])


def _delete(path: Path) -> int:
    """Returns how many bytes it had."""
    size = path.stat().st_size
    path.unlink()
    return size


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*"))


def _highest_index(path: Path) -> int:
    footer = read_footer(path)
    groups = [footer.row_group(number).column(0).statistics for number in range(footer.num_row_groups)]
    return max((int(one.max) for one in groups if one is not None), default=1 << 62)
