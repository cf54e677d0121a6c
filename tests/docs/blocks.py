"""The blocks of a page of docs/, as a reader would run them.

Every Python and shell block runs, page by page, in one folder and in the order of the page. What a block says behind a
``print(…)`` is what it prints. A comment before a block steers that:

- ``not run: REASON``: it does not run
- ``run by: tests/…``: a test of its own runs it
- ``file: NAME``: the block is a file's content
- ``serves: URL``: a server, which ends with the page; blocks behind it reach it by that URL
- ``run with: OLD -> NEW``: runs with this change

``<!-- files of: PAGE -->`` anywhere on a page takes another page's files.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SHELL = ("sh", "bash")


@dataclass
class Block:
    """A fenced block, and the comment before it."""

    language: str
    text: str
    steer: str

    @property
    def runs(self) -> bool:
        elsewhere = self.steer.startswith(("not run:", "run by:", "file:"))
        return self.language in (*SHELL, "python") and not elsewhere


def blocks(page: Path) -> list[Block]:
    found = re.findall(
        r"^(?:<!-- ((?:(?!-->).)*) -->\n)?```(\w*)\n(.*?)^```",
        page.read_text("utf-8"),
        re.DOTALL | re.MULTILINE,
    )
    return [Block(language, text, steer) for steer, language, text in found]


def run_page(page: Path, tmp_path: Path) -> None:
    """Runs all blocks of a page in a folder."""
    pytest.importorskip("trl", reason="quickstart and recipes train with TRL")
    for name in ("bench", "demo_model", "examples", "src"):  # what commands read of a clone
        (tmp_path / name).symlink_to(ROOT / name)
    if others := re.search(r"<!-- files of: (\S+) -->", page.read_text("utf-8")):
        write_files(DOCS / others[1], tmp_path)
    write_files(page, tmp_path)
    urls: dict[str, str] = {}
    with ExitStack() as servers:
        for block in blocks(page):
            if not block.runs:
                continue
            text = block.text
            if block.steer.startswith("serves:"):
                url = block.steer.removeprefix("serves:").strip()
                urls[url] = servers.enter_context(served(text, tmp_path))
                continue
            if block.steer.startswith("run with:"):
                old, new = block.steer.removeprefix("run with:").split(" -> ")
                assert old.strip() in text
                text = text.replace(old.strip(), new.strip())
            for url, actual in urls.items():
                text = text.replace(url, actual)
            run(
                [sys.executable, "-c", text] if block.language == "python" else ["bash", "-euc", text],
                tmp_path,
            )


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
    said = re.findall(r"^ *print\(.*\)  # (.*)$", command[-1], re.MULTILINE)
    assert [one for one in said if one not in done.stdout] == [], f"{command[-1]}\n{done.stdout}"


@contextmanager
def served(command: str, folder: Path) -> Iterator[str]:
    """The URL of a server at a port of its own."""
    words = [*shlex.split(command.replace("\\\n", " "), comments=True), "--port", "0", "--json"]
    if "&" in words:
        words.remove("&")
    with (
        (folder / "server.log").open("ab") as log,
        subprocess.Popen(words, cwd=folder, env=environment(), stdout=subprocess.PIPE, stderr=log) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, (folder / "server.log").read_text("utf-8")
            yield orjson.loads(line)["url"].rstrip("/")
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def write_files(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.steer.startswith("file:"):
            (folder / block.steer.removeprefix("file:").strip()).write_text(block.text, "utf-8")


def pages_test(first: str, last: str) -> Callable[..., None]:
    """The test of the pages whose names begin with these letters: the tests of one file run in one process."""

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize(
        "page", [page for page in PAGES if first <= page.stem[0] <= last], ids=lambda page: page.stem
    )
    def test(page: Path, tmp_path: Path) -> None:
        run_page(page, tmp_path)

    return test
