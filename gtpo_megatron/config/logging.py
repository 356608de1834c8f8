"""What a run writes down about itself."""

from dataclasses import dataclass
from typing import Literal

from gtpo_megatron.errors import ConfigError

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggingConfig:
    """Loggers and sampled texts. ``metrics.jsonl`` and ``log.txt`` are always written.

    Attributes:
        log_level: of our own loggers; other libraries' stay at WARNING.
        tensorboard: write ``events.out.*`` into the run folder.
        wandb_project: project at Weights & Biases; None: wandb is not imported.
        wandb_entity: user or team that owns the project; None: the account's default.
        wandb_mode: ``offline`` writes into the run folder for a later ``wandb sync`` (compute nodes without internet).
        rollout_groups_per_step: prompt groups whose texts are written to ``rollouts/`` in a step; 0 writes none.
        rollout_every_steps: steps between two such files; long responses fill disks (about 100 bytes a token).
    """

    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    tensorboard: bool = True
    wandb_project: str | None = None
    wandb_entity: str | None = None
    wandb_mode: Literal["online", "offline"] = "online"
    rollout_groups_per_step: int = 2
    rollout_every_steps: int = 1

    def __post_init__(self) -> None:
        if self.log_level not in LOG_LEVELS:
            raise ConfigError(f"logging.log_level: got {self.log_level!r}, expected one of {', '.join(LOG_LEVELS)}")
        if self.wandb_mode not in ("online", "offline"):
            raise ConfigError(f"logging.wandb_mode: got {self.wandb_mode!r}, expected 'online' or 'offline'")
        if self.wandb_project is not None and not self.wandb_project.strip():
            raise ConfigError("logging.wandb_project: got an empty name; name a project, or leave it out")
        if self.wandb_entity is not None and self.wandb_project is None:
            raise ConfigError(
                f"logging.wandb_entity: got {self.wandb_entity!r} without logging.wandb_project; set that too"
            )
        if self.rollout_groups_per_step < 0:
            raise ConfigError(
                f"logging.rollout_groups_per_step: got {self.rollout_groups_per_step}, expected 0 (none) or more"
            )
        if self.rollout_every_steps < 1:
            raise ConfigError(f"logging.rollout_every_steps: got {self.rollout_every_steps}, expected 1 or more")
