"""Frames of the log: the bytes are those of the journal, and of logs that were written before."""

import zlib
from hashlib import blake2b
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rollstream.buffer.items import Item
from rollstream.buffer.log_records import (
    EVENT,
    FRAME_HEADER,
    ITEM,
    KEY_SIZE,
    Event,
    decode_event,
    decode_item,
    encode_item,
    encode_record,
    group_of,
    seal_frame,
    split_item,
)
from rollstream.buffer.segment_scan import scan_segment
from rollstream.buffer.uid_memory import hash_uid
from rollstream.store.journal import JournalFile, ScanReport, encode_frame

texts = st.text(max_size=20)
items = st.builds(
    Item,
    texts,
    texts | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.floats(allow_nan=False),
    st.none() | st.integers(0, 2**63 - 1),
    st.binary(max_size=300),
    st.sampled_from(["json", "msgpack"]),
)


GOLDEN = (
    "d752534662000000cab03611d01c10750500000000000000010000000100000002000000000000002809"
    "d284fb93fe690400000000000000000000000000d03f070000000000000000000000de39da4100100000"
    "0094a46d617468a3692d31a3752d31a1727b22756964223a22752d31227d"
)


@given(items, st.integers(1, 2**40), st.integers(1, 2**40), st.integers(0, 2**30), texts, st.none() | texts)
def test_a_frame_of_an_item_is_the_journals_and_says_all_that_was_given(
    item: Item, ticket: int, group: int, position: int, task_type: str, rollout_id: str | None
) -> None:
    frame = encode_item(
        item,
        ticket=ticket,
        group=group,
        position=position,
        uid=hash_uid(item.uid),
        group_size=16,
        finished=3,
        task_type=task_type,
        rollout_id=rollout_id,
        written_at=1.5e9,
    )
    body = frame[FRAME_HEADER + KEY_SIZE :]
    assert frame == encode_frame(ticket, ITEM, position, body) == seal_frame(ticket, ITEM, position, body)
    record = decode_item(body)
    assert (record.group, record.uid, record.group_size, record.finished) == (
        group,
        hash_uid(item.uid),
        16,
        3,
    )
    assert (record.reward, record.version) == (item.reward, item.policy_version)
    assert (record.task_type, record.rollout_id, record.written_at) == (task_type, rollout_id, 1.5e9)
    assert (record.instance_id, record.uid_text, record.encoding) == (
        item.instance_id,
        item.uid,
        item.encoding,
    )
    assert (bytes(split_item(body)[0]), split_item(body)[1]) == (item.payload, item.encoding)
    assert (body[record.payload_at :], group_of(body)) == (item.payload, group)


def test_frames_are_read_by_the_scan_of_segments(tmp_path: Path) -> None:
    log_id, path = bytes(range(16)), tmp_path / "000000.rsj"
    event = encode_record(Event(gone=[1, 2, 3]))
    file = JournalFile(path, log_id)
    file.append(seal_frame(7, EVENT, 0, event) + seal_frame(8, ITEM, 2, b"body"))
    file.sync()
    file.close()
    report = ScanReport()
    found = [tuple(frame[2:]) for frame in scan_segment(path, log_id, report)]
    assert found == [(7, EVENT, 0, event), (8, ITEM, 2, b"body")]
    assert decode_event(event).gone == [1, 2, 3]
    assert (report.torn, report.damage) == (0, [])


def test_an_item_is_written_as_it_always_was() -> None:
    """Logs of earlier releases have this frame: what reads it must go on reading it."""
    frame = encode_item(
        Item("u-1", "i-1", 0.25, 7, b'{"uid":"u-1"}', "json"),
        ticket=5,
        group=2,
        position=1,
        uid=hash_uid("u-1"),
        group_size=4,
        finished=0,
        task_type="math",
        rollout_id="r",
        written_at=1_760_000_000.0,
    )
    assert frame.hex() == GOLDEN


@given(st.text(st.characters(), max_size=40))
def test_the_hash_of_a_uid_is_the_one_that_logs_have(uid: str) -> None:
    plain = blake2b(uid.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    assert hash_uid(uid) == (int.from_bytes(plain, "little") or 1)


def test_a_flipped_bit_of_a_frame_shows() -> None:
    frame = bytearray(seal_frame(1, ITEM, 0, b"x" * 50))
    payload, stored = frame[FRAME_HEADER:], int.from_bytes(frame[12:16], "little")
    assert zlib.crc32(payload) == stored
    payload[40] ^= 1
    assert zlib.crc32(payload) != stored
