"""How attention and MLP join the hidden states in families that norm or scale what is added."""

from collections.abc import Callable

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from gtpo_megatron.actor.model.layer_classes import layer_classes
from gtpo_megatron.weights.architecture import Architecture

Add = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class ResidualAdd(torch.nn.Module):
    """``hidden + factor * norm(output)``, in the place of Megatron's ``bias_dropout_add``.

    It stands where a layer adds, and not in the projection before, so that adapters of that projection are normed too.

    Attributes:
        norm: RMSNorm of what is added; None for families without.
    """

    def __init__(self, *, config: TransformerConfig, arch: Architecture) -> None:
        super().__init__()
        has_norm, sizes = arch.norm_placement != "pre", (config.hidden_size, config.layernorm_epsilon)
        self.norm = layer_classes().norm(config=config, hidden_size=sizes[0], eps=sizes[1]) if has_norm else None
        self._factor = arch.residual_factor

    def forward(self, training: bool, fused: bool) -> Add:
        """The function that adds; there is no dropout, and nothing is fused."""
        del training, fused
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, Tensor | None], hidden: Tensor, dropout: float) -> Tensor:
        """``[p / tp or p, 1, H]`` each."""
        del dropout
        output, bias = output_and_bias
        output = output if bias is None else output + bias
        if self.norm is not None:
            output = self.norm(output)
        return torch.add(hidden, output, alpha=self._factor)
