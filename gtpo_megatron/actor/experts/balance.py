"""How many tokens each expert gets, and what is done about it: penalties of the router, updates of expert biases."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.model.router import PolicyRouter
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.model import BalanceConfig
from gtpo_megatron.distributed.groups import ParallelGroups
from gtpo_megatron.observability.metrics import Max, Metric
from gtpo_megatron.weights.experts import Experts


class ExpertBalance:
    """Counts, penalises and moves biases of all routers of a rank; of a dense model nothing happens.

    Loads of the scoring pass stand for those of the updates that follow: they are of all tokens of the step, so neither
    the cut into micro-batches nor the layout of ranks changes the penalty, and its gradient is a sum over tokens.

    Args:
        config: which penalties and updates.
        experts: experts of the model; None for a dense one.
        chunks: the rank's parts of the model.
        groups: process groups of this rank.

    Attributes:
        loads: ``[layers, E]`` int64, tokens per expert of the last pass that was counted; layers without experts are
            left out. None before the first.
    """

    def __init__(
        self, config: BalanceConfig, experts: Experts | None, chunks: Sequence[Any], groups: ParallelGroups
    ) -> None:
        self._config = config
        self._experts = experts
        self._groups = groups
        self._routers = [router for chunk in chunks for router in chunk.modules() if isinstance(router, PolicyRouter)]
        has_experts = () if experts is None else experts.layers
        # Megatron numbers layers from 1
        self._row_of_layer = {layer + 1: sum(has_experts[:layer]) for layer, there in enumerate(has_experts) if there}
        self.loads: Tensor | None = None

    def begin(self, *, with_grad: bool) -> None:
        """Counts from zero.

        Args:
            with_grad: the pass to count is one of an update, else one of scoring.
        """
        for router in self._routers:
            router.tokens_per_expert.zero_()
            router.counts_with_grad = with_grad

    def end(self) -> dict[str, Metric]:
        """Takes the counts of all ranks.

        Returns:
            Their metrics, the same on every rank.

        Collectives: one sum of ``layers x E`` integers over the world.
        """
        if self._experts is None:
            return {}
        self.loads = self._counted(self._experts)
        return load_metrics(self.loads)

    def _counted(self, experts: Experts) -> Tensor:
        shape = (len(self._row_of_layer), experts.num_experts)
        loads = torch.zeros(shape, dtype=torch.int64, device=cpu_platform.device())
        for router in self._routers:
            loads[self._row(router)] = router.tokens_per_expert
        # under sequence parallelism every token is on one tensor rank, and every layer is on one pipeline stage
        dist.all_reduce(loads)
        return loads

    def _row(self, router: PolicyRouter) -> int:
        assert router.layer_number is not None
        return self._row_of_layer[router.layer_number]

    def loads_by_layer(self) -> dict[int, list[int]]:
        """Number of the layer, from 0 -> tokens of each expert, by the last scoring; empty for a dense model."""
        rows = [] if self.loads is None else self.loads.tolist()
        return {layer - 1: rows[row] for layer, row in self._row_of_layer.items() if rows}

    def set_penalties(self, rollouts: RolloutBatch, rows: Sequence[int]) -> None:
        """Makes the penalties of an update a mean over its tokens, those of prompts included.

        ``aux_loss_coef E sum_i f_i P_i``, ``f_i`` expert i's share of the load and ``P_i`` its mean score, and
        ``z_loss_coef`` times the mean of ``logsumexp(logits)^2``; each summed over layers.

        Args:
            rollouts: responses of this rank.
            rows: those of the update.

        Collectives: one sum of one number over dp, if there are penalties.
        """
        if self._experts is None or not self._config.has_penalties:
            return
        tokens = rollouts.sequence_tokens[list(rows)].sum().to(cpu_platform.device())
        if self._groups.dp is not None:
            dist.all_reduce(tokens, group=self._groups.dp)
        num_tokens = max(int(tokens), 1)
        for router in self._routers:
            router.z_coef = self._config.z_loss_coef / num_tokens
            if self._config.aux_loss_coef:
                assert self.loads is not None, "scoring comes first"
                load = self.loads[self._row(router)].double()
                share = load / load.sum().clamp(min=1)
                router.load_weights = (
                    self._config.aux_loss_coef * self._experts.num_experts / num_tokens * share
                ).float()

    def move_biases(self) -> None:
        """Moves every expert's bias by ``bias_update_rate`` towards an even load of the update that was just made.

        Up if the expert got less than the mean load, down if more; arXiv 2408.15664.

        Collectives: as ``end``, if the rate is not 0.
        """
        if self._experts is None or not self._config.bias_update_rate:
            return
        loads = self._counted(self._experts)
        for router in self._routers:
            load = loads[self._row(router)]
            # integers, so that an even load is even
            direction = torch.sign(load.sum() - load * self._experts.num_experts)
            router.expert_bias += self._config.bias_update_rate * direction


def load_metrics(loads: Tensor) -> dict[str, Metric]:
    """How even the loads are.

    Args:
        loads: ``[layers, E]`` int64, tokens per expert.

    Returns:
        ``load_max_over_mean`` of the least even layer; ``dead_frac``, the share of all layers' experts without a token;
        ``load_entropy_frac``, the mean over layers of the load's entropy as a share of ``log E``: 1 if it is even.
    """
    share = loads.double() / loads.sum(dim=-1, keepdim=True).clamp(min=1)
    entropy = torch.special.entr(share).sum(dim=-1) / math.log(max(loads.shape[-1], 2))
    return {
        "experts/load_max_over_mean": Max(float((share.amax(dim=-1) * loads.shape[-1]).max())),
        "experts/dead_frac": Max(float((loads == 0).double().mean())),
        "experts/load_entropy_frac": Max(float(entropy.mean())),
    }
