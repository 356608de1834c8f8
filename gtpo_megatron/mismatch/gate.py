"""Limits of the gap between sampler and trainer, learnt from verified pushes, and a step's figures against them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.rollout import GivenLimits, MismatchLimits
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.mismatch.statistics import GAP, SCALED
from gtpo_megatron.observability.histogram import Histogram
from gtpo_megatron.observability.metrics import Max, Mean, Metric, to_scalars
from gtpo_megatron.untrusted.fields import as_record
from gtpo_megatron.untrusted.text import shown

BEYOND = f"{GAP}_beyond_frac"
"""Metric of the share of tokens beyond the bound."""

ALLOWANCE = 6.0
"""The limit of ``SCALED`` over ``n`` tokens is larger by ``1 + ALLOWANCE / sqrt(n)``: about four standard errors for
the tails that were measured."""

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
        scaled_nats: error of the logits, ``SCALED``.
        p99_nats: 99th percentile of the gaps.
        tail_frac: share of the tokens beyond ``TAIL`` times the 99th percentile.
    """

    num_tokens: int
    scaled_nats: float
    p99_nats: float
    tail_frac: float

    @classmethod
    def of(cls, metrics: Mapping[str, Metric]) -> "Sample":
        """The figures among metrics that are merged over ranks."""
        scalars = to_scalars({name: metrics[name] for name in (GAP, SCALED)})
        histogram, p99_nats = histogram_of(metrics), scalars[f"{GAP}_p99"]
        num_tokens = histogram.num_values
        tail = histogram.count_above(TAIL * p99_nats) / num_tokens if num_tokens else 0.0
        return cls(num_tokens=num_tokens, scaled_nats=scalars[SCALED], p99_nats=p99_nats, tail_frac=tail)


def histogram_of(metrics: Mapping[str, Metric]) -> Histogram:
    """The gaps of all tokens."""
    histogram = metrics[GAP]
    assert isinstance(histogram, Histogram)
    return histogram


FLOORS = {
    "float32": GivenLimits(scaled_nats=1e-5, bound_nats=5e-4, beyond_frac=BEYOND_FRAC),
    "bfloat16": GivenLimits(scaled_nats=0.01, bound_nats=0.5, beyond_frac=BEYOND_FRAC),
    "fp8": GivenLimits(scaled_nats=0.1, bound_nats=2.0, beyond_frac=BEYOND_FRAC),
}
"""By the coarsest dtype of sampler and trainer; a figure below them says nothing."""

CEILINGS = {
    "float32": GivenLimits(scaled_nats=1e-3, bound_nats=0.05, beyond_frac=BEYOND_FRAC),
    "bfloat16": GivenLimits(scaled_nats=0.5, bound_nats=5.0, beyond_frac=BEYOND_FRAC),
    "fp8": GivenLimits(scaled_nats=1.0, bound_nats=10.0, beyond_frac=BEYOND_FRAC),
}
"""By the coarsest dtype."""

ROUTING_FACTOR = 2.0
"""Floors and ceilings of a mixture of experts are so many times larger unless the trainer takes over the sampler's
routing: a router that chooses another expert for a token moves it more than rounding does."""


def limits_at(
    config: MismatchLimits,
    samples: Sequence[Sample],
    *,
    coarsest_dtype: str,
    has_other_routing: bool,
    num_tokens: int,
) -> GivenLimits:
    """The limits of a step.

    Args:
        config: given limits are returned as they are.
        samples: figures of earlier verified steps; none before the first.
        coarsest_dtype: of sampler and trainer.
        has_other_routing: the model has experts, and the trainer's routers choose them on their own.
        num_tokens: tokens of the step.
    """
    if isinstance(config, GivenLimits):
        return config
    scale = ROUTING_FACTOR if has_other_routing else 1.0
    floor, ceiling = (_scaled(table[coarsest_dtype], scale) for table in (FLOORS, CEILINGS))
    learnt = ceiling
    if samples:
        scaled = config.factor * max(floor.scaled_nats, *(sample.scaled_nats for sample in samples))
        bound = max(floor.bound_nats, *(TAIL * sample.p99_nats for sample in samples))
        learnt = GivenLimits(
            scaled_nats=min(scaled, ceiling.scaled_nats),
            bound_nats=min(bound, ceiling.bound_nats),
            beyond_frac=max(BEYOND_FRAC, *(config.factor * sample.tail_frac for sample in samples)),
        )
    fewest = max(1, min([num_tokens, *(sample.num_tokens for sample in samples)]))
    expected = learnt.beyond_frac * num_tokens
    beyond = expected + ALLOWED_ERRORS * math.sqrt(expected) + ALLOWED_TOKENS
    return replace(
        learnt,
        scaled_nats=learnt.scaled_nats * (1.0 + ALLOWANCE / math.sqrt(fewest)),
        beyond_frac=min(1.0, beyond / max(1, num_tokens)),
    )


def _scaled(limits: GivenLimits, scale: float) -> GivenLimits:
    return replace(limits, scaled_nats=limits.scaled_nats * scale, bound_nats=limits.bound_nats * scale)


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
        coarsest_dtype: of sampler and trainer.
        has_other_routing: the model has experts, and the trainer's routers choose them on their own.
    """

    def __init__(self, config: MismatchLimits, *, coarsest_dtype: str, has_other_routing: bool) -> None:
        self._config = config
        self._coarsest_dtype = coarsest_dtype
        self._has_other_routing = has_other_routing
        self._samples: list[Sample] = []

    @classmethod
    def of_run(cls, config: RunConfig, *, has_experts: bool) -> "MismatchGate":
        """The gate of a run."""
        return cls(
            config.weight_sync.mismatch,
            coarsest_dtype=min((config.model.dtype, config.rollout.dtype), key=ELEMENT_BYTES.__getitem__),
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
            coarsest_dtype=self._coarsest_dtype,
            has_other_routing=self._has_other_routing,
            num_tokens=sample.num_tokens,
        )
        beyond = histogram.count_above(limits.bound_nats)
        broken = _broken(sample, beyond / sample.num_tokens, limits) if sample.num_tokens else ()
        if is_verified and not broken and sample.num_tokens:
            self._samples = [*self._samples[1 - NUM_SAMPLES :], sample]
        return GateResult(
            broken=broken,
            metrics={
                BEYOND: Mean(beyond, sample.num_tokens),
                f"{SCALED}_limit": Max(limits.scaled_nats),
                f"{GAP}_bound": Max(limits.bound_nats),
                f"{BEYOND}_limit": Max(limits.beyond_frac),
            },
            typical_nats=limits.bound_nats,
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


def _broken(sample: Sample, beyond_frac: float, limits: GivenLimits) -> tuple[str, ...]:
    """A phrase for each figure beyond its limit; NaN is beyond any."""
    broken = []
    if not sample.scaled_nats <= limits.scaled_nats:
        broken.append(f"{SCALED} {sample.scaled_nats:.3g} (limit {limits.scaled_nats:.3g})")
    if beyond_frac > limits.beyond_frac:
        broken.append(
            f"{beyond_frac:.3%} of the tokens beyond {limits.bound_nats:.3g} nats (limit {limits.beyond_frac:.3%})"
        )
    return tuple(broken)
