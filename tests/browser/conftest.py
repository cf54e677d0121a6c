"""A real browser on a real server: Chromium of the machine, `rollstream view` as a process."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import view_runs
from tests.support.until import PATIENCE_S

WIDTHS = (360, 1280, 2560)


@contextlib.contextmanager
def serving(*places: Path | str, arguments: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """What a `rollstream view` says when it is ready: its `url` and `pid`."""
    command = [sys.executable, "-m", "rollstream.cli", "view", *map(str, places), "--json", *arguments]
    if "--port" not in arguments:
        command += ["--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: of agents, hostile, of many tokens, of many rows, of a program; and of two trainings."""
    root = tmp_path_factory.mktemp("runs")
    view_runs.agent_run(root / "agent")
    view_runs.agent_run(root / "second", prompts=20)
    view_runs.hostile_run(root / "hostile")
    view_runs.long_run(root / "long")
    view_runs.large_run(root / "large", 20_000)
    view_runs.write_run(root / "program", [view_runs.session_rollout(0, 0)], n=1, prompts=1)
    for name in ("trained", "training"):
        (root / name).mkdir()
    history = [
        {
            "step": step,
            "reward": step / 100,
            "staleness/mean": step % 2 / 2,
            "staleness/max": 2,
            "dropped": 0,
            "loss": 1 / step,
        }
        for step in range(1, 41)
    ]
    (root / "training" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (root / "trained" / "trainer_state.json").write_text(json.dumps({"log_history": history[:20]}))
    record = {"index": 7, "n": 2, "mean": 0.5, "prompt_key": f"{7:032x}", "prompt": "<b>2 + 2</b>"}
    batches = [{"first": step - 1, "step": step, "groups": [record] * step} for step in (2, 4)]
    (root / "training" / "rollstream_groups.jsonl").write_text("\n".join(map(json.dumps, batches)))
    return root


@pytest.fixture(scope="session")
def server(runs: Path) -> Iterator[str]:
    """The server's address, without a slash at the end."""
    with serving(runs) as ready:
        yield ready["url"].rstrip("/")


@pytest.fixture(scope="session")
def ids(server: str) -> dict[str, str]:
    """Names of the sources, and their ids."""
    import urllib.request

    with urllib.request.urlopen(f"{server}/api/sources") as answer:
        return {source["name"]: source["id"] for source in json.load(answer)["sources"]}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Open for a module only: while it is, no other event loop can run in this thread."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (extra `dev`)")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("there is no chromium on this machine (Debian's package `chromium`)")
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Any, server: str) -> Iterator[Callable[..., Any]]:
    """Opens a view by its address: `visit("run/ID", width=360, dark=True)`.

    At the end nothing may have gone wrong in any opened page: no message of the console, no exception, no request to
    anywhere but the server. `refused`: parts of addresses that the server may refuse.
    """
    contexts, problems = [], []

    def visit(
        view: str = "",
        *,
        width: int = 1280,
        dark: bool = False,
        at: str = server,
        refused: str | None = None,
    ) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 800}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        context.set_default_timeout(PATIENCE_S * 1000)
        page = context.new_page()

        def heard(message: Any) -> None:
            if refused is None or refused not in message.location["url"]:
                problems.append(f"{message.type}: {message.text} {message.location['url']}")

        def asked(request: Any) -> None:
            if not request.url.startswith((at, "data:")):
                problems.append(f"asked for {request.url}")

        page.on("console", heard)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", asked)
        page.goto(f"{at}/#/{view}" if not view.startswith("?") else f"{at}/{view}")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []
