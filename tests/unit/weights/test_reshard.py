"""The slicing plans: every element goes where it belongs, exactly once, for any layout."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gtpo_megatron.errors import ConfigError, WeightMappingError
from gtpo_megatron.weights.architecture import Architecture, read_architecture
from gtpo_megatron.weights.hf_buffer import as_matrix
from gtpo_megatron.weights.param_mapping import RowParallel, TensorParallel
from gtpo_megatron.weights.reshard import ShardPlace, export_plan, hf_shapes, load_plan, stage_mappings


def architecture(**changes):
    shape = {
        "family": "qwen2",
        "num_layers": 4,
        "hidden_size": 12,
        "ffn_size": 16,
        "num_heads": 8,
        "num_query_groups": 4,
        "head_size": 3,
        "vocab_size": 13,
        "max_positions": 64,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tied_embeddings": False,
        "qkv_bias": True,
    }
    return Architecture(**shape | changes)


def places(tensor_size, pipeline_size):
    return [
        ShardPlace(
            tensor_parallel=TensorParallel(tensor_size, index), pipeline_size=pipeline_size, pipeline_stage=stage
        )
        for stage in range(pipeline_size)
        for index in range(tensor_size)
    ]


def numbered_tensors(arch):
    """Every tensor with numbers of its own, so that a misplaced element shows."""
    tensors, start = {}, 1
    for name, shape in hf_shapes(arch).items():
        num = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + num, dtype=torch.float64).reshape(shape)
        start += num
    return tensors


def filled(plan, tensors):
    """A rank's parameters, filled by its plan; NaN where nothing was written."""
    parameters = {}
    for copy in plan:
        rows, columns = copy.megatron_box.row + copy.megatron_box.num_rows, copy.megatron_box.num_columns
        old = parameters.get(copy.megatron_name, torch.zeros(0, columns, dtype=torch.float64))
        grown = torch.full((max(rows, old.shape[0]), columns), torch.nan, dtype=torch.float64)
        grown[: old.shape[0]] = old
        grown[copy.megatron_box.slices] = as_matrix(tensors[copy.hf_name])[copy.hf_box.slices]
        parameters[copy.megatron_name] = grown
    return parameters


@settings(max_examples=40, deadline=None)
@given(
    tensor_size=st.sampled_from([1, 2, 4]),
    pipeline_size=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    vocab_size=st.integers(1, 40),
    multiple=st.sampled_from([1, 8]),
)
def test_export_writes_every_element_once_and_undoes_load(tensor_size, pipeline_size, tied, vocab_size, multiple):
    arch = architecture(tied_embeddings=tied, vocab_size=vocab_size)
    padded = arch.padded_vocab_size(tensor_size, multiple)
    tensors = numbered_tensors(arch)
    written = {name: torch.zeros_like(as_matrix(tensor)) for name, tensor in tensors.items()}
    result = {name: torch.zeros_like(as_matrix(tensor)) for name, tensor in tensors.items()}
    for place in places(tensor_size, pipeline_size):
        parameters = filled(load_plan(arch, place, padded), tensors)
        for copy in export_plan(arch, place, padded):
            written[copy.hf_name][copy.hf_box.slices] += 1
            result[copy.hf_name][copy.hf_box.slices] = parameters[copy.megatron_name][copy.megatron_box.slices]
    for name, tensor in tensors.items():
        assert (written[name] == 1).all(), name
        assert torch.equal(result[name], as_matrix(tensor)), name


def test_query_key_value_lie_by_query_group():
    arch = architecture()
    place = ShardPlace(tensor_parallel=TensorParallel(2, 1))
    tensors = numbered_tensors(arch)
    fused = filled(load_plan(arch, place, 14), tensors)["decoder.layers.0.self_attention.linear_qkv.weight"]
    prefix = "model.layers.0.self_attn."
    expected = []
    for group in (2, 3):  # rank 1 of 2 has the last two of four groups
        expected.append(tensors[f"{prefix}q_proj.weight"][group * 6 : group * 6 + 6])  # two heads of size 3
        expected.append(tensors[f"{prefix}k_proj.weight"][group * 3 : group * 3 + 3])
        expected.append(tensors[f"{prefix}v_proj.weight"][group * 3 : group * 3 + 3])
    assert torch.equal(fused, torch.cat(expected))


def test_gate_and_up_are_halves_of_a_shard():
    arch = architecture()
    tensors = numbered_tensors(arch)
    shard = filled(load_plan(arch, ShardPlace(tensor_parallel=TensorParallel(4, 3)), 16), tensors)
    fused = shard["decoder.layers.2.mlp.linear_fc1.weight"]
    gate, up = (tensors[f"model.layers.2.mlp.{half}_proj.weight"][12:16] for half in ("gate", "up"))
    assert torch.equal(fused, torch.cat([gate, up]))


def test_a_rank_with_padding_only_has_no_vocabulary_to_copy():
    arch = architecture(vocab_size=3)
    plan = load_plan(arch, ShardPlace(tensor_parallel=TensorParallel(4, 3)), padded_vocab_size=16)
    assert not [copy for copy in plan if "word_embeddings" in copy.megatron_name]


def test_a_later_stage_counts_its_layers_from_zero():
    plan = load_plan(architecture(), places(1, 2)[1], 13)
    norms = {copy.megatron_name: copy.hf_name for copy in plan if "input_layernorm" in copy.megatron_name}
    assert norms == {
        "decoder.layers.0.input_layernorm.weight": "model.layers.2.input_layernorm.weight",
        "decoder.layers.1.input_layernorm.weight": "model.layers.3.input_layernorm.weight",
    }


def test_an_unknown_family_is_named():
    with pytest.raises(WeightMappingError, match="family 'mamba' has no name table; known: qwen2"):
        list(stage_mappings(architecture(family="mamba"), places(1, 1)[0], 13))


def test_a_share_that_does_not_split_is_named():
    with pytest.raises(WeightMappingError, match=r"o_proj: 10 does not split over tensor_parallel_size=4"):
        list(RowParallel("m", "o_proj", 3, 10).copies(TensorParallel(4, 0)))


@pytest.mark.parametrize(
    ("tensor_size", "pipeline_size", "message"),
    [
        (8, 1, r"tensor_parallel_size=8 must divide num_query_groups=4 .* choose from \[1, 2, 4\]"),
        (1, 3, r"pipeline_parallel_size=3 must divide num_layers=4; choose from \[1, 2, 4\]"),
    ],
)
def test_a_layout_that_does_not_divide_the_model(tensor_size, pipeline_size, message):
    with pytest.raises(ConfigError, match=message):
        architecture().check_layout(tensor_size, pipeline_size)


# ------------------------------------------------------------------------------------------------------- config.json
RAW = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def written(folder, **changes):
    raw = {key: value for key, value in (RAW | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    return folder


def test_both_spellings_of_the_rotary_base_are_read(tmp_path):
    assert read_architecture(written(tmp_path, rope_theta=1e6)).rope_theta == 1e6
    rope = {"rope_type": "default", "rope_theta": 5e5}
    assert read_architecture(written(tmp_path, rope_parameters=rope)).rope_theta == 5e5
    assert read_architecture(written(tmp_path)).rope_theta == 1e4


def test_the_shape_is_read(tmp_path):
    arch = read_architecture(written(tmp_path))
    assert (arch.head_size, arch.num_query_groups, arch.tied_embeddings, arch.qkv_bias) == (16, 2, True, True)
    assert arch.padded_vocab_size(8) == 104
    assert arch.padded_vocab_size(2, 128) == 256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' has no name table"),
        ({"architectures": None}, "architecture 'none' has no name table"),
        ({"use_sliding_window": True}, "use_sliding_window=true is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported"),
        ({"vocab_size": None}, "lacks 'vocab_size'"),
    ],
)
def test_an_unusable_config_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        read_architecture(written(tmp_path, **changes))


def test_a_folder_without_config_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no readable config.json"):
        read_architecture(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_architecture(tmp_path)
