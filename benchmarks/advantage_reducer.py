"""The reducer beside gathering all entropies on one rank, running the same credit there and scattering back.

    python -m benchmarks.advantage_reducer

Gloo ranks on this machine's cores, one thread each. A round runs both ways for every dealing; a speed-up is the median
over rounds of the quotient within a round, in wall time between barriers. On fewer cores than ranks, or beside other
programs, the quotient of the busiest rank's CPU times says what a core for each rank would give. Bytes are what one
rank sends: ``2 (k - 1) / k`` times 8 bytes a position and side of each group for ``k`` ranks, of maxima and of sums.

The driver's part of the credit stage (dealing, the groups that can teach, messages to and from the ranks) is timed too,
for responses of 64 to 4,096 tokens: it sees a few numbers a response, so neither seconds nor bytes may grow with them.
"""

import datetime
import json
import multiprocessing
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist  # noqa: TID251 - a benchmark of collectives
import tyro
from torch import Tensor

from benchmarks.credit_worker import make_batch
from gtpo_megatron.algorithms import assign_credit, informative_groups
from gtpo_megatron.batch import RewardBatch
from gtpo_megatron.config.algorithm import GTPOConfig
from gtpo_megatron.data.sharding import shard_contiguous
from gtpo_megatron.distributed.advantage_reducer import ProcessGroupReduction
from gtpo_megatron.observability.metrics import Max, merge
from gtpo_megatron.orchestration.stages.rollouts import RolloutHandle
from gtpo_megatron.orchestration.stages.trainer import Metrics

Batch = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The batch, the ranks and the number of rounds.

    Attributes:
        ranks: gloo processes.
        groups: prompt groups.
        group_size: responses a group.
        max_tokens: padded length; response lengths are uniform in [1, max_tokens].
        rounds: repetitions.
        json: file to write.
    """

    ranks: int = 3
    groups: int = 512
    group_size: int = 16
    max_tokens: int = 4096
    rounds: int = 5
    json: str = "benchmarks/results/advantage_reducer.json"


def dealings(options: Options, lengths: Tensor) -> dict[str, list[list[int]]]:
    """Rows of each rank: neighbours by token count, and every group split over all ranks."""
    every = list(range(len(lengths)))
    return {
        "contiguous": [list(rows) for rows in shard_contiguous(lengths.tolist(), options.ranks)],
        "every_group_split": [every[rank :: options.ranks] for rank in range(options.ranks)],
    }


def gather_and_scatter(mine: Batch, sizes: list[int], rank: int) -> tuple[Tensor, Tensor]:
    """Rank 0 computes for all. Gloo wants equal shapes, so rows are padded to the largest rank's."""
    most = max(sizes)

    def padded(values: Tensor) -> Tensor:
        full = values.new_zeros(most, *values.shape[1:])
        full[: len(values)] = values
        return full

    lengths = mine["response_mask"].sum(1)
    facts = torch.stack((mine["rewards"].double(), lengths.double(), mine["group_ids"].double()), dim=1)
    gathered = []
    for values in (padded(mine["token_entropy"]), padded(facts)):
        parts = [torch.empty_like(values) for _ in sizes] if rank == 0 else None
        dist.gather(values, parts, dst=0)
        gathered.append(parts)
    out = torch.empty(2, most, mine["token_entropy"].shape[1])
    back = None
    if rank == 0:
        entropy, table = (torch.cat([p[:n] for p, n in zip(parts or [], sizes, strict=True)]) for parts in gathered)
        credit = assign_credit(
            GTPOConfig(),
            rewards=table[:, 0],
            token_entropy=entropy,
            response_mask=torch.arange(entropy.shape[1]) < table[:, 1:2],
            group_ids=table[:, 2].long(),
        )
        split = zip(credit.shaped_rewards.split(sizes), credit.advantages.split(sizes), strict=True)
        back = [torch.stack((padded(shaped), padded(advantages))) for shaped, advantages in split]
    dist.scatter(out, back, src=0)
    return out[0, : sizes[rank]], out[1, : sizes[rank]]


def between_barriers(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall time until the last rank is done, and this rank's own CPU time."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    result = function()
    cpu = time.process_time() - cpu_start
    dist.barrier()
    return time.perf_counter() - start, cpu, result


def _rank_main(rank: int, options: Options, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=options.ranks,
        timeout=datetime.timedelta(minutes=10),
    )
    batch = make_batch(options.groups, options.group_size, options.max_tokens)
    lengths = batch["response_mask"].sum(1)
    shares = dealings(options, lengths)
    local = {name: {k: v[rows[rank]] for k, v in batch.items()} for name, rows in shares.items()}
    del batch
    records: dict[str, list[dict[str, float]]] = {name: [] for name in shares}
    sent: dict[str, dict[str, int]] = {}
    for _ in range(options.rounds + 1):
        for name, mine in local.items():
            reduction = ProcessGroupReduction(dist.group.WORLD)
            ours_s, ours_cpu_s, ours = between_barriers(
                lambda r=reduction, m=mine: assign_credit(GTPOConfig(), **m, reduction=r)
            )
            sizes = [len(rows) for rows in shares[name]]
            theirs_s, theirs_cpu_s, theirs = between_barriers(lambda m=mine, s=sizes: gather_and_scatter(m, s, rank))
            assert torch.equal(ours.shaped_rewards, theirs[0])
            assert torch.equal(ours.advantages, theirs[1])
            records[name].append(
                {
                    "reducer_s": ours_s,
                    "gather_s": theirs_s,
                    "speedup": theirs_s / ours_s,
                    "reducer_cpu_s": ours_cpu_s,
                    "gather_cpu_s": theirs_cpu_s,
                }
            )
            sent[name] = dict(reduction.sent_bytes)
    pipe.send({name: {"rounds": rows[1:], "sent": sent[name]} for name, rows in records.items()})
    dist.destroy_process_group()


def cpu_seconds(function: Callable[[], object]) -> float:
    """CPU time of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def driver_costs(options: Options) -> list[dict[str, float]]:
    """What the driver does for one credit stage, on batches that differ in the length of responses only.

    Payloads stay with the processes that use them; in their place stands what a Ray reference weighs.
    """
    num_responses = options.groups * options.group_size
    ids = torch.arange(options.groups).repeat_interleave(options.group_size)
    reference = bytes(28)
    costs = []
    for tokens in (64, 512, 4096):
        torch.manual_seed(0)
        rewards = RewardBatch(
            rewards=(torch.rand(num_responses) < 0.5).float(), failed=torch.zeros(num_responses, dtype=torch.bool)
        )
        lengths = torch.randint(1, tokens + 1, (num_responses,))
        handle = RolloutHandle(
            objects=(reference,),
            places=tuple((0, row) for row in range(num_responses)),
            prompt_lengths=torch.full((num_responses,), 100),
            response_lengths=lengths,
            own_lengths=lengths,
            sequence_tokens=lengths + 100,
            group_ids=ids,
            truncated=torch.zeros(num_responses, dtype=torch.bool),
            is_multi_version=torch.zeros(num_responses, dtype=torch.bool),
            policy_version=0,
            engines=torch.zeros(num_responses, dtype=torch.int64),
        )
        credit = assign_credit(
            GTPOConfig(),
            rewards=torch.tensor([1.0, 0.0]),
            token_entropy=torch.ones(2, 1),
            response_mask=torch.ones(2, 1, dtype=torch.bool),
            group_ids=torch.zeros(2, dtype=torch.int64),
        )
        report = {name: Max(value) for name, value in credit.metrics.items()}

        def stage(handle: RolloutHandle = handle, rewards: RewardBatch = rewards, report: Metrics = report) -> int:
            informative_groups(rewards.rewards, handle.group_ids)
            lengths = (handle.prompt_lengths + handle.response_lengths).tolist()
            rows = shard_contiguous(lengths, options.ranks)
            calls = [pickle.dumps((reference, rank_rows, rewards)) for rank_rows in rows]
            answers = [pickle.dumps((reference, report)) for _ in rows]
            merge(pickle.loads(answer)[1] for answer in answers)
            return max(len(call) + len(answer) for call, answer in zip(calls, answers, strict=True))

        size = stage()
        seconds = statistics.median(cpu_seconds(stage) for _ in range(5 * options.rounds))
        costs.append({"tokens_per_response": tokens, "cpu_ms": 1e3 * seconds, "message_bytes": size})
    return costs


def _listed(values: list[int]) -> str:
    return "/".join(f"{value:,}" for value in values)


def main() -> None:
    """Runs the benchmark and prints a table."""
    options = tyro.cli(Options, description=__doc__)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(options.ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(rank, options, f"{folder}/store", sender))
            process.start()
            pipes.append(receiver)
            processes.append(process)
        reports = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    result: dict[str, Any] = {"options": asdict(options), "results": {}}
    for name in reports[0]:
        rounds = reports[0][name]["rounds"]
        for number, one in enumerate(rounds):
            for key in ("reducer_cpu_s", "gather_cpu_s"):
                one[key] = max(report[name]["rounds"][number][key] for report in reports)
            one["cpu_speedup"] = one["gather_cpu_s"] / one["reducer_cpu_s"]
        medians = {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        sent = {kind: [report[name]["sent"][kind] for report in reports] for kind in reports[0][name]["sent"]}
        result["results"][name] = {**medians, "sent_bytes": sent}
        print(
            f"{name:18s} reducer {medians['reducer_s']:7.3f} s, gather and scatter {medians['gather_s']:7.3f} s, "
            f"speed-up {medians['speedup']:5.2f}, in CPU time {medians['cpu_speedup']:5.2f}; ranks send, in bytes: "
            f"{_listed(sent['all_reduce'])} of maxima and sums, {_listed(sent['all_gather'])} of the table"
        )
    result["driver"] = driver_costs(options)
    for cost in result["driver"]:
        print(
            f"driver, responses of {cost['tokens_per_response']:5d} tokens: {cost['cpu_ms']:7.2f} ms, "
            f"{cost['message_bytes']:,} bytes to and from each rank"
        )
    Path(options.json).parent.mkdir(parents=True, exist_ok=True)
    Path(options.json).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
