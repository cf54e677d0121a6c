"""A run in one file, opened from the disk."""

import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
expect = playwright.expect


def export(run: Path, file: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rollstream.cli", "view", str(run), "--export", str(file)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["agent", "hostile"])
def test_a_file_shows_the_run(name: str, runs: Path, tmp_path: Path, browser: Any) -> None:
    file, problems = tmp_path / "run.html", []
    assert "any browser opens it" in export(runs / name, file).stdout
    page = browser.new_page()
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda asked: asked.url.startswith(("file:", "data:")) or problems.append(asked.url))
    page.goto(file.as_uri())
    expect(page.locator("h1")).to_have_text(name)
    expect(page.locator(".samples a")).to_have_count(3)
    page.get_by_role("link", name="Rollouts").click()
    page.get_by_role("columnheader", name="reward").click()
    rewards = page.locator(".shown .row .meter")
    expect(rewards.first).to_be_visible()
    page.goto(f"{file.as_uri()}#/{page.evaluate('location.hash').split('/rows')[0][2:]}/group/0")
    expect(page.locator(".facts")).to_be_visible()
    page.goto(page.url.replace("group/0", "trajectory/0?tab=tokens"))
    expect(page.locator(".chunk span").first).to_be_visible()
    page.goto(page.url.replace("trajectory/0?tab=tokens", "rows?text=a"))
    expect(page.get_by_role("alert")).to_contain_text("rollstream view DIR")
    assert page.evaluate("window.hacked") is None
    assert problems == []
    page.close()


@pytest.mark.parametrize(
    ("words", "some"),
    [
        ("finish_reason = stop", True),  # as the page's links have it
        ("reward > .5 and finished_at > 1e9", True),
        ("'finish_reason' != stop and finish_reason = \"stop\"", False),
    ],
)
def test_comparisons_are_read_as_the_server_does(
    words: str, some: bool, runs: Path, tmp_path: Path, browser: Any
) -> None:
    export(runs / "agent", tmp_path / "run.html")
    page = browser.new_page()
    page.goto((tmp_path / "run.html").as_uri())
    page.get_by_role("link", name="Rollouts").click()
    page.goto(f"{page.url.partition('?')[0]}?{urlencode({'filter': words})}")
    shown = page.locator(".shown .row")
    expect(shown.first).to_be_visible() if some else expect(shown).to_have_count(0)
    expect(page.get_by_role("alert")).to_have_count(0)
    page.close()


def test_of_a_large_run_whole_groups_are_in_the_file(runs: Path, tmp_path: Path, browser: Any) -> None:
    said = export(runs / "large", tmp_path / "run.html").stdout
    assert "of 20000 rollouts" in said
    page = browser.new_page()
    page.goto((tmp_path / "run.html").as_uri())
    expect(page.locator("header")).to_contain_text("of 20000 rollouts")
    page.close()


def test_one_run_at_a_time(runs: Path, tmp_path: Path) -> None:
    ended = export(runs, tmp_path / "run.html")
    assert ended.returncode == 2 and "takes one run" in ended.stderr


def test_a_place_that_cannot_be_written_is_said(runs: Path, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing" / "run.html"):
        ended = export(runs / "agent", place)
        assert ended.returncode == 2 and ended.stderr.startswith(f"error: cannot write {place}: ")
