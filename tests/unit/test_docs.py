"""The pages of docs/: their size, their commands, the reference that is written from the source.

tests/docs runs their blocks.
"""

import ast
import importlib.util
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollstream.cli import build_parser
from rollstream.config.load import compose
from tests.docs.blocks import DOCS, PAGES, ROOT, SHELL, blocks
from tools import reference

WRITTEN = [*PAGES, ROOT / "README.md"]
MOST_WORDS = 21_820
"""On all pages together, but for docs/reference and the blocks of code, which run."""
BEGIN_OTHERWISE = {"concepts", "python", "quickstart"}
"""They begin with a picture, with Python, and by installing."""


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


def test_errors_of_the_questions_are_those_of_the_source() -> None:
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    said = re.findall(r"^- (`.*?)\. \*Why\*", (DOCS / "faq.md").read_text("utf-8"), re.MULTILINE)
    parts = [part for cell in said for part in re.findall(r"`([^`]*)`", cell)]
    assert len(parts) > 10
    flat = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [part for part in parts if part not in flat] == []
