"""When a run is saved, what is kept of it, and how much is checked when it goes on."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from gtpo_megatron.config.checks import require_text
from gtpo_megatron.config.configuration import configuration


@configuration
class CheckpointConfig:
    """Checkpoints of a run. docs/checkpoints.md says what is in them.

    Attributes:
        every_steps: steps between saves; the last step is always saved. 0 saves at the end only.
        keep: how many of the latest are kept.
        keep_best: how many of the best by ``best_metric`` are kept besides, among the checkpoints of steps that were
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
