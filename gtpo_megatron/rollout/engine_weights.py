"""The weights of an engine: the pushes that replace them, and the policy version that they have."""

from collections.abc import Sequence
from typing import Any

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.errors import RolloutError, WeightSyncError
from gtpo_megatron.rollout.in_flight import InFlight
from gtpo_megatron.rollout.requests import ADAPTER_NUMBER
from gtpo_megatron.weights.push.link import SharedSlots, SlotShape, WeightLink

UNUSABLE = -1
"""Policy version of an engine without weights, or after a failed push."""


class EngineWeights:
    """The weights in all workers of one engine.

    Args:
        llm: vLLM's ``LLM``.
        in_flight: the requests that a push meets.
        config: settings of the engine.
        adapter: adapters of the run; if they travel alone, the base's weights stay and pushes replace the adapters.
        are_policy: the weights that vLLM has loaded are those of policy version 0.

    Attributes:
        version: policy version of the weights; ``UNUSABLE`` if nothing may be sampled.
        lora: vLLM's ``LoRARequest`` for every request; None unless adapters travel alone.
    """

    def __init__(
        self, llm: Any, in_flight: InFlight, config: RolloutConfig, *, adapter: AdapterConfig, are_policy: bool
    ) -> None:
        self._llm = llm
        self._in_flight = in_flight
        self._config = config
        self._adapter = adapter
        self.version = UNUSABLE
        self.lora: Any = None
        if adapter.pushes_alone:
            from vllm.lora.request import LoRARequest

            # the tensors come by pushes; the path is for vLLM's own way
            self.lora = LoRARequest("policy", ADAPTER_NUMBER, "unused")
        elif are_policy:
            self._label(0)

    def check(self) -> None:
        """Raises RolloutError if there are no weights to sample from."""
        if self.version == UNUSABLE:
            raise RolloutError(
                "vLLM has no usable weights: nothing was pushed into an engine that waits for a push, or the last "
                "push failed half-way"
            )

    # ------------------------------------------------------------------------------------------------------- the link
    def open_slots(self, workers: Sequence[int], shape: SlotShape) -> dict[int, SharedSlots]:
        """Opens shared memory for this engine's workers, each on its own machine; by their indices in the link."""
        return dict(self._llm.collective_rpc("gtpo_open_slots", args=(list(workers), shape)))

    def remove_slot_names(self) -> None:
        """Removes the slots' names, after all processes have mapped them."""
        self._llm.collective_rpc("gtpo_remove_slot_names")

    def connect(self, link: WeightLink, workers: Sequence[int]) -> None:
        """Opens the link in every worker.

        Args:
            link: the link to the trainer.
            workers: indices of this engine's workers in it.
        """
        self._llm.collective_rpc(
            "init_weight_transfer_engine", kwargs={"init_info": {"link": link, "workers": list(workers)}}
        )

    # ------------------------------------------------------------------------------------------------------- the pushes
    def receive(self, version: int, *, with_checksums: bool) -> dict[int, dict[str, int]]:
        """Receives and loads weights from the trainer, and empties the prefix cache.

        Returns:
            By worker the checksum of every tensor that it received; empty without ``with_checksums``.

        Raises:
            WeightSyncError: the weights did not arrive, or vLLM could not load them; the engine is then unusable and
                must be replaced. Or requests in flight would become too stale; then nothing changes.
        """
        self._in_flight.check_push(version, max_staleness=self._config.max_staleness)
        self.version = UNUSABLE
        try:
            self._load_push(version, with_checksums=with_checksums)
        except Exception as error:
            raise WeightSyncError(f"vLLM could not load policy version {version}: {error}") from error
        versions = self._llm.collective_rpc("gtpo_policy_version")
        if set(versions) != {version}:
            raise WeightSyncError(f"vLLM workers report policy versions {versions} after a push of {version}")
        # requests in flight recompute their keys and values with the new weights
        self.forget_prefixes(with_running=self._config.partial)
        self._label(version)
        return dict(self._llm.collective_rpc("gtpo_received_checksums")) if with_checksums else {}

    def forget_prefixes(self, *, with_running: bool) -> None:
        """Empties the prefix cache, with ``with_running`` also of what requests in flight have computed."""
        if not self._llm.reset_prefix_cache(reset_running_requests=with_running):
            raise WeightSyncError("vLLM refused to reset its prefix cache: requests are still running")

    def _load_push(self, version: int, *, with_checksums: bool) -> None:
        if self.lora is not None:
            self._llm.collective_rpc("gtpo_receive_adapters", args=(version, with_checksums, self._adapter))
            return
        self._llm.collective_rpc("start_weight_update")
        push = {"version": version, "with_checksums": with_checksums}
        self._llm.collective_rpc("update_weights", kwargs={"update_info": push})
        self._llm.collective_rpc("finish_weight_update")

    def _label(self, version: int) -> None:
        """Labels further tokens with this policy version."""
        self._llm.llm_engine.set_weight_version(str(version))
        self.version = version
