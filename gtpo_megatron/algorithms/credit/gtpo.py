"""GTPO: the reward of each token is shaped by its entropy (arXiv 2508.04349).

[I n] are the equations of version 6, [S n] those of version 1. The objective [I 7] is ``losses.clipped_surrogate``.
"""

import torch
from torch import Tensor

from gtpo_megatron.algorithms.credit.diagnostics import weight_metrics
from gtpo_megatron.algorithms.credit.shaping import SINGLE_POOL, entropy_weights, shaped_reward, shaping_entropy
from gtpo_megatron.algorithms.credit.standardise import standardise, token_pools
from gtpo_megatron.algorithms.credit.turn_rewards import turn_reward
from gtpo_megatron.algorithms.token_batch import CreditBatch
from gtpo_megatron.batch import Credit
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.config.algorithm.entropy_credit import Axis


def gtpo_credit(config: GTPOConfig, batch: CreditBatch) -> Credit:
    """Shaped rewards [I 3-4] and advantages [I 5-6] of this rank's ``N`` tokens.

    With the defaults, for a token ``t`` of response ``i`` that is correct (O+) or incorrect (O-):

    - ``x[i,t] = H[i,t] / sum_{k in O+} H[k,t] * d_t``, ``d_t`` being the number of correct responses that reach ``t``;
    - ``y[i,t] = (1/H[i,t]) / sum_{k in O-} (1/H[k,t]) * h_t``;
    - ``r+ = alpha1 + alpha2 x`` [I 3], ``r- = -alpha1 - alpha2 y`` [I 4];
    - ``A+ = (r+ - mean(R+)) / std(R+)`` [I 5], ``A- = (r- - mean(R-)) / std(R-)`` [I 6].

    ``H`` is the token's entropy plus ``entropy_floor``. ``R+`` holds, for every token of the batch, ``r+`` on O+
    and 0 on O-, without groups that have one side only; ``R-`` likewise.

    ``turn_reward_coef`` (ours) adds ``coef * rho[i,k]`` to ``r+`` and ``r-``, what the token's turn ``k`` earned.

    Collectives: those of ``entropy_weights``, ``standardise`` and ``weight_metrics``; one ``sum`` more if not all
    tokens are shaped.
    """
    is_correct = batch.on_tokens(batch.table.is_correct)  # O+
    peer_set, num_peers = peer_sets(config, batch)  # num_peers: d_t on O+, h_t on O-
    x_or_y = entropy_weights(  # x on O+, y on O-
        shaping_entropy(config, batch.entropy),  # H
        is_correct,
        peer_set,
        num_peers,
        config.entropy_mean,
        shaped_tokens=batch.shaped_tokens,
        reduction=batch.reduction,
    )

    reward = shaped_reward(  # r+ [I 3; S 2, 11, 13] and r- [I 4; S 13]
        config.formulation, is_correct, x_or_y, base=config.alpha1, bonus=config.alpha2, kappa=config.kappa
    )
    reward += batch.on_tokens(batch.penalties)  # R(i) [S 11; I App. D]
    if config.turn_reward_coef:
        reward += config.turn_reward_coef * turn_reward(batch)  # rho of the token's turn

    pools = token_pools(  # R+, R-, without one-sided groups
        batch,
        "combined" if config.formulation in SINGLE_POOL else config.advantage_pool,
        spans_batch=config.advantage_scope == "batch",
        takes_part=batch.takes_part(config.one_sided_groups),
    )
    # A+ [I 5; S 3, 14] and A- [I 6; S 14]
    advantage = standardise(reward, pools, ddof=config.std_ddof, eps=config.std_eps)

    is_lone = (num_peers == 1).gather(0, peer_set)
    if batch.shaped_tokens is not None:
        is_lone &= batch.shaped_tokens
    metrics = weight_metrics(x_or_y, is_correct, is_lone, batch.reduction)
    return Credit(shaped_rewards=reward, advantages=advantage, metrics=metrics)


def peer_sets(config: GTPOConfig, batch: CreditBatch) -> tuple[Tensor, Tensor]:
    """``sets_along`` the configuration's axis, within O+ and O- of each group, or of the batch."""
    sides = batch.table.sides(spans_batch=config.entropy_scope == "batch")
    return sets_along(config.entropy_axis, sides, batch)


def sets_along(axis: Axis, sides: tuple[Tensor, int], batch: CreditBatch) -> tuple[Tensor, Tensor]:
    """The set of tokens that each of this rank's tokens is compared within, and the size of each set.

    A token is compared within its *side*, O+ or O- of its group (or of the batch), along one axis [S sec. 5]: with the
    tokens at the same ``t`` (``position``, the equations of the paper), with those at the same place in the same turn
    (``turn``), with all tokens of its response (``response``) or with all tokens of its side (``matrix``). ``t`` counts
    the policy's own tokens, over all turns. Of a response that branches ``t`` and the turn count along the token's
    path, so that a set may have several tokens of it; each is a peer.

    Args:
        axis: see above.
        sides: ``[R]`` int64 in [0, S), the side of each response of the batch, and ``S``.
        batch: this rank's tokens.

    Returns:
        ``[N]`` int64 in [0, K), and ``[K]`` int64 over all ranks, the same on every rank. ``K`` is sides times the
        batch's longest response for ``position``: 8 MiB a number at 128 groups of up to 4,096 tokens; for ``turn``
        sides times most turns times the longest turn.

    Collectives: for ``turn`` one ``max`` of two numbers and one ``sum`` of ``[K]``; one ``sum`` if not all
    tokens are shaped; if responses may branch one ``max`` and one ``sum`` for ``position``.
    """
    table = batch.table
    side, num_sides = sides
    match axis:
        case "position":
            position = batch.position
            longest = int(table.lengths.max()) if len(table.lengths) else 0
            if batch.branches is not None:
                most = position.max()[None] + 1 if len(position) else position.new_zeros(1)
                longest = int(batch.reduction.max(most))
            peer_set = position.add_(batch.on_tokens(longest * side))
            if batch.branches is not None:  # a response may have several tokens at t, or none before its end
                shaped = peer_set if batch.shaped_tokens is None else peer_set[batch.shaped_tokens]
                return peer_set, batch.reduction.sum(torch.bincount(shaped, minlength=num_sides * longest))
            last = (longest * side + table.lengths - 1)[table.is_live]
            ends = torch.bincount(last, minlength=num_sides * longest).view(num_sides, longest)
            num_peers = ends.flip(1).cumsum(1).flip(1).flatten()  # a response is there at t if it ends at t or later
        case "turn":
            _, depth, place = batch.turns()
            sizes = torch.stack([depth.max() + 1, place.max() + 1]) if len(depth) else depth.new_zeros(2)
            num_turns, longest = batch.reduction.max(sizes).tolist()
            peer_set = (batch.on_tokens(side) * num_turns + depth) * longest + place
            shaped = peer_set if batch.shaped_tokens is None else peer_set[batch.shaped_tokens]
            return peer_set, batch.reduction.sum(torch.bincount(shaped, minlength=num_sides * num_turns * longest))
        case "response":
            peer_set, num_peers = batch.row.to(torch.int64) + table.mine.start, table.lengths
        case "matrix":
            peer_set = batch.on_tokens(side)
            num_peers = torch.zeros(num_sides, dtype=torch.int64).index_add_(0, side, table.lengths)
    if batch.shaped_tokens is None:
        return peer_set, num_peers.to(peer_set.device)
    shaped = peer_set[batch.shaped_tokens]
    return peer_set, batch.reduction.sum(torch.bincount(shaped, minlength=len(num_peers)))
