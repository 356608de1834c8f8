"""One optimizer update from the gradients at hand, skipped if they are not finite."""

import logging
import math
from collections.abc import Mapping
from typing import Any

from gtpo_megatron.errors import NumericsError
from gtpo_megatron.observability.metrics import Max, Metric

logger = logging.getLogger(__name__)

MAX_SKIPPED_UPDATES = 3
"""Updates in a row that may be skipped for a gradient that is not finite; one more stops the run."""


class OptimizerStep:
    """Applies Megatron's optimizer and counts its updates.

    Args:
        optimizer: Megatron's optimizer.
        schedule: Megatron's schedule of the learning rate.

    Attributes:
        optimizer: the optimizer.
        schedule: the schedule.
        num_updates: updates made so far in the run, skipped ones included.
    """

    def __init__(self, optimizer: Any, schedule: Any) -> None:
        self.optimizer = optimizer
        self.schedule = schedule
        self.num_updates = 0
        self._skipped_in_a_row = 0

    def state_dict(self) -> dict[str, int]:
        """The counters, for a checkpoint."""
        return {"num_updates": self.num_updates, "skipped_in_a_row": self._skipped_in_a_row}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continues counting from ``state``."""
        self.num_updates, self._skipped_in_a_row = state["num_updates"], state["skipped_in_a_row"]

    def zero_grad(self) -> None:
        """Clears the optimizer's gradients; Megatron's gradient buffers are the model chunks' to clear."""
        self.optimizer.zero_grad()

    def apply(self) -> dict[str, Metric]:
        """Applies the gradients in Megatron's buffers, unless they are not finite.

        Megatron's float32 optimizer does not check: one NaN would be in every weight after the step. The norm is over
        all ranks, so all of them skip alike.

        Returns:
            Gradient norm, learning rate, and whether the update was skipped.

        Raises:
            NumericsError: too many skips in a row.

        Collectives: Megatron's over the model-parallel ranks, for the norm.
        """
        self.num_updates += 1
        self.schedule.step(1)
        overflow = self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        is_usable = not overflow and math.isfinite(grad_norm)
        if is_usable:
            self.optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self._skipped_in_a_row += 1
            logger.warning("update %d skipped: gradient norm %s", self.num_updates, grad_norm)
            if self._skipped_in_a_row > MAX_SKIPPED_UPDATES:
                raise NumericsError(
                    f"update {self.num_updates}: gradient norm {grad_norm}; {self._skipped_in_a_row} updates in a row "
                    f"were not finite, at most {MAX_SKIPPED_UPDATES} may be; lower the learning rate, "
                    f"or look at the last step's rollouts/"
                )
        return {
            "optimizer/grad_norm": Max(grad_norm),
            "optimizer/learning_rate": Max(float(self.optimizer.param_groups[0]["lr"])),
            "optimizer/skipped_count": Max(float(not is_usable)),
        }
