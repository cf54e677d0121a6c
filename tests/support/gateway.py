"""`rollstream gateway serve` as a process, on the demo model's tokenizer and a stub server's answers."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path

from rollstream.demo import MODEL_PATH
from tests.support.buffer import BufferProcess, ending

COMMAND = [sys.executable, "-m", "rollstream.cli", "gateway", "serve", "--json"]


class GatewayProcess(BufferProcess):
    """As a buffer's process: asked, killed and stopped in the same way."""

    def __init__(self, folder: Path, engine: str, *words: str, port: int = 0) -> None:
        self.folder = folder
        settings = [
            f"actor_rollout_ref.model.path={MODEL_PATH}",
            "actor_rollout_ref.rollout.name=sglang",
            f"actor_rollout_ref.rollout.server_urls=[{engine}]",
            f"trainer.default_local_dir={folder}",
        ]
        self.start([*COMMAND, "--port", str(port), *settings, *words], folder.with_name("gateway.log"))


def serve_gateway(
    folder: Path, engine: str, *words: str, port: int = 0
) -> AbstractContextManager[GatewayProcess]:
    """One that ends with the block."""
    return ending(GatewayProcess(folder, engine, *words, port=port))
