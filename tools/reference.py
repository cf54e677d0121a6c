"""Writes docs/reference/: configuration.md, commands.md and python.md, from the source.

``python -m tools.reference`` writes what differs. A test says when the pages are not current.
"""

import argparse
import ast
import inspect
import json
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from rollstream import plugins
from rollstream.cli import build_parser
from rollstream.engine.registry import engine_kind

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "rollstream"
FOLDER = ROOT / "docs" / "reference"

MODULES: dict[str, Collection[str]] = {
    "generation": ("GenerationResult", "run_generation"),
    "generation.iterate": ("generate",),
    "chat.parsers.base": ("ParsedOutput", "ToolCall", "ToolCallParser", "register_parser"),
    "engine.base": ("Engine", "Capabilities"),
    "engine.kind": (),
    "engine.hf": ("HFEngine",),
    "engine.weight_channel": ("WeightChannel",),
    "engine.weight_deltas": ("DeltaChannel",),
    "agent.base": ("AgentLoop",),
    "agent.conversation": ("Conversation", "Turn"),
    "agent.interactions": ("Interaction",),
    "agent.tools.base": ("Tool", "ToolError", "ToolResponse"),
    "data.tasks": ("TaskConfig", "ReasoningGymConfig", "Task"),
    "training": (),
    "evaluate": (),
    "integrations.trl": (),
    "buffer.client": (),
    "integrations.slime.generation": ("run_generation",),
    "trajectory": (),
    "store.export.format": ("ExportCall", "ExportFormat"),
    "testing": (),
}
"""The modules that a program of a user imports from, and what of them is shown: nothing named stands for ``__all__``,
or without one for what has no underscore."""

_SHOWN = {"generation.iterate": "rollstream"}
"""Modules that are imported from by another name."""

_GENERATED = "<!-- Written by `python -m tools.reference`. -->\n\n"


def pages() -> dict[str, str]:
    """The text of each page by its file name."""
    return {
        "configuration.md": configuration(),
        "commands.md": commands(),
        "python.md": python(),
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def configuration() -> str:
    """All keys of generation.yaml, a table for each part."""
    lines = (SOURCE / "config" / "generation.yaml").read_text(encoding="utf-8").splitlines()
    parts: dict[str, list[str]] = {}
    path: list[str] = []
    for line in lines:
        found = re.fullmatch(r"( *)(\w+):(.*)", line)
        if found is None:
            continue
        indent, key, rest = found.groups()
        path = [*path[: len(indent) // 2], key]
        value, _, meaning = (text.strip() for text in rest.partition("# "))
        if value or meaning or key in ("train_tasks",):
            owner = ".".join(path[:2]) if path[0] == "actor_rollout_ref" else path[0]
            default = f"`{value}`" if value else ""
            name = ".".join(path).removeprefix(f"{owner}.")
            parts.setdefault(owner, []).append(f"| `{name}` | {default} | {_cell(meaning)} |")
    text = f"# Configuration\n\n{_GENERATED}Every key of `rollstream generate`, its default and its meaning, as in "
    text += "`rollstream generate --help-config`.\nA default of `null` means that the key is not set.\n"
    text += "A key's full name begins with the heading: `actor_rollout_ref.rollout.n=8`.\n"
    for owner, rows in parts.items():
        text += _table(owner, rows)
    for name in plugins.names("rollstream.engines"):
        text += _table(f"engine_kwargs of {name}", _engine_kwargs(name))
    return text


def _engine_kwargs(engine: str) -> Iterator[str]:
    """The settings of an engine; their meanings are the comments in its file and those that it shares."""
    meanings: dict[str, str] = {}
    for file in ("http_server", "pool", "servers", engine):
        lines = (SOURCE / "engine" / f"{file}.py").read_text(encoding="utf-8").splitlines()
        found = (re.fullmatch(r' {4}"(\w+)": .+,  # (.+)', line) for line in lines)
        meanings |= {one[1]: one[2] for one in found if one}
    kind = engine_kind(engine)
    for key, value in kind.kwargs.items():
        decides = "; part of a run's identity" * (key in kind.data_deciding)
        yield f"| `{key}` | `{json.dumps(value)}` | {_cell(meanings[key])}{decides} |"


def _table(title: str, rows: Iterable[str]) -> str:
    return f"\n## {title}\n\n| key | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"


def commands() -> str:
    """All commands with their arguments."""
    text = f"# Commands\n\n{_GENERATED}`rollstream COMMAND --help` prints the same.\n"
    for name, parser in _parsers(build_parser(), "rollstream"):
        text += f"\n## {name}\n\n{parser.description}\n"
        rows = [_argument(action) for action in parser._actions if action.help != argparse.SUPPRESS]
        if rows := [row for row in rows if row]:
            text += "\n| | |\n|---|---|\n" + "\n".join(rows) + "\n"
        if parser.epilog:
            text += f"\n```text\n{(parser.epilog % {'prog': name}).strip()}\n```\n"
    return text


def python() -> str:
    """What each public module has: signatures and docstrings."""
    text = f"# Python\n\n{_GENERATED}What programs import. Other names may change without notice.\n"
    for module, chosen in MODULES.items():
        text += f"\n## {_SHOWN.get(module, f'rollstream.{module}')}\n"
        home = SOURCE / module.replace(".", "/")
        for name, node in _definitions(home):
            if chosen and name not in chosen:
                continue
            text += f"\n### {name}\n\n"
            if node is None:
                continue
            text += f"```python\n{_signature(node)}\n```\n\n{_prose(ast.get_docstring(node) or '')}\n"
            for method in node.body if isinstance(node, ast.ClassDef) else []:
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name[0] != "_":
                    said = ast.get_docstring(method)
                    text += f"`{method.name}`: {_prose(said)}\n" if said else ""
    return text


def _cell(text: str) -> str:
    text = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", text)
    return text.replace("|", r"\|").replace("<", "&lt;")


def _parsers(parser: argparse.ArgumentParser, name: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                if any(isinstance(one, argparse._SubParsersAction) for one in below._actions):
                    yield from _parsers(below, f"{name} {word}")
                else:
                    yield f"{name} {word}", below


def _argument(action: argparse.Action) -> str:
    if isinstance(action, argparse._HelpAction):
        return ""
    meta = action.metavar
    shown = " ".join(meta) if isinstance(meta, tuple) else meta
    if shown is None:
        shown = "{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest.upper()
    if action.nargs == 0:
        shown = ""
    elif action.nargs in ("*", "+"):
        shown += " …"
    words = f"{', '.join(action.option_strings)} {shown}".strip()
    values = {**vars(action), "prog": "rollstream"}
    return f"| `{words}` | {_cell((action.help or '') % values)} |"


def _definitions(
    home: Path,
) -> Iterator[tuple[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | None]]:
    first = home / "__init__.py" if home.is_dir() else home.with_suffix(".py")
    files = [first, *sorted(home.glob("*.py"))] if home.is_dir() else [first]
    found: dict[str, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = {}
    listed: list[str] | None = None
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found.setdefault(node.name, node)
            elif file == first and isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                listed = ast.literal_eval(node.value)
    for name in listed if listed is not None else [name for name in found if not name.startswith("_")]:
        yield name, found.get(name)


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        lines = [f"class {node.name}({', '.join(map(ast.unparse, node.bases))})".replace("()", "")]
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_"):
                lines.append(f"    {ast.unparse(one)}")
            elif isinstance(one, ast.Expr) and one != node.body[0]:  # the docstring of the field before it
                lines += [
                    f"        # {line}" for line in inspect.cleandoc(ast.literal_eval(one.value)).splitlines()
                ]
            elif isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and (
                one.name == "__init__" or not one.name.startswith("_")
            ):
                lines.append("    " + _signature(one))
        return "\n".join(lines)
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{kind} {node.name}({ast.unparse(node.args)}){returns}"


def _prose(docstring: str) -> str:
    """A docstring in Google's style as Markdown: its sections' entries become lists, code stays as it is."""
    text, section = "", ""
    for line in inspect.cleandoc(docstring).splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Yields|Example|Attributes):", line):
            section = line
            text += f"\n{line}\n\n"
        elif line.startswith("    ") and section in ("", "Example:"):
            text += f"{line}\n"
        elif line.startswith("    ") and section in ("Returns:", "Yields:"):
            text += f"{_escaped(line.strip())}\n"
        elif line.startswith("    "):
            text += f"{'- ' if line[4] != ' ' else '  '}{_escaped(line.strip())}\n"
        else:
            section = section if not line else ""
            text += _escaped(line) + "\n"
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n" if text.strip() else ""


def _escaped(line: str) -> str:
    line = re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", line)
    return line.replace("<", "&lt;").replace("``", "`").replace("][", "]\\[")


if __name__ == "__main__":
    main()
