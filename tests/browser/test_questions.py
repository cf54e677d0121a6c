"""What somebody who trains on rollouts asks, and the at most three clicks that answer it."""

import re
from collections.abc import Callable
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
expect = playwright.expect
playwright.expect.set_options(timeout=120_000)

Visit = Callable[..., Any]

RUN = ".sources tbody a[title$='/agent']"

QUESTIONS = {
    "Which prompts does the model never solve?": (
        "",
        [RUN, ".legend a:has-text('all wrong')"],
        (".shown .row", re.compile(r"^\d+0 / \d")),
    ),
    "Which groups teach nothing?": (
        "",
        [RUN, ".panel a:has-text('groups (')"],
        ("[role=columnheader][aria-sort=ascending]", re.compile("spread")),
    ),
    "What do truncated answers look like?": (
        "",
        [RUN, ".lines a:has-text('length')", ".shown .row a"],
        (".facts .warn", "length"),
    ),
    "Which tokens of this answer are trained on?": (
        "run/ID/trajectory/0",
        ["[role=tab]:has-text('Tokens')", "COLOUR mask"],
        (".toolbar button >> nth=0", re.compile(r"^trained on \(mask 1\) \d+")),
    ),
    "Where was the model surprised by what it sampled?": (
        "run/ID/trajectory/9?tab=tokens",
        [".toolbar button:has-text('0.01 – 0.05')"],
        (".tip", re.compile(r"p 0\.0[1-4]")),
    ),
    "Where do sampler and trainer disagree most?": (
        "run/ID/trajectory/9?tab=tokens",
        ["COLOUR difference", ".toolbar button:not([disabled]) >> nth=-1"],
        (".tip", re.compile("difference")),
    ),
    "Did the second run get worse anywhere?": (
        "",
        ["[aria-label='compare agent']", "[aria-label='compare second']", "a:has-text('Compare the two')"],
        ("[role=columnheader][aria-sort=ascending]", re.compile("B − A")),
    ),
    "Why did rollouts fail?": (
        "",
        [RUN, ".failure a:has-text('TimeoutError')"],
        (".shown .row", re.compile("TimeoutError: the tool took longer than 30 s")),
    ),
    "Which rollouts waited longest for tools?": (
        "",
        [RUN, ".shares .legend a:has-text('tools')"],
        (".chip, .muted", re.compile("rows")),
    ),
    "Which tool calls went wrong?": (
        "",
        [RUN, "td a >> nth=1", ".hits a"],
        (".figures", re.compile(r"tool_errors1")),
    ),
    "What was deleted from the context?": (
        "run/ID/trajectory/0",
        ["[aria-label='trajectories of the rollout'] a:has-text('final')", "details.removed summary"],
        ("details.removed .message", re.compile("removed from the context")),
    ),
    "How do the answers to one prompt differ?": (
        "",
        [RUN, ".solve a >> nth=2"],
        (".fork", "▸"),
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_question_is_answered_in_three_clicks(question: str, visit: Visit, ids: dict[str, str]) -> None:
    start, clicks, (answer, text) = QUESTIONS[question]
    assert len(clicks) <= 3
    page = visit(start.replace("ID", ids["agent"]))
    for click in clicks:
        if click.startswith("COLOUR "):
            page.get_by_label("Colour by").select_option(click.removeprefix("COLOUR "))
        else:
            page.locator(click).first.click()
    expect(page.locator(answer).filter(has_text=text).first).to_be_visible()
