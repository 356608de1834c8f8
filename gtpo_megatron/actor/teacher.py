"""The teacher: a frozen model of any shape on the trainer's ranks, which scores what the student has sampled."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gtpo_megatron.actor import cpu_platform
from gtpo_megatron.actor.checkpoint.model_folder import load_model_folder
from gtpo_megatron.actor.host_memory import HostCopies
from gtpo_megatron.actor.model.adapters import Adapters
from gtpo_megatron.actor.model.policy_model import build_chunks, weights_by_name
from gtpo_megatron.actor.model.transformer_config import transformer_config
from gtpo_megatron.actor.policy_head import PolicyHead
from gtpo_megatron.actor.reference import folder_checksums
from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.config.run import RunConfig
from gtpo_megatron.data.packing import PackedMicroBatch
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.weight_checks import teacher_architecture

logger = logging.getLogger(__name__)

ABSENT_LOGPROB = -20.0
"""Nats, of a token that the teacher has no row for: it gives none of its probability to it, and a loss is finite."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """A rank's part of the teacher, in the layout of the student.

    Attributes:
        chunks: its parts of the model, in order.
        head: its output layer, at the temperature at which the student samples.
        at_hand: its weights are where it computes within a block of this; elsewhere they may be on the host.
        arch: its architecture.
        files: checksum by name of the files that its weights came from.
    """

    chunks: Sequence[Any]
    head: PolicyHead
    at_hand: Callable[[], AbstractContextManager[None]]
    arch: Architecture
    files: Mapping[str, str]

    def readable(self, batches: Sequence[PackedMicroBatch]) -> list[PackedMicroBatch]:
        """The micro-batches with token 0 in the place of tokens that the teacher has no row for.

        A student may sample rows of its own that no tokenizer has; embeddings of one family differ in how many there
        are, such as those of Qwen2.5 of 3 and of 7 billion parameters.
        """

        def known(ids: Tensor) -> Tensor:
            return torch.where(ids < self.arch.vocab_size, ids, 0)

        return [
            replace(batch, input_ids=known(batch.input_ids), target_ids=known(batch.target_ids)) for batch in batches
        ]

    def with_absent(self, logprobs: Tensor, rollouts: RolloutBatch) -> Tensor:
        """``[B, T]`` log-probs, ``ABSENT_LOGPROB`` at the student's tokens that the teacher has no row for."""
        is_absent = rollouts.loss_mask & (rollouts.response_ids >= self.arch.vocab_size)
        return torch.where(is_absent, ABSENT_LOGPROB, logprobs)


def load_teacher(
    config: RunConfig,
    student: Sequence[Any],
    head: PolicyHead,
    adapters: Adapters | None,
    *,
    global_rank: int,
) -> Teacher | None:
    """The teacher of a run, from its folder; None if the run has none.

    Below adapters of the same folder it is there already: the student with its adapters switched off, at no memory.

    Args:
        config: configuration of the run.
        student: parts of the student's model on this rank, as Megatron has wrapped them.
        head: the student's output layer.
        adapters: the student's; None: all its weights are trained.
        global_rank: rank of this process.

    Raises:
        ConfigError: the folder cannot be used, or the layout does not divide the model.
        WeightMappingError: tensors are not the model's.
        CheckpointError: converted weights are damaged.

    Collectives: of a converted folder Megatron's own; one gather of texts over the world.
    """
    if not config.teacher.path:
        return None
    folder, parallel = Path(config.teacher.path), config.parallel
    arch = teacher_architecture(folder, parallel, num_tokens=config.model.max_sequence_tokens)
    files = folder_checksums(folder)
    if adapters is not None and not config.has_own_teacher:
        return Teacher(student, head, adapters.switched_off, arch, files)
    model = replace(config.model, recompute="none")  # without a backward pass
    chunks = build_chunks(arch, model, parallel, transformer_config(arch, model, parallel))
    load_model_folder(folder, arch, parallel, chunks, None, global_rank=global_rank)
    for chunk in chunks:
        chunk.requires_grad_(requires_grad=False)
    return Teacher(
        chunks,
        replace(head, model=chunks[-1], vocab_size=arch.vocab_size, frozen=None),
        _parked(chunks),
        arch,
        files,
    )


def _parked(chunks: Sequence[torch.nn.Module]) -> Callable[[], AbstractContextManager[None]]:
    """Moves the weights to the host's page-locked memory, and returns what has them on the GPU within a block.

    They are copied to the host once: nothing changes them. Without a GPU they stay where they are.
    """
    copies, weights = HostCopies(), list(weights_by_name(chunks).values())

    @contextmanager
    def at_hand() -> Iterator[None]:
        copies.fetch()
        try:
            yield
        finally:
            park()

    def park() -> None:
        if not cpu_platform.is_cpu():
            copies.park(weights, are_unchanged=True)
            torch.cuda.empty_cache()

    park()
    logger.info("the teacher's %.2f GiB on this rank wait on the host", sum(w.nbytes for w in weights) / 2**30)
    return at_hand
