"""One run of a generator: a process below a reaper, its payload, its report and its log.

    server --(pipe)--> reaper --> python -m rollstream.integrations.slime.generator_process --> what it starts

The reaper (`engine.reaper`) ends the generator and everything below it when the server is gone, SIGKILL
included: two generators of one job would write every group twice. Payload and report are files without a
name, which the generator inherits; its token is in its environment.
"""

import asyncio
import inspect
import logging
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from rollstream.childproc import how_ended
from rollstream.engine.reaped import ReapedProcess
from rollstream.engine.reaper import kill_left
from rollstream.errors import ConfigError, DataError
from rollstream.user_code import run_file

_HEADER = " run_rollout of "
_LAST_LINES = 20
_LAST_BYTES = 16_384
_TRACEBACK_CHARS = 8_000


class GeneratorEnd(msgspec.Struct, frozen=True):
    """How a run ended."""

    finished: bool = False
    permanent: bool = False
    """A restart would end in the same way."""
    error: str = ""
    """In one line; empty when it finished."""
    traceback: str = ""
    """The end of the log stands here if the generator could not report more."""


class GeneratorProcess:
    """A generator that runs. Made by `start`."""

    def __init__(self, process: ReapedProcess, report: IO[bytes], log: Path) -> None:
        self._process, self._report, self._log = process, report, log

    @property
    def pid(self) -> int:
        return self._process.pid

    @classmethod
    async def start(
        cls, file: Path, data: Mapping[str, Any], *, log: Path, netrc: Path, token: str | None, mark: str
    ) -> "GeneratorProcess":
        """Calls a file's `run_rollout` with `data` in a process of its own. Raises `OSError`.

        The token is in its environment, and in the file `netrc` for HTTP clients that read such files, as
        `requests` does. All runs of a job on one server have one `mark`: what an earlier one left behind is
        ended first.
        """
        await asyncio.to_thread(kill_left, mark)
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        env.pop("ROLLSTREAM_BUFFER_TOKEN", None)  # the server's own
        with tempfile.TemporaryFile() as payload, _open_log(log, file) as output:
            payload.write(msgspec.json.encode(data))
            payload.seek(0)
            if token is not None:
                _write_netrc(netrc, str(data["remote_buffer_url"]), token)
                env |= {"ROLLSTREAM_BUFFER_TOKEN": token, "NETRC": str(netrc.absolute())}
            report = tempfile.TemporaryFile()  # noqa: SIM115 - read when the generator has ended
            files = payload.fileno(), report.fileno()
            process = await ReapedProcess.start(
                [sys.executable, "-m", __name__, str(file.absolute()), *map(str, files)],
                env,
                mark=mark,
                stdout=output,
                stderr=output,
                pass_fds=files,
            )
        return cls(process, report, log)

    async def wait(self) -> GeneratorEnd:
        """Returns when it has ended, and everything that it started. Called once."""
        code = await self._process.wait()
        return await asyncio.to_thread(self._end, code)

    async def stop(self) -> None:
        """Ends it and everything it started, within seconds. May be called twice, and after its end."""
        await self._process.end()

    def _end(self, code: int) -> GeneratorEnd:
        with self._report as report:
            report.seek(0)
            written = report.read()
        try:
            end = msgspec.json.decode(written, type=GeneratorEnd)
        except msgspec.MsgspecError:  # it was killed before, or while it wrote
            end = None
        if end is not None and (code == 0 or not end.finished):
            return end
        # A reaper that gets SIGTERM ends with 0, too: only a report says that a generator has finished.
        return GeneratorEnd(error=f"its process {how_ended(code)}", traceback=self._last_words())

    def _last_words(self) -> str:
        try:
            with self._log.open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _LAST_BYTES))
                said = log.read().decode(errors="replace").rpartition(_HEADER)[2]
        except OSError as error:
            return f"(its log cannot be read: {error})"
        return "\n".join(said.strip().splitlines()[1:][-_LAST_LINES:])


def _open_log(path: Path, file: Path) -> IO[bytes]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    log = open(path, "ab", opener=_open_private)  # noqa: SIM115 - for the caller to close
    log.write(f"=== {time.strftime('%Y-%m-%d %H:%M:%S')}{_HEADER}{file}\n".encode())
    log.flush()
    return log


def _write_netrc(path: Path, url: str, token: str) -> None:
    """With the user's own entries, which other libraries look for, such as wandb."""
    path.unlink(missing_ok=True)
    try:
        entries = Path(os.environ.get("NETRC") or "~/.netrc").expanduser().read_text()
    except (OSError, UnicodeDecodeError, RuntimeError):  # none, or no home
        entries = ""
    with open(path, "x", opener=_open_private) as file:
        file.write(entries + "\n")
        file.write(f"machine {urlsplit(url).hostname} login rollstream password {token}\n")


def _open_private(path: str, flags: int) -> int:
    descriptor = os.open(path, flags, 0o600)
    os.fchmod(descriptor, 0o600)  # it may have been there
    return descriptor


# -- in the generator's process


def main(file: str, payload: int, report: int) -> bool:
    """Calls the file's `run_rollout`, and reports how it ended. Returns whether it finished."""
    os.set_inheritable(report, False)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "httpx2", "aiohttp.access"):  # a line for every request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    end = GeneratorEnd(finished=True)
    try:
        with open(payload, "rb") as stream:
            data = msgspec.json.decode(stream.read())
        returned = run_file(Path(file), key="generator file").run_rollout(data)
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
            sys.stderr.write(text)
            line = f"{type(error).__name__}: {error}".replace("\n", " ")[:1000]
            end = GeneratorEnd(False, isinstance(error, ConfigError | DataError), line, text)
    with open(report, "wb") as stream:
        stream.write(msgspec.json.encode(end))
    return end.finished


if __name__ == "__main__":
    if not main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])):
        # What the generator file left behind must not keep a process that failed: the reaper ends it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    # Threads and processes that `run_rollout` began and did not wait for go on to their end, as in slime.
