"""Penalties on long responses; each is added to every shaped reward of its response, before standardising."""

from typing import Literal, TypeAlias

from pydantic import PositiveInt

from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class NoLengthPenalty:
    """Length does not enter the reward."""


@configuration
class SoftOverlongPenalty:
    """A linear ramp over the last tokens before the limit (DAPO, arXiv 2503.14476; arXiv 2508.04349v1, sec. 4.5.1).

    With ``L2 = max_tokens``, ``L1 = buffer_tokens`` and ``L = L2 - L1``: 0 up to ``L``, then ``(L - length) / L1``,
    and -1 beyond ``L2``.

    Attributes:
        max_tokens: ``L2``; responses longer than this get -1. A run wants it equal to
            ``rollout.sampling.max_response_tokens``.
        buffer_tokens: ``L1``, the width of the ramp.
        denominator: ``l1`` ends the ramp at -1; ``l2`` divides by ``L2`` as the early paper prints (the ramp then ends
            at ``-L1 / L2`` and jumps to -1).
        applies_to: ``correct`` responses only, or ``all``.
    """

    max_tokens: PositiveInt = 4096
    buffer_tokens: PositiveInt = 512
    denominator: Literal["l1", "l2"] = "l1"
    applies_to: Literal["correct", "all"] = "correct"

    def __post_init__(self) -> None:
        if self.buffer_tokens > self.max_tokens:
            raise ConfigError(f"buffer_tokens={self.buffer_tokens}: must be at most max_tokens={self.max_tokens}")


@configuration
class GroupRelativeLengthPenalty:
    """A ramp whose knee comes from the lengths of the response's own group (arXiv 2508.04349v6, App. D).

    With success rate ``p``: easy groups (``p >= easy_threshold``) take the knee from their correct responses, hard
    groups (``p <= 1 - easy_threshold``) use ``hard_group_penalty``, the others take the knee from all their responses.
    Beyond the knee ``K``: ``-0.5 (length - K) / K``, and -0.5 from ``2 K`` on.

    Attributes:
        easy_threshold: ``gamma``; the paper gives no value.
        hard_group_penalty: what hard groups get.
        correct_minority: groups in the middle with no more correct than wrong responses, of which the paper says
            nothing: no penalty, or the ramp on their wrong responses.
    """

    easy_threshold: float = 0.75
    hard_group_penalty: NoLengthPenalty | SoftOverlongPenalty = NoLengthPenalty()
    correct_minority: Literal["none", "incorrect"] = "none"

    def __post_init__(self) -> None:
        if not 0.5 < self.easy_threshold <= 1:
            raise ConfigError(
                f"easy_threshold={self.easy_threshold!r}: must lie in (0.5, 1], or groups would be both easy and hard"
            )


LengthPenaltyConfig: TypeAlias = NoLengthPenalty | SoftOverlongPenalty | GroupRelativeLengthPenalty
