"""The push of new weights from the trainer's ranks into the sampler, verified."""

import logging
from typing import Protocol

from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.errors import WeightSyncError

logger = logging.getLogger(__name__)


class WeightSender(Protocol):
    """The trainer's side, all ranks together."""

    def write_weights(self, version: int, *, with_checksums: bool) -> dict[str, int]:
        """Every rank writes its slices; returns each tensor's checksum, shares added up, or nothing."""
        ...


class WeightReceiver(Protocol):
    """The sampler's side."""

    def load_weights(self, version: int) -> None:
        """Takes the weights that were written."""
        ...

    def received_checksums(self) -> list[dict[str, int]]:
        """Checksum of every tensor of the last push, one dictionary a worker."""
        ...


class WeightSync:
    """Pushes, and compares both sides' checksums at the first push and at every ``verify_every_steps``-th version."""

    def __init__(self, config: WeightSyncConfig) -> None:
        self._config = config
        self._is_first = True

    def push(self, sender: WeightSender, receiver: WeightReceiver, *, version: int) -> None:
        """Replaces the sampler's weights by the trainer's.

        Args:
            sender: has finished its update.
            receiver: has no request running.
            version: number of the policy, stored on both sides.

        Raises:
            WeightSyncError: a side failed, or the checksums differ; the message names the tensors.
        """
        verify = self._is_first or version % self._config.verify_every_steps == 0
        sent = sender.write_weights(version, with_checksums=verify)
        receiver.load_weights(version)
        if verify:
            compare_checksums(sent, receiver.received_checksums(), version=version)
            self._is_first = False


def compare_checksums(sent: dict[str, int], received: list[dict[str, int]], *, version: int) -> None:
    """Raises WeightSyncError unless every worker received exactly what was sent."""
    for worker, found in enumerate(received):
        wrong = sorted(name for name in sent.keys() | found.keys() if sent.get(name) != found.get(name))
        if wrong:
            raise WeightSyncError(
                f"policy version {version}: worker {worker} received other weights than were sent, in "
                f"{len(wrong)} of {len(sent)} tensors, first {wrong[0]!r}; the sampler must not be used"
            )
    logger.info("policy version %d: checksums of %d tensors agree on both sides", version, len(sent))
