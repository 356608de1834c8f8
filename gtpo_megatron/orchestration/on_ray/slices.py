"""Sampling in calls so short that a push gets in between two of them, while the requests stay inside the engines.

An engine's process does one call after the other. A push that is asked for while the engine samples therefore waits for
one slice, not for the responses, and no second thread ever touches vLLM.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from gtpo_megatron.config.rollout import SamplingConfig
from gtpo_megatron.orchestration.on_ray.collect import collect_next, collect_survivors
from gtpo_megatron.orchestration.on_ray.rollouts import received
from gtpo_megatron.rollout.requests import SampleRequest

SLICE_S = 0.25
"""Seconds of sampling in one call: what a push waits at most, but for vLLM's last step. A call itself costs some
milliseconds."""


def sample_in_slices(
    processes: Mapping[str, Any],
    shares: Mapping[str, Sequence[SampleRequest]],
    sampling: SamplingConfig,
    seed: int,
    *,
    priority: int,
    deadline_s: float,
) -> tuple[dict[str, tuple[list[Any], Any]], frozenset[str]]:
    """Samples on several engines at once; each goes on whatever the others do.

    Args:
        processes: remote ``EngineProcess`` objects, by name.
        shares: requests of each.
        sampling: the distribution.
        seed: of the run.
        priority: of the requests among others that are in flight; the lowest number comes first.
        deadline_s: longest time for one call.

    Returns:
        By name the references of the pieces and their summary, and the names of the engines that died.

    Raises:
        WorkerError: an engine raised, or has not answered in time.
        GTPOError: of the type that an engine raised on purpose.
    """
    begun = {name: process.begin.remote(shares[name], sampling, seed, priority) for name, process in processes.items()}
    tickets, dead = collect_survivors(begun, stage="rollout", deadline_s=deadline_s)

    def slice_of(name: str) -> Any:
        return processes[name].advance.options(num_returns="streaming").remote(tickets[name], SLICE_S)

    under_way = {name: slice_of(name) for name in tickets}
    whole: dict[str, tuple[list[Any], Any]] = {}
    while under_way:
        ended, died = collect_next(
            {name: stream.completed() for name, stream in under_way.items()}, stage="rollout", deadline_s=deadline_s
        )
        dead |= died
        for name in died:
            del under_way[name]
        for name in ended:
            pieces, summary = received(under_way.pop(name))
            if summary is None:
                under_way[name] = slice_of(name)
            else:
                whole[name] = (pieces, summary)
    return whole, dead
