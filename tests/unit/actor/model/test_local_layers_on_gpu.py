"""The actor on a GPU without Transformer Engine and Apex: Megatron's local layers with the settings of a GPU.

One process without a GPU says that it has one; its answers are those of transformers all the same.
"""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gtpo_megatron.batch import RolloutShard
from gtpo_megatron.distributed import vocab_parallel
from gtpo_megatron.observability.metrics import merge, to_scalars
from tests.dist_utils import run_processes
from tests.distributed.tiny_world import dense_step, make_config, make_model, make_rewards, make_rollouts

pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]


def pretend_gpu():
    """For the rest of this process."""
    from gtpo_megatron.actor import cpu_platform

    with mock.patch.object(cpu_platform, "_rotate_by_tiles"):
        cpu_platform.install()
    vocab_parallel.KEPT_BYTES = 0
    cpu_platform.is_cpu = lambda: False
    cpu_platform.device = lambda: torch.device("cpu")
    torch.cuda.set_device = lambda _: None
    torch.cuda.device_count = lambda: 1
    start = dist.init_process_group
    dist.init_process_group = lambda _, **options: start("gloo", **options)


def updated(rank, world_size, init_method, config):
    from gtpo_megatron.actor import cpu_platform
    from gtpo_megatron.actor.actor import MegatronActor

    pretend_gpu()
    with mock.patch("importlib.util.find_spec", return_value=None):  # there is no Transformer Engine
        assert not cpu_platform.has_transformer_engine()
        actor = MegatronActor(config, global_rank=rank, init_method=init_method)
    built = actor._chunks[0].config
    scored = actor.score_tokens(RolloutShard.of(make_rollouts(), range(8)))
    scores = actor.batch
    actor.credit_tokens(make_rewards())
    metrics = to_scalars(merge([scored, actor.update(1)]))
    kinds = {type(module).__name__ for module in actor._chunks[0].modules()}
    actor.close()
    return scores.old_logprobs, metrics, kinds, built.deallocate_pipeline_outputs, built.apply_rope_fusion


def test_local_layers_with_a_gpu_s_settings_equal_transformers(tmp_path):
    model = make_model(tmp_path, tied=False)
    config = make_config(tmp_path, {"num_ranks": 1, "distributed_optimizer": True})
    [(logprobs, metrics, kinds, frees_outputs, fuses)] = run_processes(updated, 1, config)
    assert {"PackedSDPA", "ColumnParallelLinear"} <= kinds
    assert frees_outputs
    assert not fuses
    expected = dense_step(model, dataclasses.replace(config), make_rollouts(), make_rewards())
    mask = make_rollouts().response_mask
    torch.testing.assert_close(logprobs[mask], expected["logprobs"][mask], atol=2e-5, rtol=0)
    assert metrics["optimizer/grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
