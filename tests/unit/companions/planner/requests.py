"""Plan requests for tests, from the 32 B recipe."""

from dataclasses import replace

from gtpo_megatron.companions.planner.hardware import GIB, GPUS
from gtpo_megatron.companions.planner.request import Cluster, PlanRequest, request_from
from recipes.qwen2_5_32b import gtpo_64gpu


def cluster(num_gpus=64, gpu_memory=80.0, **changes) -> Cluster:
    return Cluster(gpu=GPUS["h100"], num_gpus=num_gpus, gpu_memory=gpu_memory * GIB, **changes)


def request(model="Qwen/Qwen2.5-32B", *, engine_tensor=4, micro_batch_tokens=8192, **clusters) -> PlanRequest:
    config = gtpo_64gpu()
    config = replace(
        config,
        model=replace(config.model, path=model),
        rollout=replace(config.rollout, num_engines=64 // engine_tensor, tensor_parallel_size=engine_tensor),
        update=replace(config.update, micro_batch_tokens=micro_batch_tokens),
    )
    return request_from(config, cluster(**clusters))
