"""Pushed tensors by the tables' names become what vLLM's class of gpt-oss loads while it reloads its layers."""

import torch

from gtpo_megatron.rollout.gpt_oss_weights import loadable

EXPERT = "model.layers.1.mlp.experts.7"


class Model(torch.nn.Module):
    """Has the sinks of two of four heads, which their loader fills."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.model.layers[0].attn = torch.nn.Module()
        self.sinks = self.model.layers[0].attn.sinks = torch.nn.Parameter(torch.zeros(2))
        self.sinks.weight_loader = lambda parameter, loaded: parameter.data.copy_(loaded)


def test_an_expert_s_projections_are_put_together_and_sinks_go_to_their_loader():
    gate, up, down = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5, 3)
    pushed = {
        "model.norm.weight": torch.ones(5),
        "model.layers.0.self_attn.sinks": torch.tensor([1.0, 2.0, 3.0, 4.0]),
        f"{EXPERT}.up_proj.weight": up,
        f"{EXPERT}.down_proj.weight": down,
        f"{EXPERT}.gate_proj.bias": gate[:, 0],
        f"{EXPERT}.gate_proj.weight": gate,
        f"{EXPERT}.up_proj.bias": up[:, 0],
        f"{EXPERT}.down_proj.bias": down[:, 0],
    }
    model = Model()
    found = dict(loadable(pushed.items(), model, worker=1))
    assert model.sinks.tolist() == [3.0, 4.0]
    suffixes = ("w2_weight", "w13_weight", "w13_bias", "w2_bias")
    assert list(found) == ["model.norm.weight", *(f"{EXPERT}.{suffix}" for suffix in suffixes)]
    assert torch.equal(found[f"{EXPERT}.w2_weight"], down.t())
    assert torch.equal(found[f"{EXPERT}.w2_bias"], down[:, 0])
    both = found[f"{EXPERT}.w13_weight"]
    assert both.shape == (5, 6)
    assert torch.equal(both[:, 0::2], gate.t())
    assert torch.equal(both[:, 1::2], up.t())
    assert torch.equal(found[f"{EXPERT}.w13_bias"], both[0])
