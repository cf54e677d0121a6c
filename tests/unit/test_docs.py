"""The pages of docs/: their size, their blocks, and the reference that is written from the source.

Every Python and shell block runs, page by page, in one folder and in the order of the page. What a block says behind a
``print(…)`` is what it prints. A comment before a block steers that:

- ``not run: REASON``: it does not run
- ``run by: tests/…``: a test of its own runs it
- ``file: NAME``: the block is a file's content
- ``serves: URL``: a server, which ends with the page; blocks behind it reach it by that URL
- ``run with: OLD -> NEW``: runs with this change

``<!-- files of: PAGE -->`` anywhere on a page takes another page's files.
"""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import orjson
import pytest

from rollstream.cli import build_parser
from rollstream.config.load import compose
from tools import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WRITTEN = [*PAGES, ROOT / "README.md"]
MOST_WORDS = 25_000
"""On all pages together, but for docs/reference and the blocks of code, which run."""
BEGIN_OTHERWISE = {"concepts", "python", "quickstart"}
"""They begin with a picture, with Python, and by installing."""
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
        r"^(?:<!-- ([^>]*?) -->\n)?```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE
    )
    return [Block(language, text, steer) for steer, language, text in found]


def commands(text: str) -> Iterator[list[str]]:
    """The words of each `rollstream` command of a block, without what a reader fills in."""
    joined = text.replace("\\\n", " ").replace("$(pwd)", "/here")
    for line in joined.splitlines():
        try:
            words = shlex.split(line.replace("…", " "), comments=True)
        except ValueError:
            continue
        tabular = len(words) > 1 and words[1][:1].isdigit()  # a line of a benchmark's table
        if words[:1] == ["rollstream"] and not tabular and not {"COMMAND", "--help"} & set(words):
            yield [word for word in words[1:] if word != "&"]


def test_there_are_few_words() -> None:
    texts = [
        re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text("utf-8"), flags=re.M | re.S) for page in PAGES
    ]
    assert sum(len(re.findall(r"\S*\w\S*", text)) for text in texts) <= MOST_WORDS


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_lines_are_short(page: Path) -> None:
    assert [line for line in page.read_text("utf-8").splitlines() if len(line) > 160] == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "zensical.toml").read_text("utf-8")
    parts = tomllib.loads(text)["project"]["nav"]
    named = [page for part in parts for pages in part.values() for entry in pages for page in entry.values()]
    assert sorted(named) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_of_a_language_and_pages_begin_with_a_command(page: Path) -> None:
    found = blocks(page)
    named = r"^(rollstream|python|pip|curl|make) "
    assert [block.text for block in found if not block.language and re.search(named, block.text, re.M)] == []
    if page.stem not in BEGIN_OTHERWISE:
        assert found[0].language in SHELL and (found[0].runs or found[0].steer.startswith("run by:"))
    for block in found:
        if block.steer.startswith("run by:"):
            assert f"{page.stem}.md" in (ROOT / block.steer.removeprefix("run by:").strip()).read_text(
                "utf-8"
            )


@pytest.mark.parametrize("name", reference.pages())
def test_reference_is_current(name: str) -> None:
    """``python -m tools.reference`` writes it."""
    assert (DOCS / "reference" / name).read_text("utf-8") == reference.pages()[name]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_python_blocks_import_what_is_there(page: Path) -> None:
    for block in blocks(page):
        if block.language != "python":
            continue
        for node in ast.walk(ast.parse(block.text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollstream"):
                assert importlib.util.find_spec(node.module or ""), node.module


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_commands_and_keys_are_known(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", sys.stdout)
    for block in blocks(page):
        if block.language not in ("", "sh", "bash"):
            continue
        for words in commands(block.text):
            keys = [word for word in words if re.match(r"[\w.+~]+=", word)]
            if words[0] in ("generate", "demo"):
                compose(keys)
                words = [word for word in words if word not in keys]  # they may stand anywhere
            try:
                build_parser().parse_args(words)
            except SystemExit as error:
                pytest.fail(f"{page.name}: rollstream {shlex.join(words)}: {error}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run_as_they_stand(page: Path, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="quickstart and recipes train with TRL")
    for name in ("bench", "examples", "src"):  # what commands read of a clone
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


def test_errors_of_the_questions_are_those_of_the_source() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    said = re.findall(r"^- (`.*?)\. \*Why\*", (DOCS / "faq.md").read_text("utf-8"), re.MULTILINE)
    parts = [part for cell in said for part in re.findall(r"`([^`]*)`", cell)]
    assert len(parts) > 10
    flat = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [part for part in parts if part not in flat] == []
