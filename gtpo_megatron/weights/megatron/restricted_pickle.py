"""Reads what torch and Megatron pickle, and runs nothing of it: the only module that unpickles a file.

A pickle is a program: it may name any function and have it called with any arguments. Megatron's index of a checkpoint
(``.metadata``) is a plain pickle; a name that is not in the list below ends the reading, before anything of it is
looked up. Everything else is a file of ``torch.save``, which torch's own restricted unpickler reads
(``weights_only=True``), with NumPy's arrays besides, which the random states are.

``tests/unit/test_unpickling.py`` sees to it that no other module calls an unpickler.
"""

import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.utils import _create_file_view

from gtpo_megatron.errors import CheckpointError, GTPOError
from gtpo_megatron.untrusted.text import bare_name, printable, read_bytes, shown

INDEX_FILE = ".metadata"
MAX_INDEX_BYTES = 4 << 30
"""Of Megatron's index; a thousand ranks' plans for a large model have some hundred MB."""
OBJECT_MARK = "/shard_"
"""In the name of every object that is no tensor, as Megatron writes it: ``<key>/shard_<place>_<extent>``."""


class _Empty:
    """Stands for Megatron's classes without contents, which versions up to 0.15 wrote into their index."""


def _joined(*parts: str) -> str:
    """A path as text."""
    return "/".join(map(str, parts))


_CLASSES = (
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, filesystem._StorageInfo),
    *(metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, metadata.ChunkStorageMetadata),
    *(metadata.TensorProperties, metadata._MEM_FORMAT_ENCODING, torch.Size),
    # the ranks' plans, which Megatron keeps in the index too
    *(planner.SavePlan, planner.WriteItem, planner.WriteItemType, planner.TensorWriteData),
)
_ALLOWED: dict[str, Any] = {
    **{f"{found.__module__}.{found.__qualname__}": found for found in _CLASSES},
    **{str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    "torch.serialization._get_layout": torch.serialization._get_layout,
    # the folder, if it was given as a path; nothing is done with it
    "pathlib.PosixPath": _joined,
    "pathlib._local.PosixPath": _joined,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": _Empty,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": _Empty,
}
"""The names of ``.metadata``: what torch's checkpoint and Megatron 0.16 to 0.19 write into it."""

_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
_NUMPY: tuple[Any, ...] = (
    *(np.ndarray, np.dtype, type(np.dtype(np.uint32)), _RECONSTRUCT),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # its name in NumPy 1
)
"""Of random states, beside what torch allows by itself: tensors, plain values, sets, ordered dicts."""
_TORCH_LOCK = Lock()


class _Restricted(pickle.Unpickler):
    """An unpickler that knows the names of the list, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns the list's entry; a function in a wrapper, so that no attribute of the real one can be set."""
        full_name = f"{module}.{name}"
        if full_name not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {full_name}")
        found = _ALLOWED[full_name]
        if isinstance(found, type) or not callable(found):
            return found
        return lambda *arguments: found(*arguments)  # noqa: PLW0108 - the lambda is what a pickle may change


def load_index(folder: Path) -> Metadata:
    """Megatron's index of a checkpoint, its parts of the kinds that they must be.

    Raises:
        CheckpointError: it cannot be read, is no index, names what is no part of one, or a file outside the folder.
    """
    path = folder / INDEX_FILE
    content = read_bytes(path, limit=MAX_INDEX_BYTES, error=CheckpointError)
    try:
        with _classes_unchanged():
            found: Metadata = _Restricted(io.BytesIO(content)).load()
    except Exception as error:  # whatever a damaged or hostile pickle raises
        raise CheckpointError(f"{printable(path)} {refusal(error)}") from error
    try:
        for part, kind in _parts(found):
            if not isinstance(part, kind):
                raise TypeError(f"{shown(part)} is of {type(part).__name__}, expected {kind.__name__}")
        for key, place in found.storage_data.items():
            bare_name(place.relative_path, f"{printable(path)}: the file of {printable(key.fqn)}", CheckpointError)
    except (AttributeError, TypeError) as error:  # the former of an object that lacks what its class has
        raise CheckpointError(f"{printable(path)} is damaged: {printable(error)}; take another checkpoint") from error
    return found


def _parts(index: Metadata) -> Iterator[tuple[Any, type]]:
    """Parts of an index that readers count on, each with the kind that it must be of."""
    yield index, Metadata
    yield index.state_dict_metadata, dict
    yield index.storage_data, dict
    for name, entry in index.state_dict_metadata.items():
        yield name, str
        # an object under a tensor's name would be unpickled where a tensor is asked for
        yield entry, BytesStorageMetadata if OBJECT_MARK in name else TensorStorageMetadata
        if isinstance(entry, TensorStorageMetadata):
            yield entry.properties.dtype, torch.dtype
            for size in (entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))):
                yield size, torch.Size
    for key, place in index.storage_data.items():
        yield key, MetadataIndex
        yield place, filesystem._StorageInfo
        yield place.offset, int
        yield place.length, int
        # by an extension of torch's, which is not read
        yield getattr(place, "transform_descriptors", None) or None, type(None)


@contextmanager
def _classes_unchanged() -> Iterator[None]:
    """Refuses a pickle that sets attributes of a class instead of an object's, and takes them back."""
    before = [(found, dict(vars(found))) for found in _ALLOWED.values() if isinstance(found, type)]
    try:
        yield
    finally:
        # the others come into being when somebody asks for them
        wrong = [
            (found, name, old)
            for found, old in before
            for name in vars(found).keys() - {"__annotations__", "__doc__"}
            if vars(found)[name] is not old.get(name)
        ]
        for found, name, old in wrong:
            setattr(found, name, old[name]) if name in old else delattr(found, name)
    if wrong:
        raise pickle.UnpicklingError(f"it names {wrong[0][0].__qualname__}.{wrong[0][1]}")


def load_torch(source: Path | bytes | BinaryIO, *, where: str = "") -> Any:
    """Loads on the CPU what ``torch.save`` wrote.

    Args:
        source: a file, or its content.
        where: named in errors; the file by default.

    Raises:
        CheckpointError: it cannot be read, or names what may not be in it.
    """
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _numpy_allowed():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile file raises
        raise CheckpointError(f"{where or printable(source)} {refusal(error)}") from error


@contextmanager
def _numpy_allowed() -> Iterator[None]:
    """Adds to torch's list what is not on it; Megatron puts some of it there for the whole process."""
    with _TORCH_LOCK:
        absent = [one for one in _NUMPY if one not in torch.serialization.get_safe_globals()]
        with torch.serialization.safe_globals(absent):
            yield


def load_stored(folder: Path, index: Metadata, key: MetadataIndex) -> Any:
    """A chunk of a tensor, or an object, as a rank stored it.

    Raises:
        CheckpointError: it is not there, or as in :func:`load_torch`.
    """
    place = index.storage_data.get(key)
    if place is None:
        raise CheckpointError(f"{printable(folder / INDEX_FILE)} does not say where {printable(key.fqn)} is")
    path = folder / place.relative_path
    kind = "object" if OBJECT_MARK in key.fqn else "tensor"
    try:
        with path.open("rb") as file:
            view: Any = _create_file_view(file, place.offset, place.length)
            return load_torch(view, where=f"{printable(path)}: the {kind} {printable(key.fqn)}")
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def load_object(folder: Path, index: Metadata, name: str) -> Any:
    """An object that a rank stored.

    Raises:
        CheckpointError: it is not there once, or as in :func:`load_torch`.
    """
    keys = [key for key in index.storage_data if key.fqn == name]
    if len(keys) != 1:
        raise CheckpointError(f"checkpoint {folder} stores {name!r} {len(keys)} times, expected once")
    return load_stored(folder, index, keys[0])


def refusal(error: BaseException) -> str:
    """Why a file was not read, in one line."""
    if isinstance(error, GTPOError):
        return printable(error)
    if not isinstance(error, pickle.UnpicklingError):
        return f"cannot be read: {type(error).__name__}: {printable(error) or 'no reason given'}"
    # of torch's advice, which is also how to lift the restriction, the first sentence of the cause
    lines = [
        line for line in str(error).splitlines() if line.strip() and not line.startswith("Check the documentation")
    ]
    words = printable(lines[-1] if lines else "").removeprefix("WeightsUnpickler error: ").split(". ")[0]
    return (
        f"is refused: {words}; it is damaged, or was made so that it could run code, and nothing of it was run; "
        f"take it from whom you trust"
    )
