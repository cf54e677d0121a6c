"""Parts of another package come in by the door that rollstream's own use (docs/plugins.md)."""

import importlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from rollstream import plugins
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError, EngineError
from rollstream.trajectory import SamplingParams

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


def install(site: Path, name: str, points: dict[str, dict[str, str]]) -> None:
    """A package as pip leaves it, without its files."""
    info = site / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [
        line
        for group, entries in points.items()
        for line in (f"[{group}]", *(f"{entry} = {value}" for entry, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has the example installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    install(tmp_path / "site", project["name"], project["entry-points"])
    copy = tmp_path / "example"
    shutil.copytree(EXAMPLE, copy)
    return {**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{copy}"}


def test_an_engine_and_an_export_of_another_package(tmp_path: Path, installed: dict[str, str]) -> None:
    def rollstream(*words: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "rollstream", *words]
        done = subprocess.run(
            command, env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    settings = ["--model", str(MODEL_PATH), "--prompts", "prompts.jsonl", "-n", "2", "--output", "run"]
    words = ("generate", *settings, "actor_rollout_ref.rollout.name=echo", "generation.export=[tsv]")
    rollstream(*words)
    assert (tmp_path / "run" / "trajectories.tsv").read_text() == "0\t0\n0\t1\n1\t0\n1\t1\n"
    assert "(4 rows)" in rollstream("export", "run", "--format", "tsv", "--tsv-reward", "--output", "x.tsv")
    assert "a table for spreadsheets" in rollstream("export", "--help")
    # Tokens of an engine that was edited are not mixed with those from before.
    with (tmp_path / "example" / "my_parts.py").open("a") as file:
        file.write("\n# edited\n")
    assert "engine_kwargs.source: " in rollstream(*words, code=2)
    # A package that cannot be loaded costs nobody else anything; of two with one name none is taken by chance.
    (tmp_path / "example" / "broken_parts.py").write_text("1 / 0")
    for number in range(2):
        exports = {"broken": "broken_parts:X", "twice": f"my_parts:TSV{number}"}
        install(
            tmp_path / "site",
            f"other-parts{number}",
            {"rollstream.exports": exports if number else {"twice": exports["twice"]}},
        )
    said = rollstream("status", "run")
    assert "export 'broken' of other-parts1 1.0 cannot be loaded: ZeroDivisionError" in said
    assert "export 'twice' is in several packages: other-parts" in said and "4/4 done" in said


async def test_the_engine_of_the_example(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    engine = importlib.import_module("my_parts").Echo()

    async def ends(**sampling: Any) -> tuple[list[int], str]:
        completion = await engine.generate([5, 6, 7], SamplingParams(**sampling), request_id="a")
        assert completion.logprobs == [0.0] * len(completion.token_ids)
        return completion.token_ids, completion.finish_reason

    assert await ends(max_tokens=9) == ([5, 6, 7], "stop")
    assert await ends(max_tokens=2) == ([5, 6], "length")
    assert await ends(max_tokens=2, stop_token_ids=(6,)) == ([5, 6], "stop")
    with pytest.raises(EngineError):
        await ends(max_tokens=9, stop=("x",))
    silent = await engine.generate([5], SamplingParams(9, logprobs=False), request_id="a")
    assert silent.logprobs is None


def test_a_name_that_no_package_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        plugins.load("rollstream.engines", "vlm")
