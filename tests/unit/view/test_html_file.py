"""What of a run is in an exported file."""

import asyncio
import base64
import gzip
import re
from pathlib import Path

import orjson
import pytest

from rollstream.view import html_file
from rollstream.view.app import ViewServer
from rollstream.web import Access
from tests.support.view_runs import rollout, write_run


def test_groups_of_a_large_run_are_from_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_file, "_PAGE", 4)
    monkeypatch.setattr(html_file, "MOST_ROLLOUTS", 3)
    root = write_run(tmp_path / "run", [rollout(index, 0) for index in range(9)], n=1, prompts=9)

    async def export() -> None:
        server = ViewServer([str(root)], Access())
        try:
            await html_file.export_html(await server.start("127.0.0.1", 0), tmp_path / "run.html")
        finally:
            await server.stop()

    asyncio.run(export())
    packed = re.search(r'id="rollstream-file">([^<]*)<', (tmp_path / "run.html").read_text())
    assert packed is not None
    held = orjson.loads(gzip.decompress(base64.b64decode(packed[1])))
    assert [group["index"] for group in held["groups"]] == [0, 3, 6]
