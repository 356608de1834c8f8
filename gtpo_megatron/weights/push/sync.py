"""(9) The push of new weights from the trainer's ranks into the sampler, verified."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeAlias

from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.errors import WeightSyncError
from gtpo_megatron.weights.checksum import Checksums

logger = logging.getLogger(__name__)


Transfer: TypeAlias = Callable[..., tuple[Checksums, Checksums]]
"""Runs both sides of a push of a ``version`` at once, and returns the checksums of what was sent and of what was
received; empty unless ``with_checksums``."""


class WeightSync:
    """Pushes, and compares both sides' checksums at a link's first push and every ``verify_every_steps`` versions.

    Args:
        config: settings of the pushes.
        transfer: function that makes one push.
        before_push: repairs the link if necessary; returns whether it is new, without a push so far.
    """

    def __init__(
        self, config: WeightSyncConfig, transfer: Transfer, *, before_push: Callable[[], bool] = lambda: False
    ) -> None:
        self._config = config
        self._transfer = transfer
        self._before_push = before_push
        self._is_link_verified = False

    def push(self, *, version: int) -> None:
        """Replaces the sampler's weights by the trainer's; only requests that survive a push may be running.

        Args:
            version: number of the policy, stored on both sides.

        Raises:
            WeightSyncError: a side failed, or the checksums differ; the message names the tensors.
        """
        if self._before_push():
            self._is_link_verified = False
        verify = not self._is_link_verified or version % self._config.verify_every_steps == 0
        sent, received = self._transfer(version, with_checksums=verify)
        if verify:
            compare_checksums(sent, received, version=version)
            self._is_link_verified = True


def compare_checksums(sent: Checksums, received: Checksums, *, version: int) -> None:
    """Raises WeightSyncError unless every worker received exactly what was sent to it."""
    for worker in sorted(sent.keys() | received.keys()):
        ours, theirs = sent.get(worker, {}), received.get(worker, {})
        wrong = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
        if wrong:
            raise WeightSyncError(
                f"policy version {version}: worker {worker} received other weights than were sent, in "
                f"{len(wrong)} of {len(ours)} tensors, first {wrong[0]!r}; the sampler must not be used"
            )
    logger.info("policy version %d: checksums agree on both sides, for %d workers", version, len(sent))


def merge_checksums(parts: Sequence[Checksums]) -> Checksums:
    """The ranks' parts of every worker's checksums, added up modulo 2^64."""
    total: Checksums = {}
    for part in parts:
        for worker, sums in part.items():
            mine = total.setdefault(worker, {})
            for name, value in sums.items():
                mine[name] = (mine.get(name, 0) + value) % 2**64
    return total
