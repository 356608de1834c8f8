"""Limits of the mismatch figures: given, or learnt from steps whose weights were verified.

A learnt limit of a figure is

``min(factor x max(largest of the last samples, floor), ceiling) x allowance``

``floor`` and ``ceiling`` are those of the dtypes of sampler and trainer. A figure below the floor may be rounding
alone, which changes as the policy gets sharper or flatter, and never fails a step. One above the ceiling always does;
the ceiling is the limit of the first step too, when nothing was learnt yet. ``allowance`` is for the noise of a figure
over few tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace

from gtpo_megatron.config.rollout import GivenLimits, LearntLimits, MismatchLimits
from gtpo_megatron.mismatch.statistics import GAP, KL, SCALED
from gtpo_megatron.observability.histogram import Histogram
from gtpo_megatron.observability.metrics import Metric, to_scalars

BEYOND = f"{GAP}_beyond_frac"
"""Metric of the share of tokens beyond the bound."""

FIGURES = {
    "scaled_nats": SCALED,
    "mean_nats": f"{GAP}_mean",
    "median_nats": f"{GAP}_p50",
    "p99_nats": f"{GAP}_p99",
    "kl_nats": KL,
}
"""The metric that each limit in nats is for."""

ALLOWANCE = {"scaled_nats": 6.0, "mean_nats": 6.0, "median_nats": 6.0, "p99_nats": 40.0, "kl_nats": 20.0}
"""Allowance of a figure over ``n`` tokens: ``1 + a / sqrt(n)``: about four standard errors for the tails that were
measured. Of the 99th percentile only a hundredth of the tokens says anything."""

TAIL = 3.0
"""A learnt bound is so many times the largest 99th percentile of the samples."""

BEYOND_FRAC = 1e-3
"""Least share of tokens that may be beyond a learnt bound; more if more were beyond it in a sample."""

ALLOWED_TOKENS, ALLOWED_ERRORS = 5.0, 5.0
"""Tokens, and standard errors of their number, by which a learnt share may be exceeded."""

NUM_SAMPLES = 4
"""Verified steps that are remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Figures of one step.

    Attributes:
        num_tokens: that the figures are over.
        scaled_nats, mean_nats, median_nats, p99_nats, kl_nats: see ``FIGURES``.
        tail_frac: share of the tokens beyond ``TAIL`` times the 99th percentile.
    """

    num_tokens: int
    scaled_nats: float
    mean_nats: float
    median_nats: float
    p99_nats: float
    kl_nats: float
    tail_frac: float

    @classmethod
    def of(cls, metrics: Mapping[str, Metric]) -> "Sample":
        """The figures among metrics that are merged over ranks."""
        scalars = to_scalars({name: metrics[name] for name in (GAP, f"{GAP}_mean", SCALED, KL)})
        histogram = histogram_of(metrics)
        num_tokens = histogram.num_values
        figures = {name: scalars[metric] for name, metric in FIGURES.items()}
        tail = histogram.count_above(TAIL * figures["p99_nats"]) / num_tokens if num_tokens else 0.0
        return cls(num_tokens=num_tokens, tail_frac=tail, **figures)


def histogram_of(metrics: Mapping[str, Metric]) -> Histogram:
    """The gaps of all tokens."""
    histogram = metrics[GAP]
    assert isinstance(histogram, Histogram)
    return histogram


FLOORS = {
    "float32": GivenLimits(
        scaled_nats=1e-5,
        mean_nats=1e-5,
        median_nats=1e-5,
        p99_nats=1e-4,
        kl_nats=1e-9,
        bound_nats=5e-4,
        beyond_frac=BEYOND_FRAC,
    ),
    "bfloat16": GivenLimits(
        scaled_nats=0.01,
        mean_nats=0.01,
        median_nats=0.005,
        p99_nats=0.15,
        kl_nats=1e-3,
        bound_nats=0.5,
        beyond_frac=BEYOND_FRAC,
    ),
}
"""By the coarser dtype of sampler and trainer. A sharp policy has small gaps, and may meet prompts that it is less sure
of: only ``scaled_nats`` does not change with that, and watches closely."""

CEILINGS = {
    "float32": GivenLimits(
        scaled_nats=1e-3,
        mean_nats=1e-3,
        median_nats=1e-3,
        p99_nats=1e-2,
        kl_nats=1e-5,
        bound_nats=0.05,
        beyond_frac=BEYOND_FRAC,
    ),
    "bfloat16": GivenLimits(
        scaled_nats=0.5,
        mean_nats=0.5,
        median_nats=0.4,
        p99_nats=2.5,
        kl_nats=0.3,
        bound_nats=5.0,
        beyond_frac=BEYOND_FRAC,
    ),
}
"""By the coarser dtype."""

ROUTING_FACTOR = 2.0
"""Floors and ceilings of a mixture of experts are so many times larger unless the trainer takes over the sampler's
routing: a router that chooses another expert for a token moves it more than rounding does."""


def limits_at(
    config: MismatchLimits,
    samples: Sequence[Sample],
    *,
    coarser_dtype: str,
    has_other_routing: bool,
    num_tokens: int,
) -> GivenLimits:
    """The limits of a step.

    Args:
        config: given limits are returned as they are.
        samples: figures of earlier verified steps; none before the first.
        coarser_dtype: bfloat16 if sampler or trainer has it.
        has_other_routing: the model has experts, and the trainer's routers choose them on their own.
        num_tokens: of the step.
    """
    if isinstance(config, GivenLimits):
        return config
    scale = ROUTING_FACTOR if has_other_routing else 1.0
    floor, ceiling = (_scaled(table[coarser_dtype], scale) for table in (FLOORS, CEILINGS))
    if not samples:
        learnt = ceiling
    else:
        values = {name: _learnt(config, samples, name, floor, ceiling) for name in FIGURES}
        largest = max(sample.p99_nats for sample in samples)
        bound = min(max(TAIL * largest, floor.bound_nats), ceiling.bound_nats)
        beyond_frac = max(BEYOND_FRAC, config.factor * max(sample.tail_frac for sample in samples))
        learnt = replace(floor, bound_nats=bound, beyond_frac=beyond_frac, **values)
    fewest = max(1, min([num_tokens, *(sample.num_tokens for sample in samples)]))
    allowed = {
        name: getattr(learnt, name) * (1.0 + allowance / math.sqrt(fewest)) for name, allowance in ALLOWANCE.items()
    }
    expected = learnt.beyond_frac * num_tokens
    beyond = expected + ALLOWED_ERRORS * math.sqrt(expected) + ALLOWED_TOKENS
    return replace(learnt, beyond_frac=min(1.0, beyond / max(1, num_tokens)), **allowed)


def _learnt(
    config: LearntLimits, samples: Sequence[Sample], name: str, floor: GivenLimits, ceiling: GivenLimits
) -> float:
    largest = max(getattr(sample, name) for sample in samples)
    return float(min(config.factor * max(largest, getattr(floor, name)), getattr(ceiling, name)))


def _scaled(limits: GivenLimits, scale: float) -> GivenLimits:
    nats = [field.name for field in fields(limits) if field.name != "beyond_frac"]
    return replace(limits, **{name: getattr(limits, name) * scale for name in nats})
