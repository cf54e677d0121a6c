"""W&B, offline: what it keeps is read back from its own file."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.errors import ConfigError
from rollstream.integrations.trackers import WandbTracker
from tests.unit.integrations.tracking.runs import RUN_ID, python

pytest.importorskip("wandb")

LOG = """
import sys
from pathlib import Path
from rollstream.integrations.trackers import WandbTracker
from tests.unit.integrations.tracking.runs import run_in
folder = Path(sys.argv[1])
tracker = WandbTracker()
tracker.check()
run = run_in(folder)
tracker.open(run)
for step in (3, 8):
    tracker.log({"reward/mean": step / 2, "progress/done": step}, step=step)
(folder / "trajectories.zip").write_bytes(b"stored " * 1000)
print("UPLOADED", tracker.upload(run, folder / "trajectories.zip", "mine"))
tracker.close(succeeded=True)
"""

UPLOAD = """
import sys
from pathlib import Path
import wandb
from rollstream.integrations.trackers import WandbTracker
from tests.unit.integrations.tracking.runs import run_in
folder = Path(sys.argv[1])
(folder / "trajectories.zip").write_bytes(b"stored")
run = run_in(folder)
active = wandb.init(project="theirs", id="theirid1", dir=str(folder))
tracker = WandbTracker()
tracker.open(run)  # a run of our own beside theirs
assert wandb.run is active
tracker.close(succeeded=True)
assert wandb.run is active
active.log({"x": 1})
print("UPLOADED", tracker.upload(run, folder / "trajectories.zip", "mine"))
"""


def offline(code: str, folder: Path, *words: str) -> str:
    secret = "some_key=sk-tellnobodytellnobody"
    return python(code, folder, *words, secret, WANDB_MODE="offline", WANDB_DATA_DIR=str(folder / "data"))


def records(folder: Path, run_id: str = RUN_ID) -> list[Any]:
    """What W&B has kept of a run, to be synced."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.rglob(f"run-{run_id}.wandb")
    found = []
    for data in frames(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        found.append(record)
    return found


def frames(content: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: LevelDB's log format after a header of 7 bytes."""
    assert content[:4] == b":W&B"
    at, record = 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # the rest of a block is too short for another piece
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def test_figures_config_and_artifact_are_kept_and_nothing_of_the_command_line(tmp_path: Path) -> None:
    assert "UPLOADED staged offline; to upload it: wandb sync " in offline(LOG, tmp_path)
    found = records(tmp_path)
    kinds = [record.WhichOneof("record_type") for record in found]
    run = found[kinds.index("run")].run
    assert (run.run_id, run.project, run.display_name) == (RUN_ID, "some project", "an experiment")
    config = {update.key: orjson.loads(update.value_json) for update in run.config.update}
    assert config["data"] == {"seed": 3}
    history = [record.history for record, kind in zip(found, kinds, strict=True) if kind == "history"]
    points = [
        {item.key or "/".join(item.nested_key): orjson.loads(item.value_json) for item in one.item}
        for one in history
    ]
    assert [(point["_step"], point["reward/mean"], point["progress/done"]) for point in points] == [
        (3, 1.5, 3),
        (8, 4.0, 8),
    ]
    artifacts = [record for record in found if b"trajectories.zip" in record.SerializeToString()]
    assert any(b"trajectories" in record.SerializeToString() for record in artifacts)
    staged = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in staged] == [b"stored " * 1000]
    for path in tmp_path.rglob("*"):
        if path.is_file():
            assert b"tellnobody" not in path.read_bytes(), path


def test_an_active_run_gets_the_artifact_and_is_left_as_it_is(tmp_path: Path) -> None:
    offline(UPLOAD, tmp_path)

    def has_artifact(run_id: str) -> bool:
        return any(b"trajectories.zip" in one.SerializeToString() for one in records(tmp_path, run_id))

    assert has_artifact("theirid1")
    assert not has_artifact(RUN_ID)


def test_nobody_is_asked_for_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    code = (
        "from rollstream.integrations.trackers import WandbTracker\n"
        "try:\n    WandbTracker().check()\n    print('checked')\n"
        "    WandbTracker().open(None)\nexcept Exception as error:\n    print(type(error).__name__, error)"
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env | {"HOME": str(tmp_path), "WANDB_CONFIG_DIR": str(tmp_path), "WANDB_MODE": "online"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    checked, said = done.stdout.splitlines()
    assert checked == "checked"
    assert said.startswith("ConfigError nobody is logged in to W&B")


HOLE = """
import asyncio, logging, os, socket, sys, time
from pathlib import Path
from rollstream.generation import trackers as module
from rollstream.integrations.trackers import WandbTracker
from tests.unit.integrations.tracking.runs import run_in

logging.basicConfig(level=logging.WARNING)
silent = socket.create_server(("127.0.0.1", 0))  # takes connections, and never says anything
os.environ["WANDB_MODE"] = "online"
os.environ["WANDB_API_KEY"] = "a" * 40
os.environ["WANDB_BASE_URL"] = f"http://127.0.0.1:{silent.getsockname()[1]}"

async def main():
    tracker = WandbTracker()
    tracker.check()
    reporter = module.Reporter({"wandb": tracker}, None)
    reporter.begin(run_in(Path(sys.argv[1])), "2026-01-02T03:04:05Z")
    for step in range(100):
        reporter.threads["wandb"].report({"x": step}, step=step)
    await asyncio.to_thread(silent.accept)  # it tries
    module.FLUSH_S = 1.0
    await reporter.close(succeeded=True, stop=asyncio.Event())

asyncio.run(main())
print("ENDED")
"""


def test_without_a_network_neither_the_run_nor_the_interpreter_waits(tmp_path: Path) -> None:
    # Without being told to let go, W&B's own end would wait until there is a network.
    assert "ENDED" in offline(HOLE, tmp_path)


@pytest.mark.parametrize("broken", [False, True])
def test_a_folder_that_is_named_like_it_and_a_broken_package_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    (tmp_path / "wandb").mkdir()
    if broken:
        (tmp_path / "wandb" / "__init__.py").write_text("from os import no_such_name")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(ConfigError, match=r"pip install 'rollstream\[wandb\]'") as refusal:
        WandbTracker().check()
    assert ("no_such_name" in str(refusal.value)) is broken
