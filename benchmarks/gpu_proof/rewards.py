"""A reward for models with random weights, whose responses have no meaning."""

import zlib

from gtpo_megatron.rewards.request import RewardRequest


def by_chance(request: RewardRequest) -> float:
    """0 or 1, by the text: of every group some are right, so that there is a gradient to compute."""
    return float(zlib.crc32(request.response.encode()) & 1)
