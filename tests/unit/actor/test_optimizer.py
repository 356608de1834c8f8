"""The learning rate over a run, and what an offloaded optimizer asks Megatron for."""

import dataclasses
import logging
import math
from types import SimpleNamespace

import pytest
import torch

from gtpo_megatron.config.optimizer import OptimizerConfig

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore"),  # Megatron warns of every optional kernel it lacks
]

PEAK, LEAST, WARMUP, UPDATES = 1e-2, 1e-3, 4, 20


def rates(schedule, warmup=WARMUP, *, updates=UPDATES, least=LEAST):
    from gtpo_megatron.actor.optimizer import build_schedule

    config = OptimizerConfig(
        learning_rate=PEAK,
        # a constant schedule has no end to decay to
        min_learning_rate=0.0 if schedule == "constant" else least,
        schedule=schedule,
        warmup_updates=warmup,
        weight_decay=0.1,
    )
    optimizer = SimpleNamespace(param_groups=[{"params": [], "lr": 0.0, "weight_decay": 0.1}])
    scheduler = build_schedule(config, optimizer, num_updates=updates)
    found = []
    for _ in range(updates):
        scheduler.step(1)
        found.append(optimizer.param_groups[0]["lr"])
        assert optimizer.param_groups[0]["weight_decay"] == 0.1
    return found


def decay(schedule, update):
    progress = (update - WARMUP) / (UPDATES + 1 - WARMUP)
    share = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[schedule]
    least = 0.0 if schedule == "constant" else LEAST
    return least + share * (PEAK - least)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_rate_rises_linearly_and_then_follows_its_schedule(schedule):
    expected = [PEAK * update / WARMUP for update in range(1, WARMUP + 1)]
    expected += [decay(schedule, update) for update in range(WARMUP + 1, UPDATES + 1)]
    assert rates(schedule) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("updates", [1, 2, 4, 500])
@pytest.mark.parametrize("warmup", [0, 1, 2, 4, 600])
def test_every_update_teaches_something(schedule, updates, warmup):
    """Also the last one, with a decay to 0: what is sampled for it costs as much as for any other."""
    found = rates(schedule, warmup, updates=updates, least=0.0)
    assert min(found) > PEAK / max(updates + 1, warmup) ** 2
    assert max(found) <= PEAK
    after = found[warmup:] if warmup else found
    assert after == sorted(after, reverse=True)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_decay_does_not_go_below_its_least_rate(schedule):
    found = rates(schedule, updates=500)
    assert LEAST < found[-1] < 1.03 * LEAST


def test_without_warm_up_the_first_update_has_the_full_rate():
    assert rates("constant", warmup=0) == [PEAK] * UPDATES


def test_a_warm_up_longer_than_the_run_is_cut_by_its_end():
    assert rates("linear", warmup=40) == pytest.approx([PEAK * update / 40 for update in range(1, UPDATES + 1)])


def test_offloading_without_a_gpu_says_that_it_changes_nothing(monkeypatch, caplog):
    from gtpo_megatron.actor import cpu_platform, optimizer

    config = OptimizerConfig(learning_rate=1e-6, offload_fraction=0.5)
    with caplog.at_level(logging.INFO, logger=optimizer.__name__):
        assert optimizer._offload(config) == {}
    assert "offload_fraction=0.5 changes nothing: there is no GPU" in caplog.text
    monkeypatch.setattr(cpu_platform, "is_cpu", lambda: False)
    found = optimizer._offload(config)
    assert found["optimizer_offload_fraction"] == 0.5
    assert found.keys() <= {field.name for field in dataclasses.fields(optimizer.MegatronOptimizerConfig)}


@pytest.mark.parametrize("is_cpu", [True, False])
@pytest.mark.parametrize("is_chained", [True, False])
def test_torch_s_adam_makes_one_pass_on_a_cpu_also_with_groups_of_an_older_state(monkeypatch, is_cpu, is_chained):
    from gtpo_megatron.actor import cpu_platform, optimizer
    from gtpo_megatron.actor.checkpoint import optimizer_state
    from gtpo_megatron.actor.checkpoint.optimizer_state import restore_optimizer

    monkeypatch.setattr(cpu_platform, "is_cpu", lambda: is_cpu)
    adam = torch.optim.AdamW([torch.ones(2, requires_grad=True)])
    older = adam.state_dict()
    given = SimpleNamespace(chained_optimizers=[adam], load_state_dict=adam.load_state_dict) if is_chained else adam
    optimizer.fuse_on_cpu(given)
    assert [group["fused"] for group in adam.param_groups] == [is_cpu or None]
    monkeypatch.setattr(optimizer_state, "_inner_optimizers", lambda _: [])
    restore_optimizer(given, older)
    assert [group["fused"] for group in adam.param_groups] == [is_cpu or None]
    adam.param_groups[0]["params"][0].grad = torch.ones(2)
    adam.step()
    torch.testing.assert_close(adam.param_groups[0]["params"][0].data, torch.full((2,), 1 - 1e-3 - 1e-5))
