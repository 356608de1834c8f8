"""The extension of every vLLM worker: our weight-transfer engine, and calls of the driver.

vLLM imports this module by name in each worker process (``worker_extension_cls``); importing it registers the engine.
"""

import ctypes
import functools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed import get_pp_group
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.rollout import cpu_head, text_part_loader, weight_engine
from gtpo_megatron.rollout.entropy_log import EntropyLog
from gtpo_megatron.rollout.requests import ADAPTER_NUMBER
from gtpo_megatron.rollout.routing_capture import RoutingCapture
from gtpo_megatron.rollout.sampled_entropy import SampledEntropy, SampledEntropyOfSlots
from gtpo_megatron.supervision.worker import PR_SET_PDEATHSIG
from gtpo_megatron.weights.push.link import SharedSlots, SlotShape
from gtpo_megatron.weights.push.transports.shared_memory import create_slots, remove_name

weight_engine.register()
text_part_loader.register()


@functools.cache
def rotate_all_heads() -> None:
    """Lets vLLM's CPU build rotate heads that are an axis of their own, as multi-latent attention gives them.

    Its compiled kernel (vLLM 0.32) is right for ``[tokens, heads * head_size]``, and silently wrong for
    ``[tokens, heads, head_size]``. Stretched positions have a class of their own, which does not call it.
    """
    kernel = RotaryEmbedding.forward_cpu

    @functools.wraps(kernel)
    def forward_cpu(
        self: RotaryEmbedding, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.ndim == 2 or key is None:
            return kernel(self, positions, query, key)
        rotated = kernel(self, positions, query.flatten(1), key.flatten(1))
        return rotated[0].view(query.shape), rotated[1].view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu


@functools.cache
def route_as_one_group() -> None:
    """Lets vLLM's CPU build choose experts by sigmoids or with a bias where they are not grouped, as MiniMax M2's.

    It has both for groups alone (vLLM 0.32): without them it ends at sigmoids, and leaves a bias out silently.
    """
    initialise = CPURouter.__init__

    @functools.wraps(initialise)
    def with_a_group(self: CPURouter, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        is_plain = self.scoring_func == "softmax" and self.e_score_correction_bias is None
        if not (self.use_grouped_topk or is_plain or self.scoring_func == "sqrtsoftplus"):
            self.use_grouped_topk, self.num_expert_group, self.topk_group = True, 1, 1

    CPURouter.__init__ = with_a_group


if not torch.cuda.is_available():
    rotate_all_heads()
    route_as_one_group()
    cpu_head.install()


class WorkerExtension:
    """Methods that vLLM adds to its worker; called through ``collective_rpc``."""

    weight_transfer_engine: weight_engine.LinkEngine
    model_runner: Any
    rank: int
    _routing: RoutingCapture | None = None
    _slots: SharedSlots | None = None

    def gtpo_begin(self) -> None:
        """What a worker needs besides vLLM's own start.

        One that is a process of its own gets a process group of its own, but not another session: signals to the group
        of its engine's process, such as Ctrl-C, are for that process. The kernel ends it with that process, even if it
        waits for others in a collective: no other node's supervisor would.
        """
        if multiprocessing.parent_process() is not None:
            os.setpgid(0, 0)
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        runner = self.model_runner
        if not get_pp_group().is_first_rank and not torch.cuda.is_available():
            # what a stage takes from the one before it: vLLM makes it while it measures memory, which nobody does on
            # a CPU whose cache has a given size
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def gtpo_open_slots(self, workers: Sequence[int], shape: SlotShape) -> tuple[int, SharedSlots]:
        """Opens shared memory for a push on this worker's machine; returns its index in the link, too."""
        worker = workers[self.rank]
        self._slots = create_slots(shape)
        return worker, self._slots

    def gtpo_remove_slot_names(self) -> None:
        """Removes the slots' name, after all processes have mapped them."""
        if self._slots is not None:
            remove_name(self._slots)
            self._slots = None

    def gtpo_received_checksums(self) -> tuple[int, dict[str, int]]:
        """This worker's index, and the checksums of the tensors that the last push delivered."""
        return self.weight_transfer_engine.worker, self.weight_transfer_engine.checksums()

    def gtpo_policy_version(self) -> int:
        """Version of the weights of this worker."""
        return self.weight_transfer_engine.version

    def gtpo_receive_adapters(self, version: int, with_checksums: bool, settings: AdapterConfig) -> None:
        """Takes adapters that travel alone in the place of those before.

        vLLM has methods for folders only; this is what they do with the tensors of one.
        """
        tensors = self.weight_transfer_engine.receive_adapters(version, with_checksums)
        manager = self.model_runner.lora_manager
        inner = manager._adapter_manager
        alpha: Any = settings.scale * settings.rank  # vLLM says it is an integer, and divides it
        helper = PEFTHelper(r=settings.rank, lora_alpha=alpha, target_modules=list(settings.targets))
        mapper = getattr(inner.model, "hf_to_vllm_mapper", None)
        loaded = LoRAModel.from_lora_tensors(
            ADAPTER_NUMBER,
            tensors,
            helper,
            device="cpu",  # vLLM keeps them there, beside the copy in the layers
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        known = set(inner.modules) | {name for names in inner.packed_modules.values() for name in names}
        if lost := sorted(loaded.loras.keys() - known):
            raise WeightSyncError(f"vLLM has no layer for the adapters of {lost[0]} ({len(lost)} in all)")
        inner.remove_adapter(ADAPTER_NUMBER)
        inner.add_adapter(loaded)
        inner.activate_adapter(ADAPTER_NUMBER)

    def gtpo_take_entropies(self, responses: Sequence[int]) -> tuple[dict[int, list[float]], int] | None:
        """Entropies of finished responses and the number of logits; None from all workers but the first."""
        (log,) = self._entropy_logs()
        taken = log.take(responses)
        return (taken, log.vocab_size) if self.rank == 0 else None

    def gtpo_forget(self, responses: Sequence[int]) -> None:
        """Drops what is kept of aborted responses."""
        for log in self._entropy_logs():
            log.take(responses)
        if self._routing is not None:
            self._routing.forget(responses)

    def _entropy_logs(self) -> list[EntropyLog]:
        """One if the engine keeps entropies, else none; vLLM's two model runners hold their processors differently."""
        sampler = self.model_runner.sampler
        if hasattr(sampler, "logits_processors"):
            processors = sampler.logits_processors
        else:
            processors = self.model_runner.input_batch.logitsprocs.all
        return [found.log for found in processors if isinstance(found, SampledEntropy | SampledEntropyOfSlots)]

    def gtpo_capture_routing(self) -> None:
        """From now on this worker keeps the experts of every token whose request asks for it."""
        self._routing = RoutingCapture(self.model_runner)

    def gtpo_take_routing(self, responses: Sequence[int], num_tokens: Sequence[int]) -> list[torch.Tensor] | None:
        """Experts of finished responses; of the first worker, since all workers route alike.

        Args:
            responses: numbers of the responses.
            num_tokens: number of tokens that were run of each.
        """
        assert self._routing is not None, "gtpo_capture_routing comes first"
        taken = self._routing.take(responses, num_tokens)
        return taken if self.rank == 0 else None
