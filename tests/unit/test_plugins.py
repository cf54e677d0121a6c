"""Parts of another package come in by the door that rollstream's own use (docs/plugins.md)."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rollstream import plugins
from rollstream.demo import MODEL_PATH
from rollstream.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin"


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has the example installed."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [
        line
        for group, points in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in points.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    return {**os.environ, "PYTHONPATH": f"{info.parent}:{EXAMPLE}"}


def test_an_engine_and_an_export_of_another_package(tmp_path: Path, installed: dict[str, str]) -> None:
    def rollstream(*words: str) -> str:
        command = [sys.executable, "-m", "rollstream", *words]
        done = subprocess.run(
            command, env=installed, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+1="}\n{"prompt": "2+2="}\n')
    settings = ["--model", str(MODEL_PATH), "--prompts", "prompts.jsonl", "-n", "2", "--output", "run"]
    rollstream("generate", *settings, "actor_rollout_ref.rollout.name=echo", "generation.export=[tsv]")
    assert (tmp_path / "run" / "trajectories.tsv").read_text() == "0\t0\n0\t1\n1\t0\n1\t1\n"
    assert "(4 rows)" in rollstream("export", "run", "--format", "tsv", "--tsv-reward", "--output", "x.tsv")
    assert "a table for spreadsheets" in rollstream("export", "--help")


def test_a_name_that_no_package_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match="did you mean 'vllm'"):
        plugins.load("rollstream.engines", "vlm")
