"""The layers of the design, read from the imports: arrows point down only."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "rollstream"

FLOORS: list[set[str]] = [
    {"trajectory", "errors", "surrogates", "aio"},
    {"plugins", "command_line"},
    {"demo"},
    {
        "web",
        "childproc",
        "user_code",
        "user_calls",
        "stderr_log",
        "stop_signals",
        "metrics_text",
        "mismatch",
        "redaction",
        "sampling",
        "scratch",
        "memory",
        "untrusted",
    },
    {"config", "chat", "engine", "reward", "store"},
    {"data", "agent"},
    {"gateway"},
    {"rollout"},
    {"generation", "buffer", "training", "serving", "evaluate"},
    {"sessions"},
    {"integrations", "testing", "show", "simulate", "view"},
    {"cli"},
    {"__main__"},
]
"""Rooms by floor, from the ground. `show` and `simulate` serve the command line."""

HEAVY = {
    "torch",
    "tensordict",
    "ray",
    "transformers",
    "openvino",
    "openvino_genai",
    "datasets",
    "reasoning_gym",
    "verl",
    "trl",
    "mcp",
    "wandb",
    "trackio",
    "mlflow",
    "swanlab",
    "tensorboard",
}


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def floor_of(room: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room in rooms)


def imported_rooms(path: Path) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            names = (
                [f"rollstream.{alias.name}" for alias in node.names] if module == "rollstream" else [module]
            )
        rooms |= {name.split(".")[1] for name in names if name.startswith("rollstream.")}
    return {room for room in rooms if (ROOT / room).is_dir() or (ROOT / f"{room}.py").exists()}


MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    room = room_of(path)
    for other in imported_rooms(path) - {room}:
        assert floor_of(other) < floor_of(room), f"{room} must not know {other}"


def imported_files(path: Path) -> set[Path]:
    """Files of the package that a file imports, wherever in it; not those that only the type checker reads."""
    tree = ast.parse(path.read_text())
    unread = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    names = set()
    for node in set(ast.walk(tree)) - unread:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    bases = [ROOT.joinpath(*name.split(".")[1:]) for name in names if name.startswith("rollstream.")]
    files = {file for base in bases for file in (base.with_suffix(".py"), base / "__init__.py")}
    return {file for file in files if file.is_file()} - {path}


def test_no_files_import_each_other_in_a_circle() -> None:
    imports: dict[str, set[str]] = {}
    for path in MODULES:
        others = imported_files(path) - {ROOT / "__init__.py"}
        imports[str(path.relative_to(ROOT))] = {str(other.relative_to(ROOT)) for other in others}
    while ends := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in ends:
            del imports[name]
    assert not imports


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_heavy_packages_are_imported_lazily(path: Path) -> None:
    if path.name == "openvino_worker.py":
        return  # a program of its own
    if path.name in ("hf_batch.py", "hf_forward.py"):
        return  # imported where a model is loaded
    of_verls = ("client.py", "generate.py", "loop.py", "replica.py", "sft.py", "stream.py")
    if path.parent.name == "verl" and path.name in of_verls:
        return  # classes derived from verl's, which are imported where verl is
    if path.parent.name == "trl" and path.name in ("config.py", "trainer.py"):
        return  # classes derived from TRL's, imported when they are asked for
    for node in ast.parse(path.read_text()).body:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.split(".")[0] for name in names} & HEAVY


def test_importing_rollstream_pulls_in_nothing_heavy() -> None:
    code = (
        "import sys, rollstream, rollstream.cli\n"
        "from rollstream import GenerationResult, Rollout, Trajectory, generate, run_generation\n"
        "from rollstream import generation\n"
        "assert (generation.run_generation, generation.GenerationResult) == (run_generation, GenerationResult)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "rollstream", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.startswith(
        "rollstream "
    )
