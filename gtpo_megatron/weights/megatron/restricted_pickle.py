"""Reads what torch and Megatron pickle, and runs nothing of it: the only place that unpickles a file.

A pickle is a program: it may name any function and have it called with any arguments. Here a name that is not in the
lists below ends the reading, before anything of it is looked up. Two formats are read:

- plain pickles (``.metadata``, Megatron's index of a checkpoint) by :class:`_Restricted`, with the classes that torch's
  checkpoint and Megatron 0.16 to 0.19 write into it;
- files of ``torch.save`` (``common.pt``, shards, objects of ranks) by torch's own restricted unpickler,
  ``weights_only=True``, with NumPy's arrays besides, which the random states are.

``tests/unit/test_unpickling.py`` sees to it that no other module calls an unpickler.
"""

import io
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from gtpo_megatron.errors import CheckpointError, GTPOError
from gtpo_megatron.untrusted.names import bare_name
from gtpo_megatron.untrusted.text import printable, read_bytes

INDEX_FILE = ".metadata"
MAX_INDEX_BYTES = 4 << 30
"""Of Megatron's index; a thousand ranks' plans for a large model have some hundred MB."""

_NAMED = re.compile(r"GLOBAL (\S+)|function <?(?:built-in function |class ')?([\w.]+)")
"""Where torch's refusal says what it is about."""


class _Empty:
    """Stands for Megatron's classes without contents, which versions up to 0.15 wrote into their index."""


def _joined(*parts: str) -> str:
    """A path as text."""
    return "/".join(map(str, parts))


def _by_name(*classes: type) -> dict[str, Any]:
    return {f"{found.__module__}.{found.__qualname__}": found for found in classes}


_DTYPES = {str(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)}

_WRITTEN: Mapping[str, Any] = _by_name(storage.WriteResult, metadata.MetadataIndex, filesystem._StorageInfo, torch.Size)
"""Of what a checkpoint's writer reports."""

_INDEX: Mapping[str, Any] = {
    **_WRITTEN,
    **_DTYPES,
    **_by_name(
        metadata.Metadata,
        metadata.TensorStorageMetadata,
        metadata.BytesStorageMetadata,
        metadata.ChunkStorageMetadata,
        metadata.TensorProperties,
        metadata._MEM_FORMAT_ENCODING,
        metadata.StorageMeta,
        # the ranks' plans, which Megatron keeps in the index too
        planner.SavePlan,
        planner.WriteItem,
        planner.WriteItemType,
        planner.TensorWriteData,
    ),
    "torch.serialization._get_layout": torch.serialization._get_layout,
    # the folder, if it was given as a path; nothing is done with it
    "pathlib.PosixPath": _joined,
    "pathlib._local.PosixPath": _joined,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata": _Empty,
    "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan": _Empty,
}
"""Of ``.metadata``."""

_GPU_SLOTS: Mapping[str, Any] = {
    **_DTYPES,
    **_by_name(torch.Size, torch.Tensor, torch.storage.TypedStorage, torch.storage.UntypedStorage),
    "torch.multiprocessing.reductions.rebuild_cuda_tensor": rebuild_cuda_tensor,
}
"""Of the handle of a GPU's memory that two processes share."""

_RECONSTRUCT: Any = np.zeros(1).__reduce__()[0]
_NUMPY: tuple[Any, ...] = (
    *(np.ndarray, np.dtype, type(np.dtype(np.uint32)), _RECONSTRUCT),
    (_RECONSTRUCT, "numpy.core.multiarray._reconstruct"),  # its name in NumPy 1
)
"""Of random states, beside what torch allows by itself: tensors, plain values, sets, ordered dicts."""

_SET_BY_PYTHON = {"__annotations__", "__doc__"}
"""Attributes of a class that come into being when somebody asks for them."""

_TORCH_LOCK = Lock()


class _Restricted(pickle.Unpickler):
    """An unpickler that knows the names of a table, and no others."""

    def __init__(self, file: BinaryIO, allowed: Mapping[str, Any]) -> None:
        super().__init__(file)
        self._allowed = allowed

    def find_class(self, module: str, name: str) -> Any:
        """Returns the table's entry; a function in a wrapper, so that no attribute of the real one can be set."""
        full_name = f"{module}.{name}"
        if full_name not in self._allowed:
            raise _ForbiddenNameError(full_name)
        found = self._allowed[full_name]
        if isinstance(found, type) or not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            return found(*arguments)

        return call


class _ForbiddenNameError(pickle.UnpicklingError):
    """Carries the name that is on no list."""


def load_index(folder: Path) -> Metadata:
    """Megatron's index of a checkpoint, its parts of the kinds that they must be.

    Raises:
        CheckpointError: it cannot be read, is no index, names what is no part of one, or a file outside the folder.
    """
    path = folder / INDEX_FILE
    content = read_bytes(path, limit=MAX_INDEX_BYTES, error=CheckpointError)
    found = _unpickled(content, _INDEX, str(path))
    try:
        _check_index(found, path)
    except (AttributeError, TypeError) as error:  # of an object that lacks what its class has
        raise CheckpointError(f"{printable(path)} is damaged: {printable(error)}") from error
    index: Metadata = found
    return index


def load_written(content: bytes) -> Any:
    """Loads the record that a process of this run made of the files it wrote.

    Raises:
        CheckpointError: it names something else.
    """
    return _unpickled(content, _WRITTEN, "a checkpoint writer's report")


def load_gpu_slots(content: bytes) -> tuple[Any, tuple[Any, ...]]:
    """The handle of a GPU's memory that another process of this run shares: torch's function, and its arguments.

    Raises:
        CheckpointError: it is something else.
    """
    found = _unpickled(content, _GPU_SLOTS, "the handle of shared GPU memory")
    if not isinstance(found, tuple) or len(found) != 2 or not callable(found[0]) or not isinstance(found[1], tuple):
        raise CheckpointError("the handle of shared GPU memory is none")
    return found


def load_torch(source: Path | bytes | BinaryIO, *, where: str = "") -> Any:
    """Loads on the CPU what ``torch.save`` wrote.

    Args:
        source: a file, or its content.
        where: named in errors; the file by default.

    Raises:
        CheckpointError: it cannot be read, or names what may not be in it.
    """
    where = where or printable(source)
    try:
        file = io.BytesIO(source) if isinstance(source, bytes) else source
        with _numpy_allowed():
            return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or hostile file raises
        raise CheckpointError(f"{where} {refusal(error)}") from error


def of_each_rank(error: BaseException, in_words: Callable[[BaseException], str]) -> str:
    """An error in words; of torch's exception for several ranks, which carries tracebacks, the error of each."""
    if not isinstance(error, CheckpointException):
        return in_words(error)
    return "; ".join(f"rank {rank}: {in_words(cause)}" for rank, (cause, _) in error.failures.items())


def refusal(error: BaseException) -> str:
    """Why a file was not read, in one line: what it names that may not be in it, or how it is damaged."""
    if isinstance(error, CheckpointException):
        return of_each_rank(error, refusal)
    if isinstance(error, GTPOError):
        return printable(error)
    if isinstance(error, _ForbiddenNameError):
        return _refused(str(error))
    if isinstance(error, pickle.UnpicklingError) and (match := _NAMED.search(str(error))):
        return _refused(match[1] or match[2])
    words = printable(error)
    if isinstance(error, pickle.UnpicklingError) and "WeightsUnpickler error:" in words:
        words = words.split("WeightsUnpickler error:")[1].split("Check the documentation")[0].strip()
    return f"cannot be read: {type(error).__name__}: {words or 'no reason given'}"


def _refused(name: str) -> str:
    return (
        f"is refused: it names {printable(name)}, which no checkpoint holds and which could run code; nothing of it "
        f"was run; take the checkpoint from whom you trust"
    )


def _unpickled(content: bytes, allowed: Mapping[str, Any], where: str) -> Any:
    try:
        with _classes_unchanged(allowed):
            return _Restricted(io.BytesIO(content), allowed).load()
    except Exception as error:  # whatever a damaged or hostile pickle raises
        raise CheckpointError(f"{printable(where)} {refusal(error)}") from error


@contextmanager
def _classes_unchanged(allowed: Mapping[str, Any]) -> Iterator[None]:
    """Refuses a pickle that sets attributes of a class instead of an object's, and takes them back."""
    before = {found: _attributes(found) for found in allowed.values() if isinstance(found, type)}
    changed = []
    try:
        yield
    finally:
        for found, attributes in before.items():
            now = _attributes(found)
            wrong = {name for name in now.keys() | attributes.keys() if now.get(name) is not attributes.get(name)}
            changed += [f"{found.__qualname__}.{name}" for name in wrong]
            for name in wrong:
                if name in attributes:
                    setattr(found, name, attributes[name])
                else:
                    delattr(found, name)
    if changed:
        raise _ForbiddenNameError(changed[0])


def _attributes(found: type) -> dict[str, Any]:
    return {name: value for name, value in vars(found).items() if name not in _SET_BY_PYTHON}


@contextmanager
def _numpy_allowed() -> Iterator[None]:
    """Adds to torch's list what is not on it; Megatron puts some of it there for the whole process."""
    with _TORCH_LOCK:
        absent = [one for one in _NUMPY if one not in torch.serialization.get_safe_globals()]
        with torch.serialization.safe_globals(absent):
            yield


def _check_index(index: Any, path: Path) -> None:
    """Raises CheckpointError, AttributeError or TypeError if a part is not of the kind that readers count on."""
    _is(index, Metadata, "its content", path)
    _is(index.state_dict_metadata, dict, "the list of tensors", path)
    _is(index.storage_data, dict, "the list of places", path)
    for name, entry in index.state_dict_metadata.items():
        _is(name, str, "a name", path)
        _is(entry, (TensorStorageMetadata, BytesStorageMetadata), f"the entry of {name}", path)
        if isinstance(entry, TensorStorageMetadata):
            _is(entry.properties.dtype, torch.dtype, f"the dtype of {name}", path)
            sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
            for size in sizes:
                _is(size, torch.Size, f"a size of {name}", path)
    for key, place in index.storage_data.items():
        _is(key, MetadataIndex, "a key", path)
        _is(place, filesystem._StorageInfo, f"the place of {key.fqn}", path)
        bare_name(place.relative_path, f"{printable(path)}: the file of {printable(key.fqn)}", CheckpointError)
        for number in (place.offset, place.length):
            _is(number, int, f"the place of {key.fqn}", path)
        if getattr(place, "transform_descriptors", None):
            raise CheckpointError(f"{path}: {printable(key.fqn)} is stored through an extension, which is not read")


def _is(found: Any, kind: Any, what: str, path: Path) -> None:
    if not isinstance(found, kind):
        raise CheckpointError(
            f"{printable(path)} is damaged: {printable(what)} is of {type(found).__name__}; take another checkpoint"
        )


class RestrictedReader(FileSystemReader):
    """Torch's reader of a checkpoint, which reads the index once and by :func:`load_index`."""

    _index: Metadata | None = None
    _reading = ""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The index.

        Raises:
            CheckpointError: as in :func:`load_index`.
        """
        if self._index is None:
            self._index = load_index(Path(self.path))
            self._index.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return self._index

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        """Tensors and objects.

        Raises:
            CheckpointError: a file is damaged, or names what may not be in it.
        """
        try:
            return super().read_data(plan, planner)
        except CheckpointError as error:  # of an object; its planner does not know the file
            raise CheckpointError(f"{printable(Path(self.path) / self._reading)}: {error}") from error
        except pickle.UnpicklingError as error:
            raise CheckpointError(f"{printable(Path(self.path) / self._reading)} {refusal(error)}") from error

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        self._reading = sinfo.relative_path
        return super()._slice_file(file, sinfo)


class RestrictedObjects:
    """Mixed into a planner: objects are read by :func:`load_torch`, and the planner gets them anew from memory."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Hands an object on to where it is wanted.

        Raises:
            CheckpointError: it cannot be read, or names what may not be in it.
        """
        known = load_torch(value, where=f"the object {printable(read_item.storage_index.fqn)}")
        again = io.BytesIO()
        torch.save(known, again)
        again.seek(0)
        super().load_bytes(read_item, again)  # type: ignore[misc]


class RestrictedPlanner(RestrictedObjects, DefaultLoadPlanner):
    """Torch's planner of a load."""


def load_object(folder: Path, index: Metadata, name: str) -> Any:
    """An object that a rank stored.

    Raises:
        CheckpointError: it is not there once, or as in :func:`load_torch`.
    """
    places = [place for key, place in index.storage_data.items() if key.fqn == name]
    if len(places) != 1:
        raise CheckpointError(f"checkpoint {folder} stores {name!r} {len(places)} times, expected once")
    path = folder / places[0].relative_path
    try:
        with path.open("rb") as file:
            file.seek(places[0].offset)
            content = file.read(places[0].length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return load_torch(content, where=f"{printable(path)}: the object {printable(name)}")
