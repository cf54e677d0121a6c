"""R3: a journal gives back exactly the frames that were whole."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollstream.store.journal import (
    FILE_HEADER_SIZE,
    Frame,
    JournalFile,
    ScanReport,
    encode_file_header,
    encode_frame,
    scan,
)
from tests.support.processes import full_disk

RUN_ID = bytes(range(16))
OTHER_RUN_ID = bytes(range(1, 17))

bodies = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


def build(bodies: list[bytes]) -> tuple[bytes, list[int]]:
    """A journal's bytes, and where each frame ends."""
    data, ends = encode_file_header(RUN_ID), []
    for number, body in enumerate(bodies):
        data += encode_frame(number, number % 3, 1, body)
        ends.append(len(data))
    return data, ends


def read(path: Path, data: bytes) -> tuple[list[Frame], ScanReport]:
    path.write_bytes(data)
    report = ScanReport()
    return list(scan(path, RUN_ID, report)), report


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("journal") / "000000.rsj"


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.too_slow])
@given(bodies)
def test_cut_at_every_byte_gives_exactly_the_whole_frames(path: Path, bodies: list[bytes]) -> None:
    data, ends = build(bodies)
    for cut in range(len(data) + 1):
        frames, report = read(path, data[:cut])
        whole = sum(end <= cut for end in ends)
        assert [frame.body for frame in frames] == bodies[:whole]
        assert not report.damage
        if cut >= FILE_HEADER_SIZE:
            assert report.end == (ends[whole - 1] if whole else FILE_HEADER_SIZE)
            assert report.torn == cut - report.end


@settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])
@given(bodies, st.integers(1, 255))
def test_every_flipped_byte_is_detected_and_costs_only_its_frame(
    path: Path, bodies: list[bytes], flip: int
) -> None:
    data, ends = build(bodies)
    starts = [FILE_HEADER_SIZE, *ends[:-1]]
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= flip
        frames, report = read(path, bytes(broken))
        hit = next((i for i, (a, b) in enumerate(zip(starts, ends, strict=True)) if a <= at < b), None)
        assert report.damage or report.torn
        assert [frame.index for frame in frames] == [i for i in range(len(bodies)) if i != hit]
        if hit is not None and hit < len(bodies) - 1:
            assert report.damage[0].offset == starts[hit]


@settings(deadline=None, max_examples=50)
@given(bodies, st.integers(0, 200))
def test_zeros_behind_the_last_frame_are_a_torn_tail(path: Path, bodies: list[bytes], zeros: int) -> None:
    data, ends = build(bodies)
    frames, report = read(path, data + bytes(zeros))
    assert len(frames) == len(bodies)
    assert (report.end, report.torn, report.damage) == (ends[-1], zeros, [])


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=400))
def test_garbage_never_raises(path: Path, garbage: bytes) -> None:
    read(path, garbage)
    read(path, encode_file_header(RUN_ID) + garbage)


def test_journal_of_another_run_is_refused_whole(path: Path) -> None:
    data = encode_file_header(OTHER_RUN_ID) + encode_frame(0, 0, 1, b"theirs")
    frames, report = read(path, data)
    assert frames == []
    assert "another run" in report.damage[0].reason


def test_a_full_disk_leaves_only_what_was_durable(tmp_path: Path) -> None:
    journal = JournalFile(tmp_path / "000000.rsj", RUN_ID)
    journal.append(encode_frame(0, 0, 1, b"kept"))
    with full_disk(80), pytest.raises(OSError):
        journal.append(encode_frame(1, 0, 1, bytes(100)))
    journal.append(encode_frame(2, 0, 1, b"after"))
    journal.close()
    report = ScanReport()
    assert [frame.body for frame in scan(journal.path, RUN_ID, report)] == [b"kept", b"after"]
    assert not report.damage
