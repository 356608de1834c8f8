"""Megatron's router, with what it lacks: exact counts of tokens, penalties for any layout, other rules of choice."""

from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

from gtpo_megatron.weights.experts import Experts


class PolicyRouter(TopKRouter):
    """A ``TopKRouter`` that leaves padding out of its counts and penalties.

    Padding passes the experts like any token: what it does there reaches no token of a response.

    Attributes:
        tokens_per_expert: ``[E]`` int64, tokens that this rank's passes sent to each expert since it was last zeroed.
        counts_with_grad: of full recomputation's two passes the one with gradients is counted; of scoring the only
            one, which has none.
        z_coef: coefficient of the penalty ``z_coef * sum over tokens of logsumexp(logits)^2``.
        rule: how experts are chosen where Megatron has another rule; None: it has this one.
        load_weights: ``[E]`` float32, of the penalty ``sum over tokens of load_weights . scores``; None: there is none.
            ``scores`` are the softmax of the logits, or their sigmoids divided by their sum.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # no buffers: checkpoints and the model's dtype do not concern them
        self.tokens_per_expert = torch.zeros(self.num_experts, dtype=torch.int64, device=self.weight.device)
        self.counts_with_grad = False
        self.z_coef = 0.0
        self.rule: Experts | None = None
        self.load_weights: Tensor | None = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Chooses experts as Megatron does; counts, and attaches the penalties' gradients to the logits.

        Args:
            logits: ``[p, 1, E]`` float32, of the tokens that this rank holds.
            padding_mask: ``[p, 1]``, True at padding.
            *args: Megatron's own, which differ between versions.
            **kwargs: likewise.

        Returns:
            Weights ``[p, E]`` and choices ``[p, E]`` bool.
        """
        is_token = logits.new_ones(len(logits)) if padding_mask is None else (~padding_mask).reshape(-1).to(logits)
        if torch.is_grad_enabled() and (self.z_coef or self.load_weights is not None):
            penalty = self._penalty(logits.view(-1, logits.shape[-1]), is_token)
            logits = MoEAuxLossAutoScaler.apply(logits, penalty)
        if self.rule is not None:
            probs, choices = self._by_rule(logits.view(-1, logits.shape[-1]), self.rule)
        else:  # without the mask: Megatron's own use of it is in its balancing, which is off
            probs, choices = super().routing(logits, None, *args, **kwargs)
        if torch.is_grad_enabled() == self.counts_with_grad:
            self.tokens_per_expert += choices[is_token.bool()].sum(dim=0)
        return probs, choices

    def _by_rule(self, logits: Tensor, rule: Experts) -> tuple[Tensor, Tensor]:
        """As ``Experts`` has it: weights ``[p, E]`` and choices ``[p, E]`` bool of logits ``[p, E]``."""
        scores = logits.softmax(dim=-1) if rule.score == "softmax" else logits.sigmoid()
        ranked = scores if self.expert_bias is None else scores + self.expert_bias
        if rule.num_groups > 1:
            groups = ranked.unflatten(-1, (rule.num_groups, -1))
            best = groups.topk(rule.scored_per_group, dim=-1)[0].sum(dim=-1).topk(rule.groups_per_token, dim=-1)[1]
            is_open = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            ranked = groups.masked_fill(~is_open[..., None], -torch.inf).flatten(1)
        if self.router_replay is None:
            experts = ranked.topk(self.topk, dim=-1)[1]
        else:
            _, experts = self.router_replay.get_replay_topk(ranked, self.topk, None, None, _best)
        weights = scores.gather(-1, experts)
        if rule.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, experts, True)
        return torch.zeros_like(logits).scatter(-1, experts, rule.scaling * weights), chosen

    def _penalty(self, logits: Tensor, is_token: Tensor) -> Tensor:
        penalty = self.z_coef * torch.logsumexp(logits, dim=-1).square()
        if self.load_weights is not None:
            scores = logits.softmax(dim=-1)
            if self.score_function == "sigmoid":
                scores = logits.sigmoid()
                scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
            penalty = penalty + scores @ self.load_weights
        return (penalty * is_token).sum()

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Megatron counts for its own update of the bias here, padding included; ``ExpertBalance`` makes ours."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """The counts move with the weights, and keep their dtype as the expert bias does."""
        super()._apply(fn, recurse)
        self.tokens_per_expert = self.tokens_per_expert.to(self.weight.device)
        self._maintain_float32_expert_bias()
        return self


def set_rule(chunk: nn.Module, experts: Experts | None) -> None:
    """Tells the routers of a model chunk how to choose, if Megatron's do not choose so."""
    if experts is None or experts.are_chosen_by_megatron:
        return
    for router in chunk.modules():
        if isinstance(router, PolicyRouter):
            router.rule, router.score_function = experts, experts.score


def _best(scores: Tensor, topk: int, **_: Any) -> tuple[Tensor, Tensor]:
    values, experts = scores.topk(topk, dim=-1)
    return values, experts
