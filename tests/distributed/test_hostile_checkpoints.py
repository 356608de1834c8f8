"""A rank that resumes runs nothing that a checkpoint says: Megatron's own loader is held back in every file."""

import shutil

import pytest

from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron
from gtpo_megatron.weights.megatron.checkpoint_reader import CheckpointReader
from tests.dist_utils import run_processes
from tests.distributed.test_actor_checkpoint import one_step, save, start
from tests.distributed.tiny_world import make_config, make_model
from tests.unit.weights import hostile

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch's checkpoint warn of deprecations of their own
]

PLACES = {
    "index": (hostile.in_index, ".metadata"),
    "beside the index": (hostile.beside_index, ".metadata"),
    "common": (hostile.in_common, "common.pt"),
    "tensor": (hostile.in_tensor, "__0_0.distcp"),
    "random states": (hostile.in_object, "__0_0.distcp: the object random"),
}


def written(rank, world_size, init_method, config, folder):
    actor = start(rank, init_method, config)
    one_step(actor, config, 1)
    return save(actor, folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    make_model(folder, tied=False)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "sharded optimizer"])
def whole(model, tmp_path_factory, request):
    """A configuration and its checkpoint."""
    config = make_config(model, {"num_ranks": 1, "distributed_optimizer": request.param})
    folder = tmp_path_factory.mktemp("whole")
    run_processes(written, 1, config, str(folder), timeout_s=120)
    return config, folder


def test_nothing_runs_when_a_rank_resumes(whole, tmp_path):
    """One process loads all of them, one after the other, and then the one that is whole."""
    config, folder = whole
    mark = tmp_path / "ran"
    cases = []
    for place, (plant, file) in PLACES.items():
        for name in ("os.system", "partial", "nested"):
            copy = tmp_path / f"{place} {name}"
            shutil.copytree(folder, copy)
            value, named = hostile.payloads(mark)[name]
            plant(copy, value)
            cases.append((copy, file, named))
    copy = shutil.copytree(folder, tmp_path / "tensor as object")
    hostile.as_object(copy, hostile.payloads(mark)["os.system"][0])
    cases.append((copy, ".metadata", "BytesStorageMetadata, expected TensorStorageMetadata"))

    def load(rank, world_size, init_method):
        actor = start(rank, init_method, config)
        for copy, file, named in cases:
            with pytest.raises(CheckpointError) as caught:
                actor.checkpoint.load(copy, checksums={})
            message = str(caught.value)
            assert named in message, message
            assert file in message, message
            assert "\n" not in message
            assert not mark.exists(), copy
        return actor.checkpoint.load(folder, checksums={})

    run_processes(load, 1, timeout_s=120)
    assert not mark.exists()


def test_what_layers_keep_beside_their_parameters_is_not_even_read(whole, tmp_path):
    config, folder = whole
    mark, copy = tmp_path / "ran", tmp_path / "copy"
    shutil.copytree(folder, copy)
    hostile.in_object(copy, hostile.payloads(mark)["os.system"][0], "decoder.layers.mlp.linear_fc1._extra")

    def load(rank, world_size, init_method):
        actor = start(rank, init_method, config)
        assert actor.checkpoint.load(copy, checksums={}) == actor.checkpoint.load(folder, checksums={})

    run_processes(load, 1, timeout_s=120)
    assert not mark.exists()


def test_a_converted_model_runs_nothing_when_it_is_loaded(model, tmp_path):
    config = make_config(model, {"num_ranks": 1})
    hf_to_megatron(model, tmp_path / "converted", config.parallel, progress=ConversionProgress())
    mark = tmp_path / "ran"
    copies = [shutil.copytree(tmp_path / "converted" / "megatron", tmp_path / place) for place in ("index", "tensor")]
    for copy in copies:
        PLACES[copy.name][0](copy, hostile.payloads(mark)["os.system"][0])

    def load(rank, world_size, init_method):
        from gtpo_megatron.actor.checkpoint.model_folder import load_converted

        actor = start(rank, init_method, config)
        for copy in copies:
            with pytest.raises(CheckpointError, match=f"{copy}.*posix.system"):
                load_converted(copy, actor._chunks)

    run_processes(load, 1, timeout_s=60)
    assert not mark.exists()


def test_every_object_of_a_rank_is_read_and_none_is_more_than_it_seems(whole):
    reader = CheckpointReader(whole[1], verify="none")
    kinds = {name.split("/")[0].rpartition(".")[2] for name in reader.objects}
    assert kinds - {"common_state"} == {"random", "_extra_state"}  # Megatron 0.19 has the common state there too
    for name in reader.objects:
        if "_extra_state" in name:
            assert reader.read_object(name) == [None], "nothing that Transformer Engine would unpickle"


def test_megatron_is_asked_for_no_object(whole, tmp_path):
    """It would unpickle one without any limit."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.validation import StrictHandling

    from gtpo_megatron.actor.checkpoint.megatron_load import load

    wanted = {"random": ShardedObject("random", None, (1,), (0,))}
    with pytest.raises(AssertionError, match="would unpickle"):
        load(wanted, whole[1], strict=StrictHandling.RETURN_ALL)


def test_the_common_state_that_megatron_0_19_keeps_in_an_object_is_read_alike(model, tmp_path):
    from gtpo_megatron.weights.megatron.checkpoint_reader import load_common
    from gtpo_megatron.weights.megatron.restricted_pickle import load_index

    mark = tmp_path / "ran"
    state = {"schedule": {"num_steps": 3}, "optimizer": [1.5, "x"]}
    hf_to_megatron(
        model, tmp_path / "model", make_config(model, {"num_ranks": 1}).parallel, progress=ConversionProgress()
    )
    checkpoint = tmp_path / "model" / "megatron"

    def read():
        return load_common(checkpoint, load_index(checkpoint))

    assert read() == {}
    (checkpoint / "common.pt").unlink()
    with pytest.raises(CheckpointError, match="stores 'common_state/shard_0_1' 0 times"):
        read()
    hostile.add_object(checkpoint, "common_state/shard_0_1", [state])
    assert read() == state
    hostile.in_object(checkpoint, hostile.payloads(mark)["os.system"][0], "common_state")
    with pytest.raises(CheckpointError, match="common_state/shard_0_1 is refused: .*posix.system"):
        read()
    assert not mark.exists()


def test_layers_get_nothing_that_is_unpickled():
    from gtpo_megatron.actor.checkpoint.megatron_load import drop_extra_states

    state = {"a.weight": 1, "a._extra_state": b"pickle", "experts._extra_state1": b"pickle"}
    assert drop_extra_states(state) == {"a._extra_state": None, "experts._extra_state1": None}
    assert state == {"a.weight": 1}
