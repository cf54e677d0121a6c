"""What a path is that is no run directory."""

from pathlib import Path

import pytest

from rollstream.cli import main

FILES = {"empty/x": "", "run/run.json": "{}", "file.txt": "x"}


@pytest.mark.parametrize("command", ["score", "score --list", "eval", "show", "status"])
def test_a_message_says_what_a_path_is(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    first, *words = command.split()
    for place in ("empty", "missing", "file.txt"):
        assert main([first, place, *words]) == 2
        message = capsys.readouterr().err.strip()
        assert message.startswith(f"error: {place} is not a run directory: "), message
        assert "\n" not in message
