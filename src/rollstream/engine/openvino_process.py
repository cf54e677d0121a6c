"""The parent's side of one worker process: starts it, talks to it, notices when it dies."""

import asyncio
import os
from pathlib import Path

from rollstream.aio import finish_despite_cancellation
from rollstream.childproc import Child, ChildDiedError
from rollstream.engine.base import EngineLoad
from rollstream.engine.openvino_worker import FROM_WORKER, Add, Done, Load, Loaded, Orders, Results
from rollstream.errors import EngineError, EngineUnavailableError

_LAST_WORDS_BYTES = 2000
"""Of the log, to find its last line in; a longer line loses its beginning."""

_EXIT_TIMEOUT_S = 5.0
"""A worker whose input has ended goes at once, or after the step it is in; then it is killed."""


class WorkerProcess:
    """One life of the worker. Made by `start`, ended by `close` or by the worker's death."""

    def __init__(self, child: Child, log_path: Path, log_offset: int) -> None:
        self.cache_tokens = 0
        self.cause = ""
        """Why it is not alive any more; "" while it is."""
        self._child = child
        self._log_path = log_path
        self._log_offset = log_offset
        self._pending: dict[int, asyncio.Future[Done]] = {}
        self._loading: asyncio.Future[Loaded] | None = None
        self._orders = Orders([], [], [])
        self._flush_planned = False
        self._last: Results | None = None
        self._reader = asyncio.create_task(self._read_messages(), name="openvino-worker-messages")

    @classmethod
    async def start(cls, load: Load, *, log_path: Path, timeout_s: float) -> "WorkerProcess":
        """Starts a worker and waits until it can generate.

        Raises:
            EngineError: it cannot, with the cause and the name of its log, in one line.
        """
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            offset = log.tell()
            child = await Child.start("rollstream.engine.openvino_worker:main", codec=FROM_WORKER, output=log)
        worker = cls(child, log_path, offset)
        try:
            await worker.load_model(load, timeout_s=timeout_s)
        except EngineError as error:
            await worker.close()
            raise EngineError(
                f"engine 'openvino' cannot load {load.model_path}: {error} (its log: {log_path})"
            ) from error
        except BaseException:
            await worker.close()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def load(self) -> EngineLoad | None:
        """As it was when the last request ended; None before that."""
        last = self._last
        if last is None or self.cause:
            return None
        if not self._pending:
            return EngineLoad(0, 0, 0.0, preemptions=0)
        # Room for the longest answer is reserved for each request, so none is ever preempted.
        running, usage = min(last.running, len(self._pending)), max(0.0, min(1.0, last.kv_usage))
        return EngineLoad(running, min(last.waiting, len(self._pending)), usage, preemptions=0)

    async def load_model(self, load: Load, *, timeout_s: float) -> None:
        """Has the worker load a model, or other weights. Results that come after this are of those.

        Raises:
            EngineError: it cannot; what it had before goes on.
            EngineUnavailableError: the worker is dead, or dies, or takes too long and is killed: nobody would
                know which weights it has.
        """
        if self.cause:
            raise EngineUnavailableError(self.cause)
        self._loading = asyncio.get_running_loop().create_future()
        try:
            self._child.post(load)
            async with asyncio.timeout(timeout_s):
                loaded = await self._loading
        except TimeoutError:
            self.give_up(f"the worker process (pid {self.pid}) was not ready within {timeout_s:g} s")
            raise EngineUnavailableError(self.cause) from None
        finally:
            self._loading = None
        if loaded.error:
            raise EngineError(loaded.error)
        self.cache_tokens = loaded.cache_tokens

    async def run(self, add: Add) -> Done:
        """Answers one request. Cancelling this cancels it in the worker.

        Raises:
            EngineUnavailableError: the worker is dead, or dies.
        """
        if self.cause:
            raise EngineUnavailableError(self.cause)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._pending[add.id] = future
        self._orders.add.append(add)
        self._plan_flush()
        try:
            return await future
        except asyncio.CancelledError:
            if self._pending.pop(add.id, None) is not None:
                self._orders.cancel.append(add.id)
                self._plan_flush()
            raise

    def abort(self, number: int) -> None:
        """Makes `run` return soon with what was sampled."""
        if number in self._pending:
            self._orders.abort.append(number)
            self._plan_flush()

    def give_up(self, cause: str) -> None:
        """Kills the process; what is in flight ends with `EngineUnavailableError`. `close` it as well."""
        self._fail(cause)
        self._child.kill()

    async def close(self) -> None:
        """Ends the process, also when this is cancelled; what is in flight ends with `EngineUnavailableError`."""
        await finish_despite_cancellation(self._close())

    async def _close(self) -> None:
        self._fail("the engine was closed")
        await self._child.close(_EXIT_TIMEOUT_S)
        await self._reader

    def _plan_flush(self) -> None:
        # All orders of one turn of the event loop go in one write.
        if not self._flush_planned:
            self._flush_planned = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        orders, self._orders = self._orders, Orders([], [], [])
        if not self.cause:
            self._child.post(orders)

    async def _read_messages(self) -> None:
        """Hands messages to those who wait, until the worker is gone."""
        try:
            while True:
                message: Loaded | Results = await self._child.receive()
                if isinstance(message, Loaded):
                    if self._loading is not None and not self._loading.done():
                        self._loading.set_result(message)
                    continue
                self._last = message
                for done in message.done:
                    future = self._pending.pop(done.id, None)
                    if future is not None and not future.done():
                        future.set_result(done)
        except ChildDiedError as error:
            self._fail(f"the worker process (pid {self.pid}) {error}{self._last_words()}")

    def _fail(self, cause: str) -> None:
        """Ends what is in flight; the first cause counts."""
        self.cause = self.cause or cause
        pending, self._pending = self._pending, {}
        for future in (*pending.values(), self._loading):
            if future is not None and not future.done():
                future.set_exception(EngineUnavailableError(self.cause))

    def _last_words(self) -> str:
        """The last line that it wrote to its log, if any."""
        with self._log_path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_offset, size - _LAST_WORDS_BYTES))
            lines = log.read().decode(errors="replace").strip().splitlines()
        return f"; its last words in {self._log_path}: {lines[-1].strip()}" if lines else ""
