"""Items that are answered with success and not stored: counted, and told once a rollout."""

import logging
from pathlib import Path

import pytest

from rollstream.buffer.items import Item
from rollstream.buffer.known_writes import KnownWrites

from .served import item, served


async def test_every_way_to_write_counts_what_it_does_not_store(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "rollstream.buffer")
    async with served(tmp_path) as buffer:
        await buffer.write_group("a")
        assert "uid" not in caplog.text
        await buffer.write_group("a")  # the short way of slime's route
        large = item("a", 1.0, "'a'-0", note="x" * 300_000)  # the long one
        assert (await buffer.post("/buffer/write", large))[0] == 200
        items = [item("b", 1.0, "'a'-1", rollout_id="r1"), item("b", 1.0, "b", rollout_id="r1")]
        status, answer = await buffer.post("/v1/items", {"items": items})
        assert (status, answer["stored"], answer["known"]) == (200, 1, 1)
        assert (await buffer.get("/v1/stats"))[1]["items_known"] == 6
        async with buffer.session.get(buffer.url + "/metrics") as response:
            assert "\nrollstream_buffer_items_known_total 6\n" in await response.text()
    told = [record.getMessage() for record in caplog.records if "with uid" in record.getMessage()]
    assert [line.partition(":")[0] for line in told] == ["no rollout", "rollout r1"]
    assert "instance 'b' with uid \"'a'-1\"" in told[1]


def test_what_clients_make_the_server_remember_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    known = KnownWrites()
    for number in range(1100):
        one = Item("u", 1, 0.0, None, b"{}", "json", rollout_id=f"r{number}")
        known.count([one, one], [False, True], "active")
        known.count([one], [False], "active")
    assert known.items == 2200 and len(caplog.records) == 1000
    known.count([Item("u", 1, 0.0, None, b"{}", "json")], [True], None)
    assert known.items == 2200
