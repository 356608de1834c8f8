"""Adapters of experts in a layer that multiplies all of a rank's at once, as Transformer Engine's does."""

import pytest
import torch

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.config_json import read_architecture
from recipes.tiny_cpu import ASSETS

pytestmark = [pytest.mark.megatron, pytest.mark.filterwarnings("ignore")]

TARGETS = ("experts.gate_up_proj", "experts.down_proj")


class Grouped(torch.nn.Module):
    """Has ``weight0``, ``weight1`` and so on, takes how many tokens each has, and returns a bias besides."""

    def __init__(self, num_experts, rows, columns):
        super().__init__()
        for expert in range(num_experts):
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(torch.randn(rows, columns)))

    def forward(self, inputs, lengths):
        pieces = inputs.split(lengths)
        return torch.cat([x @ getattr(self, f"weight{expert}").t() for expert, x in enumerate(pieces)]), None


def tree(arch):
    """A chunk that has nothing but its layers' experts."""
    chunk = torch.nn.Module()
    chunk.decoder = torch.nn.Module()
    chunk.decoder.layers = torch.nn.ModuleList()
    experts, hidden = arch.experts, arch.hidden_size
    for _ in range(arch.num_layers):
        layer = torch.nn.Module()
        layer.mlp = torch.nn.Module()
        layer.mlp.experts = torch.nn.Module()
        layer.mlp.experts.linear_fc1 = Grouped(experts.num_experts, 2 * experts.ffn_size, hidden)
        layer.mlp.experts.linear_fc2 = Grouped(experts.num_experts, hidden, experts.ffn_size)
        chunk.decoder.layers.append(layer)
    return chunk


def test_each_expert_adds_its_own():
    """Outputs and every gradient, with an expert that has no token; switched off the layer is the frozen one."""
    from gtpo_megatron.actor.model.adapters import join_adapters  # imports Megatron, which warns

    torch.manual_seed(0)
    arch, config = read_architecture(ASSETS / "tiny_qwen3_moe"), AdapterConfig(rank=3, targets=TARGETS)
    whole = {}

    def drawn(projection):
        pair = torch.randn(3, projection.columns), torch.randn(projection.rows, 3)
        return whole.setdefault((projection.name, projection.expert), pair)

    chunk = tree(arch)
    adapters = join_adapters([chunk], arch, config, ParallelConfig(num_ranks=1), global_rank=0, whole=drawn)
    lengths = [expert % 3 for expert in range(arch.experts.num_experts)]
    assert 0 in lengths
    for name in ("linear_fc1", "linear_fc2"):
        layer = getattr(chunk.decoder.layers[1].mlp.experts, name)
        inputs = torch.randn(sum(lengths), layer.weight0.shape[1])
        output, bias = layer(inputs, lengths)
        assert bias is None
        stacked = f"model.layers.1.mlp.experts.{'gate_up_proj' if name == 'linear_fc1' else 'down_proj'}"
        copies = {
            expert: [one.clone().requires_grad_() for one in whole[stacked, expert]] for expert in range(len(lengths))
        }
        wanted = torch.cat(
            [
                x @ getattr(layer, f"weight{expert}").t()
                + config.scale * x @ copies[expert][0].t() @ copies[expert][1].t()
                for expert, x in enumerate(inputs.split(lengths))
            ]
        )
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-3)
        weights = torch.randn_like(output)
        (output * weights).sum().backward()
        (wanted * weights).sum().backward()
        parts = {part.projection.expert: part for part in adapters.parts if part.projection.name == stacked}
        assert parts.keys() == copies.keys()
        for expert, part in parts.items():
            a, b = copies[expert]
            torch.testing.assert_close(part.a.grad, a.grad, rtol=1e-4, atol=1e-3)
            torch.testing.assert_close(torch.cat([one.grad for one in part.blocks]), b.grad, rtol=1e-4, atol=1e-3)
        with adapters.switched_off():
            frozen = torch.cat([x @ getattr(layer, f"weight{e}").t() for e, x in enumerate(inputs.split(lengths))])
            assert torch.equal(layer(inputs, lengths)[0], frozen)
