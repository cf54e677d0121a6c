"""Folders of processes that live, died, and were killed."""

import subprocess
import sys
import threading
from pathlib import Path

from rollstream.scratch import ScratchFolder

CHILD = """
import sys, time
from rollstream.scratch import ScratchFolder
folder = ScratchFolder("weights", sys.argv[1])
(folder.path / "model").mkdir()
(folder.path / "model" / "file").write_text("x")
print(folder.path, flush=True)
time.sleep(60)
"""


def test_a_killed_process_leaves_a_folder_that_the_next_one_removes(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    theirs = Path(child.stdout.readline().strip())
    with ScratchFolder("weights", tmp_path) as mine:
        assert theirs.is_dir() and mine.path.is_dir() and mine.path.parent == tmp_path
    assert not mine.path.exists()
    child.kill()
    child.wait()
    child.stdout.close()
    assert (theirs / "model" / "file").exists()
    with ScratchFolder("trl", tmp_path):
        assert theirs.exists()  # of another kind
    with ScratchFolder("weights", tmp_path):
        assert not theirs.exists()
    assert not list(tmp_path.iterdir())


def test_what_is_not_known_to_be_ours_stays(tmp_path: Path) -> None:
    nobodys = tmp_path / "rollstream-weights-someones"
    nobodys.mkdir()
    (tmp_path / "rollstream-weights-link").symlink_to(nobodys)
    (tmp_path / "rollstream-weights-file").touch()
    lured = tmp_path / "rollstream-weights-lured"
    lured.mkdir()
    (lured / ".owner").symlink_to(tmp_path / "rollstream-weights-file")
    before = sorted(tmp_path.iterdir())
    with ScratchFolder("weights", tmp_path):
        assert all(path.exists() for path in before)
    assert sorted(tmp_path.iterdir()) == before


def test_a_folder_of_ones_own_is_never_swept(tmp_path: Path) -> None:
    """Also by another thread while it is being made."""
    made: list[ScratchFolder] = []

    def make() -> None:
        for _ in range(50):
            made.append(ScratchFolder("weights", tmp_path))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 200 and all(folder.path.is_dir() for folder in made)
    for folder in made:
        folder.cleanup()
        folder.cleanup()
    assert not list(tmp_path.iterdir())
