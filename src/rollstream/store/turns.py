"""Turns of rollouts that are not finished, so that a crash costs the turn in flight and not the rollout.

A turn is an answer of the model, what was given to the model since the answer before, and what its loop had counted
by then. It is a frame of a file `turns/000000.rsj`, a journal file whose frames have the turn's number in the place of
their rows.

    owed --turn 0--> 1 turn --turn 1--> 2 turns ... --> done or failed: forgotten
                        ^                  |
                        +--- turn 0 -------+   a new attempt: turn k takes the place of k and of all behind it

What holds, whatever is killed when:

- The turns that are read of a rollout are its first ones, in order and as they were sampled, with no gap.
- A turn counts nothing. A rollout is done by its own frame in the journal alone, and has no turns then; one that failed
  has none either, by a frame with number -1.
- A file goes when no rollout has a turn in it or in an older one: so there are at most the turns since the oldest
  rollout that is not finished was begun.

They lie in files of their own since a rollout outlives the journals that are sealed beside it. Readers of rollouts,
and older versions, do not look there. The writer syncs turns as it syncs rollouts, but no loop waits for it: nothing is
said of a turn to anybody, so one that a crash takes was in flight.

How it fails: a torn tail is cut. Damage costs a rollout the turns from there on. A full disk ends the run, as with
rollouts.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Protocol

from rollstream.store.journal import JournalFile, ScanReport, encode_frame, scan, sync_folder
from rollstream.store.paths import RunPaths
from rollstream.store.records import EncodedRollout, EncodedTurn
from rollstream.trajectory import Failure, RolloutKey

_FILE_BYTES = 8 << 20
"""A file of turns is closed at this size: small, so that it goes soon."""

NO_TURN = -1
"""The number of a frame that says that a rollout has no turns any more."""


class TurnStore(Protocol):
    """Keeps the turns of rollouts that are not finished. A sink that can do it offers one."""

    def turns_of(self, key: RolloutKey) -> list[bytes] | None:
        """Bodies of the turns so far, oldest first; None: those of this rollout are not kept."""
        ...

    def keep(self, turn: EncodedTurn) -> None:
        """Takes a turn, and makes it durable soon. Those of a rollout come in order; one with number `NO_TURN` says
        that it has none any more.
        """
        ...


class TurnPlaces:
    """Where the turns lie of rollouts that are not finished: file and offset."""

    def __init__(self) -> None:
        self._places: dict[RolloutKey, list[tuple[int, int]]] = {}
        self._used: Counter[int] = Counter()
        """How many turns that count are in a file."""

    def __len__(self) -> int:
        """Rollouts that have turns."""
        return len(self._places)

    def rows(self) -> set[int]:
        """Prompt rows with a rollout that has turns."""
        return {key.index for key in self._places}

    def of(self, key: RolloutKey) -> list[tuple[int, int]]:
        """The places of a rollout's turns, oldest first."""
        return list(self._places.get(key, ()))

    def is_used(self, number: int) -> bool:
        """Whether a turn that counts is in a file."""
        return self._used[number] > 0

    def add(self, key: RolloutKey, number: int, place: tuple[int, int]) -> None:
        """Adds a turn in the place of those from `number` on; one behind a gap is left out."""
        places = self._places.get(key, [])
        if number > len(places):
            return
        self._used.subtract(file for file, _ in places[max(number, 0) :])
        del places[max(number, 0) :]
        if number != NO_TURN:
            places.append(place)
            self._used[place[0]] += 1
        if places:
            self._places[key] = places
        else:
            self._places.pop(key, None)

    def forget(self, key: RolloutKey) -> None:
        """The rollout has no turns any more."""
        self.add(key, NO_TURN, (0, 0))


def read_places(
    paths: RunPaths, run_id: bytes, is_done: Callable[[int, int], bool], damage: list[str]
) -> TurnPlaces:
    """Finds the turns of rollouts that are not done, and adds lines to `damage`."""
    places = TurnPlaces()
    for number in paths.turn_numbers():
        with suppress(FileNotFoundError):  # its rollouts were finished meanwhile
            report = ScanReport()
            for frame in scan(paths.turns_file(number), run_id, report):
                if not is_done(frame.index, frame.repeat):
                    places.add(RolloutKey(frame.index, frame.repeat), frame.rows, (number, frame.offset))
            damage += [f"turns/{line}" for line in report.damage]
    return places


class TurnFiles:
    """Writes turns. Owned by one thread but for `turns_of`."""

    def __init__(self, paths: RunPaths, run_id: bytes, places: TurnPlaces) -> None:
        self._paths, self._run_id, self._places = paths, run_id, places
        self._file: JournalFile | None = None
        self._number = -1

    def turns_of(self, key: RolloutKey) -> list[bytes]:
        """Bodies of the turns of a rollout that are on the disk."""
        bodies = list[bytes]()
        with suppress(FileNotFoundError):
            for number, offset in self._places.of(key):
                file = self._paths.turns_file(number)
                frame = next(scan(file, self._run_id, ScanReport(), offset), None)
                if frame is None or frame.offset != offset:
                    break
                bodies.append(frame.body)
        return bodies

    def write(self, group: Sequence[EncodedRollout | EncodedTurn | Failure]) -> None:
        """Takes what is made durable together, after its rollouts and before its failures are: makes its turns durable,
        and that what is done or failed has none.
        """
        if not self._places and not any(isinstance(record, EncodedTurn) for record in group):
            return
        done = {record.key for record in group if isinstance(record, EncodedRollout)}
        turns = [
            EncodedTurn(record.key, NO_TURN, b"") if isinstance(record, Failure) else record
            for record in group
            if record.key not in done and not isinstance(record, EncodedRollout)
        ]
        touched = {number for key in done for number, _ in self._places.of(key)}
        if turns:
            if self._file is None:
                self._open()
            assert self._file is not None
            offset, frames = self._file.end, [*map(_frame, turns)]
            self._file.append(b"".join(frames))
            for turn, frame in zip(turns, frames, strict=True):
                touched.update(number for number, _ in self._places.of(turn.key))
                self._places.add(turn.key, turn.number, (self._number, offset))
                offset += len(frame)
            if offset >= _FILE_BYTES:
                self.close()
        for key in done:
            self._places.forget(key)
        if any(not self._places.is_used(number) for number in touched):
            remove_turns(self._paths, self._places, but=None if self._file is None else self._number)

    def _open(self) -> None:
        if not self._paths.turns.is_dir():
            self._paths.turns.mkdir()
            sync_folder(self._paths.root)
        self._number = max(self._paths.turn_numbers(), default=-1) + 1
        self._file = JournalFile(self._paths.turns_file(self._number), self._run_id)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None
            remove_turns(self._paths, self._places)


def remove_turns(paths: RunPaths, places: TurnPlaces, but: int | None = None) -> None:
    """Removes files without turns that count, oldest first: a newer one says what of an older one does not count."""
    for number in paths.turn_numbers():
        if number == but or places.is_used(number):
            return
        paths.turns_file(number).unlink()


def _frame(turn: EncodedTurn) -> bytes:
    return encode_frame(turn.key.index, turn.key.repeat, turn.number, turn.body)
