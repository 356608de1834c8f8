"""Which steps are traced, by which tool."""

from typing import Literal

from pydantic import PositiveInt

from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class ProfileConfig:
    """A trace of a few steps, written to ``profile/`` in the run folder. A traced step is slower.

    Attributes:
        tool: ``torch`` writes a trace for chrome://tracing or Perfetto, on CPUs and GPUs; ``nsys`` starts every chosen
            rank under NVIDIA Nsight Systems, which must be installed, and records nothing without a GPU.
        first_step: the first step traced; step 1 also pays for what is made once.
        num_steps: how many in a row.
        ranks: trainer ranks that are traced.
        with_stack: torch: record where in the Python source each operator is called, at a high price.
        with_memory: torch: record allocations.
    """

    tool: Literal["none", "torch", "nsys"] = "none"
    first_step: PositiveInt = 2
    num_steps: PositiveInt = 1
    ranks: tuple[int, ...] = (0,)
    with_stack: bool = False
    with_memory: bool = False

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ConfigError(f"ranks={self.ranks!r}: expected different numbers of trainer ranks, 0 or more")

    def traces(self, step: int) -> bool:
        """Whether a step is among those traced."""
        return self.tool != "none" and self.first_step <= step < self.first_step + self.num_steps
