"""How far the sampler's log-probs may be from the trainer's before a run stops; see docs/mismatch.md."""

from typing import TypeAlias

from pydantic import PositiveFloat

from gtpo_megatron.config.checks import require_fraction
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class LearntLimits:
    """Limits learnt from steps whose weights were verified by checksums.

    Attributes:
        factor: a figure may be so many times that of the last verified step, or of the least value of the dtypes if
            that is larger.
    """

    factor: float = 3.0

    def __post_init__(self) -> None:
        if self.factor <= 1:
            raise ConfigError(f"factor={self.factor}: must be greater than 1, or the verified step itself would stop")


@configuration
class GivenLimits:
    """Limits for a model whose figures are known.

    Attributes:
        scaled_nats: of ``sync/logprob_gap_scaled``.
        mean_nats: of ``sync/logprob_gap_mean``.
        median_nats: of ``sync/logprob_gap_p50``.
        p99_nats: of ``sync/logprob_gap_p99``.
        kl_nats: of ``sync/logprob_kl_nats``.
        bound_nats: a token with a larger gap is beyond the bound.
        beyond_frac: share of tokens that may be beyond the bound; 0: none.
    """

    scaled_nats: PositiveFloat
    mean_nats: PositiveFloat
    median_nats: PositiveFloat
    p99_nats: PositiveFloat
    kl_nats: PositiveFloat
    bound_nats: PositiveFloat
    beyond_frac: float

    def __post_init__(self) -> None:
        require_fraction(beyond_frac=self.beyond_frac)


MismatchLimits: TypeAlias = LearntLimits | GivenLimits
"""Either kind."""
