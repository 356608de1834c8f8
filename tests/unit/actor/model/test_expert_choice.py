"""Our choice of experts: Megatron's where it has the rule, the formula by loops where it has not."""

from types import SimpleNamespace

import pytest
import torch

from gtpo_megatron.weights.experts import Experts

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]


def chosen(rule, logits, bias=None):
    from gtpo_megatron.actor.model.router import PolicyRouter

    router = SimpleNamespace(expert_bias=bias, router_replay=None, topk=rule.experts_per_token)
    return PolicyRouter._by_rule(router, logits, rule)


def rule_of(**changes):
    return Experts(**{"num_experts": 12, "experts_per_token": 4, "ffn_size": 8, "layers": (True,)} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"score": "sigmoid", "has_bias": True, "num_groups": 4, "groups_per_token": 2, "scaling": 2.5},
        {"score": "sigmoid", "has_bias": True},
        {"score": "softmax", "normalised": False, "num_groups": 6, "groups_per_token": 2},
    ],
)
def test_it_is_megatrons_where_megatron_has_the_rule(changes):
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    torch.manual_seed(3)
    rule, logits = rule_of(**changes), torch.randn(50, 12)
    assert rule.are_chosen_by_megatron
    bias = 0.1 * torch.randn(12) if rule.has_bias else None
    is_grouped = rule.num_groups > 1
    weights, choices = topk_routing_with_score_function(
        logits,
        rule.experts_per_token,
        use_pre_softmax=not rule.normalised,
        num_groups=rule.num_groups if is_grouped else None,
        group_topk=rule.groups_per_token if is_grouped else None,
        scaling_factor=rule.scaling,
        score_function=rule.score,
        expert_bias=bias,
    )
    found = chosen(rule, logits, bias)
    assert torch.equal(found[1], choices)
    torch.testing.assert_close(found[0], weights, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "changes",
    [
        {"has_bias": True},
        {"normalised": False, "num_groups": 4, "groups_per_token": 3, "scored_per_group": 1, "scaling": 16.0},
        {"score": "sigmoid", "has_bias": True, "num_groups": 3, "groups_per_token": 2, "experts_per_token": 3},
    ],
)
def test_other_rules_are_the_formula_by_loops(changes):
    torch.manual_seed(5)
    rule, logits = rule_of(**changes), torch.randn(40, 12)
    assert not rule.are_chosen_by_megatron
    bias = 0.1 * torch.randn(12) if rule.has_bias else None
    weights, choices = chosen(rule, logits, bias)
    size = rule.num_experts // rule.num_groups
    for row, token in enumerate(logits):
        scores = (token.softmax(-1) if rule.score == "softmax" else token.sigmoid()).tolist()
        ranked = [score + (0.0 if bias is None else bias[i].item()) for i, score in enumerate(scores)]
        groups = [sorted(ranked[g * size : (g + 1) * size])[-rule.scored_per_group :] for g in range(rule.num_groups)]
        best = sorted(range(rule.num_groups), key=lambda g: -sum(groups[g]))[: rule.groups_per_token]
        allowed = [i for i in range(rule.num_experts) if rule.num_groups == 1 or i // size in best]
        expected = sorted(allowed, key=lambda i: -ranked[i])[: rule.experts_per_token]
        assert choices[row].nonzero().flatten().tolist() == sorted(expected)
        total = sum(scores[i] for i in expected) if rule.normalised else 1.0
        for i in expected:
            assert weights[row, i].item() == pytest.approx(rule.scaling * scores[i] / total, rel=1e-5)
    assert weights[~choices].abs().max() == 0.0


def test_scores_of_next_to_nothing_are_no_nan():
    rule = rule_of(score="sigmoid", has_bias=True, num_groups=3, groups_per_token=2, experts_per_token=3)
    weights, choices = chosen(rule, torch.full((2, 12), -120.0), torch.zeros(12))
    assert torch.isfinite(weights).all()
    assert choices.sum(-1).tolist() == [3, 3]
