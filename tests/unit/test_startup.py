"""What a command imports: who only looks waits for no package that is not needed."""

import asyncio
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollstream.generation.run import run_generation
from rollstream.store.manifest import read_manifest, write_manifest
from tests.support import tokenizers
from tests.unit.store.fabric import commit_all, failure, rollout

HEAVY = ("torch", "transformers", "datasets", "pandas", "ray", "openvino_genai")
SCRIPT = f"""
import sys
from rollstream.cli import main
try:
    main(sys.argv[1:])
finally:
    print("IMPORTED", *[name for name in {HEAVY!r} if name in sys.modules])
"""


def run(*words: str) -> tuple[list[str], str]:
    """The heavy packages that a command imported, and what it wrote to standard error."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, timeout=120)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")]
    return line.split()[1:], done.stderr


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from rollstream import config
    from rollstream.config.load import compose
    from rollstream.demo import MODEL_PATH

    root = tmp_path_factory.mktemp("startup") / "run"
    given = {
        "actor_rollout_ref": {"model": {"path": str(MODEL_PATH)}},
        "trainer": {"default_local_dir": str(root)},
    }
    run_generation(compose(layers=[Path(config.__file__).with_name("demo.yaml"), given]))
    return root


def test_commands_that_look_import_nothing_heavy(run_dir: Path) -> None:
    assert run("--help")[0] == run("generate", "--help-config")[0] == []
    for command in ("status", "status --failed", "show", "show --json", "validate", "eval --by data_source"):
        assert run(*command.split(), str(run_dir))[0] == [], command


def test_nor_do_they_where_rollouts_are_in_a_journal(tmp_path: Path) -> None:
    async def write() -> None:
        await commit_all(tmp_path / "run", [rollout(0), rollout(1), failure(2)], seal=False)

    asyncio.run(write())
    for command in ("status", "show", "validate"):
        assert run(command, str(tmp_path / "run"))[0] == [], command


def test_tokens_are_shown_without_the_package_that_made_them(run_dir: Path, tmp_path: Path) -> None:
    """transformers alone can load this one."""
    copy = shutil.copytree(run_dir, tmp_path / "run")
    model = tokenizers.write("llama2", tmp_path / "model")
    manifest = read_manifest(copy)
    assert manifest is not None
    manifest.config["actor_rollout_ref"]["model"]["path"] = str(model)
    write_manifest(copy, manifest)
    imported, said = run("show", str(copy), "--tokens")
    assert (imported, said) == ([], "")


def test_a_run_with_nothing_left_to_do_imports_nothing_heavy_and_says_that_it_is_there(run_dir: Path) -> None:
    imported, said = run("generate", "--config", str(run_dir / "config.yaml"))
    assert imported == []
    assert said.startswith("rollstream ")
    assert "256 done, 0 failed, 0 owed" in said
    assert f"configuration: {run_dir}/config.yaml" in said


SLOW_IMPORT = """
import sys
from rollstream.cli import main
class Slow:
    def find_spec(self, name, path, target=None):
        if name == "rollstream.generation.command":
            sys.stdin.read()
sys.meta_path.insert(0, Slow())
sys.exit(main(["generate"]))
"""


def test_a_start_that_is_slow_says_on_which_machine_and_what_it_does() -> None:
    command = [sys.executable, "-c", SLOW_IMPORT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stderr is not None
        said = [process.stderr.readline() for _ in range(2)]
        assert said[0].endswith(f" on {platform.node()}, process {process.pid}\n")
        assert said[1] == "loading Python's packages …\n"
        process.stdin.close()
        assert "is not set" in process.stderr.read()
        assert process.wait(60) == 2
