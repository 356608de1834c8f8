"""Compares a step's mismatch figures with their limits, and learns the limits."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gtpo_megatron.config.rollout import GivenLimits, MismatchLimits
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.mismatch.limits import BEYOND, FIGURES, NUM_SAMPLES, Sample, histogram_of, limits_at
from gtpo_megatron.mismatch.statistics import GAP
from gtpo_megatron.observability.metrics import Max, Mean, Metric
from gtpo_megatron.untrusted.fields import as_record
from gtpo_megatron.untrusted.text import shown


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
            metrics: of ``gap_metrics``, merged over ranks.
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
