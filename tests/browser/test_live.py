"""A run that is written while somebody looks at it."""

import asyncio
import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollstream.engine.launch.local import reserve_port
from tests.browser.conftest import serving
from tests.support.buffer import group, served
from tests.support.until import PATIENCE_S
from tests.support.view_runs import live_run, rollout, write_run

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
expect = playwright.expect
playwright.expect.set_options(timeout=120_000)

Visit = Callable[..., Any]


@contextlib.contextmanager
def in_background(main: Callable[[Callable[[], None]], Coroutine[Any, Any, None]]) -> Iterator[None]:
    """Runs a coroutine function in a thread until the block ends. It is given what says that it is ready."""
    ready = threading.Event()
    tasks: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def run() -> None:
        task = asyncio.create_task(main(ready.set))
        tasks.append((asyncio.get_running_loop(), task))
        with contextlib.suppress(asyncio.CancelledError):
            await task

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield
    finally:
        loop, task = tasks[0]
        loop.call_soon_threadsafe(task.cancel)
        thread.join()


def in_thread(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Calls what has an event loop of its own: the browser has one in this thread."""
    thread = threading.Thread(target=function, args=args, kwargs=kwargs)
    thread.start()
    thread.join()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A run of which 20 rollouts are done each second, until the test ends."""

    async def write(ready: Callable[[], None]) -> None:
        ready()
        await live_run(tmp_path / "live", 3600.0)

    with in_background(write):
        yield tmp_path / "live"


def first_run(page: Any) -> None:
    page.wait_for_function(
        "async () => { const answer = await (await fetch('api/sources')).json();"
        " return answer.sources[0]?.rows > 0; }"
    )
    page.reload()
    page.locator(".sources tbody a").first.click()


def done(text: str) -> int:
    found = re.search(r"live: ([\d,]+)", text)
    return int(found[1].replace(",", "")) if found else 0


GROWS = """([selector, before]) => {
    const found = /live: ([\\d,]+)/.exec(document.querySelector(selector)?.textContent ?? "");
    return found && +found[1].replaceAll(",", "") > before;
}"""


def test_counts_and_rows_follow_a_run_that_is_written(live: Path, visit: Visit) -> None:
    with serving(live) as ready:
        page = visit(at=ready["url"].rstrip("/"))
        first_run(page)
        counter = page.locator(".state.running", has_text="live:")
        expect(counter).to_be_visible()
        before = done(counter.text_content())
        page.wait_for_function(GROWS, arg=[".state.running[role=status]", before])
        page.get_by_role("link", name="Rollouts").click()
        rows = page.get_by_role("status").filter(has_text=re.compile("rows$"))
        expect(rows).to_be_visible()
        shown = rows.text_content()
        expect(rows).not_to_have_text(shown)
        page.close()  # before its server goes


def test_run_that_is_resumed_is_followed(tmp_path: Path, visit: Visit) -> None:
    def write(first: int) -> None:
        in_thread(write_run, tmp_path / "run", [rollout(first, repeat) for repeat in range(4)], prompts=4)

    write(0)
    with serving(tmp_path) as ready:
        page = visit(at=ready["url"].rstrip("/"))
        first_run(page)
        expect(page.locator(".facts")).to_contain_text("done4 of 16")
        write(1)
        expect(page.locator(".facts")).to_contain_text("done8 of 16")
        expect(page.locator(".solve a")).to_have_count(2)
        page.close()


def test_scores_that_are_named_are_shown(tmp_path: Path, visit: Visit) -> None:
    root, file = tmp_path / "run", tmp_path / "anew.py"
    file.write_text("def compute_score(**row):\n    return 0.25 * row['extra_info']['num_turns'] / 2\n")
    in_thread(write_run, root, [rollout(0, repeat) for repeat in range(4)], prompts=2)
    words = ["score", str(root), "--reward", str(file), "--name", "turns", "--processes", "1"]
    subprocess.run([sys.executable, "-m", "rollstream", *words], timeout=PATIENCE_S, check=True)
    with serving(tmp_path, arguments=["--scores", "turns"]) as ready:
        page = visit(at=ready["url"].rstrip("/"))
        first_run(page)
        facts = page.locator(".facts")
        expect(facts).to_contain_text("scored anewturns")
        expect(facts).to_contain_text("mean reward0.25")
        in_thread(write_run, root, [rollout(1, 0)], prompts=2)
        expect(facts).to_contain_text("unscored1")
        page.get_by_role("link", name="Rollouts").click()
        expect(page.get_by_role("cell", name="0.25", exact=True)).to_have_count(4)
        page.close()


def test_lost_connection_is_said_and_goes_on(live: Path, visit: Visit) -> None:
    with reserve_port("127.0.0.1") as reserved:  # nobody takes it between two lives of the server
        port = str(reserved.getsockname()[1])
        with serving(live, arguments=["--port", port]) as ready:
            page = visit(at=ready["url"].rstrip("/"), refused="/api/")
            first_run(page)
            counter = page.locator(".state.running", has_text="live:")
            expect(counter).to_be_visible()
            before = done(counter.text_content())
            page.wait_for_function("() => globalThis.uPlot")  # which is loaded when the first curve is drawn
        expect(page.get_by_text("connection lost")).to_be_visible()
        with serving(live, arguments=["--port", port]):
            expect(page.get_by_text("connection lost")).to_have_count(0)
            page.wait_for_function(GROWS, arg=[".state.running[role=status]", before])
            page.close()


def test_buffer_shows_its_groups_by_state_and_their_items(tmp_path: Path, visit: Visit) -> None:
    addresses: list[str] = []

    async def serve(ready: Callable[[], None]) -> None:
        async with served(tmp_path / "buffer") as buffer:
            for instance in range(6):
                await buffer.write(*group(instance, (0, 1, 0, 1)))
            await buffer.write(*group("half", (1,)))
            addresses.append(buffer.url)
            ready()
            await asyncio.Event().wait()

    with in_background(serve), serving(addresses[0]) as ready:
        page = visit(at=ready["url"].rstrip("/"))
        page.locator(".sources tbody a").first.click()
        expect(page.locator("h1")).to_have_text("Buffer")
        states = page.get_by_label("groups by state").locator("a")
        expect(states.first).to_be_visible()
        expect(page.locator("h2", has_text="Items")).to_contain_text("25")
        states.filter(has_text="ready").click()
        expect(page.locator("h2", has_text="Items")).to_contain_text("24")
        page.close()
