"""What the page is made of: files as they were published, text that can be read, scripts that set no HTML."""

import hashlib
import itertools
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

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


CONTRAST = """() => {
    const light = (colour) => {
        const [red, green, blue] = colour.match(/[\\d.]+/g).map(Number).map((it) => it / 255)
            .map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const seen = (colour) => colour !== "rgba(0, 0, 0, 0)" && colour !== "transparent";
    const behind = (element) => {
        for (let it = element; it; it = it.parentElement) {
            const colour = getComputedStyle(it).backgroundColor;
            if (seen(colour)) return colour;
        }
        return "rgb(255, 255, 255)";
    };
    const main = document.querySelector("main");
    const strip = main.appendChild(document.createElement("div"));
    strip.className = "chunk";
    for (const kind of ["s", "d", "v", "m"]) for (let n = 0; n < 8; n += 1) {
        const span = strip.appendChild(document.createElement("span"));
        span.className = kind + n;
        span.textContent = `class ${kind}${n}`;
    }
    const kinds = ["muted", "warn", "problem", "note", "up", "down", "unseen", "same", "fork", "off", "chip"];
    const states = ["running", "damaged", "unfinished"].map((state) => `state ${state}`);
    for (const place of ["", "panel", "picked"]) {
        const parent = main.appendChild(document.createElement("div"));
        parent.className = place;
        for (const kind of [...kinds, ...states]) {
            const span = parent.appendChild(document.createElement("span"));
            span.className = kind;
            span.textContent = `${place} ${kind}`;
        }
    }
    const poor = [];
    for (const element of document.querySelectorAll("body *")) {
        if (![...element.childNodes].some((it) => it.nodeType === 3 && it.textContent.trim())) continue;
        const style = getComputedStyle(element);
        const [one, other] = [light(style.color), light(behind(element))].sort((a, b) => b - a);
        const ratio = (one + 0.05) / (other + 0.05);
        const said = `${element.textContent.slice(0, 40)}: ${style.color} on ${behind(element)}`;
        if (ratio < 4.5) poor.push(`${said} has ${ratio.toFixed(2)}`);
    }
    return poor;
}"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize(
    "view",
    ["", "run/ID", "run/ID/rows", "run/ID/group/2", "run/ID/trajectory/9", "run/ID/trajectory/9?tab=tokens"],
)
def test_text_has_a_contrast_of_four_and_a_half(
    view: str, dark: bool, visit: Callable[..., Any], ids: dict[str, str]
) -> None:
    page = visit(view.replace("ID", ids["agent"]), dark=dark)
    page.locator("main h1").wait_for()
    page.locator("[aria-busy]").first.wait_for(state="detached")
    assert page.evaluate(CONTRAST) == []


def test_steps_of_a_scale_differ_in_lightness(visit: Callable[..., Any]) -> None:
    """So they can be told apart without their hue."""
    for dark in (False, True):
        page = visit(dark=dark)
        values = page.evaluate(
            """() => {
                const style = getComputedStyle(document.documentElement);
                const light = (name) => {
                    const hex = style.getPropertyValue(name).trim();
                    if (hex === "transparent") return null;
                    const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
                    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
                };
                return [1, 2, 3, 4, 5, 6].map((n) => light(`--s${n}`));
            }"""
        )
        steps = [b - a for a, b in itertools.pairwise(values)]
        assert all(step > 8 for step in steps) if dark else all(step < -8 for step in steps)
