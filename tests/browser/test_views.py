"""Each view of the page, as somebody who looks for something uses it."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.browser.conftest import WIDTHS, serving

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
expect = playwright.expect
playwright.expect.set_options(timeout=120_000)

Visit = Callable[..., Any]

VIEWS = {
    "sources": ("", ".sources a"),
    "overview": ("run/agent", ".solve a"),
    "list": ("run/agent/rows", ".shown .row a"),
    "search": ("run/agent/rows?text=Weather", ".hits li"),
    "groups": ("run/agent/groups", ".shown .row a"),
    "group": ("run/agent/group/2", ".rollout .message"),
    "failures": ("run/agent/failures", ".shown .row a"),
    "conversation": ("run/agent/trajectory/9", ".message.assistant"),
    "tokens": ("run/agent/trajectory/9?tab=tokens", ".chunk span"),
    "json": ("run/agent/trajectory/9?tab=json", ".text.code"),
    "comparison": ("compare/agent/second", ".shown .row a"),
    "prompt of two runs": ("compare/agent/second?index_a=2&index_b=2", ".rollout"),
    "overview of long names": ("run/hostile", ".solve a"),
    "list of long names": ("run/hostile/rows", ".shown .row a"),
    "conversation of long names": ("run/hostile/trajectory/0", ".message"),
    "training": ("training/training?step=3", ".uplot canvas"),
    "trainings": ("trainings/trained/training", ".uplot canvas"),
}


def address(view: str, ids: dict[str, str]) -> str:
    """Names of runs in an address become their ids."""
    return re.sub(
        r"\b(agent|second|hostile|long|large|trained|training$|training(?=\?))\b(?=/|\?|$)",
        lambda it: ids[it[1]],
        view,
    )


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("width", WIDTHS)
def test_view_is_drawn_within_the_width(name: str, width: int, visit: Visit, ids: dict[str, str]) -> None:
    view, wanted = VIEWS[name]
    page = visit(address(view, ids), width=width, dark=width == 1280)
    expect(page.locator(wanted).first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".problem").count() == (
        0 if name != "group" else page.locator("details.problem").count()
    )


def test_bars_and_numbers_lead_to_their_rows(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}")
    bars = page.locator(".bars .bar")
    expect(bars.first).to_be_visible()
    titles = [(bar.get_attribute("title"), bar.get_attribute("href")) for bar in bars.all()]
    counted = [(int(re.search(r": ([\d,]+)", title)[1].replace(",", "")), href) for title, href in titles]
    assert sum(count > 0 for count, _ in counted) > 5
    for count, href in [pair for pair in counted if pair[0]][:6]:
        page.goto(page.url.split("#")[0] + href)
        expect(page.get_by_role("status").filter(has_text=re.compile("rows$"))).to_have_text(
            re.compile(rf"^{count} of \d+ rows$")
        )
    page.goto(page.url.split("#")[0] + f"#/run/{ids['agent']}")
    page.locator(".facts a", has_text=re.compile("^4$")).first.click()
    expect(page.locator(".shown .row")).to_have_count(4)


def test_list_is_filtered_by_text_and_by_form_and_its_address_is_the_view(
    visit: Visit, ids: dict[str, str]
) -> None:
    page = visit(f"run/{ids['agent']}/rows", refused="/rows?")
    total = page.get_by_role("status").filter(has_text="rows")
    expect(total).to_have_text(re.compile(r"^\d+ rows$"))
    page.keyboard.press("/")
    page.keyboard.type("reward = 1 and finish_reason = length")
    page.keyboard.press("Enter")
    expect(total).to_have_text(re.compile(r"^\d+ of \d+ rows$"))
    by_text = total.text_content()
    page.get_by_label("column").select_option("tokens")
    page.get_by_label("comparison").select_option(">=")
    page.get_by_label("value").fill("0")
    page.get_by_role("button", name="Add").click()
    expect(page.locator(".chip")).to_have_count(3)
    expect(total).to_have_text(by_text)
    page.get_by_role("button", name="tokens", exact=True).click()
    expect(page.get_by_role("columnheader", name="tokens")).to_have_attribute("aria-sort", "descending")
    column = [it.text_content() for it in page.get_by_role("columnheader").all()].index("tokens ▼")
    page.wait_for_function(
        "at => { const all = [...document.querySelectorAll('.shown .row')].map((row) => +row.children[at].textContent);"
        " return all.length > 1 && all.every((it, n) => n === 0 || all[n - 1] >= it); }",
        arg=column,
    )
    expect(page.locator(".shown .row").first).not_to_contain_text("…")  # its texts have come
    first = page.locator(".shown .row").first.inner_text()
    again = visit(page.url.split("#/")[1])
    expect(again.locator(".shown .row").first).not_to_contain_text("…")
    expect(again.locator(".shown .row").first).to_have_text(re.compile(re.escape(first.split()[0])))
    assert again.locator(".shown .row").first.inner_text() == first
    page.get_by_label("Filter").fill("reward < much")
    page.get_by_role("button", name="Apply").click()
    expect(page.locator(".problem mark")).to_have_text("much")


def test_list_has_the_texts_and_the_overview_something_to_read(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/rows?filter=is_snapshot%20%3D%20false")
    row = page.locator(".shown .row").first
    expect(row).to_contain_text("Weather in city 0?")
    expect(row).to_contain_text(re.compile("A heavy coat, and boots!|Light clothes"))
    expect(row).to_contain_text('{"clothes":')
    page = visit(f"run/{ids['agent']}")
    expect(page.locator(".samples a")).to_have_count(3)
    expect(page.locator(".samples a").first).to_contain_text("reward 1")
    expect(page.locator("#failures")).to_contain_text("no city N")
    page.locator(".samples a").last.click()
    expect(page.locator(".facts")).to_contain_text("ground truth")


def test_settings_that_differ_stand_above_a_comparison(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"compare/{ids['agent']}/{ids['second']}")
    expect(page.locator(".line", has_text="Settings that differ")).to_contain_text("data.rows.count 24 → 20")


def test_list_scrolls_to_its_end_and_a_row_opens_by_keys(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['large']}/rows")
    expect(page.locator(".shown .row a").first).to_be_visible()
    page.keyboard.press("End")
    expect(page.locator(".row.picked")).to_have_attribute("aria-rowindex", "20001")
    expect(page.locator(".row.picked a")).to_have_text("2499")
    assert page.locator(".shown .row").count() < 100
    page.keyboard.press("PageUp")
    page.keyboard.press("PageUp")  # within what is loaded
    expect(page.locator(".shown .row").first).to_contain_text("Question 24")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("Prompt 2499, repeat 7")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_have_text("Prompt 2499, repeat 6")


def test_a_list_that_is_left_may_still_scroll(visit: Visit, ids: dict[str, str]) -> None:
    """Browsers tell of a scroll a frame later, when Enter may have opened a row."""
    page = visit(f"run/{ids['large']}/rows")
    row = page.locator(".shown .row a").first
    expect(row).to_be_visible()
    table = page.locator(".table").element_handle()
    row.click()
    expect(page.locator("h1")).to_contain_text("Prompt")
    assert table is not None
    table.evaluate("it => it.dispatchEvent(new Event('scroll'))")


def test_search_in_messages_shows_hits(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/rows?text=city%203")
    expect(page.locator(".hits mark").first).to_have_text("city 3")
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    page.locator(".hits a").first.click()
    expect(page.locator(".message.user")).to_contain_text("city 3")


def test_search_is_stopped(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/rows")
    expect(page.locator(".shown .row a").first).to_be_visible()
    page.route("**/search?*", lambda _: None)  # a search that goes on for ever
    page.keyboard.press("s")
    page.keyboard.type("city")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Stop").click()
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    page.get_by_role("button", name="Back to the table").click()
    expect(page.locator(".shown .row a").first).to_be_visible()


def test_group_shows_where_answers_differ_and_steps_to_the_next(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['long']}/group/0")
    expect(page.locator(".rollout").first).to_be_visible()
    page.goto(page.url.split("#")[0] + f"#/run/{ids['large']}/group/3")
    expect(page.locator(".rollout")).to_have_count(8)
    page.keyboard.press("j")
    expect(page.locator("h1")).to_contain_text("Prompt 4")
    page.keyboard.press("k")
    expect(page.locator("h1")).to_contain_text("Prompt 3")
    rewards = ".rollout .reward b"
    page.keyboard.press("r")
    page.wait_for_function(
        "path => { const all = [...document.querySelectorAll(path)].map((it) => +it.textContent || 0);"
        " return all.every((it, n) => n === 0 || all[n - 1] >= it); }",
        arg=rewards,
    )
    page.goto(page.url.split("#")[0] + f"#/run/{ids['agent']}/group/2")
    forks = page.locator(".fork")
    expect(forks.first).to_be_visible()


def test_snapshots_are_shown_in_order_with_what_was_deleted(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/group/0")
    page.locator(".rollout header a").nth(3).click()
    steps = page.get_by_label("trajectories of the rollout").locator("a")
    expect(steps).to_have_count(3)
    steps.nth(2).click()
    expect(steps.nth(2)).to_have_attribute("aria-current", "page")
    expect(page.locator("details.removed summary")).to_contain_text("not here any more")
    page.keyboard.press("[")
    expect(steps.nth(1)).to_have_attribute("aria-current", "page")


def test_conversation_folds_thinking_and_shows_calls_and_images(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/trajectory/0")
    expect(page.locator(".call b")).to_have_text("weather")
    assert not page.locator("details.thinking").first.evaluate("it => it.open")
    page.keyboard.press("t")
    expect(page.locator("details.thinking .text").first).to_be_visible()
    page.wait_for_function("document.querySelector('.message img').naturalWidth > 0")


def test_token_strip_tells_what_is_known_of_a_token(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/trajectory/9?tab=tokens")
    tokens = page.locator(".chunk span")
    expect(tokens.first).to_be_visible()
    expect(page.locator(".turn").nth(1)).to_contain_text("assistant")
    sampled = page.locator(".chunk span:not(.off)")
    sampled.nth(2).hover()
    tip = page.locator(".tip")
    for words in ("id", "log-prob", "version", "turn", "1, sampled", "entropy", "difference"):
        expect(tip).to_contain_text(words)
    page.locator(".chunk span.off").first.hover()
    expect(tip).to_contain_text("0, given")
    for colour in page.get_by_label("Colour by").locator("option").all():
        page.get_by_label("Colour by").select_option(colour.get_attribute("value"))
        expect(page.locator(".toolbar .swatch").first).to_be_visible()
    page.keyboard.press("Escape")
    page.get_by_label("Colour by").select_option("mask")
    assert page.locator(".chunk span.m1").count() == sampled.count()
    assert "colour=mask" in page.url
    page.keyboard.press("n")
    expect(page.locator(".chunk span.picked")).to_be_visible()


def test_token_strip_of_32000_tokens_goes_to_its_end(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['long']}/trajectory/0?tab=tokens")
    expect(page.locator(".chunk span").first).to_be_visible()
    assert page.locator(".chunk span").count() > 32_000
    profile = page.locator(".profile")
    box = profile.bounding_box()
    profile.click(position={"x": box["width"] - 1, "y": 10})
    expect(page.locator(".chunk span.picked")).to_be_in_viewport()
    assert page.locator(".chunk span.picked").evaluate("it => it.at") > 31_900


def test_everything_of_a_trajectory_is_json(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/trajectory/9?tab=json")
    expect(page.locator(".text.code")).to_contain_text('"tokens"')
    found = json.loads(page.locator(".text.code").inner_text())
    assert len(found["tokens"]["id"]) == found["prompt_tokens"] + found["response_tokens"]
    assert found["tokens"]["logprob"][0] is None


def test_two_runs_are_compared_prompt_by_prompt(visit: Visit, ids: dict[str, str]) -> None:
    page = visit()
    for name in ("agent", "second"):
        page.get_by_label(f"compare {name}", exact=True).check()
    page.get_by_role("link", name="Compare the two").click()
    expect(page.locator(".facts")).to_contain_text("prompts in both")
    expect(page.locator(".shown .row a").first).to_be_visible()
    page.locator(".legend a", has_text="B lost").click()
    expect(page.locator(".shown .row")).to_have_count(0)  # all are tied
    page.get_by_role("link", name="B lost ✕").click()
    page.locator(".legend a", has_text="tied").click()
    expect(page.get_by_role("link", name="tied ✕")).to_be_visible()
    page.locator(".shown .row a").first.click()
    expect(page.locator(".side")).to_have_count(2)
    page.keyboard.press("u")
    expect(page.locator("h1")).to_have_text("Comparison")
    expect(page.get_by_role("link", name="tied ✕")).to_be_visible()


def test_training_shows_a_step_and_finds_a_curve(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"training/{ids['training']}?step=2")
    expect(page.locator("h2").first).to_have_text("Step 2")
    page.keyboard.press("j")
    expect(page.locator("h2").first).to_have_text("Step 3")
    expect(page.locator(".panel .panel tbody tr")).to_have_count(4)
    expect(page.locator(".panel .panel tr:last-child td").last).to_have_text("<b>2 + 2</b>")
    page.get_by_role("link", name="in agent").first.click()
    expect(page.locator("h1")).to_have_text("Prompt 7")
    page = visit(f"training/{ids['training']}?step=5")
    expect(page.locator(".panel.wide")).to_contain_text("does not say which groups")
    expect(page.locator("summary", has_text="figures that never changed")).to_be_visible()
    page.get_by_label("Curves").fill("stale")
    expect(page.locator(".curves")).to_have_count(1)


def test_trainings_are_drawn_over_one_another(visit: Visit) -> None:
    page = visit()
    page.get_by_label("compare agent", exact=True).check()
    for name in ("trained", "training"):
        page.get_by_label(f"compare {name}", exact=True).check()
    expect(page.get_by_label("compare agent", exact=True)).not_to_be_checked()
    page.get_by_role("link", name="Compare the two").click()
    expect(page.locator("h1")).to_have_text("2 trainings")
    expect(page.locator(".curves figcaption").first).to_have_text("reward")
    for name in ("trained", "training"):
        expect(page.locator(".curves").first).to_contain_text(name)


def test_timeline_has_each_call_and_leads_to_what_was_said(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['agent']}/trajectory/12")
    lines = page.get_by_label("calls in time").locator("li")
    expected = ("queue 100 ms", "generate 900 ms", "tool 400 ms", "generate 600 ms", "reward 50 ms")
    expect(lines).to_have_count(len(expected))
    for at, text in enumerate(expected):
        expect(lines.nth(at)).to_contain_text(re.compile(text.replace(" ", r"\s*", 1)))
    lines.nth(3).get_by_role("button").click()
    expect(page.locator("#message-4")).to_be_in_viewport()


def test_side_calls_of_a_session_stand_below_its_own(visit: Visit, ids: dict[str, str]) -> None:
    page = visit(f"run/{ids['program']}/trajectory/1")
    lists = page.locator(".falls > div")
    expect(lists).to_have_count(2)
    expect(lists.nth(1)).to_contain_text("1 side call")
    expect(lists.nth(1).locator("li")).to_have_count(1)
    lists.nth(1).locator("a").click()
    expect(page.locator(".message.user")).to_contain_text("Write a title.")


def test_keys_are_listed_and_light_and_dark_are_switched(visit: Visit) -> None:
    page = visit(dark=True)
    expect(page.locator(".sources a").first).to_be_visible()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    page.keyboard.press("?")
    expect(page.locator("dialog")).to_contain_text("next source")
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_have_count(0)
    page.keyboard.press("T")
    expect(page.locator("html")).to_have_attribute("data-theme", "light")
    page.reload()
    expect(page.locator("html")).to_have_attribute("data-theme", "light")


def test_token_leaves_the_address_and_goes_along_with_each_request(runs: Any, visit: Visit) -> None:
    with serving(runs / "agent", arguments=["--token"]) as ready:
        root, query = ready["url"].split("/?")
        page = visit(f"?{query}", at=root)
        expect(page.locator(".sources a").first).to_be_visible()
        assert "token" not in page.url
        page.locator(".sources tbody a").first.click()
        expect(page.locator(".solve a").first).to_be_visible()
        page.close()  # before its server goes


def test_sources_are_found_by_words_and_sorted_by_a_column(visit: Visit) -> None:
    page = visit()
    names = page.locator(".sources tbody tr:not(.folder) td:nth-child(2) a")
    expect(names).to_have_count(8)
    page.get_by_label("Find").fill("SEC finished")
    expect(names).to_have_text(["second"])
    page.get_by_label("Find").fill("")
    page.get_by_role("button", name="done").click()
    expect(names.first).to_have_text("large")
    page.get_by_role("button", name="done").click()
    expect(names.last).to_have_text("training")  # has none
    expect(page.locator(".whisker").first).to_be_visible()


def test_view_that_does_not_exist_says_so(visit: Visit, ids: dict[str, str]) -> None:
    page = visit("nothing/here")
    expect(page.locator(".problem")).to_contain_text("no such view")
    page = visit("run/none-00000000", refused="/api/runs/none")
    expect(page.locator(".problem")).to_be_visible()
