"""Sandboxes for an agent's program: a process of this machine, bubblewrap, a container.

    start --> put* --> run --> get*        one sandbox a rollout

    <root>/work    where the program starts        <root>/home   its HOME, empty
    <root>/io      its row and its result          <root>/tmp    its temporary folder

Each kind is a command line around the program's; all of them run below a reaper (`engine.reaper`), which holds
the limits and ends everything with its rollout. A kind is a `SandboxKind`, found by an entry point of
`rollstream.sandboxes`.
"""

import asyncio
import contextlib
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec

from rollstream import plugins
from rollstream.aio import finish_despite_cancellation
from rollstream.config.settings import GatewaySettings
from rollstream.engine import reaper
from rollstream.engine.reaped import ReapedProcess
from rollstream.errors import ConfigError, DataError, TransientError
from rollstream.gateway import inside
from rollstream.redaction import redact
from rollstream.scratch import ScratchFolder

logger = logging.getLogger(__name__)

_GRACE_S = 2.0
"""For a program that is ended early, to tidy up."""

_END_S = _GRACE_S + 8.0
"""For the reaper to have ended everything; then its process group is killed."""

_OUTPUT_BYTES = 8_192
"""The end of a program's output, which tells why it failed."""

_PORT = 8_383
"""The gateway's port inside a sandbox with a network of its own."""

_OPEN_FILES = 4_096

_NOBODY = 65_534
"""User and group of a sandboxed program where rollstream is root. The kernel lets its root write to /proc/sys
whatever capabilities it has given up, and in whatever user namespace."""

_DROPPING = ("SETUID", "SETGID", "SETPCAP", "DAC_READ_SEARCH")
"""Capabilities of root to go into that user's folder and become it, losing all of them."""

_COMMAND_S = 60.0
"""For one command of a container engine."""

_SEEN = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SEEN_OF_ETC = (
    *("alternatives", "ca-certificates", "group", "hosts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d"),
    *("localtime", "nsswitch.conf", "passwd", "resolv.conf", "terminfo"),
    *("ssl/certs", "ssl/cert.pem", "ssl/openssl.cnf", "pki/ca-trust", "pki/tls/certs", "pki/tls/cert.pem"),
)
"""bubblewrap shows these parts of the system. The rest of /etc may hold secrets, as /etc/ssl/private does."""

_PASSED = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|TERM")
"""A program gets these variables of rollstream's own environment."""


class SandboxError(TransientError):
    """A sandbox could not be started, for want of processes, memory or disk; it may be possible later."""


class SandboxOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which sandbox. Sizes in bytes, None is no limit."""

    kind: str = "none"
    image: str | None = None
    mounts: tuple[str, ...] = ()
    network: Literal["gateway", "host"] = "host"
    memory: int | None = None
    processes: int | None = None
    disk: int | None = None
    cpu: int | None = None

    @classmethod
    def of(cls, settings: GatewaySettings) -> "SandboxOptions":
        """Raises `ConfigError` for what cannot go together."""
        kind, network, limits = settings.sandbox, settings.network, settings.limits
        if kind == "none" and network == "gateway":
            raise ConfigError(
                "gateway.network=gateway: a program without a sandbox reaches whatever this machine does; set "
                "gateway.sandbox=bubblewrap, or one of containers"
            )
        if sandbox_kind(kind).is_container != (settings.image is not None):
            needed = f"gateway.sandbox={kind} needs gateway.image"
            raise ConfigError(needed if settings.image is None else f"gateway.image: {kind} takes none")
        if kind == "none" and settings.mounts:
            raise ConfigError("gateway.mounts: a program without a sandbox sees everything")
        return cls(
            kind=kind,
            image=settings.image,
            mounts=tuple(settings.mounts),
            network="host" if kind == "none" or network == "host" else "gateway",
            memory=limits.memory and limits.memory << 20,
            processes=limits.processes,
            disk=limits.disk and limits.disk << 20,
            cpu=limits.cpu,
        )


class ExitStatus(msgspec.Struct, frozen=True):
    """How a command ended."""

    code: int
    """Its exit code; below 0 the signal that killed it."""
    output: str
    """The end of what it wrote to stdout and stderr; no secrets that are known as such."""
    timed_out: bool = False


@dataclass(frozen=True, slots=True)
class SandboxKind:
    """A kind of sandbox: an entry point of `rollstream.sandboxes`."""

    wrap: "Callable[[Sandbox, Sequence[str], Mapping[str, str]], tuple[list[str], Mapping[str, str]]]"
    """The words around a command, and the environment of the outermost one."""
    check: Callable[[SandboxOptions], None] = lambda options: None
    """Tries whether there can be one on this machine. Raises `ConfigError`."""
    is_container: bool = False
    """Has an image; the engine of its name, and no reaper, holds its limits and ends it by `rm -f`."""
    own_processes: int = 0
    """Of the sandbox itself."""


def sandbox_kind(name: str) -> SandboxKind:
    """The kind of a name. Raises `ConfigError`."""
    kind: SandboxKind = plugins.load("rollstream.sandboxes", name)
    return kind


class Sandbox:
    """Runs the programs of one rollout on this machine. Paths of files are relative to `root`.

    Args:
        options: which.
        root: its folder; what is missing in it is made.
        work: another folder than `work` in it to start in.
        secrets: what no output shows.
        socket: of the gateway; None: it is not to be reached.
    """

    def __init__(
        self,
        options: SandboxOptions,
        root: Path,
        *,
        work: Path | None = None,
        secrets: Sequence[str] = (),
        socket: Path | None = None,
    ) -> None:
        self.root = str(root)
        self._options = options
        self._root = root
        self._work = work or root / "work"
        self._secrets = secrets
        self._socket = socket
        self._name = f"rollstream-{uuid4().hex[:16]}"
        self._kind = sandbox_kind(options.kind)
        self._user, self._group = os.getuid(), os.getgid()
        if self._user == 0 and options.kind != "none":
            self._user = self._group = _NOBODY

    @property
    def _own_network(self) -> bool:
        return self._options.network == "gateway"

    def start(self, gateway: str | None) -> str:
        """Makes its folders.

        Args:
            gateway: `http://host:port` of the gateway; None: nothing is to be reached.

        Returns:
            The gateway's `http://host:port` as a program inside reaches it.
        """
        self._make_folders()
        return f"http://127.0.0.1:{_PORT}" if self._own_network else gateway or ""

    def _make_folders(self) -> None:
        for name in ("work", "io", "home", "tmp"):
            (self._root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._hand_over(self._root / name)
        self._hand_over(self._work)
        if self._socket is not None:
            self._hand_over(self._socket)

    def _hand_over(self, file: Path | int) -> None:
        """Makes a file or folder of rollstream's the program's."""
        if self._user != os.getuid():
            os.chown(file, self._user, self._group)

    async def run(self, command: Sequence[str], env: Mapping[str, str], seconds: float | None) -> ExitStatus:
        """Runs a command in `work` to its end or for some seconds; nothing that it started is left then."""
        own = {**env, "HOME": f"{self.root}/home", "TMPDIR": f"{self.root}/tmp", "PYTHONUNBUFFERED": "1"}
        if self._socket is not None and (self._own_network or self._kind.is_container):
            port = str(_PORT if self._own_network else 0)
            python = "python3" if self._options.image is not None else sys.executable
            # `_mounts` shows it what its command names: the socket, too.
            command = [python, "-I", "-S", inside.__file__, str(self._socket), port, *command]
        words, outer = self._kind.wrap(self, command, own)
        try:
            # A pipe of our own: for asyncio's a process has not ended while daemons of it have the other end.
            output, inner_output = os.pipe()
            try:
                process = await ReapedProcess.start(
                    *(words, outer),
                    bounds=self._bounds(),
                    stdout=inner_output,
                    stderr=inner_output,
                    cwd=self._work,
                )
            except BaseException:
                os.close(output)
                raise
            finally:
                os.close(inner_output)
        except OSError as error:
            raise SandboxError(f"the program could not be started: {error}") from error
        tail = bytearray()
        reading = asyncio.create_task(_read_end(output, tail))
        timed_out = False
        try:
            async with asyncio.timeout(seconds):
                await process.wait()
        except TimeoutError:
            timed_out = True
        finally:
            code = await finish_despite_cancellation(self._end(process, reading))
        return ExitStatus(code, self._shown(tail), timed_out)

    def _bounds(self) -> reaper.Bounds:
        options = self._options
        # What a container starts is not below the reaper, but its folders are here.
        own: dict[str, Any] = {"memory": options.memory, "cpu": options.cpu, "files": _OPEN_FILES}
        own["processes"] = options.processes and options.processes + self._kind.own_processes
        return reaper.Bounds(
            grace=_GRACE_S,
            disk=options.disk,
            folder=self.root,
            **({} if self._kind.is_container else own),
        )

    async def _end(self, process: ReapedProcess, reading: "asyncio.Task[None]") -> int:
        code = await process.end(_END_S)
        if self._kind.is_container:
            await _quietly(self._options.kind, "rm", "-f", self._name)
        await asyncio.wait([reading], timeout=_GRACE_S)
        reading.cancel()
        return code

    def _shown(self, tail: bytearray) -> str:
        text = bytes(tail).decode(errors="replace").strip()
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return str(redact(text))

    async def put(self, path: str, data: bytes) -> None:
        """Writes a file, in place of what was there. Raises `SandboxError`: it cannot, for want of disk, say."""
        try:
            await asyncio.to_thread(self._put, path, data)
        except OSError as error:
            raise SandboxError(f"{path} could not be written: {error}") from error

    def _put(self, path: str, data: bytes) -> None:
        with self._folder_of(path) as (folder, name):
            # Never through a link that a program has left there.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)
            file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
            with os.fdopen(file, "wb") as stream:
                self._hand_over(file)
                stream.write(data)

    async def get(self, path: str, most: int) -> bytes | None:
        """A file's content; None where there is none.

        Raises:
            DataError: what is there is no regular file of at most so many bytes, or behind a link.
        """
        return await asyncio.to_thread(self._get, path, most)

    def _get(self, path: str, most: int) -> bytes | None:
        try:
            with self._folder_of(path) as (folder, name):
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                with os.fdopen(file, "rb") as stream:
                    is_file = stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
                    data = stream.read(most + 1) if is_file else None
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{path} is no file that is read: {error.strerror}") from error
        if data is None or len(data) > most:
            raise DataError(f"{path} is no regular file of at most {most} bytes")
        return data

    @contextlib.contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[int, str]]:
        """The open folder of a path, reached over no link, and the last part."""
        *folders, name = Path(path).parts
        top = self._root
        if folders[:1] == ["work"]:
            top, folders = self._work, folders[1:]
        here = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            for one in folders:
                below = os.open(one, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
                os.close(here)
                here = below
            yield here, name
        finally:
            os.close(here)

    # What the kinds add. Each gives the words, and the environment of the outermost one.

    def _plain(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        return list(command), env

    def _bubblewrap(
        self, command: Sequence[str], env: Mapping[str, str]
    ) -> tuple[list[str], Mapping[str, str]]:
        words = ["bwrap", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if as_root := self._user != os.getuid():
            # A user namespace would know only one user. bwrap mounts as root, which opens each folder; then the
            # program becomes another user, and cannot come back: bwrap sets "no new privileges".
            words += ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
            words += ["--unshare-net"] if self._own_network else []
            words += [word for name in _DROPPING for word in ("--cap-add", f"CAP_{name}")]
        else:
            words += ["--unshare-all", *([] if self._own_network else ["--share-net"])]
        words += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
        words += ["--size", str(64 << 20), "--perms", "1777", "--tmpfs", "/dev/shm"]
        words += ["--dir", "/tmp", "--bind", f"{self.root}/tmp", "/tmp"]
        for path in _SEEN:
            if Path(path).is_symlink():
                words += ["--symlink", str(Path(path).readlink()), path]
            else:
                words += ["--ro-bind-try", path, path]
        for path in (*(f"/etc/{name}" for name in _SEEN_OF_ETC), sys.base_prefix, sys.prefix):
            words += [*_parents(path), "--ro-bind-try", path, path]
        for source, target, writable in self._mounts(command):
            words += [*_parents(target), "--bind" if writable else "--ro-bind", source, target]
        words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(self._work), "--"]
        if as_root:
            words += [shutil.which("setpriv") or "setpriv", "--clear-groups"]
            words += [f"--reuid={self._user}", f"--regid={self._group}"]
            words += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
        return [*words, *command], env

    def _docker(self, command: Sequence[str], env: Mapping[str, str]) -> tuple[list[str], Mapping[str, str]]:
        options = self._options
        assert options.image is not None
        words = [options.kind, "run", "--rm", "--name", self._name, "--entrypoint", command[0]]
        words += ["--network", "none" if self._own_network else "host", "--workdir", str(self._work)]
        words += ["--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        words += ["--tmpfs", "/tmp:size=64m"]
        if options.kind == "podman" and os.getuid() != 0:
            words += ["--userns", "keep-id"]
        words += ["--user", f"{self._user}:{self._group}", "--ulimit", "core=0"]
        for limit, name in ((options.memory, "memory"), (options.processes, "pids-limit")):
            words += [f"--{name}", str(limit)] if limit is not None else []
        for limit, name in ((options.disk, "fsize"), (options.cpu, "cpu")):
            words += ["--ulimit", f"{name}={limit}"] if limit is not None else []
        for source, target, writable in self._mounts(command):
            words += ["--mount", f"type=bind,src={source},dst={target}" + ("" if writable else ",readonly")]
        # By name alone, so that no argument list shows a value.
        inner = {name: value for name, value in env.items() if name != "PATH"}
        for name in inner:
            words += ["--env", f"{name}={env[name]}" if name == "HOME" else name]
        outer = {**os.environ, **inner, "HOME": os.environ.get("HOME", "/")}
        return [*words, options.image, *command[1:]], outer

    def _mounts(self, command: Sequence[str]) -> Iterator[tuple[str, str, bool]]:
        """Yields what a command sees besides the system: from, to, writable."""
        for word in dict.fromkeys(command[1:]):
            if word.startswith("/") and not word.startswith(self.root) and named_path(word) is not None:
                yield word, word, False
        for mount in self._options.mounts:
            yield read_mount(mount)
        for folder in (f"{self.root}/io", f"{self.root}/home", f"{self.root}/tmp", str(self._work)):
            yield folder, folder, True


def _parents(path: str) -> Iterator[str]:
    """Words for the folders above a mount, which bwrap itself makes for its own user alone."""
    for folder in reversed(Path(path).parents[:-1]):
        yield from ("--dir", str(folder))


async def _read_end(descriptor: int, tail: bytearray) -> None:
    """Reads all that a pipe gives, and keeps the end."""
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", buffering=0)
    )
    with contextlib.closing(transport):
        while data := await stream.read(1 << 16):
            tail += data
            del tail[:-_OUTPUT_BYTES]


async def _quietly(*words: str) -> None:
    """Runs a command of a container engine; what it says does not matter."""
    with contextlib.suppress(OSError, TimeoutError):
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(_COMMAND_S):
            await process.wait()


def named_path(word: str) -> Path | None:
    """The file or folder that a word of a command names; None where there is none."""
    path = Path(word).expanduser()
    try:
        return path if path.exists() else None
    except OSError:  # too long for a name, as a script for `sh -c` may be
        return None


def read_mount(mount: str) -> tuple[str, str, bool]:
    """`PATH`, `FROM:TO` or `FROM:TO:rw` as from, to, writable. Raises `ConfigError`."""
    source, _, rest = mount.partition(":")
    target, _, mode = rest.partition(":")
    path = Path(source).expanduser().absolute()
    if not path.exists():
        raise ConfigError(f"gateway.mounts: {mount}: there is no {path}")
    if mode not in ("", "ro", "rw") or not (target or "/").startswith("/"):
        raise ConfigError(f"gateway.mounts: {mount}: want PATH, FROM:/TO or FROM:/TO:rw")
    return str(path), target or str(path), mode == "rw"


def program_environment(names: Sequence[str] = ()) -> dict[str, str]:
    """The part of rollstream's own environment that a program gets: no secrets but those that are named.

    Raises:
        ConfigError: one that is named is not set.
    """
    if missing := [name for name in names if name not in os.environ]:
        raise ConfigError(f"gateway.pass_env: {missing[0]} is not set in rollstream's environment")
    env = {name: value for name, value in os.environ.items() if _PASSED.fullmatch(name) or name in names}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
    return env


def check_sandbox(options: SandboxOptions) -> None:
    """Tries whether there can be such sandboxes on this machine. Slow.

    Raises:
        ConfigError: says what is missing.
    """
    if sys.platform != "linux":
        raise ConfigError("programs of command_agent need Linux, which tells what they start")
    for mount in options.mounts:
        read_mount(mount)
    sandbox_kind(options.kind).check(options)


def _check_program(program: str, kind: str) -> None:
    if shutil.which(program) is None:
        raise ConfigError(
            f"gateway.sandbox={kind}: there is no program {program!r} on this machine: install {kind}, or set "
            "gateway.sandbox to another one"
        )


def _check_container(options: SandboxOptions) -> None:
    program = options.kind
    _check_program(program, program)
    said = _said([program, "image", "inspect", "--format", "ok", str(options.image)])
    if said is not None:
        raise ConfigError(f"gateway.image={options.image}: {program} has no such image ready: {said}")


def _check_bubblewrap(options: SandboxOptions) -> None:
    _check_program("bwrap", options.kind)
    with tempfile.TemporaryDirectory() as folder:
        sandbox = Sandbox(options, Path(folder))
        try:
            sandbox._make_folders()
            said = _said(sandbox._bubblewrap([sys.executable, "-I", "-S", "-c", ""], {})[0])
        except OSError as error:  # a root that has no other users
            said = str(error)
    if said is not None:
        raise ConfigError(
            f"gateway.sandbox=bubblewrap does not work on this machine (it says: {said}): it needs user "
            "namespaces, which containers and some systems forbid; under root setpriv, and a Python that "
            "everybody may run"
        )


NONE = SandboxKind(Sandbox._plain)
BUBBLEWRAP = SandboxKind(Sandbox._bubblewrap, _check_bubblewrap, own_processes=3)
CONTAINER = SandboxKind(Sandbox._docker, _check_container, is_container=True)


def _said(command: Sequence[str]) -> str | None:
    """Runs a command; its error output when it fails, else None."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_COMMAND_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip()[-500:] or f"exit code {done.returncode}"


async def run_in_sandbox(
    options: Mapping[str, Any],
    command: Sequence[str],
    *,
    folder: str | Path,
    files: Mapping[str, str | bytes] | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = 60.0,
) -> ExitStatus:
    """Runs a command as a reward does it: in the folder that a program has left, in such a sandbox as it had.

    Args:
        options: the reward's `extra_info["sandbox"]`.
        command: starts in the folder.
        folder: the reward's `extra_info["workdir"]`.
        files: by name, written into the folder before, in place of what is there.
        env: further environment variables.
        seconds: at most.
    """
    given = msgspec.convert(dict(options), SandboxOptions)
    with ScratchFolder("reward") as root:
        sandbox = Sandbox(given, root.path, work=Path(folder))
        sandbox.start(None)
        for name, content in (files or {}).items():
            await sandbox.put(f"work/{name}", content.encode() if isinstance(content, str) else content)
        return await sandbox.run(command, {**program_environment(), **(env or {})}, seconds)
