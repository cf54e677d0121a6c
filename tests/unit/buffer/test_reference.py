"""The reference says what the design says; what is compared against it relies on that."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollstream.buffer.groups import GroupSettings
from tests.unit.buffer.reference import ReferenceBuffer

SETTINGS = GroupSettings(group_size=2, group_timeout_seconds=30, min_timeout_group_size_ratio=0.5)


def a_buffer(groups: int = 0, **settings: int) -> ReferenceBuffer:
    buffer = ReferenceBuffer(SETTINGS, lease_seconds=10, **settings)
    for number in range(groups):
        for repeat in range(2):
            assert buffer.write(f"{number}.{repeat}", "math", number, repeat, 0)
    return buffer


def handed(buffer: ReferenceBuffer, lease: int | None) -> list[int | str]:
    return [] if lease is None else [group.instance_id for group in buffer.leases[lease].groups]


def test_a_group_goes_out_once_until_it_is_given_back() -> None:
    buffer = a_buffer(3)
    first = buffer.read(1, max_groups=2)
    assert handed(buffer, first) == [0, 1]
    assert handed(buffer, buffer.read(1)) == [2]
    assert buffer.read(1) is None
    assert first is not None and buffer.nack(first, 2) == "done"
    assert buffer.ack(first, 2) == "conflict"
    again = buffer.read(2)
    assert handed(buffer, again) == [0, 1]
    assert again is not None and buffer.ack(again, 3) == "done" and buffer.ack(again, 3) == "already"
    assert buffer.nack(again, 3) == "conflict" and buffer.ack(99, 3) == "unknown"
    assert buffer.acked == ["0.0", "0.1", "1.0", "1.1"]
    assert not buffer.write("1.1", "math", 1, 0, 3)


def test_a_late_ack_counts_while_nobody_else_has_the_groups() -> None:
    buffer = a_buffer(1)
    late = buffer.read(0)
    assert late == 0 and buffer.ack(0, 11) == "done" and buffer.read(11) is None
    buffer = a_buffer(1)
    assert buffer.read(0) == 0 and buffer.read(9.9) is None and buffer.read(10) == 1
    assert buffer.ack(0, 10) == "conflict" and buffer.ack(1, 10) == "done"
    buffer = a_buffer(1)
    assert buffer.read(0) == 0
    buffer.restart(9)
    assert buffer.read(18) is None and buffer.read(19) == 1


def test_groups_close_time_out_and_are_dropped() -> None:
    buffer = a_buffer()
    for uid, instance, reward in [("a", 7, 1), ("b", "7", 1), ("c", 8, 0), ("d", 8, 0), ("e", 9, None)]:
        buffer.write(uid, "math", instance, reward, 0)
    assert buffer.read(1) is None
    assert buffer.dropped == [("c", "not_valid"), ("d", "not_valid")]
    assert buffer.live_uids() == {"a", "b", "e"}
    buffer.write("f", "math", 7, 0, 20)
    lease = buffer.read(20)
    assert handed(buffer, lease) == [7] and lease is not None and buffer.ack(lease, 20) == "done"
    assert buffer.read(30) is None  # one reward alone differs from nothing
    assert buffer.dropped[2:] == [("b", "timed_out"), ("e", "timed_out")]
    buffer.write("g", "math", 9, 1, 31)  # a new group of that id
    buffer.write("h", "math", 9, 0, 31)
    assert handed(buffer, buffer.read(31)) == [9]


def test_an_id_goes_out_once_a_read_and_a_cycle() -> None:
    buffer = a_buffer(groups_per_cycle=3)
    for number, instance in enumerate([1, 1, 2, 3, 1]):
        buffer.write(f"{number}a", "math", instance, 0, 0)
        buffer.write(f"{number}b", "math", instance, 1, 0)
    assert handed(buffer, buffer.read(0, max_groups=2)) == [1, 2]
    assert handed(buffer, buffer.read(0)) == [3, 1]
    assert handed(buffer, buffer.read(0)) == []


@settings(max_examples=30)
@given(st.randoms(), st.integers(1, 3), st.sampled_from([None, 2]))
def test_every_item_has_one_fate(order: random.Random, group_size: int, cycle: int | None) -> None:
    buffer = ReferenceBuffer(
        GroupSettings(group_size=group_size, group_timeout_seconds=20),
        lease_seconds=10,
        groups_per_cycle=cycle,
    )
    now = 0.0
    for step in range(60):
        now += order.choice([0, 1, 5])
        action = order.choice(["write"] * 5 + ["read", "ack", "nack", "release", "restart"])
        lease = order.randrange(len(buffer.leases)) if buffer.leases else 0
        if action == "write":
            buffer.write(
                f"u{order.randrange(2 * step + 1)}",
                "t",
                order.choice([1, "1", 2]),
                order.choice([0, 1, None]),
                now,
            )
        elif action == "read":
            buffer.read(now, max_groups=order.choice([None, 1, 2]), consumer="me")
        elif action == "restart":
            buffer.restart(now)
        elif action == "release":
            buffer.release("me", now)
        else:
            getattr(buffer, action)(lease, now)
        assert len(set(buffer.acked)) == len(buffer.acked)
        dropped = [uid for uid, _ in buffer.dropped]
        assert len(set(dropped)) == len(dropped) and not set(dropped) & set(buffer.acked)
        places = [*buffer.open.values(), *buffer.line]
        places += [group for held in buffer.leases.values() if held.state == "live" for group in held.groups]
        there = [uid for group in places for uid in group.uids]
        assert len(set(there)) == len(there) and set(there) == buffer.live_uids()
        assert all(len(group.uids) <= group_size for group in places)
