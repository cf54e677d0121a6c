"""The ledger of a training's store: what became of each rollout that was begun."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollstream.store.lock import is_locked
from rollstream.store.run import Run
from rollstream.store.scores import notes_path
from rollstream.training.store import History, read_history
from rollstream.trajectory import failure_cause


@dataclass(slots=True)
class Ledger:
    """Counts of rollouts unless said otherwise. `begun` is the sum of those from `trained` to `cut_off`."""

    begun: int
    trained: int = 0
    waiting: int = 0
    """Finished, and not trained yet."""
    in_flight: int = 0
    filtered: int = 0
    """Finished, in groups that a filter threw away, or that had too few in time."""
    in_failed_groups: int = 0
    """Finished, in groups that failed as a whole because other rollouts of them did."""
    failed: dict[str, int] = field(default_factory=dict)
    """Rollouts that failed for good, by cause."""
    set_aside: dict[str, int] = field(default_factory=dict)
    """Finished, but of no use after a restart, and so made again; by reason."""
    not_needed: int = 0
    """Ended before they were finished, because enough others of their group were."""
    cut_off: int = 0
    """Begun and never finished, because of a crash or a stop; and those that failed and were begun again after a
    restart, once for each time."""
    tokens_made_again: int = 0
    """Tokens of the rollouts that were set aside."""
    batches: int = 0
    """Batches that were trained, each once."""
    batches_trained_again: int = 0
    """Times that a batch came from the store again, after a restart from a checkpoint before it."""
    processes: int = 0
    """Processes that wrote to the store, one after the other."""
    groups_skipped: int = 0
    """Places of the plan before the last batch that were neither trained nor thrown away."""
    groups_doubled: int = 0
    """Places of the plan that stand in two batches."""


def read_ledger(root: Path) -> Ledger | None:
    """The ledger of a training's store, also while it is written; None of a run that is no training's.

    Raises `RunDirectoryError`.
    """
    if not notes_path(root).is_file():
        return None
    run = Run.open(root)
    return make_ledger(run, read_history(root, run.manifest), is_live=is_locked(root / "run.lock"))


def make_ledger(run: Run, history: History, *, is_live: bool) -> Ledger:
    """Counts what the notes of a training and its run directory say. `is_live`: a process is writing to it."""
    state, n = run.state(), run.manifest.n
    ledger = Ledger(history.begun, batches=len(history.batches), processes=len(history.opened))
    ledger.batches_trained_again = history.again
    whole, unfinished, running = list[int](), list[int](), list[int]()
    for position, group in history.groups.items():
        rollouts = len(group.places or ())
        if group.dropped is not None:
            kind = "in_failed_groups" if group.dropped.failed else "filtered"
            setattr(ledger, kind, getattr(ledger, kind) + group.dropped.rollouts)
            continue
        (unfinished if group.places is None else whole).append(position)
        if is_live and group.places is None and group.process == len(history.opened):
            running.append(position)
        if group.step is None:
            ledger.waiting += rollouts
        else:
            ledger.trained += rollouts
    _, failed = state.keys.count(np.array(whole, np.int64))
    ledger.not_needed = n * len(whole) - ledger.trained - ledger.waiting - failed
    ledger.waiting += state.keys.count(np.array(unfinished, np.int64))[0]
    ledger.in_flight = n * len(running) - sum(state.keys.count(np.array(running, np.int64)))
    for failure in run.failures(state):
        cause = failure_cause(failure.error)
        ledger.failed[cause] = ledger.failed.get(cause, 0) + 1
    for note in history.set_aside:
        ledger.set_aside[note.reason] = ledger.set_aside.get(note.reason, 0) + note.rollouts
        ledger.tokens_made_again += note.tokens
    known = ledger.trained + ledger.waiting + ledger.in_flight + ledger.filtered + ledger.in_failed_groups
    known += sum(ledger.failed.values()) + sum(ledger.set_aside.values()) + ledger.not_needed
    ledger.begun = max(
        ledger.begun, known
    )  # a power failure may have taken the note of a failure's beginning
    ledger.cut_off = ledger.begun - known
    trained = [position for batch in history.batches.values() for position in batch.positions]
    ledger.groups_doubled = len(trained) - len(set(trained))
    watermark = max((batch.watermark for batch in history.batches.values()), default=0)
    settled = sum(
        position < watermark and (group.step is not None or group.dropped is not None)
        for position, group in history.groups.items()
    )
    ledger.groups_skipped = watermark - settled
    return ledger


def describe(ledger: Ledger) -> list[str]:
    """The ledger in lines for people."""
    again = ledger.batches_trained_again
    where = f"{ledger.batches} batches" + (f", {again} of them again after a restart" if again else "")
    lines = [f"{ledger.begun} rollouts begun", f"{ledger.trained} trained ({where})"]
    counts = {
        "waiting to be trained": ledger.waiting,
        "in flight": ledger.in_flight,
        "thrown away with their group": ledger.filtered,
        "finished in groups that failed": ledger.in_failed_groups,
        **{f"failed: {cause}": count for cause, count in ledger.failed.items()},
        **{f"set aside: {reason}": count for reason, count in ledger.set_aside.items()},
        "not needed: enough others of their group were there": ledger.not_needed,
        "cut off by a crash or a stop": ledger.cut_off,
    }
    lines += [f"{count} {what}" for what, count in counts.items() if count]
    if ledger.groups_skipped or ledger.groups_doubled:
        lines.append(f"groups skipped: {ledger.groups_skipped}, in two batches: {ledger.groups_doubled}")
    return lines
