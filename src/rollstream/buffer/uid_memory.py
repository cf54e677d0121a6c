"""Which uids were written: those of live items, and the last so many of items that are gone.

A uid is kept as a 64-bit hash. With two million of them the chance that a new uid is taken for a known one
is 1e-13.
"""

import struct
from array import array
from collections.abc import Callable, Iterable
from hashlib import blake2b

_SHARDS = 256
"""A set that grows is copied as a whole: a quarter of a million entries at once would be a pause of tens of
milliseconds, a 256th of them is none."""


_new_hash = blake2b(digest_size=8).copy
"""A copy costs half of what a hash does that is set up anew."""

_number: Callable[[bytes], tuple[int]] = struct.Struct("<Q").unpack


def hash_uid(uid: str) -> int:
    """64 bits, the same in every process; never 0."""
    digest = _new_hash()
    digest.update(uid.encode() if uid.isascii() else uid.encode("utf-8", "surrogatepass"))
    return _number(digest.digest())[0] or 1


class UidMemory:
    """Hashes of live uids, and a ring of those that were buried last.

    A burial has a number; the ring's place of a number is fixed, so that burying again what is buried already
    (a log read anew) changes nothing.
    """

    def __init__(self, remembered: int) -> None:
        """`remembered`: how many buried uids stay known."""
        self._remembered = remembered
        self._known: list[set[int]] = [set() for _ in range(_SHARDS)]
        self._ring = array("Q")
        self.burials = 0
        """Number of the next burial."""

    def __contains__(self, uid: int) -> bool:
        return uid in self._known[uid & 255]

    def __len__(self) -> int:
        return sum(map(len, self._known))

    @property
    def buried(self) -> int:
        """Uids in the ring."""
        return min(self.burials, self._remembered)

    def add(self, uid: int) -> None:
        """A live item's."""
        self._known[uid & 255].add(uid)

    def bury(self, first: int, uids: Iterable[int]) -> None:
        """Of items that are gone; `first` is the number of the first burial."""
        ring, known, remembered = self._ring, self._known, self._remembered
        packed = uids if isinstance(uids, array) else array("Q", uids)
        self.burials = max(self.burials, first + len(packed))
        skip = min(len(packed), max(0, self.burials - remembered - first))
        for uid in packed[:skip]:
            known[uid & 255].discard(uid)
        for number, uid in enumerate(packed[skip:], first + skip):
            place = number % remembered
            if place >= len(ring):
                ring.frombytes(bytes(8 * (place + 1 - len(ring))))
            old = ring[place]
            if old != uid:
                if old:
                    known[old & 255].discard(old)
                ring[place] = uid
                known[uid & 255].add(uid)

    def still_remembered(self, first: int, uids: array) -> tuple[int, array]:  # type: ignore[type-arg]
        """The part of a burial that is in the ring: its first number and its uids."""
        skip = max(0, self.burials - self._remembered - first)
        return first + skip, uids[skip:]
