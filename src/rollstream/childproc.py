"""Python processes of ours that are asked and answer: the one way to talk to a child process.

    parent: Child ==socket pair==> child: `function(fd)`, which makes a `Channel` or a `Parent` of it

A frame is a length of four bytes and a body, msgpack or, where objects have to travel, pickle: both ends are
this program, and nobody else has the socket. A child ends with its parent: its socket is at its end, and the
kernel kills it (PR_SET_PDEATHSIG) whatever it is doing. (To the kernel the parent is the thread that started
it.) It has a session of its own, so that Ctrl-C is the parent's to handle.

A time limit is faulthandler's, which also works while a function holds the GIL: it writes where every thread
is and ends the process. That text, or the one of a fatal signal, comes where a length is expected. Read as a
length it is more than `MAX_BYTES`, which no frame has.
"""

import asyncio
import ctypes
import faulthandler
import importlib
import os
import pickle
import select
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from rollstream.aio import finish_despite_cancellation
from rollstream.errors import RollstreamError

MAX_BYTES: Final = 1 << 30
"""Of a frame; below what the first letters of a text are as a length."""

_LENGTH_BYTES = 4
_PART = 1 << 20
"""Bytes that are written at once: asyncio copies what a socket does not take."""

_PR_SET_PDEATHSIG = 1


class ChildDiedError(RollstreamError):
    """A child has ended, or cannot be reached any more.

    Args:
        message: how it ended, in one line.
        text: what faulthandler wrote, if it did.
        blameless: its machine went, too: nothing that the child did can have caused it.
    """

    def __init__(self, message: str, *, text: str = "", blameless: bool = False) -> None:
        super().__init__(message)
        self.text, self.blameless = text, blameless


class Codec(NamedTuple):
    """How messages are bytes."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


PICKLE = Codec(lambda message: pickle.dumps(message, protocol=5), pickle.loads)
"""An exception that arrives is raised."""


def packed(kind: Any) -> Codec:
    """Msgpack; what arrives is of `kind`."""
    return Codec(msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(kind).decode)


class Channel:
    """One end of the socket in an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, codec: Codec) -> None:
        self._reader, self._writer, self._codec = reader, writer, codec
        self._sending = asyncio.Lock()

    @classmethod
    async def over(cls, end: socket.socket | int, codec: Codec = PICKLE) -> "Channel":
        """Takes a socket over, or the number of one."""
        end = socket.socket(fileno=end) if isinstance(end, int) else end
        return cls(*await asyncio.open_connection(sock=end, limit=4 * _PART), codec)

    def post(self, message: object) -> None:
        """Sends a message without waiting for room."""
        body = self._codec.encode(message)
        self._writer.write(len(body).to_bytes(_LENGTH_BYTES) + body)

    async def send(self, message: object) -> None:
        """Sends a message. Raises `OSError` when nobody reads any more."""
        body = memoryview(self._codec.encode(message))
        if len(body) > MAX_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is too large")
        async with self._sending:  # one message after the other: it waits between its parts
            self._writer.write(len(body).to_bytes(_LENGTH_BYTES))
            for start in range(0, len(body), _PART):
                self._writer.write(body[start : start + _PART])
                await self._writer.drain()

    async def receive(self) -> Any:
        """Returns the next message.

        Raises:
            EOFError, OSError: the other end has gone; an `EOFError` may have faulthandler's text.
        """
        try:
            size = int.from_bytes(head := await self._reader.readexactly(_LENGTH_BYTES))
            if size > MAX_BYTES:
                raise EOFError((head + await self._reader.read()).decode(errors="replace"))
            message = self._codec.decode(await self._reader.readexactly(size))
        except asyncio.IncompleteReadError:
            raise EOFError("") from None
        if isinstance(message, BaseException):
            raise message
        return message

    def close(self) -> None:
        """The other end is told that nothing more comes."""
        self._writer.close()


class Child:
    """A process that is asked and answers. Made by `start`."""

    def __init__(self, process: Any, channel: Channel) -> None:
        self.process = process
        """What `spawn` gave."""
        self._channel = channel

    @classmethod
    async def start(
        cls,
        target: str,
        *words: str,
        codec: Codec = PICKLE,
        env: Mapping[str, str] | None = None,
        output: IO[bytes] | int = 2,
        spawn: Callable[..., Awaitable[Any]] | None = None,
    ) -> "Child":
        """Starts a process that calls a function.

        Args:
            target: `package.module:function`, called with its end of the socket (a file descriptor) and `words`.
            words: further arguments.
            codec: of the messages; what arrives here is decoded by it.
            env: the whole environment; None takes this process's.
            output: gets what the child prints.
            spawn: starts the words of a command, see `ReapedProcess.start`; None starts it as a child of this one.

        Raises:
            OSError: there is no descriptor or process for it.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            # First, so that no wait comes between the process and who ends it.
            channel = await Channel.over(ours, codec)
            # -P: what lies in the working directory does not shadow modules.
            command = [sys.executable, "-P", "-u", "-m", __name__, target, str(theirs.fileno()), *words]
            try:
                process = await (spawn or _spawn)(
                    command,
                    {**(os.environ if env is None else env), **path_to_rollstream()},
                    stdout=output,
                    stderr=output,
                    pass_fds=(theirs.fileno(),),
                )
            except BaseException:
                channel.close()
                raise
        return cls(process, channel)

    @property
    def pid(self) -> int:
        return int(self.process.pid)

    def post(self, message: object) -> None:
        """Sends a message without waiting; one to a child that has gone is lost, as `receive` says."""
        self._channel.post(message)

    async def send(self, message: object) -> None:
        """Sends a message. Raises `ChildDiedError`."""
        try:
            await self._channel.send(message)
        except OSError as error:
            raise ChildDiedError(await self._how_it_ended()) from error

    async def receive(self) -> Any:
        """Returns the next message. Raises `ChildDiedError`, or an exception that the child has sent."""
        try:
            return await self._channel.receive()
        except (EOFError, OSError) as error:
            raise ChildDiedError(await self._how_it_ended(), text=str(error)) from error

    async def ask(self, message: object, *, timeout: float | None = None) -> Any:
        """Sends a message and returns the next one. Raises `TimeoutError` too."""
        async with asyncio.timeout(timeout):
            await self.send(message)
            return await self.receive()

    async def close(self, grace: float) -> str:
        """Ends the child: it sees the end of its socket, and is killed after `grace` seconds. Says how it ended."""
        return await finish_despite_cancellation(self._close(grace))

    def kill(self) -> None:
        """Ends the child now. Idempotent."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self._channel.close()

    async def _close(self, grace: float) -> str:
        self._channel.close()
        try:
            async with asyncio.timeout(grace):
                await self.process.wait()
        except TimeoutError:
            self.kill()
        return await self._how_it_ended()

    async def _how_it_ended(self) -> str:
        return how_ended(await self.process.wait())


async def _spawn(words: Sequence[str], env: Mapping[str, str], **options: Any) -> Any:
    return await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, env=env, start_new_session=True, **options
    )


def path_to_rollstream() -> dict[str, str]:
    """Environment in which an interpreter finds the package where this one did."""
    here = str(Path(__file__).parent.parent)
    return {"PYTHONPATH": os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])}


def how_ended(code: int) -> str:
    """An exit code for people: `ended with exit code 1`, `was killed by SIGKILL`."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}"


# -- in the child


class Parent:
    """The child's end of the socket where there is no event loop. The process ends when the parent's end does."""

    def __init__(self, number: int, codec: Codec) -> None:
        self._socket, self._codec = socket.socket(fileno=number), codec
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._buffer = bytearray()

    def send(self, message: object) -> None:
        """Sends a message; waits for room."""
        body = self._codec.encode(message)
        if len(body) > MAX_BYTES:
            raise ValueError(f"a message of {len(body)} bytes is too large")
        try:
            self._socket.sendall(len(body).to_bytes(_LENGTH_BYTES))
            self._socket.sendall(body)
        except OSError:
            os._exit(0)

    def receive(self, *, wait: bool = True) -> list[Any]:
        """The messages that have arrived; with `wait`, at least one."""
        while True:
            while self._poll.poll(0):
                if not (data := self._socket.recv(_PART)):
                    os._exit(0)
                self._buffer += data
            messages, position = [], 0
            while len(self._buffer) >= (start := position + _LENGTH_BYTES):
                end = start + int.from_bytes(self._buffer[position:start])
                if len(self._buffer) < end:
                    break
                with memoryview(self._buffer) as view:
                    messages.append(self._codec.decode(bytes(view[start:end])))
                position = end
            del self._buffer[:position]
            if messages or not wait:
                return messages
            self._poll.poll()

    @contextmanager
    def at_most(self, seconds: float) -> Iterator[None]:
        """Ends the process when the block takes longer; the parent gets the stack of each thread."""
        faulthandler.enable(self._socket)
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._socket)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def portable(error: BaseException) -> BaseException:
    """An error with its traceback as a note; one that cannot travel, by its text."""
    error.add_note("".join(traceback.format_exception(error))[-4000:])
    try:
        pickle.loads(pickle.dumps(error, protocol=5))
    except Exception:
        return RollstreamError(f"{type(error).__name__}: {error}")
    return error


def main() -> None:
    """The program of a child: `TARGET SOCKET WORDS`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _, target, number, *words = sys.argv
    os.set_inheritable(int(number), False)
    sys.path.append(str(Path.cwd()))
    module, _, function = target.partition(":")
    getattr(importlib.import_module(module), function)(int(number), *words)


if __name__ == "__main__":
    main()
