"""Floating-point operations that a pass over some sequences takes, from the model's shape: the top of the MFU."""

from collections.abc import Sequence

from gtpo_megatron.weights.architecture import Architecture

BACKWARD = 2
"""A backward pass takes twice the operations of a forward pass: a product for the inputs, one for the weights."""


def forward_flops(arch: Architecture, sequences: Sequence[tuple[int, int]]) -> float:
    """Operations of one forward pass, counting a multiplication and an addition as two.

    ``2 N T + sum over sequences of l a S (S + 1) + 2 H V R``: ``N`` the weights of the layers' matrices that a token
    is multiplied with (of experts those of the chosen ones, the shared ones and the router), ``T`` all tokens, ``l``
    layers, ``a`` heads x (size of a key + size of a value), ``S`` a sequence's length (causal: a token sees those up to
    itself), ``H V`` the output layer, applied to the ``R`` response tokens. With backward it is three times that: the
    ``6 N`` per token of the literature plus the attention's and the output layer's exact shares. Norms, rotary
    embedding, activation functions and whatever is computed twice (recomputation, the fused output layer) are left out.

    Args:
        arch: of the model.
        sequences: prompt and response length of each.
    """
    mlp = arch.hidden_size * sum(_mlp_columns(arch, layer) for layer in range(arch.num_layers))
    weights = arch.num_layers * arch.attention_weights + mlp
    tokens = sum(prompt + response for prompt, response in sequences)
    pairs = sum((prompt + response) * (prompt + response + 1) for prompt, response in sequences)
    responses = sum(response for _, response in sequences)
    return (
        2.0 * weights * tokens
        + float(arch.num_layers) * (arch.query_width + arch.output_width) * pairs
        + 2.0 * arch.hidden_size * arch.vocab_size * responses
    )


def _mlp_columns(arch: Architecture, layer: int) -> int:
    """Elements of a layer's MLP matrices that a token meets, per element of the hidden state."""
    experts = arch.experts
    if experts is None or not arch.has_experts(layer):
        return 3 * arch.ffn_size
    chosen = 3 * experts.experts_per_token * experts.ffn_size
    return chosen + 3 * experts.shared_ffn_size + experts.num_experts
