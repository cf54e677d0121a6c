"""Command lines that cannot work (those that can are in tests/integration/test_serve.py), and the end of a parent."""

import asyncio
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rollstream.cli import main
from rollstream.demo import MODEL_PATH
from rollstream.serving.command import parent_ended


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "/nowhere/at/all"], "--model: there is no folder /nowhere/at/all"),
        (["--tool-parser", "hermse"], "did you mean 'hermes'?"),
        (["--engine-kwargs", "cache_sise=2"], "did you mean 'cache_size'?"),
        (["--engine-kwargs", "cache_size=two"], "cache_size of engine 'openvino' must be int"),
        (["--engine-kwargs", "cache_size"], "'cache_size' is not of the form k=v"),
        (["--engine-kwargs", "a=[1"], "--engine-kwargs cannot be read"),
        (["--max-queue", "0"], "--max-queue is 0, want 1 or more"),
        (["--max-model-len", "1"], "--max-model-len is 1"),
        (["--port", "-1"], "--port is -1"),
        (["--port", "99999"], "cannot listen on 127.0.0.1:99999"),
        (["--api-key-env", "NO_SUCH_KEY"], "no 'NO_SUCH_KEY' in the environment"),
    ],
)
def test_what_cannot_work_is_one_line(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("openvino_genai")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert main(["serve", *words]) == 2
    assert not list(tmp_path.glob("*/")) or words[0] == "--port"
    printed = capsys.readouterr()
    (line,) = printed.err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert printed.out == ""


def test_a_model_that_cannot_be_loaded_leaves_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("openvino_genai")
    for file in MODEL_PATH.iterdir():
        (tmp_path / file.name).write_bytes(b"broken" if file.suffix == ".xml" else file.read_bytes())
    assert main(["serve", "--model", str(tmp_path), "--port", "0"]) == 1
    said = capsys.readouterr().err
    log = Path(said.rpartition("(its log: ")[2].strip().removesuffix(")"))
    assert log.is_file()
    log.unlink()
    log.parent.rmdir()


CHILD = """
import asyncio, os, sys
from rollstream.serving.command import parent_ended
print("ready", flush=True)
asyncio.run(parent_ended(int(sys.argv[1])))
print("ended", flush=True)
"""

PARENT = """
import os, subprocess, sys, threading
def start():
    subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
thread = threading.Thread(target=start)  # which ends before this process does
thread.start()
thread.join()
sys.stdin.read()
"""


async def test_a_parent_that_ended_before_is_noticed() -> None:
    async with asyncio.timeout(60):
        await parent_ended(2**22 + 1)


def test_it_ends_with_the_process_and_not_with_the_thread_that_started_it() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.kill()
    assert parent.stdout.readline() == "ended\n"
    parent.communicate()
