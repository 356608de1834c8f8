"""Nothing of a file is run when it is read; what torch and Megatron write is read."""

import contextlib
import pickle
import random
import shutil

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gtpo_megatron.cli import dispatch
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.conversion import MEGATRON_FOLDER, ConversionProgress, hf_to_megatron
from gtpo_megatron.weights.megatron import restricted_pickle
from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from gtpo_megatron.weights.megatron.restricted_pickle import load_index, load_torch
from recipes.tiny_cpu import ASSETS
from tests.unit.weights import hostile
from tools.convert_checkpoint import main as convert

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

NAMES = list(hostile.payloads(None))
PLACES = {
    "index": hostile.in_index,
    "beside the index": hostile.beside_index,
    "common": hostile.in_common,
    "tensor": hostile.in_tensor,
    "object": hostile.in_object,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A converted model, with an object as ranks store it."""
    folder = tmp_path_factory.mktemp("hostile") / "model"
    hf_to_megatron(ASSETS / "tiny_qwen2", folder, ParallelConfig(num_ranks=1), progress=ConversionProgress())
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}  # noqa: NPY002
    hostile.add_object(folder / MEGATRON_FOLDER, "random/shard_0.0.0.0_1.1.1.1", [state])
    return folder


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def mark(tmp_path):
    """A file that a payload makes."""
    return tmp_path / "ran"


def read_all(checkpoint):
    """By the reader for other programs."""
    reader = CheckpointReader(checkpoint)
    reader.read(list(reader.tensors))
    for name in reader.objects:
        reader.read_object(name)
    reader.read_common()


def one_line(text):
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if "Error" in line]
    assert len(lines) == 1, text
    return lines[0]


def test_a_payload_runs_where_nothing_holds_it_back(tmp_path, mark):
    """Else the tests below would pass for want of one."""
    for name in ("os.system", "exec", "partial", "nested", "as a key", "in a state"):
        value, _ = hostile.payloads(mark)[name]
        content = pickle.dumps(value)
        with contextlib.suppress(TypeError, AttributeError):  # the call is made, its result does not fit
            pickle.loads(content)
        assert mark.exists(), name
        mark.unlink()


def test_what_is_whole_is_read(model):
    read_all(model / MEGATRON_FOLDER)
    found = CheckpointReader(model / MEGATRON_FOLDER).read_object("random/shard_0.0.0.0_1.1.1.1")
    assert found[0]["python"] == random.getstate()
    assert isinstance(found[0]["numpy"][1], np.ndarray)
    assert found[0]["numpy"][1].dtype == np.uint32


def cases():
    """Before a commit, every payload in a pickle and in a file of torch, and one in every place."""
    for place in PLACES:
        for payload in NAMES:
            is_in_gate = place in ("index", "common") or payload == "nested"
            yield pytest.param(place, payload, marks=() if is_in_gate else pytest.mark.nightly)


@pytest.mark.parametrize(("place", "payload"), list(cases()))
def test_nothing_runs_in_any_file_of_a_checkpoint(model, mark, place, payload):
    checkpoint = model / MEGATRON_FOLDER
    value, named = hostile.payloads(mark)[payload]
    PLACES[place](checkpoint, value)
    with pytest.raises(CheckpointError) as caught:
        read_all(checkpoint)
    assert not mark.exists()
    message = str(caught.value)
    assert named in message
    assert "\n" not in message
    assert "could run code" in message
    file = {"index": ".metadata", "beside the index": ".metadata", "common": "common.pt"}.get(place, "__0_0.distcp")
    assert str(checkpoint / file) in message


def test_no_object_has_the_name_of_a_tensor(model, mark):
    """Torch would ask for an object instead, and unpickle it without any limit."""
    hostile.as_object(model / MEGATRON_FOLDER, hostile.payloads(mark)["os.system"][0])
    with pytest.raises(CheckpointError, match="is of BytesStorageMetadata, expected TensorStorageMetadata"):
        read_all(model / MEGATRON_FOLDER)
    assert not mark.exists()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_protocol_is_held_back(model, mark, protocol):
    hostile.in_index(model / MEGATRON_FOLDER, hostile.payloads(mark)["nested"][0], protocol)
    with pytest.raises(CheckpointError, match="posix.system"):
        load_index(model / MEGATRON_FOLDER)
    assert not mark.exists()


@pytest.mark.parametrize("place", ["index", "beside the index", "tensor"])
@pytest.mark.parametrize("command", ["config", "convert"])
def test_no_command_runs_anything(model, mark, tmp_path, capsys, command, place):
    PLACES[place](model / MEGATRON_FOLDER, hostile.payloads(mark)["os.system"][0])
    if command == "convert":
        status = convert(["megatron-to-hf", str(model), str(tmp_path / "hf")])
    else:
        status = dispatch.run(["config", "recipes.tiny_cpu:gtpo", "--model.path", str(model)])
    assert not mark.exists()
    assert status == 1
    line = one_line(capsys.readouterr().err)
    assert "posix.system" in line
    assert str(model / MEGATRON_FOLDER) in line


def test_attributes_of_classes_cannot_be_set(model):
    """``(None, {...})`` as the state of a class is what the unpickler of C sets attributes by."""
    content = (
        b"\x80\x02ctorch.distributed.checkpoint.metadata\nMetadata\nN}(X\x07\x00\x00\x00versionX\x04\x00\x00\x00evil"
        b"X\x05\x00\x00\x00extraK\x01u\x86b."
    )
    (model / MEGATRON_FOLDER / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"names Metadata\.(version|extra)"):
        load_index(model / MEGATRON_FOLDER)
    assert Metadata.version is None
    assert not hasattr(Metadata, "extra")


def index(**changes):
    size = torch.Size([2, 3])
    entry = TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size([0, 0]), size)])
    fields = {
        "state_dict_metadata": {"a": entry, "b/shard_0_1": BytesStorageMetadata()},
        "storage_data": {MetadataIndex("a", size): _StorageInfo("__0_0.distcp", 0, 10)},
    }
    return Metadata(**fields | changes)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1}, "is of dict, expected Metadata"),
        (index(state_dict_metadata=None), "None is of NoneType, expected dict"),
        (index(storage_data=[1]), "is of list, expected dict"),
        (index(state_dict_metadata={"a": 1}), "1 is of int, expected TensorStorageMetadata"),
        (index(state_dict_metadata={1: BytesStorageMetadata()}), "1 is of int, expected str"),
        (index(state_dict_metadata={"a": BytesStorageMetadata()}), "of BytesStorageMetadata, expected TensorStorage"),
        (index(storage_data={MetadataIndex("a"): "x"}), "'x' is of str, expected _StorageInfo"),
        (index(storage_data={MetadataIndex("a"): _StorageInfo("../x", 0, 1)}), "'../x', expected a bare name"),
        (index(storage_data={MetadataIndex("a"): _StorageInfo("/etc/passwd", 0, 1)}), "expected a bare name"),
        (index(storage_data={MetadataIndex("a"): _StorageInfo("x", "0", 1)}), "'0' is of str, expected int"),
        (index(storage_data={MetadataIndex("a"): _StorageInfo("x", 0, 1, ["zstd"])}), "'zstd'. is of list"),
        (index(state_dict_metadata={"a": TensorStorageMetadata(TensorProperties(), (1,), [])}), "expected Size"),
        (index(state_dict_metadata={"a": TensorStorageMetadata(None, torch.Size([1]), [])}), "is damaged: 'NoneType'"),
    ],
)
def test_an_index_whose_parts_are_of_other_kinds_is_one_line(tmp_path, value, message):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_index(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_whole_index_is_equal_after_it_was_read(tmp_path):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index()))
    assert load_index(tmp_path) == index()


def test_every_cut_and_many_flipped_bits_are_one_error(tmp_path):
    path, content = tmp_path / ".metadata", pickle.dumps(index())
    choice = random.Random(7)
    cases = [content[:end] for end in range(len(content))]
    for _ in range(400):
        flipped = bytearray(content)
        flipped[choice.randrange(len(content))] ^= 1 << choice.randrange(8)
        cases.append(bytes(flipped))
    outcomes = [outcome(tmp_path, path, case) for case in cases]
    assert not any("\n" in found for found in outcomes)
    assert sum(found != "read" for found in outcomes) > len(content)


def outcome(folder, path, content):
    path.write_bytes(content)
    try:
        load_index(folder)
    except CheckpointError as error:
        return str(error)
    return "read"


def test_torchs_list_is_left_as_it_was(tmp_path):
    before = torch.serialization.get_safe_globals()
    torch.save({"numpy": np.random.get_state()}, tmp_path / "x.pt")  # noqa: NPY002
    load_torch(tmp_path / "x.pt")
    assert set(torch.serialization.get_safe_globals()) == set(before)
    with torch.serialization.safe_globals([np.ndarray]):
        load_torch(tmp_path / "x.pt")
        assert np.ndarray in torch.serialization.get_safe_globals(), "what another library has added stays"


def test_an_environment_variable_does_not_lift_the_restriction(tmp_path, mark, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    torch.save(hostile.payloads(mark)["os.system"][0], tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="posix.system"):
        load_torch(tmp_path / "x.pt")
    assert not mark.exists()


def test_no_function_that_calls_what_it_is_given_is_on_a_list():
    for name, value in restricted_pickle._ALLOWED.items():
        assert not name.startswith(("builtins.", "os.", "posix.", "functools.", "operator.", "importlib."))
        assert value not in (getattr, setattr, eval, exec, compile, __import__, map, filter, type, object)
