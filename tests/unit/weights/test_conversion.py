"""Folders converted to Megatron's format and back: the same bytes, or an error that says what is wrong."""

import itertools
import json
import logging
import shutil

import pytest
import torch
import torch.distributed.checkpoint
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gtpo_megatron.errors import CheckpointError, ConfigError, WeightMappingError
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import (
    MEGATRON_FOLDER,
    hf_to_megatron,
    megatron_to_hf,
)
from gtpo_megatron.weights.hf import writer as hf_writer
from gtpo_megatron.weights.hf.reader import read_parameters, weight_files
from gtpo_megatron.weights.megatron import layout as megatron_layout
from gtpo_megatron.weights.megatron.checkpoint_files import converted_weights
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.reshard import ShardCoordinates, fused_name, hf_shapes, load_plan, stage_mappings
from gtpo_megatron.weights.weight_checks import check_weights
from tests.distributed.family_models import FAMILIES, MIXTURES, make_family_model
from tests.distributed.mixtures import NUMBERED
from tests.unit.weights.conversions import Count, contents, layout, make_models, to_hf, to_megatron

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"), FAMILIES | MIXTURES)


@pytest.fixture
def model(models, tmp_path):
    """A copy to damage, in three shards."""
    return sharded(models / "qwen3_untied-4", tmp_path / "source")


def sharded(source, target, num_shards=3):
    """The same model cut into shards by the writer itself."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = load_file(source / "model.safetensors")
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    most = sum(sizes.values()) // num_shards + max(sizes.values())
    hf_writer.write_shards(target, sizes, lambda names: {n: tensors[n] for n in names}, shard_bytes=most)
    assert len(weight_files(target)) >= 2
    return target


# ----------------------------------------------------------------------------------------------------- there and back
DENSE_LAYOUTS = {"one": layout(), "tp2": layout(2), "tp2_pp2": layout(2, 2)}


def dense_cases():
    """In the gate, every family in the layout that splits along every axis, one in the others, and 16 bits once."""
    for name in FAMILIES:
        for itemsize, kind in itertools.product((4, 2), DENSE_LAYOUTS):
            is_in_gate = (itemsize, kind) == (4, "tp2_pp2") or (name == "phi4" and (itemsize == 4 or kind == "tp2_pp2"))
            is_quick = (name, itemsize, kind) == (next(iter(FAMILIES)), 4, "tp2_pp2")
            marks = () if is_quick else pytest.mark.slow if is_in_gate else pytest.mark.nightly
            yield pytest.param(name, itemsize, DENSE_LAYOUTS[kind], id=f"{name}-{kind}-{itemsize}", marks=marks)


@pytest.mark.parametrize(("name", "itemsize", "parallel"), list(dense_cases()))
def test_every_byte_comes_back(models, tmp_path, monkeypatch, name, itemsize, parallel):
    monkeypatch.setattr(megatron_layout, "CHUNK_BYTES", 700)  # so that tensors are cut inside heads and halves
    source = models / f"{name}-{itemsize}"
    to_megatron(source, tmp_path / "converted", parallel)
    assert converted_weights(tmp_path / "converted") == tmp_path / "converted" / MEGATRON_FOLDER
    check_weights(tmp_path / "converted", read_architecture(source))
    files = list((tmp_path / "converted" / MEGATRON_FOLDER).glob("*.distcp"))
    assert len(files) == parallel.num_ranks
    to_hf(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    for companion in ("config.json", "generation_config.json", "tokenizer.json"):
        assert (tmp_path / "back" / companion).read_bytes() == (source / companion).read_bytes()


EXPERT_LAYOUTS = {
    "one": (layout(), 1),
    "tp2_pp2": (layout(2, 2), 4),
    "ep4": (layout(1, 1, 4), 4),
    "tp2_pp2_ep2_etp2": (layout(2, 2, 2, 2), 8),
    "tp2_etp4": (layout(2, 1, 1, 4), 4),
    "tp2_etp1": (layout(2, 1, 1, 1), 2),
}
"""With how many files they have."""


def mixtures():
    """Before a commit, every family in the layout that splits along every axis, one in another, and 16 bits once.

    In a folder of 16 bits the biases of glm4_moe's routers stay in float32.
    """
    for name in [name for name in MIXTURES if name != "gpt_oss"]:
        for itemsize, kind in itertools.product((4, 2), EXPERT_LAYOUTS):
            splits_all = kind == "tp2_pp2_ep2_etp2"
            is_other = (name, kind, itemsize) == ("qwen3_moe", "tp2_etp1", 4)
            is_in_gate = is_other or (splits_all and (itemsize == 4 or name == "glm4_moe"))
            marks = () if is_in_gate else pytest.mark.nightly
            yield pytest.param(name, itemsize, *EXPERT_LAYOUTS[kind], id=f"{name}-{kind}-{itemsize}", marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "itemsize", "parallel", "num_files"), list(mixtures()))
def test_every_byte_of_a_mixture_comes_back(models, tmp_path, monkeypatch, name, itemsize, parallel, num_files):
    """The expert bias stays in float32 in a folder of 16 bits; config.json is the same then too."""
    monkeypatch.setattr(megatron_layout, "CHUNK_BYTES", 700)
    source = models / f"{name}-{itemsize}"
    to_megatron(source, tmp_path / "converted", parallel)
    check_weights(tmp_path / "converted", read_architecture(source))
    assert len(list((tmp_path / "converted" / MEGATRON_FOLDER).glob("*.distcp"))) == num_files
    to_hf(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "itemsize"),
    [
        pytest.param(layout(2, 2), 4, id="tp2_pp2-4"),
        pytest.param(layout(1, 1, 4), 2, id="ep4-2"),
        pytest.param(layout(), 4, id="one-4", marks=pytest.mark.nightly),
        pytest.param(layout(1, 1, 4), 4, id="ep4-4", marks=pytest.mark.nightly),
        pytest.param(layout(2, 2), 2, id="tp2_pp2-2", marks=pytest.mark.nightly),
    ],
)
def test_every_byte_of_stacked_experts_comes_back(models, tmp_path, monkeypatch, itemsize, parallel):
    """gpt-oss has nothing but these, transposed, gate and up in turns; Megatron adds biases on one rank an expert."""
    monkeypatch.setattr(megatron_layout, "CHUNK_BYTES", 700)
    source = models / f"gpt_oss-{itemsize}"
    to_megatron(source, tmp_path / "converted", parallel)
    check_weights(tmp_path / "converted", read_architecture(source))
    to_hf(tmp_path / "converted", tmp_path / "back", shard_bytes=20_000)
    assert contents(tmp_path / "back") == contents(source)
    assert len(weight_files(tmp_path / "back")) > 1
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    with pytest.raises(ConfigError, match="expert_tensor_parallel_size must be 1 for experts with biases"):
        hf_to_megatron(source, tmp_path / "other", layout(2, 1, 1, 2), progress=Count())


def test_experts_are_an_axis_of_the_checkpoints_tensors(models, tmp_path):
    """As Megatron's own checkpoints have it: one key for all layers if all have experts, else a key for each layer."""
    shapes = {}
    for name in ("qwen3_moe", "qwen3_moe_mixed", "glm4_moe", "deepseek_v3"):
        to_megatron(models / f"{name}-4", tmp_path / name)
        metadata = FileSystemReader(tmp_path / name / MEGATRON_FOLDER).read_metadata().state_dict_metadata
        shapes[name] = {key: tuple(entry.size) for key, entry in metadata.items()}
    alike, mixed, glm, deepseek = shapes.values()
    assert alike["decoder.layers.mlp.experts.experts.linear_fc1.weight"] == (2, 4, 32, 32)
    assert alike["decoder.layers.mlp.experts.experts.linear_fc2.weight"] == (2, 4, 32, 16)
    assert alike["decoder.layers.mlp.router.weight"] == (2, 4, 32)
    assert alike["decoder.layers.pre_mlp_layernorm.weight"] == (2, 32)
    assert alike["decoder.layers.self_attention.linear_qkv.layer_norm_weight"] == (2, 32)
    assert mixed["decoder.layers.0.mlp.experts.experts.linear_fc1.weight"] == (4, 32, 32)
    assert mixed["decoder.layers.0.pre_mlp_layernorm.weight"] == (32,)
    assert mixed["decoder.layers.1.mlp.linear_fc1.layer_norm_weight"] == (32,)
    assert mixed["decoder.layers.1.mlp.linear_fc1.weight"] == (96, 32)
    assert glm["decoder.layers.1.mlp.router.expert_bias"] == (4,)
    assert glm["decoder.layers.1.mlp.shared_experts.linear_fc1.weight"] == (32, 32)
    assert glm["decoder.layers.1.self_attention.linear_qkv.bias"] == (64,)
    # no library fuses the norms of multi-latent attention, nor the one before it
    assert deepseek["decoder.layers.1.input_layernorm.weight"] == (32,)
    assert deepseek["decoder.layers.1.self_attention.kv_layernorm.weight"] == (20,)
    assert deepseek["decoder.layers.1.self_attention.linear_kv_down_proj.weight"] == (26, 32)
    assert deepseek["decoder.layers.1.self_attention.linear_q_up_proj.weight"] == (64, 12)


NAMED_OTHERWISE = (*NUMBERED, "ernie4_5_moe")
"""In a folder than in memory."""


@pytest.mark.slow
@pytest.mark.parametrize("family", [name for name in MIXTURES if name not in NAMED_OTHERWISE])
@pytest.mark.parametrize("shard_size", [pytest.param("1GB", marks=pytest.mark.nightly), "20KB"])
def test_experts_in_one_tensor_are_read_and_written_one_by_one(tmp_path, family, shard_size):
    """As ``save_original_format=False`` leaves them, in one file or in several."""
    model = make_family_model(tmp_path / "source", MIXTURES[family])
    fused = tmp_path / "fused"
    shutil.copytree(tmp_path / "source", fused, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(fused, save_original_format=False, max_shard_size=shard_size)
    names = {name for file in fused.glob("*.safetensors") for name in load_file(file)}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in names)
    assert not any(".experts.0." in name for name in names)
    check_weights(fused, read_architecture(fused))
    to_megatron(fused, tmp_path / "converted")
    to_hf(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(tmp_path / "source")
    if shard_size == "20KB":
        first = sorted(fused.glob("*.safetensors"))[0]
        first.unlink()
        with pytest.raises(ConfigError, match=f"names {first.name}, not in the folder; fetch the missing shards"):
            check_weights(fused, read_architecture(fused))


@pytest.mark.parametrize("shape", [(4, 32), (4, 33, 32), (4, 32, 33), (3, 32, 32)])
def test_experts_in_a_tensor_of_another_shape_are_refused(tmp_path, shape):
    model = make_family_model(tmp_path, MIXTURES["qwen3_moe"])
    model.save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert tensors[name].shape == (4, 32, 32)
    save_file(tensors | {name: torch.ones(shape)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightMappingError, match=r"layers\.0\.mlp\.experts") as refused:
        check_weights(tmp_path, read_architecture(tmp_path))
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "prefix", "projection"), [("glm4_moe", "model.layers.2", "eh_proj"), ("qwen3_next", "mtp", "fc")]
)
def test_layers_for_multi_token_prediction_are_left_out(models, tmp_path, caplog, name, prefix, projection):
    """Folders of GLM-4.5 hold such a layer after the last one, those of Qwen3-Next beside the model."""
    source = tmp_path / "source"
    shutil.copytree(models / f"{name}-4", source)
    tensors = load_file(source / "model.safetensors")
    extra = {f"{projection}.weight": (32, 64), "enorm.weight": (32,), "mlp.experts.0.up_proj.weight": (16, 32)}
    extra = {f"{prefix}.{tensor}": torch.ones(shape) for tensor, shape in extra.items()}
    save_file(tensors | extra, source / "model.safetensors", metadata={"format": "pt"})
    to_megatron(source, tmp_path / "converted")
    assert f"{prefix} are layers for multi-token prediction" in caplog.text
    to_hf(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(models / f"{name}-4")


def test_a_training_checkpoints_dtype_is_named_though_the_expert_bias_has_another(models, tmp_path):
    source = models / "glm4_moe-2"
    to_megatron(source, tmp_path / "converted")
    config = tmp_path / "converted" / "config.json"
    config.write_text(config.read_text().replace('"dtype": "bfloat16"', '"dtype": "float32"'))
    to_hf(tmp_path / "converted", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    bias = load_file(tmp_path / "back" / "model.safetensors")["model.layers.1.mlp.gate.e_score_correction_bias"]
    assert bias.dtype == torch.float32


def test_shards_and_their_index(models, model, tmp_path):
    to_megatron(model, tmp_path / "converted", layout(2))
    to_hf(tmp_path / "converted", tmp_path / "back", shard_bytes=20_000)
    assert contents(tmp_path / "back") == contents(models / "qwen3_untied-4")
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    shards = sorted((tmp_path / "back").glob("*.safetensors"))
    assert len(shards) > 3
    assert [path.name for path in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    assert index["metadata"]["total_size"] == sum(len(data) for _, _, data in contents(model).values())
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "back" / file, "pt") as opened:
            assert name in opened.keys()  # noqa: SIM118 - no mapping
    assert all(path.stat().st_size < 20_000 + 4096 for path in shards)


def test_tensors_keep_dtypes_of_their_own(models, tmp_path):
    source = shutil.copytree(models / "qwen3_untied-2", tmp_path / "mixed")
    tensors = load_file(source / "model.safetensors")
    tensors = {name: tensor.float() if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    to_megatron(source, tmp_path / "converted")
    to_hf(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(source)


def test_tensors_that_megatron_fuses_must_be_of_one_dtype(models, tmp_path):
    source = shutil.copytree(models / "qwen3_untied-2", tmp_path / "mixed")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.self_attn.k_proj.weight"] = tensors["model.layers.1.self_attn.k_proj.weight"].float()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightMappingError, match=r"layers.1.self_attn.k_proj.weight is torch.float32 but .* one dtype"):
        to_megatron(source, tmp_path / "converted")


def test_a_folder_without_a_tokenizer_converts_with_a_warning(models, tmp_path, caplog):
    source = shutil.copytree(models / "llama3-4", tmp_path / "bare")
    (source / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        to_megatron(source, tmp_path / "converted")
    assert "has no tokenizer" in caplog.text
    caplog.clear()
    to_megatron(models / "llama3-4", tmp_path / "with")
    assert not caplog.text


def test_an_output_layer_tied_and_stored_again_is_let_pass_only_if_it_is_the_embedding(models, tmp_path):
    source = shutil.copytree(models / "qwen2-4", tmp_path / "tied")
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)  # as old Llama folders have it
    save_file(tensors, source / "model.safetensors")
    to_megatron(source, tmp_path / "converted")
    to_hf(tmp_path / "converted", tmp_path / "back")
    assert contents(tmp_path / "back") == contents(models / "qwen2-4")
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightMappingError, match="lm_head.weight differs from model.embed_tokens.weight; set tie_"):
        to_megatron(source, tmp_path / "other")
    tensors.pop("model.embed_tokens.weight")  # as safetensors' save_model leaves it
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightMappingError, match="as lm_head.weight alone, which vLLM does not read; load .* save_pre"):
        to_megatron(source, tmp_path / "other")


# --------------------------------------------------------------------------------------------- what a source may lack
def rewritten(folder, change):
    """Applies ``change`` to the tensors of whichever shard has layer 1's attention output."""
    path = next(p for p in weight_files(folder) if "model.layers.1.self_attn.o_proj.weight" in load_file(p))
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != path.name}
    index["weight_map"] |= dict.fromkeys(tensors, path.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


OUTPUT = "model.layers.1.self_attn.o_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(OUTPUT), f"lacks 1 of 25 tensors, first '{OUTPUT}'"),
        (lambda t: t.update(nose=torch.zeros(2)), "has 1 that the architecture does not, first 'nose'"),
        (
            lambda t: t.update({"model.layers.1.self_attn.out_proj.weight": t.pop(OUTPUT)}),
            f"'{OUTPUT}' may have been renamed to 'model.layers.1.self_attn.out_proj.weight'",
        ),
        (lambda t: t.update({OUTPUT: t[OUTPUT][:-1].clone()}), r"has shape \(31, 16\), expected \(32, 16\)"),
        (lambda t: t.update({OUTPUT: t[OUTPUT].flatten()}), r"has shape \(512,\), expected \(32, 16\)"),
        (lambda t: t.update({OUTPUT: t[OUTPUT].to(torch.int8)}), "o_proj.weight is I8; expected one of F32, BF16, F16"),
    ],
    ids=["missing", "extra", "renamed", "short", "flat", "quantized"],
)
def test_tensors_that_are_not_the_architectures(model, tmp_path, change, message):
    rewritten(model, change)
    with pytest.raises(WeightMappingError, match=message):
        to_megatron(model, tmp_path / "converted")
    with pytest.raises(WeightMappingError, match=message):
        check_weights(model, read_architecture(model))
    assert not (tmp_path / "converted").exists()


def test_a_model_with_nan_is_not_converted(model, tmp_path):
    rewritten(model, lambda tensors: tensors[OUTPUT].view(-1)[3].fill_(torch.nan))
    with pytest.raises(ConfigError, match=f"{OUTPUT} holds NaN or infinity"):
        to_megatron(model, tmp_path / "converted")
    assert not (tmp_path / "converted").exists()


def test_damaged_shards(model, tmp_path):
    first, second, *_ = weight_files(model)
    data = first.read_bytes()
    first.write_bytes(data[:-100])
    with pytest.raises(ConfigError, match=f"{first.name} cannot be read"):
        to_megatron(model, tmp_path / "converted")
    first.write_bytes(second.read_bytes())
    with pytest.raises(WeightMappingError, match=r"promises .* in .*, which does not hold it"):
        to_megatron(model, tmp_path / "converted")
    first.unlink()
    with pytest.raises(ConfigError, match=f"names {first.name}, not in the folder; fetch the missing shards"):
        to_megatron(model, tmp_path / "converted")
    (model / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"index\.json: is \[\], expected an object"):
        to_megatron(model, tmp_path / "converted")


def test_adapters_in_a_model_folder_are_refused_in_either_format(model, tmp_path):
    to_megatron(model, tmp_path / "converted")
    for folder in (model, tmp_path / "converted"):
        (folder / "adapter_config.json").write_text("{}")
        with pytest.raises(ConfigError, match=r"has adapter_config\.json: transformers loads it with these adapters"):
            check_weights(folder, read_architecture(folder))
    with pytest.raises(ConfigError, match=r"has adapter_config\.json"):
        to_megatron(model, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_an_export_loads_though_its_model_has_adapters_beside_it(model, tmp_path):
    """Of a run of before that was refused: transformers looks for the adapters that the configuration tells of."""
    to_megatron(model, tmp_path / "converted")
    (tmp_path / "converted" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    to_hf(tmp_path / "converted", tmp_path / "hf")
    assert not (tmp_path / "hf" / "adapter_config.json").exists()
    check_weights(tmp_path / "hf", read_architecture(tmp_path / "hf"))


def test_layouts_that_do_not_divide_the_model(models, tmp_path):
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 must divide num_query_groups=2"):
        to_megatron(models / "llama3-4", tmp_path / "converted", layout(4))
    with pytest.raises(ConfigError, match="must divide num_layers=2"):
        to_megatron(models / "llama3-4", tmp_path / "converted", layout(1, 4))


# ------------------------------------------------------------------------------------------------- where it is written
def test_a_target_that_holds_something_is_left_alone(models, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        to_megatron(models / "llama3-4", tmp_path / "full")
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["precious"]
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        to_megatron(models / "llama3-4", tmp_path / "full" / "precious")
    (tmp_path / "empty").mkdir()
    to_megatron(models / "llama3-4", tmp_path / "empty")
    with pytest.raises(ConfigError, match="exists and is not an empty folder"):
        to_hf(tmp_path / "empty", tmp_path / "full")


def test_a_disk_without_room_is_seen_before_anything_is_written(models, tmp_path, monkeypatch):
    to_megatron(models / "llama3-4", tmp_path / "converted")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=50_000))
    for convert, source in ((to_megatron, models / "llama3-4"), (to_hf, tmp_path / "converted")):
        with pytest.raises(CheckpointError, match=r"0.00 GiB free, but 0.00 GiB are to be written; make room"):
            convert(source, tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted"]


def test_a_disk_that_fills_up_leaves_nothing_behind(models, tmp_path, monkeypatch):
    to_megatron(models / "llama3-4", tmp_path / "converted")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(CheckpointError, match="target could not be written: No space left on device"):
        to_megatron(models / "llama3-4", tmp_path / "target")
    monkeypatch.setattr(hf_writer, "save_file", full)
    with pytest.raises(CheckpointError, match="target could not be written: No space left on device"):
        to_hf(tmp_path / "converted", tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted"]


# -------------------------------------------------------------------------------------------- damaged Megatron folders
@pytest.fixture
def converted(models, tmp_path):
    to_megatron(models / "qwen3_untied-4", tmp_path / "converted", layout(2))
    return tmp_path / "converted"


def test_damaged_checkpoints(converted, tmp_path):
    checkpoint = converted / MEGATRON_FOLDER
    path = checkpoint / "__1_0.distcp"
    data = path.read_bytes()

    def refused(error, message):
        with pytest.raises(error, match=message):
            to_hf(converted, tmp_path / "back")
        assert not (tmp_path / "back").exists()

    path.write_bytes(data[:-10])
    refused(CheckpointError, f"__1_0.distcp is cut short at {len(data) - 10} of {len(data)} bytes")
    path.write_bytes(bytes(len(data)))
    refused(CheckpointError, "__1_0.distcp: the tensor .* is refused: .*it is damaged")
    path.unlink()
    refused(CheckpointError, "__1_0.distcp is missing")
    (checkpoint / ".metadata").write_bytes(b"no pickle")
    refused(CheckpointError, ".metadata is refused: .*it is damaged")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "lacks 1 of .*linear_qkv.bias'; has 2 that .*k_layernorm"),
        ({"intermediate_size": 64}, r"mlp.linear_fc1.weight has shape \(2, 96, 32\), expected \(2, 128, 32\)"),
        ({"num_hidden_layers": 1}, r"has shape \(2, .*, expected \(1, "),
        ({"vocab_size": 300}, r"word_embeddings.weight has shape \(256, 32\), expected \(300, 32\)"),
        ({"tie_word_embeddings": True}, "has 1 that the architecture does not, first 'output_layer.weight'"),
    ],
    ids=["family", "width", "depth", "vocabulary", "tied"],
)
def test_a_checkpoint_of_another_model(converted, tmp_path, changes, message):
    config = json.loads((converted / "config.json").read_text())
    (converted / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(WeightMappingError, match=message):
        to_hf(converted, tmp_path / "back")
    with pytest.raises(WeightMappingError, match=message):
        check_weights(converted, read_architecture(converted))


def test_a_checkpoint_with_a_hole(converted, tmp_path):
    """One chunk of the metadata taken out: nothing else would notice."""
    import pickle

    path = converted / MEGATRON_FOLDER / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.state_dict_metadata["decoder.layers.mlp.linear_fc2.weight"].chunks.pop()
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(WeightMappingError, match=r"768 of 1536 elements of decoder.layers.1.mlp.linear_fc2.weight"):
        to_hf(converted, tmp_path / "back")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_layers_stored_one_by_one_are_read_too(models, tmp_path):
    """Megatron writes them so where it is told to: every layer has a key, without an axis for layers."""
    source = models / "qwen3_untied-2"
    arch = read_architecture(source)
    place = ShardCoordinates(tensor_parallel=TensorParallel(1, 0))
    parameters = {}
    for mapping in stage_mappings(arch, place, arch.vocab_size):
        rows, columns = mapping.extent
        shape = (rows, columns) if columns > 1 else (rows,)
        parameters[mapping.megatron_name] = torch.zeros(shape, dtype=torch.bfloat16)
    read_parameters(source, hf_shapes(arch), load_plan(arch, place, arch.vocab_size), parameters)
    state = {fused_name(name): parameter for name, parameter in parameters.items()}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "stored", no_dist=True)
    megatron_to_hf(tmp_path / "stored", source, tmp_path / "back", progress=Count(), verify="none")
    assert contents(tmp_path / "back") == contents(source)
