"""Megatron's loader of checkpoints, which is given nothing that it would unpickle unchecked.

Megatron unpickles the index and the common state; both are read with restriction first, so that what Megatron reads
afterwards names nothing but what is allowed. Tensors it reads with ``weights_only=True``. Objects of ranks it would
unpickle without any limit: they are never asked of it (``weights/megatron/restricted_pickle.py`` reads them), and the
check of the index sees to it that none has the name of a tensor.
"""

import re
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from torch.distributed.checkpoint.api import CheckpointException

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.megatron.checkpoint_reader import load_common
from gtpo_megatron.weights.megatron.restricted_pickle import load_index, load_stored

_EXTRA_STATE = re.compile(r"\._extra_state\d*$")
"""Ends the keys of what layers keep beside their parameters; a layer of grouped experts has one for each."""


def load(wanted: dict[str, Any], folder: Path, *, strict: StrictHandling) -> Any:
    """``megatron.core.dist_checkpointing.load`` of tensors and the common state, which runs nothing of a file.

    Raises:
        CheckpointError: a file is missing or damaged, or names what may not be in it.

    Collectives: Megatron's own over the world.
    """
    assert not any(isinstance(value, ShardedObject) for value in nested_values(wanted)), "Megatron would unpickle it"
    index = load_index(folder)
    load_common(folder, index)
    try:
        # given, since metadata.json could name another format, with a reader of its own
        return serialization.load(wanted, str(folder), sharded_strategy=TorchDistLoadShardedStrategy(), strict=strict)
    except (Exception, CheckpointException) as error:  # torch's is no Exception
        if "UnpicklingError" in reason(error):  # torch does not say in which file
            for key in index.storage_data:
                load_stored(folder, index, key)
        raise CheckpointError(f"checkpoint {folder} cannot be loaded: {reason(error)}") from error


def is_extra_state(key: str) -> bool:
    """Whether a key of a state is of what a layer keeps beside its parameters."""
    return _EXTRA_STATE.search(key) is not None


def drop_extra_states(state: dict[str, Any]) -> dict[str, None]:
    """Takes out of a chunk's sharded state what layers keep beside their parameters.

    Transformer Engine unpickles what a layer finds there. It is empty but for the factors of float8, which no run here
    has; and layers of a CPU and of a GPU have it in different places, so that neither could load the other's.

    Args:
        state: state of a model chunk; changed.

    Returns:
        What a layer is given in its place, by key.
    """
    absent = dict.fromkeys(key for key in state if is_extra_state(key))
    for key in absent:
        del state[key]
    return absent


def reason(error: BaseException) -> str:
    """Why ranks could not read or write, in a line; of torch's exception for several ranks, the error of each."""
    if isinstance(error, CheckpointException):
        return "; ".join(f"rank {rank}: {reason(cause)}" for rank, (cause, _) in error.failures.items())
    return printable(f"{type(error).__name__}: {error}")
