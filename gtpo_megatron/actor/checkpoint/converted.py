"""Fills a rank's parts of the model from a converted folder, through Megatron's own loader."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from gtpo_megatron.actor.checkpoint.restricted_load import drop_extra_states, load, reason
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.finite_tensors import require_finite


@torch.no_grad()
def load_converted(checkpoint: Path, chunks: Sequence[Any]) -> None:
    """Loads the weights, whichever layout they were converted for; rows that only pad the vocabulary become 0.

    Args:
        checkpoint: Megatron's files.
        chunks: the rank's parts of the model, in order.

    Raises:
        CheckpointError: damaged, or of another model.
        ConfigError: a tensor holds NaN or infinity.

    Collectives: Megatron's own over the world.
    """
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"singleton_local_shards": False, "dp_cp_group": group}
    wanted: dict[str, dict[str, Any]] = {}
    absent: list[dict[str, None]] = []
    for number, chunk in enumerate(chunks):
        for parameter in chunk.parameters():
            parameter.zero_()  # Megatron leaves the padding that the checkpoint does not have as it is
        wanted[str(number)] = chunk.sharded_state_dict(metadata=metadata)
        absent.append(drop_extra_states(wanted[str(number)]))
    try:
        found = load(wanted, checkpoint, strict=StrictHandling.RAISE_ALL)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        raise CheckpointError(f"{checkpoint} cannot be loaded: {reason(error)}") from error
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(found[str(number)] | absent[number])
        for name, parameter in chunk.named_parameters():
            require_finite([parameter], name, where=checkpoint)
