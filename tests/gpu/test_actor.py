"""The actor with Transformer Engine's layers on one NVIDIA GPU: bfloat16, packed, beside transformers."""

import dataclasses
import importlib.util

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.data.packing import PackLayout, micro_batches
from gtpo_megatron.observability.metrics import to_scalars
from tests.distributed.tiny_world import VOCAB, dense_scores, make_config, make_rewards, make_rollouts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.megatron,
    pytest.mark.timeout(300),  # Transformer Engine compiles and autotunes at its first call
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("transformer_engine") is None, reason="needs Transformer Engine"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

BF16 = 2**-8
"""Relative rounding error of bfloat16."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Qwen2 whose heads are of a size that flash attention takes."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(11)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.05,
    )
    # what bfloat16 can hold, so that both sides have the same weights
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def make_actor(folder, store, *, recompute="none", distributed_optimizer=False, offload_fraction=0.0):
    from gtpo_megatron.actor.actor import MegatronActor

    config = make_config(folder, {"num_ranks": 1, "distributed_optimizer": distributed_optimizer})
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, dtype="bfloat16", recompute=recompute),
        optimizer=dataclasses.replace(config.optimizer, offload_fraction=offload_fraction),
    )
    return MegatronActor(config, global_rank=0, init_method=f"file://{store}/store")


def gradients(actor):
    """Of the mean negative log-prob of the response tokens, by name, and its value."""
    from gtpo_megatron.actor.forward_backward import run_micro_batches
    from gtpo_megatron.actor.model.policy_model import parameters_by_name

    rollouts, losses = make_rollouts(), []

    def finish(hidden, batch):
        loss = -actor._head.score(hidden, batch).logprobs.sum() / rollouts.response_lengths.sum()
        losses.append(float(loss))
        return loss, None

    for chunk in actor._model:
        chunk.zero_grad_buffer()
    batches = micro_batches(rollouts, range(rollouts.num_responses), budget_tokens=30, layout=PackLayout())
    assert len(batches) > 1
    assert any(len(batch.rows) > 1 for batch in batches)
    run_micro_batches(actor._model, batches, finish, forward_only=False)
    return {name: p.main_grad.clone() for name, p in parameters_by_name(actor._chunks).items()}, sum(losses)


def step(actor, number=1):
    scores = actor.score_tokens(RolloutShard.of(make_rollouts(policy_version=number - 1), range(8)))
    scored = actor.batch
    actor.credit_tokens(make_rewards())
    return scored, to_scalars(scores | actor.update(number))


def test_scores_and_gradients_equal_transformers(folder, tmp_path):
    actor = make_actor(folder, tmp_path)
    try:
        kinds = {type(module).__name__ for chunk in actor._chunks for module in chunk.modules()}
        assert {"TEDotProductAttention", "TELayerNormColumnParallelLinear"} <= kinds
        model = Qwen2ForCausalLM.from_pretrained(folder, dtype=torch.float32)
        rollouts = make_rollouts()
        logprobs, entropy = dense_scores(model, rollouts)
        mask = rollouts.response_mask
        actor.score_tokens(RolloutShard.of(rollouts, range(8)))
        scored = actor.batch
        for found, wanted in ((scored.old_logprobs, logprobs), (scored.token_entropy, entropy)):
            gap = (found - wanted.detach())[mask].abs()
            assert gap.mean() < 4 * BF16
            assert gap.max() < 40 * BF16
        loss = -logprobs.sum() / rollouts.response_lengths.sum()
        loss.backward()
        found, value = gradients(actor)
        assert value == pytest.approx(float(loss), rel=4 * BF16)
        # where names are one to one and shapes alike; the fused projections differ in layout only
        pairs = {
            "decoder.final_layernorm.weight": "model.norm.weight",
            "output_layer.weight": "lm_head.weight",
            "embedding.word_embeddings.weight": "model.embed_tokens.weight",
            "decoder.layers.0.mlp.linear_fc2.weight": "model.layers.0.mlp.down_proj.weight",
            "decoder.layers.3.self_attention.linear_proj.weight": "model.layers.3.self_attn.o_proj.weight",
        }
        expected = dict(model.named_parameters())
        for ours, theirs in pairs.items():
            wanted = expected[theirs].grad
            mine = found[ours][: len(wanted)].float().cpu()
            assert found[ours].dtype == torch.float32
            cosine = torch.nn.functional.cosine_similarity(mine.flatten(), wanted.flatten(), dim=0)
            assert cosine > 0.995, f"{ours}: {cosine}"
            assert mine.norm() == pytest.approx(float(wanted.norm()), rel=10 * BF16)
    finally:
        actor.close()


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_an_update_reports_what_it_cost(folder, tmp_path, distributed_optimizer):
    actor = make_actor(folder, tmp_path, distributed_optimizer=distributed_optimizer)
    try:
        before = {name: weight.clone() for name, weight in actor._weights().items()}
        _, metrics = step(actor)
        assert metrics["optimizer/skipped_count"] == 0
        assert 0 < metrics["optimizer/grad_norm"] < float("inf")
        assert metrics["throughput/update_tflops_per_rank"] > 0
        for stage in ("score", "forward_backward", "optimizer"):
            assert metrics[f"memory/actor_{stage}_gpu_peak_gib"] > 0
            assert metrics[f"timing/actor_{stage}_s"] > 0
        after = actor._weights()
        # the output layer's gradient is zero nowhere that a token was scored
        assert not torch.equal(before["output_layer.weight"], after["output_layer.weight"])
        assert all(torch.isfinite(weight).all() for weight in after.values())
    finally:
        actor.close()


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_changes_little(folder, tmp_path, recompute):
    found = {}
    for kind in ("none", recompute):
        (tmp_path / kind).mkdir()
        actor = make_actor(folder, tmp_path / kind, recompute=kind)
        try:
            found[kind] = gradients(actor)
        finally:
            actor.close()
    (plain, loss), (again, loss_again) = found["none"], found[recompute]
    assert loss_again == pytest.approx(loss, rel=BF16)
    for name, gradient in plain.items():
        assert (again[name] - gradient).norm() <= 4 * BF16 * gradient.norm(), name


@pytest.mark.parametrize("offload_fraction", [0.5, 1.0])
@pytest.mark.parametrize("num_updates", [0, 1])
def test_a_checkpoint_of_an_offloaded_optimizer_goes_on_as_the_run_did(folder, tmp_path, offload_fraction, num_updates):
    """Before the first update too, where the optimizer has no state yet."""

    def train(name, act):
        (tmp_path / name).mkdir()
        actor = make_actor(folder, tmp_path / name, distributed_optimizer=True, offload_fraction=offload_fraction)
        try:
            checksums = act(actor)
            actor._policy_version = num_updates
            _, metrics = step(actor, num_updates + 1)
            weights = {weight_name: weight.clone() for weight_name, weight in actor._weights().items()}
            return checksums, metrics["optimizer/grad_norm"], weights
        finally:
            actor.close()

    def save(actor):
        for number in range(1, num_updates + 1):
            step(actor, number)
        before = {name: weight.clone() for name, weight in actor._weights().items()}
        (tmp_path / "checkpoint").mkdir()
        actor.checkpoint.begin(tmp_path / "checkpoint", in_background=False)
        checksums = actor.checkpoint.finish()
        assert all(torch.equal(before[name], weight) for name, weight in actor._weights().items())
        return checksums

    checksums, grad_norm, weights = train("saved", save)
    _, grad_norm_again, weights_again = train(
        "loaded", lambda actor: actor.checkpoint.load(tmp_path / "checkpoint", checksums=checksums)
    )
    assert grad_norm_again == pytest.approx(grad_norm, rel=BF16)
    for name, weight in weights.items():
        torch.testing.assert_close(weights_again[name], weight, rtol=4 * BF16, atol=1e-3)
