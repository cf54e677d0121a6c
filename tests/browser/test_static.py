"""What the page is made of: files as they were published, scripts that set no HTML."""

import hashlib
import re
from importlib.resources import files
from pathlib import Path

import pytest

STATIC = Path(str(files("rollstream.view"))) / "static"
OWN = sorted(path for path in STATIC.iterdir() if path.suffix in (".js", ".css", ".html"))


def test_libraries_of_others_are_as_published() -> None:
    listed = re.findall(
        r"^\| `([^`]+)` .* `([0-9a-f]{64})` \|$", (STATIC / "vendor/VENDORED.md").read_text(), re.M
    )
    found = {name: hashlib.sha256((STATIC / "vendor" / name).read_bytes()).hexdigest() for name, _ in listed}
    assert found == dict(listed)
    assert {path.name for path in (STATIC / "vendor").iterdir() if path.suffix in (".js", ".css")} == set(
        found
    )


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_own_scripts_never_make_html_of_text(path: Path) -> None:
    text = path.read_text()
    html = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|dangerously"
    forbidden = rf"{html}|\beval\(|new Function|https?://| on\w+=\""
    assert re.findall(forbidden, text) == []
    assert path.suffix != ".html" or not re.search(r"<style|\sstyle=|<script(?![^>]*\ssrc=)", text)
