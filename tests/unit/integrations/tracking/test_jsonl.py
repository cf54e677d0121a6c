"""`logs/metrics.jsonl`: whole lines, also after a kill, and steps that go on."""

from pathlib import Path

import orjson
import pytest

from rollstream.integrations.trackers import JsonLinesTracker
from tests.unit.integrations.tracking.runs import run_in


def lines(folder: Path) -> list[dict[str, float]]:
    return [orjson.loads(line) for line in (folder / "logs" / "metrics.jsonl").read_bytes().splitlines()]


def test_a_line_a_report_and_a_second_process_goes_on(tmp_path: Path) -> None:
    for expected, steps in ((None, (3, 5)), (5, (6, 9))):
        tracker = JsonLinesTracker()
        assert tracker.open(run_in(tmp_path)) == expected
        for step in steps:
            tracker.log({"a/b": 0.5, "c": 2}, step=step)
        tracker.close(succeeded=True)
    found = lines(tmp_path)
    assert [line["step"] for line in found] == [3, 5, 6, 9]
    assert all(line["a/b"] == 0.5 and line["c"] == 2 and line["time"] > 1e9 for line in found)


@pytest.mark.parametrize("torn", [b'{"step":9,"a', b"\xff\x00", b"{}", b"7"])
def test_a_torn_line_is_ended_and_passed_over(tmp_path: Path, torn: bytes) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "metrics.jsonl"
    path.write_bytes(b'{"step":7}\n' + torn)
    tracker = JsonLinesTracker()
    assert tracker.open(run_in(tmp_path)) == 7
    tracker.log({"x": 1}, step=8)
    tracker.close(succeeded=True)
    content = path.read_bytes().splitlines()
    assert content[:2] == [b'{"step":7}', torn]
    assert orjson.loads(content[2])["step"] == 8
