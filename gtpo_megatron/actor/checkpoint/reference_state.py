"""What a checkpoint has of other models: a reference's weights once it was reset, else the checksums of its files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gtpo_megatron.actor.checkpoint.megatron_load import is_extra_state
from gtpo_megatron.actor.reference import FrozenReference, ReferencePolicy
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.megatron.adapters import file_checksums
from gtpo_megatron.weights.reshard import chunk_prefix, table_name

REFERENCE = "reference"
"""Key of the common state."""
TEACHER = "teacher"
"""Key of the common state."""
REFERENCE_WEIGHTS = "reference_weights"
"""Key of the sharded state."""
REFERENCE_PREFIX = "reference."
"""Begins the keys of the reference's tensors, which otherwise are those of the model's."""


def sharded_reference(
    chunks: Sequence[Any], reference: ReferencePolicy, metadata: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The model's own sharded state with the reference's values in it, by number of the chunk.

    Args:
        chunks: the rank's parts of the model, in order.
        reference: reference policy of this rank.
        metadata: Megatron's, as for the model.
    """
    values = reference.values()
    found: dict[str, dict[str, Any]] = {}
    for number, chunk in enumerate(chunks):
        state = chunk.sharded_state_dict(metadata=metadata)
        found[str(number)] = shards = {key: shard for key, shard in state.items() if not is_extra_state(key)}
        for key, shard in shards.items():
            shard.key = REFERENCE_PREFIX + shard.key
            shard.data = values[_name(number, len(chunks), key)]
    return found


def restore_reference(
    reference: ReferencePolicy | FrozenReference, state: Mapping[str, Any], chunks: Sequence[Any], folder: Path
) -> None:
    """Gives the reference what a loaded checkpoint says of it; of frozen weights it is a check only.

    Raises:
        CheckpointError: the checkpoint has none, or has one of other weights than this run started from.
    """
    if REFERENCE not in state:
        raise CheckpointError(
            f"checkpoint {folder} is of a run without a reference policy; resume with the configuration that it was "
            f"made with"
        )
    said = state[REFERENCE]
    if said["reset_step"] and isinstance(reference, ReferencePolicy):
        loaded = state[REFERENCE_WEIGHTS]
        values = {
            _name(number, len(chunks), key): tensor
            for number in range(len(chunks))
            for key, tensor in loaded[str(number)].items()
        }
        reference.restore(values, reset_step=int(said["reset_step"]))
        return
    what = "other frozen weights" if isinstance(reference, FrozenReference) else "another reference policy"
    _check_files(said, reference.files, folder, what=what, held_by="reference.path (or model.path)")


def check_teacher(files: Mapping[str, str], state: Mapping[str, Any], folder: Path) -> None:
    """Checks that the run goes on with the teacher that it had.

    Args:
        files: checksum by name of the teacher's files.
        state: the loaded checkpoint.
        folder: its folder.

    Raises:
        CheckpointError: the checkpoint has none, or another one.
    """
    if TEACHER not in state:
        raise CheckpointError(
            f"checkpoint {folder} is of a run without a teacher; resume with the configuration that it was made with"
        )
    _check_files(state[TEACHER], files, folder, what="another teacher", held_by="teacher.path")


def _check_files(said: Mapping[str, Any], found: Mapping[str, str], folder: Path, *, what: str, held_by: str) -> None:
    """Raises CheckpointError unless the files are those that the checkpoint speaks of."""
    files = file_checksums(said, folder)
    for name in sorted(files.keys() | found.keys()):
        if files.get(name) != found.get(name):
            raise CheckpointError(
                f"checkpoint {folder} is of a run with {what}: {name} has checksum {found.get(name)}, expected "
                f"{files.get(name)}; bring back the weights that {held_by} held"
            )


def _name(number: int, num_chunks: int, key: str) -> str:
    return chunk_prefix(number, num_chunks) + table_name(key)
