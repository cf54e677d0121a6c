"""Every engine there is, started on the demo model."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import orjson

from rollstream.demo import MODEL_PATH
from rollstream.engine.base import Engine
from rollstream.engine.registry import create_engine
from rollstream.testing.scripted import ScriptedRequest
from rollstream.testing.stub_server import StubModel, StubServer
from rollstream.trajectory import Completion
from tests.compat.vllm_server import PYTHON as VLLM_PYTHON
from tests.compat.vllm_server import vllm_server
from tests.conformance.reference import Reference
from tests.support.until import PATIENCE_S
from tests.without_torch import without_torch

NAMES = ("openvino", "hf", "serve-sglang", "stub", "vllm-generate", "vllm-completions")

_KWARGS = {
    "openvino": {"num_threads": 1},
    "hf": {"num_threads": 1, "num_kv_blocks": 1024},  # a small cache, for speed
}


@asynccontextmanager
async def started(name: str, folder: Path, reference: Reference) -> AsyncIterator[Engine]:
    """An engine of that name, on the demo model.

    Args:
        name: one of `NAMES`.
        folder: for logs.
        reference: what the stub says is what it says.
    """
    async with AsyncExitStack() as stack:
        urls: list[str] = []
        kind = name
        if name.startswith("serve-"):
            urls = [stack.enter_context(_Served(folder / "serve.log")).url]
            kind = name.removeprefix("serve-")
        elif name.startswith("vllm-"):
            route = name.removeprefix("vllm-")
            server = await asyncio.to_thread(stack.enter_context, vllm_server(route, folder / "vllm.log"))
            urls, kind = [server.url], "vllm"
        elif name == "stub":

            async def rule(request: ScriptedRequest) -> Completion:
                return await reference.answer(request.prompt_ids, request.sampling)

            stub = await stack.enter_async_context(
                StubServer(rule, model=StubModel(str(MODEL_PATH), context_length=4096))
            )
            urls, kind = [stub.url], "sglang"
        engine = create_engine(
            kind,
            model_path=MODEL_PATH,
            server_urls=urls,
            engine_kwargs=_KWARGS.get(kind),
            log_dir=folder,
        )
        stack.push_async_callback(engine.close)
        await engine.start()
        yield engine


def missing(name: str) -> str | None:
    """Why an engine cannot be had here; None if it can."""
    if name.startswith("vllm-") and VLLM_PYTHON is None:
        return "needs vLLM: run `make test-vllm`"
    return None


class _Served:
    """`rollstream serve` with the demo model, in a process."""

    def __init__(self, log: Path) -> None:
        command = [sys.executable, "-m", "rollstream.cli", "serve", "--port", "0", "--json"]
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**without_torch(), "OMP_NUM_THREADS": "1"},
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, log.read_text()
        self.url: str = orjson.loads(line)["url"]

    def __enter__(self) -> "_Served":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE_S)
