"""Low-rank adapters: few weights that are trained in the place of all."""

import math
from dataclasses import fields
from typing import Literal

from pydantic import NonNegativeInt, PositiveFloat

from gtpo_megatron.config.configuration import configuration
from gtpo_megatron.errors import ConfigError

ALL_LINEAR = "all-linear"
"""Among the targets: every projection but those of experts. peft calls it so, too."""


SAMPLER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of vLLM's ``max_lora_rank``."""


@configuration
class AdapterConfig:
    """LoRA (arXiv 2106.09685): a projection ``W x`` becomes ``W x + s B A x``; A and B are trained, W is frozen.

    ``A [rank, inputs]`` begins at random, ``B [outputs, rank]`` at 0, so that a run begins with the model as it is.
    Embedding, norms, routers and output layer are frozen too.

    Attributes:
        rank: rank of ``B A``; 0: no adapters, every weight is trained.
        alpha: ``s = alpha / rank``.
        scaling: divides alpha by the ``rank``, or by its root (rsLoRA, arXiv 2312.03732), so that a higher rank learns
            no slower.
        targets: projections that have adapters, by the last part of their names in the model's folder; ``all-linear``:
            all but those of experts, which are ``experts.gate_up_proj`` and ``experts.down_proj``.
        dtype: dtype of A and B in forward and backward: that of the ``model``, or ``float32``; masters and moments are
            float32 in any case.
        path: folder in peft's format whose adapters the run begins with.
        push: cargo of a push to the sampler: its weights with adapters ``merged`` in, or the ``adapters`` alone, which
            vLLM then multiplies with every token; it reads the frozen weights from ``model.path`` once.
        shard_frozen: each data-parallel replica keeps a part of the frozen weights and gathers a layer for the time in
            which it computes, instead of keeping all of them.
    """

    rank: NonNegativeInt = 0
    alpha: PositiveFloat = 32.0
    scaling: Literal["rank", "sqrt_rank"] = "rank"
    targets: tuple[str, ...] = (ALL_LINEAR,)
    dtype: Literal["model", "float32"] = "model"
    path: str = ""
    push: Literal["merged", "adapters"] = "merged"
    shard_frozen: bool = False

    def __post_init__(self) -> None:
        changed = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        if changed and not self.rank:
            raise ConfigError(
                f"adapter.{changed[0]}={getattr(self, changed[0])!r} with adapter.rank=0: no adapters are trained; set "
                f"--adapter.rank"
            )
        if len(set(self.targets)) < len(self.targets) or not all(self.targets) or not self.targets:
            raise ConfigError(f"adapter.targets={self.targets!r}: must be names of projections, each once")
        if self.pushes_alone and self.rank > SAMPLER_RANKS[-1]:
            raise ConfigError(
                f"adapter.rank={self.rank} with adapter.push='adapters': vLLM takes ranks up to {SAMPLER_RANKS[-1]}; "
                f"use push='merged'"
            )

    @property
    def is_on(self) -> bool:
        """Adapters are trained, and nothing else."""
        return self.rank > 0

    @property
    def pushes_alone(self) -> bool:
        """Adapters travel without the weights."""
        return self.is_on and self.push == "adapters"

    @property
    def sampler_rank(self) -> int:
        """The rank that vLLM is started with: the next one that it knows."""
        return next(rank for rank in SAMPLER_RANKS if rank >= self.rank)

    @property
    def scale(self) -> float:
        """``s``."""
        return self.alpha / (self.rank if self.scaling == "rank" else math.sqrt(self.rank))
