"""Costs of a rank's stages: seconds, GPU memory, tokens and operations a second."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from gtpo_megatron.actor.model.flops import backward_flops, forward_flops
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.packing import PackedMicroBatch, num_places
from gtpo_megatron.observability.memory import GIB
from gtpo_megatron.observability.metrics import Max, Mean, Metric
from gtpo_megatron.observability.profiling import StepProfiler
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.weights.architecture import Architecture

TERA = 1e12

UPDATE_STAGES = ("prepare", "forward_backward", "optimizer")
"""Their sum is the time of the updates."""


@dataclass(slots=True)
class _Work:
    """Tokens and operations of this rank's replica since the last report."""

    tokens: float = 0.0
    flops: float = 0.0


class StageReport:
    """Measures the stages of one rank; every rank reports for itself, and the merged metrics are those of all.

    On a GPU a stage's clock stops when the device has done its work.

    Args:
        arch: architecture of the model.
        config: configuration of the run.
        profiler: names the stages in its trace.
    """

    def __init__(self, arch: Architecture, config: RunConfig, profiler: StepProfiler) -> None:
        self.profiler = profiler
        self._step = 0
        self._arch = arch
        self._adapter = config.adapter
        self._parallel = config.parallel
        self._peak_tflops = config.logging.peak_tflops_per_rank
        self._timers = StageTimers()
        self._gpu_peaks: dict[str, float] = {}
        self._work: dict[str, _Work] = {}

    def step_begins(self, step: int) -> None:
        """Starts a trace if the profiler is to trace this step."""
        self._step = step
        self.profiler.step_begins(step)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Measures its body under ``actor_<name>``; stages do not nest."""
        has_cuda = torch.cuda.is_available()
        if has_cuda:
            torch.cuda.reset_peak_memory_stats()
        with self.profiler.stage(name, step=self._step), self._timers.stage(f"actor_{name}"):
            yield
            if has_cuda:
                torch.cuda.synchronize()
        if has_cuda:
            peak = torch.cuda.max_memory_allocated() / GIB
            self._gpu_peaks[name] = max(peak, self._gpu_peaks.get(name, 0.0))

    def add_work(
        self,
        part: str,
        batch: RolloutBatch,
        rows: Sequence[int],
        packed: Sequence[PackedMicroBatch],
        *,
        with_backward: bool,
    ) -> None:
        """Counts a pass of this rank's replica over some rows to ``score`` or ``update``.

        Tokens are those of all sequences, operations those that were made: of a prefix that sequences share, once.
        """
        sequences: list[tuple[int, int]] = []  # tokens that are read only, and those that may be scored
        for row in rows:
            for path, length in zip(batch.paths(row), batch.sequence_lengths(row), strict=True):
                num_new = path.num_tokens - path.num_known
                sequences.append((length - num_new, num_new))
        work = self._work.setdefault(part, _Work())
        work.tokens += sum(map(sum, sequences))
        spared = [(num_places(prefix), 0) for one in packed for prefix in one.prefixes]
        work.flops += forward_flops(self._arch, sequences) - forward_flops(self._arch, spared)
        if with_backward:
            work.flops += backward_flops(self._arch, sequences, self._adapter)
            work.flops -= backward_flops(self._arch, spared, self._adapter)

    def take(self) -> dict[str, Metric]:
        """The metrics since the last call."""
        times = self._timers.take()
        metrics: dict[str, Metric] = {name: Max(seconds) for name, seconds in times.items()}
        for name, peak in self._gpu_peaks.items():
            metrics[f"memory/actor_{name}_gpu_peak_gib"] = Max(peak)
        for part, work in self._work.items():
            stages = UPDATE_STAGES if part == "update" else (part,)
            seconds = sum(times.get(f"timing/actor_{stage}_s", 0.0) for stage in stages)
            metrics |= self._rates(part, work, seconds)
        self._gpu_peaks, self._work = {}, {}
        return metrics

    def _rates(self, part: str, work: _Work, seconds: float) -> dict[str, Metric]:
        """Rates as sums over sums, so that ranks merge: each is of one rank's seconds.

        A replica's tokens and operations are those of all its ranks together; tokens a second are of all replicas.
        """
        tflops = work.flops / TERA / self._parallel.replica_size
        rates: dict[str, Metric] = {
            f"throughput/{part}_tokens_per_s": Mean(work.tokens * self._parallel.data_parallel_size, seconds),
            f"throughput/{part}_tflops_per_rank": Mean(tflops, seconds),
        }
        if self._peak_tflops > 0:
            rates[f"throughput/{part}_mfu_frac"] = Mean(tflops, seconds * self._peak_tflops)
        return rates
