"""Which folders may teach: any architecture that the policy's layout divides."""

import json

import pytest

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.weights.weight_checks import teacher_architecture
from recipes.tiny_cpu import ASSETS

TP2 = {"num_ranks": 2, "tensor_parallel_size": 2}


def folder_of(path, **changes):
    config = json.loads((ASSETS / "tiny_qwen2" / "config.json").read_text(encoding="utf-8"))
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
    return path


def test_another_shape_and_family_are_taken(tmp_path):
    wide = folder_of(tmp_path / "wide", hidden_size=192, num_hidden_layers=6, vocab_size=512)
    assert teacher_architecture(wide, ParallelConfig(**TP2), num_tokens=64).num_layers == 6
    split = ParallelConfig(**TP2, sequence_parallel=True)
    assert teacher_architecture(ASSETS / "tiny_qwen3_moe", split, num_tokens=64).experts is not None


@pytest.mark.parametrize(
    ("changes", "parallel", "num_tokens", "message"),
    [
        (
            {"num_key_value_heads": 1},
            TP2,
            64,
            "teacher.path=.*in the layout of the policy: .* must divide num_query_groups",
        ),
        (
            {"num_hidden_layers": 3},
            {"num_ranks": 2, "pipeline_parallel_size": 2},
            64,
            "teacher.path=.*in the layout of the policy: .* must divide num_layers=3",
        ),
        (
            {},
            {"num_ranks": 2, "expert_parallel_size": 2},
            64,
            "teacher.path=.*this model is dense, so expert_parallel_size",
        ),
        (
            {"max_position_embeddings": 63},
            TP2,
            64,
            "teacher.path=.*max_sequence_tokens = 64 exceeds its max_position_embeddings=63",
        ),
    ],
)
def test_what_the_run_cannot_have_is_one_line(tmp_path, changes, parallel, num_tokens, message):
    folder = folder_of(tmp_path / "teacher", **changes)
    with pytest.raises(ConfigError, match=message):
        teacher_architecture(folder, ParallelConfig(**parallel), num_tokens=num_tokens)


def test_a_folder_without_a_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match="has no config.json; give a model folder"):
        teacher_architecture(tmp_path, ParallelConfig(num_ranks=1), num_tokens=8)
