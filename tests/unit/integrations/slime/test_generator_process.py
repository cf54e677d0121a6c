"""Real generator processes below their guards."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import orjson
import pytest

from rollstream.engine.reaper import marked
from rollstream.integrations.slime.generator_process import GeneratorEnd, GeneratorProcess
from tests.support.until import until


class World:
    """Starts generators; `note(name, value)` in their files writes a file of JSON."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid4().hex
        self.log = folder / "dir" / "logs" / "generator-x.log"
        self.netrc = folder / "dir" / "generator.netrc"
        self.started: list[GeneratorProcess] = []

    async def start(self, body: str, *, token: str | None = None, **data: Any) -> GeneratorProcess:
        file = self.folder / "math_generator.py"
        file.write_text(
            "import asyncio, json, logging, os, pathlib, signal, subprocess, sys, threading, time\n"
            "from rollstream.errors import ConfigError, DataError\n"
            "def note(name, value):\n"
            f"    path = pathlib.Path({str(self.folder)!r}) / name\n"
            "    path.with_suffix('.part').write_text(json.dumps(value))\n"
            "    path.with_suffix('.part').rename(path)\n" + textwrap.dedent(body)
        )
        process = await GeneratorProcess.start(
            file,
            {"remote_buffer_url": "http://127.0.0.1:8889", **data},
            log=self.log,
            netrc=self.netrc,
            token=token,
            mark=self.mark,
        )
        self.started.append(process)
        return process

    async def run(self, body: str, **more: Any) -> GeneratorEnd:
        return await (await self.start(body, **more)).wait()

    def noted(self, name: str) -> Any:
        path = self.folder / name
        return orjson.loads(path.read_bytes()) if path.exists() else None

    async def close(self) -> None:
        for process in self.started:
            await process.stop()
        assert not marked(self.mark)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    yield world
    await world.close()


async def test_a_generator_gets_its_payload_and_a_private_log(world: World) -> None:
    world.log.parent.mkdir(parents=True, mode=0o755)
    world.log.write_text("old\n")
    world.log.chmod(0o644)
    ids = [f"id-{i}" for i in range(400_000)]  # some 5 MB
    end = await world.run(
        """
        def run_rollout(data):
            note("data", {"n": len(data["skip"]), "last": data["skip"][-1], "text": data["text"]})
            note("seen", [sys.argv, dict(os.environ)])
            print("out")
            print("err", file=sys.stderr)
            logging.getLogger("mine").info("info")
            for name in ("httpx", "httpx2", "aiohttp.access"):
                logging.getLogger(name).info("a request")
                logging.getLogger(name).warning("a warning")
        """,
        skip=ids,
        text="secret ü \u2028",
    )
    assert end == GeneratorEnd(finished=True)
    assert world.noted("data") == {"n": len(ids), "last": ids[-1], "text": "secret ü \u2028"}
    assert "secret" not in str(world.noted("seen"))
    assert "NETRC" not in world.noted("seen")[1] and "ROLLSTREAM_BUFFER_TOKEN" not in world.noted("seen")[1]
    said = world.log.read_text()
    assert all(part in said for part in ("old", "=== ", "out", "err", "INFO mine: info", "a warning"))
    assert "request" not in said
    assert stat.S_IMODE(world.log.stat().st_mode) == 0o600
    assert stat.S_IMODE(world.log.parent.stat().st_mode) == 0o700


async def test_its_token_is_for_it_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    own = world.folder / "own-netrc"
    own.write_text("machine api.wandb.ai login me password mine")
    monkeypatch.setenv("NETRC", str(own))
    monkeypatch.setenv("ROLLSTREAM_BUFFER_TOKEN", "the server's")
    body = """
        from requests.utils import get_netrc_auth
        def run_rollout(data):
            urls = "http://127.0.0.1:8889/x", "http://localhost:1", "http://api.wandb.ai", "http://evil"
            note("auth", [get_netrc_auth(url) for url in urls])
            note("token", [os.environ.get("ROLLSTREAM_BUFFER_TOKEN"), data["remote_buffer_url"]])
            print(data, flush=True)
        """
    assert (await world.run(body, token="secret-one")).finished
    basic = ["rollstream", "secret-one"]
    assert world.noted("auth") == [basic, None, ["me", "mine"], None]
    assert world.noted("token") == ["secret-one", "http://127.0.0.1:8889"]
    assert stat.S_IMODE(world.netrc.stat().st_mode) == 0o600
    assert "secret-one" not in world.log.read_text()
    assert (await world.run(body)).finished
    assert world.noted("token")[0] is None and world.noted("auth")[:2] == [None, None]


async def test_it_reports_how_it_ended(world: World) -> None:
    async def end_of(line: str) -> GeneratorEnd:
        return await world.run(
            f"def run_rollout(data):\n    print('my last words', flush=True)\n    {line}\n"
        )

    for line in ("sys.exit(0)", "return 7"):
        assert await end_of(line) == GeneratorEnd(finished=True)
    crash = await end_of("raise ValueError('two\\nlines')")
    assert not crash.finished and not crash.permanent
    assert crash.error == "ValueError: two lines"
    assert "math_generator.py" in crash.traceback and "in run_rollout" in crash.traceback
    for name in ("ConfigError", "DataError"):
        assert (await end_of(f"raise {name}('x: no')")).permanent
    assert (await end_of("sys.exit('no')")).error == "SystemExit: no"
    assert "raised NameError" in (end := await world.run("nothing\n")).error and end.permanent
    for line, how in (
        ("os._exit(0)", "ended with exit code 0"),  # it has not returned
        ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        ("os.kill(os.getppid(), 15); time.sleep(60)", "ended with exit code 0"),  # its guard was told to end
        ("os.kill(os.getppid(), 9); time.sleep(60)", "was killed by SIGKILL"),
    ):
        end = await end_of(line)
        assert end == GeneratorEnd(error=f"its process {how}", traceback="my last words"), line
        assert not marked(world.mark)


async def test_a_coroutine_is_awaited_and_what_was_begun_ends_by_itself(world: World) -> None:
    end = await world.run(
        """
        async def run_rollout(data):
            await asyncio.sleep(0)
            main = threading.main_thread()
            threading.Thread(target=lambda: (main.join(), note("thread", True))).start()
        """
    )
    assert end.finished and world.noted("thread")
    end = await world.run(
        """
        async def run_rollout(data):
            threading.Thread(target=time.sleep, args=(600,)).start()
            raise OSError("no")
        """
    )
    assert end.error == "OSError: no"  # at once: a thread does not keep what has failed


STUBBORN = """
    def run_rollout(data):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        subprocess.Popen([sys.executable, "-c",
            "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"])
        note("up", os.getpid())
        time.sleep(600)
    """


async def test_stop_ends_everything_also_where_the_guard_hangs(world: World) -> None:
    process = await world.start(STUBBORN)
    await until(lambda: world.noted("up"))
    await until(lambda: len(marked(world.mark)) == 4)  # one that is only just run shows no environment yet
    os.kill(process.pid, signal.SIGSTOP)
    await asyncio.gather(process.stop(), process.stop())
    assert not marked(world.mark)
    assert not (await process.wait()).finished
    await process.stop()


SERVER = """
import asyncio, sys
from pathlib import Path
from rollstream.integrations.slime.generator_process import GeneratorProcess
file, log, mark = sys.argv[1:]
async def main():
    about = {"log": Path(log), "netrc": Path(log + ".netrc"), "token": None, "mark": mark}
    await (await GeneratorProcess.start(Path(file), {"remote_buffer_url": ""}, **about)).wait()
asyncio.run(main())
"""


async def test_it_ends_with_the_server_and_before_another_one_begins(world: World) -> None:
    await world.start(STUBBORN)
    await until(lambda: world.noted("up"))
    first = marked(world.mark)
    (world.folder / "up").unlink()
    words = (str(world.folder / "math_generator.py"), str(world.log), world.mark)
    server = subprocess.Popen([sys.executable, "-c", SERVER, *words])  # noqa: ASYNC220 - it is killed at once
    await until(lambda: world.noted("up"))
    assert not first & marked(world.mark)
    server.kill()
    server.wait()
    await until(lambda: not marked(world.mark))
