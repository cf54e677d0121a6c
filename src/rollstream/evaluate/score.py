"""Scoring a run anew: its rollouts, by another reward, without generating.

    run_tables --items--> [ process 0 ] --\\
               --items--> [ process 1 ] ---> frames -> scores/NAME.rsj (fdatasync) -> scores/NAME.parquet

A rollout is scored when its frame is durable; who scores again under the same name goes on behind it. The run
itself is only read. Readers name them: `rollstream.store.scores`.
"""

import hashlib
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat as repeat_value
from multiprocessing.connection import Connection, wait
from pathlib import Path
from secrets import token_hex

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from rollstream.childproc import path_to_rollstream
from rollstream.errors import ConfigError, RewardError, RollstreamError, RunDirectoryError, StorageError
from rollstream.evaluate.score_worker import (
    RewardRecipe,
    ScoredFrame,
    ScoreItem,
    ScoreRow,
    SnapshotRule,
    failed_frame,
)
from rollstream.reward.rules import RuleReward
from rollstream.store.journal import FILE_HEADER_SIZE, JournalFile, ScanReport, scan
from rollstream.store.keys import KeyStates
from rollstream.store.lock import RunLock
from rollstream.store.manifest import LOOP_IDENTITY, Manifest
from rollstream.store.records import scoring_failed
from rollstream.store.recovery import inspect
from rollstream.store.scores import (
    SCORED_COLUMNS,
    ScoreFacts,
    ScorePaths,
    decode_scores,
    is_score_name,
    read_facts,
    score_folder,
    seal_scores,
    write_facts,
)
from rollstream.store.stream import run_tables
from rollstream.trajectory import RolloutKey, failure_cause

logger = logging.getLogger(__name__)

_READ = (
    *(*SCORED_COLUMNS, "prompt_key", "data_source", "ground_truth", "messages", "extra"),
    *("is_snapshot", "num_turns", "reward", "reward_extra", "response_ids", "response_mask"),
)
_ROW = ("is_snapshot", "num_turns", "messages", "extra", "reward", "reward_extra")
_TEXT = '"role":"assistant","content":"'
"""In the messages of nearly every trajectory whose answer is text: then no ids are needed for it."""

_AHEAD = 32
"""Rollouts that a process has beyond those that it scores at once."""

_PATIENCE_S = 30.0
"""Beyond the time of one call: a process that says nothing for so long is held up, and is ended."""

_CHILD = "from rollstream.evaluate.score_worker import main; main()"
"""Its program: a module that is run as `__main__` has classes that are not those of its parent."""


@dataclass(slots=True)
class ScoreReport:
    """What came of it. Counts of rollouts."""

    name: str
    path: str
    rollouts: int = 0
    """In the table."""
    now: int = 0
    """Scored by this call."""
    unscored: int = 0
    failed: int = 0
    """Unscored ones on which the reward failed."""
    mean_reward: float | None = None
    mean_before: float | None = None
    """Mean of the run's own rewards."""
    causes: dict[str, int] = field(default_factory=dict)
    """How often the reward failed, by the first message of each cause."""
    damage: list[str] = field(default_factory=list)


def snapshot_rule(manifest: Manifest) -> SnapshotRule:
    """How a run scores its snapshots, by the options of its agent loops. Raises `ConfigError`."""
    rules: set[SnapshotRule] = set()
    for key, digest in manifest.identity.items():
        if key.startswith(LOOP_IDENTITY):
            with suppress(ValueError, IndexError, AttributeError):
                options = orjson.loads(str(digest).split(" ", 2)[2])
                penalised = options.get("context_penalty") is not None
                rules.add("keep" if penalised else options.get("snapshot_scoring", "outcome"))
    if len(rules) > 1:
        raise ConfigError(
            f"the run's agent loops score snapshots in different ways ({', '.join(sorted(rules))}): --snapshots"
        )
    return rules.pop() if rules else "outcome"


def score_run(
    root: Path,
    recipe: RewardRecipe,
    *,
    name: str | None = None,
    snapshots: SnapshotRule | None = None,
    output: Path | None = None,
    processes: int | None = None,
    retry_unscored: bool = False,
    say: Callable[[int, int, int], object] = lambda done, total, failed: None,
) -> ScoreReport:
    """Scores all finished rollouts of a run that are not scored under this name yet.

    Args:
        root: the run directory, finished or being written; it is only read, but for `scores/`.
        recipe: the reward.
        name: of the scores; None: after the reward, and its content.
        snapshots: what snapshots get; None: as in the run.
        output: a folder to write to instead of `scores/` in the run directory.
        processes: that score; None: one for each CPU, four at most.
        retry_unscored: scores those again on which the reward failed earlier.
        say: is told now and then how many are scored, of how many, and how many of them failed.

    Raises:
        ConfigError: the reward cannot be used, or the name is taken.
        RunDirectoryError: no run directory, nothing in it, or somebody scores under this name right now.
        StorageError: the disk is full; what was scored is safe.
    """
    manifest, state = inspect(root)
    if not state.keys.done:
        raise RunDirectoryError(f"{root} holds no finished rollout yet")
    rule = snapshots or snapshot_rule(manifest)
    reward = recipe.load()
    reward.close()
    digest = hashlib.blake2b(f"{reward.source_digest} {rule}".encode(), digest_size=16).hexdigest()
    label = "rules" if recipe.path is None else Path(recipe.path).stem
    name = name or f"{''.join(one if one.isalnum() else '-' for one in label)}-{digest[:8]}"
    if not is_score_name(name):
        raise ConfigError(f"--name {name}: letters, digits, '-', '_' and '.'")
    folder = output or score_folder(root)
    if output is not None:
        _check_output(output, name)
    try:
        folder.mkdir(parents=output is not None, exist_ok=True)
        paths = ScorePaths(folder, name)
        lock = RunLock(paths.lock)
        lock.acquire()
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write to {folder}: {error.strerror}; --output names another"
        ) from error
    try:
        function = "rules" if isinstance(reward, RuleReward) else f"{recipe.path}:{recipe.name}"
        facts = _facts(paths, manifest, function, digest)
        journal, earlier, failed = _open_journal(paths, facts, manifest.n, retry_unscored=retry_unscored)
        report = ScoreReport(name, str(paths.table), mean_before=state.rewards.mean)

        def keep(frames: Sequence[ScoredFrame]) -> None:
            nonlocal failed
            _append(journal, b"".join(one.frame for one in frames))
            report.now += len(frames)
            failed += sum(one.failed for one in frames)
            total = max(state.keys.done, report.now)  # it may grow meanwhile
            say(min(done + report.now, total), total, failed)

        done = len(earlier)
        try:
            items = _items(root, manifest.n, earlier, report.damage.append)
            count = processes or min(os.cpu_count() or 1, 4)
            _score_in_processes(items, (recipe, rule, root), count, keep)
        finally:
            journal.close()
        try:
            _summarise(paths, facts, report)
        except OSError as error:
            raise _no_room(paths.table, error) from error
        return report
    finally:
        lock.release()


def _check_output(folder: Path, name: str) -> None:
    """Raises `ConfigError` where scores in this folder would get in the way of other files."""
    place = folder.resolve()
    for one in (place, *place.parents):
        if (one / "run.json").exists():
            raise ConfigError(f"--output {folder} is in the run directory {one}; name a folder outside")
    paths = ScorePaths(folder, name)
    if not paths.facts.exists() and (there := [one for one in (paths.table, paths.journal) if one.exists()]):
        raise ConfigError(
            f"{there[0]} exists, and is none of these scores; choose another --name or --output"
        )


def _facts(paths: ScorePaths, manifest: Manifest, reward: str, digest: str) -> ScoreFacts:
    """What is noted of these scores, now if they are new. Raises `ConfigError` where others have the name."""
    facts = read_facts(paths.facts)
    if facts is None:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        facts = ScoreFacts(
            id=token_hex(16), run_id=manifest.run_id, reward=reward, digest=digest, created=created
        )
        paths.journal.unlink(missing_ok=True)  # without its facts nobody knows what it is
        write_facts(paths.facts, facts)
    if facts.run_id != manifest.run_id:
        raise ConfigError(f"{paths.facts} is of another run; choose another --name or --output")
    if facts.digest != digest:
        raise ConfigError(
            f"the scores {paths.name!r} are of another reward ({facts.reward}, {facts.created}), or of what its "
            "file said then; choose another --name"
        )
    return facts


class _Scored:
    """Which rollouts are scored, each by the time at which it was finished: 8 bytes a rollout."""

    def __init__(self, n: int) -> None:
        """`n` is the number of rollouts of a prompt row."""
        self._n = n
        self._times = array("d")

    def __len__(self) -> int:
        return sum(time == time for time in self._times)

    def add(self, index: int, repeat: int, finished_at: float | None) -> None:
        """Marks one; a later one of its key takes its place."""
        at = index * self._n + repeat
        if at >= len(self._times):
            self._times.extend(repeat_value(math.nan, at + 1 - len(self._times)))
        self._times[at] = finished_at or 0.0

    def discard(self, index: int, repeat: int) -> None:
        """Takes one out that was added."""
        self._times[index * self._n + repeat] = math.nan

    def holds(self, index: int, repeat: int, finished_at: float | None) -> bool:
        """Whether this very rollout is scored."""
        at = index * self._n + repeat
        return at < len(self._times) and self._times[at] == (finished_at or 0.0)


def _open_journal(
    paths: ScorePaths, facts: ScoreFacts, n: int, *, retry_unscored: bool
) -> tuple[JournalFile, _Scored, int]:
    """The journal to go on with, what need not be scored, and how many of those the reward failed on."""
    earlier, report, failed = _Scored(n), ScanReport(), set[tuple[int, int]]()
    id = bytes.fromhex(facts.id)
    if not paths.journal.exists():
        return JournalFile(paths.journal, id), earlier, 0
    for frame in scan(paths.journal, id, report):
        key, scored = (frame.index, frame.repeat), decode_scores(frame.body)
        reward, extra = scored.trajectories[-1]
        earlier.add(*key, scored.finished_at)
        failed.discard(key)
        if reward is None and scoring_failed(orjson.loads(extra)):
            failed.add(key)
    if retry_unscored:
        for key in failed:
            earlier.discard(*key)
        failed.clear()
    for damage in report.damage:
        logger.warning("%s: what it held is scored again", damage)
    if report.end < FILE_HEADER_SIZE:
        paths.journal.unlink()
        return JournalFile(paths.journal, id), _Scored(n), 0
    return JournalFile(paths.journal, id, resume_at=report.end), earlier, len(failed)


def _append(journal: JournalFile, data: bytes) -> None:
    try:
        journal.append(data)
        journal.sync()
    except OSError as error:
        with suppress(OSError):
            journal.rollback()
        raise _no_room(journal.path, error) from error


def _no_room(path: Path, error: OSError) -> StorageError:
    return StorageError(
        f"cannot write {path}: {error.strerror or error}. What was scored is safe; free space and run the same "
        "command again"
    )


def _items(root: Path, n: int, earlier: _Scored, note: Callable[[str], object]) -> Iterator[ScoreItem]:
    """The rollouts that are not scored yet."""
    seen = KeyStates(n)
    for table in run_tables(root, _READ, note):
        has_text = pc.match_substring(table["messages"], _TEXT).to_pylist()
        plain = table.drop_columns(["response_ids", "response_mask"]).to_pylist()
        rows: list[ScoreRow] = []
        for at, row in enumerate(plain):
            sampled = None if has_text[at] else _sampled(table, at)
            rows.append(ScoreRow(**{name: row[name] for name in _ROW}, sampled=sampled))
            key = RolloutKey(row["index"], row["repeat"])
            if at + 1 < len(plain) and key == RolloutKey(plain[at + 1]["index"], plain[at + 1]["repeat"]):
                continue
            finished = row["finished_at"]
            new = seen.mark_done(key.index, key.repeat)
            if new and not earlier.holds(key.index, key.repeat, finished):
                said = {name: row[name] for name in ("prompt_key", "data_source", "ground_truth")}
                yield ScoreItem(key, finished, **said, trajectories=rows)
            rows = []


def _sampled(table: pa.Table, row: int) -> list[int]:
    ids, mask = (table[name][row].as_py() for name in ("response_ids", "response_mask"))
    return [one for one, by_model in zip(ids, mask, strict=True) if by_model]


class _Process:
    """The parent's end of a process that scores."""

    def __init__(self, recipe: object) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                # -P: what lies in the working directory does not shadow modules.
                [sys.executable, "-P", "-c", _CHILD, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for the result
                pass_fds=[theirs.fileno()],
                env=os.environ | path_to_rollstream(),
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        self.connection = Connection(ours.detach())
        self.scoring: dict[RolloutKey, ScoreItem] = {}
        self.ready = self.alone = False
        self.heard = time.monotonic()
        self.connection.send([path for path in sys.path if path])
        self.connection.send(recipe)

    def give(self, items: Sequence[ScoreItem]) -> None:
        """Hands rollouts over. One whose end has come does not take them; its end is seen when it is heard."""
        if not self.scoring:
            self.heard = time.monotonic()
        self.scoring |= {one.key: one for one in items}
        with suppress(OSError):
            self.connection.send(items)

    def receive(self) -> list[ScoredFrame] | None:
        """What it says; None: its end has come. Raises what it could not be made for."""
        try:
            said = self.connection.recv()
        except (EOFError, OSError):
            return None
        self.heard = time.monotonic()
        if isinstance(said, BaseException):
            raise said
        self.ready = True
        frames: list[ScoredFrame] = said or []
        for one in frames:
            del self.scoring[one.key]
        return frames

    def end(self) -> str:
        """Ends it; says how it has ended."""
        with suppress(ProcessLookupError):
            if self._process.poll() is None:
                self._process.kill()
        self.connection.close()
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _score_in_processes(
    items: Iterator[ScoreItem],
    recipe: tuple[RewardRecipe, SnapshotRule, Path],
    processes: int,
    keep: Callable[[Sequence[ScoredFrame]], object],
) -> None:
    """Has all items scored; `keep` is given what is. Items are taken as processes have room for them.

    A process that ends, or is held up, with several rollouts leaves them to be scored one at a time: the one
    that it was alone with is the cause.
    """
    first = next(items, None)
    if first is None:
        return
    suspects, window = deque[ScoreItem](), recipe[0].max_concurrency + _AHEAD
    waiting: deque[ScoreItem] = deque([first])
    patience = recipe[0].timeout + _PATIENCE_S
    pool = [_Process(recipe) for _ in range(processes)]

    def take(count: int) -> list[ScoreItem]:
        while len(waiting) < count and (item := next(items, None)) is not None:
            waiting.append(item)
        return [waiting.popleft() for _ in range(min(count, len(waiting)))]

    def fill(one: _Process) -> None:
        if not one.ready or (one.alone and one.scoring) or len(one.scoring) > window // 2:
            return
        one.alone = bool(suspects) and not one.scoring
        given = [suspects.popleft()] if one.alone else take(window - len(one.scoring))
        if given:
            one.give(given)

    def replaced(one: _Process, why: str = "") -> _Process:
        how = one.end()
        if not one.ready:
            raise RollstreamError(f"a process that scores ended at its start ({how}); its error is above")
        lost = list(one.scoring.values())
        if len(lost) == 1:
            error = RewardError(f"the reward {why or f'ended its process ({how})'}")
            keep([failed_frame(lost[0], f"RewardError: {error}")])
        elif lost:
            logger.warning("a process that scores ended (%s); %d rollouts are scored again", how, len(lost))
            suspects.extend(lost)
        return _Process(recipe)

    try:
        while True:
            for one in pool:
                fill(one)
            if not waiting and not suspects and not any(one.scoring for one in pool):
                if not (more := take(1)):
                    return
                waiting.extend(more)  # for a process that is not ready yet
            heard = wait([one.connection for one in pool], timeout=1.0)
            for at, one in enumerate(pool):
                if one.connection in heard:
                    frames = one.receive()
                    if frames is None:
                        pool[at] = replaced(one)
                    elif frames:
                        keep(frames)
                elif one.scoring and time.monotonic() - one.heard > patience:
                    pool[at] = replaced(one, f"held up its process for more than {patience:g} seconds")
    finally:
        for one in pool:
            one.end()


def _summarise(paths: ScorePaths, facts: ScoreFacts, report: ScoreReport) -> None:
    """Makes the table of what the journal holds, and counts it."""
    total, scored, causes, examples = 0.0, 0, Counter[str](), dict[str, str]()
    for _, rollout in seal_scores(paths, facts):
        report.rollouts += 1
        reward, extra = rollout.trajectories[-1]
        if reward is not None:
            total, scored = total + reward, scored + 1
        elif (error := orjson.loads(extra).get("error")) is not None:
            cause = failure_cause(str(error))
            causes[cause] += 1
            examples.setdefault(cause, str(error))
    report.unscored = report.rollouts - scored
    report.failed = causes.total()
    report.mean_reward = total / scored if scored else None
    report.causes = {examples[cause]: count for cause, count in causes.most_common()}
