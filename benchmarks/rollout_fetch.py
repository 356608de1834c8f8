"""What a rank fetches of the responses it works on, and how long it takes, by number of data-parallel replicas.

    python -m benchmarks.rollout_fetch --output rollout_fetch.json

Engines share the responses as a run deals them, so the samples of a group lie on several of them. Every replica then
takes its rows, in three ways: ``whole``, everything that was sampled, and its rows of that; ``groups``, only the
objects that have any of them, of which every engine leaves one a group; and ``chunks``, likewise, but neighbouring
groups of an engine are one object up to ``CHUNK_BYTES``, which is what a run does.

In one process, pickled batches in a list stand for the object store: bytes are those of what a replica reads, seconds
are its time on the CPU to unpickle and assemble. With Ray, engines and ranks are actors on this machine, and seconds
are on the wall, all ranks at once. The slowest replica counts; figures are medians over rounds.
"""

import json
import os
import pickle
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.data.sharding import shard_contiguous
from gtpo_megatron.orchestration.stages import rollouts
from gtpo_megatron.orchestration.stages.rollouts import (
    Chunk,
    RolloutHandle,
    handles_then_chunks,
    in_chunks,
    joined,
    received,
)
from gtpo_megatron.rollout.requests import SampleRequest, assign_to_engines

GROUP_SIZE = 16

CHUNK_BYTES = {"whole": rollouts.CHUNK_BYTES, "groups": 1, "chunks": rollouts.CHUNK_BYTES}
"""By way; a group is larger than 1."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The batch and who shares it.

    Attributes:
        responses: of a step.
        response_tokens: of every response.
        prompt_tokens: of every prompt.
        engines: that the responses lie on.
        replicas: numbers of data-parallel replicas.
        ray_replicas: those that are measured with Ray too.
        rounds: repetitions, after one that is thrown away.
        output: file to write; empty: standard output only.
    """

    responses: int = 2048
    response_tokens: int = 4096
    prompt_tokens: int = 256
    engines: int = 4
    replicas: tuple[int, ...] = (2, 4, 64)
    ray_replicas: tuple[int, ...] = (2, 4)
    rounds: int = 3
    output: str = ""


def make_batch(options: Options, rows: Sequence[int]) -> RolloutBatch:
    """The responses at some rows of the step."""
    num, width = len(rows), options.response_tokens
    generator = torch.Generator().manual_seed(0)
    return RolloutBatch(
        prompt_ids=torch.randint(1, 1000, (num, options.prompt_tokens), generator=generator),
        prompt_lengths=torch.full((num,), options.prompt_tokens),
        response_ids=torch.randint(1, 1000, (num, width), generator=generator),
        response_lengths=torch.full((num,), width),
        loss_mask=torch.ones(num, width, dtype=torch.bool),
        rollout_logprobs=torch.full((num, width), -0.5),
        group_ids=torch.tensor(rows) // GROUP_SIZE,
        truncated=torch.zeros(num, dtype=torch.bool),
        policy_version=0,
    )


def engine_shares(options: Options) -> list[list[int]]:
    """Rows of each engine."""
    prompt = (1,) * options.prompt_tokens
    requests = [
        SampleRequest(group_id=row // GROUP_SIZE, prompt_ids=prompt, sample=row % GROUP_SIZE)
        for row in range(options.responses)
    ]
    dealt = assign_to_engines(requests, max_response_tokens=options.response_tokens, loads=[0] * options.engines)
    return [[row for row, engine in enumerate(dealt) if engine == index] for index in range(options.engines)]


def in_order(handles: Sequence[RolloutHandle], options: Options) -> RolloutHandle:
    """As the driver sees what the engines answered."""
    order = torch.tensor([row for share in engine_shares(options) for row in share])
    return joined(handles).select(order.argsort().tolist())


def rows_of(handle: RolloutHandle, num_replicas: int) -> list[tuple[int, ...]]:
    """The responses of each replica, as the trainer shards them."""
    return shard_contiguous((handle.prompt_lengths + handle.response_lengths).tolist(), num_replicas)


def measure_in_process(options: Options, *, num_replicas: int, way: str) -> dict[str, float]:
    """Bytes and seconds of the slowest replica."""
    kept: list[bytes] = []
    whole = way == "whole"
    rollouts.CHUNK_BYTES = CHUNK_BYTES[way]

    def put(chunk: Chunk) -> int:
        kept.append(pickle.dumps(chunk, protocol=5))
        return len(kept) - 1

    def fetch(handle: RolloutHandle) -> RolloutBatch:
        return replace(handle, objects=tuple(pickle.loads(kept[number]) for number in handle.objects)).fetch()

    handle = in_order(
        [RolloutHandle.of_groups(make_batch(options, share), put=put) for share in engine_shares(options)], options
    )
    found: list[dict[str, float]] = []
    for rows in rows_of(handle, num_replicas)[: 1 if whole else num_replicas]:  # who fetches everything does the same
        start = time.process_time()
        mine = handle if whole else handle.select(rows)
        batch = fetch(mine)
        if whole:
            batch.select(rows)
        seconds = time.process_time() - start
        numbers = mine.objects
        found.append({"bytes": sum(len(kept[one]) for one in numbers), "cpu_s": seconds, "objects": len(numbers)})
    return {
        "mib_per_rank": max(one["bytes"] for one in found) / 2**20,
        "cpu_s_per_rank": max(one["cpu_s"] for one in found),
        "objects": len(kept),
        "objects_per_rank": max(one["objects"] for one in found),
    }


class Engine:
    """Leaves its responses in the object store."""

    def generate(self, options: Options, rows: Sequence[int], chunk_bytes: int) -> Any:
        """As ``EngineProcess.sample``."""
        rollouts.CHUNK_BYTES = chunk_bytes
        yield from handles_then_chunks(dict(enumerate(in_chunks(make_batch(options, rows)))))


class Rank:
    """Takes its rows."""

    def fetch(self, handle: RolloutHandle, rows: Sequence[int]) -> float:
        """Seconds that it took to fetch responses, and to choose some of them."""
        start = time.perf_counter()
        batch = handle.fetch()
        if len(rows) < batch.num_responses:
            batch.select(rows)
        return time.perf_counter() - start


def measure_with_ray(options: Options, *, num_replicas: int, way: str) -> dict[str, float]:
    """Seconds of the slowest rank, and until the driver has all references."""
    import ray

    engines = [ray.remote(Engine).options(num_cpus=0).remote() for _ in range(options.engines)]
    ranks = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(num_replicas)]
    found = []
    for _ in range(1 + options.rounds):
        start = time.perf_counter()
        streams = [
            engine.generate.options(num_returns="streaming").remote(options, share, CHUNK_BYTES[way])
            for engine, share in zip(engines, engine_shares(options), strict=True)
        ]
        ray.get([stream.completed() for stream in streams])
        handle = in_order([one for stream in streams for one in received(stream).values()], options)
        left_s = time.perf_counter() - start
        calls = [
            rank.fetch.remote(handle if way == "whole" else handle.select(rows), rows)
            for rank, rows in zip(ranks, rows_of(handle, num_replicas), strict=True)
        ]
        found.append({"fetch_s": max(ray.get(calls)), "make_and_put_s": left_s})
    for process in (*engines, *ranks):
        ray.kill(process)
    return {name: statistics.median(one[name] for one in found[1:]) for name in found[0]}


def median_of(options: Options, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Of every figure."""
    found = [measure() for _ in range(1 + options.rounds)][1:]
    return {name: statistics.median(one[name] for one in found) for name in found[0]}


def main() -> None:
    """Measures and prints."""
    options = tyro.cli(Options, description=__doc__)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for num in options.replicas:
        for way in CHUNK_BYTES:

            def once(num: int = num, way: str = way) -> dict[str, float]:
                return measure_in_process(options, num_replicas=num, way=way)

            rows.append({"replicas": num, "way": way, **median_of(options, once)})
            print(rows[-1], flush=True)
    with_ray = []
    if options.ray_replicas:
        import ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        for num in options.ray_replicas:
            for way in CHUNK_BYTES:
                figures = measure_with_ray(options, num_replicas=num, way=way)
                with_ray.append({"replicas": num, "way": way, **figures})
                print(with_ray[-1], flush=True)
        ray.shutdown()
    result = {
        "options": asdict(options),
        "load_average": os.getloadavg()[0],
        "in_process": rows,
        "ray": with_ray,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
