"""Command lines that cannot work (those that can are in tests/integration/test_serve.py)."""

import tempfile
from pathlib import Path

import pytest

from rollstream.cli import main
from rollstream.demo import MODEL_PATH

pytest.importorskip("openvino_genai")


@pytest.mark.parametrize(
    "words",
    [
        ["--model", "/nowhere/at/all"],
        ["--tool-parser", "hermse"],
        ["--engine-kwargs", "cache_sise=2"],
        ["--engine-kwargs", "cache_size"],
        ["--engine-kwargs", "a=[1"],
        ["--port", "99999"],
        ["--api-key-env", "NO_SUCH_KEY"],
    ],
)
def test_what_cannot_work_is_one_line(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["serve", *words]) == 2
    assert not list(tmp_path.glob("*/")) or words[0] == "--port"
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("error: ") and words[1].partition("=")[0] in line
    assert printed.out == ""


def test_a_model_that_cannot_be_loaded_leaves_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in MODEL_PATH.iterdir():
        (tmp_path / file.name).write_bytes(b"broken" if file.suffix == ".xml" else file.read_bytes())
    assert main(["serve", "--model", str(tmp_path), "--port", "0"]) == 1
    log = Path(capsys.readouterr().err.rpartition("(its log: ")[2].strip().removesuffix(")"))
    assert log.is_file()
    log.unlink()
    log.parent.rmdir()
