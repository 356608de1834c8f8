"""The experts that a real vLLM engine says its routers chose are those that transformers chooses."""

import shutil
from pathlib import Path

import pytest
import torch

from gtpo_megatron.config.rollout import RolloutConfig, SamplingConfig
from gtpo_megatron.rollout.requests import SampleRequest
from tests.distributed.expert_models import make_expert_model
from tests.distributed.mixtures import recorded_routers
from tests.integration.engine_host import MODEL, EngineHost

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.timeout(300),
    pytest.mark.xdist_group("an engine of experts"),
    pytest.mark.filterwarnings("ignore"),  # of transformers' readers
]

NUM_LAYERS, PER_TOKEN = 4, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # the engine asks it for the end of a response
        shutil.copy(Path(MODEL) / name, folder)
    # vLLM's CPU kernels have smallest sizes
    sizes = {"head_dim": 32, "moe_intermediate_size": 64, "max_position_embeddings": 256}
    return folder, make_expert_model(folder, "qwen3_moe", num_layers=NUM_LAYERS, **sizes)


@pytest.fixture(scope="module", params=[1, 2])
def host(request, model):
    config = RolloutConfig(
        group_size=2,
        dtype="float32",
        kv_cache_mib=1,  # 16 blocks of 32 tokens, or 32 on two workers: fewer than 8 responses need
        max_concurrent_sequences=8,
        tensor_parallel_size=request.param,
        returns_routing=True,
    )
    found = EngineHost(config, model=str(model[0]), max_sequence_tokens=256)
    yield found
    found.close()


def requests():
    """More than the engine decodes together, of several lengths; the two of a group share their prompt."""
    return [
        SampleRequest(prompt_ids=tuple(range(3 + group, 6 + group + group % 5)), group_id=group, sample=sample)
        for group in range(12)
        for sample in range(2)
    ]


def assert_like_transformers(batch, model):
    lengths = batch.routed_lengths.tolist()
    assert batch.routed_experts.shape == (sum(lengths), NUM_LAYERS, PER_TOKEN)
    assert batch.routed_experts.dtype == torch.uint8
    for row, found in enumerate(batch.routed_experts.split(lengths)):
        prompt, response = int(batch.prompt_lengths[row]), int(batch.response_lengths[row])
        ids = torch.cat([batch.prompt_ids[row, :prompt], batch.response_ids[row, :response]])
        with torch.no_grad(), recorded_routers(model) as routed:
            model(ids[None])
        wanted = torch.stack([choices[0][:-1] for _, choices in routed], dim=1)
        assert torch.equal(found.long().sort(-1).values, wanted.sort(-1).values), f"response {row}"


def test_every_token_that_was_run_has_its_experts(host, model):
    sampling = SamplingConfig(max_response_tokens=150)
    batch, num_preempted = host.ask("generate_and_count_preemptions", requests(), sampling)
    assert_like_transformers(batch, model[1])
    again = host.generate(requests(), sampling)
    assert torch.equal(batch.routed_experts, again.routed_experts), "nothing was left of the first time"
    assert num_preempted > 0, "tokens were computed again"


def test_responses_that_end_early_and_single_tokens(host, model):
    batch = host.generate(requests()[:5], SamplingConfig(max_response_tokens=1))
    assert_like_transformers(batch, model[1])
    stops = tuple(range(10, 30))
    batch = host.generate(requests(), SamplingConfig(max_response_tokens=40, stop_token_ids=stops))
    assert int(batch.response_lengths.min()) < 40
    assert_like_transformers(batch, model[1])
