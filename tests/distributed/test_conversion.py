"""Converted folders in real Megatron: the same weights as from Hugging Face, the same files that Megatron writes."""

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.conversion import MEGATRON_FOLDER, hf_to_megatron, megatron_to_hf
from gtpo_megatron.weights.megatron.layout import MODEL_KEYS
from tests.dist_utils import run_processes
from tests.distributed.expert_models import make_expert_model
from tests.distributed.family_models import FAMILIES, make_family_model
from tests.distributed.tiny_world import make_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Megatron and torch's checkpoint warn of deprecations of their own
]

DENSE = ("qwen2", "qwen3", "r1_distill_llama")  # tied, tied with norms, untied
SPLIT_EXPERTS = ("qwen3_moe", "glm4_moe", "deepseek_v3", "qwen3_next")
EXPERTS = (*SPLIT_EXPERTS, "gpt_oss")
NAMES = (*DENSE, *EXPERTS)
LAYOUTS = {
    "tp2": (DENSE, {"num_ranks": 2, "tensor_parallel_size": 2}, "float32"),
    "pp2": (NAMES, {"num_ranks": 2, "pipeline_parallel_size": 2}, "bfloat16"),  # of folders in float32
    "ep2": (EXPERTS, {"num_ranks": 2, "expert_parallel_size": 2}, "float32"),
    "tp2_ep2": (
        ("gpt_oss",),
        {
            "num_ranks": 2,
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
        "float32",
    ),
    "tp2_etp2": (
        SPLIT_EXPERTS,
        {
            "num_ranks": 2,
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "expert_tensor_parallel_size": 2,
        },
        "bfloat16",
    ),
}
"""Models, ranks that load them, and in which dtype."""


class Silence:
    def start(self, num_bytes):
        pass

    def advance(self, num_bytes):
        pass


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Each model in Hugging Face format, and converted for one rank and for four."""
    base = tmp_path_factory.mktemp("models")
    for name in NAMES:
        if name in DENSE:
            make_family_model(base / name, FAMILIES[name])
            four = ParallelConfig(num_ranks=4, tensor_parallel_size=2, pipeline_parallel_size=2)
        else:
            make_expert_model(base / name, name)
            four = ParallelConfig(
                num_ranks=4,
                tensor_parallel_size=2,
                sequence_parallel=True,
                pipeline_parallel_size=2,
                expert_parallel_size=2,
            )
        hf_to_megatron(base / name, base / f"{name}_1", ParallelConfig(num_ranks=1), progress=Silence())
        hf_to_megatron(base / name, base / f"{name}_4", four, progress=Silence())
    return base


def loaded_alike(rank, world_size, init_method, configs, save_folder):
    """Weights as read from each folder; the first actor of every model saves a checkpoint."""
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    weights = {}
    for name, config in configs.items():
        actor = MegatronActor(config, global_rank=rank, init_method=f"{init_method}_{name}")
        weights[name] = {key: value.clone() for key, value in actor._weights().items()}
        if name in NAMES:
            actor.checkpoint.begin(Path(f"{save_folder}/{name}"), in_background=False)
            actor.checkpoint.finish()
        actor.close()
    return weights


def stored_tensors(folder):
    """Key -> shape and dtype, of the model's parameters in a checkpoint."""
    return {
        key: (tuple(entry.size), entry.properties.dtype)
        for key, entry in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and key.startswith(MODEL_KEYS)
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_converted_folder_loads_like_the_folder_it_was_made_of(folders, tmp_path, layout):
    """In a layout other than it was converted for, padding of the vocabulary included; and Megatron's own checkpoint of
    the model has the same tensors, and converts back to the same bytes."""
    configs = {}
    names, ranks_of, dtype = LAYOUTS[layout]
    for name in names:
        (tmp_path / name).mkdir()
        for suffix in ("", "_1", "_4"):
            config = make_config(folders / f"{name}{suffix}", ranks_of)
            configs[name + suffix] = dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype))
    ranks = run_processes(loaded_alike, 2, configs, str(tmp_path), timeout_s=150)
    for name in names:
        for weights in ranks:
            assert len(weights[name]) > 5
            for converted in (f"{name}_1", f"{name}_4"):
                assert weights[converted].keys() == weights[name].keys()
                for key, tensor in weights[name].items():
                    assert torch.equal(weights[converted][key], tensor), f"{converted}: {key}"
        ours, theirs = stored_tensors(folders / f"{name}_4" / MEGATRON_FOLDER), stored_tensors(tmp_path / name)
        vocabulary = {"embedding.word_embeddings.weight", "output_layer.weight"}  # padded for four ranks, and for two
        assert {key: shape for key, (shape, _) in ours.items() if key not in vocabulary} == {
            key: shape for key, (shape, _) in theirs.items() if key not in vocabulary
        }
        dtypes = {dtype for key, (_, dtype) in theirs.items() if not key.endswith("expert_bias")}
        assert dtypes == {getattr(torch, dtype)}
        assert ours.keys() == theirs.keys()
        megatron_to_hf(
            tmp_path / name, folders / name, tmp_path / f"{name}_back", progress=Silence(), verify="none"
        )  # ranks write no manifest
        before = load_file(folders / name / "model.safetensors")
        after = load_file(tmp_path / f"{name}_back" / "model.safetensors")
        assert before.keys() == after.keys()
        assert all(torch.equal(after[key], tensor.to(after[key].dtype)) for key, tensor in before.items())
        assert all(after[key].dtype == torch.float32 for key in after if key.endswith("e_score_correction_bias"))


def refused(rank, world_size, init_method, config):
    from gtpo_megatron.actor.actor import MegatronActor
    from gtpo_megatron.errors import CheckpointError

    with pytest.raises(CheckpointError, match="cannot be loaded"):
        MegatronActor(config, global_rank=rank, init_method=init_method)


def test_a_converted_folder_of_another_model_is_refused(folders, tmp_path):
    """config.json of one model beside the weights of another."""
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_text((folders / "qwen3" / "config.json").read_text())
    (mixed / MEGATRON_FOLDER).symlink_to(folders / "qwen2_1" / MEGATRON_FOLDER)
    run_processes(refused, 1, make_config(mixed, {"num_ranks": 1}))
