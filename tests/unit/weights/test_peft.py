"""Folders of adapters in peft's format: what is read, what is refused and with which words."""

import dataclasses
import json
import math
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gtpo_megatron.config.adapter import ALL_LINEAR, AdapterConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.errors import ConfigError, WeightMappingError
from gtpo_megatron.rollout.engine_checks import check_adapters
from gtpo_megatron.weights.adapter_shapes import check_adaptable, check_shared, num_parameters, targets_of
from gtpo_megatron.weights.adapters import chosen_projections, projections, tensor_shapes
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron
from gtpo_megatron.weights.hf.reader import ADAPTER_CONFIG_FILE
from gtpo_megatron.weights.peft import WEIGHTS_FILE, PeftFolder, write_peft_folder
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS
from tests.distributed.expert_models import make_expert_model
from tests.distributed.family_models import FAMILIES, make_family_model

MODEL = ASSETS / "tiny_qwen2"
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
CONFIG = AdapterConfig(rank=4, alpha=8.0)


@pytest.fixture(scope="module")
def arch():
    return read_architecture(MODEL)


def adapted(folder, **settings):
    """A folder of peft's own, whose B is not 0."""
    settings = {"r": 4, "lora_alpha": 8, "target_modules": list(PROJECTIONS)} | settings
    torch.manual_seed(3)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), peft.LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_()
    model.save_pretrained(folder)
    return model


@pytest.fixture
def folder(tmp_path):
    adapted(tmp_path)
    return tmp_path


def change(folder, **values):
    said = json.loads((folder / ADAPTER_CONFIG_FILE).read_text()) | values
    (folder / ADAPTER_CONFIG_FILE).write_text(json.dumps(said))


def change_tensors(folder, function):
    tensors = load_file(folder / WEIGHTS_FILE)
    function(tensors)
    save_file(tensors, folder / WEIGHTS_FILE)


def test_there_and_back(folder, arch, tmp_path):
    """What peft wrote is what it reads after it went through here."""
    read = PeftFolder(folder, arch, CONFIG).read
    pairs = {one.name: read(one) for one in chosen_projections(arch, CONFIG)}
    back = tmp_path / "back"
    back.mkdir()
    write_peft_folder(back, pairs, base=str(MODEL), scale=CONFIG.scale)
    before, after = (load_file(path / WEIGHTS_FILE) for path in (folder, back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    model = peft.PeftModel.from_pretrained(base, back)
    assert model.peft_config["default"].lora_alpha / model.peft_config["default"].r == CONFIG.scale


def test_numbers_of_parameters_are_pefts(arch):
    for targets in (PROJECTIONS, ("q_proj", "v_proj")):
        config = peft.LoraConfig(r=6, target_modules=list(targets))
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(MODEL), config)
        assert num_parameters(arch, AdapterConfig(rank=6, targets=targets)) == model.get_nb_trainable_parameters()[0]


def test_the_scale_may_be_said_in_two_ways(tmp_path, arch):
    adapted(tmp_path, lora_alpha=4, use_rslora=True)
    PeftFolder(tmp_path, arch, CONFIG)  # 4 / sqrt(4) = 8 / 4
    PeftFolder(tmp_path, arch, dataclasses.replace(CONFIG, alpha=4.0, scaling="sqrt_rank"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 8}, "adapter.rank=8, but the adapters of .* have r=4; set --adapter.rank 4"),
        (
            {"alpha": 16.0},
            "multiplies adapters by 4, those of .* are made for 2; set --adapter.alpha 8 --adapter.scaling",
        ),
        ({"targets": ("q_proj",)}, "are of others; set --adapter.targets q_proj k_proj v_proj o_proj gate_proj"),
    ],
)
def test_another_configuration_is_told_what_to_set(folder, arch, changes, message):
    with pytest.raises(ConfigError, match=message) as error:
        PeftFolder(folder, arch, dataclasses.replace(CONFIG, **changes))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "'use_dora' is True, which adapters here do not have"),
        ({"bias": "all"}, "'bias' is 'all'"),
        ({"rank_pattern": {"q_proj": 2}}, "'rank_pattern' is"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save' is"),
        ({"init_lora_weights": "pissa"}, "'init_lora_weights' is 'pissa'"),
        ({"layer_replication": [[0, 2]]}, "'layer_replication' is"),
        ({"some_new_config": {"x": 1}}, "'some_new_config' is"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3', expected LORA"),
        ({"lora_alpha": -8}, "lora_alpha is -8, expected more than 0"),
        ({"use_rslora": "no"}, "use_rslora is 'no', expected a boolean"),
        ({"r": "four"}, "r is 'four', expected an integer"),
        ({"r": 0}, "r is 0, expected 1 or more"),
        ({"lora_alpha": None}, "lacks lora_alpha"),
    ],
)
def test_what_would_be_another_sum_is_refused_by_name(folder, arch, values, message):
    change(folder, **values)
    with pytest.raises(ConfigError, match=message):
        PeftFolder(folder, arch, CONFIG)


def test_adapters_of_some_layers_are_read(tmp_path, arch):
    """The others' begin without effect, as peft has them: not at all."""
    adapted(tmp_path, layers_to_transform=[1])
    folder = PeftFolder(tmp_path, arch, CONFIG)
    folder.check_values()
    there = {one.name.split(".")[2] for one in chosen_projections(arch, CONFIG) if folder.has(one)}
    assert there == {"1"}
    change_tensors(tmp_path, lambda tensors: tensors.pop(next(iter(tensors))))
    with pytest.raises(WeightMappingError, match="lacks 1 of 14 tensors"):
        PeftFolder(tmp_path, arch, CONFIG)
    change(tmp_path, layers_to_transform=None)  # then all layers should be there
    with pytest.raises(WeightMappingError, match="lacks 43 of 56 tensors"):
        PeftFolder(tmp_path, arch, CONFIG)
    change_tensors(tmp_path, lambda tensors: tensors.clear())
    with pytest.raises(ConfigError, match="holds no adapters"):
        PeftFolder(tmp_path, arch, CONFIG)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (
            ("model.layers.0.self_attn.q_proj", "lm_head"),
            "lm_head.* is no adapter of .*; merge the adapters",
        ),
        (("lora_A.weight", "lora_A.default.weight"), "lora_A.default.weight' is no adapter of .*; merge"),
        (("self_attn.q_proj", "self_attn.qkv_proj"), "has adapters of qkv_proj, of which none are trained here; merge"),
    ],
)
def test_adapters_of_other_things_are_told_what_to_do(folder, arch, rename, message):
    def renamed(tensors):
        for name in [name for name in tensors if rename[0] in name]:
            tensors[name.replace(*rename)] = tensors.pop(name)

    change_tensors(folder, renamed)
    with pytest.raises((ConfigError, WeightMappingError), match=message):
        PeftFolder(folder, arch, CONFIG)


def test_a_pickle_is_not_read(folder, arch):
    (folder / WEIGHTS_FILE).rename(folder / "adapter_model.bin")
    with pytest.raises(ConfigError, match="has adapter_model.bin, which is not read: .*save_pretrained them again"):
        PeftFolder(folder, arch, CONFIG)


def test_damaged_folders(folder, arch, tmp_path):
    projection = chosen_projections(arch, CONFIG)[0]
    name = f"base_model.model.{projection.name}.lora_A.weight"

    def spoil(tensors):
        tensors[name][0, 0] = float("nan")

    change_tensors(folder, spoil)
    with pytest.raises(ConfigError, match="holds NaN or infinity"):
        PeftFolder(folder, arch, CONFIG).read(projection)
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(4, 3)}))
    with pytest.raises(ConfigError, match=r"has shape \(4, 3\) of F32, expected \(4, .*: the adapters are of another"):
        PeftFolder(folder, arch, CONFIG)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(WeightMappingError, match="lacks 1 of"):
        PeftFolder(folder, arch, CONFIG)
    (folder / WEIGHTS_FILE).write_bytes(b"no safetensors")
    with pytest.raises(ConfigError, match="cannot be read: .*; save the adapters again"):
        PeftFolder(folder, arch, CONFIG)
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(ConfigError, match=WEIGHTS_FILE):
        PeftFolder(folder, arch, CONFIG)
    with pytest.raises(ConfigError, match=ADAPTER_CONFIG_FILE):
        PeftFolder(tmp_path / "nothing", arch, CONFIG)


def test_what_can_have_no_adapters(arch):
    mixture = read_architecture(ASSETS / "tiny_qwen3_moe")
    with pytest.raises(
        ConfigError, match="gate_proj is no projection .* it has q_proj, .*, experts.down_proj, and all-"
    ):
        chosen_projections(mixture, dataclasses.replace(CONFIG, targets=("q_proj", "gate_proj")))
    with pytest.raises(
        ConfigError, match="qkv_proj is no projection .* it has q_proj, k_proj, v_proj, o_proj, gate_proj"
    ):
        chosen_projections(arch, dataclasses.replace(CONFIG, targets=("qkv_proj",)))
    with pytest.raises(ConfigError, match=r"adapter.rank=500 exceeds \d+, the smaller side of q_proj and the largest"):
        chosen_projections(arch, dataclasses.replace(CONFIG, rank=500))


def test_all_linear(arch):
    """Every projection but those of experts, which may be named besides."""
    assert {one.target for one in chosen_projections(arch, CONFIG)} == set(PROJECTIONS)
    mixture = read_architecture(ASSETS / "tiny_qwen3_moe")
    assert {one.target for one in chosen_projections(mixture, CONFIG)} == set(PROJECTIONS[:4])
    both = dataclasses.replace(CONFIG, targets=(ALL_LINEAR, *EXPERTS))
    found = chosen_projections(mixture, both)
    assert {one.target for one in found} == {*PROJECTIONS[:4], *EXPERTS}
    assert len([one for one in found if one.expert is not None]) == 2 * mixture.num_layers * mixture.experts.num_experts


@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_and_name_tables_have_the_same_projections(tmp_path, name):
    """A plan, which has a shape only, refuses and counts what a run does."""
    make_family_model(tmp_path, FAMILIES[name])
    check_projections(read_architecture(tmp_path))


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_of_mixtures_too(tmp_path, name):
    make_expert_model(tmp_path, name)
    check_projections(read_architecture(tmp_path))


def check_projections(arch):
    can = {one.target for one in projections(arch)}
    if arch.experts is not None:
        can -= set(PROJECTIONS[4:])  # of shared experts and dense layers
    assert set(targets_of(arch, dataclasses.replace(CONFIG, targets=(ALL_LINEAR,)))) == can - set(EXPERTS)
    for target in can:
        config = dataclasses.replace(CONFIG, rank=1, targets=(target,))
        check_adaptable(arch, config)
        shapes = tensor_shapes(arch, config)
        assert num_parameters(arch, config) == sum(math.prod(shape) for shape in shapes.values())
        whole = [one.shapes(1, 1) for one in chosen_projections(arch, config)]
        assert num_parameters(arch, config) == sum(math.prod(shape) for shapes in whole for shape in shapes)


def assert_bare_names_are_the_same(folder, arch, config):
    said = json.loads((folder / ADAPTER_CONFIG_FILE).read_text())
    change(folder, target_parameters=[one.rpartition(".")[2] for one in said["target_parameters"]])
    PeftFolder(folder, arch, config).check_values()
    change(folder, target_parameters=[*said["target_parameters"], "gate.weight"])
    with pytest.raises(ConfigError, match="has adapters of experts.weight, of which none are trained here"):
        PeftFolder(folder, arch, config)
    change(folder, target_parameters=said["target_parameters"])


def test_weights_that_no_two_ranks_have_cannot_be_shared(tmp_path, arch):
    shared = dataclasses.replace(CONFIG, shard_frozen=True)
    make_expert_model(tmp_path, "qwen3_moe")
    mixture = read_architecture(tmp_path)
    alone = ParallelConfig(num_ranks=2, tensor_parallel_size=2)  # of a mixture, every expert whole on both
    with pytest.raises(ConfigError, match="adapter.shard_frozen=True with num_ranks=2 .*: no two ranks have the same"):
        check_shared(arch, shared, alone)
    check_shared(mixture, shared, alone)
    with pytest.raises(ConfigError, match="leave it out, or use fewer tensor- or pipeline-parallel ranks"):
        check_shared(mixture, shared, dataclasses.replace(alone, expert_parallel_size=2))
    check_shared(arch, shared, ParallelConfig(num_ranks=2, context_parallel_size=2))
    check_shared(arch, CONFIG, alone)
    with pytest.raises(ConfigError, match="adapter.shard_frozen=True with adapter.rank=0"):
        AdapterConfig(shard_frozen=True)


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[:1], EXPERTS[1:]])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_experts_there_and_back(tmp_path, family, targets):
    """peft's folder of all experts' tensors goes through each expert's A and B, and has its own bits again."""
    model = make_expert_model(tmp_path / "model", family)
    parameters = [f"mlp.{target}" for target in targets]
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], target_parameters=parameters)
    adapted = peft.get_peft_model(model, settings)
    torch.manual_seed(3)
    for parameter_name, parameter in adapted.named_parameters():
        if "lora_" in parameter_name:
            parameter.data.normal_()
    adapted.save_pretrained(tmp_path / "peft")
    arch = read_architecture(tmp_path / "model")
    config = dataclasses.replace(CONFIG, targets=("q_proj", *targets))
    folder = PeftFolder(tmp_path / "peft", arch, config)
    assert_bare_names_are_the_same(tmp_path / "peft", arch, config)
    pairs = {}
    for one in chosen_projections(arch, config):
        if one.expert is None:
            pairs[one.name] = folder.read(one)
        else:
            pairs.setdefault(one.name, []).append(folder.read(one))
    stacked = {
        name: found if isinstance(found, tuple) else tuple(torch.stack(part) for part in zip(*found, strict=True))
        for name, found in pairs.items()
    }
    back = tmp_path / "back"
    back.mkdir()
    write_peft_folder(back, stacked, base="x", scale=CONFIG.scale, takes_turns=family == "gpt_oss")
    before, after = (load_file(path / WEIGHTS_FILE) for path in (tmp_path / "peft", back))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    loaded = peft.PeftModel.from_pretrained(make_expert_model(tmp_path / "again", family), back)
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(tokens).logits, adapted(tokens).logits)


def test_values_are_read_before_a_run_starts(folder, arch):
    change(folder, init_lora_weights="eva", eva_config={"rho": 2.0})  # how A began
    PeftFolder(folder, arch, CONFIG).check_values()
    change_tensors(folder, lambda tensors: next(iter(tensors.values()))[0].fill_(math.nan))
    with pytest.raises(ConfigError, match="NaN or infinity"):
        PeftFolder(folder, arch, CONFIG).check_values()


def test_what_vllm_would_leave_out(tmp_path):
    """Of multi-latent attention it merges a projection into others before it knows of adapters."""
    make_family_model(tmp_path, FAMILIES["deepseek_dense"])
    arch = read_architecture(tmp_path)
    config = dataclasses.replace(CONFIG, targets=("kv_b_proj", "o_proj"))
    assert len(chosen_projections(arch, config)) == 2 * arch.num_layers
    with pytest.raises(ConfigError, match="vLLM multiplies kv_b_proj into other weights, .*; use push='merged'"):
        chosen_projections(arch, dataclasses.replace(config, push="adapters"))


def test_what_cannot_be_pushed_alone(tmp_path):
    alone = AdapterConfig(rank=4, targets=PROJECTIONS[:4], push="adapters")
    mixture = Path(tiny_cpu.moe_gtpo().model.path)
    with pytest.raises(ConfigError, match="vLLM's CPU build has no experts beside adapters; use push='merged'"):
        check_adapters(alone, read_architecture(mixture), mixture)
    converted = tmp_path / "converted"
    hf_to_megatron(MODEL, converted, tiny_cpu.gtpo().parallel, progress=ConversionProgress())
    with pytest.raises(ConfigError, match="cannot read a converted folder; name the Hugging Face folder"):
        check_adapters(alone, read_architecture(converted), converted)
