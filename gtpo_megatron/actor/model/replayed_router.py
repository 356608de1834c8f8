"""Expert choices of a router by micro-batch: those it must replay, or those it has made.

Megatron's own ``RouterReplay`` has one slot per layer: with several micro-batches it replays the last one's choices on
all of them, without an error if lengths fit. Here choices are kept by the number of the micro-batch. The number travels
in ``packed_seq_params``, since a pipeline runs other micro-batches between a forward pass and its recomputation.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from gtpo_megatron.actor.model.router import PolicyRouter

NUMBER = "gtpo_micro_batch"
"""Attribute of ``packed_seq_params``: the number of the micro-batch."""


class ReplayedRouter:
    """Stands in a ``TopKRouter`` where Megatron's ``RouterReplay`` would.

    Attributes:
        told: number of a micro-batch -> ``[s, k]`` experts to take, and ``[s]`` bool: which tokens take them. The
            others choose freely, as do all of a micro-batch that is not in it.
        chosen: number of a micro-batch -> ``[s, k]`` int64 experts that were chosen freely, if ``is_recording``.
        is_recording: free choices are kept.
    """

    def __init__(self) -> None:
        self.told: dict[int, tuple[Tensor, Tensor]] = {}
        self.chosen: dict[int, Tensor] = {}
        self.is_recording = False
        self._number = 0

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """The scores and numbers of the experts of each token; Megatron's name and signature.

        Args:
            scores: ``[s, E]``.
            topk: ``k``.
            num_groups: number of groups of experts.
            group_topk: groups that a token's experts come from.
            compute: the free choice.

        Returns:
            ``[s, k]`` scores and ``[s, k]`` int64.
        """
        values, experts = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self._number in self.told:
            told, is_told = (tensor.to(device=scores.device) for tensor in self.told[self._number])
            experts = torch.where(is_told[:, None], told.long(), experts)
            return scores.gather(1, experts), experts
        if self.is_recording:
            self.chosen[self._number] = experts
        return values, experts

    def note_number(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A forward pre-hook of the layer, which recomputation runs too."""
        del module, args
        self._number = getattr(kwargs["packed_seq_params"], NUMBER)


def replay_routers(chunk: nn.Module) -> dict[int, ReplayedRouter]:
    """Puts a ``ReplayedRouter`` into every router of a model chunk.

    Returns:
        By Megatron's number of the layer, which counts from 1.
    """
    found = {}
    for layer in chunk.modules():
        if not isinstance(layer, TransformerLayer):
            continue
        router = getattr(layer.mlp, "router", None)
        if isinstance(router, PolicyRouter):
            assert router.layer_number is not None
            router.router_replay = found[router.layer_number] = ReplayedRouter()
            layer.register_forward_pre_hook(router.router_replay.note_number, with_kwargs=True)
    return found
