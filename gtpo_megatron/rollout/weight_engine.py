"""The weight-transfer engine inside every vLLM worker, which receives the trainer's buckets by vLLM's update API."""

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.rollout.gpt_oss_weights import loadable
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.push.ends import open_receiver
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.receiver import WeightReceiver

BACKEND = "gtpo_megatron"
"""Name of the engine in vLLM."""

EPSILONS = ("variance_epsilon", "eps")
"""What vLLM calls the epsilon of a normalisation; the latter in a delta net's, which has a gate."""

ROTARY = "cos_sin_cache"
"""What vLLM's rotary embeddings have, and no other layer."""


@dataclass
class LinkInfo(WeightTransferInitInfo):
    """The connection.

    Attributes:
        link: the link to the trainer.
        workers: indices of this engine's workers in the link, by pipeline stage and tensor-parallel rank.
    """

    link: WeightLink
    workers: Sequence[int]


@dataclass
class PushInfo(WeightTransferUpdateInfo):
    """One push.

    Attributes:
        version: policy version.
        with_checksums: compute checksums of received tensors.
    """

    version: int
    with_checksums: bool


class LinkEngine(WeightTransferEngine[LinkInfo, PushInfo]):
    """Loads a model's weights from the trainer's buckets.

    vLLM's layerwise reload is used, because ``model.load_weights`` alone gives wrong weights on a CPU, where they are
    prepacked: the reload unpacks a layer before its weights arrive and repacks it afterwards. Until all weights of a
    layer have arrived, it holds them in full Hugging Face shapes: all experts of a layer at once.
    """

    init_info_cls = LinkInfo
    update_info_cls = PushInfo

    receiver: WeightReceiver | None = None
    arch: Architecture
    worker = -1
    version = -1

    def init_transfer_engine(self, init_info: LinkInfo) -> None:
        """Opens this worker's end of the link, and closes an earlier one."""
        self.shutdown()
        tensor, stages = get_tensor_model_parallel_world_size(), get_pp_group()
        if len(init_info.workers) != tensor * stages.world_size:
            raise WeightSyncError(
                f"the link has {len(init_info.workers)} workers for this engine, vLLM runs "
                f"{tensor * stages.world_size}; do rollout.tensor_parallel_size and pipeline_parallel_size match?"
            )
        self.worker = init_info.workers[stages.rank_in_group * tensor + get_tensor_model_parallel_rank()]
        arch = read_architecture(Path(self.model_config.model))
        self.arch = arch
        self.receiver = open_receiver(init_info.link, self.worker, arch, torch.device(self.device))

    def start_weight_update(self) -> None:
        """Prepares the model for new weights."""
        if not torch.cuda.is_available():
            _forget_expert_kernels(self.model)
        _name_loaders(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Loads every tensor; vLLM's own version synchronises with an accelerator."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def receive_weights(self, update_info: PushInfo) -> None:
        """Loads every tensor when it is complete."""
        assert self.receiver is not None, "init_weight_transfer_engine comes first"
        self.version = -1
        tensors = self.receiver.tensors(with_checksums=update_info.with_checksums)
        if self.arch.has_sinks:
            tensors = loadable(tensors, self.model, get_tensor_model_parallel_rank())
        self.model.load_weights(tensors)
        self.version = update_info.version

    def receive_adapters(self, version: int, with_checksums: bool) -> dict[str, torch.Tensor]:
        """Receives adapters that travel alone, by peft's names."""
        assert self.receiver is not None, "init_weight_transfer_engine comes first"
        self.version = -1
        found = dict(self.receiver.tensors(with_checksums=with_checksums))
        check_settings(self.model, self.arch)
        self.version = version
        return found

    def finish_weight_update(self) -> None:
        """Post-processes the loaded weights (prepacking, quantisation)."""
        finalize_layerwise_reload(self.model, self.model_config)
        _process_tied_layers(self.model)
        check_settings(self.model, self.arch)

    def shutdown(self) -> None:
        """Closes this worker's end."""
        if self.receiver is not None:
            self.receiver.close()
            self.receiver = None

    def checksums(self) -> dict[str, int]:
        """Checksums of the tensors that the last push delivered, before vLLM loads them."""
        return {} if self.receiver is None else self.receiver.checksums


def check_settings(model: torch.nn.Module, arch: Architecture) -> None:
    """Checks settings of vLLM's layers that no weight carries and that rounding may hide.

    Args:
        model: vLLM's model.
        arch: architecture in the model folder, which the trainer is built from.

    Raises:
        WeightSyncError: a normalisation has another epsilon, or a rotary embedding another base.
    """
    for name, layer in model.named_modules():
        settings = dict.fromkeys(EPSILONS, arch.norm_eps) | (
            {"base": _theta_of(name, arch)} if hasattr(layer, ROTARY) else {}
        )
        for attribute, wanted in settings.items():
            found = getattr(layer, attribute, wanted)
            if found != wanted:
                raise WeightSyncError(
                    f"vLLM's layer {name} has {attribute}={found!r}, the trainer {wanted!r}; both read them from the "
                    f"model folder: has its config.json changed since one of them started?"
                )


def _theta_of(name: str, arch: Architecture) -> float:
    """Base of the rotary embedding of a layer of vLLM's; layers with the same one share it, under the first's name."""
    number, local = re.search(r"\blayers\.(\d+)\.", name), arch.local_rope
    if local is not None and number is not None and local.layers[int(number[1])]:
        return local.theta
    return arch.rope_theta


def _name_loaders(model: torch.nn.Module) -> None:
    """Names partial functions, of which MiniMax M2's norms have one: vLLM's reload asks loaders for their names."""
    for parameter in model.parameters():
        loader = getattr(parameter, "weight_loader", None)
        if isinstance(loader, functools.partial):
            vars(loader)["__name__"] = loader.func.__name__


def _forget_expert_kernels(model: torch.nn.Module) -> None:
    """Makes vLLM's CPU build prepack experts again when they are reloaded.

    It prepacks them in the hook that makes a layer's kernel, and a kernel that is there already is not made again
    (vLLM 0.32): the new weights would lie unpacked where the kernel expects packed ones. On a GPU the conversion is
    rerun whether or not there is a kernel.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _process_tied_layers(model: torch.nn.Module) -> None:
    """Processes layers again that share another layer's weight, such as the output layer of tied embeddings.

    No weights arrive under such a layer's own name, so vLLM's reload skips it, and its prepacked copy on a CPU would
    keep the old weights.
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
    """Registers the engine with vLLM; a second call does nothing."""
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, LinkEngine)
