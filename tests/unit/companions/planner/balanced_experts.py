"""Mixtures of experts in a world of ranks that are not there: every rank routes alike, and every expert gets as much.

Meant for a forked process: it changes Megatron's router and dispatcher.
"""

import torch


def install() -> None:
    """Routers choose experts in turns; what other ranks would tell of their routing is taken to be this rank's."""
    from megatron.core.transformer.moe import router, token_dispatcher

    gating, gather = router.TopKRouter.gating, token_dispatcher.gather_from_sequence_parallel_region

    def balanced(self, hidden):
        logits = gating(self, hidden)
        num_tokens = logits.shape[:-1].numel()
        first = self.topk * torch.arange(num_tokens)
        chosen = (first[:, None] + torch.arange(self.topk)) % self.num_experts
        preferred = torch.zeros(num_tokens, self.num_experts).scatter(1, chosen, 100.0)
        return logits + preferred.view_as(logits).to(logits.dtype)

    def gather_counts(tensor, *args, group=None, **kwargs):
        if tensor.dtype == torch.int64:
            return torch.cat([tensor] * group.size())
        return gather(tensor, *args, group=group, **kwargs)

    router.TopKRouter.gating = balanced
    token_dispatcher.gather_from_sequence_parallel_region = gather_counts
