"""`rollstream init`: what it writes runs as it is written."""

from pathlib import Path

import pytest

from rollstream.cli import main
from rollstream.store.summary import read_status


def test_what_is_written_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openvino_genai", reason="the demo model's engine")
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my run"]) == 0
    assert "cd 'my run' && rollstream generate --config run.yaml" in capsys.readouterr().out
    assert main(["init", "my run"]) == 2
    assert "there already; nothing was written" in capsys.readouterr().err
    monkeypatch.chdir("my run")
    assert main(["generate", "--config", "run.yaml"]) == 0
    (tmp_path / "file").touch()
    assert main(["init", "../file"]) == 2
    assert "cannot write into ../file" in capsys.readouterr().err
    status = read_status(Path("outputs/first"))
    assert (status.completed, status.unscored, status.total) == (64, 0, 64)
    assert status.mean_reward is not None and status.mean_reward > 0
