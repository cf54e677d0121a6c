"""Which groups a training's steps were made of, on the disk."""

import json
from pathlib import Path

import pytest

from rollstream.integrations.trl.group_log import GROUPS_FILE, GroupLog, group_records
from rollstream.integrations.trl.groups import stand_in
from rollstream.training.group import Group, GroupBatch
from rollstream.training.plan import PlannedGroup
from rollstream.trajectory import Failure, PromptRow, Rollout, Trajectory


def row(index: int) -> PromptRow:
    parts = [{"type": "text", "text": "x" * 150}, {"type": "text", "text": "\udce9" * 150}]
    return PromptRow(index, f"key {index}", [{"role": "user", "content": parts}], "source")


def rollout(repeat: int) -> Rollout:
    versions = [(0, 2), (2, 2 + repeat)]
    trajectory = Trajectory([1], [2, 3, 4], [1, 1, 1], [0.0] * 3, [], "stop", policy_versions=versions)
    return Rollout(7, repeat, "key 7", [trajectory], "source")


def test_groups_have_the_figures_of_their_rollouts() -> None:
    failed = stand_in(row(8), Failure(8, 1, "key 8", 3, "agent", "ValueError: no", "…", 0.0))
    batch = GroupBatch(
        3,
        [
            Group(PlannedGroup(0, 0, 7), start=2, rollouts=[rollout(0), rollout(1)]),
            Group(PlannedGroup(1, 0, 8), start=3, rollouts=[failed, failed]),
        ],
    )
    first, second = group_records(batch, [0.0, 1.0, None, None], row)
    assert first == {
        **{"index": 7, "position": 0, "prompt_key": "key 7", "prompt": "x" * 150 + "\udce9" * 50},
        **{"n": 2, "scored": 2, "failed": 0, "mean": 0.5, "spread": 0.5, "versions": [2, 3], "staleness": 1},
    }
    assert (second["scored"], second["failed"], second["mean"], second["versions"]) == (0, 2, None, [])
    assert json.loads(json.dumps(first)) == first


def test_line_that_a_kill_has_cut_stays_alone(tmp_path: Path) -> None:
    path = tmp_path / "out" / GROUPS_FILE
    GroupLog(str(path.parent)).write(1, 1, [{"prompt": "\udce9\n"}])
    with path.open("ab") as file:
        file.write(b'{"first": 2')
    GroupLog(str(path.parent)).write(2, 2, [])
    lines = path.read_bytes().split(b"\n")
    assert [line[:12] for line in lines] == [b'{"first": 1,', b'{"first": 2', b'{"first": 2,', b""]


def test_a_training_begins_anew_and_a_resumed_one_keeps_what_was_before(tmp_path: Path) -> None:
    log, path = GroupLog(str(tmp_path)), tmp_path / GROUPS_FILE
    log.begin(0)
    for step in (2, 4, 6):
        log.write(step - 1, step, [])
    with path.open("ab") as file:
        file.write(b'{"first": 7')
    log.begin(4)
    log.write(5, 6, [{"index": 1}])
    assert [json.loads(line)["step"] for line in path.read_bytes().splitlines()] == [2, 4, 6]
    log.begin(0)
    assert path.read_bytes() == b""


def test_folder_that_cannot_be_written_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "out").write_text("a file")
    log = GroupLog(str(tmp_path / "out"))
    log.write(1, 1, [])
    log.write(2, 2, [])
    assert len(caplog.records) == 1 and "groups of step 1" in caplog.text
