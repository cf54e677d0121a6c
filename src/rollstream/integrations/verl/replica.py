"""rollstream's engines as one of verl's rollout backends: `actor_rollout_ref.rollout.name=rollstream`.

Imported where verl is. Servers are not verl's to start or to place: they run where their URLs say.
"""

import os
import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import ray
import torch
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from rollstream.errors import ConfigError
from rollstream.integrations.verl.server import ReplicaServer, ServerOptions

_REQUESTS_AT_ONCE = 100_000
"""Of a proxy: whoever sends requests bounds them, and one that is full must not deadlock its own control."""

_KEPT_WEIGHTS = 2
"""Folders of weights: the servers may still read the one before the last."""


class RollstreamReplica(RolloutReplica):  # type: ignore[misc]
    """A proxy before the servers at `rollout.custom.urls`; takes no GPU, wherever verl would place it."""

    async def init_standalone(self) -> None:
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def init_colocated(self, resource_pool: Any) -> None:
        self.rollout_mode = RolloutMode.COLOCATED
        self.resource_pool = resource_pool
        await self.launch_servers()

    async def launch_servers(self) -> None:
        options = ServerOptions.read(self.config, str(self.model_config.path))
        actor: Any = (
            ray.remote(ReplicaServer)
            .options(
                name=server_name(self.replica_rank),
                num_cpus=0,
                max_restarts=-1,
                max_concurrency=_REQUESTS_AT_ONCE,
            )
            .remote(options.lengths, options=options)
        )
        self.servers = [actor]  # before it is up: who is cut off here has to end it
        self._server_handle = actor
        await actor.start.remote()
        url = options.urls[self.replica_rank % len(options.urls)]
        # verl knows servers by their addresses, which must differ.
        self._server_address = url if self.replica_rank < len(options.urls) else f"{url}#{self.replica_rank}"


class RollstreamRollout(BaseRollout):  # type: ignore[misc]
    """Gives the servers the weights of a trainer, by a folder that both can read.

    Needs `rollout.custom.weights_dir` where training and servers share a file system. All ranks have to call
    it: gathering a sharded tensor takes them all. Rank 0 writes.
    """

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, model_config, device_mesh)
        self._rank = int(os.environ.get("RANK", "0"))
        self._updates = 0
        self._written: list[Path] = []
        """Folders of weights that this trainer wrote and has not deleted, in the order of writing."""

    async def resume(self, tags: list[str]) -> None:
        pass  # the servers look after their memory themselves

    async def release(self) -> None:
        pass

    async def update_weights(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Writes the weights and lets all servers load them, as version `global_steps`."""
        if wire_format != "named_tensors":
            raise ConfigError(f"rollout rollstream takes whole weights, not {wire_format!r}")
        tensors = {}
        for name, tensor in weights:
            if self._rank == 0:
                tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._updates += 1
        if self._rank != 0:
            return
        version = self._updates if global_steps is None else int(global_steps)
        folder = self._write(tensors, version)
        server: Any = ray.get_actor(server_name(0))
        await server.update_weights.remote(str(folder), version)
        self._delete_old()

    def _delete_old(self) -> None:
        """Deletes what no server needs any more, also what an earlier start of the trainer left.

        By the order of writing: a trainer that goes back to a checkpoint writes lower versions than it left.
        """
        self._written = self._written[-_KEPT_WEIGHTS:]
        for folder in self._written[-1].parent.glob("version-*"):
            if folder not in self._written:
                shutil.rmtree(folder, ignore_errors=True)

    def _write(self, tensors: dict[str, torch.Tensor], version: int) -> Path:
        from safetensors.torch import save_file

        root = (self.config.custom or {}).get("weights_dir")
        if not root:
            raise ConfigError(
                "training with rollout.name=rollstream needs a folder that the servers can read: "
                "'+actor_rollout_ref.rollout.custom.weights_dir=/shared/weights'"
            )
        folder = Path(root).expanduser().absolute() / f"version-{version:09d}"
        folder.mkdir(parents=True, exist_ok=True)
        self._written = [*(one for one in self._written if one != folder), folder]
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        source = Path(self.model_config.local_path)
        for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            if (source / name).is_file():
                shutil.copy2(source / name, folder / name)
        return folder


def server_name(rank: int) -> str:
    """The name of a replica's actor, within the namespace of a training."""
    return f"rollstream_server_{rank}"
