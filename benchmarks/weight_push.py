"""Speed and bytes of a push: ours against a floor measured alongside, and the plan's bytes for large models.

    python -m benchmarks.weight_push --json result.json           # 500 MB: dense to TP 1 and TP 2, experts to TP 1
    python -m benchmarks.weight_push --plan-only                  # bytes and predicted seconds of 30B to 235B

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
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from gtpo_megatron.config.parallel import ParallelConfig
from gtpo_megatron.weights.architecture import Architecture
from gtpo_megatron.weights.config_json import read_architecture
from gtpo_megatron.weights.experts import Experts
from gtpo_megatron.weights.param_mapping import TensorParallel
from gtpo_megatron.weights.push.ends import open_sender
from gtpo_megatron.weights.push.layout import PushLayout, SenderPolicy, SourceRank, TargetWorker, WorkerCoordinates
from gtpo_megatron.weights.push.link import SlotShape, WeightLink
from gtpo_megatron.weights.push.plan import PushPlan
from gtpo_megatron.weights.push.transports.shared_memory import create_slots, remove_name
from gtpo_megatron.weights.reshard import ShardCoordinates, hf_shapes, load_plan, shard_coordinates

MIB = 1 << 20
DEADLINE_S = 300.0
Kind = Literal["qwen2", "qwen3_moe"]
LINKS_GB_S = {"NVLink 4, 450 GB/s a GPU": 450.0, "InfiniBand NDR, 50 GB/s a GPU": 50.0}
_QWEN3 = {"vocab_size": 151936, "num_query_groups": 4, "qk_norm": True, "qkv_bias": False}
LARGE: dict[str, tuple[dict[str, Any], ParallelConfig, int, int]] = {
    "Qwen2.5-32B": (
        {"num_layers": 64, "hidden_size": 5120, "ffn_size": 27648, "num_heads": 40, "vocab_size": 152064},
        ParallelConfig(num_ranks=64, tensor_parallel_size=8, pipeline_parallel_size=4),
        1,
        4,
    ),
    "Qwen2.5-72B": (
        {"num_layers": 80, "hidden_size": 8192, "ffn_size": 29568, "num_heads": 64, "vocab_size": 152064},
        ParallelConfig(num_ranks=64, tensor_parallel_size=8, pipeline_parallel_size=4),
        1,
        4,
    ),
    "Qwen3-30B-A3B": (
        _QWEN3 | {"num_layers": 48, "hidden_size": 2048, "ffn_size": 6144, "num_heads": 32, "experts": (768, 48)},
        ParallelConfig(num_ranks=32, tensor_parallel_size=2, sequence_parallel=True, expert_parallel_size=8),
        8,
        4,
    ),
    "Qwen3-235B-A22B": (
        _QWEN3 | {"num_layers": 94, "hidden_size": 4096, "ffn_size": 12288, "num_heads": 64, "experts": (1536, 94)},
        ParallelConfig(
            num_ranks=128,
            tensor_parallel_size=4,
            sequence_parallel=True,
            pipeline_parallel_size=2,
            expert_parallel_size=16,
        ),
        16,
        8,
    ),
}
"""Public config.json values, of experts their width and the number of layers with 128 of them, 8 per token; the
trainer's ranks; engines, and workers of each."""
MEASURED: tuple[tuple[Kind, ParallelConfig, int], ...] = (
    ("qwen2", ParallelConfig(num_ranks=2, tensor_parallel_size=2), 1),
    ("qwen2", ParallelConfig(num_ranks=2, tensor_parallel_size=2), 2),
    ("qwen3_moe", ParallelConfig(num_ranks=2, expert_parallel_size=2), 1),
)
"""Model, the trainer's ranks, workers of the engine."""
PEERS = (  # published figures; see docs/rollouts.md
    "Qwen2.5-32B, 2 + 2 nodes of H100: 14.2 s over NCCL, 6.2 s as a delta (verl)",
    "Qwen3-32B, 16 + 16 H200: about 2 s (TRL)",
)


def layout_of(
    arch: Architecture,
    parallel: ParallelConfig,
    *,
    workers: int,
    engines: int = 1,
    bucket_mib: int,
    sender_policy: SenderPolicy = "same_host",
) -> PushLayout:
    tensor = parallel.tensor_parallel_size
    return PushLayout(
        sources=tuple(
            SourceRank(rank=rank, coordinates=shard_coordinates(parallel, rank)) for rank in range(parallel.num_ranks)
        ),
        targets=tuple(
            TargetWorker(worker=i, coordinates=WorkerCoordinates(TensorParallel(workers, i % workers)))
            for i in range(engines * workers)
        ),
        padded_vocab_size=-(-arch.vocab_size // tensor) * tensor,
        itemsize=2,
        bucket_bytes=bucket_mib * MIB,
        sender_policy=sender_policy,
    )


def layout_name(parallel: ParallelConfig, workers: int) -> str:
    """The usual short form."""
    sizes = {
        "TP": parallel.tensor_parallel_size,
        "PP": parallel.pipeline_parallel_size,
        "EP": parallel.expert_parallel_size,
        "DP": parallel.data_parallel_size,
    }
    return " ".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) + f" -> TP{workers}"


# ------------------------------------------------------------------------------------------------------ large models
def architecture_of(sizes: dict[str, Any]) -> Architecture:
    """A large model's."""
    common: dict[str, Any] = {
        "family": "qwen2",
        "num_query_groups": 8,
        "qkv_bias": True,
        "head_size": 128,
        "max_positions": 32768,
    }
    common |= {"norm_eps": 1e-6, "rope_theta": 1e6, "tied_embeddings": False}
    if "experts" not in sizes:
        return Architecture(**common | sizes)
    width, num_layers = sizes["experts"]
    experts = Experts(num_experts=128, experts_per_token=8, ffn_size=width, layers=(True,) * num_layers)
    return Architecture(**common | sizes | {"family": "qwen3_moe", "experts": experts})


def plan_rows() -> list[dict[str, Any]]:
    rows = []
    for name, (sizes, parallel, engines, workers) in LARGE.items():
        arch = architecture_of(sizes)
        layout = layout_of(arch, parallel, workers=workers, engines=engines, bucket_mib=512)
        plan = PushPlan(arch, layout)
        sent, moved, least, slices = dict.fromkeys(range(parallel.num_ranks), 0), [], [], 0
        for target in layout.targets:
            spans = [span for bucket in plan.spans(target.worker) for span in bucket.items()]
            for rank, (_, num) in spans:
                sent[rank] += num
            moved.append(sum(num for _, (_, num) in spans))
        for index in range(workers):  # the same for every engine
            stream = plan.stream(index)
            least += [sum(2 * box.num_elements for boxes in stream.kept.values() for box in boxes)] * engines
            slices += engines * sum(len(bucket.slices) for bucket in stream.buckets)
        rows.append(
            {
                "model": name,
                "layout": layout_name(parallel, workers),
                "engines": engines,
                "moved_gb": sum(moved) / 1e9,
                "over_least": sum(moved) / sum(least),
                "largest_worker_gb": max(moved) / 1e9,
                "largest_rank_gb": max(sent.values()) / 1e9,
                "smallest_rank_gb": min(sent.values()) / 1e9,
                "slices": slices,
                "predicted_s": {link: max(*moved, *sent.values()) / 1e9 / speed for link, speed in LINKS_GB_S.items()},
            }
        )
    return rows


# ---------------------------------------------------------------------------------------------------- a 500 MB model
def make_folder(folder: Path, kind: Kind, megabytes: int) -> None:
    """A random model; of a mixture of experts each layer has 32, of 256."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    mlp = 3 * 1024 * 2816 if kind == "qwen2" else 32 * 3 * 1024 * 256
    common = {
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": max(2, round(megabytes * 1e6 / 2 / (4 * 1024**2 * 0.75 + mlp))),
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }
    experts = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256, "norm_topk_prob": True}
    torch.manual_seed(0)
    if kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**common))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, head_dim=64))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Path(__file__).resolve().parents[1] / "recipes" / "assets" / "tiny_qwen2"
    for path in tokenizer.glob("*token*"):
        (folder / path.name).write_bytes(path.read_bytes())


def shard_of(arch: Architecture, coordinates: ShardCoordinates, padded: int) -> dict[str, Tensor]:
    """Parameters as a trainer rank holds them, with numbers in them."""
    extents: dict[str, tuple[int, int]] = {}
    for copy in load_plan(arch, coordinates, padded):
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
    parameters = shard_of(link.arch, source.coordinates, link.layout.padded_vocab_size)
    sender = open_sender(link, rank)
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

    from gtpo_megatron.rollout.weight_engine import _forget_expert_kernels

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
        _forget_expert_kernels(model)
        initialize_layerwise_reload(model)
        model.load_weights(tensors())
        finalize_layerwise_reload(model, worker.model_config)
    return time.perf_counter() - start


def measure(folder: Path, case: int, rounds: int, bucket_mib: int) -> dict[str, Any]:
    """Run in a process of its own, since one process holds one vLLM."""
    family, parallel, workers = MEASURED[case]
    from gtpo_megatron.rollout.engine_arguments import CPU_ENVIRONMENT, ENVIRONMENT

    os.environ.update(ENVIRONMENT | CPU_ENVIRONMENT | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"})
    if workers > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(i % (os.cpu_count() or 1)) for i in range(workers))
    from gtpo_megatron.config.rollout import RolloutConfig
    from gtpo_megatron.rollout.vllm_engine import VllmEngine

    arch = read_architecture(folder)
    layout = layout_of(arch, parallel, workers=workers, bucket_mib=bucket_mib)
    slots = {
        worker: create_slots(SlotShape(slot_bytes=layout.bucket_bytes, num_ranks=2, deadline_s=DEADLINE_S))
        for worker in range(workers)
    }
    link = WeightLink(arch=arch, layout=layout, dtype_name="bfloat16", endpoint=slots)
    trainer = Trainer(link)
    config = RolloutConfig(dtype="bfloat16", kv_cache_mib=64, tensor_parallel_size=workers)
    engine = VllmEngine(str(folder), config, max_sequence_tokens=128, seed=0)
    engine.weights.connect(link, range(workers))
    trainer.wait_until_ready()
    floor, shapes = Floor(arch), hf_shapes(arch)
    where = (floor.slots.path, floor.slots.shape.num_bytes, floor.slots.shape.header_bytes, shapes)
    seconds: dict[str, list[float]] = {"floor": [], "push": [], "push_with_checksums": []}
    for number in range(rounds + 1):
        times = {"floor": floor.copy() + max(engine._llm.collective_rpc(reload_from_shared_memory, args=where))}
        for kind in ("push", "push_with_checksums"):
            start = time.perf_counter()
            trainer.start(with_checksums=kind == "push_with_checksums")
            engine.weights.receive(number, with_checksums=kind == "push_with_checksums")
            trainer.finish()
            times[kind] = time.perf_counter() - start
        if number:  # the first round warms up
            for kind, value in times.items():
                seconds[kind].append(value)
    trainer.stop()
    for one in (floor.slots, *slots.values()):
        remove_name(one)
    streams = [PushPlan(arch, layout).stream(worker) for worker in range(workers)]
    moved = sum(bucket.num_bytes for stream in streams for bucket in stream.buckets)
    least = sum(2 * box.num_elements for stream in streams for boxes in stream.kept.values() for box in boxes)
    return {
        "model": family,
        "layout": layout_name(parallel, workers),
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
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder:
        result = measure(Path(arguments.folder), arguments.case, arguments.rounds, arguments.bucket_mib)
        print("RESULT " + json.dumps(result))
        return
    result = {"arguments": {k: str(v) for k, v in vars(arguments).items()}, "large": plan_rows(), "measured": []}
    if not arguments.plan_only:
        for case, (kind, _, _) in enumerate(MEASURED):
            with tempfile.TemporaryDirectory() as name:
                make_folder(Path(name), kind, arguments.megabytes)
                result["measured"].append(_in_a_process_of_its_own(name, case, arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    print_tables(result)


def _in_a_process_of_its_own(folder: str, case: int, arguments: argparse.Namespace) -> dict[str, Any]:
    import subprocess

    command = [sys.executable, "-m", "benchmarks.weight_push", "--folder", folder, "--case", str(case)]
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
            f"{row['model']} {row['layout']}  {row['model_mb']:.0f} MB  floor {seconds['floor']:.2f} s  "
            f"push {seconds['push']:.2f} s  "
            f"with checksums {seconds['push_with_checksums']:.2f} s  floor/push {row['floor_over_push']:.2f}  "
            f"bytes over least {row['over_least_bytes']:.4f}  growth of a rank {row['rank_growth_mib']:.0f} MiB"
        )
    for row in result["large"]:
        predicted = ", ".join(f"{link}: {value:.2f} s" for link, value in row["predicted_s"].items())
        print(
            f"{row['model']} {row['layout']}  moved {row['moved_gb']:.1f} GB ({row['over_least']:.5f} of the least)  "
            f"{row['engines']} engine(s), {row['slices']:,} slices  largest worker {row['largest_worker_gb']:.1f} GB  "
            f"ranks {row['smallest_rank_gb']:.2f} to {row['largest_rank_gb']:.2f} GB  "
            f"{predicted}"
        )
    for line in PEERS:
        print(f"published: {line}")


if __name__ == "__main__":
    main()
