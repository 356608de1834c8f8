"""The size of an engine's key-value cache on a CPU, where no number is given.

vLLM takes what it is told, at once. On a GPU that is memory which nobody else would use; a CPU's is shared with the
trainer, with other engines and with whatever else runs there.
"""

import logging
from typing import Literal

from gtpo_megatron.config.model import ELEMENT_BYTES
from gtpo_megatron.config.rollout import RolloutConfig
from gtpo_megatron.machine_memory import memory
from gtpo_megatron.weights.architecture import Architecture

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 32
"""Of the cache on a CPU, whose kernels want multiples of it. vLLM itself would take 128, so that nobody would share a
prompt of 100 tokens, and each response would have the rest of its last block for nothing."""

LATENT_BLOCK_TOKENS = 128
"""The largest that vLLM 0.32 chooses for multi-latent attention on a CPU: with AMX; else 16."""

STATE_DTYPE: Literal["float32"] = "float32"
"""Of a delta net's matrices in vLLM, as in the trainer. vLLM itself would round them to the model's dtype after every
token; where little is forgotten, log-probs were then a third farther from the trainer's."""

LEAST_MIB = 16
"""A smaller cache saves nothing beside an engine of a gigabyte."""

FREE_SHARE = 0.25
"""Of the memory that is free when an engine starts, for the caches of all engines: ranks, graders, a push and whoever
else is on the machine need some too. A smaller cache is slower, never wrong: vLLM decodes fewer sequences together."""

_MIB = 1 << 20


def cache_bytes_per_token(architecture: Architecture, *, workers: int, dtype: str) -> int:
    """Bytes of a token's keys and values in one worker."""
    return architecture.cached_elements(workers) * ELEMENT_BYTES[dtype]


def fillable_cache_mib(rollout: RolloutConfig, architecture: Architecture, sequences: int, max_tokens: int) -> int:
    """MiB in one worker that so many sequences of full length fill, in whole blocks."""
    workers, dtype = rollout.tensor_parallel_size, rollout.activation_dtype
    unit = BLOCK_TOKENS if architecture.latents is None else LATENT_BLOCK_TOKENS
    block = architecture.cache_block(workers, unit, state_width=ELEMENT_BYTES[STATE_DTYPE] // ELEMENT_BYTES[dtype])
    tokens = sequences * (-(-max_tokens // block) + architecture.state_blocks) * block
    per_token = cache_bytes_per_token(architecture, workers=workers, dtype=dtype)
    return max(LEAST_MIB, -(-tokens * per_token // _MIB))


def cpu_cache_mib(rollout: RolloutConfig, architecture: Architecture, *, max_tokens: int, free_bytes: int) -> int:
    """MiB of key-value cache in one worker on a CPU.

    As asked for (``kv_cache_mib``); else what ``max_concurrent_sequences`` of full length fill, but of the free memory
    no more than a share, and in any case enough for one sequence.

    Args:
        rollout: settings of the engines, all on this machine.
        architecture: architecture of the model.
        max_tokens: length of the longest prompt and response.
        free_bytes: free memory of this machine.
    """
    if rollout.kv_cache_mib is not None:
        return rollout.kv_cache_mib
    least = fillable_cache_mib(rollout, architecture, 1, max_tokens)
    most = fillable_cache_mib(rollout, architecture, rollout.max_concurrent_sequences, max_tokens)
    share = int(FREE_SHARE * free_bytes / (rollout.num_engines * rollout.ranks_per_engine)) // _MIB
    return max(least, min(most, share))


def log_cpu_cache(rollout: RolloutConfig, architecture: Architecture, *, max_tokens: int) -> int:
    """Like ``cpu_cache_mib``, by what is free now; says in one line what was chosen, and why."""
    _, free = memory()
    size = cpu_cache_mib(rollout, architecture, max_tokens=max_tokens, free_bytes=free)
    if rollout.kv_cache_mib is None:
        most = fillable_cache_mib(rollout, architecture, rollout.max_concurrent_sequences, max_tokens)
        why = "all that" if size == most else f"of the {most} MiB that"
        logger.info(
            "key-value cache: %d MiB, %s %d sequences of %d tokens can fill; %.1f GiB of memory are free; "
            "kv_cache_mib gives another size",
            size,
            why,
            rollout.max_concurrent_sequences,
            max_tokens,
            free / (1 << 30),
        )
    return size
