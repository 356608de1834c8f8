"""Floating-point operations that a pass over some sequences takes, from the model's shape: the top of the MFU."""

from collections import Counter
from collections.abc import Sequence

from gtpo_megatron.config.adapter import AdapterConfig
from gtpo_megatron.weights.adapter_shapes import num_parameters
from gtpo_megatron.weights.architecture import Architecture


def backward_flops(arch: Architecture, sequences: Sequence[tuple[int, int]], adapter: AdapterConfig) -> float:
    """Operations of one backward pass: twice those of the forward pass, a product for the inputs, one for the weights.

    Frozen weights have no product of their own; adapters have those of their ``r (inputs + outputs)`` elements, forward
    and backward, which are counted here.

    Args:
        arch: architecture of the model.
        sequences: prompt and response length of each.
        adapter: adapters of the run.
    """
    if not adapter.is_on:
        return 2 * forward_flops(arch, sequences)
    tokens = sum(prompt + response for prompt, response in sequences)
    weights, responses = _weights(arch), sum(response for _, response in sequences)
    frozen = 2.0 * weights * tokens + 2.0 * arch.hidden_size * arch.vocab_size * responses
    return 2 * forward_flops(arch, sequences) - frozen + 6.0 * num_parameters(arch, adapter, active=True) * tokens


def forward_flops(arch: Architecture, sequences: Sequence[tuple[int, int]]) -> float:
    """Operations of one forward pass, counting a multiplication and an addition as two.

    ``2 N T + 2 a (pairs) + 6 s T + 2 H V R``: ``N`` the weights of the layers' matrices that a token is multiplied with
    (of experts those of the chosen ones, the shared ones and the router), ``T`` all tokens, ``a`` heads x (size of a
    key + size of a value), ``S (S + 1) / 2`` pairs a layer in a sequence of ``S`` tokens (causal: a token sees those up
    to itself), fewer in a layer with a window; ``s`` the elements of all delta nets' states, with which a token has
    three products in the place of pairs (``S^T k``, ``k u^T``, ``S^T q``), ``H V`` the output layer, applied to the
    ``R`` response tokens. With backward it is three times that: the ``6 N`` per token of the literature plus exact
    shares of attention, delta nets and output layer. Norms, rotary embedding, activation functions, what a delta net's
    products of whole chunks take beyond those three, and whatever is computed twice (recomputation, the fused output
    layer) are left out.

    Args:
        arch: architecture of the model.
        sequences: prompt and response length of each.
    """
    tokens = sum(prompt + response for prompt, response in sequences)
    windows = arch.windows or (0,) * arch.num_layers
    layers = Counter(window for layer, window in enumerate(windows) if not arch.has_delta_net(layer))
    pairs = sum(num * _pairs(sum(one), window) for one in sequences for window, num in layers.items())
    responses = sum(response for _, response in sequences)
    return (
        2.0 * _weights(arch) * tokens
        + 2.0 * (arch.query_width + arch.output_width) * pairs
        + 6.0 * _states(arch) * tokens
        + 2.0 * arch.hidden_size * arch.vocab_size * responses
    )


def _weights(arch: Architecture) -> int:
    """Elements of the layers' matrices that a token is multiplied with."""
    mlp = arch.hidden_size * sum(_mlp_columns(arch, layer) for layer in range(arch.num_layers))
    layers = arch.layers_between(0, arch.num_layers)
    return sum(count * arch.attention_weights(kind) for kind, count in layers) + mlp


def _states(arch: Architecture) -> int:
    """Elements of the matrices that all delta nets have in the place of attention."""
    return 0 if arch.delta is None else sum(arch.delta.layers) * arch.delta.state_size


def _pairs(length: int, window: int) -> int:
    """Pairs of a token and one that it attends to."""
    beyond = max(0, length - window) if window else 0
    return (length * (length + 1) - beyond * (beyond + 1)) // 2


def _mlp_columns(arch: Architecture, layer: int) -> int:
    """Elements of a layer's MLP matrices that a token meets, per element of the hidden state."""
    experts = arch.experts
    if experts is None or not arch.has_experts(layer):
        return 3 * arch.ffn_size
    chosen = 3 * experts.experts_per_token * experts.ffn_size
    return chosen + 3 * experts.shared_ffn_size + experts.has_shared_gate + experts.num_experts
