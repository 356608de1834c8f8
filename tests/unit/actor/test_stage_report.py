"""Rates of ranks merge into those of the whole trainer."""

import dataclasses
from pathlib import Path

import pytest
import torch

from gtpo_megatron.actor import stage_report
from gtpo_megatron.actor.model.flops import _weights, forward_flops
from gtpo_megatron.actor.stage_report import StageReport
from gtpo_megatron.batch import RolloutBatch, mask_of_lengths
from gtpo_megatron.config.output import ProfileConfig
from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.data.packing import PackLayout, pack
from gtpo_megatron.distributed.groups import RankCoordinates
from gtpo_megatron.observability.metrics import Sum, to_scalars
from gtpo_megatron.observability.profiling import StepProfiler
from gtpo_megatron.observability.timers import StageTimers
from gtpo_megatron.orchestration.stages.trainer import merge_reports
from gtpo_megatron.weights.config_json import read_architecture
from recipes import tiny_cpu

LENGTHS = [(3, 9), (7, 4), (2, 12), (5, 1)]
ROWS = {0: [0, 3], 1: [1, 2]}
SECONDS = {"score": 2.0, "prepare": 1.0, "forward_backward": 5.0, "optimizer": 2.0}
"""By the clock of the test; the second replica takes twice as long."""


@pytest.fixture
def config():
    base = tiny_cpu.gtpo()
    return dataclasses.replace(
        base,
        parallel=ParallelConfig(num_ranks=4, pipeline_parallel_size=2),
        logging=dataclasses.replace(base.logging, peak_tflops_per_rank=1e-6),
    )


def batch():
    prompts, responses = zip(*LENGTHS, strict=True)
    return RolloutBatch(
        prompt_ids=torch.zeros(4, 7, dtype=torch.int64),
        prompt_lengths=torch.tensor(prompts),
        response_ids=torch.zeros(4, 12, dtype=torch.int64),
        response_lengths=torch.tensor(responses),
        loss_mask=mask_of_lengths(torch.tensor(responses), 12),
        rollout_logprobs=torch.zeros(4, 12),
        group_ids=torch.zeros(4, dtype=torch.int64),
        truncated=torch.zeros(4, dtype=torch.bool),
        policy_version=0,
    )


def rank_report(config, arch, place, monkeypatch):
    """Two updates after a score on one rank, whose clock only moves inside stages."""
    now = [0.0]
    monkeypatch.setattr(stage_report, "StageTimers", lambda: StageTimers(clock=lambda: now[0]))
    report = StageReport(arch, config, StepProfiler(ProfileConfig(), rank=0, run_folder=None))

    def spend(name):
        with report.stage(name):
            now[0] += SECONDS[name] * (1 + place.data_index)

    spend("score")
    report.add_work("score", batch(), ROWS[place.data_index], [], with_backward=False)
    metrics = report.take()
    for row in ROWS[place.data_index]:
        for name in ("prepare", "forward_backward", "optimizer"):
            spend(name)
        report.add_work("update", batch(), [row], [], with_backward=True)
    return metrics | report.take()


def test_rates_of_four_ranks(config, monkeypatch):
    arch = read_architecture(Path(config.model.path))
    places = [
        RankCoordinates(
            global_rank=rank,
            tensor_index=0,
            pipeline_index=rank // 2,
            context_index=0,
            data_index=rank % 2,
            pipeline_size=2,
        )
        for rank in range(4)
    ]
    reports = [rank_report(config, arch, place, monkeypatch) for place in places]
    # what only some ranks may say stays theirs
    reports = [report | {"policy/loss": Sum(1.0)} for report in reports]
    found = to_scalars(merge_reports(reports, places))
    assert found["policy/loss"] == 2.0  # the last stage of both replicas
    assert found["timing/actor_score_s"] == 4.0  # the slowest rank
    assert found["timing/actor_forward_backward_s"] == 20.0
    tokens = sum(map(sum, LENGTHS))
    # replicas took 2 and 4 seconds: 3 on average
    assert found["throughput/score_tokens_per_s"] == pytest.approx(tokens / 3)
    assert found["throughput/update_tokens_per_s"] == pytest.approx(tokens / 24)
    flops = forward_flops(arch, LENGTHS) / 1e12
    assert found["throughput/score_tflops_per_rank"] == pytest.approx(flops / 4 / 3)
    assert found["throughput/update_tflops_per_rank"] == pytest.approx(3 * flops / 4 / 24)
    assert found["throughput/update_mfu_frac"] == pytest.approx(3 * flops / 4 / 24 / 1e-6)


def test_a_shared_prompt_is_work_once(config, monkeypatch):
    """Tokens are those of both sequences."""
    arch = read_architecture(Path(config.model.path))
    now = [0.0]
    monkeypatch.setattr(stage_report, "StageTimers", lambda: StageTimers(clock=lambda: now[0]))
    report = StageReport(arch, config, StepProfiler(ProfileConfig(), rank=0, run_folder=None))
    prompts = torch.full((4,), 7)
    rollouts = dataclasses.replace(batch(), prompt_lengths=prompts)
    responses = rollouts.response_lengths[:2].tolist()
    packed = pack(rollouts, [0, 1], layout=PackLayout(min_prefix_tokens=7))
    assert packed.prefixes == ((), ((0, 7),))
    for part, stage, with_backward in (("score", "score", False), ("update", "forward_backward", True)):
        with report.stage(stage):
            now[0] += 2.0
        report.add_work(part, rollouts, [0, 1], [packed], with_backward=with_backward)
    found = to_scalars(report.take())
    spared = 2.0 * _weights(arch) * 7 + 2.0 * (arch.query_width + arch.output_width) * arch.num_layers * 28
    flops = forward_flops(arch, [(7, length) for length in responses]) - spared
    replica = config.parallel.replica_size
    assert found["throughput/score_tflops_per_rank"] == pytest.approx(flops / 1e12 / replica / 2)
    assert found["throughput/update_tflops_per_rank"] == pytest.approx(3 * flops / 1e12 / replica / 2)
    tokens = (14 + sum(responses)) * config.parallel.data_parallel_size
    assert found["throughput/score_tokens_per_s"] == pytest.approx(tokens / 2)


def test_without_a_peak_there_is_no_mfu(config, monkeypatch):
    arch = read_architecture(Path(config.model.path))
    quiet = dataclasses.replace(config, logging=dataclasses.replace(config.logging, peak_tflops_per_rank=0.0))
    place = RankCoordinates(
        global_rank=0, tensor_index=0, pipeline_index=0, context_index=0, data_index=0, pipeline_size=1
    )
    found = rank_report(quiet, arch, place, monkeypatch)
    assert "throughput/score_tflops_per_rank" in found
    assert not [name for name in found if "mfu" in name]
