from pathlib import Path

import pytest

from rollstream.buffer.generator_files import GeneratorFiles
from rollstream.buffer.groups import GroupSettings
from rollstream.errors import ConfigError

GOOD = """
TASK_TYPE = "{task}"
def run_rollout(data: dict):
    pass
"""


def a_folder(tmp_path: Path, **files: str) -> Path:
    for name, source in files.items():
        (tmp_path / f"{name}.py").write_text(source)
    return tmp_path


def test_a_folder_of_generators(tmp_path: Path) -> None:
    folder = a_folder(
        tmp_path,
        math_generator=GOOD.format(task="math") + "def filter_item(item, task_type):\n    return True\n",
        code_generator=GOOD.format(task="code"),
        helpers="raise RuntimeError('is not a generator file')",
    )
    (folder / "folder_generator.py").mkdir()
    files = GeneratorFiles(folder)
    files.check()
    assert sorted(files) == ["code", "math"]
    assert files["math"].path == folder / "math_generator.py"
    assert files["math"].hooks.overridden == {"filter_item"}
    assert files["code"].hooks.overridden == frozenset()
    assert files.hooks("math") is files["math"].hooks
    assert files.hooks("unknown").is_default_finish
    assert files["math"].hooks.task_type == "math"


def test_no_folder_is_no_generators() -> None:
    files = GeneratorFiles(None)
    files.check()
    files.refresh()
    assert dict(files) == {}


def test_a_folder_must_be_there_and_have_generators(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no generator file \(\*_generator.py\) in "):
        GeneratorFiles(tmp_path)
    with pytest.raises(ConfigError, match="no such folder: "):
        GeneratorFiles(tmp_path / "missing")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def run_rollout(data): pass", "defines no TASK_TYPE"),
        ("TASK_TYPE = 5\ndef run_rollout(data): pass", "TASK_TYPE must be a text, not empty, is 5"),
        ("TASK_TYPE = ''\ndef run_rollout(data): pass", "TASK_TYPE must be a text"),
        ("TASK_TYPE = 'x'", "defines no run_rollout"),
        ("TASK_TYPE = 'x'\nrun_rollout = 5", "run_rollout must be a function"),
        ("TASK_TYPE = 'x'\ndef run_rollout(): pass", "must take one argument"),
        ("TASK_TYPE = 'x'\ndef run_rollout(data, more): pass", "must take one argument"),
        (GOOD.format(task="x") + "filter_item = 3", "filter_item must be a function of"),
        (GOOD.format(task="x") + "import nowhere_to_be_found", "raised ModuleNotFoundError.*line 5"),
        (GOOD.format(task="x") + "def broken(:", "raised SyntaxError"),
        (GOOD.format(task="x") + "import sys; sys.exit(0)", "raised SystemExit"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_and_the_others_stay(
    tmp_path: Path, source: str, said: str
) -> None:
    folder = a_folder(tmp_path, bad_generator=source, good_generator=GOOD.format(task="good"))
    files = GeneratorFiles(folder)
    assert list(files) == ["good"]
    (problem,) = files.problems
    assert str(folder / "bad_generator.py") in problem
    with pytest.raises(ConfigError, match=said):
        files.check()


def test_of_two_with_one_task_type_neither_is_used(tmp_path: Path) -> None:
    folder = a_folder(tmp_path, a_generator=GOOD.format(task="math"), b_generator=GOOD.format(task="math"))
    files = GeneratorFiles(folder)
    assert dict(files) == {}
    with pytest.raises(
        ConfigError, match=r"a_generator.py and .*b_generator.py have the same TASK_TYPE 'math'"
    ):
        files.check()
    (folder / "b_generator.py").write_text(GOOD.format(task="code"))
    files.refresh()
    files.check()
    assert sorted(files) == ["code", "math"]


def test_files_do_not_share_a_module(tmp_path: Path) -> None:
    mean = "\nLEVEL = {level}\ndef filter_item(item):\n    return item['reward'] >= LEVEL\n"
    folder = a_folder(
        tmp_path,
        a_generator=GOOD.format(task="a") + mean.format(level=0),
        b_generator=GOOD.format(task="b") + mean.format(level=2),
    )
    (folder / "more").mkdir()
    other = a_folder(folder / "more", a_generator=GOOD.format(task="a") + mean.format(level=2))
    for files, kept in ((GeneratorFiles(folder), {"a": 1, "b": 0}), (GeneratorFiles(other), {"a": 0})):
        for task, expected in kept.items():
            hooks = files[task].hooks
            item = {"uid": "u", "instance_id": 1, "messages": [], "reward": 1.0, "extra_info": {}}
            assert len(hooks.finish((1, [item]), GroupSettings(group_size=1))) == expected


def test_a_file_is_run_again_once_it_changed_only(tmp_path: Path) -> None:
    count = "\nfrom pathlib import Path\nwith (Path(__file__).parent / 'runs').open('a') as f: f.write('x')\n"
    folder = a_folder(tmp_path, a_generator=GOOD.format(task="a") + count)
    files = GeneratorFiles(folder)
    hooks = files["a"].hooks
    files.refresh()
    assert (folder / "runs").read_text() == "x"
    assert files["a"].hooks is hooks

    (folder / "a_generator.py").write_text("1 / 0")
    files.refresh()
    assert list(files) == []
    assert "ZeroDivisionError" in files.problems[0]
    assert files.hooks("a") is hooks  # readers go on with the last that worked

    (folder / "a_generator.py").write_text(GOOD.format(task="a"))
    files.refresh()
    files.check()
    assert files.hooks("a") is files["a"].hooks is not hooks
