"""`command_agent`: a program as an agent loop, started once for each rollout, its calls recorded.

gateway.command=[python,my_agent.py]

OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ANTHROPIC_API_KEY     where its model is
ROLLSTREAM_ROW, ROLLSTREAM_RESULT, ROLLSTREAM_MODEL                        its task, and where its result goes
"""

import asyncio
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson

from rollstream.agent.base import AgentResources
from rollstream.aio import finish_despite_cancellation
from rollstream.config.settings import GatewaySettings
from rollstream.errors import AttemptTimeoutError, ConfigError, DataError
from rollstream.gateway.agents import (
    MODEL,
    AgentFailedError,
    Outcome,
    RecordedAgent,
    Shared,
    deciding,
    read_options,
    read_outcome,
    shared_endpoint,
)
from rollstream.gateway.sandbox import (
    ExitStatus,
    Sandbox,
    SandboxError,
    SandboxOptions,
    check_sandbox,
    named_path,
    program_environment,
)
from rollstream.redaction import names_secret
from rollstream.scratch import ScratchFolder, remove_folder
from rollstream.surrogates import decode_json

logger = logging.getLogger(__name__)

_RESULT_BYTES = 1 << 20
"""The size of a result, which is kept with the rollout."""

_LONGEST_SOCKET = 107
"""Bytes of a socket's path, see unix(7)."""

_SHOWN_CHARS = 1_200
"""The part of a program's output that a failure shows; its text has 2,000 characters."""

_LAST_LINE_CHARS = 200
"""The part of the output in a failure's first line, which a run's summary shows."""

_NOT_IN_NAMES = re.compile(r"[^\w.-]")


@dataclass(slots=True)
class _Programs(Shared):
    """The command and its sandbox, for all rollouts of one worker."""

    sandbox: SandboxOptions
    command: list[str]
    scratch: ScratchFolder
    workdirs: Path


class CommandAgent(RecordedAgent):
    """Runs `gateway.command` once for each rollout, in a folder of its own."""

    resumable = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.shared is None:
            self._check(self.settings)
        self._folder: Path | None = None
        self._output = ""
        self._done = False

    @staticmethod
    def _check(settings: GatewaySettings) -> SandboxOptions:
        if not settings.command:
            raise ConfigError(
                "agent loop command_agent needs gateway.command: a list of words, [python,my_agent.py]"
            )
        return SandboxOptions.of(settings)

    @classmethod
    def deciding_options(cls, options: Mapping[str, Any]) -> Mapping[str, Any]:
        names = ("outcome", "env", "sandbox", "image", "mounts", "network", "limits")
        return {"command": list(map(_named, read_options(options).command)), **deciding(options, *names)}

    @classmethod
    def build_shared(cls, resources: AgentResources, **options: Any) -> _Programs:
        settings = read_options(options)
        sandbox = cls._check(settings)
        check_sandbox(sandbox)
        command = [_absolute(word) for word in settings.command]
        path = program_environment(settings.pass_env)["PATH"]
        if sandbox.image is None and shutil.which(command[0], path=path) is None:
            raise ConfigError(f"gateway.command: there is no program {command[0]!r} on the PATH {path}")
        script = next((word for word in settings.command[1:] if not word.startswith("-")), "")
        if sandbox.image is None and script.endswith(".py") and not Path(script).expanduser().exists():
            raise ConfigError(f"gateway.command: there is no file {script} (looked in {Path.cwd()})")
        scratch = ScratchFolder("agents")
        socket = _socket_of(scratch.path / "8_chars_")
        if sandbox.kind != "none" and len(bytes(socket)) > _LONGEST_SOCKET:
            raise ConfigError(f"{socket} is too long a path for a socket: set TMPDIR to a shorter one")
        return _Programs(
            settings,
            shared_endpoint(resources, settings),
            sandbox,
            command,
            scratch,
            Path(options.get("workdirs", "workdirs")).expanduser().absolute(),
        )

    async def act(self, url: str, row: dict[str, Any]) -> Outcome:
        shared: _Programs = self.shared
        settings = shared.settings
        secret = url.rpartition("/")[2]
        try:
            self._folder = Path(tempfile.mkdtemp(dir=shared.scratch.path, prefix=""))
        except OSError as error:
            raise SandboxError(f"the program's folder could not be made: {error}") from error
        self.reward_info |= {
            "workdir": str(self._folder / "work"),
            "sandbox": msgspec.to_builtins(shared.sandbox),
        }
        async with AsyncExitStack() as stack:
            socket = None
            if shared.sandbox.kind != "none":
                socket = _socket_of(self._folder)
                stack.callback(socket.unlink, missing_ok=True)
                await stack.enter_async_context((await shared.endpoint.get()).listening_at(socket))
            passed = [os.environ.get(name, "") for name in settings.pass_env if names_secret(name)]
            secrets = [secret, *filter(None, passed)]
            sandbox = Sandbox(shared.sandbox, self._folder, secrets=secrets, socket=socket)
            return await self._run(sandbox, settings, url, secret, row)

    async def _run(
        self, sandbox: Sandbox, settings: GatewaySettings, url: str, secret: str, row: dict[str, Any]
    ) -> Outcome:
        where = urlsplit(url)
        inner = sandbox.start(f"http://{where.netloc}") + where.path
        form = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
        await sandbox.put("io/row.json", orjson.dumps(row, default=str, option=form))
        env = {
            **program_environment(settings.pass_env),
            **{name: "" if value is None else str(value) for name, value in settings.env.items()},
            "OPENAI_BASE_URL": f"{inner}/v1",
            "OPENAI_API_KEY": secret,
            "ANTHROPIC_BASE_URL": inner,
            "ANTHROPIC_API_KEY": secret,
            "ROLLSTREAM_MODEL": MODEL,
            "ROLLSTREAM_ROW": f"{sandbox.root}/io/row.json",
            "ROLLSTREAM_RESULT": f"{sandbox.root}/io/result.json",
        }
        ended = await sandbox.run(self.shared.command, env, settings.timeout)
        self._output, self.printed = ended.output, _words(ended)
        if ended.timed_out:
            raise AttemptTimeoutError(
                f"the program took longer than {settings.timeout:g} s (gateway.timeout){self.printed}"
            )
        outcome = await self._outcome(sandbox, settings, ended)
        self._done = True
        return outcome

    async def _outcome(self, sandbox: Sandbox, settings: GatewaySettings, ended: ExitStatus) -> Outcome:
        by_code = settings.outcome == "exit_code" and ended.code in (0, 1)
        if ended.code != 0 and not by_code:
            how = (
                f"ended with exit code {ended.code}"
                if ended.code > 0
                else f"was killed by signal {-ended.code}"
            )
            raise AgentFailedError(f"the program {how}{self.printed}")
        try:
            data = await sandbox.get("io/result.json", _RESULT_BYTES)
            outcome = Outcome()
            if data is not None:
                outcome = read_outcome(decode_json(data, orjson.loads)[0], "its result")
        except (orjson.JSONDecodeError, DataError, AgentFailedError) as error:
            raise AgentFailedError(f"the program's result cannot be used: {error}{self.printed}") from error
        if data is None and settings.outcome == "result":
            raise AgentFailedError(f"the program wrote no file ROLLSTREAM_RESULT{self.printed}")
        return msgspec.structs.replace(outcome, reward=float(ended.code == 0)) if by_code else outcome

    async def close(self) -> None:
        if self._folder is not None:
            await finish_despite_cancellation(asyncio.to_thread(self._put_away, self._folder))

    def _put_away(self, folder: Path) -> None:
        """Keeps the folder, or removes it. What goes wrong there is no fault of the rollout."""
        keep = self.settings.keep_workdir
        try:
            if keep == "always" or (keep == "failed" and not self._done):
                output = folder / "output.txt"
                output.touch(mode=0o600)
                output.write_text(self._output)
                workdirs: Path = self.shared.workdirs
                workdirs.mkdir(parents=True, exist_ok=True)
                target = workdirs / _NOT_IN_NAMES.sub("_", self.request_id)
                shutil.rmtree(target, ignore_errors=True)  # of the same attempt, before a resume
                shutil.move(folder, target)
        except (OSError, shutil.Error) as error:
            logger.warning("the folder of rollout %s could not be kept: %s", self.request_id, error)
        remove_folder(folder)


def _socket_of(folder: Path) -> Path:
    """The socket through which a program without a network asks."""
    return folder.with_name(f"gateway.{folder.name}")


def _words(ended: ExitStatus) -> str:
    if not ended.output:
        return "; it printed nothing"
    last = ended.output.rpartition("\n")[2].strip()[:_LAST_LINE_CHARS]
    return f": {last}\nthe end of its output:\n{ended.output[-_SHOWN_CHARS:]}"


def _absolute(word: str) -> str:
    """A word that names a file or folder where the run is started, by its whole path."""
    path = named_path(word)
    return word if path is None else str(path.absolute())


def _named(word: str) -> str:
    """A word as a run's identity has it: files by content, wherever they are."""
    path = named_path(word)
    if path is None:
        return word
    if path.is_file():
        return f"{path.name} {hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()}"
    return path.name
