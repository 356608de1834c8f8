"""The planner's expectations of the recipe on the GPUs that are there: rates, seconds and bytes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gtpo_megatron.companions.planner.efficiency import COMPUTE_EFFICIENCY
from gtpo_megatron.companions.planner.hardware import GPU, GPUS, MIB, GPUName, gpu_of_device
from gtpo_megatron.companions.planner.phases import engine_gpu, trainer_gpu
from gtpo_megatron.companions.planner.request import Cluster, PlanRequest, gpus_of, request_from
from gtpo_megatron.companions.planner.search import assess
from gtpo_megatron.companions.planner.step_time import BYTES_EFFICIENCY, StepTime
from gtpo_megatron.config.run import RunConfig

TIME_FACTOR = 2.0
"""A measured time may be so many times the planned one: published steps take 1.5 to 1.9 times as long as the plan
says (docs/planning_reference.md)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A GPU as a process sees it.

    Attributes:
        uuid: identity of the board in nvidia-smi.
        name: name of the kind.
        memory: memory in bytes.
    """

    uuid: str
    name: str
    memory: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectations:
    """Expectations of one recipe on one kind of GPU; nothing is expected of machines without GPUs.

    Attributes:
        gpu: rates by the data sheet; None without GPUs, or for a kind that the planner does not know.
        why_no_rates: reason why there are no rates.
        request: planned run; None without GPUs.
        time: planned seconds of a step; None without rates.
    """

    gpu: GPU | None
    why_no_rates: str
    request: PlanRequest | None = None
    time: StepTime | None = None

    @property
    def has_gpus(self) -> bool:
        """Whether the run is on GPUs."""
        return self.request is not None

    @property
    def matrix_flops(self) -> float | None:
        """Operations a second that a large bfloat16 product should reach."""
        return self.gpu.bf16_flops * COMPUTE_EFFICIENCY if self.gpu else None

    def link_bytes(self, *, on_one_node: bool) -> float | None:
        """Bytes a second and direction that a collective should reach."""
        if self.gpu is None:
            return None
        return BYTES_EFFICIENCY * (self.gpu.nvlink_bytes_per_s if on_one_node else self.gpu.network_bytes_per_s)

    def planned_bytes(self, role: str) -> Mapping[str, int]:
        """Bytes by phase on a GPU: ``stage 0``, ..., or ``engine``."""
        request = self.request
        assert request is not None, "only GPUs are planned"
        layout = request.own_layout
        assert layout is not None, "the recipe has as many GPUs as ranks"
        gpu = engine_gpu(request, layout) if role == "engine" else trainer_gpu(request, layout, int(role.split()[1]))
        return {phase: sum(parts.values()) for phase, parts in gpu.phases.items()}


NO_GPUS = Expectations(gpu=None, why_no_rates="no GPU")


def expectations(config: RunConfig, devices: Sequence[Device], *, gpu: GPUName | None, per_node: int) -> Expectations:
    """Plans the recipe on the GPUs that its processes have.

    Args:
        config: recipe.
        devices: GPUs of the ranks; empty on CPUs.
        gpu: kind, if the device's name does not say it.
        per_node: largest number of GPUs on a node.

    Raises:
        ConfigError: the layout does not divide the model.
    """
    if not devices:
        return NO_GPUS
    name = gpu or gpu_of_device(devices[0].name)
    ranks, more = gpus_of(config)
    needed = ranks + more
    total = needed if needed <= per_node else needed + -needed % per_node
    request = request_from(
        config,
        Cluster(
            gpu=GPUS[name or "h100"],  # bytes do not depend on its rates
            num_gpus=total,
            gpu_memory=min(device.memory for device in devices),
            gpus_per_node=per_node,
            num_rollout_gpus=more,
            num_idle_gpus=total - needed,
        ),
    )
    if name is None:
        return Expectations(
            gpu=None, why_no_rates=f"the planner does not know {devices[0].name!r}; give --gpu", request=request
        )
    assert request.own_layout is not None, "the recipe has as many GPUs as ranks"
    return Expectations(gpu=GPUS[name], why_no_rates="", request=request, time=assess(request, request.own_layout).time)


def gib(num_bytes: float) -> str:
    """``3.2 GiB``, or MiB below one."""
    return f"{num_bytes / MIB / 1024:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / MIB:.1f} MiB"


def rate(bytes_per_s: float) -> str:
    """``0.41 GB/s``, in powers of ten as links are sold."""
    return f"{bytes_per_s / 1e9:.3g} GB/s"
