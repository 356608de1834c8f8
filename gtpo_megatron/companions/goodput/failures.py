"""Time that a run loses to failures: how often to save, and the share of the time that is left for training.

A failure anywhere stops every rank of a synchronous trainer, so failures come ``n`` times as often with ``n`` GPUs.
With mean time between failures ``M``, a save that holds training up for ``d`` and a restart that takes ``R``, all in
seconds:

- the best time between saves is ``sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + d / 18M) - d``: J. W. Young, A first order
  approximation to the optimum checkpoint interval, CACM 17 (1974), refined by J. T. Daly, A higher order estimate of
  the optimum checkpoint interval for restart dumps, FGCS 22 (2006);
- a cycle of ``t`` seconds of training and a save takes ``M e^(R/M) (e^((t + d)/M) - 1)`` seconds on average, with
  failures that do not depend on each other (Daly). Goodput is ``t`` over that.
"""

import math
from dataclasses import dataclass

HOUR = 3600.0

GPU_HOURS_BETWEEN_FAILURES = 54 * 24 * 16384 / 419
"""50,700: 419 unexpected interruptions in 54 days on 16,384 H100 (The Llama 3 Herd of Models, arXiv 2407.21783, sec.
3.3.4). An allocation of one's own may be better or worse by a factor: ``--gpu-hours-between-failures``."""

STORE_BYTES = 10e9
"""Bytes per second of a shared file system, over all nodes. Assumed."""

SAVED_BYTES = 14
"""Per parameter on the disk: bfloat16 weights, float32 master weights and Adam's two moments."""

START_S = 330.0
"""Seconds from a failure to reading the checkpoint: 30 until it is noticed (docs/reliability.md), 120 in Slurm's queue,
180 for Ray, imports and vLLM's graphs. Assumed."""


LARGEST_EXPONENT = 700.0
"""Failures in one cycle above which float64 overflows, and nothing is ever finished."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """How often a run fails and what a failure and a save cost, in seconds.

    Attributes:
        mtbf: mean time between failures of the whole run.
        held_up: delay of training by a save.
        restart: time from a failure to the first new step.
    """

    mtbf: float
    held_up: float
    restart: float

    def best_interval(self) -> float:
        """Seconds of training between saves for the most goodput."""
        ratio = self.held_up / (2 * self.mtbf)
        if ratio >= 1:
            return self.mtbf  # where a save takes longer than two failures nothing helps
        first_order = math.sqrt(2 * self.held_up * self.mtbf)
        return first_order * (1 + math.sqrt(ratio) / 3 + ratio / 9) - self.held_up

    def goodput(self, interval: float) -> float:
        """Share of the time, from 0 to 1, that is training which is not done again, saving every ``interval`` s."""
        if (self.restart + interval + self.held_up) / self.mtbf > LARGEST_EXPONENT:
            return 0.0
        lost = math.exp(self.restart / self.mtbf) * math.expm1((interval + self.held_up) / self.mtbf)
        return interval / (self.mtbf * lost)


def failures_of(
    num_gpus: int,
    *,
    num_parameters: float,
    snapshot_s: float,
    in_background: bool,
    gpu_hours_between_failures: float = GPU_HOURS_BETWEEN_FAILURES,
) -> Failures:
    """Of a run.

    Args:
        num_gpus: whose failure ends it.
        num_parameters: of the model that are trained.
        snapshot_s: seconds until everything that is saved lies in the hosts' memory.
        in_background: training goes on while files are written.
        gpu_hours_between_failures: of one GPU with its share of node and network.
    """
    stored = SAVED_BYTES * num_parameters / STORE_BYTES
    return Failures(
        mtbf=gpu_hours_between_failures * HOUR / num_gpus,
        held_up=snapshot_s if in_background else snapshot_s + stored,
        restart=START_S + stored,
    )
