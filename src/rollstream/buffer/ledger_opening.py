"""Opening a ledger's folder: its lock, its log, its list of drops."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rollstream.buffer.drop_file import encode_drops
from rollstream.buffer.group_state import Task
from rollstream.buffer.groups import GroupSettings
from rollstream.buffer.log_records import EVENT, ITEM, Dropped, decode_event, decode_item, decode_start
from rollstream.buffer.oplog import Oplog
from rollstream.buffer.state import BufferState
from rollstream.errors import RunDirectoryError
from rollstream.store.journal import sync_folder
from rollstream.store.lock import RunLock, lock_holder


def replay(log: Oplog, state: BufferState, clock: Callable[[], float]) -> None:
    """Reads the log into an empty state."""
    now = clock()
    state.start_replay()
    for frame in log.replay():
        if frame.kind == ITEM:
            record = decode_item(frame.body)
            state.add_item(
                record,
                ticket=frame.ticket,
                position=frame.rows,
                where=frame.where,
                length=frame.length,
                now=now,
            )
        elif frame.kind == EVENT:
            event = decode_event(frame.body)
            state.apply(event, ticket=frame.ticket, segment=frame.where >> 40, now=now)
        else:
            state.begin_segment(decode_start(frame.body), frame.where >> 40)
    state.end_replay(now)


def catch_up_drops(log: Oplog, state: BufferState) -> None:
    """The list on disk and the one in memory get what the other has.

    Any line may be missing in the file: what was decided at once is many lines, of which a crash leaves some,
    and a line that could not be written for a while has later ones behind it.
    """
    on_disk, since = log.drops.tail()
    there = Counter(_mark(ticket, drop) for ticket, drop in on_disk)
    missing = []
    for ticket, drop in state.listed:
        mark = _mark(ticket, drop)
        if there[mark]:
            there[mark] -= 1
        else:
            missing.append((ticket, drop))
    lines = [encode_drops(ticket, [drop]) for ticket, drop in missing if ticket >= since]
    if lines:
        log.drops.append(b"".join(lines))
    state.listed.clear()
    state.listed.extend(sorted(on_disk + missing, key=lambda listed: listed[0]))


def _mark(ticket: int, drop: Dropped) -> tuple[int, int, bool, str]:
    return ticket, drop.group, drop.whole, drop.reason


def lock_folder(root: Path) -> RunLock:
    """Makes the folder if need be, and takes its lock. Raises `RunDirectoryError`."""
    try:
        created = [folder for folder in (root, *root.parents) if not folder.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for folder in created:
            sync_folder(folder.parent)
        lock = RunLock(root / "buffer.lock")
        lock.acquire()
    except RunDirectoryError as error:
        holder = lock_holder(root / "buffer.lock")
        raise RunDirectoryError(
            f"{root} is in use by another buffer: {holder}. Stop that one, or choose another folder."
        ) from error
    except (FileExistsError, NotADirectoryError) as error:
        raise RunDirectoryError(f"{root} must be a folder, but it or one above it is a file") from error
    except OSError as error:
        raise RunDirectoryError(f"cannot write to {root}: {error.strerror}") from error
    return lock


def task_of(groups: GroupSettings) -> Task:
    """How the groups of an unknown task are made."""
    return Task(groups.group_size, groups.min_group_size)
