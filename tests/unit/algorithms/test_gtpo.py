"""GTPO from parts, without the facade: what the facade adds is only the reading of the configuration."""

import torch
from gtpo_megatron.algorithms.gtpo import gtpo_credit
from gtpo_megatron.algorithms.rows import row_facts
from gtpo_megatron.algorithms.shaping import PoolRule, ShapingRules, formulation_sides
from gtpo_megatron.algorithms.share_grid import ShareRule, TokenWeights
from gtpo_megatron.algorithms.table import gather_table

from gtpo_megatron.algorithms import assign_credit
from gtpo_megatron.algorithms.batch.reduction import LocalReduction
from gtpo_megatron.config.algorithm import GTPOConfig
from tests.strategies import random_batch


def test_parts_make_the_whole() -> None:
    arguments = random_batch(3, num_groups=4, group_size=5, max_tokens=8).arguments()
    facts = row_facts("h", arguments["token_entropy"], arguments["response_mask"])
    none = torch.zeros(len(facts.lengths), dtype=torch.float64)
    table = gather_table(
        lambda: (arguments["rewards"], arguments["group_ids"], facts, none),
        success_threshold=0.5,
        reduction=LocalReduction(),
        signature="",
    )
    rules = ShapingRules(
        share=ShareRule(may_be_narrow=False),
        sides=formulation_sides("v6", 1.0, 0.1, None),
        pool=PoolRule(spans_batch=True),
    )
    tokens = TokenWeights(values=arguments["token_entropy"], response_mask=arguments["response_mask"])
    pooled = table.is_live & ~table.is_one_sided[table.group_index]
    result, shares = gtpo_credit(tokens, table, rules, LocalReduction(), penalties=none, is_pooled=pooled)
    whole = assign_credit(GTPOConfig(), **arguments)
    assert torch.equal(result.advantages, whole.advantages)
    assert torch.equal(result.shaped_rewards, whole.shaped_rewards)
    assert shares.values.data_ptr() == result.advantages.data_ptr()  # their memory is used again
