"""What a run writes down: checkpoints, logs and metrics, traces."""

from typing import Literal

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from gtpo_megatron.config.checks import require_text
from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError


@configuration
class CheckpointConfig:
    """Checkpoints of a run. docs/checkpoints.md says what is in them.

    Attributes:
        every_steps: steps between saves; the last step is always saved. 0 saves at the end only.
        keep: number of the latest that are kept.
        keep_best: number of the best by ``best_metric`` are kept besides, among the checkpoints of steps that were
            measured: let some saves fall on evaluations.
        best_metric: held-out metric, larger is better, such as ``eval/aime24_pass_at_k``.
        async_save: write in the background while training goes on; a failed write stops the run at the next step
            boundary. False waits for the disk.
        verify: before a run goes on or is exported: ``full`` compares every file's size and checksum with the manifest,
            ``sizes`` leaves out the checksums of shards, ``none`` accepts a checkpoint without a manifest too.
        export_hf: write the trained model in Hugging Face format to ``hf/`` at the end.
    """

    every_steps: NonNegativeInt = 10
    keep: PositiveInt = 2
    keep_best: NonNegativeInt = 0
    best_metric: str = "eval/heldout_mean_at_k"
    async_save: bool = True
    verify: Literal["full", "sizes", "none"] = "full"
    export_hf: bool = True

    def __post_init__(self) -> None:
        require_text(best_metric=self.best_metric)


@configuration
class LoggingConfig:
    """Loggers and sampled texts. ``metrics.jsonl`` and ``log.txt`` are always written.

    Attributes:
        log_level: level of our own loggers; other libraries' stay at WARNING.
        tensorboard: write ``events.out.*`` into the run folder; needs the extra ``tensorboard``.
        wandb_project: project at Weights & Biases, which needs the extra ``wandb``; None: wandb is not imported.
        wandb_entity: user or team that owns the project; None: the account's default.
        wandb_mode: ``offline`` writes into the run folder for a later ``wandb sync`` (compute nodes without internet).
        sinks: further sinks of metrics, ``module:Class`` or ``FILE.py:Class``: of your own, or MLflow's, Trackio's and
            SwanLab's of ``examples/own_sink`` (docs/metrics.md).
        rollout_groups_per_step: prompt groups whose texts are written to ``rollouts/`` in a step; 0 writes none.
        peak_tflops_per_rank: peak of a rank's hardware in the model's dtype, in 10^12 operations a second (an
            H100 989 in dense bfloat16): the share that is reached is reported as MFU; 0 reports none.
        rollout_every_steps: steps between two such files; long responses fill disks (about 100 bytes a token).
    """

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    tensorboard: bool = False
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    sinks: tuple[str, ...] = ()
    rollout_groups_per_step: NonNegativeInt = 2
    rollout_every_steps: PositiveInt = 1
    peak_tflops_per_rank: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        if self.wandb_project is not None:
            require_text(wandb_project=self.wandb_project)
        if self.wandb_entity is not None and self.wandb_project is None:
            raise ConfigError(f"wandb_entity={self.wandb_entity!r} without wandb_project: set that too")


@configuration
class ProfileConfig:
    """A trace of a few steps, written to ``profile/`` in the run folder. A traced step is slower.

    Attributes:
        tool: ``torch`` writes a trace for chrome://tracing or Perfetto, on CPUs and GPUs; ``nsys`` starts every chosen
            rank under NVIDIA Nsight Systems, which must be installed, and records nothing without a GPU.
        first_step: the first step traced; step 1 also pays for what is made once.
        num_steps: number of steps in a row.
        ranks: trainer ranks that are traced.
    """

    tool: Literal["none", "torch", "nsys"] = "none"
    first_step: PositiveInt = 2
    num_steps: PositiveInt = 1
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 0 or len(set(self.ranks)) < len(self.ranks):
            raise ConfigError(f"ranks={self.ranks!r}: expected different numbers of trainer ranks, 0 or more")

    def traces(self, step: int) -> bool:
        """Whether a step is among those traced."""
        return self.tool != "none" and self.first_step <= step < self.first_step + self.num_steps
