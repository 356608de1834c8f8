"""Traces of a rank's steps by torch's profiler or Nsight Systems."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gtpo_megatron.config.output import ProfileConfig

logger = logging.getLogger(__name__)

FOLDER = "profile"
"""Name of the folder in the run folder."""


class StepProfiler:
    """Traces the chosen steps of one rank; does nothing on other ranks and at other steps.

    Args:
        config: steps and ranks to trace.
        rank: this process's rank.
        run_folder: parent of ``profile/``; None: nothing is traced.
    """

    def __init__(self, config: ProfileConfig, *, rank: int, run_folder: Path | None) -> None:
        self._config = config
        self._rank = rank
        self._folder = None if run_folder is None else run_folder / FOLDER
        self._has_cuda = torch.cuda.is_available()
        self._is_chosen = config.tool != "none" and rank in config.ranks and run_folder is not None
        if self._is_chosen and config.tool == "nsys" and not self._has_cuda:
            logger.warning("profile.tool='nsys' records nothing: there is no GPU; profile.tool='torch' works on a CPU")
            self._is_chosen = False
        self._trace: torch.profiler.profile | None = None
        self._is_capturing = False

    def step_begins(self, step: int) -> None:
        """Starts the trace if the step is the first chosen one."""
        if self._is_chosen and not self._is_running and self._config.traces(step):
            self._start()

    @contextmanager
    def stage(self, name: str, *, step: int) -> Iterator[None]:
        """Names a part of a step in the trace."""
        if not self._is_running:
            yield
            return
        with torch.profiler.record_function(f"step {step} {name}"):
            if self._is_capturing:
                torch.cuda.nvtx.range_push(f"step {step} {name}")  # type: ignore[no-untyped-call]
            try:
                yield
            finally:
                if self._is_capturing:
                    torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def step_done(self, step: int) -> None:
        """Ends and writes the trace if the next step is not chosen."""
        if self._is_running and not self._config.traces(step + 1):
            self.close()

    def close(self) -> None:
        """Ends and writes a running trace."""
        if self._is_capturing:
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
            self._is_capturing = False
            logger.info("nsys: captured; its report goes to %s", self._folder)
        if self._trace is not None:
            trace, self._trace = self._trace, None
            trace.stop()
            assert self._folder is not None
            first, last = self._config.first_step, self._config.first_step + self._config.num_steps - 1
            path = self._folder / f"steps_{first:06d}_to_{last:06d}_rank_{self._rank}.json.gz"
            self._folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(path))
            logger.info("torch's profiler: wrote %s; open it at https://ui.perfetto.dev", path)

    @property
    def _is_running(self) -> bool:
        return self._trace is not None or self._is_capturing

    def _start(self) -> None:
        if self._config.tool == "nsys":
            torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
            self._is_capturing = True
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._has_cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()


def nsight_options(config: ProfileConfig, *, rank: int, run_folder: Path) -> dict[str, str] | None:
    """Options of ``nsys profile`` for a rank's process; None if the rank runs without it.

    The rank starts and ends the capture (``cudaProfilerStart`` and ``Stop``) and continues after it.
    """
    if config.tool != "nsys" or rank not in config.ranks:
        return None
    return {
        "t": "cuda,nvtx,cublas",
        "o": str(run_folder / FOLDER / f"nsys_rank_{rank}"),
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "stop",
        "kill": "none",
    }
