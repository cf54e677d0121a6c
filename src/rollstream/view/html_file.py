"""`rollstream view --export`: one HTML file that shows a run without a server.

The file holds the page's own scripts, and the server's answers to all that the page asks for about the run.
"""

import base64
import gzip
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import aiohttp
import orjson

from rollstream.errors import ConfigError
from rollstream.store.journal import write_file_durably
from rollstream.view.app import static_files

MOST_ROLLOUTS: Final = 1000
"""Of a larger run, whole groups are taken, evenly picked."""
_SOURCES: Final = "data.rows.sources"
_PAGE: Final = 10_000
"""Entries of a list that the server gives at once."""
_MOST_BYTES: Final = 96 << 20
"""Of answers, before they are packed; further groups are left out."""


async def export_html(url: str, file: Path) -> str:
    """Writes the only run that a server of the page shows; returns a sentence that says what is in the file.

    Raises:
        ConfigError: the server shows more than one run, or none; or the file cannot be written.
    """
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(600)) as session:
        answers = await _answers(session)
    overview = answers["/api/runs/" + answers["run"]]
    shown, rows = len(answers["rows"]["rows"]), overview["rows"]
    part = f"{shown} of {rows} rollouts of {overview['name']}" if shown < rows else f"{shown} rollouts"
    answers["note"] = part if shown < rows else ""
    page = _page(gzip.compress(orjson.dumps(answers, option=orjson.OPT_NON_STR_KEYS), mtime=0))
    try:
        write_file_durably(file, page)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from error
    return f"{file}: {part}, {len(page) / 1e6:.1f} MB; any browser opens it"


async def _answers(session: aiohttp.ClientSession) -> dict[str, Any]:
    """Answers of the server by path; `run`, `rows`, `groups`, `texts` for the lists that the page sorts itself."""

    async def ask(path: str, **params: Any) -> Any:
        async with session.get(path, params=params) as response:
            body = await response.read()
            if response.status != 200:
                raise ConfigError(f"{path}: {orjson.loads(body)['error']['message']}")
            return orjson.loads(body) if response.content_type == "application/json" else body

    sources = (await ask("/api/sources"))["sources"]
    runs = [source for source in sources if source["kind"] != "training"]
    if len(runs) != 1 or runs[0]["kind"] == "buffer":
        names = ", ".join(source["name"] for source in sources) or "nothing"
        raise ConfigError(f"--export takes one run; found {names}")
    base = f"/api/runs/{runs[0]['id']}"
    overview = {**await ask(base), "path": ""}
    groups = list[Any]()
    while page := (await ask(f"{base}/groups", offset=len(groups), limit=_PAGE))["groups"]:
        groups += page
    step = max(1, -(-overview["rows"] // MOST_ROLLOUTS))
    answers: dict[str, Any] = {
        "run": runs[0]["id"],
        "/api/sources": {"sources": [{**runs[0], "path": ""}]},
        base: overview,
        f"{base}/tools": await ask(f"{base}/tools"),
        **({f"{base}/sources": await ask(f"{base}/sources")} if _SOURCES in overview["settings"] else {}),
        f"{base}/failures": await ask(f"{base}/failures", limit=1000),
        "groups": [],
        "rows": {"columns": [], "rows": []},
        "texts": {},
    }
    size = 0
    for group in groups[::step]:
        index = group["index"]
        answers["groups"].append(group)
        answers[f"{base}/groups/{index}"] = await ask(f"{base}/groups/{index}")
        listed = await ask(f"{base}/rows", filter=f"index = {index}", limit=_PAGE)
        answers["rows"]["columns"] = listed["columns"]
        answers["rows"]["rows"] += listed["rows"]
        rows: Sequence[int] = [row[0] for row in listed["rows"]]
        answers["texts"] |= (await ask(f"{base}/texts", rows=",".join(map(str, rows))))["texts"]
        for row in rows:
            path = f"{base}/trajectories/{row}"
            answers[path] = await ask(path)
            tokens = await ask(f"{path}/tokens")
            answers[f"{path}/tokens"] = base64.b64encode(tokens).decode()
            size += len(tokens) + len(str(answers[path]))
        if size > _MOST_BYTES:
            break
    return answers


def _page(packed: bytes) -> bytes:
    """The page with its scripts and styles inside; each script is found by its name in an import map."""
    files = {name: body.decode() for name, (body, _) in static_files().items()}
    scripts = {name: text for name, text in files.items() if name.endswith(".js") and ".iife." not in name}
    imports = {}
    for name, text in scripts.items():
        text = re.sub(r'from\s*"\./(?:vendor/)?([\w.]+)"', r'from "rollstream/\1"', text)
        encoded = base64.b64encode(text.encode()).decode()
        imports[f"rollstream/{name.rpartition('/')[2]}"] = f"data:text/javascript;base64,{encoded}"
    style = files["vendor/uPlot.min.css"] + files["style.css"]
    inline = [
        files["vendor/uPlot.iife.min.js"],
        orjson.dumps({"imports": imports}).decode(),
        'import "rollstream/app.js";',
    ]
    own, *hashes = (
        f"'sha256-{base64.b64encode(sha256(text.encode()).digest()).decode()}'" for text in (style, *inline)
    )
    policy = (
        f"default-src 'none'; script-src data: {' '.join(hashes)}; style-src {own}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        '<meta name="referrer" content="no-referrer">': '<meta http-equiv="content-security-policy" '
        f'content="{policy}">',
        '<link rel="stylesheet" href="vendor/uPlot.min.css">': "",
        '<link rel="stylesheet" href="style.css">': f"<style>{style}</style>\n<script>{inline[0]}</script>",
        '<script type="module" src="app.js"></script>': f'<script type="importmap">{inline[1]}</script>\n'
        f'<script type="text/plain" id="rollstream-file">{base64.b64encode(packed).decode()}</script>\n'
        f'<script type="module">{inline[2]}</script>',
    }
    page = files["index.html"]
    for linked, inside in parts.items():
        page = page.replace(linked, inside)
    return page.encode()
