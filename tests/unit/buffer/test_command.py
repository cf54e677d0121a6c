"""The command line of `rollstream buffer serve`: what it refuses, and how it ends."""

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import requests

from rollstream.buffer.command import check_folder
from rollstream.cli import build_parser, main
from tests.integration.buffer_servers import serve_buffer

DEMO = Path(__file__).parents[3] / "examples" / "buffer" / "demo.py"


def refused(*words: str, capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert main(["buffer", "serve", "--dir", str(folder), "--port", "0", *words]) == 2
    return capsys.readouterr().err


def test_wrong_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.write_text("\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a_generator.py").write_text("TASK_TYPE = 'a'\n")
    for words, said in (
        (("--host", "0.0.0.0"), "--token-file"),
        (("--token-file", str(tmp_path / "none")), "No such file"),
        (("--token-file", str(empty)), "first line"),
        (("--group-size", "0"), "group_size"),
        (("--whole-reads",), "--max-groups-per-read"),
        (("--lease-seconds", "0"), "--lease-seconds"),
        (("--max-groups-per-read", "0"), "--max-groups-per-read"),
        (("--min-valid-item-size-ratio", "1.5"), "min_valid_item_size_ratio"),
        (("--generators", str(tmp_path / "broken")), "run_rollout"),
        (("--generators", str(tmp_path / "nowhere")), "nowhere"),
        (("--port", "99999"), "cannot listen"),
    ):
        assert said in refused(*words, capsys=capsys, folder=tmp_path / "buffer"), words


def test_a_folder_with_other_things_in_it_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("for years")
    assert "not a buffer's folder and not empty: it has thesis.tex." in refused(
        capsys=capsys, folder=tmp_path
    )
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    for names in ([], [".nfs1", "lost+found", "server.log"], ["buffer.lock", "other"], ["log.json", "other"]):
        folder = tmp_path / str(len(names)) / "".join(names[:1])
        folder.mkdir(parents=True)
        for name in names:
            (folder / name).touch()
        check_folder(folder)
    check_folder(tmp_path / "new")
    check_folder(thesis)  # the ledger says what is wrong with it


def test_defaults_are_those_of_the_contract() -> None:
    options = build_parser().parse_args(["buffer", "serve", "--dir", "d"])
    assert (options.host, options.port, options.group_size) == ("127.0.0.1", 8889, 16)
    assert (options.min_valid_group_size_ratio, options.min_valid_item_size_ratio) == (1.0, 0.7)
    assert (options.group_timeout_seconds, options.min_timeout_group_size_ratio) == (300.0, 0.7)
    assert (options.max_buffer_size, options.max_groups_per_read) == (10**9, None)


def test_a_second_server_is_refused_and_signals_end_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "buffer"
    with serve_buffer(folder) as server:
        assert requests.get(server.url + "/ready", timeout=10).json() == {"status": "ready"}
        with pytest.raises(AssertionError, match="in use by another buffer"), serve_buffer(folder):
            pass
        waiting = requests.Session()
        assert waiting.get(server.url + "/health", timeout=10).status_code == 200
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(30) == 0
    with serve_buffer(folder) as server:
        assert server.stop() == 0


def demo(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(DEMO), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_demo_deletes_no_folder_but_its_own(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("for years")
    ended = demo("--dir", str(tmp_path))
    assert ended.returncode == 1 and "holds what no demo made" in ended.stderr
    assert (tmp_path / "thesis.tex").read_text() == "for years"
    make_folder = runpy.run_path(str(DEMO))["make_folder"]
    mine = tmp_path / "new" / "demo"
    for _ in range(2):
        make_folder(mine)
        (mine / "prompts.jsonl").touch()
    (tmp_path / "empty").mkdir()
    make_folder(tmp_path / "empty")
    with pytest.raises(SystemExit, match="choose another"):
        make_folder(tmp_path / "thesis.tex")


def test_the_demo_wants_a_prompt(tmp_path: Path) -> None:
    for words in (("--prompts", "0"), ("--repeats", "-1")):
        ended = demo("--dir", str(tmp_path / "demo"), *words)
        assert ended.returncode == 2 and f"argument {words[0]}: " in ended.stderr, ended.stderr
        assert "Traceback" not in ended.stderr and not (tmp_path / "demo").exists()
