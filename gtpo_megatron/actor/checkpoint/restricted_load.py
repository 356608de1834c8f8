"""Megatron's loader of checkpoints, with readers that run nothing of a file.

Megatron makes its reader and its planner itself, and both unpickle whatever a file says. Megatron is not changed here:
its functions are taken in copies of their own, in which these names stand for the restricted ones of
``weights/megatron/restricted_pickle.py``. A version of Megatron that does not know a name is refused when this is
imported.
"""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import MCoreLoadPlanner, TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling

from gtpo_megatron.actor.checkpoint.reader import COMMON_FILE
from gtpo_megatron.untrusted.text import printable
from gtpo_megatron.weights.megatron.restricted_pickle import (
    RestrictedObjects,
    RestrictedReader,
    load_index,
    load_object,
    load_torch,
    of_each_rank,
)

_EXTRA_STATE = re.compile(r"\._extra_state\d*$")
"""Ends the keys of what layers keep beside their parameters; a layer of grouped experts has one for each."""
_COMMON_OBJECT = ShardedObject("common_state", None, (1,), (0,)).unique_key
"""Where Megatron 0.19 keeps what was in ``common.pt``."""


def _with(function: Callable[..., Any], **names: Any) -> Any:
    """A copy of a function that finds other things under some of its module's names."""
    code = function.__code__
    unknown = names.keys() - set(code.co_names)
    if unknown:
        raise ImportError(
            f"{function.__module__}.{function.__qualname__} of this Megatron-core does not use {sorted(unknown)[0]}: "
            f"checkpoints could be read without restriction; install a version that pyproject.toml names"
        )
    copy = FunctionType(
        code, {**function.__globals__, **names}, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


class _Planner(RestrictedObjects, MCoreLoadPlanner):
    """Megatron's planner of a load."""


def _reader(folder: str | Path, *_: Any, **__: Any) -> RestrictedReader:
    return RestrictedReader(folder)


class RestrictedStrategy(TorchDistLoadShardedStrategy):
    """Megatron's way to load what ranks have saved."""

    load = _with(TorchDistLoadShardedStrategy.load, _get_filesystem_reader=_reader, MCoreLoadPlanner=_Planner)
    load_tensors_metadata = _with(TorchDistLoadShardedStrategy.load_tensors_metadata, _get_filesystem_reader=_reader)
    load_sharded_metadata = _with(TorchDistLoadShardedStrategy.load_sharded_metadata, _get_filesystem_reader=_reader)


def load_common(folder: str | Path) -> Any:
    """Reads what all ranks share, from ``common.pt`` or, as Megatron 0.19 writes it, from an object of a rank.

    Raises:
        CheckpointError: it cannot be read, or names what may not be in it.
    """
    path = Path(folder) / COMMON_FILE
    if path.exists():
        return load_torch(path)
    return load_object(Path(folder), load_index(Path(folder)), _COMMON_OBJECT)[0]


def _loader() -> Callable[..., Any]:
    """Megatron's ``load``; the way to the common state was an argument of it, then became a function that it calls."""
    if "common_strategy" not in inspect.signature(serialization.load).parameters:
        return _with(serialization.load, load_common_state_dict=load_common)
    from megatron.core.dist_checkpointing.strategies.common import TorchCommonLoadStrategy

    class CommonStrategy(TorchCommonLoadStrategy):
        """Megatron's way to load what all ranks share."""

        def load_common(self, checkpoint_dir: str | Path) -> Any:
            return load_common(checkpoint_dir)

    return partial(serialization.load, common_strategy=CommonStrategy())


_load = _loader()


def load(wanted: dict[str, Any], folder: Path, *, strict: StrictHandling) -> Any:
    """``megatron.core.dist_checkpointing.load`` that runs nothing of a file.

    Collectives: Megatron's own over the world.
    """
    return _load(wanted, str(folder), sharded_strategy=RestrictedStrategy(), strict=strict)


def is_extra_state(key: str) -> bool:
    """Whether a key of a state is of what a layer keeps beside its parameters."""
    return _EXTRA_STATE.search(key) is not None


def drop_extra_states(state: dict[str, Any]) -> dict[str, None]:
    """Takes out of a chunk's sharded state what layers keep beside their parameters.

    Transformer Engine unpickles what a layer finds there. It is empty but for the factors of float8, which no run here
    has; and layers of a CPU and of a GPU have it in different places, so that neither could load the other's.

    Args:
        state: of a model chunk; changed.

    Returns:
        What a layer is given in its place, by key.
    """
    absent = dict.fromkeys(key for key in state if is_extra_state(key))
    for key in absent:
        del state[key]
    return absent


def load_sharded_metadata(folder: Path) -> Any:
    """``megatron.core.dist_checkpointing.load_sharded_metadata`` that runs nothing of a file. Communication: none."""
    return serialization.load_sharded_metadata(str(folder), RestrictedStrategy())


def reason(error: BaseException) -> str:
    """Why ranks could not read or write, in a line."""
    return of_each_rank(error, lambda one: printable(f"{type(one).__name__}: {one}"))
