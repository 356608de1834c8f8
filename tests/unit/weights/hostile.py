"""Pickles that run something when they are read, in every place of a checkpoint that is unpickled."""

import functools
import io
import os
import pickle
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex


class Calls:
    """Pickled as the call of a function."""

    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


class Hashed(Calls):
    """The same as a key."""

    def __hash__(self):
        return 1


class Stated:
    """Pickled with a call in its state."""

    def __init__(self, call):
        self.call = call

    def __reduce__(self):
        return torch.Size, ((1, 2),), {"x": self.call}


def payloads(mark: Path) -> dict[str, tuple[object, str]]:
    """By name: what to pickle, and what its refusal names."""
    touch = f"touch {mark}"
    system = Calls(os.system, touch)
    return {
        "os.system": (system, "posix.system"),
        "exec": (Calls(exec, f"open({str(mark)!r}, 'w').close()"), "exec"),
        "partial": (Calls(functools.partial(os.system, touch)), "functools.partial"),
        "nested": (Calls(torch.Size, (system, 2)), "posix.system"),
        "in a list of tuples": ([("a", 1), ("b", {"c": [system]})], "posix.system"),
        "as a key": ({Hashed(os.system, touch): 1}, "posix.system"),
        "in a state": (Stated(system), "posix.system"),
        "getattr": (Calls(getattr, torch.Size, "mro"), "getattr"),
        "after good values": ([b"x", "x", 1.5, system], "posix.system"),
    }


def saved(value: object) -> bytes:
    """As ``torch.save`` writes it."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def in_index(checkpoint: Path, value: object, protocol: int | None = None) -> None:
    """Instead of the index."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(value, protocol))


def beside_index(checkpoint: Path, value: object) -> None:
    """In an attribute of the whole index."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    index.planner_data = value
    in_index(checkpoint, index)


def in_common(checkpoint: Path, value: object) -> None:
    """In the file of the common state."""
    torch.save({"optimizer": value}, checkpoint / "common.pt")


def in_tensor(checkpoint: Path, value: object, prefix: str = "decoder.") -> None:
    """Instead of a tensor of a rank's file."""
    _in_shard(checkpoint, value, lambda key: key.fqn.startswith(prefix) and "_extra_state" not in key.fqn)


def in_object(checkpoint: Path, value: object, prefix: str = "random") -> None:
    """Instead of an object of a rank's file."""
    _in_shard(checkpoint, [value], lambda key: key.fqn.startswith(prefix))


def as_object(checkpoint: Path, value: object, prefix: str = "decoder.") -> None:
    """Instead of a tensor, which the index says is an object: torch asks for objects without a limit."""
    in_tensor(checkpoint, value, prefix)
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    name = next(key.fqn for key in index.storage_data if key.fqn.startswith(prefix) and "_extra_state" not in key.fqn)
    index.state_dict_metadata[name] = BytesStorageMetadata()
    in_index(checkpoint, index)


def add_object(checkpoint: Path, name: str, value: object) -> None:
    """One more object in a rank's file."""
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    place = next(iter(index.storage_data.values()))
    index.state_dict_metadata[name] = BytesStorageMetadata()
    index.storage_data[MetadataIndex(name)] = type(place)(place.relative_path, *_appended(checkpoint, place, value))
    in_index(checkpoint, index)


def _in_shard(checkpoint, value, wanted):
    index = pickle.loads((checkpoint / ".metadata").read_bytes())
    key = next(key for key in index.storage_data if wanted(key))
    place = index.storage_data[key]
    place.offset, place.length = _appended(checkpoint, place, value)
    in_index(checkpoint, index)


def _appended(checkpoint, place, value):
    path, content = checkpoint / place.relative_path, saved(value)
    offset = path.stat().st_size
    with path.open("ab") as file:
        file.write(content)
    return offset, len(content)
