"""Workers as processes of this machine.

    driver: WorkItems --socket--> process: WorkerHost (row, agent loop, engine, reward, encoding)
            WorkerReports <------

Frames are a length of four bytes and a pickle; both ends are the same program, and the socket is a pair that
the child inherits. A process ends when its driver does: its socket is at its end, and the kernel kills it
(PR_SET_PDEATHSIG) should its event loop be held up.
"""

import asyncio
import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import Any

from rollstream.engine.reaped import path_to_rollstream
from rollstream.errors import RollstreamError
from rollstream.rollout.supervisor import WorkerLostError
from rollstream.rollout.worker_host import WorkerHost, WorkerPlace, WorkerRecipe, WorkerReport, WorkItem

_LINGER_S = 0.002
"""How long a result waits for company: a report costs some 50 us at both ends."""

_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 4


class ProcessBackend:
    """Makes workers that are processes of this machine; see `WorkerBackend`."""

    shares_files = True
    """Whether workers can read the files that the driver reads."""

    def spawn(self, recipe: WorkerRecipe, number: int) -> "ProcessWorker":
        """A new worker, not started."""
        return ProcessWorker(recipe, number)

    async def waits_for_room(self, handle: Any) -> bool:
        """Never: a machine takes any number of processes."""
        return False

    def describe_room(self) -> str:
        """For messages."""
        return "its process does not answer"


class ProcessWorker:
    """The driver's end of one process; see `WorkerHandle`."""

    def __init__(self, recipe: WorkerRecipe, number: int) -> None:
        self._recipe = recipe
        self._number = number
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> int:
        """Starts the process; returns its id when its worker is ready."""
        ours, theirs = socket.socketpair()
        try:
            self._process = await asyncio.create_subprocess_exec(
                # -P: what lies in the working directory does not shadow modules.
                *(sys.executable, "-P", "-m", "rollstream.rollout.processes", str(theirs.fileno())),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=2,  # standard output is the driver's, for its result
                pass_fds=[theirs.fileno()],
                env=os.environ | path_to_rollstream(),
                start_new_session=True,  # Ctrl-C is the driver's to handle
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        place = WorkerPlace.here()
        await self._send(place)  # first: the recipe may be a module's that is found by it
        await self._send((self._recipe, self._number))
        ready = await self._receive()
        assert isinstance(ready, int)
        return ready

    async def give(self, items: Sequence[WorkItem]) -> None:
        """Hands rollouts over."""
        await self._send(("give", items))

    async def reports(self) -> AsyncGenerator[WorkerReport, None]:
        """What the worker says. Raises what ended it."""
        while True:
            report = await self._receive()
            assert isinstance(report, WorkerReport)
            yield report

    def follow(self, urls: Sequence[str]) -> None:
        """The engine's servers are others now."""
        self._write(("follow", urls))

    def drop(self) -> None:
        """Cuts off what is in flight."""
        self._write(("drop", None))

    async def close(self) -> None:
        """Has the worker release what it has, and waits for its end."""
        await self._send(("close", None))
        assert self._process is not None
        await self._process.wait()

    def kill(self) -> None:
        """Ends the process now."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
            if self._writer is not None:
                self._writer.close()

    def _write(self, message: object) -> asyncio.StreamWriter:
        assert self._writer is not None, "start() first"
        self._writer.write(_frame(message))
        return self._writer

    async def _send(self, message: object) -> None:
        try:
            await self._write(message).drain()
        except OSError as error:
            raise WorkerLostError(await self._how_it_ended()) from error

    async def _receive(self) -> object:
        try:
            header = await self._reader.readexactly(_LENGTH_BYTES)
            message = pickle.loads(await self._reader.readexactly(int.from_bytes(header, "little")))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise WorkerLostError(await self._how_it_ended()) from error
        if isinstance(message, BaseException):
            raise message
        return message

    async def _how_it_ended(self) -> str:
        assert self._process is not None
        code = await self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"its process ended ({how})"


def _frame(message: object) -> bytes:
    body = pickle.dumps(message, protocol=5)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def _frame_of_error(error: BaseException) -> bytes:
    """An error as it was raised here; one that does not travel, by its text."""
    error.add_note("".join(traceback.format_exception(error))[-4000:])
    try:
        body = pickle.dumps(error, protocol=5)
        pickle.loads(body)
    except Exception:
        return _frame(RollstreamError(f"{type(error).__name__}: {error}"))
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def _serve(number_of_socket: int) -> None:
    """The process: does what the driver sends, until its end."""
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=number_of_socket))

    async def receive() -> Any:
        header = await reader.readexactly(_LENGTH_BYTES)
        return pickle.loads(await reader.readexactly(int.from_bytes(header, "little")))

    place = await receive()
    place.take()
    recipe, number = await receive()
    host = WorkerHost(recipe, number, place, linger_s=_LINGER_S)
    try:
        pid = await host.start()
    except Exception as error:
        writer.write(_frame_of_error(error))
        await writer.drain()
        return
    writer.write(_frame(pid))

    async def report() -> None:
        try:
            async for one in host.reports():
                writer.write(_frame(one))
                await writer.drain()
        except Exception as error:
            writer.write(_frame_of_error(error))

    reporting = asyncio.create_task(report())
    with suppress(asyncio.IncompleteReadError, ConnectionError):  # the driver has ended
        while True:
            order, argument = await receive()
            if order == "close":
                break
            await getattr(host, order)(*(() if argument is None else (argument,)))
    reporting.cancel()
    await host.close()


def main() -> None:
    """The process's program: the socket's number is its argument."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    asyncio.run(_serve(int(sys.argv[1])))
    sys.stderr.flush()
    os._exit(0)  # threads of hanging user functions keep nobody waiting


if __name__ == "__main__":
    main()
