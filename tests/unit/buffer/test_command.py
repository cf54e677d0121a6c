"""`rollstream buffer`: what serve refuses and how it ends, what status and show print."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollstream.cli import main
from tests.support.buffer import generator, group, item, serve_buffer
from tests.support.until import PATIENCE_S, wait_until

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, folder: Path, *words: str, code: int = 2) -> str:
    # One that serves all the same is ended.
    stop = threading.Timer(PATIENCE_S, os.kill, (os.getpid(), signal.SIGINT))
    stop.start()
    try:
        assert main(["buffer", "serve", "--dir", str(folder), "--port", "0", *words]) == code, words
    finally:
        stop.cancel()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def test_wrong_options(tmp_path: Path, capsys: Capture) -> None:
    empty, broken = tmp_path / "empty", tmp_path / "broken"
    empty.write_text("\n")
    broken.mkdir()
    (broken / "a_generator.py").write_text("TASK_TYPE = 'a'\n")
    twice = generator(tmp_path / "twice", "same")
    generator(tmp_path / "thrice", "same")
    near = generator(tmp_path / "near", hooks="def normalise_group_data(group): return group\n")
    for words, said in (
        (("--host", "0.0.0.0"), "set a token"),
        (("--token-file", str(tmp_path / "none")), "No such file"),
        (("--token-file", str(empty)), "first line"),
        (("--group-size", "0"), "group_size"),
        (("--lease-seconds", "0"), "--lease-seconds"),
        (("--hook-seconds", "nan"), "--hook-seconds"),
        (("--max-groups-per-read", "0"), "--max-groups-per-read"),
        (("--max-buffer-size", "-1"), "--max-buffer-size"),
        (("--archive-bytes", "-1"), "--archive-bytes"),
        (("--min-valid-item-size-ratio", "1.5"), "min_valid_item_size_ratio"),
        (("--group-timeout-seconds", "inf"), "group_timeout_seconds"),
        (("--generators", str(broken)), "run_rollout"),
        (("--generators", str(tmp_path / "nowhere")), "nowhere"),
        (("--generators", twice, "--generators", str(tmp_path / "thrice")), "same TASK_TYPE 'same'"),
        (("--generators", near), "did you mean normalize_group_data"),
        (("--engines", "example.com"), "engines"),
        (("--tools", str(tmp_path / "none")), "none"),
        (("--store", "mysql://x"), "--store"),
        (("--port", "99999"), "cannot listen"),
        (("--host", "no.such.host.invalid"), "cannot listen"),
    ):
        assert said in refused(capsys, tmp_path / "buffer", *words), words


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path, capsys: Capture) -> None:
    thesis = tmp_path / "thesis.tex"
    thesis.write_text("for years")
    assert "not a buffer's folder and not empty: it has thesis.tex" in refused(capsys, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    assert "is not a folder" in refused(capsys, thesis)
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "lost+found").mkdir()
    (odd / ".snapshot").mkdir()
    with serve_buffer(odd) as server:
        assert server.stop() == 0


def test_a_damaged_database_is_refused(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "buffer"
    with serve_buffer(folder) as server:
        assert server.stop() == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "buffer.lock",
        "buffer.reserve",
        "buffer.sqlite",
    ]
    (folder / "buffer.sqlite").write_bytes(b"not a database at all" * 1000)
    assert "damaged" in refused(capsys, folder, code=1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_server_is_refused_and_signals_end_the_first(tmp_path: Path, number: signal.Signals) -> None:
    folder = tmp_path / "buffer"
    with serve_buffer(folder, "--group-size", "2") as server:
        assert server.get("/ready") == {"status": "ready"}
        with pytest.raises(AssertionError, match="is another server's"), serve_buffer(folder):
            pass
        assert server.post("/v1/items", {"items": group("a", (0, 1))})[0] == 200
        server.process.send_signal(number)
        assert server.process.wait(PATIENCE_S) == 0
    with serve_buffer(folder) as server:
        (given,) = server.post("/v1/read")[1]["groups"]
        assert len(given["items"]) == 2, "a group keeps the size that it was made for"


def test_status_and_show(tmp_path: Path, capsys: Capture) -> None:
    def printed(*words: str) -> str:
        assert main(["buffer", *words]) == 0
        return capsys.readouterr().out

    def listed(*words: str) -> int:
        return len(printed("show", *words).splitlines())

    files = generator(tmp_path / "files")
    with serve_buffer(tmp_path / "buffer", "--generators", files) as server:
        job = server.post("/v1/jobs", {"task_type": "math", "num_repeat_per_sample": 2})[1]["id"]
        failed = {
            "extra_info": {"failure": {"error": "engine\x1b[2J away", "stage": "generate", "attempts": 3}}
        }
        assert server.post(f"/v1/jobs/{job}/expected", {"items": 3})[0] == 200
        items = [*group("good", (0, 1)), *group("bad", (1, 1)), item("open", -1, **failed)]
        items.append(item("own", -1, extra_info={"failure": {"error": "sandbox died"}}))
        assert server.post("/v1/items", {"items": items})[0] == 200
        for where in (server.url, str(server.folder)):
            said = printed("status", where)
            assert "2 open" in said and "2 equal_rewards\n" in said
            shown = printed("show", where)
            assert len(shown.splitlines()) == 4 and "'good'" in shown and "rewards 1 1" in shown
            assert listed(where, "--state", "open", "--task", "math", "--job", job) == 2
            assert listed(where, "--job", "nobody") == 0
            assert listed(where, "--limit", "1", "--after", "1") == 1
            for limit, more in (("2", "and more: --after 2\n"), ("4", "")):
                assert main(["buffer", "show", where, "--limit", limit]) == 0
                assert capsys.readouterr().err == more
            found: Any = orjson.loads(printed("show", where, "2", "--json"))
            assert [one["uid"] for one in found["items"]] == ["'bad'-0", "'bad'-1"]
            assert r"its rollout failed: generate: engine\x1b[2J away" in printed("show", where, "3")
            assert "its rollout failed: sandbox died" in printed("show", where, "4")
            assert "6 written: 4 here, 0 delivered, 2 dropped\n" in said
            assert f"{job} of task 'math': running, 6 items, its generator writes 3\n" in said
            for wrong in (["0"], ["99999999999999999999"], ["--limit", "-1"], ["--after", str(2**63)]):
                with pytest.raises(SystemExit, match="2"):
                    main(["buffer", "show", where, *wrong])
                assert "want a whole number from" in capsys.readouterr().err
            assert listed(where, "--after", "0") == 4
            assert main(["buffer", "show", where, "99"]) == 1
            assert "there is no group" in capsys.readouterr().err
    assert "1 ready" in printed("status", str(tmp_path / "buffer")), "the server is gone"
    assert main(["buffer", "status", str(tmp_path)]) == 2
    assert "is not the folder of a buffer" in capsys.readouterr().err


def test_status_says_why_a_job_failed(tmp_path: Path, capsys: Capture) -> None:
    run = "from rollstream.errors import ConfigError; raise ConfigError('there is no such model')"
    with serve_buffer(tmp_path / "buffer", "--generators", generator(tmp_path / "files", run=run)) as server:
        server.post("/v1/jobs", {"task_type": "math"})
        wait_until(lambda: server.get("/v1/stats")["job"]["state"] == "failed")
        for where in (server.url, str(server.folder)):
            assert main(["buffer", "status", where]) == 0
            said = capsys.readouterr().out
            assert "failed" in said and "there is no such model" in said


def test_what_a_buffer_keeps_is_its_own_accounts_alone(tmp_path: Path) -> None:
    token, folder = tmp_path / "token", tmp_path / "buffer"
    token.write_text("secret\n")
    token.chmod(0o644)
    folder.mkdir(mode=0o755)
    with serve_buffer(folder, "--token-file", str(token)) as server:
        assert "every account" in server.log.read_text()
        files = [folder, *folder.glob("buffer.sqlite*")]
        assert len(files) >= 2 and all(file.stat().st_mode & 0o077 == 0 for file in files)
