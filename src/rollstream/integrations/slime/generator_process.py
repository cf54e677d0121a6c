"""One run of a generator: a process below a reaper, its payload, its report and its log.

    server --(pipe)--> reaper --> generator (`childproc`) --> what it starts

The reaper (`engine.reaper`) ends the generator and everything below it when the server is gone, SIGKILL
included: two generators of one job would write every group twice. The generator's token is in its environment.
"""

import asyncio
import functools
import inspect
import logging
import os
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import msgspec

from rollstream.childproc import Child, ChildDiedError, Codec, Parent, how_ended
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

    def __init__(self, child: Child, log: Path) -> None:
        self._child, self._log = child, log

    @property
    def pid(self) -> int:
        return self._child.pid

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
        with _open_log(log, file) as output:
            if token is not None:
                _write_netrc(netrc, str(data["remote_buffer_url"]), token)
                env |= {"ROLLSTREAM_BUFFER_TOKEN": token, "NETRC": str(netrc.absolute())}
            child = await Child.start(
                f"{__name__}:main",
                str(file.absolute()),
                codec=Codec(msgspec.json.encode, msgspec.json.Decoder(GeneratorEnd).decode),
                env=env,
                output=output,
                spawn=functools.partial(ReapedProcess.start, mark=mark),
            )
        child.post(data)
        return cls(child, log)

    async def wait(self) -> GeneratorEnd:
        """Returns when it has ended, and everything that it started. Called once."""
        code = await self._child.process.wait()
        try:
            end: GeneratorEnd = await self._child.receive()
        except ChildDiedError:  # it was killed before its report
            pass
        else:
            if code == 0 or not end.finished:
                return end
        finally:
            self._child.kill()  # which closes the socket
        # A reaper that gets SIGTERM ends with 0, too: only a report says that a generator has finished.
        words = await asyncio.to_thread(self._last_words)
        return GeneratorEnd(error=f"its process {how_ended(code)}", traceback=words)

    async def stop(self) -> None:
        """Ends it and everything it started, within seconds. May be called twice, and after its end."""
        await self._child.process.end()

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


def main(number: int, file: str) -> None:
    """Calls the file's `run_rollout`, and reports how it ended."""
    parent = Parent(number, Codec(msgspec.json.encode, msgspec.json.decode))
    (data,) = parent.receive()
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    for noisy in ("httpx", "httpx2", "aiohttp.access"):  # a line for every request
        logging.getLogger(noisy).setLevel(logging.WARNING)
    end = GeneratorEnd(finished=True)
    try:
        returned = run_file(Path(file), key="generator file").run_rollout(data)
        if inspect.iscoroutine(returned):
            asyncio.run(returned)
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code not in (None, 0):
            text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARS:]
            sys.stderr.write(text)
            line = f"{type(error).__name__}: {error}".replace("\n", " ")[:1000]
            end = GeneratorEnd(False, isinstance(error, ConfigError | DataError), line, text)
    parent.send(end)
    if not end.finished:
        # What the generator file left behind must not keep a process that failed: the reaper ends it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    # Threads and processes that `run_rollout` began and did not wait for go on to their end, as in slime.
