"""What a rank fetches of the responses it works on, and how long it takes, by number of data-parallel replicas.

    python -m benchmarks.rollout_fetch --output rollout_fetch.json

Engines share the responses as a run deals them, so the samples of a group lie on several of them. Every replica then
takes its rows, in two ways: ``whole``, every engine's whole batch, concatenated, put in order, and selected from (what
a rank did before there were pieces); and ``pieces``, only those that hold any of its rows.

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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor

from gtpo_megatron.batch import RolloutBatch
from gtpo_megatron.data.sharding import shard_contiguous
from gtpo_megatron.orchestration.on_ray.rollouts import PIECE_BYTES, RolloutParts, ShardParts, in_pieces, joined, shards
from gtpo_megatron.orchestration.stages.protocols import RolloutHandle, rollout_summary
from gtpo_megatron.rollout.requests import SampleRequest, assign_to_engines

GROUP_SIZE = 16


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
        piece_kib: sizes of a piece; the first is the one in use.
        rounds: repetitions, after one that is thrown away.
        output: file to write; empty: standard output only.
    """

    responses: int = 2048
    response_tokens: int = 4096
    prompt_tokens: int = 256
    engines: int = 4
    replicas: tuple[int, ...] = (2, 4, 64)
    ray_replicas: tuple[int, ...] = (2, 4)
    piece_kib: tuple[int, ...] = (PIECE_BYTES >> 10, 128, 256, 1024, 4096)
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


def handle_of(answers: Sequence[tuple[list[Any], dict[str, Any]]], options: Options) -> RolloutHandle:
    """As the driver sees what the engines answered."""
    place = {row: (e, there) for e, share in enumerate(engine_shares(options)) for there, row in enumerate(share)}
    return joined(answers, [place[row] for row in range(options.responses)])


def answer(batch: RolloutBatch, piece_bytes: int, put: Callable[[RolloutBatch], Any]) -> tuple[list[Any], Any]:
    """An engine's pieces in the store, and its summary."""
    pieces = list(in_pieces(batch, piece_bytes=piece_bytes))
    return [put(piece) for piece in pieces], rollout_summary(batch) | {"piece_sizes": [p.num_responses for p in pieces]}


def concatenated(batches: Sequence[RolloutBatch]) -> RolloutBatch:
    """All rows of all batches."""
    values: dict[str, Any] = {}
    for field in fields(RolloutBatch):
        parts = [getattr(batch, field.name) for batch in batches]
        if isinstance(parts[0], Tensor):
            width = max(part.shape[-1] for part in parts)
            values[field.name] = torch.cat([F.pad(p, (0, width - p.shape[1])) if p.ndim == 2 else p for p in parts])
        else:
            values[field.name] = parts[0]
    return RolloutBatch(**values)


def indexed(batch: RolloutBatch, rows: Sequence[int]) -> RolloutBatch:
    """Some rows of a batch."""
    index = torch.as_tensor(list(rows), dtype=torch.int64)
    columns = {field.name: getattr(batch, field.name) for field in fields(RolloutBatch)}
    chosen = {name: value[index] for name, value in columns.items() if isinstance(value, Tensor)}
    return replace(batch, **chosen)


def gather_whole(parts: RolloutParts, rows: Sequence[int], read: Callable[[Sequence[Any]], Any]) -> RolloutBatch:
    """Everything, then the replica's rows of it."""
    batches = read(parts.pieces)
    starts = [0]
    for batch in batches:
        starts.append(starts[-1] + batch.num_responses)
    in_order = indexed(concatenated(batches), [starts[piece] + row for piece, row in parts.rows])
    return indexed(in_order, rows)


class CountingStore:
    """Pickled batches; counts the bytes that are read."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []
        self.num_bytes = 0

    def put(self, batch: RolloutBatch) -> int:
        """Its reference."""
        self.kept.append(pickle.dumps(batch, protocol=5))
        return len(self.kept) - 1

    def read(self, references: Sequence[int]) -> list[RolloutBatch]:
        """What references stand for."""
        self.num_bytes += sum(len(self.kept[reference]) for reference in references)
        return [pickle.loads(self.kept[reference]) for reference in references]


def measure_in_process(options: Options, piece_bytes: int, *, num_replicas: int, whole: bool) -> dict[str, float]:
    """Bytes and seconds of the slowest replica."""
    store = CountingStore()
    size = 1 << 62 if whole else piece_bytes  # an engine's whole batch was one object
    answers = [answer(make_batch(options, share), size, store.put) for share in engine_shares(options)]
    handle = handle_of(answers, options)
    lengths = (handle.prompt_lengths + handle.response_lengths).tolist()
    dealt = shard_contiguous(lengths, num_replicas)
    # replicas that gather everything all do the same
    chosen = range(1 if whole else num_replicas)
    found: list[dict[str, float]] = []
    for shard in [shards(handle, num_replicas)[replica] for replica in chosen]:
        store.num_bytes, start = 0, time.process_time()
        if whole:
            gather_whole(handle.payload, dealt[0], store.read)
        else:
            shard.gather(store.read)
        found.append({"bytes": store.num_bytes, "cpu_s": time.process_time() - start})
    return {
        "mib_per_rank": max(one["bytes"] for one in found) / 2**20,
        "cpu_s_per_rank": max(one["cpu_s"] for one in found),
        "pieces": len(store.kept),
        "pieces_per_rank": len(store.kept) if whole else max(len(s.parts.pieces) for s in shards(handle, num_replicas)),
    }


class Engine:
    """Leaves its responses in the object store."""

    def generate(self, options: Options, rows: Sequence[int], piece_bytes: int) -> Any:
        """As ``EngineProcess.generate``."""
        references, summary = answer(make_batch(options, rows), piece_bytes, lambda piece: piece)
        yield summary
        for reference in references:  # noqa: UP028 - Ray sends to the generator, and a list's iterator takes nothing
            yield reference


class Rank:
    """Takes its rows."""

    def fetch(self, parts: RolloutParts | ShardParts, rows: Sequence[int]) -> float:
        """Seconds that it took."""
        start = time.perf_counter()
        if isinstance(parts, ShardParts):
            parts.gather()
        else:
            import ray

            gather_whole(parts, rows, lambda references: ray.get(list(references)))
        return time.perf_counter() - start


def measure_with_ray(options: Options, piece_bytes: int, *, num_replicas: int, whole: bool) -> dict[str, float]:
    """Seconds of the slowest rank, and until the driver has the references of all pieces."""
    import ray

    from gtpo_megatron.orchestration.on_ray.rollouts import received

    engines = [ray.remote(Engine).options(num_cpus=0).remote() for _ in range(options.engines)]
    ranks = [ray.remote(Rank).options(num_cpus=0).remote() for _ in range(num_replicas)]
    size = 1 << 62 if whole else piece_bytes
    found = []
    for _ in range(1 + options.rounds):
        start = time.perf_counter()
        streams = [
            engine.generate.options(num_returns="streaming").remote(options, share, size)
            for engine, share in zip(engines, engine_shares(options), strict=True)
        ]
        ray.get([stream.completed() for stream in streams])
        handle = handle_of([received(stream) for stream in streams], options)
        left_s = time.perf_counter() - start
        dealt = shards(handle, num_replicas)
        calls = [
            rank.fetch.remote(handle.payload if whole else shard, shard.rows)
            for rank, shard in zip(ranks, dealt, strict=True)
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
    size = options.piece_kib[0] << 10
    rows: list[dict[str, Any]] = []
    for num in options.replicas:
        for whole in (True, False):

            def once(num: int = num, whole: bool = whole) -> dict[str, float]:
                return measure_in_process(options, size, num_replicas=num, whole=whole)

            rows.append({"replicas": num, "way": "whole" if whole else "pieces", **median_of(options, once)})
            print(rows[-1], flush=True)
    sizes = []
    for kib in options.piece_kib:
        figures = measure_in_process(options, kib << 10, num_replicas=max(options.replicas), whole=False)
        sizes.append({"piece_kib": kib, "replicas": max(options.replicas), **figures})
        print(sizes[-1], flush=True)
    with_ray = []
    if options.ray_replicas:
        import ray

        ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        for num in options.ray_replicas:
            for whole in (True, False):
                figures = measure_with_ray(options, size, num_replicas=num, whole=whole)
                with_ray.append({"replicas": num, "way": "whole" if whole else "pieces", **figures})
                print(with_ray[-1], flush=True)
        ray.shutdown()
    result = {
        "options": asdict(options),
        "load_average": os.getloadavg()[0],
        "in_process": rows,
        "piece_sizes": sizes,
        "ray": with_ray,
    }
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
