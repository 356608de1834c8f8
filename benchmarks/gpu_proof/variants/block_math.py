"""What the kernels of several variants compute of a block of logits, in registers."""

# Triton parses the functions' signatures: tensors without Python types.
# ruff: noqa: ANN001, ANN201, N803
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

import triton
import triton.language as tl

from gtpo_megatron.kernels.partials import LOWEST
from gtpo_megatron.kernels.torch_tiles import PEAKED_SUM

LOWEST_DISTANCE = tl.constexpr(LOWEST)
LEAST = tl.constexpr(-3e38)
_PEAKED_SUM = tl.constexpr(PEAKED_SUM)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_sums(z, scale, STRAIGHT: tl.constexpr = False):
    """``m``, ``r`` and ``u``, ``[R]`` each, of a block of logits ``[R, C]``; an excluded logit is ``-inf``.

    ``scale`` ``[R]`` is ``1 / T``. A row of nothing but excluded logits has ``r = u = 0``. ``STRAIGHT``: without a
    branch, by three more instructions a logit: terms of ``d = 0`` are counted, all but one of which belong to ``r``.
    """
    maximum = tl.max(z, axis=1)
    d = (z - tl.maximum(maximum, LEAST)[:, None]) * (scale * LOG2_E)[:, None]
    e = tl.exp2(d)  # NaN of a logit that is not finite stays NaN
    weighted = tl.sum(e * tl.maximum(d, LOWEST_DISTANCE), axis=1)
    if STRAIGHT:
        ties = tl.sum(tl.where(d == 0.0, 1.0, 0.0), axis=1)
        rest = tl.sum(tl.where(d == 0.0, 0.0, e), axis=1) + tl.maximum(ties - 1.0, 0.0)
    else:
        total = tl.sum(e, axis=1)
        rest = total - 1.0
        if tl.min(total, axis=0) < _PEAKED_SUM:
            lanes = tl.arange(0, z.shape[1])[None, :]
            # the maximum once more, from here, so that no exponential is kept in a register for this branch
            again, winner = tl.max(z, axis=1, return_indices=True)
            d = (z - tl.maximum(again, LEAST)[:, None]) * (scale * LOG2_E)[:, None]
            others = tl.sum(tl.where(lanes == winner[:, None], 0.0, tl.exp2(d)), axis=1)
            rest = tl.where(total < _PEAKED_SUM, others, rest)
    return maximum, rest, weighted * LN_2


@triton.jit
def merged(maximum, rest, weighted, other_maximum, other_rest, other_weighted, scale):
    """`partials.merge` of two; one of them may be of no columns."""
    d = tl.maximum(-tl.abs(maximum - other_maximum) * scale, LOWEST_DISTANCE)
    d = tl.where((maximum == float("-inf")) | (other_maximum == float("-inf")), LOWEST_DISTANCE, d)
    d = tl.where((maximum != maximum) | (other_maximum != other_maximum), float("nan"), d)
    e = tl.exp(d)
    wins = other_maximum > maximum
    # a part of no columns has no maximum's term
    kept = tl.where(wins, rest, other_rest)
    total = tl.where(wins, other_rest, rest) + e * (1.0 + kept)
    low, high = tl.where(wins, weighted, other_weighted), tl.where(wins, other_weighted, weighted)
    return tl.maximum(maximum, other_maximum), total, high + e * (low + d * (1.0 + kept))


@triton.jit
def target_gradient(at_target, maximum, rest, surprise, scale, grad, grad_entropy, HAS_ENTROPY: tl.constexpr):
    """Gradient of the target's own logit: by ``expm1``, since ``exp(d) - (1 + r)`` loses all digits if p is near 1."""
    d = tl.maximum((at_target - maximum) * scale, LOWEST_DISTANCE)
    e = tl.exp(d)
    near = d * (1.0 + d * (0.5 + d * (0.16666667 + d * 0.041666668)))
    numerator = grad * (tl.where(d > -0.03, near, e - 1.0) - rest)
    if HAS_ENTROPY:
        numerator += grad_entropy * e * (d + surprise)
    return numerator * (-scale / (1.0 + rest))
