"""Share of a GPU's bfloat16 peak that the trainer's passes reach: measured, and taken between and beyond by a rule.

The share grows with the width ``h`` of a layer: its products take ``O(h^2)``, its kernels are as many in any model and
are started by the host. Between two measured widths it is linear in ``log h``; beyond the first and the last it is that
of the nearest. Another GPU than the measured ones starts kernels no faster, so ``h sqrt(measured peak / its peak)`` is
the width whose products last as long there: reasoned, not measured.
"""

import math
from dataclasses import dataclass

from gtpo_megatron.companions.planner.hardware import GPU, GPUS

COMPUTE_EFFICIENCY = 0.6
"""Share of the bfloat16 peak that one large product reaches at least, and that an engine's products reach over
thousands of tokens: assumed of the engine; bare products of cuBLAS reach 0.7 to 0.8 in the files below."""

EXPERTS_EFFICIENCY = 0.35
"""Share of the bfloat16 peak that grouped products reach: narrow matrices, a few hundred tokens each. Assumed:
Megatron's local layers, which group none, reach 0.06 to 0.24 as a whole in the files below."""

MEASURED_TOKENS = 8192
"""Of a micro-batch, in all measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """A model that was trained on one GPU, in micro-batches of 8,192 tokens.

    Attributes:
        hidden_size: width of its layers.
        score: share of the peak in a forward pass: operations of products and attention over seconds.
        update: share of the peak in forward and backward; what is recomputed counts as operations, the optimizer not
            as seconds.
        device: name of the device.
        section: heading in the part ``training`` or ``adapters`` of ``source``.
        source: file of this repository.
    """

    hidden_size: int
    score: float
    update: float
    device: str
    section: str
    source: str


_WHOLE_HALF = Measured(
    hidden_size=896,
    score=0.118,
    update=0.154,
    device="NVIDIA H100",
    section="0.5B whole",
    source="benchmarks/results/gpu_proof_h100.json",
)

ALL_WEIGHTS = (
    _WHOLE_HALF,
    Measured(
        hidden_size=3584,
        score=0.502,
        update=0.434,
        device="NVIDIA H100",
        section="7B widths",
        source="benchmarks/results/gpu_proof_h100.json",
    ),
)
"""Where all weights are trained. 7B's widths with two layers: its output layer reaches as much as its layers."""

ADAPTERS = (
    _WHOLE_HALF,
    Measured(
        hidden_size=3584,
        score=0.410,
        update=0.415,
        device="NVIDIA H200",
        section="7B whole, adapters",
        source="benchmarks/results/gpu_proof_h200.json",
    ),
    Measured(
        hidden_size=5120,
        score=0.481,
        update=0.477,
        device="NVIDIA H200",
        section="32B whole, adapters, all recomputed",
        source="benchmarks/results/gpu_proof_h200.json",
    ),
)
"""Where low-rank adapters are trained, which have kernels of their own; below 3,584 nothing was measured with them."""

MEASURED_PEAK = GPUS["h100"].bf16_flops
"""Of H100 and H200."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Shares of the peak for one model, and where they are from.

    Attributes:
        score: share in a forward pass.
        update: share in forward and backward.
        basis: the measurements, one or the two between which the model lies.
        is_same_gpu: the GPU has the peak of those that measured.
    """

    score: float
    update: float
    basis: tuple[Measured, ...]
    is_same_gpu: bool

    def said(self, *, has_experts: bool) -> str:
        """A sentence about them, for the page."""
        where = " and ".join(f"{row.hidden_size} ({row.device}, {row.source})" for row in self.basis)
        between = "between those measured" if len(self.basis) > 1 else "as measured"
        other = "" if self.is_same_gpu else "; this GPU was not measured"
        experts = f"; experts at {EXPERTS_EFFICIENCY:.0%}, assumed" if has_experts else ""
        return (
            f"products take {self.score:.0%} of the peak in scores and {self.update:.0%} in updates, {between} at a "
            f"hidden size of {where}, of Megatron's local layers; Transformer Engine's were not measured"
            f"{other}{experts}"
        )


def trainer_shares(hidden_size: int, gpu: GPU, *, has_adapter: bool) -> Shares:
    """Shares of the peak that scores and updates reach, by the rule of this module.

    Args:
        hidden_size: of the model.
        gpu: that trains it.
        has_adapter: low-rank adapters are trained, not all weights.
    """
    rows = ADAPTERS if has_adapter else ALL_WEIGHTS
    width = hidden_size * math.sqrt(MEASURED_PEAK / gpu.bf16_flops)
    above = next((index for index, row in enumerate(rows) if width <= row.hidden_size), len(rows) - 1)
    low, high = rows[max(0, above - 1)], rows[above]
    part = 1.0
    if low is not high and width < high.hidden_size:
        part = math.log(width / low.hidden_size) / math.log(high.hidden_size / low.hidden_size)
    return Shares(
        score=low.score + part * (high.score - low.score),
        update=low.update + part * (high.update - low.update),
        basis=(low, high) if part < 1 else (high,),
        is_same_gpu=gpu.bf16_flops == MEASURED_PEAK,
    )
