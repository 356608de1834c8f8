"""Limits of the gap between sampler and trainer, learnt from verified pushes, and a step's figures against them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from gtpo_megatron.config.rollout import GivenLimits, LearntLimits, MismatchLimits
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.mismatch.statistics import GAP, KL, SCALED
from gtpo_megatron.observability.histogram import Histogram
from gtpo_megatron.observability.metrics import Max, Mean, Metric, to_scalars
from gtpo_megatron.untrusted.fields import as_record
from gtpo_megatron.untrusted.text import shown

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
        num_tokens: number of tokens under the figures.
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
        num_tokens: tokens of the step.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """Result of the gate for a step.

    Attributes:
        broken: one phrase per figure beyond its limit; empty if all are within.
        metrics: the share of tokens beyond the bound, and the limits.
        typical_nats: gap up to which a token of this run is as it should be.
    """

    broken: tuple[str, ...]
    metrics: dict[str, Metric]
    typical_nats: float


class MismatchGate:
    """Assesses each step's figures; remembers those of steps with verified weights.

    Args:
        config: limits, or how they are learnt.
        coarser_dtype: bfloat16 if sampler or trainer has it.
        has_other_routing: the model has experts, and the trainer's routers choose them on their own.
    """

    def __init__(self, config: MismatchLimits, *, coarser_dtype: str, has_other_routing: bool) -> None:
        self._config = config
        self._coarser_dtype = coarser_dtype
        self._has_other_routing = has_other_routing
        self._samples: list[Sample] = []

    @classmethod
    def of_run(cls, config: RunConfig, *, has_experts: bool) -> "MismatchGate":
        """The gate of a run."""
        dtypes = {config.model.dtype, config.rollout.dtype}
        return cls(
            config.weight_sync.mismatch,
            coarser_dtype="bfloat16" if "bfloat16" in dtypes else "float32",
            has_other_routing=has_experts and config.update.routing_replay != "rollout",
        )

    def assess(self, metrics: Mapping[str, Metric], *, is_verified: bool) -> GateResult:
        """Assesses a step's figures.

        Args:
            metrics: those of ``gap_metrics``, merged over ranks.
            is_verified: the responses are of weights whose checksums agreed on both sides; if the figures are within
                their limits, later limits are learnt from them.
        """
        sample, histogram = Sample.of(metrics), histogram_of(metrics)
        limits = limits_at(
            self._config,
            self._samples,
            coarser_dtype=self._coarser_dtype,
            has_other_routing=self._has_other_routing,
            num_tokens=sample.num_tokens,
        )
        beyond = histogram.count_above(limits.bound_nats)
        measured = {name: float(getattr(sample, name)) for name in FIGURES}
        measured["beyond_frac"] = beyond / sample.num_tokens if sample.num_tokens else 0.0
        broken = _broken(measured, limits) if sample.num_tokens else ()
        if is_verified and not broken and sample.num_tokens:
            self._samples = [*self._samples[1 - NUM_SAMPLES :], sample]
        return GateResult(
            broken=broken,
            metrics={BEYOND: Mean(beyond, sample.num_tokens), **_limit_metrics(limits)},
            typical_nats=limits.p99_nats,
        )

    @property
    def has_learnt(self) -> bool:
        """Whether there was a verified step."""
        return bool(self._samples)

    def state_dict(self) -> dict[str, Any]:
        """Returns the learnt samples for a checkpoint."""
        return {"samples": [asdict(sample) for sample in self._samples]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with what was learnt.

        Raises:
            CheckpointError: it is not what ``state_dict`` gives.
        """
        samples = state.get("samples")
        if not isinstance(samples, list):
            raise CheckpointError(f"mismatch: samples is {shown(samples)}, expected a list")
        self._samples = [as_record(Sample, sample, "mismatch: samples", CheckpointError) for sample in samples]


def _broken(measured: Mapping[str, float], limits: GivenLimits) -> tuple[str, ...]:
    """Figures beyond their limits, the farthest first; one that is NaN is the farthest."""

    def excess(name: str) -> float:
        if math.isnan(measured[name]) or not getattr(limits, name):
            return math.inf
        times = measured[name] / getattr(limits, name)
        return math.sqrt(times) if name == "kl_nats" else times  # it grows with the square of the gaps

    found = [name for name, value in measured.items() if math.isnan(value) or value > getattr(limits, name)]
    return tuple(_phrase(name, measured[name], limits) for name in sorted(found, key=excess, reverse=True))


def _phrase(name: str, value: float, limits: GivenLimits) -> str:
    limit = getattr(limits, name)
    if name == "beyond_frac":
        return f"{value:.3%} of the tokens beyond {limits.bound_nats:.3g} nats (limit {limit:.3%})"
    return f"{FIGURES[name]} {value:.3g} (limit {limit:.3g})"


def _limit_metrics(limits: GivenLimits) -> dict[str, Metric]:
    named: dict[str, Metric] = {f"{metric}_limit": Max(getattr(limits, name)) for name, metric in FIGURES.items()}
    return named | {f"{GAP}_bound": Max(limits.bound_nats), f"{BEYOND}_limit": Max(limits.beyond_frac)}
