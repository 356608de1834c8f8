"""Questions to ranks that have started. The driver may import this: Megatron is imported where they are answered."""

from dataclasses import asdict
from typing import Any

from gtpo_megatron.config.parallel import ParallelConfig


def measure_collectives(actor: object, parallel: ParallelConfig, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """See ``collectives.py``; all ranks at once."""
    from gtpo_megatron.companions.preflight.probes import collectives

    return [asdict(result) for result in collectives.measure_collectives(actor, parallel, sizes)]


def answers(_held: object) -> bool:
    """Whether a process can be asked at all."""
    return True
