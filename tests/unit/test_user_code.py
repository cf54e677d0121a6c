import dataclasses
import functools
import pickle
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from rollstream.errors import ConfigError
from rollstream.trajectory import PromptRow
from rollstream.user_code import import_name, run_file, source_digest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.py"
    file.write_text(
        dedent(
            """
            import dataclasses
            from rollstream.trajectory import PromptRow

            @dataclasses.dataclass
            class Point:
                x: "int" = 1

            class Row(PromptRow):
                pass

            def double(x):
                return 2 * x
            """
        )
    )
    return file


def test_a_file_runs_as_a_module_that_pickle_and_dataclasses_find(file: Path) -> None:
    module = run_file(file, key="k")
    assert module.double(2) == 4
    assert sys.modules[module.__name__] is module
    assert pickle.loads(pickle.dumps(module.Point(3))) == module.Point(3)
    assert [field.name for field in dataclasses.fields(module.Point)] == ["x"]
    assert not (file.parent / "__pycache__").exists()


def test_an_edited_file_is_another_module(file: Path) -> None:
    first = run_file(file, key="k")
    file.write_text(file.read_text().replace("2 * x", "3 * x"))  # same size, same second
    second = run_file(file, key="k")
    assert (first.double(2), second.double(2)) == (4, 6)
    assert first.__name__ != second.__name__
    assert pickle.loads(pickle.dumps(first.Point(1))) == first.Point(1)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nraise ValueError('no')", r"k: .*mine\.py raised ValueError: no \(line 2: raise ValueError"),
        ("import sys; sys.exit(3)", r"raised SystemExit: 3 \(line 1"),
        ("def f():\n    1 / 0\n\nf()", r"raised ZeroDivisionError: .*\(line 2: 1 / 0\)"),
        ("def f(:", r"raised SyntaxError: .*mine\.py, line 1"),
        ("import json\njson.loads('[')", r"raised JSONDecodeError: .*\(line 2: json"),
    ],
)
def test_a_file_that_raises(file: Path, source: str, message: str) -> None:
    file.write_text(source)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=message):
        run_file(file, key="k")
    assert not {name for name in set(sys.modules) - before if name.startswith("rollstream_user_")}


def test_by_hand_means_by_hand(file: Path) -> None:
    file.write_text("raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        run_file(file, key="k")


def test_no_python_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"k: no such file: .*looked in"):
        run_file(tmp_path / "no.py", key="k")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ConfigError, match=r"k: .*a\.txt is not a Python file"):
        run_file(tmp_path / "a.txt", key="k")


def test_names(file: Path) -> None:
    assert import_name("rollstream.trajectory.PromptRow", key="k") is PromptRow
    assert import_name(f"{file}:double", key="k")(1) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rollstream.trajectory.PromptRo", "did you mean .PromptRow.?"),
        ("rollstream.nothing.X", r"rollstream\.nothing cannot be imported \(ModuleNotFoundError"),
        ("PromptRow", "write package.module.Name or path/to/file.py:Name"),
        ("a..b", "write package.module.Name"),
        ("agent.py", "write package.module.Name or path/to/file.py:Name"),
        ("no.py:X", "no such file: no.py"),
        ("rollstream.trajectory:X", "no such file"),
        ("x.py:not a name", r"write path/to/file\.py:Name"),
    ],
)
def test_names_that_stand_for_nothing(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^k: .*{message}"):
        import_name(name, key="k")


def test_a_file_that_is_beside_or_was_written_for_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "verl", None)
    monkeypatch.syspath_prepend(tmp_path / "others")
    (tmp_path / "others").mkdir()
    (tmp_path / "alongside.py").write_text("X = 1\n")
    (tmp_path / "others" / "made_for_verl.py").write_text("from verl.tools.base_tool import BaseTool\n")
    with pytest.raises(ConfigError, match=r"; write alongside\.py:X$"):
        import_name("alongside.X", key="k")
    with pytest.raises(ConfigError, match=r"rollstream\.agent\.tools\.base"):
        import_name("made_for_verl.X", key="k")


def test_the_digest_is_of_the_defining_file(file: Path, tmp_path: Path) -> None:
    module = run_file(file, key="k")
    digest = source_digest(module)
    assert len(digest) == 32
    assert source_digest(module.double) == source_digest(functools.partial(module.double, 1)) == digest
    assert source_digest(module.Row) == digest  # its base is rollstream's own
    assert source_digest(module.Point) == source_digest(module.Point(1))
    moved = tmp_path / "elsewhere.py"
    moved.write_bytes(file.read_bytes())
    assert source_digest(run_file(moved, key="k").Row) == source_digest(module.Row)
    moved.write_text(file.read_text() + "\n")
    assert source_digest(run_file(moved, key="k").Row) != source_digest(module.Row)
    assert source_digest(module.double) == digest  # of what ran, whatever the file says now
    assert source_digest(PromptRow) == source_digest(run_file)
    assert source_digest(len) == source_digest(dict)


def test_a_file_may_import_its_neighbours_also_while_it_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour_at_start.py").write_text("X = 1\n")
    (tmp_path / "neighbour_of_a_call.py").write_text("Y = 2\n")
    (tmp_path / "caller.py").write_text(
        "from neighbour_at_start import X\n"
        "def call():\n    from neighbour_of_a_call import Y\n    return X + Y\n"
    )
    module = run_file(tmp_path / "caller.py", key="k")
    assert module.call() == 3
    assert run_file(tmp_path / "caller.py", key="k").call() == 3
    assert sys.path.count(str(tmp_path)) == 1
