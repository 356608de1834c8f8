"""Controls of the study: what stands in the place of entropy."""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.hashing import content_seeds, token_hashes
from gtpo_megatron.algorithms.token_batch import ResponseTable, TokenInputs, Tokens
from gtpo_megatron.config.algorithm import EntropyCreditSettings, GRPOSConfig


def stand_in(config: EntropyCreditSettings, inputs: TokenInputs) -> Tensor:
    """``[N]`` float64 nats: the entropies, or the control that ``weight_source`` puts in their place."""
    if config.weight_source == "uniform":
        return torch.ones_like(inputs.entropy)
    if config.weight_source == "surprisal" and inputs.old_logprobs is not None:
        return -inputs.old_logprobs
    if config.weight_source == "shuffled" and not isinstance(config, GRPOSConfig):  # GRPO-S shuffles whole responses
        return shuffle_within_responses(inputs.entropy, inputs.tokens, config.weight_seed)
    return inputs.entropy


def shuffle_within_responses(values: Tensor, tokens: Tokens, seed: int) -> Tensor:
    """Permutes the values of each response, ``[N]`` -> ``[N]``.

    The order depends on the seed and on the response's content, never on the rank that holds it.
    """
    seeds = content_seeds(values.to(torch.float32).view(torch.int32), tokens.row, len(tokens.lengths), seed)
    keys = token_hashes(seeds.index_select(0, tokens.row), tokens.position)
    return values[_sort_within(tokens.row, keys)]


def shuffle_within_sets(table: ResponseTable, values: Tensor, seed: int, *, spans_batch: bool) -> Tensor:
    """Permutes one value per response among the correct, and among the incorrect, responses of each scope.

    Args:
        table: of the batch.
        values: ``[L]`` float64, of the responses with tokens.
        seed: of the order, which also depends on the values, never on the sharding. Only responses of equal value and
            equal length are ordered by their place in the table.
        spans_batch: the scope is the batch instead of the group.
    """
    sets = table.sides(spans_batch=spans_batch)[0][table.is_live]
    lengths = table.lengths[table.is_live]
    # a canonical order first, so that the ranks' order of responses does not matter
    order = torch.argsort(lengths, stable=True)
    order = order[torch.argsort(values[order], stable=True)]
    order = order[torch.argsort(sets[order], stable=True)]
    ordered = sets[order]
    sizes = torch.bincount(ordered, minlength=int(ordered.max()) + 1 if len(ordered) else 0)
    place = torch.arange(len(ordered)) - (torch.cumsum(sizes, 0) - sizes)[ordered]
    seeds = content_seeds(values[order].view(torch.int64), ordered, len(sizes), seed)
    shuffled = values.clone()
    shuffled[order] = values[order[_sort_within(ordered, token_hashes(seeds[ordered], place))]]
    return shuffled


def _sort_within(row: Tensor, keys: Tensor) -> Tensor:
    """The indices that sort ``keys`` within each row; ``row`` must be ascending."""
    order = torch.argsort(keys, stable=True)
    return order[torch.argsort(row[order], stable=True)]
