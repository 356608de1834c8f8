"""Log-probs of an output layer by others, for ``benchmarks.vocab_parallel`` and the part ``peers`` of the GPU proof.

Each is called as a policy loss needs it: one log-prob a token, which gets a gradient of its own. Where a library can
also return the entropy, it does. What each leaves out or rounds is in its ``about``.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gtpo_megatron.kernels import tiles

Scores = tuple[Tensor, Tensor | None]
"""Log-probs ``[P]`` and entropies ``[P]``, nats; None from a library that has no entropies."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another output layer.

    Attributes:
        scores: takes hidden ``[P, H]``, weight ``[V, H]``, targets ``[P]`` int64 and the tokens of a chunk.
        package: that it needs; empty: torch alone.
        needs: a ``gpu``, ``triton``, which has an interpreter for CPUs, or ``nothing``.
        about: what differs from ours, in a line.
    """

    scores: Callable[[Tensor, Tensor, Tensor, int], Scores]
    package: str = ""
    needs: str = "nothing"
    about: str


def _chunk_scores(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax((hidden @ weight.t()).float(), dim=1)
    entropy = -(log_p.detach().exp() * log_p.detach()).sum(1)
    return log_p.gather(1, targets[:, None])[:, 0], entropy


@functools.cache
def _compiled() -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    return torch.compile(_chunk_scores, dynamic=False)


def _in_chunks(
    score: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int,
) -> Scores:
    """``score`` of one chunk of tokens after the other, made again in the backward pass."""
    found = []
    for rows in tiles.spans(hidden.shape[0], chunk):
        inputs = hidden[rows], weight, targets[rows]
        found.append(checkpoint(score, *inputs, use_reentrant=False) if torch.is_grad_enabled() else score(*inputs))
    logprobs, entropies = zip(*found, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Scores:
    """Whole rows of logits, a chunk of tokens at a time."""
    return _in_chunks(_chunk_scores, hidden, weight, targets, chunk)


def torch_compiled(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Scores:
    """The same through ``torch.compile``."""
    return _in_chunks(_compiled(), hidden, weight, targets, chunk)


def trl(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Scores:
    """The fused head of TRL's GRPO trainer, in its own tiles."""
    del chunk
    from trl.kernels import ChunkedLogProbFunction
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE as COLUMNS

    found = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, COLUMNS, None, 1.0, ("entropy",))
    return found[0], found[1]


def _liger(hidden: Tensor, weight: Tensor, targets: Tensor, sums: torch.dtype | None) -> Scores:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    bias = class_weights = softcap = None
    options = -100, 0.0, 0.0, "none", softcap, False, sums  # of ignored targets, losses that are not used, the result
    found = LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, targets, bias, class_weights, *options)
    return -found[0], None


def liger(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Scores:
    """Liger's fused linear cross-entropy, as it comes."""
    del chunk
    return _liger(hidden, weight, targets, None)


def liger_float32(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Scores:
    """The same, whose gradient of the weight is summed in float32."""
    del chunk
    return _liger(hidden, weight, targets, torch.float32)


def _cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, least_gradient: str | None) -> Scores:
    from cut_cross_entropy import linear_cross_entropy

    return -linear_cross_entropy(hidden, weight, targets, reduction="none", filter_eps=least_gradient), None


def cut_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Scores:
    """Apple's, as it comes."""
    del chunk
    return _cut_cross_entropy(hidden, weight, targets, "high")


def cut_cross_entropy_exact(hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Scores:
    """The same, which leaves no gradient out."""
    del chunk
    return _cut_cross_entropy(hidden, weight, targets, None)


PEERS: dict[str, Peer] = {
    "torch_chunked": Peer(
        scores=torch_chunked,
        about="entropy too; logits and the weight's gradient of a chunk are rounded to the inputs' dtype",
    ),
    "torch_compiled": Peer(scores=torch_compiled, about="the same, compiled"),
    "trl": Peer(
        scores=trl,
        package="trl",
        about="entropy and temperature too; logits are rounded to the inputs' dtype, gradients are summed in float32",
    ),
    "liger": Peer(
        scores=liger,
        package="liger_kernel",
        needs="triton",
        about="no entropy, no temperature; logits and all gradients are rounded to the inputs' dtype, chunk by chunk",
    ),
    "liger_float32": Peer(
        scores=liger_float32,
        package="liger_kernel",
        needs="triton",
        about="no entropy, no temperature; logits are rounded, the weight's gradient is summed in float32",
    ),
    "cut_cross_entropy": Peer(
        scores=cut_cross_entropy,
        package="cut_cross_entropy",
        needs="gpu",
        about="no entropy, no temperature; gradients are summed in the inputs' dtype, blocks of small ones left out",
    ),
    "cut_cross_entropy_exact": Peer(
        scores=cut_cross_entropy_exact,
        package="cut_cross_entropy",
        needs="gpu",
        about="the same, none left out",
    ),
}
"""By the name of their variants."""


def lacks(peer: Peer, device: torch.device) -> str:
    """Why a peer cannot be run here; empty if it can."""
    if peer.package and importlib.util.find_spec(peer.package) is None:
        return f"{peer.package} is not installed"
    if peer.needs == "gpu" and device.type != "cuda":
        return "its kernels run on a GPU only: Triton's interpreter knows neither their log1p nor products of bfloat16"
    if peer.needs == "triton":
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "without a GPU its kernels run under TRITON_INTERPRET=1 only"
    return ""
