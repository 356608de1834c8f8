"""What this machine lacks is said before anything starts, by ``config`` and by ``train`` alike."""

import importlib
import io
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from gtpo_megatron import train
from gtpo_megatron.checks import CHECKS, PlannedRun, run_checks
from gtpo_megatron.cli import dispatch
from gtpo_megatron.config.evaluate import EvaluateConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.errors import ConfigError
from gtpo_megatron.orchestration import cpu_memory
from gtpo_megatron.rollout import engine_checks
from gtpo_megatron.weights import conversion
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.conversion import ConversionProgress, hf_to_megatron
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.fp8_layers import check_fp8
from gtpo_megatron.weights.model_shape import DeltaNet, LatentAttention
from recipes import tiny_cpu
from recipes.tiny_cpu import ASSETS

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' tokenizer loading
RECIPE = "recipes.tiny_cpu:gtpo"
TINY = ASSETS / "tiny_qwen2"
ROOT = Path(__file__).parents[2]
PARALLEL = ParallelConfig(num_ranks=1)


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """The sentence of both commands, which must be one line, leave no folder, and start nothing."""

    def started(*_, **__):
        pytest.fail("processes were started")

    monkeypatch.setattr(train, "_stages", started)

    def refused(*overrides):
        found = []
        for command in (["config", RECIPE], ["train", RECIPE, "--run-dir", str(tmp_path / "run")]):
            assert dispatch.run([*command, *overrides]) == 2
            text = capsys.readouterr().err
            assert len(text.splitlines()) == 1, text
            found.append(text)
        assert found[0] == found[1]
        assert not (tmp_path / "run").exists()
        return found[0]

    return refused


check_engines = partial(engine_checks.check_engines, where="rollout", model="model.path")


def poisoned(folder, name, value):
    shutil.copytree(TINY, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[7] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_no_number_is_named_with_its_file(refused, tmp_path, value):
    folder = poisoned(tmp_path / "model", "model.layers.1.mlp.up_proj.weight", value)
    text = refused("--model.path", str(folder))
    assert f"{folder / 'model.safetensors'}: model.layers.1.mlp.up_proj.weight holds NaN or infinity (1 of " in text


def test_so_is_one_of_a_converted_model(refused, tmp_path, monkeypatch):
    folder = poisoned(tmp_path / "model", "model.norm.weight", torch.nan)
    converted = tmp_path / "converted"
    monkeypatch.setattr(conversion, "require_finite", lambda *_, **__: None)  # converted by an earlier version
    hf_to_megatron(folder, converted, PARALLEL, progress=ConversionProgress())
    text = refused("--model.path", str(converted))
    assert f"{converted / 'megatron'}: model.norm.weight holds NaN or infinity (1 of " in text


def test_a_cache_larger_than_the_machine(refused):
    text = refused("--rollout.kv-cache-mib", "100000000")
    assert "rollout.kv_cache_mib=100000000 is 97656.2 GiB, and this machine has " in text


def test_a_head_size_that_vllm_has_not_on_cpus(tmp_path, monkeypatch):
    architecture = replace(read_architecture(TINY), head_size=48)
    with pytest.raises(ConfigError, match=r"head size 48: vLLM's attention on CPUs has 32, 64, .*, 256, 512; take"):
        check_engines(RolloutConfig(kv_cache_mib=1), architecture)
    large = RolloutConfig(kv_cache_mib=1 << 40)
    check_engines(large, architecture, are_here=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_engines(large, architecture)


def test_a_latent_of_a_size_that_vllm_has_not_on_cpus():
    latents = LatentAttention(query_rank=None, key_value_rank=512, rotated_size=64, value_size=32)
    architecture = replace(read_architecture(TINY), head_size=48, latents=latents)
    check_engines(RolloutConfig(kv_cache_mib=1), architecture)
    other = replace(architecture, latents=replace(latents, key_value_rank=256))
    with pytest.raises(ConfigError, match=r"^model.path: a latent and its rotated key have 320 elements: .* has 576;"):
        check_engines(RolloutConfig(kv_cache_mib=1), other)


def test_models_that_vllm_has_not_whole_in_fp8(monkeypatch):
    fp8, dense = RolloutConfig(kv_cache_mib=1, dtype="fp8"), read_architecture(TINY)
    check_engines(fp8, dense)
    latents = LatentAttention(query_rank=None, key_value_rank=512, rotated_size=64, value_size=32)
    with pytest.raises(ConfigError, match=r"^rollout.dtype='fp8': vLLM has no models with latents in FP8"):
        check_engines(fp8, replace(dense, latents=latents), are_here=False)
    with pytest.raises(ConfigError, match="models with experts with biases in FP8"):
        check_engines(fp8, replace(dense, has_sinks=True), are_here=False)
    delta = DeltaNet(
        num_key_heads=2, num_value_heads=2, key_size=64, value_size=64, conv_size=4, layers=(True,) * dense.num_layers
    )
    with pytest.raises(ConfigError, match="models with gated delta nets in FP8"):
        check_fp8(replace(dense, delta=delta))
    mixture = read_architecture(ASSETS / "tiny_qwen3_moe")
    with pytest.raises(ConfigError, match=r"^rollout.dtype='fp8' with experts: vLLM's on CPUs have no scale for each"):
        check_engines(fp8, mixture)
    check_engines(fp8, mixture, are_here=False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_engines(fp8, mixture)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    check_engines(fp8, mixture)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"dtype='fp8' on a GPU of compute capability 8.0: .* need 8.9 or more"):
        check_engines(fp8, mixture)


@pytest.mark.parametrize(
    ("model", "changes", "options", "said"),
    [
        ("tiny_qwen2", {"head_dim": 48}, [], "/model: head size 48: vLLM's attention on CPUs has 32, 64, "),
        ("tiny_qwen3_moe", {"hidden_size": 144}, [], "/model: hidden size 144: vLLM's experts on CPUs need a multiple"),
        (
            "tiny_qwen3_moe",
            {},
            ["--engine.tensor-parallel-size", "3"],
            "engine.tensor_parallel_size=3 must divide the experts' ffn_size=128 of this model; choose from",
        ),
    ],
)
def test_an_evaluation_needs_what_a_run_needs(tmp_path, capsys, model, changes, options, said):
    folder = shutil.copytree(ASSETS / model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | changes
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"problem": "1+1?", "answer": "2"}\n', encoding="utf-8")
    asked = ["evaluate", str(folder), "--benchmarks", f"mine={rows}", "--engine.kv-cache-mib", "64", *options]
    assert dispatch.run(asked) == 2
    assert said in capsys.readouterr().err


def test_experts_that_vllm_has_not_on_cpus(monkeypatch):
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=8, layers=(True,) * 4)
    mixture = replace(read_architecture(TINY), experts=experts)
    small, split = (
        RolloutConfig(kv_cache_mib=1),
        RolloutConfig(kv_cache_mib=1, tensor_parallel_size=2, expert_parallel=True),
    )
    check_engines(small, mixture)
    with pytest.raises(
        ConfigError, match=r"^model.path: hidden size 144: vLLM's experts on CPUs need a multiple of 32"
    ):
        check_engines(small, replace(mixture, hidden_size=144))
    with pytest.raises(ConfigError, match=r"^rollout.expert_parallel=True: vLLM's experts on CPUs do not know which"):
        check_engines(split, mixture)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_engines(split, replace(mixture, hidden_size=144))


def test_workers_on_nodes_that_vllm_has_not_on_cpus(monkeypatch):
    arch = read_architecture(TINY)
    check_engines(RolloutConfig(kv_cache_mib=1, pipeline_parallel_size=2, nodes_per_engine=2), arch)
    both = RolloutConfig(kv_cache_mib=1, tensor_parallel_size=2, pipeline_parallel_size=2, nodes_per_engine=2)
    with pytest.raises(ConfigError, match=r"^rollout.nodes_per_engine=2 with 2 workers on each: vLLM's CPU build"):
        check_engines(both, arch)
    with pytest.raises(ConfigError, match=r"^rollout.pipeline_parallel_size=64: the model has 4 layers"):
        check_engines(RolloutConfig(kv_cache_mib=1, pipeline_parallel_size=64), arch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_engines(both, arch)


def test_delta_nets_that_vllm_has_not_on_cpus(monkeypatch):
    experts = Experts(num_experts=4, experts_per_token=2, ffn_size=8, layers=(True,) * 4)
    delta = DeltaNet(
        num_key_heads=2, num_value_heads=4, key_size=64, value_size=64, conv_size=4, layers=(True, True, True, False)
    )
    model = replace(read_architecture(TINY), delta=delta, experts=experts)
    rollout = RolloutConfig(kv_cache_mib=1)
    check_engines(rollout, model)
    for sizes in ((32, 32), (64, 128), (256, 256)):
        other = replace(model, delta=replace(delta, key_size=sizes[0], value_size=sizes[1]))
        with pytest.raises(
            ConfigError, match=rf"^model.path: .* have {sizes[0]} elements a head, its values {sizes[1]}:"
        ):
            check_engines(rollout, other)
    exact = RolloutConfig(kv_cache_mib=1, dtype="float32")
    with pytest.raises(
        ConfigError, match=r"^model.path: vLLM's delta nets on CPUs compute in bfloat16 only, .* float32;"
    ):
        check_engines(exact, model)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    check_engines(exact, model)


@pytest.mark.vllm
@pytest.mark.filterwarnings("ignore")  # of vLLM's own imports
def test_the_sizes_of_delta_nets_are_those_of_the_vllm_that_is_installed():
    from vllm import _custom_ops
    from vllm.platforms import current_platform

    current_platform.import_kernels()

    def takes(key_size, value_size, dtype=torch.bfloat16):
        key, value = torch.randn(1, 3, 2, key_size).to(dtype), torch.randn(1, 3, 4, value_size).to(dtype)
        decay, beta = -torch.rand(1, 3, 4), torch.rand(1, 3, 4).to(dtype)
        try:
            _custom_ops.chunk_gated_delta_rule_cpu(
                query=key,
                key=key,
                value=value,
                g=decay,
                beta=beta,
                initial_state=torch.zeros(1, 4, key_size, value_size),
                output_final_state=True,
                cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
                head_first=False,
                use_qk_l2norm_in_kernel=True,
                initial_state_indices=torch.zeros(1, dtype=torch.int32),
            )
        except RuntimeError:
            return False
        return True

    sizes = (16, 32, 64, 96, 128, 192, 256)
    assert [(k, v) for k in sizes for v in sizes if takes(k, v)] == [
        (size, size) for size in engine_checks.CPU_DELTA_SIZES
    ]
    assert not takes(64, 64, torch.float32)


@pytest.mark.vllm
def test_the_multiple_is_that_of_the_vllm_that_is_installed():
    experts = importlib.import_module("vllm.model_executor.layers.fused_moe.experts.cpu_moe").CPUUnquantizedExperts
    assert experts.output_alignment == engine_checks.CPU_EXPERT_MULTIPLE


def test_the_caches_of_all_engines_count(monkeypatch):
    monkeypatch.setattr(engine_checks, "memory", lambda: (8 << 30, 8 << 30))
    engine_checks.check_cache(RolloutConfig(kv_cache_mib=2000, tensor_parallel_size=2, num_engines=2), where="rollout")
    with pytest.raises(
        ConfigError, match=r"^engine.kv_cache_mib=2048 x 4 engine processes is 8.0 GiB, .* has 8.0 GiB;"
    ):
        engine_checks.check_cache(
            RolloutConfig(kv_cache_mib=2048, tensor_parallel_size=2, num_engines=2), where="engine"
        )


def test_an_evaluation_is_checked_too(capsys):
    arguments = ["evaluate", str(TINY), "--benchmarks", "aime24", "--engine.kv-cache-mib", "100000000"]
    assert dispatch.run(arguments) == 2
    assert "engine.kv_cache_mib=100000000 is " in capsys.readouterr().err


GIB = 1 << 30


@pytest.fixture
def free(monkeypatch):
    """Sets what is free, of 24 GiB."""

    def set_free(gib):
        monkeypatch.setattr(cpu_memory, "memory", lambda: (24 * GIB, int(gib * GIB)))

    return set_free


def needed(free_gib, **rollout):
    config = tiny_cpu.gtpo()
    config = replace(config, rollout=replace(config.rollout, **{"kv_cache_mib": None} | rollout))
    parts = cpu_memory.memory_needed(config, read_architecture(TINY), free_bytes=int(free_gib * GIB))
    return config.rollout, parts


CACHES = "rollout.kv_cache_mib or rollout.max_concurrent_sequences"


@pytest.mark.parametrize(
    ("free_gib", "rollout", "is_enough", "lowered_by"),
    [
        (8.0, {}, True, CACHES),  # one replica of the ranks, one engine: only the cache is anybody's to choose
        (3.0, {}, False, CACHES),
        (3.0, {"num_engines": 3}, False, "rollout.num_engines"),
        (6.0, {"kv_cache_mib": 5000}, False, "rollout.kv_cache_mib"),
        (20.0, {"kv_cache_mib": 5000, "num_engines": 2}, True, "rollout.kv_cache_mib"),
    ],
)
def test_what_will_be_taken_and_what_is_free_is_one_line_that_names_what_lowers_it(
    free, free_gib, rollout, is_enough, lowered_by
):
    free(free_gib)
    said, fits = cpu_memory.check_free(*needed(free_gib, **rollout), where="rollout")
    assert fits is is_enough
    assert "\n" not in said
    assert said.startswith("takes at least ")
    assert f"(engines {0.9 * rollout.get('num_engines', 1):.1f}, key-value caches " in said
    assert f"; {free_gib} GiB of this machine's 24.0 GiB of memory are free; a lower {lowered_by} takes less" in said
    assert ("the system may end a process" in said) is not is_enough


@pytest.mark.parametrize(
    ("layout", "is_lowered"),
    [
        ({"num_ranks": 4}, True),
        ({"num_ranks": 4, "tensor_parallel_size": 2}, True),
        ({"num_ranks": 4, "tensor_parallel_size": 4}, False),
        ({"num_ranks": 4, "pipeline_parallel_size": 2, "context_parallel_size": 2}, False),
    ],
)
def test_fewer_ranks_are_advice_only_where_there_are_replicas(layout, is_lowered):
    config = replace(tiny_cpu.gtpo(), parallel=ParallelConfig(**layout))
    (ranks,) = (
        one for one in cpu_memory.memory_needed(config, read_architecture(TINY), free_bytes=GIB) if one.by == "ranks"
    )
    assert (ranks.lowered_by == "parallel.num_ranks") is is_lowered


def test_ranks_that_share_frozen_weights_take_less():
    def ranks(*, is_shared):
        config = tiny_cpu.gtpo_lora()
        adapter = replace(config.adapter, shard_frozen=is_shared)
        config = replace(config, adapter=adapter, parallel=ParallelConfig(num_ranks=4))
        parts = cpu_memory.memory_needed(config, read_architecture(TINY), free_bytes=GIB)
        return next(one.num_bytes for one in parts if one.by == "ranks")

    assert ranks(is_shared=True) < ranks(is_shared=False)


def test_workers_of_environments_are_counted_for_every_engine():
    def environments(config):
        parts = cpu_memory.memory_needed(config, read_architecture(TINY), free_bytes=GIB)
        return [(one.num_bytes, one.lowered_by) for one in parts if one.by == "environments"]

    config = tiny_cpu.tool_gtpo()
    assert environments(tiny_cpu.gtpo()) == []
    ((some, lowered_by),) = environments(config)
    assert lowered_by == "environment.num_workers"
    many = replace(
        config,
        environment=replace(config.environment, num_workers=4 * config.environment.num_workers),
        rollout=replace(config.rollout, num_engines=2),
        cluster=replace(config.cluster, mode="ray"),
    )
    assert environments(many) == [(8 * some, lowered_by)]


@pytest.mark.parametrize("where", ["rollout", "engine"])
def test_a_cache_that_was_asked_for_and_is_larger_than_what_is_free_is_refused(free, where):
    free(7)
    with pytest.raises(
        ConfigError, match=rf"^{where}.kv_cache_mib=8192: the caches .* are 8.0 GiB, and 7.0 GiB of .*lower"
    ):
        cpu_memory.check_free(*needed(7, kv_cache_mib=8192), where=where)


@pytest.mark.vllm
def test_the_head_sizes_are_those_of_the_vllm_that_is_installed():
    backend = importlib.import_module("vllm.v1.attention.backends.cpu_attn").CPUAttentionBackend
    assert tuple(backend.get_supported_head_sizes()) == engine_checks.CPU_HEAD_SIZES
    latent = importlib.import_module("vllm.v1.attention.backends.mla.cpu_mla").CPUMLABackend
    assert latent.get_supported_head_sizes() == [engine_checks.CPU_LATENT_SIZE]


@pytest.mark.parametrize(
    ("module", "option", "message"),
    [
        ("wandb", ["--logging.wandb-project", "p"], "logging.wandb_project='p', but wandb is not installed"),
        ("tensorboard", ["--logging.tensorboard"], "logging.tensorboard is on, but tensorboard is not installed"),
    ],
)
def test_a_logger_that_is_not_installed(refused, monkeypatch, module, option, message):
    monkeypatch.setitem(sys.modules, module, None)
    if module == "wandb":
        option = [*option, "--logging.no-tensorboard"]
    assert message in refused(*option)


@pytest.mark.slow
def test_a_run_that_is_refused_with_its_folder_open_leaves_none_that_holds_a_run(tmp_path, monkeypatch):
    """The check of the disk needs the folder; a refusal must not make the next attempt say that it holds a run."""

    def full(*_, **__):
        raise ConfigError("no room")

    monkeypatch.setattr(train, "check_disk_space", full)
    for _ in range(2):
        with pytest.raises(ConfigError, match="^no room$"):
            train.train(tiny_cpu.gtpo(), run_dir=tmp_path / "run", resume=False, console=Console(file=io.StringIO()))
    assert dispatch.run(["status", str(tmp_path / "run")]) == 1
    monkeypatch.setattr(train, "check_disk_space", lambda *_, **__: None)
    monkeypatch.setattr(train, "_stages", full)
    for _ in range(2):  # accepted, and its processes were asked to start: nothing is in the folder to go on with
        with pytest.raises(ConfigError, match="^no room$"):
            train.train(tiny_cpu.gtpo(), run_dir=tmp_path / "run", resume=False, console=Console(file=io.StringIO()))


def test_the_page_has_a_row_for_every_check():
    rows = (ROOT / "docs/refusals.md").read_text(encoding="utf-8").splitlines()
    names = [row.split("|")[1].strip() for row in rows if row.startswith("| ")]
    assert names[1:] == [one.name for one in CHECKS]


def test_an_evaluation_longer_than_the_models_positions():
    sampling = SamplingConfig(max_response_tokens=257)
    asked = EvaluateConfig(benchmarks=("aime24",), max_prompt_tokens=256, sampling=sampling)
    with pytest.raises(ConfigError, match=r"= 513 exceeds the model's max_position_embeddings=512"):
        run_checks(PlannedRun.of_evaluation(asked, TINY, date="2026-01-31"))


UNUSED = (
    "algorithms",
    "conversations",
    "sandbox.choose",
    "sandbox.server",
    "judge",
    "weights.gguf",
    "weights.megatron.reader",
)
"""Rooms and modules that a run with a Hugging Face folder and plain rewards needs nothing of."""


def test_a_driver_imports_no_room_that_its_run_does_not_use():
    """In a process of its own: checks, data sets and the driver's side of Ray, as ``train`` imports them."""
    code = (
        "import sys; from gtpo_megatron import train; from recipes import tiny_cpu; "
        "train.check_inputs(tiny_cpu.gtpo(), asks_network=True); import gtpo_megatron.orchestration.on_ray.run; "
        "print(*sorted(name for name in sys.modules if name.startswith('gtpo_megatron.')))"
    )
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    loaded = [name.removeprefix("gtpo_megatron.") for name in ran.stdout.split()]
    assert [name for name in loaded if name.startswith(UNUSED)] == []
    assert "checks" in loaded
