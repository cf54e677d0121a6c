"""The wheel in clean environments: it runs the demo, and each extra resolves to versions that work together."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollstream

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

TORCH = "torch==2.13.0"
"""Newer ones pull gigabytes of CUDA packages on a CPU machine."""

FIRST_RUN = (
    "init first",
    "generate --config first/run.yaml --prompts first/prompts.jsonl --reward first/reward.py",
)
"""Commands of a first run, with whatever engine is installed."""

EXTRAS: dict[str, tuple[str, ...]] = {
    "openvino,tasks": ("demo train_tasks.0.size=4 --output demo", *FIRST_RUN),
    "hf": FIRST_RUN,
    "lora": ("import peft",),
    "trl": (*FIRST_RUN, "from rollstream.integrations.trl import GRPOEnvTrainer"),
    "verl": (*FIRST_RUN, "from rollstream.integrations.verl import loop"),
    "dataproto": ("import tensordict, torch",),
    "openai": ("import rollstream.engine.openai",),
    "mcp": ("import rollstream.agent.tools.mcp; from mcp import Client, MCPError",),
    "images": ("import PIL.Image",),
    "ray": ("from rollstream.engine.ray_package import import_ray; import_ray()",),
    "buffer": ("import uvloop", "buffer --help"),
    "postgres": ("import psycopg",),
    "verifiers": ("import verifiers", "verifiers --help"),
    "hub": ("from huggingface_hub import HfApi",),
    "wandb": ("import wandb",),
    "mlflow": ("import mlflow",),
    "swanlab": ("import swanlab",),
    "trackio": ("import trackio",),
    "tensorboard": ("from tensorboard.summary.writer.event_file_writer import EventFileWriter",),
    "dev": ("import hypothesis, mypy, openai, pytest",),
}
"""What is tried with each: words of `rollstream`, or a line of Python."""

TORCHED = ("hf", "lora", "trl", "verl", "dataproto")


def test_every_extra_is_tried() -> None:
    tried = [name for names in EXTRAS for name in names.split(",")]
    assert sorted(tried) == sorted(PROJECT["optional-dependencies"])


def test_the_version_is_the_same_everywhere() -> None:
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None and newest[1] == PROJECT["version"] == rollstream.__version__


def test_commits_are_checked_as_make_check_does() -> None:
    hooks = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    recipe = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    made = [re.sub(r" --check| \.$", "", line.strip()) for line in recipe[1].splitlines()]
    assert [hook.removesuffix(" --force-exclude") for hook in hooks] == made


def call(*words: str | Path, cwd: Path) -> str:
    """What a command that must succeed wrote; nothing of this environment is inherited."""
    names = ("PYTHONPATH", "VIRTUAL_ENV", "COVERAGE_PROCESS_START")
    env = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(list(map(str, words)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Path]:
    """A new one, deleted in the end: some have gigabytes."""
    folder = tmp_path / "env"
    call(sys.executable, "-m", "venv", folder, cwd=tmp_path)
    yield folder / "bin"
    shutil.rmtree(folder)


@pytest.mark.extras
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("extra", EXTRAS)
def test_extra_in_a_clean_environment(extra: str, wheel: Path, environment: Path, tmp_path: Path) -> None:
    pip = (environment / "python", "-m", "pip", "--disable-pip-version-check")
    call(*pip, "install", "-q", f"{wheel}[{extra}]", *([TORCH] if extra in TORCHED else ()), cwd=tmp_path)
    call(*pip, "check", cwd=tmp_path)
    for line in EXTRAS[extra]:
        if re.match(r"import |from ", line):
            call(environment / "python", "-c", line, cwd=tmp_path)
        else:
            call(environment / "rollstream", *line.split(), cwd=tmp_path)
