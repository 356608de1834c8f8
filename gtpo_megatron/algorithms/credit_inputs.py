"""This rank's inputs of credit: validated, and turned into what the algorithm weighs tokens by."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms import controls
from gtpo_megatron.algorithms.checks import check_config, check_full_precision, check_mask, check_shape
from gtpo_megatron.algorithms.outcome import is_correct
from gtpo_megatron.algorithms.rows import RowFacts, check_inputs, row_facts
from gtpo_megatron.algorithms.sequence_entropy import sequence_entropy
from gtpo_megatron.algorithms.share_grid import LEAST_WEIGHT, WIDEST_RATIO
from gtpo_megatron.config.algorithm import AlgorithmConfig, EntropyCreditSettings, GRPOSConfig
from gtpo_megatron.errors import DataError, ShapeError


class CreditInputs:
    """This rank's tensors; ``read`` validates them and derives what the algorithm weighs tokens by."""

    def __init__(
        self,
        config: AlgorithmConfig,
        rewards: Tensor,
        token_entropy: Tensor,
        response_mask: Tensor,
        group_ids: Tensor,
        old_logprobs: Tensor | None,
        shaping_mask: Tensor | None,
    ) -> None:
        self.config, self.rewards, self.group_ids = config, rewards, group_ids
        self.token_entropy, self.response_mask = token_entropy, response_mask
        self.old_logprobs, self.shaping_mask = old_logprobs, shaping_mask
        self.weights, self.weights_name = token_entropy, "token_entropy"
        self.padding_is_harmless, self.has_negatives = False, True
        self.entropy_total = torch.zeros(0, dtype=torch.float64)

    def read(self) -> tuple[Tensor, Tensor, RowFacts, Tensor]:
        """Rewards, labels, row facts and mean weights of the rows here."""
        check_config(self.config)
        check_inputs(self.rewards, self.token_entropy, self.response_mask, self.group_ids)
        shape = tuple(self.token_entropy.shape)
        if self.old_logprobs is not None:
            check_shape(shape, old_logprobs=self.old_logprobs)
            check_full_precision(old_logprobs=self.old_logprobs)
        if self.shaping_mask is not None:
            check_shape(shape, shaping_mask=self.shaping_mask)
            check_mask(shaping_mask=self.shaping_mask)
        finds_lowest = isinstance(self.config, EntropyCreditSettings) and _needs_lowest(self.config)
        facts = row_facts("token_entropy", self.token_entropy, self.response_mask, finds_lowest=finds_lowest)
        self.entropy_total = facts.total
        self.padding_is_harmless, self.has_negatives = facts.padding_is_harmless, facts.has_negatives
        means = torch.zeros(len(self.rewards), dtype=torch.float64)
        if isinstance(self.config, EntropyCreditSettings):
            if self.config.unshaped_patterns and self.shaping_mask is None:
                raise ShapeError(
                    f"shaping_mask: got None, needed for unshaped_patterns={self.config.unshaped_patterns!r}; "
                    "data.unshaped_tokens makes it from the sampled tokens"
                )
            facts = self._replace_weights(self.config, facts)
        elif self.shaping_mask is not None:
            raise ShapeError(f"shaping_mask: {type(self.config).__name__} shapes nothing; pass None")
        if isinstance(self.config, GRPOSConfig):
            means = self._sequence_means(self.config, facts)
        return self.rewards, self.group_ids, facts, means

    def _replace_weights(self, config: EntropyCreditSettings, facts: RowFacts) -> RowFacts:
        source = config.weight_source
        if source == "surprisal" and self.old_logprobs is None:
            raise ShapeError("old_logprobs: got None, needed for weight_source='surprisal'")
        if source == "shuffled" and isinstance(config, GRPOSConfig):
            source = "entropy"  # whole responses are shuffled instead, once all are known
        self.weights = controls.stand_in(
            source, self.token_entropy, self.response_mask, old_logprobs=self.old_logprobs, seed=config.weight_seed
        )
        if config.shaped_sides != "both" and not isinstance(config, GRPOSConfig):
            correct = is_correct(self.rewards, success_threshold=config.success_threshold)
            is_neutral = ~correct if config.shaped_sides == "positive" else correct
            self.weights = controls.neutralise_side(self.weights, is_neutral)
        if self.weights is self.token_entropy:
            return facts
        is_surprisal = source == "surprisal"
        self.weights_name = "old_logprobs" if is_surprisal else "token_entropy"
        facts = row_facts(
            self.weights_name,
            self.weights,
            self.response_mask,
            finds_lowest=_needs_lowest(config),
            is_negated=is_surprisal,
        )
        self.padding_is_harmless, self.has_negatives = facts.padding_is_harmless, facts.has_negatives
        return facts

    def _sequence_means(self, config: GRPOSConfig, facts: RowFacts) -> Tensor:
        is_geometric = config.sequence_entropy_mean == "geometric"
        low = config.entropy_clip[0] if config.entropy_clip else 0.0
        is_zero = (facts.lengths > 0) & (facts.lowest.clamp(min=low) + config.entropy_floor < LEAST_WEIGHT)
        if is_geometric and bool(is_zero.any()):
            row = int(torch.nonzero(is_zero)[0])
            raise DataError(
                f"{self.weights_name}[{row}] contains 0 and entropy_floor=0: its logarithm does not exist; set "
                "entropy_floor above 0"
            )
        averaged = None
        if self.shaping_mask is not None:
            kept = self.response_mask & self.shaping_mask
            averaged = torch.where(kept.any(1, keepdim=True), kept, self.response_mask)  # nothing kept: all of them
        return sequence_entropy(
            self.weights,
            self.response_mask,
            facts,
            is_geometric=is_geometric,
            floor=config.entropy_floor,
            clip=config.entropy_clip,
            averaged=averaged,
        )


def _needs_lowest(config: EntropyCreditSettings) -> bool:
    """Whether floor and clip alone do not bound weights well enough from below."""
    low = config.entropy_clip[0] if config.entropy_clip else 0.0
    compares_logs = config.entropy_mean == "geometric" and not isinstance(config, GRPOSConfig)
    return low + config.entropy_floor < (1 / WIDEST_RATIO if compares_logs else LEAST_WEIGHT)
