"""After a push from any trainer layout into any vLLM layout, vLLM says what transformers says with the same weights."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from tests.distributed.family_models import DOTS1, LLAMA3_ROPE, MINIMAX_M2, config_class

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
FAMILIES = {
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "llama": "Llama",
    "mistral": "Mistral",
    "mistral_window": "Mistral",
    "seed_oss": "SeedOss",
    "smollm3": "SmolLM3",
    "ernie4_5": "Ernie4_5",
    "phi4": "Phi3",
    "phi4_mini": "Phi3",
    "phi4_mini_long": "Phi3",
    "qwen3_moe": "Qwen3Moe",
    "qwen2_moe": "Qwen2Moe",
    "dots1": "Dots1",
    "mixtral": "Mixtral",
    "qwen3_next": "Qwen3Next",
    "glm4_moe": "Glm4Moe",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "glm4_moe_lite": "Glm4MoeLite",
    "gpt_oss": "GptOss",
    "ministral3": "Ministral3",
    "granite": "Granite",
    "glm4": "Glm4",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "exaone4": "Exaone4",
    "gemma": "Gemma",
    "gemma3": "Gemma3",
    "olmoe": "Olmoe",
    "glm": "Glm",
    "cwm": "Cwm",
    "helium": "Helium",
    "hunyuan": "HunYuanDenseV1",
    "flex_olmo": "FlexOlmo",
    "minimax_m2": "MiniMaxM2",
    "ernie4_5_moe": "Ernie4_5_Moe",
    "deepseek_v2_groups": "DeepseekV2",
}
LATENTS = {
    # the one size of a latent that vLLM's CPU build takes: 512 + 64
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "rms_norm_eps": 1e-6,
}
DEEPSEEK_V2 = {
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "routed_scaling_factor": 1.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 20.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
    },
}
CHANGES = {
    "mistral": {"sliding_window": None},
    "mistral_window": {"sliding_window": 20},  # prompts have 40 tokens
    "smollm3": {"pad_token_id": None},
    "ernie4_5": {"pad_token_id": None},
    "phi4": {"pad_token_id": None},
    "phi4_mini": {
        "pad_token_id": None,
        "sliding_window": 256,
        "original_max_position_embeddings": 128,  # the engine's context
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 500.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + pair / 6 for pair in range(12)],
            "long_factor": [1.0 + 2 * pair for pair in range(12)],
        },
    },
    "ministral3": {
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 2.0,
            "original_max_position_embeddings": 128,  # the engine's context
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.2,
    },
    "glm4": {"pad_token_id": None},
    "glm": {"pad_token_id": None, "attention_bias": True},
    "cwm": {
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "rope_parameters": {**LLAMA3_ROPE, "rope_theta": 500.0},
    },
    "helium": {"pad_token_id": None},
    "hunyuan": {
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0},
    },
    "olmo2": {"pad_token_id": None},
    "olmo3": {
        "pad_token_id": None,
        "sliding_window": 20,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    },
    "exaone4": {"pad_token_id": None, "sliding_window": 20, "sliding_window_pattern": 2},
    "gemma": {"pad_token_id": None},
    "gemma3": {
        "pad_token_id": None,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "query_pre_attn_scalar": 50,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
        },
    },
    "olmoe": {"pad_token_id": None, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "flex_olmo": {"pad_token_id": None, "num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48},
    "ernie4_5_moe": {
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 48,
        "pad_token_id": None,
    },
    "minimax_m2": {**MINIMAX_M2, "rotary_dim": 16, "head_dim": 32, "num_local_experts": 8, "intermediate_size": 48},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
    "dots1": {**DOTS1, "n_routed_experts": 8, "moe_intermediate_size": 48},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_next": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,  # this or 128 on CPUs, as many as values have
        "linear_value_head_dim": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 1,
        "routed_scaling_factor": 2.5,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "deepseek_v3": LATENTS,  # positions as they are; vLLM's class of stretched ones is another
    "glm4_moe_lite": {
        **LATENTS,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 20.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "gpt_oss": {
        "intermediate_size": 128,  # of which a worker's share must be a multiple of 32 on CPUs
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 20.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 32,
        },
    },
    "deepseek_v2": {**LATENTS, **DEEPSEEK_V2, "q_lora_rank": None},
    "deepseek_v2_groups": {
        **LATENTS,
        **DEEPSEEK_V2,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 3,
    },
}


CHANGES["phi4_mini_long"] = CHANGES["phi4_mini"] | {"original_max_position_embeddings": 32}  # all are longer


def make_folder(folder, family, *, tied, vocab_size=150):
    """Head size 32, the least that vLLM's CPU attention takes; a vocabulary that both sides must pad."""
    torch.manual_seed(7)
    config = config_class(FAMILIES[family])(
        vocab_size=vocab_size,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        **(
            {"intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256}
            | CHANGES.get(family, {})
        ),
    )
    model = getattr(transformers, f"{FAMILIES[family]}ForCausalLM")(config).float()
    for name, parameter in model.named_parameters():
        if name.endswith(("sinks", "_proj_bias")):  # of gpt-oss: sinks that matter, gates beyond the clamp
            torch.nn.init.normal_(parameter, std=3.0)
    model.save_pretrained(folder, max_shard_size="500KB" if family == "mistral" else "50GB")
    for path in (ROOT / "recipes" / "assets" / "tiny_qwen2").glob("*token*"):
        shutil.copy(path, folder)
    if family == "mistral":  # the hub's folders have everything once more in its own format, which must not be read
        assert (folder / "model.safetensors.index.json").is_file()
        for name in ("params.json", "consolidated.safetensors", "tekken.json"):
            (folder / name).write_text("{}", encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "tied", "sampler_tp", "transport"),
    [
        ("qwen2", True, 2, "shared_memory"),
        pytest.param("qwen3", False, 2, "process_group,shared_memory,relay", marks=pytest.mark.slow),
        pytest.param("qwen3", False, 2, "process_group", marks=pytest.mark.nightly),
        pytest.param("llama", True, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("llama", False, 2, "relay", marks=pytest.mark.nightly),
        pytest.param("mistral", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("mistral_window", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("seed_oss", False, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("seed_oss", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("smollm3", True, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("smollm3", True, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("ernie4_5", True, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("phi4", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("phi4_mini", True, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("phi4_mini_long", True, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("ministral3", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("granite", True, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("glm4", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("glm", False, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("glm", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("cwm", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("helium", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("hunyuan", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("olmo2", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("olmo3", False, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("olmo3", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("exaone4", False, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("gemma", True, 2, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("gemma3", True, 1, "shared_memory", marks=pytest.mark.nightly),
        pytest.param("gemma3", True, 2, "shared_memory", marks=pytest.mark.nightly),
    ],
)
def test_pushed_weights_are_the_ones_that_answer(tmp_path, family, tied, sampler_tp, transport):
    make_folder(tmp_path, family, tied=tied)
    assert_pushes(probe(tmp_path, sampler_tp, transport))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "sampler_tp"),
    [
        ("qwen3_moe", 2),
        ("qwen2_moe", 2),
        ("dots1", 2),
        ("mixtral", 2),
        ("olmoe", 2),
        ("flex_olmo", 2),
        ("minimax_m2", 2),
        ("ernie4_5_moe", 2),
        ("glm4_moe", 1),
        ("glm4_moe", 2),
        ("deepseek_v3", 2),
        ("glm4_moe_lite", 1),
        ("deepseek_v2", 2),
        ("deepseek_v2_groups", 2),
        ("gpt_oss", 1),
        ("gpt_oss", 2),
    ],
)
def test_pushed_experts_are_the_ones_that_answer(tmp_path, family, sampler_tp):
    """From worlds in which experts are split otherwise than everything else; then 20 pushes over one link."""
    make_folder(tmp_path, family, tied=False)
    *rows, many = probe(tmp_path, sampler_tp, "shared_memory", "20")
    assert_pushes(rows)
    assert many["wrong_checksums"] == 0
    assert many["largest_gap"] < 1e-4


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("sampler_tp", [1, 2])
def test_pushed_delta_nets_say_to_the_last_bit_what_an_engine_says_that_read_them(tmp_path, sampler_tp):
    """Their kernels on CPUs know bfloat16 only, so transformers is near, and no proof.

    The second push finds all weights lost and every state overwritten; the third finds responses in flight.
    """
    make_folder(tmp_path, "qwen3_next", tied=False)
    pushed = tmp_path / "pushed"
    first, second, third = probe(tmp_path, sampler_tp, str(pushed), program="delta_probe", timeout_s=800)
    (started,) = probe(pushed, sampler_tp, program="delta_probe")
    assert second["answers"] == started["answers"]
    assert not second["lost"]
    for row in (first, second):
        assert row["same_checksums"], str(row)
        assert row["gap"] < 2 * row["gap_of_bfloat16"], row
    assert first["gap_of_before"] > 10 * first["gap"]
    assert first["block"][0] == first["block"][1]  # as the planner has it
    assert (first["keeps_prefixes"], first["state"]) == (False, "float32")
    assert third["num_going"] > 4, third
    assert third["versions"] == [[2, 3]], third
    assert third["same"], third


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "tied", "sampler_tp"),
    [
        ("qwen2", True, 1),
        *(
            pytest.param(family, tied, tp, marks=pytest.mark.nightly)
            for family, tied, tp in (
                ("qwen2", True, 2),
                ("phi4", False, 1),
                ("gemma3", True, 1),
                ("glm4", False, 1),
            )
        ),
    ],
)
def test_an_engine_in_fp8_rounds_what_is_pushed(tmp_path, family, tied, sampler_tp):
    """As the formula does, and to the last bit as an engine that was started with these weights."""
    make_folder(tmp_path, family, tied=tied)
    pushed = tmp_path / "pushed"
    *rows, memory = probe(tmp_path, sampler_tp, str(pushed), program="fp8_probe", timeout_s=600)
    assert len(rows) == 3
    for row in rows:
        assert row["same_checksums"], row["layout"]
        assert not row["differing"], row["layout"]
    near, far = (sum(row[name] for row in rows) for name in ("to_rounded", "to_whole"))
    assert near < 0.8 * far
    assert memory["held"] == pytest.approx(memory["planned"], rel=0.03)
    (started,) = probe(pushed, sampler_tp, program="fp8_probe", timeout_s=280)
    assert started["answers"] == rows[-1]["answers"]


def assert_pushes(rows):
    assert len(rows) == 3
    for row in rows:
        assert row["same_checksums"], str(row)
        assert row["same_output"], str(row)
        assert row["gap"] < 1e-4, row


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_200_pushes_need_no_more_memory_than_20(tmp_path, family):
    """Every one of them right by checksum, and by what vLLM says after it: experts are prepacked anew each time."""
    make_folder(tmp_path, family, tied=False)
    *rows, memory = probe(tmp_path, 1, "shared_memory", "200", timeout_s=800)
    assert_pushes(rows)
    assert memory["wrong_checksums"] == 0
    assert memory["largest_gap"] < 1e-4
    assert memory["bytes_late"] - memory["bytes_early"] < 8 << 20, memory  # the model has 2.5 MiB


@pytest.mark.nightly
@pytest.mark.parametrize(("family", "sampler_tp"), [("qwen3_moe", 1), ("qwen2", 2)])
def test_tokens_have_the_log_probs_of_the_weights_that_sampled_them(tmp_path, family, sampler_tp):
    """Weights change in mid-generation; keys and values of the old ones would show behind the switch.

    A response that goes on has its own limit, not one more, and the experts of every token that was run, once.
    """
    make_folder(tmp_path, family, tied=family == "qwen2")
    refused, found, failed = probe(tmp_path, sampler_tp, program="partial_probe")
    assert found["same_checksums"]
    assert found["gap_before"] < 1e-4
    assert found["gap_after"] < 1e-4
    assert found["other_weights_gap"] > 0.1  # and of no other weights
    # eight were being written; the rest had no token yet, or few, since a place became free
    assert found["switches"][:6] == [20] * 6  # wanted first, though begun after the others
    assert min(found["switches"]) < 20
    assert found["oldest"] == [0, 0]
    assert max(found["lengths"]) == found["budget"]
    if family == "qwen3_moe":
        assert found["routed"] == [tokens - 1 for tokens in found["tokens"]]
    assert "policy version 2 is pushed while 6 requests are in flight" in refused["refused"]
    assert "vLLM could not load policy version 2: no answer to start_weight_update" in failed["push"]
    assert "vLLM has no usable weights" in failed["after"]


def probe(tmp_path, sampler_tp, *arguments, program="push_probe", timeout_s=280):
    """Runs the program; its lines."""
    command = [sys.executable, "-m", f"tests.integration.{program}", str(tmp_path), str(sampler_tp), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
