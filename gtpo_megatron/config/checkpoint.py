"""When a run is saved."""

from dataclasses import dataclass

from gtpo_megatron.config.checks import require_non_negative, require_positive, require_types


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Checkpoints of a run.

    Attributes:
        every_steps: steps between saves; the last step is always saved. 0 saves at the end only.
        keep: how many of the latest are kept.
        export_hf: write the trained model in Hugging Face format to ``hf/`` at the end.
    """

    every_steps: int = 10
    keep: int = 2
    export_hf: bool = True

    def __post_init__(self) -> None:
        require_types(self)
        require_non_negative(every_steps=self.every_steps)
        require_positive(keep=self.keep)
