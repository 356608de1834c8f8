"""Bytes by part in every phase."""

from dataclasses import replace

import pytest

from gtpo_megatron.companions.planner.hardware import FRAGMENTATION, GIB
from gtpo_megatron.companions.planner.known_models import find_shape
from gtpo_megatron.companions.planner.layout import Layout
from gtpo_megatron.companions.planner.phases import PHASES, engine_gpu, engine_of, node_host, trainer_gpu
from gtpo_megatron.companions.planner.search import assess, assess_all
from gtpo_megatron.companions.planner.trainer_state import stage_parameters, trainer_state
from gtpo_megatron.config.adapter import AdapterConfig
from tests.unit.companions.planner.requests import request

LAYOUT = Layout(num_ranks=64, tensor=8, pipeline=4, sequence_parallel=True)


def train(part, stage=0, layout=LAYOUT, **changes):
    return trainer_gpu(request(**changes), layout, stage).phases["train"].get(part, 0)


def test_colocated_a_gpu_knows_every_phase():
    gpu = trainer_gpu(request(), LAYOUT, 0)
    assert tuple(gpu.phases) == PHASES
    assert gpu.peak == sum(gpu.phases[gpu.peak_phase].values())
    assert all(gpu.peak >= sum(parts.values()) for parts in gpu.phases.values())


def test_state_is_held_while_training_and_gone_while_the_engine_is_awake():
    gpu = trainer_gpu(request(), LAYOUT, 0)
    state = trainer_state(stage_parameters(request().shape, LAYOUT, 0, 128), LAYOUT, weight_bytes=2)
    for phase in ("score", "train", "save"):
        parts = gpu.phases[phase]
        assert parts["weights"] == state.weights
        assert parts["gradients"] == state.gradients
        assert parts["optimizer"] == state.optimizer
    for phase in ("push", "generate"):
        assert not {"gradients", "optimizer"} & set(gpu.phases[phase])
        assert gpu.phases[phase]["weights"] == state.weights
    # gradients are zero before every update, so nothing is kept of them
    assert gpu.host["optimizer while generating"] == state.optimizer
    assert gpu.host["vLLM weights while saving"] == engine_of(request()).weights


def test_the_engine_is_awake_when_it_must_be():
    gpu, engine = trainer_gpu(request(), LAYOUT, 0), engine_of(request())
    assert gpu.phases["generate"]["KV cache"] == 40 * GIB
    for phase in PHASES:
        awake = phase in ("generate", "push")
        assert gpu.phases[phase].get("vLLM weights", 0) == (engine.weights if awake else 0)
        assert ("KV cache" in gpu.phases[phase]) == (phase == "generate")


def test_the_last_push_is_checked_while_the_engine_is_awake():
    last = trainer_gpu(request(), LAYOUT, 3).phases
    for part in ("workspace", "output layer"):
        assert last["generate"][part] == last["score"][part] > 0


def test_where_vllm_computes_the_entropies_nothing_is_scored():
    without = replace(request(), has_scoring=False)
    assert tuple(trainer_gpu(without, LAYOUT, 0).phases) == ("generate", "train", "push", "save")
    assert assess(without, LAYOUT).time.score == 0
    assert assess(without, LAYOUT).time.train == assess(request(), LAYOUT).time.train


def test_a_reference_policy_is_on_the_host_and_scores_once_more():
    plain, compared = request(), replace(request(), has_reference=True)
    (before, before_time), (rank, time) = (
        (trainer_gpu(one, LAYOUT, 0), assess(one, LAYOUT).time) for one in (plain, compared)
    )
    weights = 2 * stage_parameters(plain.shape, LAYOUT, 0, plain.vocab_multiple).num_elements
    assert rank.host == {**before.host, "reference policy": weights}
    assert rank.phases == before.phases  # the pieces that change places are smaller than a forward pass
    widest = 2 * max(
        stage_parameters(plain.shape, LAYOUT, stage, plain.vocab_multiple).num_elements for stage in range(4)
    )
    assert time.score == pytest.approx(2 * before_time.score + 4 * widest / 20e9)
    assert (time.train, time.push) == (before_time.train, before_time.push)
    alone = replace(compared, has_scoring=False)
    assert "score" in trainer_gpu(alone, LAYOUT, 0).phases
    assert assess(alone, LAYOUT).time.score == pytest.approx(before_time.score + 4 * widest / 20e9)
    kept = trainer_gpu(replace(compared, resets_reference=True), LAYOUT, 0).host
    assert kept["checkpoint staging"] == before.host["checkpoint staging"] + weights


def test_a_teacher_waits_on_the_host_and_is_on_the_gpu_for_its_pass():
    plain = request()
    shape = find_shape("Qwen/Qwen2.5-72B")
    taught = replace(plain, teacher=shape)
    (before, before_time), (rank, time) = (
        (trainer_gpu(one, LAYOUT, 0), assess(one, LAYOUT).time) for one in (plain, taught)
    )
    weights = 2 * stage_parameters(shape, LAYOUT, 0, plain.vocab_multiple).num_elements
    assert rank.host == {**before.host, "teacher": weights}
    assert rank.phases["score"]["teacher"] == weights
    assert rank.phases["score"]["workspace"] > before.phases["score"]["workspace"]  # it is wider
    assert {name: parts for name, parts in rank.phases.items() if name != "score"} == {
        name: parts for name, parts in before.phases.items() if name != "score"
    }
    as_student = assess(replace(plain, shape=shape), LAYOUT).time
    widest = 2 * max(stage_parameters(shape, LAYOUT, stage, plain.vocab_multiple).num_elements for stage in range(4))
    assert time.score == pytest.approx(before_time.score + as_student.score + widest / 20e9)
    assert (time.train, time.push) == (before_time.train, before_time.push)
    alone = replace(taught, has_scoring=False)
    assert assess(alone, LAYOUT).time.score == pytest.approx(as_student.score + widest / 20e9)


def test_the_base_of_adapters_teaches_at_no_memory():
    plain = replace(request(), adapter=AdapterConfig(rank=16))
    taught = replace(plain, teacher=plain.shape, teacher_is_base=True)
    before, rank = (trainer_gpu(one, LAYOUT, 0) for one in (plain, taught))
    assert (rank.phases, rank.host) == (before.phases, before.host)
    assert assess(taught, LAYOUT).time.score > assess(plain, LAYOUT).time.score


def test_layouts_that_a_teacher_cannot_have_are_left_out():
    plain = request()
    odd = replace(find_shape("Qwen/Qwen2.5-7B"), num_heads=28, num_query_groups=4, num_layers=28)
    every, _ = assess_all(plain)
    both, misses = assess_all(replace(plain, teacher=odd))
    assert any(one.layout.tensor == 8 for one in every)
    assert all(4 % one.layout.tensor == 0 for one in (*both, *misses))


def test_disaggregated_the_two_are_apart():
    apart = request(num_gpus=72, num_rollout_gpus=8)
    trainer, engine = trainer_gpu(apart, LAYOUT, 0), engine_gpu(apart, LAYOUT)
    assert tuple(trainer.phases) == ("score", "train", "push", "save")
    assert tuple(engine.phases) == ("generate", "push")
    parts = {part for phase in trainer.phases.values() for part in phase}
    assert not {"vLLM weights", "KV cache", "vLLM workspace"} & parts
    assert "gradients" in trainer.phases["score"]
    assert "gradients" in trainer.phases["push"]
    assert not {"optimizer while generating", "vLLM weights while saving"} & set(trainer.host)
    together = trainer_gpu(request(), LAYOUT, 0)
    assert sum(trainer.phases["train"].values()) < sum(together.phases["train"].values())


def test_earlier_stages_hold_more_activations_and_the_last_one_the_output_layer():
    kept = [train("activations", stage) for stage in range(4)]
    assert kept[0] > kept[1] > kept[2] > kept[3]
    assert kept[0] == pytest.approx(4 * 16 * (kept[2] - kept[1]) / -16, rel=0.01)
    assert [train("output layer", stage) > 0 for stage in range(4)] == [False, False, False, True]


def test_what_activations_depend_on():
    def of(**changes):
        return train("activations", layout=replace(LAYOUT, **changes))

    assert of(recompute="full") < of(recompute="selective") < of()
    assert of(context=2) == pytest.approx(of() / 2, rel=0.01)
    # one chunk in flight has half the layers; stage 0 of 4 holds 2 * 3 + 4 + 1 of them instead of 4 whole stages
    assert of(virtual=2) == pytest.approx(of() * 11 / 8, rel=0.01)
    assert train("activations", micro_batch_tokens=16384) == 2 * train("activations", micro_batch_tokens=8192)
    # a budget below the longest sequence does not make the sequence shorter
    assert train("activations", micro_batch_tokens=1024) == train("activations", micro_batch_tokens=6144)


def test_few_micro_batches_fill_a_pipeline_less():
    few = request()
    few = replace(few, batch=replace(few.batch, num_update_responses=4))  # of 6,144 tokens, over 2 replicas
    whole = trainer_gpu(request(), LAYOUT, 0).phases["train"]["activations"]
    assert trainer_gpu(few, LAYOUT, 0).phases["train"]["activations"] == pytest.approx(whole / 2, rel=0.01)


def test_full_recomputation_makes_one_layer_again():
    none, full = (replace(LAYOUT, recompute=recompute) for recompute in ("none", "full"))
    one_layer = train("activations", layout=none) / 4 / 16
    assert train("workspace", layout=full) - train("workspace", layout=none) == pytest.approx(one_layer, rel=0.01)


def test_fragmentation_is_a_share_of_what_comes_and_goes():
    small, large = (trainer_gpu(request(micro_batch_tokens=tokens), LAYOUT, 0) for tokens in (8192, 16384))
    parts = ("activations", "workspace", "output layer")
    grown = sum(large.phases["train"].get(part, 0) - small.phases["train"].get(part, 0) for part in parts)
    reserve = large.phases["train"]["reserve"] - small.phases["train"]["reserve"]
    assert reserve == pytest.approx(FRAGMENTATION * grown, abs=2)


def test_buckets_on_the_gpus_stay_and_buckets_on_the_host_are_the_node_s():
    network, memory = (
        replace(request(), transport=transport, bucket_bytes=256 << 20) for transport in ("relay", "shared_memory")
    )
    there, here = trainer_gpu(network, LAYOUT, 0), trainer_gpu(memory, LAYOUT, 0)
    for phase in PHASES:  # both sides of the push are on a colocated GPU, two buckets each
        more = there.phases[phase].get("push buffers", 0) - here.phases[phase].get("push buffers", 0)
        assert more == 4 * (256 << 20)
    assert here.host["push buffers"] == 2 * (256 << 20)
    assert "push buffers" not in there.host
    # the embedding in its full shape, which vLLM cuts its own part out of
    assert here.phases["push"]["push buffers"] > 152064 * 5120 * 2


@pytest.mark.parametrize(
    ("clusters", "num_ranks", "num_engines"),
    [
        ({}, 8, 0),
        ({"num_gpus": 72, "num_rollout_gpus": 8}, 8, 0),
        ({"num_gpus": 8, "num_rollout_gpus": 4}, 4, 4),
        ({"num_gpus": 8, "num_rollout_gpus": 4, "gpus_per_node": 16}, 4, 4),
    ],
)
def test_the_fullest_node_has_its_engines_and_its_object_store(clusters, num_ranks, num_engines):
    asked = replace(request(**clusters), object_store_bytes=16 * GIB)
    rank, engine = trainer_gpu(asked, LAYOUT, 0), engine_gpu(asked, LAYOUT)
    node = node_host(asked, rank)
    assert node["object store"] == 16 * GIB
    assert node["processes"] == num_ranks * rank.host["processes"] + num_engines * engine.host["processes"]
    assert node["checkpoint staging"] == num_ranks * rank.host["checkpoint staging"]
    assert "object store" not in node_host(replace(asked, object_store_bytes=0), rank)


def test_the_last_node_of_ranks_may_have_engines_too():
    asked = request(num_gpus=16, num_rollout_gpus=4)
    rank = trainer_gpu(asked, LAYOUT, 0)
    small = replace(rank, host={"processes": 1})
    assert node_host(asked, small)["processes"] == max(8, 4 + 4 * engine_gpu(asked, LAYOUT).host["processes"])


def test_a_gathered_optimizer_passes_through_gpu_and_host():
    plain = replace(LAYOUT, distributed_optimizer=False)
    assert "checkpoint staging" in trainer_gpu(request(), LAYOUT, 0).phases["save"]
    assert trainer_gpu(request(), plain, 0).phases["save"]["checkpoint staging"] == 0
    assert (
        trainer_gpu(request(), plain, 0).host["checkpoint staging"]
        < (trainer_gpu(request(), LAYOUT, 0).host["checkpoint staging"])
    )


EXPERTS = Layout(num_ranks=64, tensor=2, pipeline=2, sequence_parallel=True, expert=8)


def sparse(imbalance=1.5):
    return replace(request("Qwen/Qwen3-30B-A3B"), expert_imbalance=imbalance)


def test_a_busier_rank_holds_more():
    even, busy = (trainer_gpu(sparse(imbalance), EXPERTS, 0).phases["train"] for imbalance in (1.0, 2.0))
    for part in ("activations", "workspace"):
        assert busy[part] > even[part]
    assert busy["gradients"] == even["gradients"]
    alone = replace(EXPERTS, expert=1)
    assert trainer_gpu(sparse(2.0), alone, 0).phases == trainer_gpu(sparse(1.0), alone, 0).phases


def test_experts_are_saved_from_expert_data_ranks():
    """By hand: every tensor in float32, and the rank's shares of it; experts are on 4 ranks, the others on 16."""
    parameters = stage_parameters(sparse().shape, EXPERTS, 0, 128)
    experts, all_of_it = parameters.num_expert_elements, parameters.num_elements
    dense = all_of_it - experts
    staging = trainer_gpu(sparse(), EXPERTS, 0).host["checkpoint staging"]
    assert staging == 12 * all_of_it + 12 * dense // 16 + 12 * experts // 4 + 8 * all_of_it
    on_gpu = trainer_gpu(sparse(), EXPERTS, 0).phases["save"]["checkpoint staging"]
    assert on_gpu == int(4 * dense * (1 + 1 / 16) + 4 * experts * (1 + 1 / 4))


def test_a_push_holds_all_experts_of_a_layer():
    engine = engine_of(sparse())
    buffers = trainer_gpu(sparse(), EXPERTS, 0).phases["push"]["push buffers"]
    assert buffers >= engine.layer_experts + engine.layer
    shared = replace(sparse(), engine=replace(sparse().engine, expert_parallel=True))
    assert trainer_gpu(shared, EXPERTS, 0).phases["push"]["push buffers"] < buffers


def test_dense_layers_between_are_where_they_are():
    glm = replace(request("zai-org/GLM-4.5", engine_tensor=8))
    layout = Layout(num_ranks=64, tensor=8, pipeline=4, sequence_parallel=True, expert=16)
    first, second = (trainer_gpu(glm, layout, stage).phases["train"] for stage in (0, 1))
    assert first["weights"] < second["weights"]  # three of its layers have no experts
    assert assess(glm, layout).worst.peak == max(trainer_gpu(glm, layout, stage).peak for stage in range(4))
