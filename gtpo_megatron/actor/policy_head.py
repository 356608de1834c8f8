"""From the last stage's hidden states to log-probs and entropies of the response tokens."""

from dataclasses import dataclass, replace

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from gtpo_megatron.actor.model.frozen_shards import FrozenShards
from gtpo_megatron.actor.model.policy_model import PolicyModel
from gtpo_megatron.data.packing import PackedMicroBatch
from gtpo_megatron.distributed.context_parallel import gather_tokens
from gtpo_megatron.distributed.groups import ParallelGroups
from gtpo_megatron.distributed.input_checks import check_targets
from gtpo_megatron.distributed.vocab_parallel import TokenScores, linear_token_scores


@dataclass(frozen=True, slots=True)
class PolicyHead:
    """The output layer, fused with the scores that are read from it.

    Attributes:
        model: model chunk with the output layer.
        groups: process groups of this rank.
        sequence_parallel: hidden states are sharded over tp.
        temperature: temperature of the sampling distribution.
        vocab_size: rows of the output layer at or past it only pad the vocabulary.
        chunk_tokens: tokens whose logits are made at a time.
        frozen: the output layer's weights are among these, which replicas share; None: the rank has them.
    """

    model: PolicyModel
    groups: ParallelGroups
    sequence_parallel: bool
    temperature: float
    vocab_size: int
    chunk_tokens: int
    frozen: FrozenShards | None = None

    def score(self, hidden: Tensor, batch: PackedMicroBatch) -> TokenScores:
        """Log-prob and entropy of every response token of a micro-batch, on every context-parallel rank.

        Args:
            hidden: ``[p, 1, H]``, or ``[p / tp, 1, H]`` under sequence parallelism.
            batch: says which positions predict response tokens.

        Returns:
            ``logprobs [R]`` with gradient and ``entropy [R]`` without, float32, nats. The host does not wait for them.

        Raises:
            DataError: a response token is not in the vocabulary.

        Collectives: those of ``linear_token_scores`` over tp; under sequence parallelism one all-gather, and in
        backward one reduce-scatter; under context parallelism one all-reduce of two numbers per token; those of
            ``FrozenShards.with_output``.
        """
        if self.sequence_parallel:
            # in backward the gather's own reduce-scatter sums the ranks' gradients, so the head must not
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=True, group=self.groups.tp
            )
        # on the host, where they come from; all tensor-parallel ranks have the same micro-batch
        check_targets(batch.target_ids, len(batch.score_positions), self.vocab_size, batch.target_ids.device)
        target_ids = batch.target_ids.to(hidden.device, non_blocking=True)

        def score(rows: Tensor) -> TokenScores:
            return linear_token_scores(
                rows,
                self.model.output_weight(),
                target_ids,
                tp_group=self.groups.tp,
                temperature=self.temperature,
                vocab_size=self.vocab_size,
                chunk_tokens=self.chunk_tokens,
                reduce_hidden_grad=not self.sequence_parallel,
                check_inputs=False,
            )

        rows = hidden[:, 0].index_select(0, batch.score_positions.to(hidden.device, non_blocking=True))
        scores = score(rows) if self.frozen is None else self.frozen.with_output(score, rows)
        if self.groups.cp is None:
            return scores
        logprobs, entropy = gather_tokens(
            torch.stack([scores.logprobs, scores.entropy]),
            batch.scored,
            num_tokens=len(batch.token_rows),
            cp_group=self.groups.cp,
        )
        return replace(scores, logprobs=logprobs, entropy=entropy.detach())


def to_rows(values: Tensor, batch: PackedMicroBatch, *, num_columns: int) -> Tensor:
    """Flat token values ``[R]`` as ``[n, T]``, rows in the order of ``batch.rows``, zero elsewhere; differentiable."""
    rows, columns = (index.to(values.device, non_blocking=True) for index in (batch.token_rows, batch.token_columns))
    return values.new_zeros(len(batch.rows), num_columns).index_put((rows, columns), values)
