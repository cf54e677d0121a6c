"""Model output is text: scripts, escapes, bidi characters, NUL bytes and lines of 10 MB do nothing."""

from collections.abc import Callable
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
expect = playwright.expect

Visit = Callable[..., Any]

VIEWS = [
    "run/ID",
    "run/ID/rows",
    "run/ID/rows?text=script",
    "run/ID/groups",
    "run/ID/failures",
    *(f"run/ID/group/{index}" for index in range(8)),
    *(f"run/ID/trajectory/{row}" for row in range(8)),
    *(f"run/ID/trajectory/{row}?tab=tokens" for row in range(3)),
    "run/ID/trajectory/0?tab=json",
    "compare/ID/ID",
    "run/ID/rows?filter=%3Cscript%3Ewindow.hacked%3D1%3C%2Fscript%3E",
    "run/%3Cscript%3Ewindow.hacked=1%3C%2Fscript%3E",
]


@pytest.mark.parametrize("view", VIEWS)
def test_view_of_a_hostile_run_is_inert(view: str, visit: Visit, ids: dict[str, str]) -> None:
    page = visit(view.replace("ID", ids["hostile"]), refused="script")
    expect(page.locator("main > *").first).to_be_visible()
    expect(page.locator("[aria-busy]")).to_have_count(0)
    assert page.evaluate("window.hacked") is None
    assert page.title() != "hacked"
    assert page.locator("main script, main iframe, main a[href^='javascript']").count() == 0
    unseen = page.evaluate(
        "document.body.innerText.match(/[\\u0000-\\u0008\\u001b\\u200b\\u202a-\\u202e\\ufeff]/)"
    )
    assert unseen is None


def test_message_of_10_mb_is_shown_in_parts(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['hostile']}/rows?sort=-index&filter=index+%3D+6")
    page.locator(".shown .row a").first.click()
    more = page.get_by_role("button", name="more characters")
    expect(more).to_contain_text("9,980,000")
    more.click()
    expect(more).to_contain_text("9,780,000")


def test_policy_refuses_scripts_and_styles_in_the_page(visit: Visit, ids: dict[str, str]) -> None:
    """Should text ever become HTML, it would still do nothing."""
    page = visit(f"run/{ids['hostile']}", refused="")
    expect(page.locator(".facts")).to_be_visible()
    page.evaluate(
        """() => {
            document.body.innerHTML += '<img src="x" onerror="window.hacked = 1"><b id="b" style="color: red">b</b>';
            const script = document.createElement("script");
            script.textContent = "window.hacked = 1";
            document.body.append(script);
        }"""
    )
    page.wait_for_function("() => document.querySelector('img').complete")
    assert page.evaluate("getComputedStyle(document.getElementById('b')).color") != "rgb(255, 0, 0)"
    assert page.evaluate("window.hacked") is None
