"""The slicing plans: every element goes where it belongs, exactly once, for any layout."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError, WeightMappingError
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.model_shape import DeltaNet, LatentAttention
from gtpo_megatron.weights.param_mapping import RowParallel, TensorParallel, as_matrix
from gtpo_megatron.weights.reshard import (
    LAYER_TABLES,
    ShardCoordinates,
    fused_name,
    hf_shapes,
    load_plan,
    shard_coordinates,
    stage_mappings,
    table_name,
)
from tests.strategies import examples

EXPERTS = Experts(num_experts=4, experts_per_token=2, ffn_size=8, layers=(True,) * 4)
DELTA = DeltaNet(
    num_key_heads=4,
    num_value_heads=8,
    key_size=3,
    value_size=2,
    conv_size=4,
    layers=(True, True, False, True),
)
TRAITS = {
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "llama": {},
    "phi3": {},
    "olmo2": {"qk_norm": True, "qk_norm_spans_heads": True, "norm_placement": "post"},
    "gemma3": {"qk_norm": True, "norm_placement": "sandwich"},
    "glm4": {"qkv_bias": True, "norm_placement": "sandwich"},
    "qwen3_moe": {"qk_norm": True, "experts": EXPERTS},
    "glm4_moe": {
        "qkv_bias": True,
        "experts": replace(EXPERTS, layers=(False, True, True, True), shared_ffn_size=8, has_bias=True),
    },
    "mixtral": {"experts": EXPERTS},
    "glm": {"qkv_bias": True},
    "hunyuan": {"norms_rotated_heads": True},
    "flex_olmo": {
        "qk_norm": True,
        "qk_norm_spans_heads": True,
        "norm_placement": "post",
        "experts": EXPERTS,
    },
    "ernie4_5_moe": {
        "experts": replace(EXPERTS, layers=(False, True, True, True), shared_ffn_size=8, has_bias=True),
    },
    "minimax_m2": {"qk_norm": True, "qk_norm_spans_heads": True, "experts": replace(EXPERTS, has_bias=True)},
    "gpt_oss": {"qkv_bias": True, "has_sinks": True, "experts": replace(EXPERTS, clamp=7.0)},
    "qwen3_next": {
        "qk_norm": True,
        "has_output_gate": True,
        "norms_from_one": True,
        "delta": DELTA,
        "experts": replace(EXPERTS, shared_ffn_size=8, has_shared_gate=True),
    },
    "qwen3_5": {
        "qk_norm": True,
        "has_output_gate": True,
        "norms_from_one": True,
        "delta": DELTA,
    },
    "deepseek": {
        "num_query_groups": 8,
        "head_size": 5,
        "latents": LatentAttention(query_rank=6, key_value_rank=7, rotated_size=2, value_size=4),
        "experts": replace(EXPERTS, layers=(False, True, True, True), shared_ffn_size=8, has_bias=True),
    },
}


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
        "qkv_bias": False,
    }
    shape |= TRAITS.get(changes.get("family", "qwen2"), {})
    return Architecture(**shape | changes)


def places(tensor_size, pipeline_size, virtual_size=1, last_stage_layers=None):
    return [
        ShardCoordinates(
            tensor_parallel=TensorParallel(tensor_size, index),
            pipeline_size=pipeline_size,
            pipeline_stage=stage,
            virtual_size=virtual_size,
            last_stage_layers=last_stage_layers,
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


def world(*, expert=1, expert_tensor=1, replicas=1, tensor=1, pipeline=(1, 1)):
    """Every rank's place in a layout; ``pipeline`` is ranks, chunks of each and perhaps the layers of the last."""
    parallel = ParallelConfig(
        num_ranks=tensor * replicas * pipeline[0],
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline[0],
        virtual_pipeline_size=pipeline[1],
        last_stage_layers=pipeline[2] if len(pipeline) > 2 else None,
        expert_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    return [shard_coordinates(parallel, rank) for rank in range(parallel.num_ranks)]


@examples(40)
@given(
    family=st.sampled_from(sorted(LAYER_TABLES)),
    tensor_size=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([(1, 1), (2, 1), (4, 1), (2, 2), (2, 1, 1), (2, 1, 3), (3, 1, 2), (4, 1, 1)]),
    expert_split=st.sampled_from([(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)]),
    tied=st.booleans(),
    vocab_size=st.integers(1, 40),
    multiple=st.sampled_from([1, 8]),
)
def test_ranks_share_out_every_element_once_and_give_back_what_they_loaded(
    family, tensor_size, pipeline, expert_split, tied, vocab_size, multiple
):
    arch = architecture(family=family, tied_embeddings=tied, vocab_size=vocab_size)
    padded = arch.padded_vocab_size(tensor_size, multiple)
    tensors = numbered_tensors(arch)
    written = {name: torch.zeros_like(as_matrix(tensor)) for name, tensor in tensors.items()}
    result = {name: torch.zeros_like(as_matrix(tensor)) for name, tensor in tensors.items()}
    expert, expert_tensor = expert_split
    seen = set()
    for place in world(
        tensor=tensor_size, pipeline=pipeline, expert=expert, expert_tensor=expert_tensor, replicas=8 // tensor_size
    ):
        plan = load_plan(arch, place, padded)
        parameters = filled(plan, tensors)
        for copy in plan:
            written[copy.hf_name][copy.hf_box.slices] += (copy.hf_name, copy.hf_box) not in seen  # replicas hold it too
            seen.add((copy.hf_name, copy.hf_box))
            result[copy.hf_name][copy.hf_box.slices] = parameters[copy.megatron_name][copy.megatron_box.slices]
    for name, tensor in tensors.items():
        assert (written[name] == 1).all(), name
        assert torch.equal(result[name], as_matrix(tensor)), name


def test_a_rank_holds_its_experts_cut_by_their_own_tensor_parallelism():
    """Rank 3 of a stage of four, tensor 4, expert 2, expert tensor 2: experts 2 and 3, and their second halves."""
    arch = architecture(family="qwen3_moe")
    place = world(tensor=4, expert=2, expert_tensor=2)[3]
    tensors = numbered_tensors(arch)
    parameters = filled(load_plan(arch, place, 16), tensors)
    for local, expert in enumerate((2, 3)):
        there, here = f"model.layers.1.mlp.experts.{expert}", f"decoder.layers.1.mlp.experts.local_experts.{local}"
        gate, up = (tensors[f"{there}.{half}_proj.weight"][4:8] for half in ("gate", "up"))
        assert torch.equal(parameters[f"{here}.linear_fc1.weight"], torch.cat([gate, up]))
        assert torch.equal(parameters[f"{here}.linear_fc2.weight"], tensors[f"{there}.down_proj.weight"][:, 4:8])
    assert not [name for name in parameters if "local_experts.2" in name]
    assert torch.equal(parameters["decoder.layers.1.mlp.router.weight"], tensors["model.layers.1.mlp.gate.weight"])


def test_experts_that_do_not_split_are_named():
    with pytest.raises(WeightMappingError, match="4 experts do not split over expert_parallel_size=3"):
        load_plan(architecture(family="qwen3_moe"), world(expert=3, replicas=3)[0], 13)


@pytest.mark.megatron
@pytest.mark.usefixtures("megatron")
@pytest.mark.parametrize(
    ("tensor", "context", "data", "pipeline", "expert", "expert_tensor"),
    [(2, 1, 2, 1, 2, 1), (2, 2, 2, 2, 4, 1), (2, 1, 4, 2, 2, 2), (1, 1, 8, 1, 4, 2), (4, 1, 2, 1, 2, 4)],
)
def test_places_are_those_of_megatrons_groups(tensor, context, data, pipeline, expert, expert_tensor):
    from megatron.core.parallel_state import RankGenerator

    num_ranks = tensor * context * data * pipeline
    parallel = ParallelConfig(
        num_ranks=num_ranks,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        expert_parallel_size=expert,
        expert_tensor_parallel_size=expert_tensor,
    )
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tensor, ep=1, dp=data, pp=pipeline, cp=context, order=order)
    sparse = RankGenerator(
        tp=expert_tensor, ep=expert, dp=parallel.expert_data_parallel_size, pp=pipeline, cp=1, order=order
    )
    for rank in range(num_ranks):
        place = shard_coordinates(parallel, rank)

        def index(generator, axis, rank=rank):
            (group,) = (ranks for ranks in generator.get_ranks(axis) if rank in ranks)
            return group.index(rank)

        assert place.tensor_parallel.index == index(dense, "tp")
        assert place.pipeline_stage == index(dense, "pp") == index(sparse, "pp")
        assert place.expert_parallel.index == index(sparse, "ep")
        assert place.expert_tensor_parallel.index == index(sparse, "tp")


def test_query_key_value_lie_by_query_group():
    arch = architecture()
    place = ShardCoordinates(tensor_parallel=TensorParallel(2, 1))
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
    shard = filled(load_plan(arch, ShardCoordinates(tensor_parallel=TensorParallel(4, 3)), 16), tensors)
    fused = shard["decoder.layers.2.mlp.linear_fc1.weight"]
    gate, up = (tensors[f"model.layers.2.mlp.{half}_proj.weight"][12:16] for half in ("gate", "up"))
    assert torch.equal(fused, torch.cat([gate, up]))


def test_chunks_of_a_virtual_pipeline_interleave():
    """Chunk v of stage p holds virtual stage v * 2 + p; names of a chunk's parameters count from its first layer."""
    found = {}
    for place in places(1, 2, 2):
        plan = load_plan(architecture(tied_embeddings=True), place, 13)
        wanted = ("input_layernorm", "word_embeddings", "output_layer", "final_layernorm")
        found[place.pipeline_stage] = {
            copy.megatron_name: copy.hf_name for copy in plan if any(part in copy.megatron_name for part in wanted)
        }
    norm, layer = "input_layernorm.weight", "decoder.layers.0"
    assert found == {
        0: {
            "chunks.0.embedding.word_embeddings.weight": "model.embed_tokens.weight",
            f"chunks.0.{layer}.{norm}": f"model.layers.0.{norm}",
            f"chunks.1.{layer}.{norm}": f"model.layers.2.{norm}",
        },
        1: {
            f"chunks.0.{layer}.{norm}": f"model.layers.1.{norm}",
            f"chunks.1.{layer}.{norm}": f"model.layers.3.{norm}",
            "chunks.1.decoder.final_layernorm.weight": "model.norm.weight",
            "chunks.1.output_layer.weight": "model.embed_tokens.weight",
        },
    }


def test_layers_that_do_not_split_over_virtual_stages_are_named():
    with pytest.raises(WeightMappingError, match="= 8 must divide num_layers=4 of this model"):
        load_plan(architecture(), places(1, 4, 2)[0], 13)


def with_experts(family, arch, layer):
    """Names of a layer with experts, from those of one without."""
    found = {name for name in layer if not name.startswith("mlp.")} | {"mlp.router.weight"}
    found |= {f"mlp.experts.linear_fc{n}.weight{i}" for n in (1, 2) for i in range(4)}
    if arch.norm_placement != "post":
        found.add("pre_mlp_layernorm.weight")
    if arch.experts is not None and arch.experts.has_bias:
        found.add("mlp.router.expert_bias")
    if arch.experts is not None and arch.experts.shared_ffn_size:
        found |= {f"mlp.shared_experts.linear_fc{n}.weight" for n in (1, 2)}
    if family == "qwen3_next":
        found.add("mlp.shared_experts.gate_weight")
    if family == "gpt_oss":
        found |= {f"mlp.experts.linear_fc{n}.bias{i}" for n in (1, 2) for i in range(4)} | {"mlp.router.bias"}
    return found


@pytest.mark.parametrize("family", sorted(LAYER_TABLES))
def test_transformer_engines_names_lead_to_the_same_rows(family):
    """The documented names of its layers: it holds each norm inside the linear layer after it."""
    place = places(1, 1)[0]
    ours = {mapping.megatron_name for mapping in stage_mappings(architecture(family=family), place, 13)}
    layer = {
        "self_attention.linear_qkv.layer_norm_weight",
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.layer_norm_weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }
    arch = architecture(family=family)
    if arch.qkv_bias:
        layer.add("self_attention.linear_qkv.bias")
    if arch.has_sinks:
        layer |= {"self_attention.linear_proj.bias", "self_attention.core_attention.softmax_offset"}
    if arch.qk_norm:
        layer |= {"self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"}
    if arch.norms_rotated_heads:
        layer |= {f"self_attention.core_attention.{name}_layernorm.weight" for name in ("q", "k")}
    if arch.norm_placement != "pre":
        layer |= {"self_attn_bda.norm.weight", "mlp_bda.norm.weight"}
    if arch.norm_placement == "post":
        layer = {name for name in layer if not name.endswith("layer_norm_weight")}
    if arch.latents is not None:
        latents = ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
        layer = {name for name in layer if name.startswith("mlp.")} | {"input_layernorm.weight"}
        layer |= {f"self_attention.linear_{name}.weight" for name in latents}
        layer |= {f"self_attention.{name}_layernorm.weight" for name in ("q", "kv")}
    mixture = with_experts(family, arch, layer)
    beside = layer if arch.experts is None else mixture
    delta = {name for name in beside if name.startswith(("mlp.", "pre_mlp"))} | {"input_layernorm.weight"}
    delta |= {f"self_attention.{name}.weight" for name in ("in_proj", "gates_proj", "norm", "out_proj")}
    delta |= {f"self_attention.{name}" for name in ("conv_query", "conv_key", "conv_value", "A_log", "dt_bias")}
    kinds = [delta if arch.has_delta_net(i) else mixture if arch.has_experts(i) else layer for i in range(4)]
    theirs = {f"decoder.layers.{i}.{name}" for i in range(4) for name in kinds[i]}
    theirs |= {"embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"}
    assert {table_name(name) for name in theirs} == ours
    fused = {
        fused_name(
            name,
            has_experts=any(name.startswith(f"decoder.layers.{i}.") for i in range(4) if arch.has_experts(i)),
            has_own_attention=arch.latents is not None
            or any(name.startswith(f"decoder.layers.{i}.") for i in range(4) if arch.has_delta_net(i)),
        )
        for name in ours
        if ".local_experts." not in name
    }
    assert fused == {name for name in theirs if ".experts." not in name}
    assert {table_name(name) for name in ours} == ours  # names of local layers are the tables' own


def test_a_rank_with_padding_only_has_no_vocabulary_to_copy():
    arch = architecture(vocab_size=3)
    plan = load_plan(arch, ShardCoordinates(tensor_parallel=TensorParallel(4, 3)), padded_vocab_size=16)
    assert not [copy for copy in plan if "word_embeddings" in copy.megatron_name]


def test_a_later_stage_counts_its_layers_from_zero():
    plan = load_plan(architecture(), places(1, 2)[1], 13)
    norms = {copy.megatron_name: copy.hf_name for copy in plan if "input_layernorm" in copy.megatron_name}
    assert norms == {
        "decoder.layers.0.input_layernorm.weight": "model.layers.2.input_layernorm.weight",
        "decoder.layers.1.input_layernorm.weight": "model.layers.3.input_layernorm.weight",
    }


def test_an_unknown_family_is_named():
    with pytest.raises(WeightMappingError, match="family 'mamba' has no name table; known: qwen2, qwen3, llama"):
        list(stage_mappings(architecture(family="mamba"), places(1, 1)[0], 13))


def test_a_share_that_does_not_split_is_named():
    with pytest.raises(WeightMappingError, match=r"o_proj: 10 does not split over tensor_parallel_size=4"):
        list(RowParallel("m", "o_proj", 3, 10).copies(TensorParallel(4, 0)))


@pytest.mark.parametrize(
    ("tensor_size", "pipeline_size", "virtual_size", "message"),
    [
        (8, 1, 1, r"tensor_parallel_size=8 must divide num_query_groups=4 .* choose from \[1, 2, 4\]"),
        (1, 3, 1, r"pipeline_parallel_size x virtual_pipeline_size = 3 must divide num_layers=4 .* \[1, 2, 4\]"),
        (1, 2, 4, r"pipeline_parallel_size x virtual_pipeline_size = 8 must divide num_layers=4"),
    ],
)
def test_a_layout_that_does_not_divide_the_model(tensor_size, pipeline_size, virtual_size, message):
    with pytest.raises(ConfigError, match=message):
        architecture().check_layout(
            ParallelConfig(
                num_ranks=tensor_size * pipeline_size,
                tensor_parallel_size=tensor_size,
                pipeline_parallel_size=pipeline_size,
                virtual_pipeline_size=virtual_size,
            )
        )
