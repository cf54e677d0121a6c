"""The pages of docs/: their sizes, their blocks, and the reference that is written from the source.

Comments before a block steer its test: ``not run: REASON``; ``file: NAME``, the block is a file's content;
``run with: OLD -> NEW``. ``files of: PAGE`` at the top of a page takes another page's files.
"""

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rollstream.cli import build_parser
from rollstream.config.load import compose
from tools import reference

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
WRITTEN = [*PAGES, ROOT / "README.md"]
STILL_LONG = {"gateway", "generation", "evaluate", "view"}
"""Pages with lines of more than 160 characters; none is to be added."""
RUN_AS_THEY_STAND = ["index", "quickstart", "recipes", "doors", "faq", "clusters"]
GUIDES = [
    "agents",
    "data",
    "engines",
    "export",
    "rewards",
    "run-directory",
    "staleness",
    "tools",
    "tracking",
    "training",
]
"""Their first block is a command that works."""


@dataclass
class Block:
    """A fenced block, and the comment before it."""

    language: str
    text: str
    steer: str

    @property
    def runs(self) -> bool:
        return not self.steer.startswith("not run:")


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


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_lines_are_short(page: Path) -> None:
    if page.stem in STILL_LONG:
        pytest.skip("not yet")
    assert [line for line in page.read_text("utf-8").splitlines() if len(line) > 160] == []


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
            try:
                build_parser().parse_args(words)
            except SystemExit as error:
                pytest.fail(f"{page.name}: rollstream {shlex.join(words)}: {error}")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", RUN_AS_THEY_STAND)
def test_blocks_run_as_they_stand(page: str, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason="quickstart and recipes train with TRL")
    link_clone(tmp_path)
    path = DOCS / f"{page}.md"
    if others := re.search(r"<!-- files of: (\S+) -->", path.read_text("utf-8")):
        write_files(DOCS / others[1], tmp_path)
    write_files(path, tmp_path)
    for block in blocks(path):
        if not block.runs or block.language not in ("sh", "python") or block.steer.startswith("file:"):
            continue
        text = block.text
        if block.steer.startswith("run with:"):
            old, new = block.steer.removeprefix("run with:").split(" -> ")
            assert old.strip() in text
            text = text.replace(old.strip(), new.strip())
        run(["bash", "-euc", text] if block.language == "sh" else [sys.executable, "-c", text], tmp_path)


@pytest.mark.slow
def test_guides_begin_with_a_command_that_works(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", reason="the demo's prompts come from it")
    link_clone(tmp_path)
    for guide in GUIDES:
        first = blocks(DOCS / f"{guide}.md")[0]
        assert first.language == "sh", guide
        run(["bash", "-euc", first.text], tmp_path)


def link_clone(folder: Path) -> None:
    """What commands read of a clone."""
    for name in ("examples", "src"):
        (folder / name).symlink_to(ROOT / name)


def run(command: list[str], folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"


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
