"""Models, batches and arms of ``benchmarks.peer_step``, and the recipe of its run on a GPU."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.config.rollout import WeightSyncConfig
from gtpo_megatron.config.run import RunConfig
from recipes import tiny_cpu

GROUP_SIZE = 8
MAX_PROMPT_TOKENS = 96
SETTLING_STEPS = 2
"""Steps of a run that are not counted: they compile, or fill caches."""

SizeName = Literal["large", "small", "smollm2", "tiny", "0.5b"]
Device = Literal["cpu", "cuda"]
DTypeName = Literal["float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """A model and the batch of a step.

    Attributes:
        config: of the Qwen2, over ``make_model``'s.
        responses: of a step.
        response_tokens: of each, at most; a random model ends one of ``vocab_size`` tokens earlier.
        micro_batch_tokens: that our trainer packs together.
        peer_batch: responses that TRL's trainer takes at once.
        ranks: data-parallel ones of ours; one, as in recipes/smollm2_cpu.py, has the gradients in memory once.
        engines: of ours on a CPU; two with a core each, so that one's scheduler, in Python, runs beside the other's
            products: of 1.0 million parameters it is two fifths of the time. Of 134.5 million each would read all
            weights at every token.
        cache_mib: keys and values of either side's engines.
        target: upper bound of our step over TRL's with the same dtype; None: nothing is asked for.
    """

    config: dict[str, Any]
    responses: int
    response_tokens: int = 96
    micro_batch_tokens: int = 8192
    peer_batch: int
    ranks: int = 1
    engines: int = 1
    cache_mib: int = 1024
    target: float | None = None


def _widths(vocab: int, hidden: int, ffn: int, layers: int) -> dict[str, Any]:
    return {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers}


SIZES: dict[SizeName, StepSize] = {
    "large": StepSize(config=_widths(16384, 384, 1024, 5), responses=64, peer_batch=64, ranks=2, engines=2, target=0.6),
    "small": StepSize(config=_widths(339, 128, 512, 4), responses=256, peer_batch=256, ranks=2, engines=2, target=0.7),
    "smollm2": StepSize(
        config=_widths(49152, 576, 1536, 30), responses=16, micro_batch_tokens=1024, peer_batch=16, target=0.7
    ),
    "tiny": StepSize(config=_widths(2048, 128, 256, 2), responses=16, response_tokens=16, peer_batch=8),
    "0.5b": StepSize(
        config=_widths(151936, 896, 4864, 24) | {"num_key_value_heads": 2, "rope_theta": 1e6},
        responses=128,
        response_tokens=256,
        peer_batch=32,
        cache_mib=8192,
    ),
}
"""14.1, 1.1, 134.5, 0.6 and 494.0 million parameters. At the last one both take some 9,000 tokens at a time."""

CPU_ARMS = ("ours", "ours_sampler_entropies", "trl", "trl_float32_engine", "trl_float32_engine_onednn")
BFLOAT16_ARMS = ("ours_bfloat16", "ours_bfloat16_sampler_entropies", "trl_autocast", "trl_bfloat16")
"""On a CPU that multiplies bfloat16. ``trl_autocast``: the peer's weights are float32, as those that our optimizer
keeps, its products and its engine bfloat16. ``trl_bfloat16``: the weights and Adam's moments, too."""
GPU_ARMS = ("ours", "trl", "trl_asleep", "trl_bfloat16", "ours_sampler_entropies")
"""``trl``: as it comes. ``trl_asleep``: its engine sleeps while it trains, as ours does. ``trl_bfloat16``: its weights
and Adam's moments are bfloat16; otherwise float32, with products in bfloat16."""


def in_float32() -> RunConfig:
    """The quickstart's recipe."""
    return tiny_cpu.gtpo()


def in_bfloat16() -> RunConfig:
    """The same, without its limits of the gap between sampler and trainer, which are float32's."""
    base = tiny_cpu.gtpo()
    return dataclasses.replace(
        base,
        model=dataclasses.replace(base.model, dtype="bfloat16"),
        rollout=dataclasses.replace(base.rollout, dtype="bfloat16"),
        weight_sync=WeightSyncConfig(),
    )


def on_one_gpu() -> RunConfig:
    """GTPO in bfloat16 with sampler and trainer on one GPU, in turns."""
    base = tiny_cpu.gtpo()
    return dataclasses.replace(
        base,
        name="peer_step_gtpo",
        model=dataclasses.replace(base.model, dtype="bfloat16", head_chunk_tokens=4096),
        optimizer=dataclasses.replace(base.optimizer, learning_rate=1e-6, warmup_updates=0),
        parallel=ParallelConfig(num_ranks=1, distributed_optimizer=True),
        rollout=dataclasses.replace(base.rollout, dtype="bfloat16", placement="colocated"),
        # a random model's answers are all wrong, and nothing would have a gradient
        reward=dataclasses.replace(base.reward, function="benchmarks.gpu_proof.rewards:by_chance"),
        weight_sync=WeightSyncConfig(),
        logging=dataclasses.replace(base.logging, tensorboard=False),
        cluster=dataclasses.replace(base.cluster, num_cpus=8, object_store_mib=1024, stage_deadline_s=300.0),
    )
