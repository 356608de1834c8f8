"""Sequences of 34,816 tokens, packed and scored by real Megatron, equal transformers; the output layer stays small."""

import dataclasses
from unittest import mock

import pytest
import torch

from gtpo_megatron.batch import RolloutBatch, RolloutShard, mask_of_lengths
from gtpo_megatron.config.optimizer import UpdateConfig
from gtpo_megatron.data.packing import micro_batches
from gtpo_megatron.distributed import vocab_parallel
from gtpo_megatron.distributed.vocab_parallel import linear_token_scores
from tests.dist_utils import run_processes
from tests.distributed.family_models import LONG_ROPE, VOCAB, FamilyModel, make_family_model
from tests.distributed.tiny_world import dense_scores, make_config
from tests.unit.companions.planner.test_output_layer import LiveBytes

LENGTHS = [(8, 34808), (5, 100), (7, 3000), (40, 12)]
"""Tokens of prompt and response."""
TOTAL = 34816
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 1e5}


def long_rollouts():
    generator = torch.Generator().manual_seed(1)
    prompts, responses = (torch.tensor(lengths) for lengths in zip(*LENGTHS, strict=True))
    width = int(responses.max())
    return RolloutBatch(
        prompt_ids=torch.randint(0, VOCAB, (4, 40), generator=generator),
        prompt_lengths=prompts,
        response_ids=torch.randint(0, VOCAB, (4, width), generator=generator),
        response_lengths=responses,
        loss_mask=mask_of_lengths(responses, width),
        rollout_logprobs=torch.zeros(4, width),
        group_ids=torch.zeros(4, dtype=torch.int64),
        truncated=torch.zeros(4, dtype=torch.bool),
        policy_version=0,
    )


def scores_of(rank, world_size, init_method, config, rollouts):
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    actor.score_tokens(RolloutShard.of(rollouts, range(rollouts.num_responses)))
    return actor.batch.old_logprobs


def log_probs(rank, world_size, init_method, config, budgets):
    """By budget of a micro-batch: a long sequence in one of its own, and all of them in one."""
    from gtpo_megatron.actor.actor import MegatronActor  # ranks have it already

    found = []
    for budget in budgets:
        changed = dataclasses.replace(config, update=UpdateConfig(micro_batch_tokens=budget))
        actor = MegatronActor(changed, global_rank=rank, init_method=f"{init_method}_{budget}")
        actor.score_tokens(RolloutShard.of(long_rollouts(), range(4)))
        found.append(actor.batch.old_logprobs)
        actor.close()
    return found


@pytest.mark.megatron
@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.filterwarnings("ignore")  # Megatron warns of every optional kernel it lacks
def test_scores_of_34k_tokens_equal_those_of_transformers(tmp_path):
    """With YaRN as on the card of Qwen2.5, which leaves the other field as it was."""
    changes = {
        "rope_parameters": YARN,
        "max_position_embeddings": 32768,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "num_attention_heads": 2,
    }
    model = make_family_model(tmp_path, FamilyModel("Qwen2", changes))
    config = make_config(tmp_path, {"num_ranks": 1})
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, max_sequence_tokens=TOTAL, head_chunk_tokens=1024)
    )
    [found] = run_processes(log_probs, 1, config, (4096, 2 * TOTAL), timeout_s=300)
    with torch.no_grad():
        expected, _ = dense_scores(model, long_rollouts())
    for logprobs in found:
        torch.testing.assert_close(logprobs, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.megatron
@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Megatron warns of every optional kernel it lacks
def test_longrope_has_its_long_factors_beyond_its_original_context(tmp_path):
    """Where the policy takes longer sequences all have them; transformers changes with the sequence: here all do."""
    changes = {
        "num_hidden_layers": 2,
        "pad_token_id": None,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 48,
        "rope_parameters": {"rope_theta": 20.0, **LONG_ROPE},
    }
    model = make_family_model(tmp_path, FamilyModel("Phi3", changes))
    config = make_config(tmp_path, {"num_ranks": 1})
    rollouts = long_rollouts().select([1, 2, 3])  # 105, 3,007 and 52 tokens
    with torch.no_grad():
        expected, _ = dense_scores(model, rollouts)
    for num_tokens, is_long in ((4096, True), (48, False)):
        changed = dataclasses.replace(config.model, max_sequence_tokens=num_tokens)
        [found] = run_processes(scores_of, 1, dataclasses.replace(config, model=changed), rollouts)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4) == is_long


@pytest.mark.megatron
@pytest.mark.distributed
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # Megatron warns of every optional kernel it lacks
def test_in_bfloat16_late_tokens_are_scored_as_well_as_early_ones(tmp_path):
    """Frequencies in bfloat16 would turn positions past some hundreds by another angle: here a mean gap of 0.035."""
    changes = {"max_position_embeddings": TOTAL, "num_key_value_heads": 1, "num_attention_heads": 2}
    model = make_family_model(tmp_path, FamilyModel("Qwen2", changes))
    config = make_config(tmp_path, {"num_ranks": 1})
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, max_sequence_tokens=TOTAL, dtype="bfloat16")
    )
    rollouts = long_rollouts().select([2])  # 3,000 tokens
    [found] = run_processes(scores_of, 1, config, rollouts)
    with torch.no_grad():
        expected, _ = dense_scores(model, rollouts)
    gaps = (found - expected).abs()[0]
    assert float(gaps[2500:].mean()) < 0.02
    assert float(gaps[2500:].mean()) < 1.3 * float(gaps[:500].mean())


def test_a_long_sequence_is_packed_as_it_is():
    """In a micro-batch of its own if it fills one, else beside short ones; every token once, in its place."""
    rollouts = long_rollouts()
    for budget, expected in ((4096, 2), (2 * TOTAL, 1)):
        batches = micro_batches(rollouts, range(4), budget_tokens=budget)
        assert len(batches) == expected
        assert max(batch.max_sequence_tokens for batch in batches) == TOTAL
        for batch in batches:
            for place, row in enumerate(batch.rows):
                start, (prompt, response) = int(batch.cu_seqlens[place]), LENGTHS[row]
                ids = batch.input_ids[start : start + prompt + response]
                assert torch.equal(ids[prompt:], rollouts.response_ids[row, :response])
                positions = batch.position_ids[start : start + prompt + response]
                assert torch.equal(positions, torch.arange(prompt + response))


def peak_bytes(tokens, vocab, *, with_backward):
    """Live bytes that the output layer makes at most, its inputs not counted."""
    hidden, weight = torch.randn(tokens, 8, requires_grad=with_backward), torch.randn(vocab, 8)
    targets = torch.randint(0, vocab, (tokens,))
    with (
        mock.patch.object(vocab_parallel, "KEPT_BYTES", 0),
        LiveBytes() as seen,
        torch.set_grad_enabled(with_backward),
    ):
        scores = linear_token_scores(hidden, weight, targets, chunk_tokens=512)
        if with_backward:
            scores.logprobs.sum().backward()
    return seen.peak


@pytest.mark.slow
@pytest.mark.parametrize("with_backward", [False, True])
def test_the_output_layers_memory_is_one_chunk_however_long_the_sequence(with_backward):
    """What grows with the tokens is a few numbers each, whatever the vocabulary."""
    short, long = 2048, 32768
    by_vocab = {
        vocab: [peak_bytes(tokens, vocab, with_backward=with_backward) for tokens in (short, long)]
        for vocab in (3000, 6000)
    }
    for vocab, (least, most) in by_vocab.items():
        per_token = (most - least) / (long - short)
        assert per_token < 8 * 4 * 4 + 128  # hidden states, their gradient, sums and results
        assert most - per_token * long < 4 * 512 * vocab * 4  # a chunk's logits and what is made of them
        assert most < long * vocab * 4 / 10  # all logits
