"""What a path is that is no run directory."""

from pathlib import Path

import pytest

from rollstream.cli import main

FILES = {
    "empty": None,
    "data/state.json": "{}",
    "trainer/checkpoint-5/trainer_state.json": "{}",
    "torn/journal/000000.rsj": "x",
    "runs/a/run.json": "{}",
    "run/run.json": "{}",
    "run/logs/generate.log": "x",
    "other/notes.txt": "x",
    "file.txt": "x",
}
"""Paths and what is written there; None: an empty folder."""


@pytest.mark.parametrize("command", ["score", "score --list", "eval", "show", "status"])
def test_a_message_says_what_a_path_is_and_what_to_do(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        path = Path(name)
        (path if text is None else path.parent).mkdir(parents=True, exist_ok=True)
        if text is not None:
            path.write_text(text)
    expected = {
        "empty": "it is empty. Name the folder that --output",
        "missing": f"there is no such folder (looked in {tmp_path}). Name the folder that --output",
        "file.txt": "it is a file. Name the folder that --output",
        "data": "it is a dataset. To generate from it: rollstream generate --prompts data",
        "trainer": "it is the folder of a trainer. To look at it: rollstream view trainer",
        "torn": "it has files of a run, but no run.json. Restore run.json from a copy",
        "run/logs": "it is a part of one. Name that: run",
        "other": "it has no run.json. Name the folder that --output",
        "runs": "it holds 1 of them. Name one, such as runs/a",
    }
    if command == "eval":  # it judges all runs of a folder
        del expected["runs"]
    first, *words = command.split()
    for place, said in expected.items():
        assert main([first, place, *words]) == 2
        message = capsys.readouterr().err.strip()
        assert message.startswith(f"error: {place} is not a run directory: {said}"), message
        assert "\n" not in message
