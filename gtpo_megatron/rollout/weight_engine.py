"""The weight-transfer engine inside every vLLM worker: takes the trainer's buckets through vLLM's own update API."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.architecture import read_architecture
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.receiver import WeightReceiver

BACKEND = "gtpo_megatron"
"""Name under which vLLM knows our engine."""


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """The connection.

    Attributes:
        link: to the trainer.
        workers: numbers of this engine's workers in the link, by tensor-parallel rank.
    """

    link: WeightLink
    workers: Sequence[int]


@dataclass
class PushInfo(WeightTransferUpdateInfo):
    """One push.

    Attributes:
        version: of the policy.
        with_checksums: take checksums of what arrives.
    """

    version: int
    with_checksums: bool


class LinkEngine(WeightTransferEngine[LinkInfo, PushInfo]):
    """Loads a model's weights from the trainer's buckets, while the trainer packs the next ones.

    Linear weights are prepacked on a CPU, so ``model.load_weights`` alone fails and leaves wrong weights behind: vLLM's
    layerwise reload unpacks a layer before its weights come and repacks it when it has them all.
    """

    init_info_cls = LinkInfo
    update_info_cls = PushInfo

    receiver: WeightReceiver | None = None
    worker = -1
    version = -1

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        """Opens this worker's end; a link that was open before is closed."""
        self.shutdown()
        size = get_tensor_model_parallel_world_size()
        if len(init_info.workers) != size:
            raise WeightSyncError(
                f"the link has {len(init_info.workers)} workers for this engine, vLLM runs {size}; does "
                f"rollout.tensor_parallel_size match?"
            )
        self.worker = init_info.workers[get_tensor_model_parallel_rank()]
        arch = read_architecture(Path(self.model_config.model))
        self.receiver = init_info.link.receiver(self.worker, arch, torch.device(self.device))

    def start_weight_update(self) -> None:
        """Makes the model ready to take new weights."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads every tensor. vLLM's own version waits for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: PushInfo) -> None:
        """Loads every tensor as it becomes whole."""
        assert self.receiver is not None, "init_weight_transfer_engine comes first"
        self.version = -1
        self.model.load_weights(self.receiver.tensors(with_checksums=update_info.with_checksums))
        self.version = update_info.version

    def finish_weight_update(self) -> None:
        """Post-processes the loaded weights (prepacking, quantisation)."""
        finalize_layerwise_reload(self.model, self.model_config)
        _process_tied_layers(self.model)

    def shutdown(self) -> None:
        """Closes this worker's end."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def checksums(self) -> dict[str, int]:
        """Of what the last push delivered. Whether vLLM loaded it well is for the log-prob gap to show."""
        return {} if self.receiver is None else self.receiver.checksums


def _process_tied_layers(model: torch.nn.Module) -> None:
    """Processes layers again whose weight is another layer's, such as the output layer of tied embeddings.

    No weights arrive under such a layer's own name, so vLLM's reload leaves it as it was: on a CPU its prepacked copy
    would go on answering from the old weights.
    """
    owners: set[int] = set()
    for layer in model.modules():
        method, weight = getattr(layer, "quant_method", None), getattr(layer, "weight", None)
        if not isinstance(method, QuantizeMethodBase) or not isinstance(weight, torch.Tensor):
            continue
        if weight.data_ptr() in owners:
            method.process_weights_after_loading(layer)
        owners.add(weight.data_ptr())


def register() -> None:
    """Makes the engine known to vLLM; a second call does nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, LinkEngine)
