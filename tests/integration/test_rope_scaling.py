"""vLLM reads the stretching of the rotary embedding from the same config.json as the trainer and transformers."""

import json
import shutil

import pytest
import torch

from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.rollout.requests import SampleRequest
from recipes.tiny_cpu import ASSETS
from tests.integration.engine_host import EngineHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # of transformers' readers
]

CONFIG = RolloutConfig(group_size=2, dtype="float32", kv_cache_mib=16, max_concurrent_sequences=8)
ORIGINAL, LONGEST = 56, 224
"""Tokens: prompts of 120 begin beyond the original context already."""
KINDS = {
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0}},
    # as transformers 4 wrote it
    "yarn_with_factor": {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.4, "beta_fast": 4, "beta_slow": 0.5},
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        }
    },
}


def make(folder, changes):
    """The tiny model with another rotary embedding, which makes it a bad model and serves as well."""
    shutil.copytree(ASSETS / "tiny_qwen2", folder)
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    raw.pop("rope_parameters", None)
    raw |= {"max_position_embeddings": LONGEST} | changes
    next(raw[key] for key in ("rope_parameters", "rope_scaling") if key in changes)[
        "original_max_position_embeddings"
    ] = ORIGINAL
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_of_the_sampler_equal_those_of_transformers(tmp_path, kind):
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "model"
    make(folder, KINDS[kind])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    requests = [
        SampleRequest(
            prompt_ids=tuple(torch.randint(5, 200, (length,), generator=generator).tolist()), group_id=group, sample=0
        )
        for group, length in enumerate((4, 50, 120))
    ]
    host = EngineHost(CONFIG, model=str(folder), max_sequence_tokens=LONGEST)
    try:
        batch = host.generate(requests, SamplingConfig(temperature=1.0, max_response_tokens=100))
    finally:
        host.close()
    assert int((batch.prompt_lengths + batch.response_lengths).max()) > 2 * ORIGINAL
    for row in range(batch.num_responses):
        prompt, length = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = torch.cat([batch.prompt_ids[row, :prompt], batch.response_ids[row, :length]])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, prompt - 1 : -1].double().log_softmax(-1)
        wanted = logprobs.gather(1, ids[prompt:, None])[:, 0]
        assert (batch.rollout_logprobs[row, :length] - wanted).abs().max() < 1e-4
