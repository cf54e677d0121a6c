"""A server that is away when the trainer has new weights for it."""

import asyncio
import socket
import threading
from pathlib import Path

from rollstream.engine.sglang import SGLangEngine
from rollstream.testing.stub_server import StubServer
from rollstream.training import BatchesAhead, CallableGenerator, PlannedGroup, ShuffledPlan


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


class Server:
    """One in a thread of its own, as another process would be."""

    def __init__(self, port: int) -> None:
        self.up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(port)), daemon=True)
        self._thread.start()
        assert self.up.wait(60)

    async def _serve(self, port: int) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        async with StubServer(port=port):
            self.up.set()
            await self._stopped.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(60)
        assert not self._thread.is_alive()


def test_weights_reach_a_server_that_comes_back(tmp_path: Path) -> None:
    port = free_port()
    first = Server(port)
    engine = SGLangEngine([f"http://127.0.0.1:{port}"])

    async def generate(group: PlannedGroup) -> list[int]:
        return [group.index]

    generator = CallableGenerator(
        generate, start=engine.start, update_weights=engine.update_weights, close=engine.close
    )
    back: list[Server] = []
    with BatchesAhead(ShuffledPlan(8), generator, groups_per_step=2, weight_timeout=60.0) as batches:
        batches.trained(batches.next_batch(20).step)
        first.stop()
        later = threading.Timer(1.5, lambda: back.append(Server(port)))
        later.start()
        batches.update_weights(str(tmp_path))
        later.join()
        assert batches.engine_version == 1
        assert batches.next_batch(20).step == 1
    back[0].stop()
