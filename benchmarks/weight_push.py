"""Speed and bytes of a push: ours against a floor measured alongside, and the plan's bytes for large models.

    python -m benchmarks.weight_push --json result.json           # a 500 MB model, TP 2 -> TP 1 and TP 2 -> TP 2
    python -m benchmarks.weight_push --plan-only                  # bytes and predicted seconds of 32B and 72B

The floor is what no push through shared memory can do without: one copy of all weights into shared memory, then vLLM's
own reload of the same tensors from there. Ours has the trainer's ranks in processes of their own. Both alternate within
one run; the ratio is the median over rounds. Memory is the growth of each process's own pages over its state before.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from gtpo_megatron.weights.architecture import Architecture, read_architecture
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.push.link import WeightLink
from gtpo_megatron.weights.push.plan import PushLayout, SourceRank, TargetWorker, plan_push
from gtpo_megatron.weights.push.transports.shared_memory import SlotShape, create_slots, remove_name
from gtpo_megatron.weights.reshard import ShardPlace, hf_shapes, load_plan

MIB = 1 << 20
DEADLINE_S = 300.0
LINKS_GB_S = {"NVLink 4, 450 GB/s a GPU": 450.0, "InfiniBand NDR, 50 GB/s a GPU": 50.0}
LARGE = {  # public config.json values
    "Qwen2.5-32B": {"num_layers": 64, "hidden_size": 5120, "ffn_size": 27648, "num_heads": 40, "vocab_size": 152064},
    "Qwen2.5-72B": {"num_layers": 80, "hidden_size": 8192, "ffn_size": 29568, "num_heads": 64, "vocab_size": 152064},
}
PEERS = (  # published figures; see docs/rollouts.md
    "Qwen2.5-32B, 2 + 2 nodes of H100: 14.2 s over NCCL, 6.2 s as a delta (verl)",
    "Qwen3-32B, 16 + 16 H200: about 2 s (TRL)",
)


def layout_of(arch: Architecture, *, tp: int, pp: int, replicas: int, workers: int, bucket_mib: int) -> PushLayout:
    places = [
        ShardPlace(tensor_parallel=TensorParallel(tp, index), pipeline_size=pp, pipeline_stage=stage)
        for stage in range(pp)
        for index in range(tp)
    ]
    return PushLayout(
        sources=tuple(
            SourceRank(rank=replica * len(places) + i, place=place)
            for replica in range(replicas)
            for i, place in enumerate(places)
        ),
        targets=tuple(TargetWorker(worker=i, tensor_parallel=TensorParallel(workers, i)) for i in range(workers)),
        padded_vocab_size=-(-arch.vocab_size // tp) * tp,
        itemsize=2,
        bucket_bytes=bucket_mib * MIB,
    )


# ------------------------------------------------------------------------------------------------------ large models
def plan_rows() -> list[dict[str, Any]]:
    rows = []
    for name, sizes in LARGE.items():
        arch = Architecture(
            family="qwen2",
            num_query_groups=8,
            head_size=128,
            max_positions=32768,
            norm_eps=1e-6,
            rope_theta=1e6,
            tied_embeddings=False,
            qkv_bias=True,
            **sizes,
        )
        layout = layout_of(arch, tp=8, pp=4, replicas=2, workers=4, bucket_mib=512)
        start = time.perf_counter()
        streams = plan_push(arch, layout)
        seconds = time.perf_counter() - start
        moved = [sum(bucket.num_bytes for bucket in stream.buckets) for stream in streams]
        least = [sum(2 * box.num_elements for box in stream.kept.values()) for stream in streams]
        sent: dict[int, int] = {}
        for stream in streams:
            for bucket in stream.buckets:
                for rank, (_, num) in bucket.spans.items():
                    sent[rank] = sent.get(rank, 0) + num
        rows.append(
            {
                "model": name,
                "layout": "TP8 PP4 DP2 -> TP4",
                "moved_gb": sum(moved) / 1e9,
                "over_least": sum(moved) / sum(least),
                "largest_worker_gb": max(moved) / 1e9,
                "largest_rank_gb": max(sent.values()) / 1e9,
                "plan_s": seconds,
                "predicted_s": {link: max(moved) / 1e9 / speed for link, speed in LINKS_GB_S.items()},
            }
        )
    return rows


# ---------------------------------------------------------------------------------------------------- a 500 MB model
def make_folder(folder: Path, megabytes: int) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    hidden, ffn, layers = 1024, 2816, max(2, round(megabytes * 1e6 / 2 / (4 * 1024**2 * 0.75 + 3 * 1024 * 2816)))
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Path(__file__).resolve().parents[1] / "assets" / "tiny_qwen2"
    for path in tokenizer.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())


def shard_of(arch: Architecture, place: ShardPlace, padded: int) -> dict[str, Tensor]:
    """Parameters as a trainer rank holds them, with numbers in them."""
    extents: dict[str, tuple[int, int]] = {}
    for copy in load_plan(arch, place, padded):
        box, (rows, columns) = copy.megatron_box, extents.get(copy.megatron_name, (0, 0))
        extents[copy.megatron_name] = max(rows, box.row + box.num_rows), max(columns, box.column + box.num_columns)
    return {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in extents.items()}


def own_bytes() -> int:
    """Private pages of this process: shared memory and files do not count."""
    return sum(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith(("Private_Dirty", "Private_Clean"))
    )


def rank_main(link: WeightLink, rank: int, pipe: Any) -> None:
    torch.set_num_threads(1)
    source = next(s for s in link.layout.sources if s.rank == rank)
    parameters = shard_of(link.arch, source.place, link.layout.padded_vocab_size)
    sender = link.sender(rank)
    pipe.send("ready")
    while (with_checksums := pipe.recv()) is not None:
        before = own_bytes()
        sender.push(parameters, with_checksums=with_checksums)
        pipe.send(own_bytes() - before)


class Trainer:
    """Two ranks in processes of their own."""

    def __init__(self, link: WeightLink) -> None:
        context = multiprocessing.get_context("spawn")
        self.growth = 0
        self._pipes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            context.Process(target=rank_main, args=(link, rank, theirs), daemon=True).start()
            self._pipes.append(ours)

    def wait_until_ready(self) -> None:
        """Both have mapped the slots."""
        for pipe in self._pipes:
            pipe.recv()

    def start(self, *, with_checksums: bool) -> None:
        """Both begin to send."""
        for pipe in self._pipes:
            pipe.send(with_checksums)

    def finish(self) -> None:
        """Both have sent."""
        self.growth = max([self.growth, *(pipe.recv() for pipe in self._pipes)])

    def stop(self) -> None:
        """Ends both."""
        for pipe in self._pipes:
            pipe.send(None)


class Floor:
    """One copy into shared memory, then vLLM's own reload from there."""

    def __init__(self, arch: Architecture) -> None:
        self.tensors = {name: torch.randn(shape, dtype=torch.bfloat16) for name, shape in hf_shapes(arch).items()}
        self.slots = create_slots(
            SlotShape(
                slot_bytes=sum(-(-t.nbytes // 64) * 64 for t in self.tensors.values()) // 2 + 64,
                num_ranks=1,
                deadline_s=DEADLINE_S,
            )
        )

    def copy(self) -> float:
        """Seconds of the copy."""
        flat = torch.from_file(self.slots.path, shared=True, size=self.slots.shape.num_bytes, dtype=torch.uint8)
        start, offset = time.perf_counter(), self.slots.shape.header_bytes
        for tensor in self.tensors.values():
            flat[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            offset += -(-tensor.nbytes // 64) * 64
        return time.perf_counter() - start


def reload_from_shared_memory(worker: Any, path: str, num_bytes: int, first: int, shapes: dict[str, Any]) -> float:
    """Runs inside a vLLM worker: the reload that vLLM documents, of full tensors that lie in shared memory."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    flat = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    model = worker.model_runner.model

    def tensors() -> Any:
        offset = first
        for name, shape in shapes.items():
            size = 2 * torch.Size(shape).numel()
            yield name, flat[offset : offset + size].view(torch.bfloat16).view(shape)
            offset += -(-size // 64) * 64

    start = time.perf_counter()
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(tensors())
        finalize_layerwise_reload(model, worker.model_config)
    return time.perf_counter() - start


def measure(folder: Path, workers: int, rounds: int, bucket_mib: int) -> dict[str, Any]:
    """Run in a process of its own, since one process holds one vLLM."""
    from gtpo_megatron.rollout.environment import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    if workers > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % (os.cpu_count() or 1)) for i in range(workers))
    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    arch = read_architecture(folder)
    layout = layout_of(arch, tp=2, pp=1, replicas=1, workers=workers, bucket_mib=bucket_mib)
    slots = {
        worker: create_slots(SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=2, deadline_s=DEADLINE_S))
        for worker in range(workers)
    }
    link = WeightLink(arch=arch, layout=layout, dtype_name="bfloat16", endpoint=slots)
    trainer = Trainer(link)
    config = RolloutConfig(dtype="bfloat16", kv_cache_mib=64, tensor_parallel_size=workers)
    engine = VllmEngine(str(folder), config, max_sequence_tokens=128, seed=0)
    engine.connect_weights(link, range(workers))
    trainer.wait_until_ready()
    floor, shapes = Floor(arch), hf_shapes(arch)
    where = (floor.slots.path, floor.slots.shape.num_bytes, floor.slots.shape.header_bytes, shapes)
    seconds: dict[str, list[float]] = {"floor": [], "push": [], "push_with_checksums": []}
    for number in range(rounds + 1):
        times = {"floor": floor.copy() + max(engine._llm.collective_rpc(reload_from_shared_memory, args=where))}
        for kind in ("push", "push_with_checksums"):
            start = time.perf_counter()
            trainer.start(with_checksums=kind == "push_with_checksums")
            engine.receive_weights(number, with_checksums=kind == "push_with_checksums")
            trainer.finish()
            times[kind] = time.perf_counter() - start
        if number:  # the first round warms up
            for kind, value in times.items():
                seconds[kind].append(value)
    trainer.stop()
    for one in (floor.slots, *slots.values()):
        remove_name(one)
    streams = plan_push(arch, layout)
    moved = sum(bucket.num_bytes for stream in streams for bucket in stream.buckets)
    least = sum(2 * box.num_elements for stream in streams for box in stream.kept.values())
    return {
        "layout": f"TP2 -> TP{workers}",
        "model_mb": sum(2 * torch.Size(shape).numel() for shape in shapes.values()) / 1e6,
        "bucket_mib": bucket_mib,
        "seconds": {kind: statistics.median(values) for kind, values in seconds.items()},
        "floor_over_push": statistics.median(a / b for a, b in zip(seconds["floor"], seconds["push"], strict=True)),
        "over_least_bytes": moved / least,
        "rank_growth_mib": trainer.growth / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--bucket-mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--plan-only", action="store_true")
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        result = measure(Path(arguments.folder), arguments.workers, arguments.rounds, arguments.bucket_mib)
        print("RESULT " + json.dumps(result))
        return
    result = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "large": plan_rows(), "measured": []}
    if not arguments.plan_only:
        with tempfile.TemporaryDirectory() as name:
            make_folder(Path(name), arguments.megabytes)
            for workers in (1, 2):
                result["measured"].append(_in_a_process_of_its_own(name, workers, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print_tables(result)


def _in_a_process_of_its_own(folder: str, workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import subprocess

    command = [sys.executable, "-m", "benchmarks.weight_push", "--folder", folder, "--workers", str(workers)]
    command += ["--rounds", str(arguments.rounds), "--bucket-mib", str(arguments.bucket_mib)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    row: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return row


def print_tables(result: dict[str, Any]) -> None:
    for row in result["measured"]:
        seconds = row["seconds"]
        print(
            f"{row['layout']}  {row['model_mb']:.0f} MB  floor {seconds['floor']:.2f} s  push {seconds['push']:.2f} s  "
            f"with checksums {seconds['push_with_checksums']:.2f} s  floor/push {row['floor_over_push']:.2f}  "
            f"bytes over least {row['over_least_bytes']:.4f}  growth of a rank {row['rank_growth_mib']:.0f} MiB"
        )
    for row in result["large"]:
        predicted = ", ".join(f"{link}: {value:.2f} s" for link, value in row["predicted_s"].items())
        print(
            f"{row['model']} {row['layout']}  moved {row['moved_gb']:.1f} GB ({row['over_least']:.5f} of the least)  "
            f"largest worker {row['largest_worker_gb']:.1f} GB  largest rank {row['largest_rank_gb']:.2f} GB  plan "
            f"{row['plan_s']:.2f} s  {predicted}"
        )
    for line in PEERS:
        print(f"published: {line}")


if __name__ == "__main__":
    main()
