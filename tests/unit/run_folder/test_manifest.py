"""A checkpoint says which model and layout it is of."""

import dataclasses
from pathlib import Path

import pytest

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import CheckpointError
from gtpo_megatron.run_folder.manifest import check_model, layout_changes, new_manifest, run_facts
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu
from tests.unit.orchestration.checkpoints import facts


def manifest(**changes):
    return new_manifest(facts(**changes), step=3, scores={}, files={})


def test_the_same_model_passes():
    check_model(Path("step_3"), manifest(), facts())


def test_every_difference_of_the_model_is_named():
    other = facts().architecture | {"num_layers": 7, "hidden_size": 64}
    with pytest.raises(CheckpointError, match=r"step_3 is of another model: hidden_size 64, here \d+; num_layers 7, h"):
        check_model(Path("step_3"), manifest(architecture=other), facts())
    with pytest.raises(CheckpointError, match="dtype 'bfloat16', here 'float32'"):
        check_model(Path("step_3"), manifest(dtype="bfloat16"), facts())


@pytest.mark.slow
def test_a_field_that_a_later_version_knows_is_no_difference():
    check_model(Path("step_3"), manifest(), facts(architecture=facts().architecture | {"new": 1}))
    assert layout_changes(manifest(), facts(layout=facts().layout | {"new": 1})) == []


def test_changes_of_the_layout_are_listed():
    config = dataclasses.replace(tiny_cpu.gtpo(), parallel=ParallelConfig(num_ranks=2, pipeline_parallel_size=2))
    here = run_facts(config, read_architecture(Path(config.model.path)))
    assert layout_changes(manifest(), facts()) == []
    assert layout_changes(manifest(), here) == ["pipeline_parallel_size: 1 -> 2", "tensor_parallel_size: 2 -> 1"]


@pytest.mark.slow
def test_the_fingerprint_is_of_the_whole_configuration():
    def fingerprint(config):
        return run_facts(config, read_architecture(Path(config.model.path))).config_fingerprint

    assert fingerprint(tiny_cpu.gtpo()) == fingerprint(tiny_cpu.gtpo())
    assert fingerprint(tiny_cpu.gtpo(seed=1)) != fingerprint(tiny_cpu.gtpo())
