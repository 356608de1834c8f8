"""vLLM reads the stretching of the rotary embedding from the same config.json as the trainer and transformers."""

import dataclasses
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.rollout.requests import SampleRequest
from gtpo_megatron.weights.config_json import read_architecture
from recipes.tiny_cpu import ASSETS
from tests.integration.engine_host import EngineHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of transformers' readers
]

CONFIG = RolloutConfig(group_size=2, dtype="float32", kv_cache_mib=16, max_concurrent_sequences=8)
ORIGINAL, LONGEST = 56, 224
"""Tokens: prompts of 120 begin beyond the original context already."""
CARD = {"type": "yarn", "factor": 4.0}
"""What the Qwen2.5 card writes beside an unchanged ``max_position_embeddings``, in transformers 4's words."""
KINDS = {
    "card": {
        "max_position_embeddings": ORIGINAL,
        "rope_theta": 500.0,
        "rope_scaling": {**CARD, "original_max_position_embeddings": ORIGINAL},
    },
    # the real numbers: only prompts that long are beyond them
    "card_of_32768": {
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_scaling": {**CARD, "original_max_position_embeddings": 32768},
    },
    "yarn_with_factor": {
        "max_position_embeddings": LONGEST,
        "rope_theta": 500.0,
        "rope_scaling": {
            **CARD,
            "attention_factor": 1.4,
            "beta_fast": 4,
            "beta_slow": 0.5,
            "original_max_position_embeddings": ORIGINAL,
        },
    },
    # without the original context, which is then the other field
    "yarn_with_mscale": {
        "max_position_embeddings": ORIGINAL,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
    "llama3": {
        "max_position_embeddings": LONGEST,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": ORIGINAL,
        },
    },
}


def make(folder, changes):
    """The tiny model with another rotary embedding, which makes it a bad model and serves as well."""
    shutil.copytree(ASSETS / "tiny_qwen2", folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw.pop("rope_parameters", None)
    if changes["max_position_embeddings"] > LONGEST:  # one layer of it, for the sake of time
        changes = changes | {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
        weights = load_file(folder / "model.safetensors")
        kept = {name: one for name, one in weights.items() if ".layers." not in name or ".layers.0." in name}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(raw | changes), encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_the_sampler_equal_those_of_transformers(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    make(folder, KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    original = ORIGINAL if kind != "card_of_32768" else 32768
    longest = read_architecture(folder).max_positions
    assert longest == 4 * original
    lengths = (4, 50, 120) if original == ORIGINAL else (4, original + 20)
    generator = torch.Generator().manual_seed(1)
    requests = [
        SampleRequest(
            prompt_ids=tuple(torch.randint(5, 200, (length,), generator=generator).tolist()), group_id=group, sample=0
        )
        for group, length in enumerate(lengths)
    ]
    config = dataclasses.replace(CONFIG, kv_cache_mib=16 if original == ORIGINAL else 256)
    host = EngineHost(config, model=str(folder), max_sequence_tokens=min(longest, 65536))
    try:
        batch = host.generate(
            requests, SamplingConfig(temperature=1.0, max_response_tokens=100 if original == ORIGINAL else 20)
        )
    finally:
        host.close()
    assert int((batch.prompt_lengths + batch.response_lengths).max()) > original + 10
    for row in range(batch.num_responses):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = torch.cat([batch.prompt_ids[row, :prompt], batch.response_ids[row, :length]])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, prompt - 1 : -1].double().log_softmax(-1)
        wanted = logprobs.gather(1, ids[prompt:, None])[:, 0]
        assert (batch.rollout_logprobs[row, :length] - wanted).abs().max() < 1e-4
