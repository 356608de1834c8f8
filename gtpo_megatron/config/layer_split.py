"""Which layers each stage of a pipeline holds."""

from dataclasses import dataclass

from gtpo_megatron.config.checks import divisors


@dataclass(frozen=True, slots=True)
class LayerSplit:
    """Consecutive layers, dealt to the virtual stages of a pipeline; all alike but those of the last pipeline rank.

    A *virtual stage* is one chunk of layers of one pipeline rank: stage ``chunk * pipeline + rank``. The last rank also
    has the output layer, and can be given fewer layers for it. Megatron-core's ``num_layers_in_last_pipeline_stage``
    means the same.

    Attributes:
        pipeline: ranks that share the layers.
        virtual: chunks of each rank.
        last_rank_layers: layers of the last rank, in all its chunks together; None: as many as the others have.
    """

    pipeline: int = 1
    virtual: int = 1
    last_rank_layers: int | None = None

    @property
    def num_stages(self) -> int:
        """Virtual stages of the whole pipeline."""
        return self.pipeline * self.virtual

    def problem(self, num_layers: int) -> str | None:
        """What is wrong with so many layers, and what would be right; None if they can be dealt."""
        last = self.last_rank_layers
        if last is None:
            if num_layers % self.num_stages == 0:
                return None
            return (
                f"pipeline_parallel_size x virtual_pipeline_size = {self.num_stages} must divide num_layers="
                f"{num_layers} of this model; choose a product from {divisors(num_layers)}, or give the last stage "
                f"fewer layers (last_stage_layers)"
            )
        others = self.pipeline - 1
        if last % self.virtual == 0 and (num_layers - last) % (others * self.virtual) == 0 and last < num_layers:
            return None
        allowed = [
            size
            for size in range(self.virtual, num_layers, self.virtual)
            if (num_layers - size) % (others * self.virtual) == 0
        ]
        return (
            f"last_stage_layers={last} of this model's {num_layers} leaves {num_layers - last} for {others} other "
            f"stages of {self.virtual} chunks; choose from {allowed}"
        )

    def layers(self, num_layers: int, stage: int) -> range:
        """Numbers of the layers of a virtual stage; ``problem`` must have found nothing."""
        chunk, rank = divmod(stage, self.pipeline)
        if self.last_rank_layers is None:
            size = num_layers // self.num_stages
            return range(stage * size, (stage + 1) * size)
        last = self.last_rank_layers // self.virtual
        size = (num_layers - self.last_rank_layers) // ((self.pipeline - 1) * self.virtual)
        first = chunk * ((self.pipeline - 1) * size + last) + rank * size
        return range(first, first + (last if rank == self.pipeline - 1 else size))
