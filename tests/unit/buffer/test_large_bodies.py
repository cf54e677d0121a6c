"""Large bodies beside the database: what committed rows name is there, whatever failed or ended in between."""

import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rollstream.buffer.store import large_bodies
from rollstream.buffer.store.large_bodies import LargeBodies, Place

FILE_BYTES = 1000
SHM = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # a sync costs nothing there


class LargeBodiesMachine(RuleBasedStateMachine):
    """Rows are a dict, and a crash leaves of what was not synced whatever chance wants."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ExitStack()
        patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(large_bodies, "_FILE_BYTES", FILE_BYTES)
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(dir=SHM))) / "bodies"
        self.random = random.Random(7)
        self.rows: dict[int, tuple[Place, bytes]] = {}
        self.count = 0
        self.open()

    def open(self) -> None:
        self.files = LargeBodies(self.folder)
        self.files.open(self.named())

    def named(self) -> set[int]:
        return {place.file for place, _ in self.rows.values()}

    def append(self, sizes: Sequence[int]) -> dict[int, tuple[Place, bytes]]:
        bodies = [self.random.randbytes(size) for size in sizes]
        self.count += len(bodies)
        rows = range(self.count, self.count + len(bodies))
        return dict(zip(rows, zip(self.files.append(bodies), bodies, strict=True), strict=True))

    sizes = st.lists(st.sampled_from([1, 10, 300, 2000]), min_size=1, max_size=5)

    @rule(sizes=sizes)
    def commit(self, sizes: list[int]) -> None:
        added = self.append(sizes)
        self.files.sync()
        self.files.keep()
        self.rows |= added

    @rule(sizes=sizes, synced=st.booleans())
    def fail(self, sizes: list[int], synced: bool) -> None:
        before = self.files.size()
        self.append(sizes)
        if synced:
            self.files.sync()
        self.files.undo()
        assert self.files.size() == before

    @rule(sizes=sizes, done=st.booleans())
    def commit_of_which_nobody_knows(self, sizes: list[int], done: bool) -> None:
        added = self.append(sizes)
        self.files.sync()
        self.files.leave()
        self.rows |= added if done else {}

    @rule(sizes=sizes, left=st.floats(0, 1), noise=st.booleans())
    def crash(self, sizes: list[int], left: float, noise: bool) -> None:
        added = self.append(sizes)
        place = min(place for place, _ in added.values())
        path = self.folder / f"{place.file:012d}"
        torn = path.read_bytes()[place.at :]
        torn = torn[: int(left * len(torn))]
        content = path.read_bytes()[: place.at] + (self.random.randbytes(len(torn)) if noise else torn)
        self.files.leave()
        path.write_bytes(content)
        self.open()
        assert {int(path.name) for path in self.folder.iterdir()} == self.named()

    @rule(data=st.data(), share=st.sampled_from([0.3, 1.0]))
    def delete(self, data: st.DataObject, share: float) -> None:
        gone = [row for row in self.rows if self.random.random() < share]
        files = {self.rows.pop(row)[0].file for row in gone}
        for file in files - self.named():
            self.files.delete(file)

    @invariant()
    def every_row_has_its_body(self) -> None:
        found = self.files.read({row: place for row, (place, _) in self.rows.items()})
        assert found == {row: body for row, (_, body) in self.rows.items()}
        assert len({place for place, _ in self.rows.values()}) == len(self.rows)

    def teardown(self) -> None:
        self.files.leave()
        self.stack.close()


TestLargeBodies = LargeBodiesMachine.TestCase
TestLargeBodies.settings = settings(max_examples=50, stateful_step_count=20, deadline=None)


def test_a_lost_file_hides_only_its_own_bodies(tmp_path: Path) -> None:
    files = LargeBodies(tmp_path / "bodies")
    files.open(())
    (first,) = files.append([b"first"])
    files.leave()
    (second,) = files.append([b"second"])
    files.leave()
    files.delete(first.file)
    assert files.read({1: first, 2: second}) == {2: b"second"}
    assert files.read({2: second._replace(size=100)}) == {2: b"second"}


def test_files_that_their_server_deletes_meanwhile_have_no_size(tmp_path: Path) -> None:
    writer = LargeBodies(tmp_path)
    writer.open(())
    writer.append([bytes(300)])
    (tmp_path / "000000000009").symlink_to("gone")  # a name without a file, as between listing and looking
    assert LargeBodies(tmp_path).size() == 300
