"""The end of weights that are sent over the network, in a worker of vLLM: its weight transfer engine `rollstream`.

vLLM loads this file by the entry point `vllm.general_plugins`; nobody else does. A server takes part in it with
`--weight-transfer-config '{"backend": "rollstream"}'`.

Source: `vllm/distributed/weight_transfer/base.py` and `vllm/v1/worker/gpu_worker.py` of vLLM 0.32.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rollstream.engine.weight_channel import checkpoint_tensors, find_difference
from rollstream.engine.weight_group import Transport, WeightGroup, address_facing, connect_to

NAME = "rollstream"


def register() -> None:
    """Called by vLLM in each of its processes, in some of them twice."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, Receiver)


@dataclass
class Announcement:
    """Tensors that are to come; and where the trainer waits, once it is told that they may."""

    tensors: dict[str, tuple[str, list[int]]]
    transport: Transport = "gloo"
    address: str = ""
    port: int = 0
    workers: int = 1
    timeout: float = 600.0


@dataclass
class Arrival:
    """Tensors that come now, in this order."""

    names: list[str]


class Receiver(WeightTransferEngine):  # type: ignore[misc]  # vLLM is not there to be checked
    """Compares, receives and loads."""

    init_info_cls = Announcement
    update_info_cls = Arrival

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: WeightGroup | None = None
        self._announced: Announcement | None = None
        self._parameters = {name for name, _ in model.named_parameters()}
        self._is_open = False
        """Between a start and its end. Whoever starts again has lost the trainer of before."""

    def init_transfer_engine(self, init_info: Announcement) -> None:
        """Compares tensors with the checkpoint's, before anything of the model is touched; or meets the trainer."""
        self.shutdown()
        self._announced = init_info
        if not init_info.address:
            tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
            own = self._own_tensors()
            if own and (problem := find_difference(init_info.tensors, own, tied=tied)):
                raise ValueError(problem)
            return
        parallel = self.parallel_config
        store = connect_to(init_info.address, init_info.port)
        address = address_facing(init_info.address, init_info.port)
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._group = WeightGroup(
            init_info.transport,
            store,
            address,
            rank=rank,
            size=init_info.workers + 1,
            timeout=init_info.timeout,
        )

    def start_weight_update(self) -> None:
        if self._is_open:  # parts of layers wait for the rest of tensors that never came
            finalize_layerwise_reload(self.model, self.model_config)
        self._is_open = True
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Does as the base, which knows no CPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Arrival) -> None:
        import torch

        if self._group is None or self._announced is None:
            raise RuntimeError("init_weight_transfer_engine comes first")
        # gloo would take tensors of a GPU, too, and copy them: vLLM does so while it loads them.
        device = "cpu" if self._announced.transport == "gloo" else self.device
        loaded: set[str] = set()
        try:
            with disable_mtp_completeness_check():  # layers come one by one
                for name in update_info.names:
                    dtype, shape = self._announced.tensors[name]
                    tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
                    self._group.broadcast(tensor)
                    done = self.model.load_weights([(name, tensor)])
                    loaded |= self._parameters if done is None else done
            if self.device.type != "cpu":
                torch.accelerator.synchronize()  # before the group ends
            # As vLLM's own loader, which knows no more of quantized models.
            missing = sorted(self._parameters - loaded)
            if missing and self.model_config.quantization is None:
                raise ValueError(f"{len(missing)} of its parameters got no weights, {missing[0]} first")
        finally:
            self.shutdown()  # the trainer of one that failed sees that at once

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        self._is_open = False
        # An output layer that is tied to the embedding gets no tensor, and so on a CPU vLLM would keep its packed
        # copy of the old one.
        for layer in self.model.modules():
            if isinstance(getattr(layer, "quant_method", None), UnquantizedEmbeddingMethod):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _own_tensors(self) -> dict[str, tuple[str, list[int]]]:
        """The checkpoint's; none where that is not on this machine (a bucket, say)."""
        model, folder = self.model_config.model, Path(self.model_config.model)
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            try:
                revision = self.model_config.revision
                folder = Path(snapshot_download(model, revision=revision, local_files_only=True))
            except (OSError, ValueError):
                return {}
        return checkpoint_tensors(folder)
